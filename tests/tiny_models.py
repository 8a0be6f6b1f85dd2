"""Tiny random checkpoints in Hugging Face's form, made with Transformers: no test needs large weights or a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 512
BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = 0, 1, 2, 3
SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = [
    "The harbour was quiet when the first boats came in, and the people on the shore were already waiting for the fish.",
    "She opened the letter with care, read it twice, and put it back where she had found it, under the old blue lamp.",
    "A server that answers many requests at once keeps one queue, one clock and as little other state as it can.",
    "Numbers such as 10, 25, 100 and 2048 are written in digits; one, two and three are written in letters.",
    "What is the capital of France? The capital of France is Paris. What is the longest river? It depends on the map.",
    "def add(left, right):\n    return left + right\n\nfor index in range(10):\n    print(index, add(index, 1))\n",
    "When the rain stopped, the children ran out to the garden, and their shoes were never the same again.",
    "Memory is cut into blocks of the same size, so that a sequence can grow without being moved and nothing is wasted.",
    "Once upon a time there was a small engine that could not be started, however long its owner pulled the string.",
    "Über den Fluss führt eine Brücke; où est la gare? 你好世界。 Привет, мир! 🙂🚀",
]


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """Keyword arguments for a Llama-like config: grouped-query attention, heads wider than hidden / heads."""
    config: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }
    return config | overrides


def make_tokenizer(path: Path) -> None:
    """Save a byte-level BPE tokenizer of exactly VOCAB_SIZE tokens: every text has a token sequence, and puts <s> first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise AssertionError(f"the corpus gives {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
            ),
        ]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(path)


def randomise_weights(model: torch.nn.Module, seed: int) -> None:
    """Draw weights large enough that greedy output wanders with the context instead of falling into one token.

    A matrix has deviation gain / sqrt(fan_in), so activations keep their size; queries and keys get more: peaky attention.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.1 * values)
            elif name.endswith("bias"):
                parameter.copy_(0.5 * values)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(values if "embed" in name else 3.0 * values / parameter.shape[1] ** 0.5)
            else:
                gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.5
                parameter.copy_(gain * values / parameter.shape[1] ** 0.5)


def make_model(
    path: Path,
    *,
    architecture: str = "LlamaForCausalLM",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    with_tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Save a tiny random checkpoint to `path` and return it.

    Args:
        path: a folder, made if need be.
        architecture: a causal model class of Transformers.
        seed: of the weights.
        dtype: of the saved weights.
        max_shard_size: as `save_pretrained` takes it; a small one gives several shards and an index.
        with_tokenizer: whether tokenizer files are saved too.
        overrides: config values in place of `tiny_config`'s.
    """
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**tiny_config(**overrides)))
    randomise_weights(model, seed)
    model.generation_config.eos_token_id = [EOS_ID, IM_END_ID]
    model.to(dtype).eval().save_pretrained(path, max_shard_size=max_shard_size)
    if with_tokenizer:
        make_tokenizer(path)
    return path


def edit_config(path: Path, **changes: Any) -> None:
    """Change values of a saved checkpoint's config.json; None removes a key."""
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
