"""One process's share of the engine's work: the device, the model's weights, the KV pools, and the runner over them."""

from __future__ import annotations

import logging

from pyengine.config import GIB, CacheConfig, EngineConfig, LoadConfig, ModelArchConfig
from pyengine.errors import ConfigError
from pyengine.loader.base import Checkpoint
from pyengine.loader.weights import load_model
from pyengine.models.interfaces import CausalLM
from pyengine.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pyengine.worker.backend import KVCacheSpec, KVPool
from pyengine.worker.backends import create_backend
from pyengine.worker.model_runner import ModelRunner
from pyengine.worker.profiling import profile_peak_memory

logger = logging.getLogger(__name__)


class Worker:
    """Device set-up and memory; a step itself is `ModelRunner`'s.

    Args:
        checkpoint: an open checkpoint.
        load_config: device, dtype, threads.

    Raises:
        ConfigError: the device cannot be used by this build.
    """

    def __init__(self, checkpoint: Checkpoint, load_config: LoadConfig) -> None:
        self._checkpoint = checkpoint
        self._load_config = load_config
        self._backend = create_backend(load_config.device, load_config.num_threads)
        self._model: CausalLM | None = None
        self._runner: ModelRunner | None = None

    def load_model(self) -> None:
        """Load the weights.

        Raises:
            ModelLoadError: naming the file, and the tensor or scheme where there is one.
        """
        self._model = load_model(self._checkpoint, self._load_config, self._backend.ops)

    def available_memory(self) -> int:
        """Bytes that the KV pool may be cut from: what is free now, less what the largest step needs beside it."""
        load = self._load_config
        peak = None
        if self._model is not None and load.max_num_batched_tokens:
            peak = profile_peak_memory(
                self._model,
                self._backend,
                self._checkpoint.arch,
                dtype=load.dtype,
                num_tokens=load.max_num_batched_tokens,
                num_rows=load.max_num_seqs,
            )
        available = self._backend.available_memory()
        if peak is None:
            return available
        logger.info(
            "profiling run: a step of %d tokens needs %.2f GiB beside the weights; %.2f GiB are left",
            load.max_num_batched_tokens,
            peak / GIB,
            (available - peak) / GIB,
        )
        return max(available - peak, 0)

    def initialize_kv_cache(self, config: EngineConfig) -> None:
        """Allocate the pools.

        Raises:
            ConfigError: naming the flag that asks for more than there is.
        """
        if self._model is None:
            raise RuntimeError("initialize_kv_cache before load_model")
        spec = kv_cache_spec(config.model.arch, config.cache)
        # Block 0 is the null block, on top of the ones that the scheduler hands out.
        pool = self._allocate("num_kv_blocks", spec, config.cache.num_blocks + 1, host=False)
        host_pool = None
        if config.cache.num_cpu_blocks:
            host_pool = self._allocate("swap_space", spec, config.cache.num_cpu_blocks, host=True)
        self._runner = ModelRunner(self._model, self._backend, config, pool, host_pool)

    def _allocate(self, flag: str, spec: KVCacheSpec, num_blocks: int, *, host: bool) -> KVPool:
        try:
            return self._backend.allocate_pool(spec, num_blocks, host=host)
        except (OSError, OverflowError, RuntimeError) as error:  # the host has not so much, or the address space, or a GPU
            reason = str(error).splitlines()[0]
            raise ConfigError(flag, f"a pool of {num_blocks} KV blocks cannot be allocated: {reason}") from error

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """One step."""
        if self._runner is None:
            raise RuntimeError("execute_model before initialize_kv_cache")
        return self._runner.execute(scheduler_output)

    def shutdown(self) -> None:
        """Wait for the device and release model and pools. Idempotent."""
        self._backend.copy_stream().synchronize()
        self._backend.compute_stream().synchronize()
        self._runner = None
        self._model = None


def kv_cache_spec(arch: ModelArchConfig, cache: CacheConfig) -> KVCacheSpec:
    """The KV cache that a model and its configuration ask for."""
    return KVCacheSpec(
        num_layers=arch.num_layers,
        num_kv_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        block_size=cache.block_size,
        dtype=cache.kv_cache_dtype,
    )
