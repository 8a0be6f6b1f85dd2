"""The whole engine over quantised Hugging Face folders: greedy tokens on CPUs and on the emulated GPU against Transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quantized_folders import FORMATS, write_quantized
from tiny_models import make_model
from transformers_reference import TransformersReference

from pyengine import LLM, SamplingParams
from pyengine.errors import ConfigError

PROMPTS = [{"prompt_token_ids": [(7 * i + 13 * j) % 500 + 3 for j in range(6 + 5 * i)]} for i in range(8)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
#: Where Transformers' two best logits are closer, rounding may choose between them: logits have a deviation of 3, and inputs
#: that are rounded to int8 move them by about 5% of it.
NEAR_TIE = 0.75


def generate(folder: Path, device: Any, **options: Any) -> list[list[int]]:
    options = {"max_model_len": 64, "num_kv_blocks": 64, "max_num_batched_tokens": 32, "max_num_seqs": 8, **options}
    with LLM(str(folder), device=device, **options) as llm:
        config = llm.llm_engine.config
        assert config.model.quantization == options.get("quantization", config.model.arch.quantization)
        assert config.model.dtype == ("float32" if device == "cpu" else "bfloat16")
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", ["gptq-act-order", "awq", "fp8", "int8", "packed"])
def test_tokens_on_every_device(name: str, tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", intermediate_size=192, num_hidden_layers=2)
    folder = tmp_path / "quantised"
    write_quantized(source, FORMATS[name], folder, tmp_path / "plain")
    on_cpu = generate(folder, "cpu")
    on_gpu = generate(folder, "emulated", quantization=FORMATS[name].config["quant_method"])
    reference = TransformersReference.from_folder(tmp_path / "plain")
    compared = 0
    for prompt, *outputs in zip(PROMPTS, on_cpu, on_gpu, strict=True):
        start = len(prompt["prompt_token_ids"])
        for tokens in outputs:
            judged = reference.judge([*prompt["prompt_token_ids"], *tokens])
            for index, (behind, gap) in enumerate(zip(judged.behind[start - 1 :], judged.gaps[start - 1 :], strict=True)):
                if gap >= NEAR_TIE:
                    assert behind == 0, f"token {index} of {tokens} is {behind} behind the best"
                    compared += 1
    assert compared > len(PROMPTS) * GREEDY.max_tokens / 2


def test_another_scheme_than_the_folders(tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", intermediate_size=192, num_hidden_layers=1)
    write_quantized(source, FORMATS["awq"], tmp_path / "quantised", tmp_path / "plain")
    with pytest.raises(ConfigError, match="quantization: gptq was asked for, but the checkpoint's is awq"):
        LLM(str(tmp_path / "quantised"), device="cpu", quantization="gptq")
