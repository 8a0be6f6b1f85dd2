"""Hub ids, against a loopback server that `HF_ENDPOINT` names. In a fresh process, as that is where the variable is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_files import write_gguf
from hub_server import hub_server
from quantized_folders import FORMATS, write_quantized
from tiny_models import edit_config, make_model

from pyengine.loader.checkpoint import open_checkpoint

CODE = """
import json, sys
from pyengine.errors import ModelLoadError
from pyengine.loader.checkpoint import open_checkpoint
from pyengine.loader.tokenizer import load_tokenizer
answers = []
for model, revision in json.loads(sys.argv[1]):
    try:
        checkpoint = open_checkpoint(model, revision=revision, download_dir=sys.argv[2])
        ids = load_tokenizer(checkpoint)("hello").input_ids
        sums = sum(float(tensor.double().sum()) for _, tensor in checkpoint.tensors())
        answers.append([checkpoint.name, checkpoint.format, ids, sums])
    except ModelLoadError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""


def opened_in_a_fresh_process(endpoint: str, models: list[tuple[str, str | None]], folder: Path) -> list[object]:
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "home"), "XDG_CACHE_HOME": str(folder / "cache")}
    run = [sys.executable, "-c", CODE, json.dumps(models), str(folder / "downloads")]
    result = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_hub_ids(tiny_llama: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    for file in tiny_llama.iterdir():
        (repository / file.name).write_bytes(file.read_bytes())
    (repository / "pytorch_model.bin").write_bytes(b"the same weights once more")
    (repository / "consolidated.safetensors").write_bytes(b"and again")
    write_gguf(repository / "tiny.gguf", tiny_llama)
    models = [
        ("tiny/llama", None),
        ("tiny/llama", "v1"),
        ("tiny/llama/tiny.gguf", None),
        ("tiny/llama", "v9"),
        ("tiny/unknown", None),
        ("tiny/gated", None),
        ("tiny/broken", None),
        ("tiny/llama/other.gguf", None),
    ]
    with hub_server({"tiny/llama": repository}, gated="tiny/gated", broken="tiny/broken") as server:
        answers = opened_in_a_fresh_process(server.endpoint, models, tmp_path)
        downloads = server.downloads
    folder, tagged, gguf, *errors = answers
    assert folder[:2] == ["tiny/llama", "safetensors"]
    assert tagged == folder
    assert gguf[:2] == ["tiny/llama/tiny.gguf", "gguf"]
    assert gguf[2] == folder[2]
    assert gguf[3] == pytest.approx(folder[3])
    needed = [file.name for file in tiny_llama.iterdir()]
    assert "model.safetensors" in needed
    assert sorted(downloads) == sorted([*needed, "tiny.gguf"])  # each once, and nothing that is not needed
    expected = [
        "model 'tiny/llama' on the hub: there is no revision 'v9'",
        "model 'tiny/unknown' on the hub: no such local path, and no such repository (or it is private)",
        "model 'tiny/gated' on the hub: access is restricted; accept its terms and log in with `hf auth login`",
        "model 'tiny/broken' on the hub: no such local path, not in the hub's cache, and the hub cannot be asked: ",
        "model 'tiny/llama/other.gguf' on the hub: there is no such file in the repository",
    ]
    for error, text in zip(errors, expected, strict=True):
        assert isinstance(error, str)
        assert error.startswith(text)
        assert "\n" not in error

    # The server is gone: what was downloaded still opens, and what was not says why not.
    answers = opened_in_a_fresh_process(server.endpoint, [("tiny/llama", None), ("tiny/new", None)], tmp_path)
    assert answers[0] == folder
    assert "cannot be asked" in str(answers[1])


def test_hub_ids_of_older_quantised_models(tmp_path: Path) -> None:
    """Whose configuration is in a file of its own, which must be downloaded, too."""
    plain = make_model(tmp_path / "plain", intermediate_size=192)  # a multiple of the group sizes
    repositories = {}
    for method, file in (("gptq", "quantize_config.json"), ("awq", "quant_config.json")):
        folder = repositories[f"tiny/{method}"] = tmp_path / method
        write_quantized(plain, FORMATS[method], folder, tmp_path / f"plain-{method}")
        edit_config(folder, quantization_config=None)
        (folder / file).write_text(json.dumps(FORMATS[method].config))
    with hub_server(repositories) as server:
        answers = opened_in_a_fresh_process(server.endpoint, [(name, None) for name in repositories], tmp_path)
    for (name, folder), answer in zip(repositories.items(), answers, strict=True):
        assert isinstance(answer, list), answer
        assert answer[:2] == [name, "safetensors"]
        assert answer[3] == sum(float(tensor.double().sum()) for _, tensor in open_checkpoint(str(folder)).tensors())
