"""Four-bit values in the 32-bit words of GPTQ and AWQ checkpoints: out of them, into them, and from one layout to the other.

Codes are uint8 [in, out], one of 0 to 15 for each weight; zeros uint8 [groups, out]. A weight is (code - zero) * scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyengine.layers.weights import CheckpointWeight

#: Columns of a word of AWQ, from its lowest bits (`kAwqOrder` in csrc/quantization/params.h).
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def gptq_codes(qweight: Tensor) -> Tensor:
    """int32 [in / 8, out], the lowest k in the lowest bits -> uint8 [in, out], its columns dense."""
    eights = _values(qweight).view(torch.int64).squeeze(2)  # [in / 8, out]: moved eight at a time
    return eights.T.contiguous().view(torch.uint8).T


def gptq_weight(codes: Tensor) -> Tensor:
    """uint8 [in, out] -> int32 [in / 8, out]."""
    return _words(codes.unflatten(0, (-1, 8)).transpose(1, 2))


def gptq_zeros(qzeros: Tensor, offset: int) -> Tensor:
    """int32 [groups, out / 8], the lowest column in the lowest bits, and what is to be added -> uint8 [groups, out]."""
    return _values(qzeros).flatten(1) + offset


def awq_codes(words: Tensor) -> Tensor:
    """int32 [rows, out / 8] -> uint8 [rows, out], its columns dense: AWQ's codes, or its zeros."""
    columns = words.T.contiguous()  # [out / 8, rows]
    values = [(columns >> 4 * _AWQ_ORDER.index(column) & 15).to(torch.uint8) for column in range(8)]
    return torch.stack(values, 1).flatten(0, 1).T


def awq_words(codes: Tensor) -> Tensor:
    """uint8 [rows, out] -> int32 [rows, out / 8]."""
    return _words(codes.unflatten(1, (-1, 8))[..., _AWQ_ORDER])


def codes_and_zeros(weight: CheckpointWeight) -> tuple[Tensor, Tensor]:
    """Of a 4-bit matrix: uint8 [in, out], its rows in the order of groups, and uint8 [groups, out], of 0 to 16."""
    assert weight.zeros is not None
    if weight.kind == "gptq":
        return gptq_codes(weight.weight), gptq_zeros(weight.zeros, 1)
    return awq_codes(weight.weight), awq_codes(weight.zeros)


def group_order(g_idx: Tensor, group_size: int) -> Tensor | None:
    """The order in which features of the input are to be taken so that those of a group are neighbours, groups ascending.

    Args:
        g_idx: integers [in], the group of each feature.

    Returns:
        int64 [in]; None: they are in that order.

    Raises:
        ValueError: a group does not have `group_size` features.
    """
    wanted = torch.arange(len(g_idx)) // group_size
    order = g_idx.long().argsort(stable=True)
    if not torch.equal(g_idx.long()[order], wanted):
        raise ValueError(f"does not give each group {group_size} features")
    return None if torch.equal(g_idx.long(), wanted) else order


def _values(words: Tensor) -> Tensor:
    """int32 [rows, columns] -> uint8 [rows, columns, 8], the lowest bits first. A word's lowest byte is its first."""
    packed = words.contiguous().view(torch.uint8).unflatten(1, (-1, 4))
    return torch.stack((packed & 15, packed >> 4), -1).flatten(2)


def _words(values: Tensor) -> Tensor:
    """uint8 [rows, columns, 8] -> int32 [rows, columns]."""
    return (values[..., 0::2] | values[..., 1::2] << 4).contiguous().view(torch.int32).squeeze(-1).contiguous()
