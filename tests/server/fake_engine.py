"""A scripted `EngineClient`, so that the server's own behaviour can be tested without a model."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pyengine.config import EngineArgs, EngineConfig, HardwareInfo, ModelArchConfig
from pyengine.config_resolution import resolve
from pyengine.engine.kv_events import KVEventBatch
from pyengine.engine.metrics import EngineMetrics
from pyengine.engine.scheduler_stats import SchedulerStats
from pyengine.errors import InvalidRequestError, RequestCancelledError
from pyengine.inputs import ChatPrompt, Prompt, TextPrompt, TokensPrompt
from pyengine.outputs import CompletionOutput, Logprob, RequestOutput
from pyengine.sampling_params import RequestOutputKind, SamplingParams

VOCAB_SIZE = 512
MAX_MODEL_LEN = 256


def fake_config(**args: Any) -> EngineConfig:
    arch = ModelArchConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=160,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_LEN,
        rms_norm_eps=1e-5,
        bos_token_id=0,
        eos_token_ids=(1, 3),
    )
    hardware = HardwareInfo(has_cuda=False, available_memory=2**30, num_cores=2)
    return resolve(EngineArgs(served_model_name="fake", **args), "fake-path", arch, hardware)


@dataclass
class FakeRequest:
    """What `generate` was called with."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    priority: int
    cache_salt: str | None
    tenant: str | None
    prompt_token_ids: list[int]
    max_output_tokens: int | None = None
    is_aborted: bool = False
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    num_pulled: int = 0  # outputs that the server has taken


#: Yields the outputs of one request. An exception in the list is raised in its place.
Script = Callable[[FakeRequest], Iterator[RequestOutput | Exception]]


def token_text(token_id: int) -> str:
    return f"t{token_id} "


def output(request: FakeRequest, choices: list[CompletionOutput], *, finished: bool, **extra: Any) -> RequestOutput:
    text = request.prompt.text if isinstance(request.prompt, TextPrompt) else None
    return RequestOutput(request.request_id, text, request.prompt_token_ids, choices, finished, **extra)


def count_up(request: FakeRequest) -> Iterator[RequestOutput | Exception]:
    """Tokens 10, 11, ... for each choice until max_tokens; as deltas, or all in one final output."""
    params = request.params
    room = MAX_MODEL_LEN - len(request.prompt_token_ids)
    length = params.max_tokens or min(room, request.max_output_tokens or room)
    ids = [10 + i % 500 for i in range(length)]
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        yield output(request, [_choice(request, c, ids, "length") for c in range(params.n)], finished=True, num_cached_tokens=2)
        return
    for i, token_id in enumerate(ids):
        reason = "length" if i == len(ids) - 1 else None
        choices = [_choice(request, c, [token_id], reason) for c in range(params.n)]
        yield output(request, choices, finished=reason is not None, num_cached_tokens=2)


def _choice(request: FakeRequest, index: int, ids: list[int], reason: Any) -> CompletionOutput:
    positions = None
    if request.params.logprobs is not None:
        positions = [
            {token_id: Logprob(-1.5, 3, token_text(token_id), token_text(token_id).encode())}
            | {other: Logprob(-0.25 * (other + 1), other + 1, token_text(other)) for other in range(request.params.logprobs)}
            for token_id in ids
        ]
    text = "".join(map(token_text, ids)) if request.params.detokenize else ""
    return CompletionOutput(index, text, ids, -1.5 * len(ids), positions, reason)


def _check_ids(field: str, token_ids: Sequence[int]) -> None:
    if any(not 0 <= token_id < VOCAB_SIZE for token_id in token_ids):
        raise InvalidRequestError(field, f"must be in [0, {VOCAB_SIZE})")


class FakeEngine:
    """Outputs come from `script`, one each `delay` seconds; with `hold` set they stop before the `hold`-th until `release`."""

    def __init__(self, script: Script = count_up, **args: Any) -> None:
        self.config = fake_config(**args)
        self.script = script
        self.delay = 0.0
        self.hold: int | None = None
        self.hold_warm_up = False
        self.tokenizer_is_free = asyncio.Event()  # cleared: calls of it wait
        self.tokenizer_is_free.set()
        self.num_tokenizer_calls = 0  # that wait or run
        self.errored = False
        self.kv_script: list[KVEventBatch | Exception] = []  # what a subscriber gets
        self.kv_refusal: Exception | None = None  # or this, instead of a subscription
        self.stalled = 0.0  # seconds
        self.has_tokenizer = True
        self.has_chat_template = True
        self.requests: list[FakeRequest] = []
        self.running: dict[str, FakeRequest] = {}
        self.metrics = EngineMetrics()
        self.num_aborted = 0  # requests that ended before their script did
        self.started = False
        self.is_shut_down = False

    @property
    def is_running(self) -> bool:
        return self.started and not self.is_shut_down

    def start(self) -> None:
        self.started = True

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        max_output_tokens: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        ids = self._check(prompt, params)
        request = FakeRequest(request_id, prompt, params, priority, cache_salt, tenant, ids, max_output_tokens)
        if request_id != "warm-up":
            self.requests.append(request)
        self.running[request_id] = request
        done = False
        try:
            for i, item in enumerate(self.script(request)):
                await self._pause(request, i)
                if isinstance(item, Exception):
                    done = True
                    raise item
                done = item.finished
                request.num_pulled += 1
                self._count(item)
                yield item
        finally:
            self.num_aborted += not done
            del self.running[request_id]

    def _count(self, item: RequestOutput) -> None:
        for choice in item.outputs:
            self.metrics.observe_tokens(len(choice.token_ids), None)
            if choice.finish_reason is not None:
                self.metrics.request_success[choice.finish_reason] += 1

    async def _pause(self, request: FakeRequest, i: int) -> None:
        await asyncio.sleep(self.delay)
        while self._is_held(request, i) and not request.is_aborted:
            await request.woken.wait()
            request.woken.clear()
        if request.is_aborted:
            raise RequestCancelledError("aborted")

    def _is_held(self, request: FakeRequest, i: int) -> bool:
        if request.request_id == "warm-up":
            return self.hold_warm_up
        is_unary = request.params.output_kind is RequestOutputKind.FINAL_ONLY
        return self.hold is not None and (is_unary or i >= self.hold)

    def release(self) -> None:
        """Let held requests go on. On the loop."""
        self.hold, self.hold_warm_up = None, False
        for request in self.running.values():
            request.woken.set()

    def _check(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        ids = self._encode(prompt)
        _check_ids("prompt_token_ids", ids)
        total = len(ids) + (params.max_tokens or 1)
        if total > MAX_MODEL_LEN:
            raise InvalidRequestError("max_tokens", f"{total} tokens are more than max_model_len={MAX_MODEL_LEN}")
        return ids

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, TokensPrompt):
            return list(prompt.token_ids)
        if isinstance(prompt, ChatPrompt):
            if not self.has_chat_template:
                raise InvalidRequestError("messages", "this model has no chat template")
            return [ord(c) % VOCAB_SIZE for message in prompt.messages for c in message["content"]]
        return [0] * prompt.add_special_tokens + [ord(c) % VOCAB_SIZE for c in prompt.text]

    async def abort(self, request_id: str) -> bool:
        request = self.running.get(request_id)
        if request is not None:
            request.is_aborted = True
            request.woken.set()
        return request is not None

    async def tokenize(self, prompt: Prompt) -> list[int]:
        await self._tokenizer()
        return self._encode(prompt)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        _check_ids("token_ids", token_ids)
        await self._tokenizer()
        return "".join(map(token_text, token_ids))

    async def _tokenizer(self) -> None:
        self.num_tokenizer_calls += 1
        try:
            await self.tokenizer_is_free.wait()
        finally:
            self.num_tokenizer_calls -= 1

    async def save_tokenizer(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text('{"version": "1.0"}' + " " * 200_000)

    @asynccontextmanager
    async def kv_events(self, after: int = 0) -> AsyncIterator[AsyncGenerator[KVEventBatch, None]]:
        async def batches() -> AsyncGenerator[KVEventBatch, None]:
            for number, item in enumerate(self.kv_script, after + 1):
                if isinstance(item, Exception):
                    raise item
                yield dataclasses.replace(item, sequence_number=number)
            await asyncio.Event().wait()

        if self.kv_refusal is not None:
            raise self.kv_refusal
        async with aclosing(batches()) as stream:
            yield stream

    async def reset_prefix_cache(self) -> bool:
        return not self.running

    def stalled_for(self) -> float:
        return self.stalled

    def where(self) -> str:
        return "in the fake step"

    def stats(self) -> dict[str, Any]:
        scheduled = SchedulerStats(num_running=len(self.running), num_blocks=8, num_free_blocks=8 - len(self.running))
        counted = {name: getattr(self.metrics, name) for name in ("prompt_tokens", "generation_tokens", "request_success")}
        return asdict(scheduled) | counted | {"num_requests": len(self.running), "tenants": {}}

    async def reset_metrics(self) -> None:
        self.metrics.reset()

    def shutdown(self) -> None:
        self.is_shut_down = True
