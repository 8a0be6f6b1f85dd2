"""Logits of tiny random checkpoints equal Transformers' in fp32: prefill, decode, mixed batches, variants, rope scalings."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_runner import PagedRunner
from tiny_models import VOCAB_SIZE, make_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from pyengine.config import ModelArchConfig
from pyengine.errors import ModelLoadError
from pyengine.models.interfaces import CausalLM
from pyengine.models.registry import create_model
from pyengine.ops import get_ops

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}

ROPE = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "gelu": {"hidden_act": "gelu"},
    "gelu-tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "odd-sizes": {
        "vocab_size": 509,
        "hidden_size": 66,
        "intermediate_size": 75,
        "head_dim": 120,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
    },
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    **{f"rope-{name}": {"rope_parameters": {"rope_theta": 10000.0, **scaling}} for name, scaling in ROPE.items()},
    "mistral": {"architecture": "MistralForCausalLM", "sliding_window": None},
    "mistral-window": {"architecture": "MistralForCausalLM", "sliding_window": 12},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "use_sliding_window": False},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "use_sliding_window": False},
}


def random_ids(length: int, seed: int) -> list[int]:
    return torch.randint(0, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def reference(path: Path, ids: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Transformers' logits, fp32 [len(ids), vocab]."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    return model(torch.tensor([ids])).logits[0].float()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, with_tokenizer=False, **VARIANTS[variant])
    runner = PagedRunner(path)
    ids, other = random_ids(90, 0), random_ids(40, 1)
    # A prefill in unequal chunks beside another sequence that comes and goes, then decode steps.
    got = [
        runner.step({"a": ids[:37]})["a"],
        runner.step({"b": other[:20], "a": ids[37:70]})["a"],
        runner.step({"a": ids[70:80], "b": other[20:21]})["a"],
        *(runner.step({"b": [other[21 + i]], "a": [ids[80 + i]]})["a"] for i in range(10)),
    ]
    torch.testing.assert_close(torch.cat(got), reference(path, ids), **TOLERANCE)


def test_batch_composition_does_not_change_a_bit(tiny_llama: Path) -> None:
    together, alone = PagedRunner(tiny_llama), PagedRunner(tiny_llama)
    prompts = {str(i): random_ids(5 + 7 * i, i) for i in range(5)}
    mixed = together.step(prompts)
    for name, ids in prompts.items():
        assert torch.equal(mixed[name], alone.step({name: ids})[name])
    mixed = together.step({name: [7] for name in prompts})
    for name in prompts:
        assert torch.equal(mixed[name], alone.step({name: [7]})[name])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_follows_transformers(dtype: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, with_tokenizer=False, dtype=getattr(torch, dtype))
    ids = random_ids(40, 2)
    exact = reference(path, ids)
    got = PagedRunner(path, dtype=dtype).step({"a": ids})["a"]
    theirs = reference(path, ids, getattr(torch, dtype))
    assert got.dtype == torch.float32
    # Both round; ours may be no further from fp32 than twice what Transformers' own rounding costs.
    assert (got - exact).abs().mean() <= 2 * (theirs - exact).abs().mean()


NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["emulated", pytest.param("cuda", marks=NO_CUDA)])
def test_other_devices_give_the_cpu_logits(device: str, tiny_llama: Path) -> None:
    ids = random_ids(20, 3)
    runners = [PagedRunner(tiny_llama, device=name) for name in ("cpu", device)]
    for batch in ({"a": ids[:16], "b": ids[:3]}, {"a": [ids[16]], "b": [ids[3]]}):
        cpu, other = (runner.step(batch) for runner in runners)
        for name in batch:
            torch.testing.assert_close(other[name], cpu[name], atol=1e-3, rtol=1e-3)


def test_tied_embedding_is_kept_once(tmp_path: Path) -> None:
    path = make_model(tmp_path, with_tokenizer=False, tie_word_embeddings=True)
    runner = PagedRunner(path)
    table = AutoModelForCausalLM.from_pretrained(path).model.embed_tokens.weight
    rows = runner.model.lm_head.rows(torch.arange(VOCAB_SIZE))
    assert torch.equal(rows, table)
    assert "lm_head.weight" not in runner.model.weight_shapes()


def tiny_arch(**changes: Any) -> ModelArchConfig:
    values: dict[str, Any] = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
    return ModelArchConfig(**(values | changes))


def new_model(arch: ModelArchConfig) -> CausalLM:
    return create_model(arch, ops=get_ops("cpu"), dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"lm_head.weight": None}, "tensor lm_head.weight is missing"),
        ({"model.norm.bias": torch.zeros(32)}, "tensor model.norm.bias does not belong to LlamaForCausalLM"),
        ({"model.norm.weight": torch.ones(31)}, r"tensor model.norm.weight has shape \[31\], not \[32\]"),
    ],
)
def test_load_weights_checks_what_it_gets(edit: dict[str, Tensor | None], message: str) -> None:
    model = new_model(tiny_arch())
    weights = {name: torch.ones(shape) for name, shape in model.weight_shapes().items()} | edit
    with pytest.raises(ModelLoadError, match=message):
        model.load_weights((name, tensor) for name, tensor in weights.items() if tensor is not None)


def test_weights_are_not_kept() -> None:
    """A tensor is kept until the merged projection that it belongs to is whole: a load needs no second copy of the model."""
    model = new_model(tiny_arch(tie_word_embeddings=True, attention_bias=True))
    given: list[weakref.ref[Tensor]] = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, shape in model.weight_shapes().items():
            assert sum(reference() is not None for reference in given) <= 3  # query, key, and the one that was just taken
            tensor = torch.ones(shape)
            given.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    model.load_weights(stream())
    assert len(given) == len(model.weight_shapes())
    assert not any(reference() is not None for reference in given)


def test_unknown_architecture() -> None:
    with pytest.raises(ModelLoadError, match="architecture MambaForCausalLM is not supported; supported: LlamaForCausalLM"):
        new_model(tiny_arch(architecture="MambaForCausalLM"))
