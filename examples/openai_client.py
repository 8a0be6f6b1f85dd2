"""Streams a chat with OpenAI's own package: `python examples/openai_client.py [BASE_URL] [MESSAGE]`."""

from __future__ import annotations

import os
import sys

import openai


def main(base_url: str = "http://127.0.0.1:8000/v1", message: str = "Name three colours.") -> None:
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
    main(*sys.argv[1:])
