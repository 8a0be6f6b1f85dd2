"""`LLM`: the engine for programs that have all their prompts at hand."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from types import FrameType, TracebackType
from typing import Any

from pyengine.config import EngineArgs
from pyengine.engine.llm_engine import LLMEngine
from pyengine.errors import ConfigError, InvalidRequestError, PyEngineError
from pyengine.inputs import ChatPrompt, Prompt, TextPrompt, TokensPrompt
from pyengine.outputs import RequestOutput
from pyengine.sampling_params import RequestOutputKind, SamplingParams

#: what `generate` takes as one prompt
PromptLike = str | Mapping[str, Any] | Sequence[int] | TextPrompt | TokensPrompt | ChatPrompt
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model in this process.

    Args:
        model: a Hugging Face folder, a GGUF file or a hub id; None: the default model.
        engine_args: any field of `EngineArgs`.

    Raises:
        ConfigError: naming the argument, also one that does not exist.
        ModelLoadError: naming the file or tensor.
    """

    def __init__(self, model: str | None = None, **engine_args: Any) -> None:
        known = [f.name for f in fields(EngineArgs)]
        for name in engine_args:
            if name not in known:
                raise ConfigError(name, f"is no argument of LLM; there are {', '.join(known)}")
        self.llm_engine = LLMEngine(EngineArgs(model=model, **engine_args))
        self._request_ids = map(str, itertools.count())
        self._lock = threading.Lock()  # one batch of prompts at a time: the engine belongs to one thread

    # ---- running prompts

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts, all of them batched as memory allows.

        Args:
            prompts: text, `{"prompt": text}`, `{"prompt_token_ids": ids}`, a list of ids, or a list of any of these.
            sampling_params: one for all, or one a prompt; by default `SamplingParams()`.
            use_tqdm: show a progress bar.

        Returns:
            An output a prompt, in their order. One that failed for itself has finish reason "error" and an `error`.

        Raises:
            InvalidRequestError, UnsupportedError: for any bad prompt or parameter, before any is run.
            EngineDeadError: a step failed.
        """
        with self._lock:
            return self._run(_as_prompts(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation or a list of them.

        Args:
            messages: `{"role": ..., "content": ...}` each.
            sampling_params: as `generate` takes them.
            use_tqdm: show a progress bar.
            chat_template: a Jinja template instead of the model's.
            add_generation_prompt: end the prompt where the assistant's answer begins.
            continue_final_message: let the model go on with the last message.
            chat_template_kwargs: more variables for the template.

        Returns:
            As `generate`.

        Raises:
            As `generate`; InvalidRequestError also for malformed messages and for a model without a chat template.
        """
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts: list[Prompt] = [
            ChatPrompt(
                conversation,  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs or {},
            )
            for conversation in conversations
        ]
        with self._lock:
            return self._run(prompts, sampling_params, use_tqdm)

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        engine = self.llm_engine
        ids = [next(self._request_ids) for _ in prompts]
        # All are checked before the first is queued.
        sources = [
            engine.input_processor.process(request_id, prompt, params.replace(output_kind=RequestOutputKind.FINAL_ONLY))
            for request_id, prompt, params in zip(ids, prompts, _as_params(sampling_params, len(prompts)), strict=True)
        ]
        outputs: dict[str, RequestOutput] = {}
        own = frozenset(ids)
        try:
            for source in sources:
                engine.add_processed(source)
            with _deferred_interrupt() as check_interrupt, _Progress(len(ids), use_tqdm) as progress:
                while len(outputs) < len(ids):
                    for output in engine.step():
                        if output.request_id in own:  # not one of who uses `llm_engine` beside this
                            outputs[output.request_id] = output
                            progress.update(output)
                    check_interrupt()
        except BaseException:
            if not engine.errored:
                engine.abort_request(ids)
            raise
        return [outputs[request_id] for request_id in ids]

    # ---- around it

    def stats(self) -> dict[str, Any]:
        """Counters and gauges; see `LLMEngine.stats`."""
        return self.llm_engine.stats()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, of Transformers.

        Raises:
            PyEngineError: with skip_tokenizer_init there is none.
        """
        if self.llm_engine.tokenizer is None:
            raise PyEngineError("there is no tokenizer: the engine runs with skip_tokenizer_init")
        return self.llm_engine.tokenizer

    def shutdown(self) -> None:
        """Release the model and its memory. Idempotent."""
        self.llm_engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()


def _as_prompt(value: Any) -> Prompt:
    if isinstance(value, TextPrompt | TokensPrompt | ChatPrompt):
        return value
    if isinstance(value, str):
        return TextPrompt(value)
    if isinstance(value, Mapping):
        given = sorted(key for key in ("prompt", "prompt_token_ids") if value.get(key) is not None)
        unknown = sorted(map(str, value.keys() - {"prompt", "prompt_token_ids"}))
        if len(given) != 1 or unknown:
            raise InvalidRequestError(
                unknown[0] if unknown else "prompt", "a prompt is {'prompt': text} or {'prompt_token_ids': ids}"
            )
        return TextPrompt(value["prompt"]) if given == ["prompt"] else TokensPrompt(value["prompt_token_ids"])
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return TokensPrompt(value)
    raise InvalidRequestError("prompt", f"must be text, a dict or a list of token ids, got {type(value).__name__}")


def _as_prompts(prompts: Any) -> list[Prompt]:
    is_one = isinstance(prompts, str | Mapping | TextPrompt | TokensPrompt | ChatPrompt)
    if is_one or (isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], int)):
        return [_as_prompt(prompts)]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidRequestError("prompts", f"must be a prompt or a list of prompts, got {type(prompts).__name__}")
    return [_as_prompt(prompt) for prompt in prompts]


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise InvalidRequestError("sampling_params", "must be SamplingParams or a list of them")
    if len(params) != count:
        raise InvalidRequestError("sampling_params", f"there are {len(params)} for {count} prompts")
    return list(params)


class _Progress:
    """A tqdm bar over requests, with prompt and output tokens a second."""

    def __init__(self, total: int, enabled: bool) -> None:
        self._total = total
        self._enabled = enabled and total > 0
        self._bar: Any = None
        self._prompt_tokens = self._output_tokens = 0
        self._started = time.monotonic()

    def __enter__(self) -> _Progress:
        if self._enabled:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=self._total, desc="Processed prompts", unit="req", dynamic_ncols=True)
        return self

    def update(self, output: RequestOutput) -> None:
        if self._bar is None:
            return
        self._prompt_tokens += len(output.prompt_token_ids)
        self._output_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        seconds = max(time.monotonic() - self._started, 1e-9)
        speeds = f"input: {self._prompt_tokens / seconds:.1f} tok/s, output: {self._output_tokens / seconds:.1f} tok/s"
        self._bar.set_postfix_str(speeds, refresh=False)
        self._bar.update(1)

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()


@contextmanager
def _deferred_interrupt() -> Iterator[Any]:
    """Hold Ctrl-C back until a step is done, so that it never meets an engine in the middle of one.

    Yields a function that raises KeyboardInterrupt if it was pressed. Pressed twice, it interrupts at once. Only where it
    would raise KeyboardInterrupt anyway: in the main thread, with Python's own handler.
    """
    pressed = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
