"""Logits of a whole text: the same whatever the chunks are, and those of an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pyengine import LLM, SamplingParams
from pyengine.config import EngineArgs
from pyengine.errors import InvalidRequestError
from pyengine.worker.evaluate import Evaluator

IDS = torch.randint(4, 500, (75,), generator=torch.Generator().manual_seed(0)).tolist()


def whole(evaluator: Evaluator, chunk: int) -> torch.Tensor:
    """fp32 [75, vocab]."""
    return torch.cat([part.clone() for part in evaluator.logits(IDS, chunk=chunk)])


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_logits_do_not_depend_on_the_chunks(quantization: str, tiny_llama: Path) -> None:
    evaluator = Evaluator(EngineArgs(model=str(tiny_llama), device="cpu", quantization=quantization))
    logits = whole(evaluator, 128)
    assert logits.shape == (75, 512)
    for chunk in (1, 7, 16, 75):
        assert torch.equal(whole(evaluator, chunk), logits)


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_logits_are_those_of_an_engine(enforce_eager: bool, tiny_llama: Path) -> None:
    args = EngineArgs(model=str(tiny_llama), device="cpu", quantization="int8", enforce_eager=enforce_eager)
    logprobs = torch.log_softmax(whole(Evaluator(args), 32), -1)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with LLM(str(tiny_llama), device="cpu", quantization="int8") as llm:
        (output,) = llm.generate([{"prompt_token_ids": IDS}], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    for position in range(1, len(IDS)):
        entries = output.prompt_logprobs[position]
        assert entries is not None
        assert entries[IDS[position]].logprob == pytest.approx(float(logprobs[position - 1, IDS[position]]), abs=1e-4)
    assert output.outputs[0].token_ids == [int(logprobs[-1].argmax())]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "1 to 1024 tokens, got 0"),
        ([5] * 1025, "1 to 1024 tokens, got 1025"),
        ([512], "of 0 to 511"),
        ([-1], "of 0 to 511"),
    ],
)
def test_wrong_tokens(ids: list[int], message: str, tiny_llama: Path) -> None:
    evaluator = Evaluator(EngineArgs(model=str(tiny_llama), device="cpu"))
    with pytest.raises(InvalidRequestError, match=f"token_ids.*{message}"):
        next(evaluator.logits(ids))
