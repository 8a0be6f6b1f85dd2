"""Quantises tiny Hugging Face folders as GPTQ, AWQ, FP8 and compressed-tensors do, with the plain folder that each means."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import edit_config
from torch import Tensor

WEIGHTS = "model.safetensors"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Matrix:
    """The tensors of one module, by the ends of their names, and what they mean: fp32 [out, in]."""

    tensors: dict[str, Tensor]
    values: Tensor


@dataclass(frozen=True)
class Format:
    """How a folder's matrices are quantised.

    Args:
        config: quantization_config.
        layout: gptq, awq, packed, fp8 or int8.
        symmetric: 4 bits: every zero is 8.
        act_order: 4 bits: groups are of features here and there.
        zero_offset: gptq: what is added to a stored zero.
        per_row: FP8, INT8: each row has a scale.
    """

    config: dict[str, Any]
    layout: str
    group_size: int = 32
    symmetric: bool = False
    act_order: bool = False
    zero_offset: int = 1
    per_row: bool = False

    def quantize(self, weight: Tensor) -> Matrix:
        """weight fp32 [out, in]."""
        if self.layout == "fp8":
            return fp8_matrix(weight, self.per_row)
        if self.layout == "int8":
            return int8_matrix(weight, self.per_row)
        return self._four_bits(weight)

    def _four_bits(self, weight: Tensor) -> Matrix:
        out_features, in_features = weight.shape
        group = in_features if self.group_size == -1 else self.group_size
        index = torch.arange(in_features) // group  # [in], the group of each feature
        if self.act_order:  # the same of every matrix with one input, as calibration makes it
            index = index[torch.randperm(in_features, generator=torch.Generator().manual_seed(in_features))]
        codes = torch.empty(out_features, in_features, dtype=torch.int64)
        scales = torch.empty(in_features // group, out_features, dtype=torch.float16)
        zeros = torch.empty(in_features // group, out_features, dtype=torch.int64)
        for g in range(in_features // group):
            part = weight[:, index == g]
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = (part.abs().amax(1) / 7.5 if self.symmetric else (high - low) / 15).half()
            zero = torch.full_like(low, 8) if self.symmetric else (-low / scale.float()).round().clamp(0, 15)
            codes[:, index == g] = (part / scale.float()[:, None] + zero[:, None]).round().clamp(0, 15).long()
            scales[g], zeros[g] = scale, zero.long()
        if self.layout == "gptq" and self.zero_offset:
            zeros = zeros.clamp(min=1)  # zero - 1 is stored, in 4 bits
        values = (codes - zeros.T[:, index]).float() * scales.float().T[:, index]
        return Matrix(self._layout_of(codes, scales, zeros, index), values)

    def _layout_of(self, codes: Tensor, scales: Tensor, zeros: Tensor, index: Tensor) -> dict[str, Tensor]:
        """codes [out, in], scales and zeros [groups, out], index [in]."""
        if self.layout == "gptq":
            words, stored = pack_words(codes.T, 0), pack_words(zeros - self.zero_offset, 1)
            return {"qweight": words, "scales": scales, "qzeros": stored, "g_idx": index.int()}
        if self.layout == "awq":
            return {
                "qweight": pack_words(codes.T, 1, _AWQ_ORDER),
                "scales": scales,
                "qzeros": pack_words(zeros, 1, _AWQ_ORDER),
            }
        tensors = {
            "weight_packed": pack_words(codes, 1),
            "weight_scale": scales.T.contiguous(),
            "weight_shape": torch.tensor(codes.shape),
        }
        if not self.symmetric:
            tensors["weight_zero_point"] = pack_words(zeros.T, 0)
        if self.act_order:
            tensors["weight_g_idx"] = index.int()
        return tensors


def pack_words(values: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight 4-bit values along `dim` to one int32: position i of a word, from the lowest bits, holds value order[i]."""
    moved = values.movedim(dim, -1).unflatten(-1, (-1, 8))
    words = torch.zeros(moved.shape[:-1], dtype=torch.int64)
    for position, column in enumerate(order):
        words += moved[..., column] << 4 * position
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).movedim(-1, dim).contiguous()


def fp8_matrix(weight: Tensor, per_row: bool) -> Matrix:
    largest = weight.abs().amax(1, keepdim=True) if per_row else weight.abs().amax().reshape(1)
    scale = largest / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return Matrix({"weight": codes, "weight_scale": scale}, codes.float() * scale)


def int8_matrix(weight: Tensor, per_row: bool) -> Matrix:
    largest = weight.abs().amax(1, keepdim=True) if per_row else weight.abs().amax().reshape(1)
    scale = largest / 127
    codes = (weight / scale).round().clamp(-127, 127)
    return Matrix({"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale)


def write_quantized(folder: Path, form: Format, quantized: Path, plain: Path, *, keep: tuple[str, ...] = ("lm_head",)) -> None:
    """Two copies of a folder: one with its projections quantised, one with the values that those have.

    Args:
        folder: plain, in one file.
        keep: parts of names of matrices that stay plain.
    """
    for target in (quantized, plain):
        target.mkdir()
        for file in folder.iterdir():
            if file.name != WEIGHTS:
                (target / file.name).write_bytes(file.read_bytes())
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, weight in load_file(folder / WEIGHTS).items():
        module = name.removesuffix(".weight")
        if name == module or module.rpartition(".")[2] not in (*PROJECTIONS, "lm_head") or any(part in name for part in keep):
            stored[name] = meant[name] = weight
            continue
        matrix = form.quantize(weight.float())
        stored |= {f"{module}.{part}": tensor.contiguous() for part, tensor in matrix.tensors.items()}
        meant[name] = matrix.values.contiguous()
    save_file(stored, quantized / WEIGHTS, metadata={"format": "pt"})
    save_file(meant, plain / WEIGHTS, metadata={"format": "pt"})
    edit_config(quantized, quantization_config=form.config)


def _gptq(group_size: int = 32, desc_act: bool = False, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": desc_act, "sym": False, **more}


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """quantization_config as compressed-tensors writes it."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _weights(bits: int, kind: str, strategy: str, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, "dynamic": False, **more}


def _tokens(kind: str) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": "token", "symmetric": True, "dynamic": True}


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_PACKED = "pack-quantized"

FORMATS = {
    "gptq": Format(_gptq(), "gptq"),
    "gptq-sym": Format(_gptq(64), "gptq", 64, symmetric=True),
    "gptq-rows": Format(_gptq(-1), "gptq", -1),
    "gptq-act-order": Format(_gptq(desc_act=True), "gptq", act_order=True),
    "gptq-v2": Format(_gptq(checkpoint_format="gptq_v2"), "gptq", zero_offset=0),
    "awq": Format(_AWQ, "awq", 64),
    "fp8": Format(_FP8, "fp8"),
    "fp8-channel": Format(
        compressed("float-quantized", _weights(8, "float", "channel"), _tokens("float")), "fp8", per_row=True
    ),
    "int8": Format(compressed("int-quantized", _weights(8, "int", "channel"), _tokens("int")), "int8", per_row=True),
    "int8-tensor": Format(compressed("int-quantized", _weights(8, "int", "tensor"), _tokens("int")), "int8"),
    "packed": Format(compressed(_PACKED, _weights(4, "int", "group", group_size=64)), "packed", 64, symmetric=True),
    "packed-rows": Format(compressed(_PACKED, _weights(4, "int", "channel")), "packed", -1, symmetric=True),
    "packed-zeros": Format(compressed(_PACKED, _weights(4, "int", "group", False, group_size=32)), "packed"),
    "packed-act-order": Format(
        compressed(_PACKED, _weights(4, "int", "group", False, group_size=32, actorder="group")), "packed", act_order=True
    ),
}
