"""Loads a checkpoint's tokenizer, and keeps what was built from a GGUF file in a cache.

Merges of large vocabularies take a while to work out; an entry is read back as it is. The cache is keyed by the vocabulary's
content, so it is never stale, and each entry is one file that appears whole, so any number of processes may share it.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyengine.errors import ModelLoadError
from pyengine.loader.base import Checkpoint
from pyengine.loader.gguf_checkpoint import GGUFCheckpoint
from pyengine.loader.gguf_file import GGUFFile
from pyengine.loader.gguf_tokenizer import TOKENIZER_KEYS, build_tokenizer
from pyengine.loader.hf_config import read_json
from pyengine.loader.hub import TOKENIZER_PATTERNS, download, is_hub_id

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

#: Counted up when `build_tokenizer` builds something else from the same metadata.
_CACHE_VERSION = 1
#: Classes that are nothing but tokenizer.json: read without Transformers' model registry, which is slow to import.
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def load_tokenizer(
    checkpoint: Checkpoint,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    *,
    download_dir: str | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint. A model without a chat template gets a logged warning.

    Args:
        checkpoint: an open checkpoint.
        tokenizer: a Hugging Face folder, GGUF file or hub id to take instead of the checkpoint's own.
        chat_template: a Jinja file or text to take instead of the tokenizer's own.
        download_dir: the hub's cache, where `tokenizer` is a hub id; Hugging Face's own by default.

    Raises:
        ModelLoadError: naming the file that is missing, broken or not supported.
    """
    if tokenizer is None:
        result = _from_gguf(checkpoint.file) if isinstance(checkpoint, GGUFCheckpoint) else _from_folder(checkpoint.path)
    else:
        result = _from_path(_locate(tokenizer, download_dir))
    if chat_template is not None:
        _set_chat_template(result, chat_template)
    if not result.chat_template:
        logger.warning("%s has no chat template: chat requests will be refused unless they bring one", checkpoint.name)
    return result


def _locate(tokenizer: str, download_dir: str | None) -> Path:
    path = Path(tokenizer).expanduser()
    if path.exists():
        return path
    if is_hub_id(tokenizer):
        return download(tokenizer, None, download_dir, TOKENIZER_PATTERNS)
    raise ModelLoadError(f"tokenizer {tokenizer}: no such file or folder, and not a hub id")


def _from_path(path: Path) -> PreTrainedTokenizerBase:
    if path.is_dir():
        return _from_folder(path)
    if path.suffix == ".gguf":
        return _from_gguf(GGUFFile(path))
    raise ModelLoadError(f"tokenizer {path}: neither a folder nor a .gguf file")


def _from_folder(folder: Path) -> PreTrainedTokenizerBase:
    config_file = folder / "tokenizer_config.json"
    config = read_json(config_file) if config_file.exists() else {}
    plain = config.get("tokenizer_class") in _PLAIN_CLASSES and "auto_map" not in config
    has_vocabulary = any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    if not has_vocabulary:
        raise ModelLoadError(f"{folder}: no tokenizer.json, tokenizer.model or vocab.json; name a tokenizer with --tokenizer")
    loader = _fast_class() if plain and (folder / "tokenizer.json").exists() else _auto_class()
    try:
        result: PreTrainedTokenizerBase = loader.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # tokenizers and Transformers raise whatever they meet, plain Exceptions too
        raise ModelLoadError(f"{folder}: its tokenizer cannot be loaded: {_first_line(error)}") from error
    return result


def _fast_class() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast


def _auto_class() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer


def _from_gguf(file: GGUFFile) -> PreTrainedTokenizerBase:
    entry = _cache_entry(file)
    if entry.exists():
        try:
            return _wrap(file, entry)
        except Exception as error:  # what tokenizers raises for a file that it cannot parse
            logger.warning("%s: the cached tokenizer is broken and will be built anew: %s", entry, error)
    text = build_tokenizer(file).to_str()
    try:
        _write_whole(entry, text)
        return _wrap(file, entry)
    except OSError as error:
        logger.warning("%s: cannot be written, so the tokenizer is built at every start: %s", entry, error.strerror)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(text, encoding="utf-8")
        return _wrap(file, path)


def _cache_entry(file: GGUFFile) -> Path:
    import tokenizers

    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    name = f"{file.fingerprint(TOKENIZER_KEYS)}-{_CACHE_VERSION}-{tokenizers.__version__}.json"
    return root / "pyengine" / "tokenizers" / name


def _write_whole(path: Path, text: str) -> None:
    """Write a file that others see either whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _wrap(file: GGUFFile, tokenizer_json: Path) -> PreTrainedTokenizerBase:
    """Transformers' tokenizer over a tokenizer.json, with what the GGUF says of special tokens and chats."""
    result: PreTrainedTokenizerBase = _fast_class()(
        tokenizer_file=str(tokenizer_json), name_or_path=str(file.path), clean_up_tokenization_spaces=False
    )
    for name, key in _NAMED_TOKENS.items():
        token_id = file.get(f"tokenizer.ggml.{key}")
        if token_id is not None:
            setattr(result, name, result.convert_ids_to_tokens(token_id))
    result.chat_template = file.get("tokenizer.chat_template")
    return result


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _set_chat_template(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> None:
    from jinja2.exceptions import TemplateSyntaxError

    if "{" not in chat_template:  # a template without any expression would be of no use: this is a path
        path = Path(chat_template).expanduser()
        try:
            chat_template = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ModelLoadError(f"chat template {path}: cannot be read: {error.strerror}") from error
    tokenizer.chat_template = chat_template
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ModelLoadError(f"chat template, line {error.lineno}: {error.message}") from error
    except Exception as error:  # it compiles, but may want a system message first, say
        logger.warning("the chat template fails on a chat of one user message: %s", _first_line(error))
