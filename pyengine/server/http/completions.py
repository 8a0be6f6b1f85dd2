"""/v1/completions: bodies to calls, outputs to OpenAI's objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pyengine.errors import InvalidRequestError
from pyengine.inputs import Prompt, TextPrompt, TokensPrompt
from pyengine.outputs import CompletionOutput, RequestOutput
from pyengine.sampling_params import SamplingParams
from pyengine.server import headers
from pyengine.server.frontend import Frontend, GenerationCall
from pyengine.server.http.answers import Formatter
from pyengine.server.http.logprobs import CompletionLogprobs, joined, prompt_logprobs
from pyengine.server.http.schemas import CompletionRequest


def completion(body: CompletionRequest, sent: Mapping[str, str], frontend: Frontend) -> CompletionFormatter:
    """The calls that a body asks for, and how they are answered.

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
    prompts = _prompts(body)
    if len(prompts) > frontend.max_concurrent_requests:
        raise InvalidRequestError("prompt", f"must hold at most {frontend.max_concurrent_requests} prompts")
    params = _params(body)
    calls = [
        GenerationCall(
            request_id=request_id if len(prompts) == 1 else f"{request_id}-{i}",
            prompt=prompt,
            params=params,
            priority=headers.priority(body.priority, sent),
            cache_salt=headers.cache_salt(body.cache_salt, sent),
            tenant=headers.tenant(sent),
            trace_context=headers.trace_context(sent),
            echo=bool(body.echo),
            has_own_limit=body.max_tokens is not None,
        )
        for i, prompt in enumerate(prompts)
    ]
    return CompletionFormatter(body, calls, frontend.model_name, request_id)


def _prompts(body: CompletionRequest) -> list[Prompt]:
    given = body.prompt
    if isinstance(given, str):
        given = [given]
    if not given:
        raise InvalidRequestError("prompt", "must not be empty")
    if isinstance(given[0], int):
        given = [given]
    special = body.add_special_tokens is not False
    return [TextPrompt(item, special) if isinstance(item, str) else TokensPrompt(item) for item in given]


def _params(body: CompletionRequest) -> SamplingParams:
    values: dict[str, Any] = {"logprobs": body.logprobs}
    if body.echo and body.logprobs is not None:
        values["prompt_logprobs"] = body.logprobs
    if _is_prompt_only(body):
        values["max_tokens"] = 1
    return body.sampling_params(**values)


def _is_prompt_only(body: CompletionRequest) -> bool:
    """Whether the body only asks for its own prompt, say to have its tokens scored. The engine generates one token at least."""
    return bool(body.echo) and body.max_tokens == 0


class CompletionFormatter(Formatter):
    """Outputs as text_completion objects."""

    names: Mapping[str, str] = {"prompt_token_ids": "prompt"}
    id_prefix = "cmpl"
    object_name = chunk_name = "text_completion"

    def __init__(self, body: CompletionRequest, calls: Sequence[GenerationCall], model: str, request_id: str) -> None:
        super().__init__(calls, model, request_id, body)
        self._body = body
        self._is_prompt_only = _is_prompt_only(body)
        self._logprobs: dict[int, CompletionLogprobs] = {}  # by choice; one that is in here has been begun

    def num_tokens(self, choice: CompletionOutput) -> int:
        return 0 if self._is_prompt_only else len(choice.token_ids)

    def choice(self, index: int, choice: CompletionOutput, call: GenerationCall, output: RequestOutput) -> dict[str, Any]:
        piece = self._piece(index, choice, output)
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            piece["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return piece

    def chunk_choices(
        self, index: int, choice: CompletionOutput, call: GenerationCall, output: RequestOutput
    ) -> Iterator[dict[str, Any]]:
        yield self._piece(index, choice, output)

    def _piece(self, index: int, choice: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        """What is new of a choice, after its prompt if that is wanted and this is the beginning."""
        is_first = index not in self._logprobs
        logprobs = self._logprobs.setdefault(index, CompletionLogprobs())
        with_prompt = is_first and bool(self._body.echo)
        text, ids, positions = choice.text, choice.token_ids, choice.logprobs
        if self._is_prompt_only:
            text, ids, positions = "", [], []
        piece: dict[str, Any] = {
            "index": index,
            "text": (self._prompt(index).prompt or "") + text if with_prompt else text,
            "logprobs": None,
            "finish_reason": "length" if self._is_prompt_only else choice.finish_reason,
            "stop_reason": None if self._is_prompt_only else choice.stop_reason,
        }
        if self._body.logprobs is not None:
            before = self._prompt(index) if with_prompt else None
            if before is not None and before.prompt_logprobs is not None:
                first = self.first_tokens.get(index // self.calls[0].params.n, "")
                head = logprobs.take(before.prompt_token_ids, before.prompt_logprobs, head=first, text=before.prompt or "")
                piece["logprobs"] = joined(head, logprobs.take(ids, positions or []))
            else:
                piece["logprobs"] = logprobs.take(ids, positions or [])
        if self._body.return_token_ids:
            piece["token_ids"] = list(ids)
            if is_first:
                piece["prompt_token_ids"] = output.prompt_token_ids
        return piece

    def _prompt(self, index: int) -> RequestOutput:
        """The first output of a choice's prompt, which alone has the prompt's text and log-probabilities."""
        return self._seen[index // self.calls[0].params.n]
