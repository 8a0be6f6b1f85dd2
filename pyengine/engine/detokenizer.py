"""Token ids to text, one token at a time.

The chunks of a sequence, joined, are what the tokenizer's own decode adds when it is given the prompt and the output instead of
the prompt alone. A character belongs to the side that holds its first byte: when a prompt ends inside a character, the bytes
that complete it are no part of the output's text, and nothing of the prompt appears in it.

Two families of vocabularies are decoded from a table of each token's bytes, at a cost that does not grow with the output:
byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) and SentencePiece with byte fallback (Llama 2, Mistral, Gemma). Any other
tokenizer is asked to decode a short window of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
#: tokens of context that a window starts with; enough for rules that look at neighbours (spaces between words)
_WINDOW = 6
#: after so many tokens a window that still ends in U+FFFD holds that character for real: no character has more bytes
_MAX_PENDING = 8


class IncrementalDetokenizer(Protocol):
    """The text of one sequence."""

    token_bytes: bytes  # what the last token of `append` contributes to the text, as UTF-8 bytes

    def append(self, token_id: int) -> str:
        """Take one more token; return the characters that are certain now, maybe none."""

    def flush(self) -> str:
        """The end of the output: return what was held back, a cut-off character as U+FFFD."""


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's mapping of printable characters to bytes (`bytes_to_unicode` of its encoder, inverted)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(moved)}


BYTE_LEVEL_ALPHABET = _byte_level_alphabet()


def _decoder_steps(backend: Any) -> list[dict[str, Any]]:
    """The decoder of a `tokenizers.Tokenizer` as a flat list of its serialised steps; empty where it has none."""
    if backend.decoder is None:
        return []
    spec = json.loads(backend.decoder.__getstate__())
    return list(spec["decoders"]) if spec["type"] == "Sequence" else [spec]


class TokenVocabulary:
    """What each token is in bytes, and how this tokenizer's outputs are decoded. One a tokenizer; shared by all sequences.

    Args:
        tokenizer: a Transformers tokenizer; the fast path needs its `backend_tokenizer`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.kind = "window"  # or byte_level, byte_fallback
        self._replace: tuple[str, str] = ("", "")
        self._strips_start = False
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._bytes: dict[int, bytes | None] = {}
        self._byte_tokens: dict[int, bool] = {}
        if self._backend is not None:
            added = self._backend.get_added_tokens_decoder()
            self.special_ids = frozenset(i for i, token in added.items() if token.special)
            self._recognise(_decoder_steps(self._backend))
        else:
            self.special_ids = frozenset(tokenizer.all_special_ids)

    def _recognise(self, steps: list[dict[str, Any]]) -> None:
        """Take the fast path for the decoders whose rules are known exactly, and for no other."""
        kinds = [step["type"] for step in steps]
        if kinds in (["ByteLevel"], ["ByteLevel", "Fuse"]):
            self.kind = "byte_level"
            return
        if "ByteFallback" not in kinds:
            return
        before, after = steps[: kinds.index("ByteFallback")], steps[kinds.index("ByteFallback") + 1 :]
        if len(before) > 1 or (before and (before[0]["type"] != "Replace" or "String" not in before[0]["pattern"])):
            return
        if not after or after[0]["type"] != "Fuse" or len(after) > 2:
            return
        if len(after) == 2:
            strip = after[1]
            if (strip["type"], strip.get("content"), strip.get("start"), strip.get("stop")) != ("Strip", " ", 1, 0):
                return
            self._strips_start = True
        if before:
            self._replace = (before[0]["pattern"]["String"], before[0]["content"])
        self.kind = "byte_fallback"

    def token_bytes(self, token_id: int) -> bytes | None:
        """The token's bytes; None for an id that the tokenizer does not know (it decodes to nothing)."""
        try:
            return self._bytes[token_id]
        except KeyError:
            return self._look_up(token_id)

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is a byte-fallback token, `<0xNN>`."""
        if token_id not in self._byte_tokens:
            self._look_up(token_id)
        return self._byte_tokens[token_id]

    def _look_up(self, token_id: int) -> bytes | None:
        data, is_byte = self._compute(token_id)
        self._byte_tokens[token_id] = is_byte
        self._bytes[token_id] = data
        return data

    def _compute(self, token_id: int) -> tuple[bytes | None, bool]:
        if self.kind == "window":
            return self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False).encode(), False
        assert self._backend is not None
        token = self._backend.id_to_token(token_id)
        if token is None:
            return None, False
        if self.kind == "byte_level":
            if all(char in BYTE_LEVEL_ALPHABET for char in token):
                return bytes(BYTE_LEVEL_ALPHABET[char] for char in token), False
            return token.encode(), False  # an added token is its own text
        old, new = self._replace
        if old:
            token = token.replace(old, new)
        if len(token.encode()) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)]), True
            except ValueError:
                pass  # not a byte: a token that looks like one, decoded as its own text
        return token.encode(), False

    def token_text(self, token_id: int) -> str:
        """The token alone as text; an incomplete character in it is U+FFFD."""
        return (self.token_bytes(token_id) or b"").decode("utf-8", "replace")

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> IncrementalDetokenizer:
        """A detokenizer for an output that follows the prompt.

        Args:
            prompt_token_ids: the context.
            skip_special_tokens: leave special tokens out of the text.
            spaces_between_special_tokens: as Transformers' `decode` takes it; tokenizers whose decode sets no such
                spaces ignore it there and here.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        if self.kind == "byte_level":
            return ByteLevelDetokenizer(self, prompt_token_ids, skipped)
        if self.kind == "byte_fallback":
            return ByteFallbackDetokenizer(self, prompt_token_ids, skipped, strip_start=self._strips_start)
        options = {
            "skip_special_tokens": skip_special_tokens,
            "spaces_between_special_tokens": spaces_between_special_tokens,
        }
        return WindowDetokenizer(self, prompt_token_ids, skipped, options)


def _incomplete_tail(data: bytes) -> int:
    """Bytes at the end of `data` that begin a character and could still become it (Unicode 15, table 3-7)."""
    for length in range(1, min(3, len(data)) + 1):
        lead = data[-length]
        if lead & 0xC0 == 0x80:
            continue
        needed = 2 if 0xC2 <= lead < 0xE0 else 3 if 0xE0 <= lead < 0xF0 else 4 if 0xF0 <= lead < 0xF5 else 1
        if length >= needed:
            return 0
        if length > 1:
            low, high = _SECOND_BYTE.get(lead, (0x80, 0xBF))
            if not low <= data[-length + 1] <= high:
                return 0
        return length
    return 0


#: lead bytes after which not every continuation byte may follow: over-long forms, surrogates, beyond U+10FFFF
_SECOND_BYTE = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}


class _Utf8Stream:
    """Incremental UTF-8 whose first character may belong to the prompt.

    Malformed bytes become one U+FFFD for each maximal subpart (Unicode 15, section 3.9), as in the tokenizers library.
    """

    __slots__ = ("_in_prompt_char", "_pending")

    def __init__(self, prompt_tail: bytes) -> None:
        """`prompt_tail`: the prompt's last bytes, three are enough."""
        incomplete = _incomplete_tail(prompt_tail)
        self._pending = prompt_tail[-incomplete:] if incomplete else b""
        self._in_prompt_char = bool(self._pending)

    def feed(self, data: bytes) -> tuple[str, bytes]:
        """Characters that `data` completes, and `data` without the bytes of the prompt's character."""
        if self._in_prompt_char:
            data = self._finish_prompt_char(data)
            if self._in_prompt_char:
                return "", b""
        whole = self._pending + data
        certain = len(whole) - _incomplete_tail(whole)
        self._pending = whole[certain:]
        return whole[:certain].decode("utf-8", "replace"), data

    def _finish_prompt_char(self, data: bytes) -> bytes:
        """Drop from `data` what continues the prompt's character."""
        for position in range(len(data)):
            grown = self._pending + data[position : position + 1]
            if _incomplete_tail(grown) == len(grown):
                self._pending = grown
                continue
            self._pending = b""
            self._in_prompt_char = False
            completed = REPLACEMENT.encode() == grown or REPLACEMENT not in grown.decode("utf-8", "replace")
            return data[position + 1 :] if completed else data[position:]
        return b""

    def flush(self) -> str:
        """What a cut-off character decodes to."""
        pending, self._pending = self._pending, b""
        return "" if self._in_prompt_char else pending.decode("utf-8", "replace")


def _prompt_tail(vocabulary: TokenVocabulary, prompt_token_ids: Sequence[int], skipped: frozenset[int], size: int) -> bytes:
    """The last `size` bytes of the prompt's text, or all of them."""
    tail = b""
    for token_id in reversed(prompt_token_ids):
        if token_id not in skipped:
            tail = (vocabulary.token_bytes(token_id) or b"") + tail
        if len(tail) >= size:
            break
    return tail


class ByteLevelDetokenizer:
    """Byte-level BPE: the text is the tokens' bytes, end to end, read as UTF-8."""

    def __init__(self, vocabulary: TokenVocabulary, prompt_token_ids: Sequence[int], skipped: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._skipped = skipped
        self._stream = _Utf8Stream(_prompt_tail(vocabulary, prompt_token_ids, skipped, 3))
        self.token_bytes = b""

    def append(self, token_id: int) -> str:
        data = None if token_id in self._skipped else self._vocabulary.token_bytes(token_id)
        if data is None:
            self.token_bytes = b""
            return ""
        text, self.token_bytes = self._stream.feed(data)
        return text

    def flush(self) -> str:
        return self._stream.flush()


class ByteFallbackDetokenizer:
    """SentencePiece with byte fallback: a token is text, or one byte of a run that is text only if all of it is UTF-8.

    The tokenizers library decodes a run with one malformed byte to a U+FFFD for each of its bytes, so nothing of a run is
    certain before it ends.
    """

    def __init__(
        self,
        vocabulary: TokenVocabulary,
        prompt_token_ids: Sequence[int],
        skipped: frozenset[int],
        *,
        strip_start: bool,
    ) -> None:
        self._vocabulary = vocabulary
        self._skipped = skipped
        self.token_bytes = b""
        self._run = bytearray()
        for token_id in reversed(prompt_token_ids):
            if token_id in skipped or vocabulary.token_bytes(token_id) is None:
                continue
            if not vocabulary.is_byte(token_id):
                break
            self._run += vocabulary.token_bytes(token_id) or b""
        self._run.reverse()
        self._prompt_run = len(self._run)  # bytes of the run that are the prompt's
        self._char = _Utf8Stream(bytes(self._run))  # only for what each byte adds to the text
        # The decoder strips one space at the start of a text: the output's, if the prompt decodes to nothing.
        self._strip = strip_start and not _prompt_tail(vocabulary, prompt_token_ids, skipped, 1)

    def append(self, token_id: int) -> str:
        data = None if token_id in self._skipped else self._vocabulary.token_bytes(token_id)
        if data is None:
            self.token_bytes = b""
            return ""
        if self._vocabulary.is_byte(token_id):
            self._run += data
            _, self.token_bytes = self._char.feed(data)
            return ""
        text = self._end_run()
        piece = data.decode()
        stripped = self._strip_first(piece) if not text else piece
        self.token_bytes = stripped.encode()
        return text + stripped

    def _strip_first(self, text: str) -> str:
        """Drop the space that the decoder strips, if `text` is the first of the output."""
        if not self._strip or not text:
            return text
        self._strip = False
        return text[1:] if text[0] == " " else text

    def _end_run(self) -> str:
        run, mine = bytes(self._run), self._prompt_run
        self._run.clear()
        self._prompt_run = 0
        self._char = _Utf8Stream(b"")
        try:
            run.decode("utf-8")
        except UnicodeDecodeError:
            text = REPLACEMENT * (len(run) - mine)
        else:
            while mine < len(run) and run[mine] & 0xC0 == 0x80:
                mine += 1  # the rest of the prompt's last character
            text = run[mine:].decode("utf-8")
        return self._strip_first(text)

    def flush(self) -> str:
        return self._end_run()


class WindowDetokenizer:
    """Any other tokenizer: decode a window that starts a few tokens back, and take what the new tokens add to it."""

    def __init__(
        self,
        vocabulary: TokenVocabulary,
        prompt_token_ids: Sequence[int],
        skipped: frozenset[int],
        options: dict[str, bool],
    ) -> None:
        self._vocabulary = vocabulary
        self._options = options
        visible = [i for i in prompt_token_ids[-4 * _WINDOW :] if i not in skipped]
        self._ids = visible[-_WINDOW:]  # tokens that were read, then those that are pending
        self._read = len(self._ids)
        self._context = self._decode(self._ids)
        self.token_bytes = b""

    def _decode(self, ids: Sequence[int]) -> str:
        tokenizer = self._vocabulary.tokenizer
        return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False, **self._options)

    def append(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        pending = len(self._ids) - self._read
        if text.endswith(REPLACEMENT) and pending < _MAX_PENDING:
            self.token_bytes = self._vocabulary.token_bytes(token_id) or b""
            return ""
        return self._emit(text)

    def _emit(self, text: str) -> str:
        known = len(self._context)
        if not text.startswith(self._context):  # the prompt ended inside a character, which the output completes
            known = len(self._context.rstrip(REPLACEMENT)) + 1
        new = text[known:]
        self._ids = self._ids[-_WINDOW:]
        self._read = len(self._ids)
        self._context = self._decode(self._ids)
        self.token_bytes = new.encode()
        return new

    def flush(self) -> str:
        return self._emit(self._decode(self._ids)) if len(self._ids) > self._read else ""
