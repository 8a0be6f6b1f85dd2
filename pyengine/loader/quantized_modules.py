"""Puts the tensors of a quantised matrix together: `qweight`, `scales`, ... of a module become one `CheckpointWeight`.

To the rest of the loader such a matrix is one tensor, `<module>.weight`, of the shape that its values have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pyengine.errors import ModelLoadError
from pyengine.layers.weights import CheckpointWeight
from pyengine.loader.base import TensorInfo
from pyengine.loader.four_bit import awq_words, gptq_codes, gptq_weight, gptq_zeros, group_order
from pyengine.loader.quantization_config import Layout, QuantizationConfig

PLAIN_DTYPES = ("F32", "BF16", "F16")
_INTEGERS = ("I32", "I64")
_SYMMETRIC_ZEROS = 0x77777777  # GPTQ's word of eight zeros of 8, where a checkpoint stores none
_ROW_MULTIPLE, _COLUMN_MULTIPLE = 8, 16  # of FP8 and INT8 matrices


class _Part(NamedTuple):
    dtypes: tuple[str, ...]
    required: bool = True
    kept: bool = True  # False: the values are of no use here


_SCALES, _CODES, _OPTIONAL = _Part(PLAIN_DTYPES), _Part(("I32",)), _Part(_INTEGERS, required=False)
#: The tensors of a module, the one with the codes first.
_PARTS: dict[Layout, dict[str, _Part]] = {
    "gptq": {"qweight": _CODES, "scales": _SCALES, "qzeros": _CODES, "g_idx": _OPTIONAL},
    "awq": {"qweight": _CODES, "scales": _SCALES, "qzeros": _CODES},
    "packed": {
        "weight_packed": _CODES,
        "weight_scale": _SCALES,
        "weight_zero_point": _Part(("I32",), required=False),
        "weight_g_idx": _OPTIONAL,
        "weight_shape": _Part(_INTEGERS, required=False, kept=False),
    },
    # A scale of inputs is for kernels that round them to FP8.
    "fp8": {
        "weight": _Part(("F8_E4M3",)),
        "weight_scale": _SCALES,
        "input_scale": _Part(PLAIN_DTYPES, required=False, kept=False),
    },
    "int8": {"weight": _Part(("I8",)), "weight_scale": _SCALES},
}


class QuantizedModules:
    """The quantised matrices of a folder.

    Args:
        config: what the folder says of them.
        infos: of every tensor in its files.

    Raises:
        ModelLoadError: naming file and tensor: one that is missing, of a wrong type or shape, or quantised or plain against
            what the configuration says.
    """

    def __init__(self, config: QuantizationConfig, infos: Mapping[str, TensorInfo]) -> None:
        self._config = config
        self._layout = _PARTS[config.layout]
        self._modules: dict[str, dict[str, TensorInfo]] = {}  # by module: its tensors' infos, by part
        for name, info in infos.items():
            module, _, part = name.rpartition(".")
            if part in self._layout and (part != "weight" or info.dtype not in PLAIN_DTYPES or f"{name}_scale" in infos):
                self._modules.setdefault(module, {})[part] = info
        #: As the rest of the loader sees them; plain tensors included.
        self.infos: dict[str, TensorInfo] = {}
        for name, info in infos.items():
            module, _, part = name.rpartition(".")
            if part not in self._modules.get(module, {}):
                self._check_plain(name, info)
                self.infos[name] = info
            elif f"{module}.weight" not in self.infos:
                self.infos[f"{module}.weight"] = self._check_module(module)

    def read(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor | CheckpointWeight]]:
        """Every tensor of the files -> plain ones as they come, matrices when their last part has come.

        Raises:
            ModelLoadError: naming file and tensor, where values have no meaning.
        """
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors:
            module, _, part = name.rpartition(".")
            parts = self._modules.get(module, {})
            if part not in parts:
                yield name, tensor
                continue
            waiting.setdefault(module, {})[part] = tensor
            if len(waiting[module]) == len(parts):
                yield f"{module}.weight", self._build(module, waiting.pop(module))

    def _fail(self, module: str, part: str, message: str) -> ModelLoadError:
        infos = self._modules[module]
        return ModelLoadError(f"{(infos.get(part) or next(iter(infos.values()))).file}: tensor {module}.{part} {message}")

    def _check_plain(self, name: str, info: TensorInfo) -> None:
        """A tensor that is not quantised may not be, and has a type that can be used."""
        config, (module, _, part) = self._config, name.rpartition(".")
        if info.dtype not in PLAIN_DTYPES:
            raise ModelLoadError(
                f"{info.file}: tensor {name} has type {info.dtype}, which is not supported; {', '.join(PLAIN_DTYPES)} are"
            )
        is_projection = part == "weight" and module.startswith("model.layers.") and len(info.shape) == 2
        if is_projection and not config.excludes(module):
            raise ModelLoadError(
                f"{info.file}: tensor {name} is plain ({info.dtype}), but {config.excluded_key} does not except {module}"
                f" from {config.method}"
            )

    def _check_module(self, module: str) -> TensorInfo:
        """A quantised matrix from the headers of its parts."""
        config, infos = self._config, self._modules[module]
        codes = next(iter(self._layout))
        for part, wanted in self._layout.items():
            if part in infos:
                if infos[part].dtype not in wanted.dtypes:
                    known = " or ".join(wanted.dtypes)
                    raise self._fail(module, part, f"has type {infos[part].dtype}; in a {config.method} matrix it is {known}")
            elif wanted.required or self._is_wanted(part):
                raise self._fail(module, part, f"is missing, though {module} is quantised")
        if config.excludes(module):
            key = config.excluded_key if config.included is None else "modules_in_block_to_quantize"
            raise self._fail(module, codes, f"is quantised, though {key} says that {module} is plain")
        if module.endswith("embed_tokens"):
            raise self._fail(module, codes, "is quantised, which is not supported of embeddings")
        shape = self._check_shapes(module)
        return TensorInfo(shape, config.method, infos[codes].file, f"{module}.{codes}")

    def _is_wanted(self, part: str) -> bool:
        if part in ("g_idx", "weight_g_idx"):
            return self._config.act_order
        return part == "weight_zero_point" and self._config.has_zeros

    def _group_size(self, in_features: int) -> int:
        return in_features if self._config.group_size == -1 else self._config.group_size

    def _check_shapes(self, module: str) -> tuple[int, int]:
        """(out, in) of the values."""
        layout, infos = self._config.layout, self._modules[module]
        codes = next(iter(self._layout))
        if len(infos[codes].shape) != 2 or 0 in infos[codes].shape:
            raise self._fail(module, codes, f"has shape {list(infos[codes].shape)}, which is not a matrix")
        rows, columns = infos[codes].shape
        if layout in ("fp8", "int8"):
            if rows % _ROW_MULTIPLE or columns % _COLUMN_MULTIPLE:
                multiples = [_ROW_MULTIPLE, _COLUMN_MULTIPLE]
                raise self._fail(module, codes, f"has shape {[rows, columns]}; kernels take multiples of {multiples}")
            self._expect(module, "weight_scale", [(), (1,), (1, 1), (rows,), (rows, 1)])
            return rows, columns
        shapes = {"gptq": (columns, 8 * rows), "awq": (8 * columns, rows), "packed": (rows, 8 * columns)}
        out_features, in_features = shapes[layout]
        group = self._group_size(in_features)
        if in_features % group or group % 32 or out_features % 8:
            raise self._fail(
                module,
                codes,
                f"is of {out_features} rows of {in_features} values; kernels take multiples of 8 and of group_size {group},"
                " which must be one of 32",
            )
        groups = in_features // group
        if layout == "packed":
            self._expect(module, "weight_scale", [(out_features, groups)])
            self._expect(module, "weight_zero_point", [(out_features // 8, groups)])
            self._expect(module, "weight_g_idx", [(in_features,)])
        else:
            self._expect(module, "scales", [(groups, out_features)])
            self._expect(module, "qzeros", [(groups, out_features // 8)])
            self._expect(module, "g_idx", [(in_features,)])
        return out_features, in_features

    def _expect(self, module: str, part: str, shapes: list[tuple[int, ...]]) -> None:
        info = self._modules[module].get(part)
        if info is not None and info.shape not in shapes:
            codes = next(iter(self._layout))
            raise self._fail(
                module, part, f"has shape {list(info.shape)}, not {list(shapes[-1])} as {codes} and the configuration have it"
            )

    def _build(self, module: str, parts: dict[str, Tensor]) -> CheckpointWeight:
        layout = self._config.layout
        scale_part = "scales" if "scales" in parts else "weight_scale"
        scales = parts[scale_part]
        if not scales.isfinite().all():
            raise self._fail(module, scale_part, "holds NaN or an infinity")
        if layout == "fp8" or layout == "int8":
            weight = parts["weight"]
            if layout == "fp8" and (weight.view(torch.uint8) & 0x7F == 0x7F).any():
                raise self._fail(module, "weight", "holds NaN")
            shape = (weight.shape[0], weight.shape[1])
            return CheckpointWeight(layout, weight, scales.float().reshape(-1), None, 0, None, shape)
        return self._build_four_bits(module, parts)

    def _build_four_bits(self, module: str, parts: dict[str, Tensor]) -> CheckpointWeight:
        if self._config.layout == "awq":
            qweight, scales, qzeros = parts["qweight"], parts["scales"], parts["qzeros"]
            shape = (8 * qweight.shape[1], qweight.shape[0])
            return CheckpointWeight("awq", qweight, scales, qzeros, self._group_size(shape[1]), None, shape)
        if self._config.layout == "gptq":
            qweight, scales, qzeros, offset = parts["qweight"], parts["scales"], parts["qzeros"], self._config.zero_offset
            index = "g_idx"
        else:  # GPTQ's matrices, transposed: weight_packed int32 [out, in / 8], weight_zero_point int32 [out / 8, groups]
            qweight, scales = parts["weight_packed"].T.contiguous(), parts["weight_scale"].T.contiguous()
            index = "weight_g_idx"
            if "weight_zero_point" in parts:
                qzeros, offset = parts["weight_zero_point"].T.contiguous(), 0
            else:
                qzeros = torch.full((len(scales), scales.shape[1] // 8), _SYMMETRIC_ZEROS, dtype=torch.int32)
                offset = 1
        shape = (qweight.shape[1], 8 * qweight.shape[0])
        group_size = self._group_size(shape[1])
        order = None
        if index in parts:
            try:
                order = group_order(parts[index], group_size)
            except ValueError as error:
                raise self._fail(module, index, str(error)) from error
        if offset == 1 and order is None:
            return CheckpointWeight("gptq", qweight, scales, qzeros, group_size, None, shape)
        codes = gptq_codes(qweight)
        codes = codes if order is None else codes[order]
        if offset == 1:
            return CheckpointWeight("gptq", gptq_weight(codes), scales, qzeros, group_size, order, shape)
        # A zero of 0 has no word in GPTQ's own layout, which stores zero - 1; AWQ's has.
        zeros = awq_words(gptq_zeros(qzeros, 0))
        return CheckpointWeight("awq", awq_words(codes), scales, zeros, group_size, order, shape)
