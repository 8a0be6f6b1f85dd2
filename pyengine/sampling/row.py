"""One row of logits: its type, and the ways in which it can be unusable."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]  # [vocab_size], contiguous


class RowError(Exception):
    """No token, or no probability, can be taken from a row. Its request fails; the others go on."""


def check_finite(maximum: float) -> None:
    """Raise RowError unless the row's largest logit is a number. NaN anywhere in a row makes its maximum NaN."""
    if not math.isfinite(maximum):
        raise RowError(f"the model's logits are not finite (largest: {maximum})")
