"""Where steps run: one process now, ranks of a tensor-parallel group later. The engine knows only this interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pyengine.config import EngineConfig, LoadConfig
from pyengine.scheduler_output import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from pyengine.loader.base import Checkpoint


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


class UniprocExecutor:
    """An `Executor` with its one worker in this process.

    Raises:
        ConfigError: the device cannot be used by this build.
    """

    def __init__(self, checkpoint: Checkpoint, load_config: LoadConfig) -> None:
        from pyengine.worker.worker import Worker  # brings torch and the model code, which an engine on a stand-in needs not

        self._worker = Worker(checkpoint, load_config)

    def load_model(self) -> None:
        self._worker.load_model()

    def available_memory(self) -> int:
        return self._worker.available_memory()

    def initialize_kv_cache(self, config: EngineConfig) -> None:
        self._worker.initialize_kv_cache(config)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return self._worker.execute_model(scheduler_output)

    def shutdown(self) -> None:
        self._worker.shutdown()
