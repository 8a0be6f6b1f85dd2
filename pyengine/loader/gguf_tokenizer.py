"""Builds a tokenizer from the vocabulary in a GGUF file's metadata.

Two kinds are in use by the supported architectures: byte-level BPE ("gpt2"), where `tokenizer.ggml.pre` names the way text is
cut into words first, and SentencePiece BPE ("llama"), whose merges follow from the tokens' scores. Cutting text otherwise than
the model was trained with gives other tokens, so an unknown way is an error and not a guess.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from enum import IntEnum

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pyengine.errors import ModelLoadError
from pyengine.loader.gguf_file import GGUFFile

logger = logging.getLogger(__name__)

_PREFIX = "tokenizer.ggml."
#: Metadata that decides what the tokenizer is; equal values give equal tokenizers.
TOKENIZER_KEYS = tuple(
    _PREFIX + key
    for key in (
        "model",
        "pre",
        "tokens",
        "token_type",
        "scores",
        "merges",
        "bos_token_id",
        "eos_token_id",
        "unknown_token_id",
        "add_bos_token",
        "add_eos_token",
        "add_space_prefix",
    )
)

_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_GPT2 = ("gpt-2", "gpt2", "olmo", "mpt", "jais", "exaone4")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx", "pixtral")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")
_TEKKEN = ("tekken",)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}"
_QWEN2_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION_AND_SPACE}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _TokenType(IntEnum):
    """`tokenizer.ggml.token_type`'s values that matter here."""

    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer that the file describes, special tokens and BOS/EOS rules included.

    Raises:
        ModelLoadError: naming the file and the key that is missing, broken or not supported.
    """
    kind = file.get(_PREFIX + "model")
    if _PREFIX + "tokens" not in file:
        raise ModelLoadError(f"{file.path}: key {_PREFIX}tokens is missing: the file has no tokenizer")
    tokens = file.strings(_PREFIX + "tokens")
    try:
        if kind == "gpt2":
            tokenizer = _byte_level(file, tokens)
        elif kind == "llama":
            tokenizer = _sentencepiece(file, tokens)
        else:
            raise ModelLoadError(f"{file.path}: {_PREFIX}model {kind!r} is not supported; gpt2 and llama are")
        _add_tokens(file, tokenizer, tokens)
        tokenizer.post_processor = _post_processor(file, tokens)
    except ModelLoadError:
        raise
    except Exception as error:  # tokenizers raises plain Exceptions, say for a merge that is not in the vocabulary
        raise ModelLoadError(f"{file.path}: its tokenizer cannot be built: {error}") from error
    return tokenizer


def _add_tokens(file: GGUFFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """Name the tokens that text is searched for before it is cut."""
    pairs = list(zip(tokens, _numbers(file, "token_type"), strict=False))
    special = [token for token, token_type in pairs if token_type == _TokenType.CONTROL]
    whole = [token for token, token_type in pairs if token_type == _TokenType.USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in whole])


def _numbers(file: GGUFFile, key: str) -> tuple[float, ...]:
    values = file.get(_PREFIX + key, ())
    if not isinstance(values, tuple):
        raise ModelLoadError(f"{file.path}: key {_PREFIX}{key} is not an array of numbers")
    return values


def _token(file: GGUFFile, tokens: list[str], key: str, token_id: object) -> str:
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise ModelLoadError(f"{file.path}: key {_PREFIX}{key} is {token_id!r}, and there are {len(tokens)} tokens")
    return tokens[token_id]


def _byte_level(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    pre = file.get(_PREFIX + "pre", "default")
    merges = [_split_merge(file, merge) for merge in file.strings(_PREFIX + "merges")]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    # These two families were trained with whole words taken from the vocabulary before any merge.
    ignore_merges = pre in _LLAMA3 or pre in _TEKKEN
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    if pre in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(file, pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split_merge(file: GGUFFile, merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not separator:
        raise ModelLoadError(f"{file.path}: {_PREFIX}merges holds {merge!r}, which is not a pair")
    return left, right


def _pre_tokenizer(file: GGUFFile, pre: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "default":  # files from before the key
        logger.warning("%s: %spre is not set; text is cut as GPT-2 does, which may not fit the model", file.path, _PREFIX)
        return words
    if pre in _GPT2:
        return words
    if pre in _DIGITS_APART:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    for names, pattern in ((_LLAMA3, _LLAMA3_WORDS), (_QWEN2, _QWEN2_WORDS), (_TEKKEN, _TEKKEN_WORDS)):
        if pre in names:
            split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
            return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise ModelLoadError(
        f"{file.path}: {_PREFIX}pre {pre!r} is not supported; give the model's own tokenizer folder with --tokenizer"
    )


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    if _PREFIX + "scores" not in file:
        raise ModelLoadError(f"{file.path}: key {_PREFIX}scores is missing")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = _token(file, tokens, "unknown_token_id", file.get(_PREFIX + "unknown_token_id", 0))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=list(_merges_from_scores(vocab, _numbers(file, "scores"))),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    adds_space = file.get(_PREFIX + "add_space_prefix", True)
    prepend = [normalizers.Prepend("▁")] if adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer


def _merges_from_scores(vocab: dict[str, int], scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Merges in the order in which SentencePiece would make them: the best-scored result first, then the lower pieces' ids."""
    results = sorted((token for token in vocab if len(token) > 1), key=lambda token: -scores[vocab[token]])
    for token in results:
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        yield from sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))


def _post_processor(file: GGUFFile, tokens: list[str]) -> processors.PostProcessor:
    """Puts BOS before and EOS after a text, where the file (or its kind's convention) says so."""
    adds_bos_by_default = file.get(_PREFIX + "model") == "llama" or file.get(_PREFIX + "pre") in _LLAMA3 + _TEKKEN
    adds_bos = file.get(_PREFIX + "add_bos_token", adds_bos_by_default)
    adds_eos = file.get(_PREFIX + "add_eos_token", False)
    before: list[str] = []
    after: list[str] = []
    special: list[tuple[str, int]] = []
    for adds, key, place in ((adds_bos, "bos_token_id", before), (adds_eos, "eos_token_id", after)):
        token_id = file.get(_PREFIX + key)
        if adds and token_id is not None:
            place.append(_token(file, tokens, key, token_id))
            special.append((place[-1], token_id))
    single = [*before, "$A", *after]
    pair = [*single, *before, "$B:1", *after]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=sorted(set(special)))
