"""vllm.grpc.engine.VllmEngine over a real engine on a tiny checkpoint."""

from __future__ import annotations

import io
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running_server import RunningServer, wait_until
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc as rpc
from smg_grpc_proto.generated import common_pb2

from pyengine.config import EngineArgs
from pyengine.engine.async_engine import AsyncLLMEngine
from pyengine.engine.llm_engine import LLMEngine
from pyengine.server.proto import inference_pb2 as pb

BLOCK_SIZE = 8
PROMPT = [4 + i % 200 for i in range(40)]


def start(tiny_llama: Path, **args: Any) -> RunningServer:
    options = {"num_kv_blocks": 64, "block_size": BLOCK_SIZE, "max_num_seqs": 8, "served_model_name": "tiny"} | args
    return RunningServer(AsyncLLMEngine(LLMEngine(EngineArgs(model=str(tiny_llama), device="cpu", **options))))


@pytest.fixture(scope="module")
def real(tiny_llama: Path) -> Iterator[RunningServer]:
    running = start(tiny_llama)
    yield running
    running.close()


@pytest.fixture
def stub(real: RunningServer) -> Any:
    return rpc.VllmEngineStub(real.channel)


def request_of(ids: list[int], *, stream: bool = True, **params: Any) -> vllm.GenerateRequest:
    sampling = vllm.SamplingParams(**({"temperature": 0, "max_tokens": 16, "ignore_eos": True} | params))
    return vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=ids), sampling_params=sampling, stream=stream)


def no_block_is_lost(server: RunningServer) -> bool:
    stats = server.engine.stats()
    return stats["num_requests"] == 0 and stats["num_free_blocks"] == stats["num_blocks"]


def test_its_tokens_are_those_of_the_other_api(real: RunningServer, stub: Any) -> None:
    sampling = pb.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    other = real.stub.Complete(pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling), timeout=60)
    expected = list(other.choices[0].token_ids)
    streamed = list(stub.Generate(request_of(PROMPT), timeout=60))
    assert [i for m in streamed for i in m.chunk.token_ids] == expected
    assert sum(m.chunk.completion_tokens for m in streamed) == 16
    (whole,) = stub.Generate(request_of(PROMPT, stream=False), timeout=60)
    assert list(whole.complete.output_ids) == expected
    assert whole.complete.cached_tokens > 0
    text = vllm.GenerateRequest(text="Yesterday", sampling_params=vllm.SamplingParams(temperature=0, max_tokens=4))
    by_text = real.stub.Complete(
        pb.GenerateRequest(text="Yesterday", sampling=pb.SamplingParams(temperature=0, max_tokens=4)), timeout=60
    )
    (answer,) = stub.Generate(text, timeout=60)
    assert list(answer.complete.output_ids) == list(by_text.choices[0].token_ids)


def test_stop_texts_and_seeded_choices(real: RunningServer, stub: Any) -> None:
    sampling = pb.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    text = (
        real.stub.Complete(pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling), timeout=60).choices[0].text
    )
    stop = text[8:11]
    *_, last = stub.Generate(request_of(PROMPT, stop=[stop]), timeout=60)
    assert (last.complete.finish_reason, last.complete.matched_stop_str) == ("stop", stop)
    sampled = {"temperature": 1.0, "seed": 11, "max_tokens": 8}
    both = list(stub.Generate(request_of(PROMPT, n=2, **sampled), timeout=60))
    for index in range(2):
        (alone,) = stub.Generate(request_of(PROMPT, stream=False, **(sampled | {"seed": 11 + index})), timeout=60)
        mine = [i for m in both if m.HasField("chunk") and m.chunk.index == index for i in m.chunk.token_ids]
        assert mine == list(alone.complete.output_ids)


def test_kv_events_tell_what_is_cached_until_it_is_flushed(real: RunningServer, stub: Any) -> None:
    prompt = [7, *PROMPT]
    list(stub.Generate(request_of(PROMPT), timeout=60))
    events = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=60)
    snapshot = next(events)
    assert snapshot.events[0].WhichOneof("data") == "cleared"
    known = [list(b.token_ids) for event in snapshot.events for b in event.stored.blocks]
    assert PROMPT[:BLOCK_SIZE] in known
    list(stub.Generate(request_of(prompt, max_tokens=1), timeout=60))
    news = next(events)
    assert news.sequence_number == snapshot.sequence_number + 1
    (stored,) = (event.stored for event in news.events if event.HasField("stored"))
    assert not stored.HasField("parent_block_hash")
    assert [i for block in stored.blocks for i in block.token_ids] == prompt[: len(prompt) // BLOCK_SIZE * BLOCK_SIZE]
    assert all(block.block_size == BLOCK_SIZE for block in stored.blocks)
    (again,) = stub.Generate(request_of(prompt, stream=False, max_tokens=1), timeout=60)
    assert again.complete.cached_tokens == len(prompt) // BLOCK_SIZE * BLOCK_SIZE
    wait_until(lambda: no_block_is_lost(real))
    assert stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=30), timeout=60).success
    while not any(event.HasField("cleared") for event in next(events).events):
        pass
    (cold,) = stub.Generate(request_of(prompt, stream=False, max_tokens=1), timeout=60)
    assert cold.complete.cached_tokens == 0
    events.cancel()


def test_abort_ends_a_stream_with_its_reason(real: RunningServer, stub: Any) -> None:
    request = request_of(PROMPT, max_tokens=400)
    request.request_id = "mine"
    call = stub.Generate(request, timeout=60)
    next(call)
    stub.Abort(vllm.AbortRequest(request_ids=["mine"]), timeout=60)
    *_, last = call
    assert last.complete.finish_reason in ("abort", "length")  # length: it was done before the abort came
    wait_until(lambda: no_block_is_lost(real))


def test_the_tokenizer_that_comes_is_the_engines_own(real: RunningServer, stub: Any, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    data = b"".join(chunk.data for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=60))
    zipfile.ZipFile(io.BytesIO(data)).extractall(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    text = "The harbour was quiet. <s>"
    assert tokenizer(text)["input_ids"] == list(real.stub.Tokenize(pb.TokenizeRequest(text=text), timeout=60).token_ids)
    chat = [{"role": "user", "content": "Hello"}]
    ids = real.stub.Tokenize(
        pb.TokenizeRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="user", content="Hello")])), timeout=60
    ).token_ids
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert tokenizer(rendered, add_special_tokens=False)["input_ids"] == list(ids)


def read(call: Any) -> list[vllm.GenerateResponse]:
    """What a call answers before it ends, in whatever way."""
    messages: list[vllm.GenerateResponse] = []
    with suppress(grpc.RpcError):
        messages.extend(call)
    return messages


numbers = st.one_of(st.floats(width=32), st.sampled_from([0.0, 1.0, 0.5]))
small = st.one_of(st.integers(0, 3), st.sampled_from([2**31, 2**32 - 1]))
signed = st.one_of(st.integers(-2, 30), st.sampled_from([-(2**31), 2**31 - 1]))
SAMPLING = st.fixed_dictionaries(
    {"max_tokens": st.integers(0, 6)},
    optional={
        **dict.fromkeys(("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"), numbers),
        **{"repetition_penalty": numbers, "top_k": small, "min_tokens": small, "n": st.integers(0, 4), "seed": signed},
        **{"stop": st.lists(st.text(max_size=3), max_size=2), "stop_token_ids": st.lists(small, max_size=2)},
        **{"logprobs": signed, "prompt_logprobs": signed, "truncate_prompt_tokens": signed, "json_object": st.booleans()},
        **{"logit_bias": st.dictionaries(signed, numbers, max_size=2), "ignore_eos": st.booleans()},
        **{"skip_special_tokens": st.booleans(), "include_stop_str_in_output": st.booleans()},
    },
)


@settings(max_examples=120, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SAMPLING, st.lists(st.one_of(st.integers(0, 511), small), max_size=30), st.booleans())
def test_rule_11_any_request_is_answered_or_refused(
    real: RunningServer, stub: Any, sampling: dict[str, Any], ids: list[int], stream: bool
) -> None:
    request = vllm.GenerateRequest(
        tokenized=vllm.TokenizedInput(input_ids=ids), sampling_params=vllm.SamplingParams(**sampling), stream=stream
    )
    call = stub.Generate(request, timeout=60)
    messages = read(call)
    assert call.code() in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED), call.details()
    if call.code() is grpc.StatusCode.OK:
        assert sum(m.HasField("complete") for m in messages) == max(1, sampling.get("n", 1))
    else:
        assert dict(call.trailing_metadata())["field"] == call.details().split(":")[0]
    (next_one,) = stub.Generate(request_of(PROMPT[:3], stream=False, max_tokens=1), timeout=60)
    assert next_one.complete.finish_reason == "length"
    wait_until(lambda: no_block_is_lost(real))


def test_a_server_with_a_subscriber_stops(tiny_llama: Path) -> None:
    running = start(tiny_llama)
    call = rpc.VllmEngineStub(running.channel).SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=120)
    next(call)
    began = time.monotonic()
    running.run(running.server.close())
    assert time.monotonic() - began < 30, "its stream held up the exit"
    with pytest.raises(grpc.RpcError) as error:
        next(call)
    assert error.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    running.close()
