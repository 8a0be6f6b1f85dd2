"""From arguments to the parts of an engine: checkpoint, tokenizer, weights and KV cache, each phase logged with its time."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pyengine.config import EngineArgs, EngineConfig, UsageContext
from pyengine.config_resolution import resolve, resolve_load
from pyengine.tenants import load_tenants
from pyengine.worker.executor import Executor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of."""

    config: EngineConfig
    executor: Executor  # weights loaded, KV cache allocated
    tokenizer: Any | None  # a Transformers tokenizer; None with skip_tokenizer_init


@contextmanager
def _phase(name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    logger.info("start-up: %s, %.2f s", name, time.monotonic() - started)


def start_up(args: EngineArgs, usage_context: UsageContext = "llm_class") -> EngineParts:
    """Load everything.

    Raises:
        ConfigError: naming the argument that does not fit.
        ModelLoadError: naming the file or tensor.
    """
    started = time.monotonic()
    tenants = load_tenants(args.tenants)
    with _phase("libraries imported"):
        # Here and not above: they bring torch and transformers, and an engine on other parts needs neither.
        from pyengine.loader.checkpoint import open_checkpoint
        from pyengine.loader.tokenizer import load_tokenizer
        from pyengine.loader.weights import check_scheme
        from pyengine.worker.executor import UniprocExecutor
        from pyengine.worker.hardware import detect_hardware
    with _phase("checkpoint opened"):
        checkpoint = open_checkpoint(args.model, revision=args.revision, download_dir=args.download_dir)
    hardware = detect_hardware()
    load_config = resolve_load(args, checkpoint.arch, hardware)
    check_scheme(checkpoint, load_config.quantization)
    tokenizer = None
    if not args.skip_tokenizer_init:
        with _phase("tokenizer loaded"):
            tokenizer = load_tokenizer(checkpoint, args.tokenizer, args.chat_template, download_dir=args.download_dir)
    executor = UniprocExecutor(checkpoint, load_config)
    try:
        with _phase("weights loaded"):
            executor.load_model()
        hardware = replace(hardware, available_memory=executor.available_memory())
        config = resolve(args, checkpoint.name, checkpoint.arch, hardware, tenants, usage_context)
        for note in config.notes:
            logger.info("%s", note)
        with _phase("KV cache allocated"):
            executor.initialize_kv_cache(config)
    except BaseException:
        executor.shutdown()
        raise
    logger.info(
        "%s on %s, %s, max_model_len %d: started in %.2f s",
        config.model.served_model_name,
        config.device.device,
        config.model.dtype,
        config.model.max_model_len,
        time.monotonic() - started,
    )
    return EngineParts(config, executor, tokenizer)
