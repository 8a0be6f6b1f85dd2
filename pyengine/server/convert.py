"""Between protobuf messages and the engine's types. The only module of the server that knows `inference_pb2`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.struct_pb2 import Struct, Value

from pyengine.config import EngineConfig
from pyengine.errors import InvalidRequestError, UnsupportedError
from pyengine.inputs import ChatPrompt, Prompt, TextPrompt, TokensPrompt
from pyengine.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from pyengine.sampling_params import MAX_LOGPROBS, RequestOutputKind, SamplingParams
from pyengine.server import headers
from pyengine.server.frontend import GenerationCall
from pyengine.server.proto import inference_pb2 as pb

SERVICE: ServiceDescriptor = pb.DESCRIPTOR.services_by_name["Inference"]

_FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
    "error": pb.FINISH_REASON_ERROR,
}
#: The engine's names of what a request of this API calls otherwise.
API_FIELDS = {
    "prompt": "text",
    "prompt_token_ids": "token_ids",
    "messages": "chat.messages",
    "chat_template": "chat.chat_template",
    "chat_template_kwargs": "chat.chat_template_kwargs",
    "continue_final_message": "chat.continue_final_message",
}
_UNSUPPORTED_SAMPLING = ("best_of", "beam_search")


# Requests


def model_of(message: Any) -> str | None:
    """The request's `model`."""
    return _given(message, "model")


def _given(message: Any, name: str) -> Any:
    """An optional field's value; None where it is unset."""
    return getattr(message, name) if message.HasField(name) else None


def generation_call(
    message: pb.GenerateRequest,
    metadata: Iterable[tuple[str, str | bytes]],
    kind: RequestOutputKind,
    *,
    trust_chat_template: bool,
) -> GenerationCall:
    """A GenerateRequest and its headers, checked as far as that is possible without the model.

    Raises:
        InvalidRequestError, UnsupportedError: naming the field, by its path where it is nested.
    """
    for name in ("structured_output", "lora_name"):
        if message.HasField(name):
            raise UnsupportedError(name)
    if message.media:
        raise UnsupportedError("media")
    sent = _text_headers(metadata)
    return GenerationCall(
        request_id=headers.request_id(_given(message, "request_id"), sent),
        prompt=prompt(message, trust_chat_template=trust_chat_template),
        params=_sampling_params(message.sampling, kind),
        priority=headers.priority(_given(message, "priority"), sent),
        cache_salt=headers.cache_salt(_given(message, "cache_salt"), sent),
        tenant=headers.tenant(sent),
        trace_context=headers.trace_context(sent),
        echo=message.echo,
        has_own_limit=message.sampling.HasField("max_tokens"),
    )


def claimed_tenant(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Whom a call claims to be accounted to."""
    return headers.tenant(_text_headers(metadata))


def _text_headers(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    return {key: value for key, value in metadata if isinstance(value, str)}


def prompt(message: pb.GenerateRequest | pb.TokenizeRequest, *, trust_chat_template: bool) -> Prompt:
    """The request's `input`.

    Raises:
        InvalidRequestError, UnsupportedError: naming the field.
    """
    kind = message.WhichOneof("input")
    if message.HasField("add_special_tokens") and kind != "text":
        raise InvalidRequestError("add_special_tokens", "applies to text only")
    if kind == "text":
        special = message.add_special_tokens if message.HasField("add_special_tokens") else True
        return TextPrompt(message.text, add_special_tokens=special)
    if kind == "token_ids" and isinstance(message, pb.GenerateRequest):
        if not message.token_ids.ids:
            raise InvalidRequestError("token_ids", "must not be empty")
        return TokensPrompt(list(message.token_ids.ids))
    if kind == "chat":
        return _chat_prompt(message.chat, trust_chat_template=trust_chat_template)
    names = ", ".join(field.name for field in message.DESCRIPTOR.oneofs_by_name["input"].fields)
    raise InvalidRequestError("input", f"one of {names} must be set")


def _chat_prompt(chat: pb.ChatInput, *, trust_chat_template: bool) -> ChatPrompt:
    if not chat.messages:
        raise InvalidRequestError("chat.messages", "must not be empty")
    if chat.tools:
        raise UnsupportedError("chat.tools")
    if chat.HasField("chat_template") and not trust_chat_template:
        raise InvalidRequestError("chat.chat_template", "this server takes no templates from clients")
    add_prompt = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not chat.continue_final_message
    if add_prompt and chat.continue_final_message:
        raise InvalidRequestError("chat.continue_final_message", "excludes add_generation_prompt")
    return ChatPrompt(
        messages=[_chat_message(message, f"chat.messages[{i}]") for i, message in enumerate(chat.messages)],
        add_generation_prompt=add_prompt,
        continue_final_message=chat.continue_final_message,
        chat_template=chat.chat_template if chat.HasField("chat_template") else None,
        chat_template_kwargs=_plain_struct(chat.chat_template_kwargs, "chat.chat_template_kwargs"),
    )


def _chat_message(message: pb.ChatMessage, path: str) -> dict[str, Any]:
    if not message.role:
        raise InvalidRequestError(f"{path}.role", "must not be empty")
    if message.tool_calls:
        raise UnsupportedError(f"{path}.tool_calls")
    if message.HasField("tool_call_id"):
        raise UnsupportedError(f"{path}.tool_call_id")
    if message.content and message.parts:
        raise InvalidRequestError(f"{path}.parts", "excludes content")
    content = message.content
    for i, part in enumerate(message.parts):
        kind = part.WhichOneof("part")
        if kind is None:
            raise InvalidRequestError(f"{path}.parts[{i}]", "must have a text or a medium")
        if kind != "text":
            raise UnsupportedError(f"{path}.parts[{i}].{kind}")
        content += part.text
    result = {"role": message.role, "content": content}
    if message.HasField("name"):
        result["name"] = message.name
    return result


def _plain_struct(struct: Struct, path: str) -> dict[str, Any]:
    return {key: _plain_value(value, path) for key, value in struct.fields.items()}


def _plain_value(value: Value, path: str) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "number_value":
        number = value.number_value
        if not math.isfinite(number):
            raise InvalidRequestError(path, "must hold finite numbers")
        # JSON has one kind of number, and a template prints 3 and 3.0 differently.
        return int(number) if number.is_integer() else number
    if kind == "struct_value":
        return _plain_struct(value.struct_value, path)
    if kind == "list_value":
        return [_plain_value(item, path) for item in value.list_value.values]
    return None if kind in (None, "null_value") else getattr(value, kind)


def _sampling_params(message: pb.SamplingParams, kind: RequestOutputKind) -> SamplingParams:
    """Fields have `SamplingParams`' own names, so that only those whose form differs need a line here."""
    values: dict[str, Any] = {"output_kind": kind}
    for field, value in message.ListFields():
        name = field.name
        if name in _UNSUPPORTED_SAMPLING:
            raise UnsupportedError(name)
        if name == "max_tokens":
            if value != -1 and value < 1:
                raise InvalidRequestError(name, f"must be 1 or more, or -1 for up to the model's limit; got {value}")
            values[name] = None if value == -1 else value
        elif name == "logit_bias":
            values[name] = dict(value)
        elif name == "allowed_token_ids":
            values[name] = list(value.ids)
        elif isinstance(value, bool | int | float):
            values[name] = value
        else:
            values[name] = list(value)
    return SamplingParams(**values)


def abort_id(message: pb.AbortRequest) -> str:
    if not message.request_id:
        raise InvalidRequestError("request_id", "must not be empty")
    return message.request_id


# Responses


class GenerationResponses:
    """One call's outputs as messages. Keeps each choice's token count, since a DELTA output holds only what is new."""

    def __init__(self, call: GenerationCall, model: str) -> None:
        self._call = call
        self._model = model
        self._completion_tokens: dict[int, int] = {}
        self._prompt_sent = False

    @property
    def wants_prompt_text(self) -> bool:
        """Whether the next message needs the prompt's text."""
        return self._call.echo and not self._prompt_sent

    def deltas(self, output: RequestOutput) -> Iterator[pb.GenerateResponse]:
        """The messages of one DELTA output; none for a choice with nothing new."""
        for choice in output.outputs:
            if not (choice.text or choice.token_ids or choice.finished):
                continue
            message = pb.GenerateResponse(
                request_id=self._call.request_id,
                index=choice.index,
                text=choice.text,
                token_ids=choice.token_ids,
                logprobs=self._choice_logprobs(choice),
            )
            if choice.finished:
                message.finish.CopyFrom(self._finish(choice, output))
            else:
                self._count(choice)
            if not self._prompt_sent and self._has_prompt(output):
                message.prompt.CopyFrom(self._prompt_info(output))
            self._prompt_sent = True
            yield message

    def complete(self, output: RequestOutput) -> pb.CompleteResponse:
        """The answer made of a FINAL_ONLY output."""
        choices = [
            pb.Choice(
                index=choice.index,
                text=choice.text,
                token_ids=choice.token_ids,
                logprobs=self._choice_logprobs(choice),
                finish=self._finish(choice, output),
            )
            for choice in sorted(output.outputs, key=lambda choice: choice.index)
        ]
        response = pb.CompleteResponse(request_id=self._call.request_id, model=self._model, choices=choices)
        response.usage.CopyFrom(_usage(output, sum(self._completion_tokens.values())))
        if self._has_prompt(output):
            response.prompt.CopyFrom(self._prompt_info(output))
        return response

    def _count(self, choice: CompletionOutput) -> int:
        total = self._completion_tokens.get(choice.index, 0) + len(choice.token_ids)
        self._completion_tokens[choice.index] = total
        return total

    def _finish(self, choice: CompletionOutput, output: RequestOutput) -> pb.FinishInfo:
        if choice.finish_reason is None:
            raise ValueError(f"choice {choice.index} of {output.request_id} has not finished")
        finish = pb.FinishInfo(reason=_FINISH_REASONS[choice.finish_reason], usage=_usage(output, self._count(choice)))
        if isinstance(choice.stop_reason, str):
            finish.stop_text = choice.stop_reason
        elif choice.stop_reason is not None:
            finish.stop_token_id = choice.stop_reason
        if choice.cumulative_logprob is not None and self._call.params.logprobs is not None:
            finish.cumulative_logprob = choice.cumulative_logprob
        return finish

    def _choice_logprobs(self, choice: CompletionOutput) -> list[pb.PositionLogprobs]:
        if self._call.params.logprobs is None or choice.logprobs is None:
            return []
        pairs = zip(choice.token_ids, choice.logprobs, strict=True)
        return [_position_logprobs(token_id, position, self._call.params.logprobs) for token_id, position in pairs]

    def _has_prompt(self, output: RequestOutput) -> bool:
        return self._call.echo or (self._call.params.prompt_logprobs is not None and output.prompt_logprobs is not None)

    def _prompt_info(self, output: RequestOutput) -> pb.PromptInfo:
        info = pb.PromptInfo()
        if self._call.echo:
            info.text = output.prompt or ""
            info.token_ids.extend(output.prompt_token_ids)
        count = self._call.params.prompt_logprobs
        if count is not None and output.prompt_logprobs is not None:
            pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
            info.logprobs.extend(_position_logprobs(token_id, position, count) for token_id, position in pairs)
        return info


def _usage(output: RequestOutput, completion_tokens: int) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=len(output.prompt_token_ids),
        completion_tokens=completion_tokens,
        cached_tokens=output.num_cached_tokens,
    )


def _position_logprobs(token_id: int, position: PositionLogprobs | None, count: int) -> pb.PositionLogprobs:
    """`position` holds the token itself and the `count` most likely ones, which may or may not include it."""
    if position is None:
        return pb.PositionLogprobs()
    ranked = sorted(position.items(), key=lambda item: item[1].rank)
    top = [_logprob(other, logprob) for other, logprob in ranked[:count]]
    return pb.PositionLogprobs(token=_logprob(token_id, position[token_id]), top=top)


def _logprob(token_id: int, logprob: Logprob) -> pb.Logprob:
    return pb.Logprob(
        token_id=token_id,
        logprob=logprob.logprob,
        rank=logprob.rank,
        text=logprob.decoded_token or "",
        token_bytes=logprob.bytes or b"",
    )


def abort_response(aborted: bool) -> pb.AbortResponse:
    return pb.AbortResponse(aborted=aborted)


def tokenize_response(token_ids: Sequence[int]) -> pb.TokenizeResponse:
    return pb.TokenizeResponse(token_ids=token_ids)


def detokenize_response(text: str) -> pb.DetokenizeResponse:
    return pb.DetokenizeResponse(text=text)


def model_info(config: EngineConfig, *, has_tokenizer: bool, has_chat_template: bool, version: str) -> pb.GetModelInfoResponse:
    model = config.model
    return pb.GetModelInfoResponse(
        model=model.served_model_name,
        architecture=model.arch.architecture,
        max_model_len=model.max_model_len,
        vocab_size=model.arch.vocab_size,
        bos_token_id=model.arch.bos_token_id,
        eos_token_ids=model.arch.eos_token_ids,
        dtype=model.dtype,
        quantization=model.quantization or "",
        supports_text=has_tokenizer,
        supports_chat=has_chat_template,
        max_logprobs=MAX_LOGPROBS,
        server_version=version,
    )
