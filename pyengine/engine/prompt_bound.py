"""How few tokens a text can become at least, where that is certain: what cannot fit the model need not be tokenised."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pyengine.engine.detokenizer import BYTE_LEVEL_ALPHABET

#: Normalizers -> characters that one character of their output can come from. Unicode's composed characters decompose to at
#: most four (Unicode 15, UAX #15).
_NORMALIZERS = {"NFC": 4, "NFD": 1, "NFKC": 4, "NFKD": 1, "Prepend": 1, "Replace": 1}
_PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Metaspace", "Split"})


@dataclass(frozen=True, slots=True)
class PromptBound:
    """Of one tokenizer."""

    max_chars: int  # of a text that one token can stand for
    dropped: str  # characters that the tokenizer leaves out: control characters that a byte-level vocabulary lacks

    def min_tokens(self, text: str) -> int:
        """Tokens that `text` becomes at least."""
        return -(-(len(text) - sum(map(text.count, self.dropped))) // self.max_chars)


def prompt_bound(tokenizer: Any) -> PromptBound | None:
    """The bound of a tokenizer; None where none is certain.

    That is where steps are not known here, unknown characters may be fused or left out, or white space beside a special
    token is stripped.

    Args:
        tokenizer: a Transformers tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "BPE":
        return None
    shrink = 1
    for step in _steps(backend.normalizer, "normalizers"):
        if step["type"] not in _NORMALIZERS or not _keeps_length(step):
            return None
        shrink *= _NORMALIZERS[step["type"]]
    pre_tokenizers = _steps(backend.pre_tokenizer, "pretokenizers")
    if any(step["type"] not in _PRE_TOKENIZERS or step.get("behavior") == "Removed" for step in pre_tokenizers):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    missing: list[int] = []
    if any(step["type"] == "ByteLevel" for step in pre_tokenizers):
        missing = [byte for char, byte in BYTE_LEVEL_ALPHABET.items() if char not in vocabulary]
    elif not backend.model.byte_fallback or any(f"<0x{byte:02X}>" not in vocabulary for byte in range(256)):
        return None
    if any(0x80 <= byte < 0xC0 for byte in missing) or (missing and backend.model.unk_token is not None):
        return None  # every other character has such a byte, and so stands for a token whatever else is missing
    return PromptBound(shrink * max(map(len, vocabulary)), "".join(chr(byte) for byte in missing if byte < 0x80))


def _keeps_length(step: dict[str, Any]) -> bool:
    """Whether a normalizer puts at least as many characters in as it takes out, but for composing them."""
    return step["type"] != "Replace" or len(step["pattern"].get("String", "")) in range(1, len(step["content"]) + 1)


def _steps(part: Any, key: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer of `tokenizers` as a flat list of its serialised steps; empty where there is none."""
    if part is None:
        return []
    spec = json.loads(part.__getstate__())
    return list(spec[key]) if spec["type"] == "Sequence" else [spec]
