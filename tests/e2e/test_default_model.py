"""The default model, from its GGUF file: dequantised against Transformers, and as it runs by default."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers_reference import TransformersReference

from pyengine import LLM, SamplingParams
from pyengine.loader.checkpoint import open_checkpoint

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "1, 1, 2, 3, 5, 8,",
    "Explain in one sentence what a prefix cache is.",
    "日本の首都は",
    "Q: What is 12 * 12?\nA:",
    "The quick brown fox jumps over the lazy dog. " * 6,
    '{"name": "Ada", "born":',
    "Dear Sir or Madam,\n\n",
    "SELECT name FROM",
    "Water boils at",
    "🙂🚀 means",
    "La plus grande ville du monde est",
    "import torch\n\nclass Attention(torch.nn.Module):\n",
    "A",
    "The three laws of thermodynamics say that",
    "<html>\n<body>\n  <h1>",
    "Roses are red,\nviolets are blue,\n",
    "Translate to German: Good morning, my friend.\n",
    "x = [i ** 2 for i in range(10)]\nprint(x)\n#",
    "The meeting is at 10:30 on Tuesday. Please bring",
    "中国的首都是北京,日本的",
    "Шёл дождь, и",
    "List five fruits:\n1.",
    "To be, or not to be:",
    "A recipe for pancakes. Ingredients:\n- ",
    "In 1969, the first human",
    "error: expected ';' before '}' token\n",
    "Monday Tuesday Wednesday " * 20,
    "The mitochondria is",
    "42",
]


def check_against(reference: TransformersReference, num_prompts: int, num_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    with LLM(device="cpu", dtype="float32", quantization="none", max_model_len=1024) as llm:
        outputs = llm.generate(PROMPTS[:num_prompts], params, use_tqdm=False)
        assert "Paris" in outputs[0].outputs[0].text
        (alone,) = llm.generate(PROMPTS[1], params, use_tqdm=False)
        assert alone.outputs[0].token_ids == outputs[1].outputs[0].token_ids
        stats = llm.stats()
        assert stats["num_free_blocks"] == stats["num_blocks"]
    for output in outputs:
        prompt, token_ids = output.prompt_token_ids, output.outputs[0].token_ids
        assert len(token_ids) == num_tokens
        assert reference.judge(prompt + token_ids).first_difference(len(prompt)) is None, output.prompt


def test_greedy_tokens_equal_transformers(smollm2_path: Path) -> None:
    """Near ties aside; and what runs with others gives what it gives alone."""
    check_against(TransformersReference.from_checkpoint(open_checkpoint(str(smollm2_path))), 4, 16)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_greedy_tokens_equal_transformers_reading_the_file_itself(smollm2_path: Path) -> None:
    check_against(TransformersReference.from_gguf(smollm2_path), 32, 64)


def test_by_default_the_file_runs_as_it_is(smollm2_path: Path) -> None:
    """Quantised weights and a bfloat16 cache; and still what runs with others gives what it gives alone."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(device="cpu", max_model_len=512) as llm:
        config = llm.llm_engine.config
        assert (config.model.quantization, config.model.dtype, config.cache.kv_cache_dtype) == ("gguf", "float32", "bfloat16")
        together = llm.generate(PROMPTS[:8], params, use_tqdm=False)
        assert "Paris" in together[0].outputs[0].text
        for prompt, output in zip(PROMPTS[:8], together, strict=True):
            (alone,) = llm.generate([prompt], params, use_tqdm=False)
            assert alone.outputs[0].token_ids == output.outputs[0].token_ids
