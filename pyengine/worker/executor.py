"""Where steps run: one process now, ranks of a tensor-parallel group later. The engine knows only this interface."""

from __future__ import annotations

from typing import Protocol

from pyengine.config import EngineConfig
from pyengine.scheduler_output import ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """Runs the model. Built from a checkpoint and a `LoadConfig`. Every call is made from the engine's step thread."""

    def load_model(self) -> None:
        """Load the weights. After it, `available_memory` is what is left for the KV pool."""

    def available_memory(self) -> int: ...

    def initialize_kv_cache(self, config: EngineConfig) -> None:
        """Allocate the pools; `config` is resolved now."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """One step, as `SchedulerOutput` orders it."""

    def shutdown(self) -> None:
        """Release everything. Idempotent."""
