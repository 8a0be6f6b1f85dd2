"""OpenAI's client, socket to kernels and back, on a tiny checkpoint."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
from running_server import RunningServer, wait_until

from pyengine.config import EngineArgs
from pyengine.engine.async_engine import AsyncLLMEngine
from pyengine.engine.llm_engine import LLMEngine
from pyengine.server.proto import inference_pb2 as pb

PROMPT = "The harbour was quiet when"
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def real(tiny_llama: Path) -> Iterator[RunningServer]:
    args = EngineArgs(
        model=str(tiny_llama), served_model_name="tiny", device="cpu", max_num_seqs=8, num_kv_blocks=32, block_size=8
    )
    running = RunningServer(AsyncLLMEngine(LLMEngine(args)), http_port=0)
    yield running
    running.close()


@pytest.fixture(scope="module")
def client(real: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real.base_url}/v1", api_key="any", max_retries=0, timeout=120) as client:
        yield client


def no_block_is_lost(server: RunningServer) -> bool:
    stats = server.engine.stats()
    return stats["num_requests"] == 0 and stats["num_free_blocks"] == stats["num_blocks"]


def test_streamed_whole_and_grpc_agree(real: RunningServer, client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, **GREEDY)
    chunks = list(client.completions.create(prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    sampling = pb.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    by_grpc = real.stub.Complete(pb.GenerateRequest(text=PROMPT, sampling=sampling), timeout=120)
    assert whole.choices[0].text == by_grpc.choices[0].text
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    for usage in (whole.usage, chunks[-1].usage):
        assert (usage.prompt_tokens, usage.completion_tokens) == (by_grpc.usage.prompt_tokens, 24)


def test_seeded_choices_and_several_prompts(client: openai.OpenAI) -> None:
    sampled = GREEDY | {"temperature": 1, "seed": 7, "max_tokens": 8}
    together = client.completions.create(prompt=[PROMPT, "Yesterday"], n=2, **sampled)
    streamed = ["", "", "", ""]
    for chunk in client.completions.create(prompt=[PROMPT, "Yesterday"], n=2, stream=True, **sampled):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    alone = [
        client.completions.create(prompt=prompt, **(sampled | {"seed": 7 + i})).choices[0].text
        for prompt in (PROMPT, "Yesterday")
        for i in range(2)
    ]
    assert [choice.text for choice in together.choices] == streamed == alone


def test_chat_is_its_template_completed(real: RunningServer, client: openai.OpenAI) -> None:
    """And the log-probabilities' bytes are the text's."""
    answer = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY).choices[0]
    assert answer.message.content is not None
    assert answer.logprobs is not None
    entries = answer.logprobs.content or []
    assert len(entries) == 24
    assert all(entry.top_logprobs[0].token == entry.token and len(entry.top_logprobs) == 3 for entry in entries)
    joined = b"".join(bytes(entry.bytes or []) for entry in entries).decode(errors="replace")
    assert joined.startswith(answer.message.content.rstrip("\ufffd"))
    chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content=MESSAGES[0]["content"])])
    token_ids = list(real.stub.Tokenize(pb.TokenizeRequest(chat=chat), timeout=60).token_ids)
    assert client.completions.create(prompt=token_ids, **GREEDY).choices[0].text == answer.message.content


def test_stops_and_echoed_logprobs(client: openai.OpenAI) -> None:
    free = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    stop = free[7:10]
    choice: Any = client.completions.create(prompt=PROMPT, stop=stop, **GREEDY).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (free[: free.index(stop)], "stop", stop)
    for stream in (False, True):
        answer: Any = client.completions.create(prompt=PROMPT, echo=True, logprobs=2, stream=stream, **GREEDY)
        choices = [choice for part in (answer if stream else [answer]) for choice in part.choices]
        assert "".join(choice.text for choice in choices) == PROMPT + free
        values = [value for choice in choices for value in choice.logprobs.token_logprobs]
        assert values[0] is None
        assert len(values) > 24
        assert all(value <= 0 for value in values[1:])
        # A generated special token has a name here and no text there, so the offsets are compared for the prompt only.
        num_prompt = len(values) - 24
        tokens = [token for choice in choices for token in choice.logprobs.tokens][:num_prompt]
        offsets = [offset for choice in choices for offset in choice.logprobs.text_offset][: num_prompt + 1]
        assert tokens[0], "the first token has a text, though no log-probability"
        head = 0 if PROMPT.startswith(tokens[0]) else 1  # a token before the prompt is not in the text
        assert [PROMPT[a:b] for a, b in pairwise(offsets)][head:] == tokens[head:]
        assert offsets[-1] == len(PROMPT)
    scored: Any = client.completions.create(prompt=PROMPT, echo=True, logprobs=2, **(GREEDY | {"max_tokens": 0}))
    assert scored.choices[0].text == PROMPT
    assert scored.choices[0].logprobs.token_logprobs == values[: len(values) - 24]
    assert scored.usage.completion_tokens == 0


def test_errors_name_their_field(client: openai.OpenAI, real: RunningServer) -> None:
    for param, change in (
        ("prompt", {"prompt": [5] * 1100}),
        ("max_tokens", {"max_tokens": 2000}),
        ("prompt", {"prompt": [512]}),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(**({"prompt": PROMPT} | GREEDY | change))
        assert error.value.param == param
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(messages=[{"role": "user", "content": 5}], **GREEDY)  # type: ignore[list-item]
    assert error.value.param == "messages"
    wait_until(lambda: no_block_is_lost(real))


def test_rule_5_clients_that_go_at_random(real: RunningServer, client: openai.OpenAI) -> None:
    """Streams and whole answers, queued, prefilling or decoding: every block comes back, and nobody else notices."""
    expected = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    rng = random.Random(5)
    host, port = real.server.http_ports["http"].address.split(":")
    sockets = []
    for _ in range(40):
        body = {"prompt": [rng.randrange(4, 512) for _ in range(rng.randrange(1, 80))], "max_tokens": 100}
        data = json.dumps(body | {"stream": rng.random() < 0.6, "ignore_eos": True})
        sockets.append(socket.create_connection((host, int(port))))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        sockets[-1].sendall(f"{head}\r\n\r\n{data}".encode())
        if rng.random() < 0.6:
            sockets.pop(rng.randrange(len(sockets))).close()
    for connection in sockets:
        connection.close()
    assert client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text == expected
    wait_until(lambda: no_block_is_lost(real) and real.server.frontend.num_active == 0)
