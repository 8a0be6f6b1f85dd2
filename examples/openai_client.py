"""Streams a chat with OpenAI's own package: `python examples/openai_client.py [BASE_URL] [MESSAGE]`."""

from __future__ import annotations

import argparse
import os

import openai


def main() -> None:
    parser = argparse.ArgumentParser(description="Streams a chat with OpenAI's own package.")
    parser.add_argument(
        "base_url", nargs="?", default="http://127.0.0.1:8000/v1", metavar="BASE_URL", help="default: %(default)s"
    )
    parser.add_argument("message", nargs="?", default="Name three colours.", metavar="MESSAGE", help="default: %(default)s")
    flags = parser.parse_args()
    stream_chat(flags.base_url, flags.message)


def stream_chat(base_url: str, message: str) -> None:
    """Print the answer as it comes, and its length."""
    client = openai.OpenAI(base_url=base_url, api_key=os.environ.get("PYENGINE_API_KEY", "none"))
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": message}],
        max_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n[{chunk.usage.completion_tokens} tokens]")


if __name__ == "__main__":
    main()
