"""The engine: requests in, steps, outputs out. `LLMEngine.step` is the whole loop of one step, top to bottom."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from pyengine.config import EngineArgs, EngineConfig, UsageContext
from pyengine.engine.detokenizer import TokenVocabulary
from pyengine.engine.input_processor import InputProcessor, ProcessedInput
from pyengine.engine.metrics import EngineMetrics
from pyengine.engine.output_processor import OutputProcessor
from pyengine.engine.pace import StepPacer, make_pacer
from pyengine.engine.prefix_cache import PrefixCache
from pyengine.engine.request import Request
from pyengine.engine.scheduler import Scheduler
from pyengine.engine.startup import EngineParts, start_up
from pyengine.errors import EngineDeadError, InvalidRequestError
from pyengine.inputs import Prompt
from pyengine.outputs import FinishReason, RequestOutput
from pyengine.sampling_params import SamplingParams
from pyengine.scheduler_output import ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger(__name__)


class LLMEngine:
    """A model and the requests that run on it. Not thread-safe: `AsyncLLMEngine` gives it a thread of its own.

    Args:
        args: what the user set.
        usage_context: who uses it, which some defaults depend on.
        parts: an executor, a tokenizer and a configuration to use instead of what `args` names.
        clock: seconds, to time steps by.

    Raises:
        ConfigError: naming the argument that does not fit.
        ModelLoadError: naming the file or tensor.
    """

    def __init__(
        self,
        args: EngineArgs,
        *,
        usage_context: UsageContext = "llm_class",
        parts: EngineParts | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        parts = start_up(args, usage_context) if parts is None else parts
        self.config: EngineConfig = parts.config
        self.tokenizer: Any | None = parts.tokenizer
        self.log_stats = not args.disable_log_stats
        self.metrics = EngineMetrics()
        self.input_processor = InputProcessor(parts.config, parts.tokenizer)
        self._executor = parts.executor
        self._scheduler = Scheduler(parts.config.scheduler, parts.config.cache)
        vocabulary = None if parts.tokenizer is None else TokenVocabulary(parts.tokenizer)
        self._output_processor = OutputProcessor(vocabulary, self.metrics)
        self._clock = clock
        self._pacer = make_pacer(parts.config.scheduler)
        self._dead: EngineDeadError | None = None
        self._is_shut_down = False

    # ---- requests

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str | None = None,
        arrival_time: float | None = None,
    ) -> None:
        """Queue a request; its outputs come from `step`. See `InputProcessor.process` for the arguments.

        Raises:
            InvalidRequestError: naming the field; also for an id that a live request has.
            EngineDeadError: a step has failed before.
        """
        self.add_processed(
            self.input_processor.process(
                request_id,
                prompt,
                params,
                priority=priority,
                cache_salt=cache_salt,
                tenant=tenant,
                arrival_time=arrival_time,
            )
        )

    def add_processed(self, source: ProcessedInput) -> None:
        """Queue a request that `input_processor` has made; raises as `add_request`."""
        self._check_alive()
        sequence_ids = source.sequence_ids()
        if source.request_id in self._output_processor or any(map(self._output_processor.has_sequence, sequence_ids)):
            raise InvalidRequestError("request_id", f"{source.request_id!r} is in use by a live request")
        requests = [
            Request(
                request_id=sequence_id,
                prompt_token_ids=source.prompt_token_ids,
                sampling_params=source.params,
                seed=source.sequence_seed(index),
                arrival_time=source.arrival_time,
                stop_token_ids=source.stop_token_ids,
                max_total_tokens=source.max_total_tokens,
                parent_id=source.request_id if source.params.n > 1 else None,
                index=index,
                priority=source.priority,
                cache_salt=source.cache_salt,
                tenant=source.tenant,
                bad_words_token_ids=source.bad_words_token_ids,
            )
            for index, sequence_id in enumerate(sequence_ids)
        ]
        added: list[str] = []
        try:
            for request in requests:
                self._scheduler.add_request(request)
                added.append(request.request_id)
        except Exception:
            self._scheduler.finish_requests(added, "error")
            raise
        self._output_processor.add_request(source, requests)

    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """Abort requests; their blocks are free at once. Unknown and finished ids are ignored.

        Returns:
            The last output of each, with reason "abort".
        """
        outputs: list[RequestOutput] = []
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            output, sequence_ids = self._output_processor.abort_request(request_id, time.monotonic())
            self._scheduler.finish_requests(sequence_ids, "abort")
            if output is not None:
                outputs.append(output)
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do."""
        return self._scheduler.has_unfinished_requests()

    # ---- the loop

    def step(self) -> list[RequestOutput]:
        """Run one step and return what its requests are to be told.

        Raises:
            EngineDeadError: the step failed; every live request is gone, and the engine runs no more.
        """
        self._check_alive()
        try:
            return self._step()
        except Exception as error:
            raise self._die(error) from error

    def _step(self) -> list[RequestOutput]:
        if self._pacer is None:
            scheduler_output = self._scheduler.schedule()
            runner_output = self._executor.execute_model(scheduler_output)
        else:
            scheduler_output, runner_output = self._paced_step(self._pacer)
        sequence_outputs = self._scheduler.update_from_output(scheduler_output, runner_output)
        processed = self._output_processor.process(sequence_outputs, time.monotonic())
        self._finish_sequences(processed.finished_sequences)
        self.metrics.observe_step(scheduler_output.total_num_scheduled_tokens)
        return processed.request_outputs

    def _paced_step(self, pacer: StepPacer) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        started = self._clock()
        scheduler_output = self._scheduler.schedule(pacer.limits(self._scheduler.num_streams))
        runner_output = self._executor.execute_model(scheduler_output)
        counts = scheduler_output.num_scheduled_tokens.values()
        if counts:
            num_streams = sum(count == 1 for count in counts)
            pacer.observe(self._clock() - started, num_streams, sum(counts) - num_streams)
        return scheduler_output, runner_output

    def _finish_sequences(self, finished: Iterable[tuple[str, FinishReason]]) -> None:
        """Tell the scheduler of sequences that ended for a reason that it cannot see, in the same step."""
        by_reason: dict[FinishReason, list[str]] = {}
        for sequence_id, reason in finished:
            by_reason.setdefault(reason, []).append(sequence_id)
        for reason, sequence_ids in by_reason.items():
            self._scheduler.finish_requests(sequence_ids, reason)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))
        if self._is_shut_down:
            raise EngineDeadError("the engine is shut down")

    def _die(self, error: Exception) -> EngineDeadError:
        """A step failed: forget every request, so that nothing is held by an engine that cannot go on."""
        logger.critical("a step failed; the engine stops", exc_info=error)
        self._dead = EngineDeadError(f"a step failed: {type(error).__name__}: {error}")
        sequence_ids = self._output_processor.clear()
        try:
            self._scheduler.finish_requests(sequence_ids, "error")
        except Exception:
            logger.exception("the scheduler's state was damaged by the failed step")
        return self._dead

    @property
    def errored(self) -> bool:
        """Whether a step has failed."""
        return self._dead is not None

    # ---- the prefix cache

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Live requests go on; what they compute is not cached until they are admitted anew."""
        self._scheduler.reset_prefix_cache()

    @property
    def prefix_cache(self) -> PrefixCache | None:
        """For listeners to its events; None without prefix caching."""
        return self._scheduler.block_manager.prefix_cache

    # ---- around it

    def stats(self) -> dict[str, Any]:
        """Counters since the start and gauges of now, by name: the scheduler's, tokens and requests, and those of `tenants`.

        `kv_utilisation` is the mean over steps of used / allocated KV slots; `kv_utilisation_now` is the current step's.
        """
        stats = self._scheduler.stats().as_dict()
        stats["tenants"] = self._scheduler.tenant_stats()
        stats["num_requests"] = len(self._output_processor)
        stats["prompt_tokens"] = self.metrics.prompt_tokens
        stats["generation_tokens"] = self.metrics.generation_tokens
        stats["request_success"] = dict(self.metrics.request_success)
        return stats

    def reset_metrics(self) -> None:
        """Count from zero again, so that requests which only warmed the engine up are in no figure. Gauges stay."""
        self.metrics.reset()
        self._scheduler.reset_stats()

    def shutdown(self) -> None:
        """Abort what is live and release the executor. Idempotent."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        if self._dead is None:
            self.abort_request(self._output_processor.request_ids)
        self._executor.shutdown()
