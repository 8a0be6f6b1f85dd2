"""The sampling rules again, slowly and in float64, written from the rules and not from the code."""

from __future__ import annotations

import numpy as np

from pyengine.sampling_params import SamplingParams


def processed_logits(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: list[int],
    output: list[int],
    stop_token_ids: frozenset[int] = frozenset(),
    bad_words: list[list[int]] | None = None,
) -> np.ndarray:
    """float64 [vocab_size] after masks, bias and penalties."""
    x = logits.astype(np.float64)
    vocab = range(len(x))
    if params.allowed_token_ids is not None:
        x = np.array([x[i] if i in params.allowed_token_ids else -np.inf for i in vocab])
    for word in bad_words or []:
        if output[len(output) - (len(word) - 1) :] == word[:-1] and len(output) >= len(word) - 1:
            x[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        for i in stop_token_ids:
            x[i] = -np.inf
    for i, bias in params.logit_bias.items():
        x[i] += min(100.0, max(-100.0, bias))
    for i in vocab:
        count = output.count(i)
        if (i in prompt or count) and params.repetition_penalty != 1:
            x[i] = x[i] / params.repetition_penalty if x[i] > 0 else x[i] * params.repetition_penalty
        x[i] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return x


def probabilities(x: np.ndarray, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """float64 [vocab_size], the distribution that is drawn from. `x` are processed logits."""
    scaled = x / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    p[p < min_p * p.max()] = 0
    if 0 < top_k < len(p):
        kth = np.sort(x)[-top_k]
        p[x < kth] = 0
    if top_p < 1:
        p /= p.sum()
        before = 0.0
        for i in sorted(range(len(p)), key=lambda i: (-x[i], i)):
            keep = before < top_p
            before += p[i]
            if not keep:
                p[i] = 0
    return p / p.sum()


def pick(p: np.ndarray, uniform: float) -> int:
    """The token under `uniform` in the cumulative distribution over ids in ascending order."""
    cumulative = np.cumsum(p)
    return int(np.flatnonzero((cumulative > uniform * cumulative[-1]) & (p > 0))[0])


def acceptable_tokens(x: np.ndarray, uniform: float, params: SamplingParams, tolerance: float = 3e-6) -> set[int]:
    """Every token that an fp32 implementation may draw: `uniform` and the cuts may be off by `tolerance`."""
    tokens = set()
    for du in (-tolerance, 0.0, tolerance):
        u = min(max(uniform + du, 0.0), 1 - 1e-9)
        for cut in (1 - tolerance, 1.0, 1 + tolerance):
            p = probabilities(
                x,
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p * cut if params.top_p < 1 else 1.0,
                min_p=min(params.min_p * cut, 1.0),
            )
            tokens.add(pick(p, u))
    return tokens


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())
