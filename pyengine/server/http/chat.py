"""/v1/chat/completions: bodies to calls, outputs to OpenAI's objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pyengine.errors import InvalidRequestError
from pyengine.inputs import ChatPrompt
from pyengine.outputs import CompletionOutput, RequestOutput
from pyengine.sampling_params import MAX_LOGPROBS, SamplingParams
from pyengine.server import headers
from pyengine.server.frontend import Frontend, GenerationCall
from pyengine.server.http.answers import Formatter
from pyengine.server.http.logprobs import chat_logprobs, prompt_logprobs
from pyengine.server.http.schemas import ChatCompletionRequest, TemplateOptions


def chat_completion(body: ChatCompletionRequest, sent: Mapping[str, str], frontend: Frontend) -> ChatFormatter:
    """The call that a body asks for, and how it is answered.

    Args:
        body: the request.
        sent: its headers.
        frontend: of the server.

    Raises:
        InvalidRequestError, UnsupportedError, NotFoundError: naming the field.
    """
    frontend.check_model(body.model)
    body.check_supported()
    request_id = headers.request_id(body.request_id, sent)
    names = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    try:
        params = _params(body)
    except InvalidRequestError as error:
        raise InvalidRequestError(names.get(error.field, error.field), error.message) from error
    call = GenerationCall(
        request_id=request_id,
        prompt=chat_prompt(body.messages, body, trust_chat_template=frontend.trust_chat_template),
        params=params,
        priority=headers.priority(body.priority, sent),
        cache_salt=headers.cache_salt(body.cache_salt, sent),
        tenant=headers.tenant(sent),
        trace_context=headers.trace_context(sent),
        echo=False,
    )
    return ChatFormatter(body, call, frontend.model_name, names)


def chat_prompt(messages: list[dict[str, Any]], body: TemplateOptions, *, trust_chat_template: bool) -> ChatPrompt:
    """Messages and what goes with them.

    Raises:
        InvalidRequestError: naming the field.
    """
    if body.chat_template is not None and not trust_chat_template:
        raise InvalidRequestError("chat_template", "this server takes no templates from clients")
    add_prompt = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    return ChatPrompt(
        messages=messages,
        add_generation_prompt=add_prompt,
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs or {},
    )


def _params(body: ChatCompletionRequest) -> SamplingParams:
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise InvalidRequestError("top_logprobs", f"must be in [0, {MAX_LOGPROBS}], got {body.top_logprobs}")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs", "needs logprobs")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    # A chat without a limit may take what the model has left; a completion gets 16 tokens. Both are OpenAI's defaults.
    return body.sampling_params(max_tokens=limit, logprobs=(body.top_logprobs or 0) if body.logprobs else None)


class ChatFormatter(Formatter):
    """Outputs as chat.completion objects."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, body: ChatCompletionRequest, call: GenerationCall, model: str, names: Mapping[str, str]) -> None:
        super().__init__([call], model, call.request_id, body)
        self.names = names
        self._body = body
        self._begun: set[int] = set()  # choices that have sent their role

    def whole(self, outputs: Any) -> dict[str, Any]:
        answer = super().whole(outputs)
        if self._body.prompt_logprobs is not None and outputs[0].prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(outputs[0].prompt_logprobs)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = outputs[0].prompt_token_ids
        return answer

    def chunks(self, i: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        for chunk in super().chunks(i, output):
            if self._body.return_token_ids and "role" in chunk["choices"][0]["delta"]:
                chunk["prompt_token_ids"] = output.prompt_token_ids
            yield chunk

    def choice(self, index: int, choice: CompletionOutput, call: GenerationCall, output: RequestOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"index": index, "message": message, **self._rest(choice, call)}

    def chunk_choices(
        self, index: int, choice: CompletionOutput, call: GenerationCall, output: RequestOutput
    ) -> Iterator[dict[str, Any]]:
        if index not in self._begun:
            self._begun.add(index)
            yield {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        delta = {"content": choice.text} if choice.text or not choice.finished else {}
        yield {"index": index, "delta": delta, **self._rest(choice, call)}

    def _rest(self, choice: CompletionOutput, call: GenerationCall) -> dict[str, Any]:
        rest: dict[str, Any] = {"logprobs": None, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        if call.params.logprobs is not None:
            rest["logprobs"] = chat_logprobs(choice.token_ids, choice.logprobs or [], call.params.logprobs)
        if self._body.return_token_ids:
            rest["token_ids"] = list(choice.token_ids)
        return rest
