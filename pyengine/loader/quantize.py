"""Quantises plain weights at load: `--quantization int8` and `int4`. The result is the blocks that GGUF files hold.

int8 is Q8_0 everywhere. int4 is Q4_1 in the layers; embeddings and output projection, to which a model is most sensitive, are
Q8_0. A block is 32 neighbouring values of a row. Only matrices are quantised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyengine.errors import ModelLoadError
from pyengine.layers.weights import QuantizedTensor

#: What `--quantization` may ask for besides the checkpoint's own form.
SCHEMES = ("int8", "int4")

_BLOCK = 32
_CHUNK = 2**18  # values at a time: temporaries stay in the processor's cache
#: Shares of a block's range that are tried for its 16 steps: cutting an outlier may serve the other 31 values.
_SHARES = (1.0, 0.86)
_SENSITIVE = ("model.embed_tokens.weight", "lm_head.weight")


def quantize(name: str, weight: Tensor, scheme: str) -> QuantizedTensor:
    """A matrix as blocks that the CPU kernels multiply with.

    Args:
        name: Hugging Face's name of the tensor.
        weight: [out, in], of any floating type.
        scheme: int8 or int4.

    Raises:
        ModelLoadError: naming the tensor, where its rows are not whole blocks or its values have no finite fp16 scale.
    """
    rows, columns = weight.shape
    if columns % _BLOCK:
        raise ModelLoadError(f"tensor {name} has rows of {columns} values, but {scheme} takes multiples of {_BLOCK}")
    format = "Q4_1" if scheme == "int4" and name not in _SENSITIVE else "Q8_0"
    make_blocks = _q4_1_blocks if format == "Q4_1" else _q8_0_blocks
    step = max(1, _CHUNK // columns)
    parts = []
    for start in range(0, rows, step):
        blocks = make_blocks(weight[start : start + step].float().unflatten(1, (-1, _BLOCK)))  # [part, in / 32, block bytes]
        if blocks is None:
            raise ModelLoadError(f"tensor {name} holds NaN, an infinity or values too large for {scheme}")
        parts.append(blocks.flatten(1))
    return QuantizedTensor(torch.cat(parts), format, (rows, columns))


def _q8_0_blocks(x: Tensor) -> Tensor | None:
    """x [rows, blocks, 32] fp32 -> uint8 [rows, blocks, 34]; None without a finite scale.

    value = scale * q: scale = max |x| / 127 as fp16, q = x / scale to the nearest integer, ties to even.
    """
    scale = (x.abs().amax(-1, keepdim=True) / 127).half()
    if not scale.isfinite().all():
        return None
    q = _integers(x, scale.float(), -127, 127).to(torch.int8)
    return torch.cat([scale.view(torch.uint8), q.view(torch.uint8)], -1)


def _q4_1_blocks(x: Tensor) -> Tensor | None:
    """x [rows, blocks, 32] fp32 -> uint8 [rows, blocks, 20]; None without a finite scale.

    value = scale * q + minimum, q of 0 to 15, both factors fp16. For each of a few shares of the block's range, values are
    rounded to 16 even steps over it, the factors are fitted to those integers by least squares, and the values are rounded
    again with the fitted factors. The result with the smallest squared error is kept; the whole range, unfitted, is among them.
    """
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    best_scale, best_minimum = ((high - low) / 15).half(), low.half()
    if not (best_scale.isfinite().all() and best_minimum.isfinite().all()):
        return None
    best_q = _integers(x - best_minimum.float(), best_scale.float(), 0, 15)
    best_error = _squared_error(x, best_q, best_scale, best_minimum)
    for share in _SHARES:
        start, width = low + (high - low) * ((1 - share) / 2), (high - low) * share
        scale, minimum = _fit(x, _integers(x - start, width / 15, 0, 15))
        q = _integers(x - minimum.float(), scale.float(), 0, 15)
        error = _squared_error(x, q, scale, minimum)
        better = error < best_error  # never where a factor is not finite
        best_q, best_error = torch.where(better, q, best_q), torch.where(better, error, best_error)
        best_scale, best_minimum = torch.where(better, scale, best_scale), torch.where(better, minimum, best_minimum)
    q = best_q.to(torch.uint8)
    return torch.cat([best_scale.view(torch.uint8), best_minimum.view(torch.uint8), q[..., :16] | q[..., 16:] << 4], -1)


def _integers(x: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    """x / scale rounded to nearest, ties to even, and clipped; 0 where the scale is."""
    return (x / torch.where(scale == 0, torch.inf, scale)).round_().clamp_(low, high)


def _fit(x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """fp16 scale and minimum [rows, blocks, 1] for which scale * q + minimum is closest to x, by least squares."""
    x_mean, q_mean = x.mean(-1, keepdim=True), q.mean(-1, keepdim=True)
    centred = q - q_mean
    spread = centred.square().sum(-1, keepdim=True)
    scale = ((x - x_mean) * centred).sum(-1, keepdim=True) / torch.where(spread == 0, torch.inf, spread)
    return scale.half(), (x_mean - scale * q_mean).half()


def _squared_error(x: Tensor, q: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """[rows, blocks, 1]."""
    return (q * scale.float() + minimum.float() - x).square_().sum(-1, keepdim=True)
