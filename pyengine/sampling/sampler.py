"""Chooses a token for every row of logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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

    Rows on a GPU that take the argmax are done there; other rows come to the host.
    """

    def __init__(self, vocab_size: int) -> None:
        self._drawer = TokenDrawer(vocab_size)

    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> SamplerOutput:
        """Choose a token for each row and add it to the row's state.

        Args:
            logits: fp32 [num_rows, vocab_size]; left as it is.
            states: one a row.
        """
        output = SamplerOutput([-1] * len(states), [None] * len(states))
        if logits.device.type == "cpu":
            self._sample_rows(logits.numpy(), range(len(states)), states, output)
            return output
        on_device = [i for i, state in enumerate(states) if state.takes_argmax]
        on_host = [i for i, state in enumerate(states) if not state.takes_argmax]
        if on_device:
            _take_argmax(logits if not on_host else logits[on_device], on_device, states, output)
        if on_host:
            self._sample_rows(logits[on_host].cpu().numpy(), on_host, states, output)
        return output

    def _sample_rows(
        self, logits: npt.NDArray[np.float32], rows: Sequence[int], states: Sequence[SamplingState], output: SamplerOutput
    ) -> None:
        """Sample `logits` [len(rows), vocab_size], which belong to the batch's `rows`."""
        for row_logits, row in zip(logits, rows, strict=True):
            state = states[row]
            try:
                token_id = self._sample_row(row_logits, state)
                if state.params.logprobs is not None:
                    output.logprobs[row] = token_logprobs(row_logits, token_id, state.params.logprobs)
            except RowError as error:
                output.errors[row] = str(error)
                continue
            output.token_ids[row] = token_id
            state.append(token_id)

    def _sample_row(self, logits: Row, state: SamplingState) -> int:
        best = int(logits.argmax())  # the lowest id of equals; the first NaN if there is one
        check_finite(float(logits[best]))
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


def _take_argmax(logits: Tensor, rows: Sequence[int], states: Sequence[SamplingState], output: SamplerOutput) -> None:
    """Greedy rows on their own device; one transfer for all of them. `logits` is [len(rows), vocab_size]."""
    maxima, token_ids = torch.max(logits, dim=-1)
    for row, maximum, token_id in zip(rows, maxima.tolist(), token_ids.tolist(), strict=True):
        try:
            check_finite(maximum)
        except RowError as error:
            output.errors[row] = str(error)
            continue
        output.token_ids[row] = token_id
        states[row].append(token_id)
