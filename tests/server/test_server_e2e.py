"""The whole way, socket to kernels and back, on a tiny checkpoint."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from bad_requests import (
    BAD_REQUESTS,
    BAD_SAMPLING,
    any_sampling_params,
    expect_answer_or_field,
    expect_error,
    expect_field,
    user_says,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, given, settings
from running_server import RunningServer, wait_until
from server_process import REAL, ServerProcess
from tiny_models import EOS_ID

from pyengine.config import EngineArgs
from pyengine.engine.async_engine import AsyncLLMEngine
from pyengine.engine.llm_engine import LLMEngine
from pyengine.server.__main__ import _engine_factory, main
from pyengine.server.proto import inference_pb2 as pb
from pyengine.server.proto import inference_pb2_grpc as rpc

#: 32 blocks of 8: several long requests do not fit together.
ENGINE = {"device": "cpu", "max_num_seqs": 8, "num_kv_blocks": 32, "block_size": 8, "long_prefill_token_threshold": 16}
POOL_TOKENS = 32 * 8
PROMPT = "The harbour was quiet when"


@pytest.fixture(scope="module")
def real(tiny_llama: Path) -> Iterator[RunningServer]:
    running = RunningServer(AsyncLLMEngine(LLMEngine(EngineArgs(model=str(tiny_llama), served_model_name="tiny", **ENGINE))))
    yield running
    running.close()


def sampling(**fields: Any) -> pb.SamplingParams:
    return pb.SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True} | fields)


def both(server: RunningServer, **fields: Any) -> tuple[list[pb.GenerateResponse], pb.Choice]:
    """The request streamed and unary."""
    request = pb.GenerateRequest(**{"text": PROMPT} | fields)
    return list(server.stub.Generate(request, timeout=120)), server.stub.Complete(request, timeout=120).choices[0]


def no_block_is_lost(server: RunningServer) -> bool:
    stats = server.engine.stats()
    return stats["num_requests"] == 0 and stats["num_free_blocks"] == stats["num_blocks"]


def test_streamed_equals_unary_cold_and_warm(real: RunningServer) -> None:
    messages, choice = both(real, sampling=sampling(logprobs=3))
    assert "".join(message.text for message in messages) == choice.text
    assert [token_id for message in messages for token_id in message.token_ids] == list(choice.token_ids)
    assert [p for message in messages for p in message.logprobs] == list(choice.logprobs)
    assert len(choice.token_ids) == 24
    usage = choice.finish.usage
    assert usage.prompt_tokens == messages[-1].finish.usage.prompt_tokens
    assert (messages[-1].finish.usage.cached_tokens, usage.cached_tokens) == (0, usage.prompt_tokens // 8 * 8)


def test_rule_8_stop_texts(real: RunningServer) -> None:
    """Every text of the output as a stop: the output ends before its first place, streamed and unary alike."""
    _, free = both(real, sampling=sampling())
    rng = random.Random(8)
    for _ in range(12):
        start = rng.randrange(len(free.text) - 1)
        stop = free.text[start : start + rng.randrange(1, 7)]
        messages, choice = both(real, sampling=sampling(stop=[stop, "never to be seen"]))
        assert choice.text == free.text[: free.text.index(stop)]
        assert "".join(message.text for message in messages) == choice.text
        for finish in (messages[-1].finish, choice.finish):
            assert (finish.reason, finish.stop_text) == (pb.FINISH_REASON_STOP, stop)
        assert all(message.text or message.HasField("finish") for message in messages)
        _, kept = both(real, sampling=sampling(stop=[stop], include_stop_str_in_output=True))
        assert kept.text == choice.text + stop


def test_rule_9_bytes_join_to_the_text(real: RunningServer) -> None:
    _, choice = both(real, sampling=sampling(temperature=1, seed=3, logprobs=0))
    joined = b"".join(position.token.token_bytes for position in choice.logprobs)
    assert joined.decode(errors="replace").startswith(choice.text.rstrip("\ufffd"))


def test_chat_echo_and_the_tokenizer(real: RunningServer) -> None:
    request = user_says(content="What is the capital of France?")
    request.sampling.CopyFrom(sampling(max_tokens=4))
    request.echo = True
    response = real.stub.Complete(request, timeout=120)
    assert response.prompt.text.endswith("<|im_start|>assistant\n")
    token_ids = list(real.stub.Tokenize(pb.TokenizeRequest(chat=request.chat), timeout=60).token_ids)
    assert list(response.prompt.token_ids) == token_ids
    assert real.stub.Detokenize(pb.DetokenizeRequest(token_ids=token_ids), timeout=60).text == response.prompt.text
    by_ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=token_ids), sampling=request.sampling, echo=True)
    answer = real.stub.Complete(by_ids, timeout=120)
    assert answer.choices[0].token_ids == response.choices[0].token_ids
    assert answer.prompt.text == response.prompt.text


def test_choices_and_seeds(real: RunningServer) -> None:
    request = pb.GenerateRequest(text=PROMPT, sampling=sampling(temperature=1, seed=7, n=3, max_tokens=8))
    several = [list(choice.token_ids) for choice in real.stub.Complete(request, timeout=120).choices]
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for message in real.stub.Generate(request, timeout=120):
        streamed[message.index] += message.token_ids
    single = [both(real, sampling=sampling(temperature=1, seed=7 + i, max_tokens=8))[1].token_ids for i in range(3)]
    assert several == list(streamed.values()) == [list(ids) for ids in single]


def test_rule_11_the_engine_survives_bad_requests(real: RunningServer) -> None:
    _, expected = both(real, sampling=sampling())
    bad = [(field, pb.GenerateRequest(text="a", sampling=pb.SamplingParams(**{field: value}))) for field, value in BAD_SAMPLING]
    outside = {
        "stop_token_ids": pb.SamplingParams(stop_token_ids=[512]),
        "logit_bias": pb.SamplingParams(logit_bias={512: 1.0}),
        "allowed_token_ids": pb.SamplingParams(allowed_token_ids=pb.TokenIds(ids=[5, 512])),
    }
    bad += [(field, pb.GenerateRequest(text="a", sampling=params)) for field, params in outside.items()]
    (word,) = real.stub.Tokenize(pb.TokenizeRequest(text="a", add_special_tokens=False), timeout=60).token_ids
    nothing_left = [
        pb.SamplingParams(allowed_token_ids=pb.TokenIds(ids=[EOS_ID]), min_tokens=1),
        pb.SamplingParams(allowed_token_ids=pb.TokenIds(ids=[9, EOS_ID]), min_tokens=1, stop_token_ids=[9]),
        pb.SamplingParams(allowed_token_ids=pb.TokenIds(ids=[word]), bad_words=["a"]),
    ]
    bad += [("allowed_token_ids", pb.GenerateRequest(text="a", sampling=params)) for params in nothing_left]
    for field, request in [*bad, *BAD_REQUESTS]:
        expect_field(expect_error(real.stub, request, grpc.StatusCode.INVALID_ARGUMENT), field)
    reserved = user_says(content="a")
    reserved.chat.chat_template_kwargs.update({"tokenize": True})
    expect_field(expect_error(real.stub, reserved, grpc.StatusCode.INVALID_ARGUMENT), "chat.chat_template_kwargs")
    assert both(real, sampling=sampling())[1].token_ids == expected.token_ids
    wait_until(lambda: no_block_is_lost(real))


def check_any_sampling_params(server: RunningServer, values: dict[str, Any]) -> None:
    expect_answer_or_field(server.stub, values)
    assert not server.engine.errored
    wait_until(lambda: no_block_is_lost(server))


@settings(max_examples=50, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(any_sampling_params())
def test_rule_11_any_sampling_params_on_the_engine(real: RunningServer, values: dict[str, Any]) -> None:
    check_any_sampling_params(real, values)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(any_sampling_params())
def test_rule_11_any_sampling_params_at_length(real: RunningServer, values: dict[str, Any]) -> None:
    check_any_sampling_params(real, values)


def test_rule_13_too_long_for_the_model_or_the_pool(real: RunningServer) -> None:
    for max_tokens, limit in ((2000, "1024"), (500, str(POOL_TOKENS))):
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 10), sampling=pb.SamplingParams(max_tokens=max_tokens))
        error = expect_error(real.stub, request, grpc.StatusCode.INVALID_ARGUMENT)
        expect_field(error, "max_tokens")
        assert str(10 + max_tokens) in error.details()
        assert limit in error.details()
    too_long = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 1025))
    expect_field(expect_error(real.stub, too_long, grpc.StatusCode.INVALID_ARGUMENT), "token_ids")


def cancel_at_random(server: RunningServer, count: int, seed: int) -> None:
    """`count` calls end in every way there is, while queued, prefilling, decoding or preempted. Five among them run to their
    end and must get the tokens that they get alone. Every block comes back."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(4, 512) for _ in range(rng.randrange(1, 100))] for _ in range(5)]
    requests = [
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling(temperature=0.8, seed=i, max_tokens=40))
        for i, ids in enumerate(prompts)
    ]
    alone = [list(server.stub.Complete(request, timeout=120).choices[0].token_ids) for request in requests]
    for _ in range(count // 50):
        whole = [server.stub.Complete.future(request, timeout=120) for request in requests]
        unary = [server.stub.Complete.future(request, timeout=rng.random()) for request in requests]  # deadlines
        streams = [server.stub.Generate(requests[i % 5], timeout=120) for i in range(45)]
        rng.shuffle(streams)
        for stream in streams:
            for _ in range(rng.choice([0, 0, 1, 3, 10])):
                next(stream, None)  # late readers get fewer, larger messages
            if rng.random() < 0.8:
                stream.cancel()
            else:
                request_id = dict(stream.initial_metadata())["x-request-id"]
                server.stub.Abort(pb.AbortRequest(request_id=request_id), timeout=60)
        for call in unary[:2]:
            call.cancel()
        assert [list(call.result().choices[0].token_ids) for call in whole] == alone
    wait_until(lambda: no_block_is_lost(server) and server.server.frontend.num_active == 0)


def test_rule_5_fifty_calls_end_at_random_points(real: RunningServer) -> None:
    cancel_at_random(real, 50, seed=50)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_rule_5_a_thousand_calls_end_at_random_points(tiny_llama: Path, mode: Any) -> None:
    args = EngineArgs(model=str(tiny_llama), preemption_mode=mode, swap_space=0.01, **ENGINE)
    running = RunningServer(AsyncLLMEngine(LLMEngine(args)))
    try:
        cancel_at_random(running, 1000, seed=1000)
        assert running.engine.stats()[f"num_preemptions_{mode}"] > 0
    finally:
        running.close()


def test_rule_19_no_chat_template(tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "without-template"
    shutil.copytree(tiny_llama, folder)
    for path in folder.glob("chat_template*"):
        path.unlink()
    running = RunningServer(AsyncLLMEngine(LLMEngine(EngineArgs(model=str(folder), **ENGINE))))
    try:
        assert "no chat template" in caplog.text
        expect_field(expect_error(running.stub, user_says(content="a"), grpc.StatusCode.INVALID_ARGUMENT), "chat.messages")
        info = running.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60)
        assert (info.supports_text, info.supports_chat) == (True, False)
        assert len(both(running, sampling=sampling(max_tokens=3))[1].token_ids) == 3
    finally:
        running.close()


def test_token_ids_only_without_a_tokenizer(tiny_llama: Path) -> None:
    running = RunningServer(AsyncLLMEngine(LLMEngine(EngineArgs(model=str(tiny_llama), skip_tokenizer_init=True, **ENGINE))))
    try:
        expect_field(expect_error(running.stub, pb.GenerateRequest(text="a"), grpc.StatusCode.INVALID_ARGUMENT), "text")
        messages, choice = both(
            running, text=None, token_ids=pb.TokenIds(ids=[5, 6]), sampling=sampling(max_tokens=3), echo=True
        )
        assert [token_id for message in messages for token_id in message.token_ids] == list(choice.token_ids)
        assert (choice.text, messages[0].prompt.text) == ("", "")
        assert not running.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60).supports_text
    finally:
        running.close()


def test_rules_16_and_20_a_server_process_from_start_to_exit(tiny_llama: Path) -> None:
    """The command line: phases with times, ready after a step, streams cancelled, SIGTERM with requests in flight, exit 0."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
    with ServerProcess(*REAL, "--model", str(tiny_llama), "--port", "0", *flags) as server:
        target = server.wait_ready()
        for phase in ("weights loaded", "KV cache allocated", "warm-up step run"):
            assert f"start-up: {phase}, " in server.log
        with grpc.insecure_channel(target) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            status = health.Check(health_pb2.HealthCheckRequest(service="pyengine.v1.Inference"), timeout=60).status
            assert status == health_pb2.HealthCheckResponse.SERVING
            stub = rpc.InferenceStub(channel)
            request = pb.GenerateRequest(text=PROMPT, sampling=sampling(max_tokens=200))
            expected = list(stub.Complete(request, timeout=120).choices[0].token_ids)
            cancelled = [stub.Generate(request, timeout=120) for _ in range(6)]
            for call in cancelled:
                next(call)
                call.cancel()
            streams = [stub.Generate(request, timeout=120) for _ in range(5)]  # the pool holds one of them at a time
            for stream in streams:
                stream.initial_metadata()  # admitted
            server.process.terminate()
            server.wait_for("draining: [1-5] requests in flight")
            for stream in streams:
                assert [token_id for message in stream for token_id in message.token_ids] == expected
        assert server.exit_code() == 0
        assert "Traceback" not in server.log
        assert "num_blocks=32 num_free_blocks=32 " in server.wait_for("last stats").string


@pytest.mark.parametrize("kind", ["absent", "empty folder", "garbage"])
def test_rule_17_a_model_that_cannot_be_loaded_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    path = tmp_path / "model.gguf"
    if kind == "empty folder":
        path.mkdir()
    elif kind == "garbage":
        path.write_bytes(b"not a model")
    assert main(["--model", str(path), "--port", "0", "--log-level", "error"]) == 1
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert "model.gguf" in captured.err


def test_a_flag_that_does_not_fit_the_model_is_named(tiny_llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tiny_llama), "--port", "0", "--log-level", "error", "--max-model-len", "5000"]) == 1
    assert "error: --max-model-len: 5000 is more than the model's own 1024\n" in capfd.readouterr().err


def test_the_engine_of_a_server_has_the_defaults_of_servers(tiny_llama: Path) -> None:
    engine = _engine_factory(EngineArgs(model=str(tiny_llama), **ENGINE))()
    assert engine.config.scheduler.max_step_ratio == 3.0
    engine.shutdown()
