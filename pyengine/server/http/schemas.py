"""Request bodies: OpenAI's fields, and those that vLLM adds.

Types are strict (no "5" for 5). Values are for `SamplingParams` and the engine to check, so that every port refuses the same.
Fields that are unknown here are let pass, as OpenAI's own clients send new ones all the time; OpenAI's and vLLM's that this
engine cannot honour are refused, because a client must not take their effect for granted.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from pyengine.errors import InvalidRequestError, UnsupportedError
from pyengine.sampling_params import RequestOutputKind, SamplingParams


class StrictModel(BaseModel):
    """A body with exact types."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    #: Fields of OpenAI's and vLLM's that are honoured for these values only. Those that are not declared below are extras.
    SUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: str | None = None

    def check_supported(self) -> None:
        """Refuse what cannot be honoured.

        Raises:
            UnsupportedError, InvalidRequestError: naming the field.
        """
        for name, allowed in self.SUPPORTED.items():
            given = getattr(self, name, None)  # an extra is an attribute where it was sent
            if given is not None and not any(given == value for value in allowed):
                raise UnsupportedError(name)


class GenerationRequest(StrictModel):
    """What completions and chat completions share. None stands for the default, as OpenAI's clients send it."""

    SUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "best_of": (1,),
        "use_beam_search": (False,),
        "truncate_prompt_tokens": (),
        "structured_outputs": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "response_format": ({"type": "text"},),
        "length_penalty": (1,),  # of beam search, as early_stopping
        "early_stopping": (False,),
        "detokenize": (True,),
        "watermarking": (False,),
        "logits_processors": ([],),
        "logprob_token_ids": ([],),
        "prompt_embeds": (),
        "return_tokens_as_token_ids": (False,),
        "return_token_offsets": (False,),
        "return_mm_kwargs": (False,),
        "kv_transfer_params": (),
        "ec_transfer_params": (),
        "vllm_xargs": ({},),
        "repetition_detection": (),
        "thinking_token_budget": (),
        "stream_interval": (1,),
        "routed_experts_prompt_start": (0,),
        "skip_reading_prefix_cache": (False,),
    }

    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    user: str | None = None
    response_format: Any = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None

    best_of: Any = None
    use_beam_search: Any = None
    truncate_prompt_tokens: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    def check_supported(self) -> None:
        """Refuse what cannot be honoured.

        Raises:
            UnsupportedError, InvalidRequestError: naming the field.
        """
        super().check_supported()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options", "applies to stream only")
        for name in ("include_usage", "continuous_usage_stats"):
            value = (self.stream_options or {}).get(name)
            if value is not None and not isinstance(value, bool):
                raise InvalidRequestError("stream_options", f"{name} must be true or false")
        if self.includes_usage_so_far and not self.includes_usage:
            raise InvalidRequestError("stream_options", "continuous_usage_stats needs include_usage")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs", "cannot be streamed")

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk about usage."""
        return bool((self.stream_options or {}).get("include_usage"))

    @property
    def includes_usage_so_far(self) -> bool:
        """Whether every chunk of a stream says what has been used by then."""
        return bool((self.stream_options or {}).get("continuous_usage_stats"))

    def sampling_params(self, **values: Any) -> SamplingParams:
        """The engine's parameters.

        Args:
            values: of fields whose name or meaning differs from `SamplingParams`'.

        Raises:
            InvalidRequestError: naming the field.
        """
        for name in _SAMPLING_FIELDS:
            if name not in values and getattr(self, name) is not None:
                values[name] = getattr(self, name)
        if self.logit_bias is not None:
            values["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        values["output_kind"] = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams(**values)


_SAMPLING_FIELDS = (
    *("temperature", "top_p", "n", "stop", "max_tokens", "presence_penalty", "frequency_penalty", "seed"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output"),
    *("skip_special_tokens", "spaces_between_special_tokens", "bad_words", "allowed_token_ids", "prompt_logprobs"),
)


def _token_id(key: str) -> int:
    """A token id that JSON had to spell as text."""
    if not (key.isascii() and key.isdigit() and len(key) < 20):
        raise InvalidRequestError("logit_bias", f"keys must be token ids, got {key[:40]!r}")
    return int(key)


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    SUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {**GenerationRequest.SUPPORTED, "suffix": ("",)}

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    suffix: Any = None


class TemplateOptions(StrictModel):
    """How messages become a prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatCompletionRequest(TemplateOptions, GenerationRequest):
    """The body of /v1/chat/completions."""

    SUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationRequest.SUPPORTED,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "documents": ([],),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "add_special_tokens": (False,),
        "return_prompt_text": (False,),
        "echo": (False,),
    }

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    echo: Any = None


class TokenizeRequest(TemplateOptions):
    """The body of /tokenize: a prompt or messages."""

    SUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "return_token_strs": (False,),
        "tools": ([],),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
    }

    prompt: str | None = None
    add_special_tokens: bool = True
    messages: list[dict[str, Any]] | None = None


class DetokenizeRequest(StrictModel):
    """The body of /detokenize."""

    tokens: list[int]
