"""The served tokenizer as a ZIP archive, for gateways that tokenise themselves."""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from smg_grpc_proto.generated import common_pb2 as pb

from pyengine.config import EngineConfig
from pyengine.server.engine_client import EngineClient

CHUNK_BYTES = 64 * 1024
#: ZIP's earliest date: the same tokenizer has the same archive, so that a gateway can tell workers apart by its digest.
_DATE = (1980, 1, 1, 0, 0, 0)


def model_type(config: EngineConfig) -> str:
    """Hugging Face's `model_type`, after the architecture's name."""
    return config.model.arch.architecture.removesuffix("ForCausalLM").lower()


async def tokenizer_archive(engine: EngineClient) -> bytes:
    """The tokenizer's files as Transformers writes them, whatever it was loaded from, with the model's special ids."""
    with tempfile.TemporaryDirectory(prefix="pyengine-tokenizer-") as name:
        folder = Path(name)
        await engine.save_tokenizer(folder)
        arch = engine.config.model.arch
        ids = {"bos_token_id": arch.bos_token_id, "eos_token_id": list(arch.eos_token_ids)}
        limits = {"vocab_size": arch.vocab_size, "max_position_embeddings": arch.max_position_embeddings}
        config = {"architectures": [arch.architecture], "model_type": model_type(engine.config)} | ids | limits
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        (folder / "generation_config.json").write_text(json.dumps(ids, indent=1))
        return _zipped(folder)


def _zipped(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = zipfile.ZipInfo(str(path.relative_to(folder)), _DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes())
    return buffer.getvalue()


def chunks(archive: bytes) -> Iterator[pb.GetTokenizerChunk]:
    """The archive in pieces, its SHA-256 with the last one."""
    for start in range(0, len(archive), CHUNK_BYTES):
        is_last = start + CHUNK_BYTES >= len(archive)
        digest = hashlib.sha256(archive).hexdigest() if is_last else ""
        yield pb.GetTokenizerChunk(data=archive[start : start + CHUNK_BYTES], sha256=digest)
