"""Small tokenizers of the families that the detokenizer knows, and of one that it does not."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEXT = "Hello world 😀👩‍👩‍👧 日本語 Åé naïve 🇬🇧 नमस्ते ok</s>\n  two  spaces"
WORDS = ["▁Hello", "▁world", "▁", "▁two", "▁the", "the", "lo", "ing", "日", "é", "\n", "ok", "▁▁", "ä"]


@cache
def byte_fallback(strip: bool = True) -> PreTrainedTokenizerFast:
    """As Llama 2's: tokens with U+2581 for spaces, one token a byte, the decoder of SentencePiece models."""
    vocab: dict[str, int] = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for word in [*WORDS, *"abcdefghijklmnopqrstuvwxyz"]:
        vocab.setdefault(word, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strip else []))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("<0xZZ>", special=False), AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's, with the 256 bytes, two merges and added tokens, special and not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges = [("Ġ", "t"), ("h", "e"), ("ð", "Ł")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|end|>", "<|start|>")])
    tokenizer.add_tokens(
        [AddedToken("\n\n  ", special=False), AddedToken("漢字 é", special=False), AddedToken("Ġ", special=False)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|start|>", eos_token="<|end|>")


@cache
def metaspace() -> PreTrainedTokenizerFast:
    """A unigram model with the Metaspace decoder: decoded through a window."""
    vocab = [("<unk>", 0.0), ("<s>", 0.0)] + [(w, -1.0 - i) for i, w in enumerate([*WORDS, *"abcdefghijklmnopqrstuvwxyz"])]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


def from_folder(path: Path) -> Any:
    """The tokenizer of a Hugging Face folder."""
    return PreTrainedTokenizerFast.from_pretrained(path)
