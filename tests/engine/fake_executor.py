"""An executor without a model: it follows the scheduler's orders as a worker must, and a script says the tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pyengine.config import EngineArgs, EngineConfig, HardwareInfo, ModelArchConfig
from pyengine.config_resolution import resolve
from pyengine.engine.llm_engine import LLMEngine
from pyengine.engine.startup import EngineParts
from pyengine.scheduler_output import ModelRunnerOutput, NewRequestData, SchedulerOutput, TokenLogprobs

#: (sequence, output tokens so far) -> next token
Script = Callable[[NewRequestData, int], int]


def fake_config(**args: Any) -> EngineConfig:
    """A small machine's configuration; `args` are EngineArgs, and `usage_context`."""
    usage_context = args.pop("usage_context", "llm_class")
    arch_values = {"vocab_size": args.pop("vocab_size", 512), "eos_token_ids": args.pop("eos_token_ids", (1,))}
    arch = ModelArchConfig(
        architecture="LlamaForCausalLM",
        hidden_size=64,
        intermediate_size=128,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=32,
        max_position_embeddings=args.pop("max_position_embeddings", 256),
        rms_norm_eps=1e-5,
        **arch_values,
    )
    hardware = HardwareInfo(has_cuda=False, available_memory=2**30, num_cores=1)
    engine_args = EngineArgs(device="cpu", **({"num_kv_blocks": 64, "max_num_seqs": 16} | args))
    return resolve(engine_args, "fake", arch, hardware, usage_context=usage_context)


class FakeExecutor:
    """Answers each step from a script.

    Attributes:
        steps: every SchedulerOutput, in order.
        delay: seconds that a step takes.
        fail_at: the step (from 0) that raises.
        fail_requests: sequences that fail, and why, in their next step.
    """

    def __init__(self, script: Script, *, vocab_size: int = 512) -> None:
        self.script = script
        self.steps: list[SchedulerOutput] = []
        self.delay = 0.0
        self.fail_at: int | None = None
        self.fail_requests: dict[str, str] = {}
        self.is_shut_down = False
        self._vocab_size = vocab_size
        self._known: dict[str, tuple[NewRequestData, int, int]] = {}  # data, tokens in all, computed

    def load_model(self) -> None:
        pass

    def available_memory(self) -> int:
        return 2**30

    def initialize_kv_cache(self, config: EngineConfig) -> None:
        pass

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append(scheduler_output)
        if self.fail_at is not None and len(self.steps) > self.fail_at:
            raise RuntimeError("scripted failure")
        if self.delay:
            time.sleep(self.delay)
        self._apply(scheduler_output)
        output = ModelRunnerOutput()
        for req_id, count in scheduler_output.num_scheduled_tokens.items():
            data, total, computed = self._known[req_id]
            if req_id in self.fail_requests:
                output.failed_req_ids[req_id] = self.fail_requests.pop(req_id)
                continue
            if data.num_prompt_logprobs is not None:
                positions = range(computed + 1, min(computed + count, len(data.prompt_token_ids) - 1) + 1)
                output.prompt_logprobs[req_id] = [self._logprobs(data.prompt_token_ids[p]) for p in positions]
            computed += count
            if computed == total:
                token = self.script(data, total - len(data.prompt_token_ids))
                output.sampled_token_ids[req_id] = [token]
                if data.sampling_params.logprobs is not None:
                    output.logprobs[req_id] = [self._logprobs(token)]
                total += 1
            self._known[req_id] = (data, total, computed)
        return output

    def _apply(self, scheduler_output: SchedulerOutput) -> None:
        for req_id in (*scheduler_output.finished_req_ids, *scheduler_output.preempted_req_ids):
            self._known.pop(req_id, None)
        for data in scheduler_output.scheduled_new_reqs:
            total = len(data.prompt_token_ids) + len(data.output_token_ids)
            self._known[data.req_id] = (data, total, data.num_computed_tokens)
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            assert self._known[req_id][2] == computed
        for swapped in scheduler_output.scheduled_swapped_in_reqs:
            assert self._known[swapped.req_id][2] == swapped.num_computed_tokens

    def _logprobs(self, token: int) -> TokenLogprobs:
        """The token itself and the one after it."""
        return TokenLogprobs([token, (token + 1) % self._vocab_size], [-0.5, -1.5], [1, 2])

    def shutdown(self) -> None:
        self.is_shut_down = True


def script_of(*outputs: list[int]) -> Script:
    """Sequence i of a request (i = 0 for n = 1) says outputs[i], then the end-of-sequence id 1."""

    def next_token(data: NewRequestData, position: int) -> int:
        head, _, _ = data.req_id.partition("_")
        tokens = outputs[int(head) if len(outputs) > 1 else 0]
        return tokens[position] if position < len(tokens) else 1

    return next_token


def counting(data: NewRequestData, position: int) -> int:
    """Never ends by itself: a sequence says 100 + position (mod 100), whatever else runs."""
    return 100 + (data.prompt_token_ids[0] + position) % 100


def fake_engine(script: Script, tokenizer: Any = None, **args: Any) -> tuple[LLMEngine, FakeExecutor]:
    """An engine on a FakeExecutor; without a tokenizer it takes and gives token ids only."""
    config = fake_config(skip_tokenizer_init=tokenizer is None, **args)
    executor = FakeExecutor(script, vocab_size=config.model.arch.vocab_size)
    return LLMEngine(EngineArgs(), parts=EngineParts(config, executor, tokenizer)), executor
