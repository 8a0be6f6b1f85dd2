"""A command-line client: `python -m pyengine.client "The capital of France is"` streams the answer to the terminal.

Everything that is not given is left to the server's defaults, but for two that suit a terminal better: up to 256 tokens, and
the most likely token at each step (temperature 0) where a single choice is asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":  # Ctrl-C while libraries are imported ends the program at once, without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import grpc

from pyengine.server.auth import KEY_VARIABLE
from pyengine.server.proto import inference_pb2 as pb
from pyengine.server.proto import inference_pb2_grpc as rpc

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_MAX_TOKENS = 256
_TARGET = re.compile(r"(?:\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+):(\d{1,5})", re.ASCII)

#: Flag of the same name -> type and help; each is a field of SamplingParams in protos/pyengine/v1/inference.proto.
_SAMPLING_FLAGS: dict[str, tuple[type, str]] = {
    "n": (int, "choices (default: 1)"),
    "max_tokens": (int, f"output tokens, -1: up to the model's limit (default: {DEFAULT_MAX_TOKENS})"),
    "temperature": (float, "0: the most likely token; 1: the model's own distribution (default: 0, with --n 1)"),
    "top_p": (float, "keep the most likely tokens up to this sum of probabilities"),
    "top_k": (int, "keep this many of the most likely tokens"),
    "min_p": (float, "keep tokens at least this likely relative to the most likely"),
    "presence_penalty": (float, "subtracted from logits of tokens generated so far"),
    "frequency_penalty": (float, "the same, times their count"),
    "repetition_penalty": (float, "divides logits of tokens in prompt and output"),
    "seed": (int, "makes sampling repeatable"),
    "min_tokens": (int, "output tokens before an end may come"),
    "logprobs": (int, "with --json: log-probabilities of this many most likely tokens"),
}
_SAMPLING_SWITCHES: dict[str, str] = {
    "ignore_eos": "go on after end-of-sequence",
    "include_stop_str_in_output": "keep the stop text in the output",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line; the usage of this many flags would bury it."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m pyengine.client", description="Streams a completion from a pyengine server.", allow_abbrev=False
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; standard input if absent or -")
    parser.add_argument("--target", default=DEFAULT_TARGET, metavar="HOST:PORT", help=f"server (default: {DEFAULT_TARGET})")
    parser.add_argument("--chat", action="store_true", help="send PROMPT as a user's message through the chat template")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: a system message before it")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after this long")
    parser.add_argument("--model", metavar="NAME", help="refuse to be answered by any other model")
    parser.add_argument("--priority", type=int, metavar="N", help="lower runs first")
    parser.add_argument("--tls-ca", metavar="FILE", help="speak TLS and trust the certificates that these sign, PEM")
    parser.add_argument("--tls-cert", metavar="FILE", help="mutual TLS: this client's certificate, PEM")
    parser.add_argument("--tls-key", metavar="FILE", help="mutual TLS: its key, PEM")
    parser.add_argument("--request-id", metavar="ID", help="a name for the server's log")
    group = parser.add_argument_group("Sampling")
    for name, (kind, text) in _SAMPLING_FLAGS.items():
        group.add_argument(_flag(name), type=kind, metavar="N" if kind is int else "X", help=text)
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    group.add_argument("--stop-token-ids", type=int, nargs="+", default=[], metavar="ID", help="end at one of these tokens")
    for name, text in _SAMPLING_SWITCHES.items():
        group.add_argument(_flag(name), action="store_true", help=text)
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def make_request(flags: argparse.Namespace, prompt: str) -> pb.GenerateRequest:
    """The request that the flags describe."""
    values = {name: getattr(flags, name) for name in _SAMPLING_FLAGS if getattr(flags, name) is not None}
    values |= {name: True for name in _SAMPLING_SWITCHES if getattr(flags, name)}
    values.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    if values.get("n", 1) == 1:
        values.setdefault("temperature", 0.0)
    request = pb.GenerateRequest(
        sampling=pb.SamplingParams(stop=flags.stop, stop_token_ids=flags.stop_token_ids, **values),
        model=flags.model,
        priority=flags.priority,
        request_id=flags.request_id,
    )
    if flags.chat:
        system = [pb.ChatMessage(role="system", content=flags.system)] if flags.system is not None else []
        request.chat.messages.extend([*system, pb.ChatMessage(role="user", content=prompt)])
    else:
        request.text = prompt
    return request


def stream(responses: Iterable[pb.GenerateResponse], num_choices: int) -> None:
    """Print text as it comes; several choices one after the other, since they arrive interleaved."""
    texts = [""] * num_choices
    for response in responses:
        if num_choices == 1:
            print(response.text, end="", flush=True)
            continue
        texts[response.index] += response.text
        if response.HasField("finish"):
            print(f"[{response.index}] {texts[response.index]}", flush=True)
    if num_choices == 1:
        print(flush=True)


def as_json(response: pb.CompleteResponse) -> dict[str, Any]:
    """The first choice; all of them under "choices" where there are several."""
    choices = [_choice_as_json(choice) for choice in response.choices]
    return choices[0] if len(choices) == 1 else {**choices[0], "choices": choices}


def _choice_as_json(choice: pb.Choice) -> dict[str, Any]:
    reason = pb.FinishReason.Name(choice.finish.reason).removeprefix("FINISH_REASON_").lower()
    usage = choice.finish.usage
    result: dict[str, Any] = {
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": reason,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
    }
    matched = choice.finish.WhichOneof("matched_stop")
    if matched is not None:
        result["stop_reason"] = getattr(choice.finish, matched)
    if choice.logprobs:
        result["logprobs"] = [
            {
                "token_id": position.token.token_id,
                "logprob": position.token.logprob,
                "top": {str(other.token_id): other.logprob for other in position.top},
            }
            for position in choice.logprobs
        ]
    return result


def connect(flags: argparse.Namespace) -> grpc.Channel:
    """A channel to the server that the flags name.

    Raises:
        OSError: a file cannot be read.
    """
    unlimited = [("grpc.max_receive_message_length", -1)]  # logprobs of long outputs are large
    if flags.tls_ca is None:
        return grpc.insecure_channel(flags.target, options=unlimited)
    files = (flags.tls_ca, flags.tls_key, flags.tls_cert)
    ca, key, certificate = (None if name is None else Path(name).read_bytes() for name in files)
    return grpc.secure_channel(flags.target, grpc.ssl_channel_credentials(ca, key, certificate), options=unlimited)


def _tls_hint(flags: argparse.Namespace) -> str:
    return "if the server uses TLS, give --tls-ca" if flags.tls_ca is None else "--tls-ca must be of a TLS server's signer"


def explain(error: grpc.RpcError, target: str, hint: str) -> str:
    """Why a call to `target` failed, in one line; `hint`: what may be wrong where a server refuses the connection."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and "Connection refused" in details:
        return f"no server answers at {target}; start one with: python -m pyengine.server"
    if code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in details:
        reason = details.rpartition("last error: ")[2]
        return f"cannot connect to {target}: {reason}; {hint}"
    if code is grpc.StatusCode.UNAVAILABLE and ("errors resolving" in details or "resolution failed" in details):
        return f"no host of the name in {target} is known"
    return f"{code.name}: {details}"


def _check(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Ends the program if flags are wrong by themselves or do not go together."""
    port = _TARGET.fullmatch(flags.target)
    if port is None or not 0 < int(port.group(1)) < 2**16:
        parser.error(f"--target must be HOST:PORT with a port from 1 to 65535, got {flags.target!r}")
    if (flags.tls_cert is None) != (flags.tls_key is None) or (flags.tls_cert is not None and flags.tls_ca is None):
        parser.error("--tls-cert and --tls-key go together, with --tls-ca")
    if flags.system is not None and not flags.chat:
        parser.error("--system needs --chat")
    if flags.logprobs is not None and not flags.json:
        parser.error("--logprobs needs --json, which alone shows them")
    if flags.max_tokens is not None and flags.max_tokens != -1 and flags.max_tokens < 1:
        parser.error(f"--max-tokens must be 1 or more, or -1 for up to the model's limit; got {flags.max_tokens}")
    if flags.prompt is None and sys.stdin.isatty():
        parser.error("a PROMPT is needed, as an argument or on standard input")


def _read_prompt(given: str | None) -> str:
    """The prompt, from standard input if it is not given.

    Raises:
        UnicodeError: it is not UTF-8.
    """
    prompt = sys.stdin.read() if given in (None, "-") else given
    assert prompt is not None
    prompt.encode()  # the bytes of an argument that are not UTF-8 are lone surrogates by now
    return prompt


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 with one line on stderr if the call failed, or 130 after Ctrl-C."""
    parser = make_parser()
    flags = parser.parse_args(argv)
    try:
        _check(parser, flags)
        prompt = _read_prompt(flags.prompt)
    except UnicodeError:
        print("error: the prompt is not UTF-8", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    try:
        request = make_request(flags, prompt)
    except (ValueError, TypeError) as error:  # a number beyond its protobuf type
        parser.error(str(error))
    key = os.environ.get(KEY_VARIABLE)
    options: dict[str, Any] = {"timeout": flags.timeout, "metadata": key and [("authorization", f"Bearer {key}")]}
    try:
        channel = connect(flags)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        with channel:
            stub = rpc.InferenceStub(channel)
            if flags.json:
                print(json.dumps(as_json(stub.Complete(request, **options))))
            else:
                stream(stub.Generate(request, **options), request.sampling.n or 1)
    except grpc.RpcError as error:
        print(f"error: {explain(error, flags.target, _tls_hint(flags))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone; leaving the channel cancelled the call
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
