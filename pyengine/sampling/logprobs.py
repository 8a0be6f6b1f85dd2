"""Log-probabilities of one row of logits."""

from __future__ import annotations

import math

import numpy as np

from pyengine.sampling.candidates import by_likelihood, top_candidates
from pyengine.sampling.row import Row, check_finite
from pyengine.scheduler_output import TokenLogprobs


def token_logprobs(logits: Row, token_id: int, num_logprobs: int) -> TokenLogprobs:
    """Log-probability and rank of the chosen token, then of the `num_logprobs` most likely ones without the chosen one.

    Ranks count from 1; of equally likely tokens the one with the lower id comes first.

    Args:
        logits: [vocab_size], contiguous, as the model gave them.
        token_id: the chosen token.
        num_logprobs: 0 or more.

    Raises:
        RowError: where the logits are not finite.
    """
    maximum = logits.max()
    check_finite(float(maximum))
    log_sum = float(maximum) + math.log(float(np.exp(logits - maximum).sum(dtype=np.float64)))
    chosen = logits[token_id]
    rank = 1 + int(np.count_nonzero(logits > chosen)) + int(np.count_nonzero(logits[:token_id] == chosen))
    result = TokenLogprobs([token_id], [float(chosen) - log_sum], [rank])
    if num_logprobs:
        candidates = top_candidates(logits, num_logprobs)
        best = candidates[by_likelihood(logits[candidates])[:num_logprobs]]
        for i, (other, value) in enumerate(zip(best.tolist(), logits[best].tolist(), strict=True)):
            if other != token_id:
                result.token_ids.append(other)
                result.logprobs.append(value - log_sum)
                result.ranks.append(i + 1)
    return result
