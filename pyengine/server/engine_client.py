"""What the servers ask of the engine. `AsyncLLMEngine` is the one implementation; tests have another."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from pyengine.config import EngineConfig
from pyengine.engine.kv_events import KVEventBatch
from pyengine.engine.metrics import EngineMetrics
from pyengine.inputs import Prompt
from pyengine.outputs import RequestOutput
from pyengine.sampling_params import SamplingParams


class EngineClient(Protocol):
    """An engine that steps in a thread of its own. Every method is called from the server's event loop."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def errored(self) -> bool:
        """Whether a step failed for good: nothing runs any more."""

    @property
    def has_tokenizer(self) -> bool: ...

    @property
    def has_chat_template(self) -> bool: ...

    def start(self) -> None:
        """Start the step thread."""

    def generate(
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
        """One request's outputs, as `params.output_kind` asks. Closing the generator aborts the request.

        A choice without `params.max_tokens` ends after `max_output_tokens`, or where model and memory end it before.

        Raises:
            PyEngineError: at the first or any later output.
        """

    async def abort(self, request_id: str) -> bool:
        """Whether there was such a request. Its generator raises RequestCancelledError or ends with reason "abort"."""

    async def tokenize(self, prompt: Prompt) -> list[int]: ...

    async def detokenize(self, token_ids: Sequence[int]) -> str: ...

    async def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer's files into a folder, as Transformers does."""

    def kv_events(self, after: int = 0) -> AbstractAsyncContextManager[AsyncGenerator[KVEventBatch, None]]:
        """What happens to the prefix cache, after batch number `after`; 0: the current state, and what happens then.

        Raises:
            PyEngineError: on entry, or at any batch.
        """

    async def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix, unless requests are in flight. Returns whether it did."""

    def stalled_for(self) -> float:
        """Seconds for which there has been work and no step; 0 without work."""

    def where(self) -> str:
        """Where the step thread is, for a log line about a stalled engine."""

    def stats(self) -> dict[str, Any]: ...

    @property
    def metrics(self) -> EngineMetrics:
        """What the engine counts; to be read only."""

    async def reset_metrics(self) -> None:
        """Count from zero again, between two steps."""

    def shutdown(self) -> None:
        """Stop the step thread and release everything. Blocks; idempotent."""
