"""Incremental detokenisation: rule 7 of the behaviour list, and the bytes of rule 9."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sample_tokenizers
from tiny_models import make_tokenizer

from pyengine.engine.detokenizer import REPLACEMENT, TokenVocabulary


@pytest.fixture(scope="module")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return sample_tokenizers.from_folder(folder)


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback", "byte_fallback_no_strip", "tiny"])
def tokenizer(request: pytest.FixtureRequest, tiny_tokenizer: Any) -> Any:
    made = {
        "byte_level": sample_tokenizers.byte_level,
        "byte_fallback": sample_tokenizers.byte_fallback,
        "byte_fallback_no_strip": lambda: sample_tokenizers.byte_fallback(strip=False),
        "tiny": lambda: tiny_tokenizer,
    }
    return made[request.param]()


def chunks(vocabulary: TokenVocabulary, prompt: list[int], output: list[int], *, skip: bool) -> Iterator[str]:
    detokenizer = vocabulary.detokenizer(prompt, skip_special_tokens=skip)
    for token_id in output:
        yield detokenizer.append(token_id)
    yield detokenizer.flush()


def decode(tokenizer: Any, ids: list[int], skip: bool = True) -> str:
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def expected(tokenizer: Any, prompt: list[int], output: list[int], *, skip: bool) -> str:
    """What the tokenizer's full decode adds for the output; the character that straddles the two is the prompt's."""
    whole, before = decode(tokenizer, prompt + output, skip), decode(tokenizer, prompt, skip)
    if whole.startswith(before):
        return whole[len(before) :]
    # The output completes the prompt's last character. Byte-level: that was one U+FFFD; byte fallback: one a byte of the run,
    # and the output's tokens are single bytes, so add them until the character is complete.
    if TokenVocabulary(tokenizer).kind == "byte_level":
        assert whole.startswith(before[:-1])
        return whole[len(before) :]
    count = 0
    while REPLACEMENT in before:
        count += 1
        before = decode(tokenizer, prompt + output[:count], skip)
    assert whole.startswith(before)
    return whole[len(before) :]


def test_every_split_of_multibyte_text(tokenizer: Any) -> None:
    """Rule 7: wherever prompt and output meet, the chunks are the full decode's and no U+FFFD is among them."""
    vocabulary = TokenVocabulary(tokenizer)
    assert vocabulary.kind != "window"
    ids = tokenizer(sample_tokenizers.TEXT, add_special_tokens=False).input_ids
    for cut in range(len(ids) + 1):
        for skip in (True, False):
            got = list(chunks(vocabulary, ids[:cut], ids[cut:], skip=skip))
            assert "".join(got) == expected(tokenizer, ids[:cut], ids[cut:], skip=skip), (cut, skip)
            assert REPLACEMENT not in "".join(got)


def test_an_output_cut_anywhere_ends_as_the_full_decode_does(tokenizer: Any) -> None:
    """Rule 7: a cut-off character gives valid UTF-8, and only at the end."""
    vocabulary = TokenVocabulary(tokenizer)
    ids = tokenizer(sample_tokenizers.TEXT, add_special_tokens=False).input_ids
    cut_off = 0
    for end in range(len(ids) + 1):
        got = list(chunks(vocabulary, [], ids[:end], skip=True))
        assert "".join(got) == expected(tokenizer, [], ids[:end], skip=True)
        assert REPLACEMENT not in "".join(got[:-1])
        cut_off += REPLACEMENT in got[-1]
    assert cut_off > 20


def test_random_tokens(tokenizer: Any) -> None:
    """Any ids at all, malformed bytes, special, added and unknown tokens among them, give what the full decode gives."""
    vocabulary = TokenVocabulary(tokenizer)
    rng = random.Random(7)
    pieces = [tokenizer(word, add_special_tokens=False).input_ids for word in ("😀", "é", "日本", "ok", " a")]
    for _ in range(1500):
        ids = [rng.randrange(len(tokenizer) + 2) for _ in range(rng.randrange(1, 14))]
        if rng.random() < 0.5:  # mostly bytes, so that valid and cut-off characters turn up
            ids = [token_id for piece in rng.choices(pieces, k=4) for token_id in piece if rng.random() < 0.9]
        cut = rng.randrange(len(ids) + 1)
        if vocabulary.kind == "byte_fallback" and REPLACEMENT in decode(tokenizer, ids):
            cut = 0  # one malformed byte changes a whole run: where the prompt holds a part of it, texts cannot be compared
        for skip in (True, False):
            got = "".join(chunks(vocabulary, ids[:cut], ids[cut:], skip=skip))
            assert got == expected(tokenizer, ids[:cut], ids[cut:], skip=skip), (ids, cut, skip)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_prompt_that_ends_inside_a_character_leaks_nothing(kind: str) -> None:
    """Rule 7: neither the prompt's text, nor its half character, nor a U+FFFD for it is in the output."""
    tokenizer = getattr(sample_tokenizers, kind)()
    vocabulary = TokenVocabulary(tokenizer)
    ids = tokenizer("the cat 😀 the", add_special_tokens=False).input_ids
    inside = [i for i in range(len(ids)) if REPLACEMENT in decode(tokenizer, ids[:i])]
    assert len(inside) >= 2
    the = tokenizer.convert_tokens_to_ids(["t", "h", "e"])
    for cut in inside:
        assert "".join(chunks(vocabulary, ids[:cut], ids[cut:], skip=True)) == " the"  # the rest of the character is dropped
        assert "".join(chunks(vocabulary, ids[:cut], the, skip=True)) == "the"  # it is never completed


def test_a_prompt_that_ends_inside_a_character_and_output_that_does_too() -> None:
    tokenizer = sample_tokenizers.byte_level()
    vocabulary = TokenVocabulary(tokenizer)
    ids = tokenizer("日本", add_special_tokens=False).input_ids
    assert list(chunks(vocabulary, ids[:1], ids[1:2], skip=True)) == ["", ""]
    assert list(chunks(vocabulary, ids[:1], ids[1:4], skip=True)) == ["", "", "", REPLACEMENT]


def test_token_bytes_join_to_the_text(tokenizer: Any) -> None:
    """Rule 9: the bytes of the tokens, joined, are the text's."""
    vocabulary = TokenVocabulary(tokenizer)
    ids = tokenizer(sample_tokenizers.TEXT, add_special_tokens=False).input_ids
    for cut in range(len(ids)):
        detokenizer = vocabulary.detokenizer(ids[:cut])
        text, joined = "", b""
        for token_id in ids[cut:]:
            text += detokenizer.append(token_id)
            joined += detokenizer.token_bytes
        assert (text + detokenizer.flush()).encode() == joined, cut


def test_a_leading_space_is_kept_in_context_and_stripped_at_the_start_of_a_text() -> None:
    tokenizer = sample_tokenizers.byte_fallback()
    vocabulary = TokenVocabulary(tokenizer)
    hello, bos = tokenizer.convert_tokens_to_ids("▁Hello"), tokenizer.bos_token_id
    assert "".join(chunks(vocabulary, [hello], [hello], skip=True)) == " Hello"
    assert "".join(chunks(vocabulary, [bos], [hello, hello], skip=True)) == "Hello Hello"
    assert "".join(chunks(vocabulary, [bos], [hello], skip=False)) == expected(tokenizer, [bos], [hello], skip=False)


def test_unknown_decoders_go_through_a_window() -> None:
    tokenizer = sample_tokenizers.metaspace()
    vocabulary = TokenVocabulary(tokenizer)
    assert vocabulary.kind == "window"
    rng = random.Random(3)
    for _ in range(200):
        ids = [rng.randrange(1, len(tokenizer)) for _ in range(30)]
        cut = rng.randrange(1, 30)
        got = "".join(chunks(vocabulary, ids[:cut], ids[cut:], skip=True))
        assert got == expected(tokenizer, ids[:cut], ids[cut:], skip=True)


def test_a_decoder_that_is_only_nearly_known_is_not_taken_for_it() -> None:
    """A rule more than the fast path follows means the window."""
    from tokenizers import decoders

    tokenizer = sample_tokenizers.byte_fallback.__wrapped__()
    steps = json.loads(tokenizer.backend_tokenizer.decoder.__getstate__())["decoders"]
    assert [step["type"] for step in steps] == ["Replace", "ByteFallback", "Fuse", "Strip"]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    )
    assert TokenVocabulary(tokenizer).kind == "window"


def test_smollm2_random_tokens(smollm2_tokenizer: Any) -> None:
    """The default model's whole vocabulary, against its own decode."""
    vocabulary = TokenVocabulary(smollm2_tokenizer)
    assert vocabulary.kind == "byte_level"
    rng = random.Random(11)
    for _ in range(300):
        ids = [rng.randrange(len(smollm2_tokenizer)) for _ in range(200)]
        cut = rng.randrange(200)
        got = "".join(chunks(vocabulary, ids[:cut], ids[cut:], skip=True))
        assert got == expected(smollm2_tokenizer, ids[:cut], ids[cut:], skip=True)


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_path: Path) -> Any:
    from pyengine.loader.checkpoint import open_checkpoint
    from pyengine.loader.tokenizer import load_tokenizer

    return load_tokenizer(open_checkpoint(str(smollm2_path)))
