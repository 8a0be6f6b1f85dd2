"""The asyncio engine on a tiny checkpoint: streams that come and go leave nothing, and change nobody's tokens."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from pathlib import Path

import pytest

from pyengine.config import EngineArgs
from pyengine.engine.async_engine import AsyncLLMEngine
from pyengine.engine.llm_engine import LLMEngine
from pyengine.inputs import TokensPrompt
from pyengine.sampling_params import RequestOutputKind, SamplingParams


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_streams_cancelled_at_random_points(tiny_llama: Path, mode: str) -> None:
    """Rule 5: queued, prefilling, decoding, preempted or swapped; a pool that is far too small; seeds keep their tokens."""
    args = EngineArgs(
        model=str(tiny_llama),
        device="cpu",
        num_kv_blocks=24,
        max_num_seqs=8,
        long_prefill_token_threshold=32,
        preemption_mode=mode,  # type: ignore[arg-type]
        swap_space=0.01,
    )
    engine = AsyncLLMEngine(LLMEngine(args))
    engine.start()
    rng = random.Random(3)
    prompts = [[rng.randrange(4, 512) for _ in range(rng.randrange(1, 120))] for _ in range(6)]
    params = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        for i in range(6)
    ]

    async def stream(i: int, request_id: str, leave_after: int | None) -> list[int] | None:
        tokens: list[int] = []
        async with aclosing(engine.generate(TokensPrompt(prompts[i]), params[i], request_id)) as outputs:
            async for output in outputs:
                tokens += output.outputs[0].token_ids
                if leave_after is not None and len(tokens) >= leave_after:
                    return None
        return tokens

    async def one(number: int, expected: list[list[int] | None]) -> bool:
        i = number % 6
        await asyncio.sleep(rng.random() * 0.5)
        fate = rng.choice(["finish", "leave", "cancel", "abort"])
        task = asyncio.create_task(stream(i, f"r{number}", rng.randrange(1, 30) if fate == "leave" else None))
        if fate in ("cancel", "abort"):
            await asyncio.sleep(rng.random() * 0.1)
            task.cancel() if fate == "cancel" else await engine.abort(f"r{number}")
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if fate == "finish":
            assert result == expected[i]
        return fate == "finish"

    async def main() -> None:
        alone = [await stream(i, f"alone{i}", None) for i in range(6)]
        finished = await asyncio.gather(*(one(number, alone) for number in range(100)))
        assert 5 < sum(finished) < 60
        while engine.stats()["num_requests"]:
            await asyncio.sleep(0.005)
        stats = engine.stats()
        assert stats["num_free_blocks"] == stats["num_blocks"]
        assert stats["num_free_cpu_blocks"] == stats["num_cpu_blocks"]
        assert stats[f"num_preemptions_{mode}"] > 0
        assert [await stream(i, "again", None) for i in range(6)] == alone

    try:
        asyncio.run(asyncio.wait_for(main(), 120))
    finally:
        engine.shutdown()
    assert not engine.is_running
    assert not engine.errored
