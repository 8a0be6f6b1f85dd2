"""Chooses a token for every row of logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pyengine.ops import get_ops
from pyengine.sampling.draw import TokenDrawer
from pyengine.sampling.logits_processor import create_logits_processors
from pyengine.sampling.logprobs import token_logprobs
from pyengine.sampling.philox import UniformSource
from pyengine.sampling.row import Row, RowError, check_finite
from pyengine.sampling_params import SamplingParams
from pyengine.scheduler_output import TokenLogprobs


class SamplingState:
    """What the sampler knows of one sequence, kept from step to step.

    Raises:
        InvalidRequestError: naming the field that holds an id outside the vocabulary.
    """

    __slots__ = ("_processors", "greedy", "num_output_tokens", "params", "top_k", "uniforms")

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        stop_token_ids: Iterable[int],
        bad_words_token_ids: Sequence[Sequence[int]],
        vocab_size: int,
    ) -> None:
        self.params = params
        self.greedy = params.is_greedy
        self.top_k = max(params.top_k, 0)
        self.uniforms = UniformSource(seed)
        self.num_output_tokens = len(output_token_ids)
        self._processors = create_logits_processors(
            params,
            prompt_token_ids=prompt_token_ids,
            output_token_ids=output_token_ids,
            stop_token_ids=stop_token_ids,
            bad_words_token_ids=bad_words_token_ids,
            vocab_size=vocab_size,
        )

    @property
    def takes_argmax(self) -> bool:
        """Whether the token is the model's most likely one and nothing else is asked for."""
        return self.greedy and not self._processors and self.params.logprobs is None

    def processed(self, logits: Row) -> Row:
        """`logits` after masks, bias and penalties: a copy, or the row itself where nothing applies."""
        if not self._processors:
            return logits
        active = [processor for processor in self._processors if processor.is_active()]
        if active:
            logits = logits.copy()
            for processor in active:
                processor.apply(logits)
        return logits

    def append(self, token_id: int) -> None:
        """Take note of the token that was sampled."""
        self.num_output_tokens += 1
        for processor in self._processors:
            processor.append(token_id)


@dataclass(slots=True)
class SamplerOutput:
    """One entry a row."""

    token_ids: list[int]  # -1 where the row failed
    logprobs: list[TokenLogprobs | None]  # None where not asked for
    errors: dict[int, str] = field(default_factory=dict)  # row -> why it failed


class Sampler:
    """Samples rows one by one: a result depends on its own row and state, and on nothing else in the batch.

    The most likely token of each row is found first, for all rows at once and where the logits are. Rows that ask for more than
    that come to the host.
    """

    def __init__(self, vocab_size: int) -> None:
        self._drawer = TokenDrawer(vocab_size)
        self._cpu_argmax = get_ops("cpu").argmax

    def sample(
        self, logits: Tensor, states: Sequence[SamplingState], best: tuple[list[int], list[float]] | None = None
    ) -> SamplerOutput:
        """Choose a token for each row and add it to the row's state.

        Args:
            logits: fp32 [num_rows, vocab_size]; left as it is.
            states: one a row.
            best: each row's most likely token and its logit, as `Ops.argmax` finds them, where they are known.
        """
        output = SamplerOutput([-1] * len(states), [None] * len(states))
        token_ids, maxima = self._argmax(logits) if best is None else best
        others = [i for i, state in enumerate(states) if not state.takes_argmax]
        host: dict[int, Row] = {}
        if others:
            on_host = logits if logits.device.type == "cpu" else logits[others].cpu()
            rows = others if on_host is logits else range(len(others))
            host = {i: on_host[row].numpy() for i, row in zip(others, rows, strict=True)}
        for i, state in enumerate(states):
            try:
                check_finite(maxima[i])
                token_id = token_ids[i]
                if i in host:
                    token_id = self._sample_row(host[i], token_id, state)
                    if state.params.logprobs is not None:
                        output.logprobs[i] = token_logprobs(host[i], token_id, state.params.logprobs)
            except RowError as error:
                output.errors[i] = str(error)
                continue
            output.token_ids[i] = token_id
            state.append(token_id)
        return output

    def _argmax(self, logits: Tensor) -> tuple[list[int], list[float]]:
        """Each row's most likely token, the lowest id of equals, and its logit: NaN if the row has one."""
        if logits.device.type == "cpu":
            token_ids = torch.empty(len(logits), dtype=torch.int64)
            maxima = torch.empty(len(logits))
            self._cpu_argmax(token_ids, maxima, logits)
        else:
            maxima, token_ids = torch.max(logits, dim=-1)
        return token_ids.tolist(), maxima.tolist()

    def _sample_row(self, logits: Row, best: int, state: SamplingState) -> int:
        """Choose a token. `best` is the row's most likely one, and its logit is finite."""
        processed = state.processed(logits)
        if processed is not logits:
            best = int(processed.argmax())
            if processed[best] == -np.inf:
                raise RowError("allowed_token_ids, bad_words and min_tokens together leave no token to sample")
            check_finite(float(processed[best]))
        if state.greedy:
            return best
        params = state.params
        return self._drawer.draw(
            processed,
            float(processed[best]),
            temperature=params.temperature,
            top_k=state.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            uniform=state.uniforms.at(state.num_output_tokens),
        )
