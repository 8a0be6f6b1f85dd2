"""Tokenizers from folders and GGUF files, the cache of converted ones, chat templates."""

from __future__ import annotations

import logging
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_files import tokenizer_metadata, write_gguf
from tiny_models import BOS_ID, EOS_ID, IM_END_ID, IM_START_ID, make_model
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from pyengine.errors import ModelLoadError
from pyengine.loader import tokenizer as tokenizer_module
from pyengine.loader.checkpoint import open_checkpoint
from pyengine.loader.tokenizer import load_tokenizer

TEXTS = [
    "The capital of France is",
    "  two  spaces,\n\nand 2048 lines\t\ttabbed",
    "def f(x):\n    return x + 1\n",
    "naïve café — 你好世界 🙂🚀 é\u0301",
    "I'LL say it's DON'T ...!?",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
]
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pyengine" / "tokenizers"


@pytest.fixture(scope="module")
def tiny_gguf(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_llama)


def with_metadata(tiny_llama: Path, path: Path, **changes: Any) -> Path:
    metadata = {"tokenizer.ggml." + key: value for key, value in changes.items()}
    return write_gguf(path, tiny_llama, metadata=metadata)


def test_folder_gives_transformers_tokens(tiny_llama: Path) -> None:
    ours = load_tokenizer(open_checkpoint(str(tiny_llama)))
    theirs = AutoTokenizer.from_pretrained(tiny_llama)
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids
    assert ours.apply_chat_template(CHAT, tokenize=False) == theirs.apply_chat_template(CHAT, tokenize=False)


def test_folder_with_a_class_of_its_own_goes_through_auto_tokenizer(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("TokenizersBackend", "GPT2Tokenizer"))
    ours = load_tokenizer(open_checkpoint(str(folder)))
    assert type(ours) is type(AutoTokenizer.from_pretrained(folder))
    assert ours("hello").input_ids == AutoTokenizer.from_pretrained(folder)("hello").input_ids


def test_gguf_gives_the_folders_tokens(tiny_llama: Path, tiny_gguf: Path) -> None:
    ours = load_tokenizer(open_checkpoint(str(tiny_gguf)))
    theirs = AutoTokenizer.from_pretrained(tiny_llama)
    for text in TEXTS:
        ids = theirs(text).input_ids
        assert ours(text).input_ids == ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.apply_chat_template(CHAT, tokenize=False) == theirs.apply_chat_template(CHAT, tokenize=False)
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (BOS_ID, EOS_ID, EOS_ID)
    assert ours.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [IM_START_ID, IM_END_ID]


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken"])
def test_words_are_cut_as_transformers_cuts_them(pre: str, tiny_llama: Path, tmp_path: Path) -> None:
    path = with_metadata(tiny_llama, tmp_path / "model.gguf", pre=pre)
    ours = load_tokenizer(open_checkpoint(str(path)))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    cut, expected = ours.backend_tokenizer.pre_tokenizer, theirs.backend_tokenizer.pre_tokenizer
    for text in TEXTS:
        assert cut.pre_tokenize_str(text) == expected.pre_tokenize_str(text)


def test_smollm_cuts_digits_apart(smollm2_path: Path) -> None:
    """As SmolLM2's own tokenizer.json does: without it, line breaks before a number would be cut otherwise."""
    tokenizer = load_tokenizer(open_checkpoint(None))
    cut = tokenizer.backend_tokenizer.pre_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    reference = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    for text in [*TEXTS, "a\n\n1. b  22"]:
        assert cut.pre_tokenize_str(text) == reference.pre_tokenize_str(text)
    two_breaks = tokenizer.convert_tokens_to_ids("ĊĊ")
    assert two_breaks in tokenizer("a\n\n1. b").input_ids
    assert tokenizer.decode(tokenizer("a\n\n1. b  22").input_ids) == "a\n\n1. b  22"
    assert tokenizer.eos_token == "<|im_end|>"
    assert "<|im_start|>user\nhi<|im_end|>" in tokenizer.apply_chat_template(CHAT, tokenize=False)


@pytest.mark.parametrize(
    ("changes", "ids"),
    [
        ({"add_bos_token": False}, []),
        ({"add_bos_token": None}, []),  # byte-level BPE adds none unless the file says so
        ({"add_bos_token": None, "pre": "llama-bpe"}, [BOS_ID]),  # Llama 3 does
        ({"add_bos_token": True, "add_eos_token": True}, [BOS_ID, EOS_ID]),
    ],
)
def test_bos_and_eos(changes: dict[str, Any], ids: list[int], tiny_llama: Path, tmp_path: Path) -> None:
    path = with_metadata(tiny_llama, tmp_path / "model.gguf", **changes)
    assert load_tokenizer(open_checkpoint(str(path)))("").input_ids == ids


def sentencepiece_metadata() -> dict[str, Any]:
    """A vocabulary as SentencePiece makes it: specials, bytes, pieces with scores."""
    pieces = [
        "▁",
        *"abcdehilnorstuw.,",
        "▁t",
        "he",
        "▁the",
        "in",
        "er",
        "▁a",
        "on",
        "▁w",
        "or",
        "ld",
        "▁wor",
        "▁world",
        "ll",
        "hello",
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = gguf.TokenType
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256, *[kinds.NORMAL] * len(pieces)]
    return {
        "model": "llama",
        "pre": None,
        "merges": None,
        "tokens": tokens,
        "token_type": [int(kind) for kind in types],
        "scores": [0.0] * 259 + [float(-i) for i in range(len(pieces))],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "eot_token_id": None,
        "padding_token_id": None,
        "unknown_token_id": 0,
        "add_bos_token": None,
    }


def test_sentencepiece_gives_transformers_tokens(tiny_llama: Path, tmp_path: Path) -> None:
    path = with_metadata(tiny_llama, tmp_path / "model.gguf", **sentencepiece_metadata())
    ours = load_tokenizer(open_checkpoint(str(path)))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in ["hello world", "the world, in other words.", "a 🙂 in\nthe\tworld", "ééé", "hello  there"]:
        ids = ours(text).input_ids
        assert ids == theirs(text).input_ids
        assert ids[0] == 1
        assert ours.decode(ids, skip_special_tokens=True) == text


# The cache.


def test_second_start_reads_the_cache(tiny_gguf: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_tokenizer(open_checkpoint(str(tiny_gguf)))
    entries = list(cache_home.iterdir())
    assert len(entries) == 1
    monkeypatch.setattr(tokenizer_module, "build_tokenizer", lambda file: pytest.fail("built again"))
    second = load_tokenizer(open_checkpoint(str(tiny_gguf)))
    assert list(cache_home.iterdir()) == entries
    for text in TEXTS:
        assert second(text).input_ids == first(text).input_ids
    assert second.chat_template == first.chat_template
    assert second.eos_token_id == first.eos_token_id


def test_cache_follows_content_not_names(tiny_llama: Path, tmp_path: Path, cache_home: Path) -> None:
    one = with_metadata(tiny_llama, tmp_path / "one.gguf")
    same = write_gguf(tmp_path / "same.gguf", tiny_llama, "Q8_0", metadata={"tokenizer.chat_template": "{{ 1 }}"})
    other = with_metadata(tiny_llama, tmp_path / "other.gguf", add_bos_token=False)
    for path, entries in ((one, 1), (same, 1), (other, 2)):
        tokenizer = load_tokenizer(open_checkpoint(str(path)))
        assert len(list(cache_home.iterdir())) == entries
        assert tokenizer("").input_ids == ([] if path == other else [BOS_ID])
    assert load_tokenizer(open_checkpoint(str(same))).chat_template == "{{ 1 }}"


def test_broken_cache_entry_is_replaced(tiny_gguf: Path, cache_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = load_tokenizer(open_checkpoint(str(tiny_gguf)))("hello").input_ids
    (entry,) = cache_home.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(whole[:1000])
    with caplog.at_level(logging.WARNING):
        assert load_tokenizer(open_checkpoint(str(tiny_gguf)))("hello").input_ids == expected
    assert str(entry) in caplog.text
    assert entry.read_bytes() == whole


def test_unwritable_cache_is_only_a_warning(tiny_gguf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(open_checkpoint(str(tiny_gguf)))
    assert "cannot be written" in caplog.text
    assert tokenizer.decode(tokenizer("hello").input_ids, skip_special_tokens=True) == "hello"


def test_starts_at_the_same_time_share_the_cache(tiny_gguf: Path, cache_home: Path) -> None:
    checkpoints = [open_checkpoint(str(tiny_gguf)) for _ in range(4)]
    with ThreadPoolExecutor(len(checkpoints)) as pool:
        ids = [tokenizer("hello world").input_ids for tokenizer in pool.map(load_tokenizer, checkpoints)]
    assert ids == [ids[0]] * len(checkpoints)
    (entry,) = cache_home.iterdir()  # one entry, no temporary files left
    assert entry.suffix == ".json"


def test_start_imports_no_model_registry(tiny_gguf: Path) -> None:
    """Transformers' models take seconds to import; a fresh process must not need them."""
    code = (
        "import sys\n"
        "from pyengine.loader.checkpoint import open_checkpoint\n"
        "from pyengine.loader.tokenizer import load_tokenizer\n"
        "load_tokenizer(open_checkpoint(sys.argv[1]))\n"
        "print([name for name in sys.modules if name.startswith(('transformers.models.', 'transformers.modeling'))])\n"
    )
    run = [sys.executable, "-c", code, str(tiny_gguf)]
    assert subprocess.run(run, capture_output=True, text=True, timeout=240, check=True).stdout == "[]\n"


# Chat templates, and a tokenizer from elsewhere.


def test_chat_template_from_text_and_file(tiny_llama: Path, tmp_path: Path) -> None:
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    (tmp_path / "chat.jinja").write_text(template)
    checkpoint = open_checkpoint(str(tiny_llama))
    for given in (template, str(tmp_path / "chat.jinja")):
        tokenizer = load_tokenizer(checkpoint, chat_template=given)
        assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "[hi]"


def test_chat_template_that_refuses_the_trial_chat(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    template = "{{ raise_exception('a system message must come first') }}"
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(open_checkpoint(str(tiny_llama)), chat_template=template)
    assert "a system message must come first" in caplog.text
    assert tokenizer.chat_template == template


def test_item_19_no_chat_template_is_a_warning(tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_llama, metadata={"tokenizer.chat_template": None})
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(open_checkpoint(str(path)))
    assert "has no chat template" in caplog.text
    assert not tokenizer.chat_template
    assert tokenizer("hello").input_ids


def test_tokenizer_from_elsewhere(tiny_llama: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    bare = make_model(tmp_path / "bare", with_tokenizer=False)
    checkpoint = open_checkpoint(str(bare))
    expected = AutoTokenizer.from_pretrained(tiny_llama)("hello").input_ids
    for source in (tiny_llama, tiny_gguf):
        assert load_tokenizer(checkpoint, tokenizer=str(source))("hello").input_ids == expected


def no_tokenizer(folder: Path, tiny_llama: Path) -> dict[str, Any]:
    return {"model": make_model(folder / "bare", with_tokenizer=False)}


def broken_tokenizer_json(folder: Path, tiny_llama: Path) -> dict[str, Any]:
    make_model(folder / "broken")
    (folder / "broken" / "tokenizer.json").write_text('{"version": "1.0"')
    return {"model": folder / "broken"}


def no_such_tokenizer(folder: Path, tiny_llama: Path) -> dict[str, Any]:
    return {"model": tiny_llama, "tokenizer": str(folder / "nothing" / "here")}


def weights_as_tokenizer(folder: Path, tiny_llama: Path) -> dict[str, Any]:
    return {"model": tiny_llama, "tokenizer": str(tiny_llama / "model.safetensors")}


def template_syntax(folder: Path, tiny_llama: Path) -> dict[str, Any]:
    return {"model": tiny_llama, "chat_template": "{% for message in messages %}"}


def no_template_file(folder: Path, tiny_llama: Path) -> dict[str, Any]:
    return {"model": tiny_llama, "chat_template": str(folder / "chat.jinja")}


def unknown_pre(folder: Path, tiny_llama: Path) -> dict[str, Any]:
    return {"model": with_metadata(tiny_llama, folder / "model.gguf", pre="klingon")}


def unknown_model(folder: Path, tiny_llama: Path) -> dict[str, Any]:
    return {"model": with_metadata(tiny_llama, folder / "model.gguf", model="rwkv")}


def no_tokens(folder: Path, tiny_llama: Path) -> dict[str, Any]:
    return {"model": with_metadata(tiny_llama, folder / "model.gguf", tokens=None, token_type=None)}


def merge_outside_vocabulary(folder: Path, tiny_llama: Path) -> dict[str, Any]:
    merges = tokenizer_metadata(tiny_llama)["tokenizer.ggml.merges"]
    return {"model": with_metadata(tiny_llama, folder / "model.gguf", merges=[*merges, "zzz qqq"])}


def end_outside_vocabulary(folder: Path, tiny_llama: Path) -> dict[str, Any]:
    return {"model": with_metadata(tiny_llama, folder / "model.gguf", eos_token_id=99999, add_eos_token=True)}


def beginning_outside_vocabulary(folder: Path, tiny_llama: Path) -> dict[str, Any]:
    return {"model": with_metadata(tiny_llama, folder / "model.gguf", bos_token_id=99999, add_bos_token=True)}


def one_token_type(folder: Path, tiny_llama: Path) -> dict[str, Any]:
    return {"model": with_metadata(tiny_llama, folder / "model.gguf", token_type=3)}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (no_tokenizer, ["bare", "no tokenizer.json", "--tokenizer"]),
        (broken_tokenizer_json, ["broken", "cannot be loaded"]),
        (no_such_tokenizer, ["nothing/here", "no such file or folder"]),
        (weights_as_tokenizer, ["model.safetensors", "neither a folder nor a .gguf file"]),
        (template_syntax, ["chat template, line 1"]),
        (no_template_file, ["chat.jinja", "No such file"]),
        (unknown_pre, ["model.gguf", "tokenizer.ggml.pre 'klingon'", "--tokenizer"]),
        (unknown_model, ["model.gguf", "tokenizer.ggml.model 'rwkv'"]),
        (no_tokens, ["model.gguf", "tokenizer.ggml.tokens is missing"]),
        (merge_outside_vocabulary, ["model.gguf", "zzz"]),
        (end_outside_vocabulary, ["model.gguf", "tokenizer.ggml.eos_token_id is 99999"]),
        (beginning_outside_vocabulary, ["model.gguf", "tokenizer.ggml.bos_token_id is 99999"]),
        (one_token_type, ["model.gguf", "tokenizer.ggml.token_type is not an array of numbers"]),
    ],
)
def test_item_17_one_line_names_what_is_wrong(case: Any, words: list[str], tiny_llama: Path, tmp_path: Path) -> None:
    arguments = case(tmp_path, tiny_llama)
    checkpoint = open_checkpoint(str(arguments.pop("model")))
    with pytest.raises(ModelLoadError) as caught:
        load_tokenizer(checkpoint, **arguments)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
