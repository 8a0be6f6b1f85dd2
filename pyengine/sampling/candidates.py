"""The most likely tokens of a row, found without sorting it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pyengine.sampling.row import Row

CHUNK = 256  # tokens in one chunk of a row


def top_candidates(logits: Row, k: int) -> npt.NDArray[np.intp]:
    """Every token whose logit is at least the k-th largest, and possibly more, but no token of logit -inf.

    At least k of a row's values are no less than the k-th largest of its chunks' maxima. That maximum is therefore a lower
    bound of the k-th largest value, and costs one pass and a selection among few numbers.

    Args:
        logits: [vocab_size], contiguous, no NaN.
        k: 1 or more.

    Returns:
        token ids, ascending.
    """
    vocab_size = logits.shape[0]
    num_chunks = vocab_size // CHUNK
    if 2 * k <= num_chunks:
        maxima = logits[: num_chunks * CHUNK].reshape(num_chunks, CHUNK).max(axis=1)
        bound = np.partition(maxima, num_chunks - k)[num_chunks - k]
    elif k < vocab_size:
        bound = np.partition(logits, vocab_size - k)[vocab_size - k]
    else:
        bound = np.float32(-np.inf)
    if bound == -np.inf:
        return np.flatnonzero(logits > bound)
    return np.flatnonzero(logits >= bound)


def by_likelihood(logits: Row) -> npt.NDArray[np.intp]:
    """Positions of `logits` from the most likely to the least; ties go to the lower position."""
    return np.argsort(-logits, kind="stable")
