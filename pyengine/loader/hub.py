"""Fetches a model from the Hugging Face hub, or from whatever `HF_ENDPOINT` names, into the hub's own cache."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pyengine.errors import ModelLoadError
from pyengine.loader.quantization_config import OLD_FILES

TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "config.json",
)
#: What a served model needs; other formats of the same weights are not downloaded.
MODEL_PATTERNS = (
    *TOKENIZER_PATTERNS,
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    *OLD_FILES,
)
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_GGUF_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)/([\w./-]+\.gguf)")


def is_hub_id(model: str) -> bool:
    """Whether `model` can be a hub id: `name`, `owner/name` or `owner/name/file.gguf`."""
    if _GGUF_ID.fullmatch(model):
        return True
    return _REPO_ID.fullmatch(model) is not None and not model.endswith((".gguf", ".safetensors"))


def download(model: str, revision: str | None, download_dir: str | None, patterns: Sequence[str] = MODEL_PATTERNS) -> Path:
    """The local folder (or GGUF file) of a hub id, downloaded if need be.

    Args:
        model: `owner/name`, or `owner/name/file.gguf` for one file.
        revision: branch, tag or commit; the default branch by default.
        download_dir: the cache; Hugging Face's own by default.
        patterns: which files of a repository.

    Raises:
        ModelLoadError: one line, where the model is unknown, not accessible or cannot be downloaded.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"model {model!r} on the hub"
    try:
        if match := _GGUF_ID.fullmatch(model):
            return Path(hf_hub_download(match[1], match[2], revision=revision, cache_dir=download_dir))
        return Path(snapshot_download(model, revision=revision, cache_dir=download_dir, allow_patterns=list(patterns)))
    except GatedRepoError as error:
        raise ModelLoadError(f"{where}: access is restricted; accept its terms and log in with `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(f"{where}: no such local path, and no such repository (or it is private)") from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"{where}: there is no revision {revision!r}") from error
    except LocalEntryNotFoundError as error:  # offline, or the endpoint cannot be reached
        reason = f"no such local path, not in the hub's cache, and the hub cannot be asked: {_first_line(error)}"
        raise ModelLoadError(f"{where}: {reason}") from error
    except EntryNotFoundError as error:
        raise ModelLoadError(f"{where}: there is no such file in the repository") from error
    except HFValidationError as error:
        raise ModelLoadError(f"{where}: {_first_line(error)}") from error
    except Exception as error:  # HTTP statuses, connections that break, the disk: the HTTP library's own types among them
        raise ModelLoadError(f"{where}: the download failed: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
