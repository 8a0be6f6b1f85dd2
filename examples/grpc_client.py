"""Streams a completion over gRPC with the stubs that pyengine ships: `python examples/grpc_client.py [HOST:PORT] [PROMPT]`."""

from __future__ import annotations

import argparse

import grpc

from pyengine.server.proto import inference_pb2 as pb
from pyengine.server.proto import inference_pb2_grpc as rpc


def main() -> None:
    parser = argparse.ArgumentParser(description="Streams a completion from a pyengine server over gRPC.")
    parser.add_argument("target", nargs="?", default="127.0.0.1:50051", metavar="HOST:PORT", help="default: %(default)s")
    parser.add_argument("prompt", nargs="?", default="The capital of France is", metavar="PROMPT", help="default: %(default)s")
    flags = parser.parse_args()
    stream(flags.target, flags.prompt)


def stream(target: str, prompt: str) -> None:
    """Print the tokens' text as it comes, and at the end why it ended."""
    request = pb.GenerateRequest(text=prompt, sampling=pb.SamplingParams(max_tokens=16, temperature=0))
    with grpc.insecure_channel(target) as channel:
        for response in rpc.InferenceStub(channel).Generate(request, timeout=60, metadata=[("x-request-id", "example")]):
            print(response.text, end="", flush=True)
            if response.HasField("finish"):
                reason = pb.FinishReason.Name(response.finish.reason)
                print(f"\n[{reason}, {response.finish.usage.completion_tokens} tokens]")


if __name__ == "__main__":
    main()
