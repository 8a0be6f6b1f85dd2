"""Between the messages of `vllm.grpc.engine` and the engine's types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from pyengine.errors import InvalidRequestError, UnsupportedError
from pyengine.inputs import Prompt, TextPrompt, TokensPrompt
from pyengine.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from pyengine.sampling_params import RequestOutputKind, SamplingParams
from pyengine.server import headers
from pyengine.server.frontend import GenerationCall

#: The engine's names of what a request of this API calls otherwise.
API_FIELDS = {"prompt": "text", "prompt_token_ids": "tokenized.input_ids"}
#: Parts of a GenerateRequest that this engine has nothing for.
_UNSUPPORTED = ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "media_refs")
#: Sampling fields that cannot tell "unset" from 0, which no request can mean: 0 is the default.
_ZERO_IS_DEFAULT = ("top_p", "repetition_penalty", "n")
_SAME_NAME = (
    *("top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens"),
    *("skip_special_tokens", "spaces_between_special_tokens", "ignore_eos", "include_stop_str_in_output"),
)
_OPTIONAL = ("temperature", "logprobs", "prompt_logprobs", "seed")


def generation_call(message: pb.GenerateRequest, metadata: Iterable[tuple[str, str | bytes]]) -> GenerationCall:
    """A GenerateRequest and its metadata, checked as far as that is possible without the model.

    Raises:
        InvalidRequestError, UnsupportedError: naming the field.
    """
    for name in _UNSUPPORTED:
        if message.HasField(name):
            raise UnsupportedError(name)
    if message.extra_mm_inputs:
        raise UnsupportedError("extra_mm_inputs")
    if message.data_parallel_rank:
        raise InvalidRequestError("data_parallel_rank", f"this server has rank 0 alone, got {message.data_parallel_rank}")
    sent = {key: value for key, value in metadata if isinstance(value, str)}
    kind = RequestOutputKind.DELTA if message.stream else RequestOutputKind.FINAL_ONLY
    return GenerationCall(
        request_id=headers.request_id(message.request_id or None, sent),
        prompt=_prompt(message),
        params=sampling_params(message.sampling_params, kind),
        priority=headers.priority(None, sent),
        cache_salt=headers.cache_salt(None, sent),
        tenant=headers.tenant(sent),
        trace_context=headers.trace_context(sent),
        echo=False,
    )


def _prompt(message: pb.GenerateRequest) -> Prompt:
    kind = message.WhichOneof("input")
    if kind == "text":
        return TextPrompt(message.text)
    if kind == "tokenized":
        if not message.tokenized.input_ids:
            raise InvalidRequestError("tokenized.input_ids", "must not be empty")
        return TokensPrompt(list(message.tokenized.input_ids))
    raise InvalidRequestError("input", "one of tokenized, text must be set")


def sampling_params(message: pb.SamplingParams, kind: RequestOutputKind) -> SamplingParams:
    """The engine's form of a request's parameters. Unset: temperature, top_p, repetition_penalty and n 1; max_tokens up to the
    model's limit.

    Raises:
        InvalidRequestError, UnsupportedError: naming the field.
    """
    constraint = message.WhichOneof("constraint")
    if constraint is not None:
        raise UnsupportedError(constraint, "constrained output is not supported")
    if message.HasField("truncate_prompt_tokens"):
        raise UnsupportedError("truncate_prompt_tokens")
    values: dict[str, Any] = {name: getattr(message, name) for name in _SAME_NAME}
    values |= {name: getattr(message, name) for name in _ZERO_IS_DEFAULT if getattr(message, name) != 0}
    values |= {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    return SamplingParams(
        **values,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        detokenize=bool(message.stop),  # answers hold no text
        output_kind=kind,
    )


class GenerationResponses:
    """One call's outputs as messages.

    A stream has a chunk for each choice's new tokens and, behind its last one, a `complete` that repeats those tokens with the
    finish reason, as vLLM's own servicer sends it: clients take tokens from chunks, and from `complete` only without streaming.
    """

    def __init__(self, call: GenerationCall) -> None:
        self._params = call.params
        self._begun: set[int] = set()

    def messages(self, output: RequestOutput) -> Iterator[pb.GenerateResponse]:
        """The messages of one output, DELTA or FINAL_ONLY."""
        streams = self._params.output_kind is RequestOutputKind.DELTA
        for choice in sorted(output.outputs, key=lambda choice: choice.index):
            if streams and choice.token_ids:
                yield pb.GenerateResponse(chunk=self._chunk(choice, output))
            if choice.finished:
                yield pb.GenerateResponse(complete=self._complete(choice, output))

    def _chunk(self, choice: CompletionOutput, output: RequestOutput) -> pb.GenerateStreamChunk:
        is_first = choice.index not in self._begun
        self._begun.add(choice.index)
        return pb.GenerateStreamChunk(
            token_ids=choice.token_ids,
            prompt_tokens=len(output.prompt_token_ids),
            completion_tokens=len(choice.token_ids),
            cached_tokens=output.num_cached_tokens,
            output_logprobs=self._output_logprobs(choice),
            input_logprobs=self._input_logprobs(output) if is_first else None,
            index=choice.index,
        )

    def _complete(self, choice: CompletionOutput, output: RequestOutput) -> pb.GenerateComplete:
        stop: dict[str, Any] = {}
        if isinstance(choice.stop_reason, str):
            stop["matched_stop_str"] = choice.stop_reason
        elif choice.stop_reason is not None:
            stop["matched_token_id"] = choice.stop_reason
        return pb.GenerateComplete(
            output_ids=choice.token_ids,
            finish_reason=choice.finish_reason,
            prompt_tokens=len(output.prompt_token_ids),
            completion_tokens=len(choice.token_ids),
            cached_tokens=output.num_cached_tokens,
            output_logprobs=self._output_logprobs(choice),
            input_logprobs=self._input_logprobs(output),
            index=choice.index,
            **stop,
        )

    def _output_logprobs(self, choice: CompletionOutput) -> pb.OutputLogProbs | None:
        count = self._params.logprobs
        if count is None or choice.logprobs is None:
            return None
        pairs = list(zip(choice.token_ids, choice.logprobs, strict=True))
        return pb.OutputLogProbs(
            token_logprobs=[position[token_id].logprob for token_id, position in pairs],
            token_ids=choice.token_ids,
            top_logprobs=[_top(position, count) for _, position in pairs] if count else [],
        )

    def _input_logprobs(self, output: RequestOutput) -> pb.InputLogProbs | None:
        """The prompt's; its first token has none."""
        count = self._params.prompt_logprobs
        if count is None or output.prompt_logprobs is None:
            return None
        pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))
        return pb.InputLogProbs(
            token_logprobs=[
                pb.InputTokenLogProb() if position is None else pb.InputTokenLogProb(value=position[token_id].logprob)
                for token_id, position in pairs
            ],
            token_ids=output.prompt_token_ids,
            top_logprobs=[_top(position or {}, count) for _, position in pairs] if count else [],
        )


def _top(position: PositionLogprobs, count: int) -> pb.TopLogProbs:
    """The `count` most likely tokens of a position."""
    ranked: Sequence[Any] = sorted(position.items(), key=lambda item: item[1].rank)[:count]
    return pb.TopLogProbs(values=[logprob.logprob for _, logprob in ranked], token_ids=[token_id for token_id, _ in ranked])
