"""The engine in its own thread: streams, slow readers, cancellation, drain, shutdown, the watchdog."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import sample_tokenizers
from fake_executor import FakeExecutor, counting, fake_engine, script_of

from pyengine.engine.async_engine import AsyncLLMEngine
from pyengine.engine.output_stream import OutputStream
from pyengine.errors import EngineDeadError, InvalidRequestError, PyEngineError, RequestCancelledError, UnavailableError
from pyengine.inputs import TextPrompt, TokensPrompt
from pyengine.outputs import RequestOutput
from pyengine.sampling_params import RequestOutputKind, SamplingParams
from pyengine.scheduler_output import NewRequestData

DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
#: longer than any test waits
ENDLESS = SamplingParams(max_tokens=50_000, output_kind=DELTA)
ROOM = {"max_position_embeddings": 100_000, "num_kv_blocks": 20_000}


def run_async(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test coroutine, for at most 30 s."""

    def wrapper() -> None:
        asyncio.run(asyncio.wait_for(test(), 30))

    wrapper.__name__ = test.__name__
    wrapper.__doc__ = test.__doc__
    return wrapper


@asynccontextmanager
async def started(
    script: Any = counting, tokenizer: Any = None, **args: Any
) -> AsyncIterator[tuple[AsyncLLMEngine, FakeExecutor]]:
    engine, executor = fake_engine(script, tokenizer, **(ROOM | args))
    made = AsyncLLMEngine(engine)
    made.start()
    try:
        yield made, executor
    finally:
        await asyncio.to_thread(made.shutdown)
        assert executor.is_shut_down
        assert not made.is_running


async def collect(
    engine: AsyncLLMEngine, request_id: str, params: SamplingParams, first: int = 3, **options: Any
) -> list[RequestOutput]:
    return [output async for output in engine.generate(TokensPrompt([first] * 4), params, request_id, **options)]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def is_live(engine: AsyncLLMEngine, request_id: str) -> bool:
    return request_id in engine._engine._output_processor


def all_free(engine: AsyncLLMEngine) -> bool:
    stats = engine.stats()
    return stats["num_free_blocks"] == stats["num_blocks"] and not stats["num_requests"]


@run_async
async def test_many_streams_at_once() -> None:
    async with started(max_num_seqs=8) as (engine, _):
        kinds = list(RequestOutputKind)
        params = [SamplingParams(max_tokens=5 + i % 7, output_kind=kinds[i % 3]) for i in range(40)]
        results = await asyncio.gather(*(collect(engine, f"r{i}", p, first=i) for i, p in enumerate(params)))
        for i, (outputs, p) in enumerate(zip(results, params, strict=True)):
            assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
            last = outputs[-1].outputs[0].token_ids
            tokens = [t for o in outputs for t in o.outputs[0].token_ids] if p.output_kind is DELTA else last
            assert tokens == [100 + i + k for k in range(5 + i % 7)]
        assert all_free(engine)


@run_async
async def test_a_cap_of_the_output_ends_what_has_no_limit_of_its_own() -> None:
    async with started() as (engine, _):
        for max_tokens, expected in ((None, 5), (3, 3)):
            params = SamplingParams(max_tokens=max_tokens, output_kind=FINAL_ONLY)
            (output,) = await collect(engine, "r", params, max_output_tokens=5)
            assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (expected, "length")


@run_async
async def test_a_slow_reader_gets_merged_deltas() -> None:
    text = "the cat 😀 and the harbour " * 4
    tokenizer = sample_tokenizers.byte_level()
    ids = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    gate, script = threading.Event(), script_of(ids, ids)

    def gated(data: NewRequestData, position: int) -> int:
        if position == 10:
            gate.wait(20)
        return script(data, position)

    async with started(gated, tokenizer, vocab_size=len(tokenizer), eos_token_ids=(tokenizer.eos_token_id,)) as (engine, _):
        params = SamplingParams(n=2, max_tokens=len(ids), output_kind=DELTA, logprobs=1, prompt_logprobs=0)
        outputs = []
        async with aclosing(engine.generate(TextPrompt("the"), params, "r")) as stream:
            async for output in stream:
                outputs.append(output)
                gate.set()
                await until(lambda: not is_live(engine, "r"))
        assert len(outputs) == 2  # all that came while the reader was away is one output
        for index in range(2):
            choices = [c for o in outputs for c in o.outputs if c.index == index]
            assert "".join(c.text for c in choices) == text
            assert [t for c in choices for t in c.token_ids] == ids
            assert len([entry for c in choices for entry in c.logprobs or []]) == len(ids)
            assert choices[-1].finish_reason == "stop"
            assert choices[-1].cumulative_logprob == pytest.approx(-0.5 * len(ids))
        assert len([o for o in outputs if o.prompt_logprobs is not None]) == 1


@run_async
async def test_wakeups_do_not_pile_up_behind_a_blocked_loop() -> None:
    """However long an event loop is blocked, it has one callback a stream waiting for it."""
    async with started() as (engine, executor):
        executor.delay = 0.002
        async with aclosing(engine.generate(TokensPrompt([3]), ENDLESS, "r")) as stream:
            await anext(stream)
            loop = asyncio.get_running_loop()
            calls: list[Any] = []
            real = loop.call_soon_threadsafe
            loop.call_soon_threadsafe = lambda *a, **k: (calls.append(a), real(*a, **k))[1]  # type: ignore[assignment, method-assign]
            enough = len(executor.steps) + 20
            while len(executor.steps) < enough:
                time.sleep(0.002)
            assert len(calls) <= 1
            loop.call_soon_threadsafe = real  # type: ignore[method-assign]
            assert len((await anext(stream)).outputs[0].token_ids) >= 19


@run_async
async def test_closing_a_stream_aborts_within_a_step() -> None:
    """Rule 5: the client is gone, by closing, by cancelling its task, by an explicit abort; nobody else notices."""
    async with started(max_num_seqs=4) as (engine, executor):
        executor.delay = 0.002
        other = asyncio.create_task(collect(engine, "other", SamplingParams(max_tokens=120, output_kind=FINAL_ONLY), first=1))
        stream = engine.generate(TokensPrompt([3] * 4), ENDLESS, "closed")
        await anext(stream)
        await stream.aclose()
        steps = len(executor.steps)
        await until(lambda: not is_live(engine, "closed"))
        # The step that was in the making when the stream was closed is the last one.
        assert not any("closed" in step.num_scheduled_tokens for step in executor.steps[steps + 1 :])

        task = asyncio.create_task(collect(engine, "cancelled", ENDLESS))
        await until(lambda: is_live(engine, "cancelled"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not is_live(engine, "cancelled"))

        task = asyncio.create_task(collect(engine, "aborted", ENDLESS))
        await until(lambda: is_live(engine, "aborted"))
        assert await engine.abort("aborted") is True
        outputs = await task
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "abort"
        assert await engine.abort("aborted") is False
        assert await engine.abort("unknown") is False
        assert (await other)[-1].outputs[0].token_ids == [100 + (1 + k) % 100 for k in range(120)]
        await until(lambda: all_free(engine))


@run_async
async def test_random_cancels_leak_nothing() -> None:
    """Rule 5: queued, prefilling, decoding or preempted, in an overcommitted pool."""
    rng = random.Random(2)
    async with started(max_num_seqs=6, num_kv_blocks=24, max_num_batched_tokens=32, block_size=8) as (engine, executor):
        executor.delay = 0.0005

        async def one(i: int) -> list[int] | None:
            params = SamplingParams(max_tokens=rng.randrange(5, 60), output_kind=DELTA, n=rng.choice([1, 1, 3]))
            prompt = TokensPrompt([i % 50] * rng.randrange(1, 60))
            leave_after = rng.choice([None, 0, 1, 3])
            tokens: list[int] = []
            await asyncio.sleep(rng.random() * 0.3)
            async with aclosing(engine.generate(prompt, params, f"r{i}")) as stream:
                if leave_after == 0:
                    task = asyncio.ensure_future(anext(stream))
                    await asyncio.sleep(rng.random() * 0.02)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    return None
                async for output in stream:
                    tokens += [t for c in output.outputs if c.index == 0 for t in c.token_ids]
                    if leave_after is not None and len(tokens) >= leave_after:
                        return None
            assert tokens == [100 + (i % 50 + k) % 100 for k in range(params.max_tokens or 0)]
            return tokens

        results = await asyncio.gather(*(one(i) for i in range(150)))
        assert 20 < sum(r is None for r in results) < 140
        await until(lambda: all_free(engine))
        assert engine.stats()["num_preemptions_recompute"] + engine.stats()["num_preemptions_swap"] > 0


@run_async
async def test_an_id_can_be_used_again_as_soon_as_its_stream_is_closed() -> None:
    async with started() as (engine, executor):
        executor.delay = 0.02
        for i in range(5):
            stream = engine.generate(TokensPrompt([10 + i]), ENDLESS, "same")
            first = await anext(stream)
            assert first.outputs[0].token_ids == [110 + i]
            with pytest.raises(InvalidRequestError, match="in use"):
                await anext(engine.generate(TokensPrompt([1]), SamplingParams(), "same"))
            await stream.aclose()


@run_async
async def test_bad_requests_fail_alone_and_free_their_id() -> None:
    """Rule 11: the engine serves the next request."""
    async with started() as (engine, _):
        for prompt, params in ((TokensPrompt([]), SamplingParams()), (TokensPrompt([3]), SamplingParams(max_tokens=100_000))):
            with pytest.raises(InvalidRequestError):
                await anext(engine.generate(prompt, params, "r"))
        assert (await collect(engine, "r", SamplingParams(max_tokens=2)))[-1].finished


@run_async
async def test_abort_while_a_prompt_is_being_tokenised() -> None:
    """Rule 5: what is not queued yet never is."""
    tokenizer = sample_tokenizers.byte_level()
    async with started(counting, tokenizer, vocab_size=len(tokenizer)) as (engine, executor):
        entered, release = threading.Event(), threading.Event()

        def slow_tokenize(*args: Any, **kwargs: Any) -> Any:
            entered.set()
            release.wait(10)
            return real(*args, **kwargs)

        processor: Any = engine._engine.input_processor
        real, processor.process = processor.process, slow_tokenize
        task = asyncio.create_task(collect(engine, "r", SamplingParams()))
        await asyncio.to_thread(entered.wait, 10)
        assert await engine.abort("r") is True
        release.set()
        with pytest.raises(RequestCancelledError):
            await task
        assert executor.steps == []
        assert await engine.drain(1)


@run_async
async def test_an_abort_that_finds_a_prompt_not_queued_keeps_it_from_being_queued() -> None:
    """Also if it is ready at that moment: it would run, and nobody would know."""
    async with started() as (engine, executor):
        thread = engine._step_thread
        stream = OutputStream("r", asyncio.get_running_loop(), DELTA)
        source = engine._engine.input_processor.process("r", TokensPrompt([3]), ENDLESS)
        thread.open(stream)
        submitting = threading.Thread(target=thread.submit, args=(stream, source))
        real = stream.fail

        def fail(error: Exception) -> bool:
            stream.fail = real  # type: ignore[method-assign]
            submitting.start()
            submitting.join(0.2)  # until it is queued, unless it has to wait
            while not submitting.is_alive() and not executor.steps:
                time.sleep(0.002)
            return real(error)

        stream.fail = fail  # type: ignore[method-assign]
        assert await engine.abort("r") is True
        await asyncio.to_thread(submitting.join)
        with pytest.raises(RequestCancelledError):
            await stream.next()
        thread.close(stream)
        await engine.reset_metrics()  # after all that was asked before
        assert not is_live(engine, "r")
        assert executor.steps == []


@run_async
async def test_one_failed_request_is_an_error_of_its_own() -> None:
    async with started() as (engine, executor):
        executor.fail_requests["bad"] = "NaN logits"
        good = asyncio.create_task(collect(engine, "good", SamplingParams(max_tokens=5)))
        with pytest.raises(PyEngineError, match="NaN logits"):
            await collect(engine, "bad", SamplingParams(max_tokens=5))
        assert (await good)[-1].outputs[0].finish_reason == "length"
        assert engine.is_running
        assert not engine.errored


@run_async
async def test_a_failed_step_is_told_to_everybody() -> None:
    async with started() as (engine, executor):
        executor.delay = 0.002
        tasks = [asyncio.create_task(collect(engine, f"r{i}", ENDLESS)) for i in range(4)]
        await until(lambda: engine.stats()["num_requests"] == 4)
        executor.fail_at = 0
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
            assert "scripted failure" in str(result)
        assert engine.errored
        assert not engine.is_running
        with pytest.raises(EngineDeadError, match="scripted failure"):
            await collect(engine, "later", SamplingParams())
        await until(lambda: all_free(engine))
        await until(lambda: executor.is_shut_down)


@run_async
async def test_drain() -> None:
    """Rule 20's engine half: new requests are refused, running ones finish."""
    async with started() as (engine, executor):
        gate = threading.Event()

        def gated(data: NewRequestData, position: int) -> int:
            gate.wait(20)
            return counting(data, position)

        executor.script = gated
        task = asyncio.create_task(collect(engine, "r", SamplingParams(max_tokens=60, output_kind=FINAL_ONLY)))
        await until(lambda: is_live(engine, "r"))
        assert await engine.drain(0.01) is False
        with pytest.raises(UnavailableError, match="draining"):
            await collect(engine, "new", SamplingParams())
        gate.set()
        assert await engine.drain() is True
        assert len((await task)[-1].outputs[0].token_ids) == 60


@run_async
async def test_shutdown_ends_what_is_in_flight() -> None:
    engine, executor = fake_engine(counting, **ROOM)
    made = AsyncLLMEngine(engine)
    with pytest.raises(UnavailableError, match="not started"):
        await collect(made, "r", SamplingParams())
    made.start()
    executor.delay = 0.002
    task = asyncio.create_task(collect(made, "r", ENDLESS))
    await until(lambda: made.stats()["num_requests"] == 1)
    await asyncio.to_thread(made.shutdown)
    with pytest.raises(UnavailableError, match="shut down"):
        await task
    assert executor.is_shut_down
    assert all_free(made)
    made.shutdown()
    with pytest.raises(UnavailableError, match="shut down"):
        await collect(made, "r", SamplingParams())
    with pytest.raises(UnavailableError, match="shut down"):
        made.start()
    assert "pyengine-step" not in [thread.name for thread in threading.enumerate()]


@run_async
async def test_shutdown_ends_what_waits_for_the_tokenizer() -> None:
    """With the error that says so, not as if the caller were cancelled; a caller who is, still is."""
    tokenizer = sample_tokenizers.byte_level()
    async with started(counting, tokenizer, vocab_size=len(tokenizer)) as (engine, _):
        entered, release = threading.Event(), threading.Event()
        busy = asyncio.create_task(engine._on_tokenizer_thread(lambda: entered.set() or release.wait(20)))
        await asyncio.to_thread(entered.wait, 10)
        callers = [
            lambda: collect(engine, "r", ENDLESS),
            lambda: engine.tokenize(TextPrompt("the")),
            lambda: engine.detokenize([3]),
            lambda: engine.save_tokenizer(Path("/dev/null/nowhere")),
        ]
        tasks = [asyncio.create_task(call()) for call in callers]
        cancelled = asyncio.create_task(engine.tokenize(TextPrompt("the")))
        await until(lambda: engine._tokenizer_pool._work_queue.qsize() == 5)
        cancelled.cancel()
        await asyncio.to_thread(engine.shutdown)
        results = await asyncio.gather(*tasks, cancelled, return_exceptions=True)
        assert [type(result) for result in results] == [UnavailableError] * 4 + [asyncio.CancelledError]
        release.set()
        assert await busy is True
        for call in callers:
            with pytest.raises(UnavailableError, match="shut down"):
                await call()


@run_async
async def test_the_step_thread_sleeps_without_work() -> None:
    async with started() as (engine, executor):
        await collect(engine, "r", SamplingParams(max_tokens=3))
        steps = len(executor.steps)
        waits = 0
        condition = engine._step_thread._condition
        real = condition.wait

        def counted(*args: Any) -> bool:
            nonlocal waits
            waits += 1
            return real(*args)

        await until(lambda: engine.stalled_for() == 0.0)
        with condition:  # which it has let go of, by waiting
            condition.wait = counted  # type: ignore[method-assign]
        await asyncio.sleep(0.1)
        assert len(executor.steps) == steps
        assert waits == 0  # it is inside the one wait that began before
        assert engine.stalled_for() == 0.0
        condition.wait = real  # type: ignore[method-assign]


@run_async
async def test_the_watchdog_sees_a_step_that_hangs_and_says_where() -> None:
    """Rule 6."""
    async with started() as (engine, executor):
        release = threading.Event()

        def hang(*args: Any) -> int:
            release.wait(20)
            return 5

        executor.script = hang
        task = asyncio.create_task(collect(engine, "r", SamplingParams(max_tokens=1)))
        await until(lambda: engine.stalled_for() > 0.05)
        assert "execute_model" in engine.where()
        assert "release.wait" in engine.where()
        release.set()
        await task
        await until(lambda: engine.stalled_for() == 0.0)


@run_async
async def test_tokenize_and_detokenize() -> None:
    tokenizer = sample_tokenizers.byte_level()
    async with started(counting, tokenizer, vocab_size=len(tokenizer)) as (engine, _):
        ids = await engine.tokenize(TextPrompt("the 日本"))
        assert ids == tokenizer("the 日本").input_ids
        assert await engine.detokenize(ids) == "the 日本"
        assert (engine.has_tokenizer, engine.has_chat_template) == (True, False)
        with pytest.raises(InvalidRequestError):
            await engine.detokenize([10**6])


def test_a_reader_whose_loop_was_closed_is_forgotten() -> None:
    engine, executor = fake_engine(counting, **ROOM)
    made = AsyncLLMEngine(engine)
    made.start()
    executor.delay = 0.002
    loop = asyncio.new_event_loop()
    stream = made.generate(TokensPrompt([3]), ENDLESS, "r")
    loop.run_until_complete(anext(stream))
    loop.close()
    deadline = time.monotonic() + 20
    while not all_free(made) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert all_free(made)
    made.shutdown()


@run_async
async def test_counters_start_anew_between_steps() -> None:
    engine, _ = fake_engine(counting, None, **ROOM)
    made = AsyncLLMEngine(engine)
    with pytest.raises(UnavailableError, match="does not run"):
        await made.reset_metrics()
    made.start()
    try:
        await collect(made, "warm-up", SamplingParams(max_tokens=3))
        assert made.stats()["generation_tokens"] == made.metrics.generation_tokens == 3
        await made.reset_metrics()
        assert made.stats()["generation_tokens"] == made.stats()["num_steps"] == made.metrics.generation_tokens == 0
        await collect(made, "real", SamplingParams(max_tokens=3))
        assert made.metrics.generation_tokens == 3
    finally:
        await asyncio.to_thread(made.shutdown)
    with pytest.raises(UnavailableError):
        await made.reset_metrics()
