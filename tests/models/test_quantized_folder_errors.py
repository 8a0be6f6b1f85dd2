"""Quantised Hugging Face folders that cannot be loaded: one line that names the file, and the key or tensor."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantized_folders import FORMATS, WEIGHTS, write_quantized
from safetensors.torch import load_file, save_file
from tiny_models import edit_config, make_model
from torch import Tensor

from pyengine.config import LoadConfig
from pyengine.errors import ModelLoadError
from pyengine.loader.checkpoint import open_checkpoint
from pyengine.loader.quantization_config import read_quantization_config
from pyengine.loader.weights import load_model
from pyengine.ops import get_ops

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PROJ = "model.layers.0.mlp.gate_proj"
INTS = torch.int32


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder in each format, with one layer."""
    folder = tmp_path_factory.mktemp("folders")
    source = make_model(folder / "source", with_tokenizer=False, intermediate_size=192, num_hidden_layers=1)
    for name, form in FORMATS.items():
        write_quantized(source, form, folder / name, folder / f"{name}-plain")
    return {name: folder / name for name in FORMATS}


def copy_of(folder: Path, target: Path) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def load(folder: Path, device: Any = "cpu", scheme: str | None = "") -> None:
    """scheme: of the weights; "": the folder's; None: dequantised."""
    checkpoint = open_checkpoint(str(folder))
    scheme = checkpoint.arch.quantization if scheme == "" else scheme
    config = LoadConfig(device=device, dtype="float32", quantization=scheme, num_threads=1)
    load_model(checkpoint, config, get_ops(device))


def assert_refused(folder: Path, words: str) -> None:
    """Within one line; `words` is where the message starts, after the file."""
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    assert re.fullmatch(rf"{re.escape(str(folder))}\S*: {re.escape(words)}.*", str(caught.value)), str(caught.value)


Q = "quantization_config."
GROUP = f"{Q}config_groups.group_0."
#: Format, what is changed in its quantization_config (the path of a key, and its value), message.
CONFIG_CASES: list[tuple[str, str, Any, str]] = [
    (
        "gptq",
        "quant_method",
        "bitsandbytes",
        f"{Q}quant_method is 'bitsandbytes', which is not supported; supported: gptq, awq,",
    ),
    ("gptq", "quant_method", None, f"{Q}quant_method is missing"),
    ("gptq", "bits", 8, f"{Q}bits is 8, which is not supported; supported: 4"),
    ("gptq", "bits", "4", f"{Q}bits is '4'"),
    ("gptq", "group_size", 16, f"{Q}group_size is 16, which is not supported; supported: -1 and multiples of 32"),
    ("gptq", "group_size", None, f"{Q}group_size is None"),
    ("gptq", "desc_act", "yes", f"{Q}desc_act is 'yes', which is not supported; supported: true, false"),
    ("gptq", "checkpoint_format", "marlin", f"{Q}checkpoint_format is 'marlin'"),
    ("gptq", "is_marlin_format", True, f"{Q}is_marlin_format is True"),
    ("gptq", "dynamic", {"-:.*": {}}, f"{Q}dynamic is "),
    ("gptq", "modules_in_block_to_quantize", "q_proj", f"{Q}modules_in_block_to_quantize is 'q_proj', not a list"),
    ("awq", "bits", 3, f"{Q}bits is 3"),
    ("awq", "version", "gemv", f"{Q}version is 'gemv', which is not supported; supported: gemm"),
    ("awq", "zero_point", False, f"{Q}zero_point is False"),
    ("awq", "modules_to_not_convert", "lm_head", f"{Q}modules_to_not_convert is 'lm_head', not a list of names"),
    ("awq", "modules_to_not_convert", ["re:("], f"{Q}modules_to_not_convert has 're:(', which is no regular expression"),
    ("fp8", "activation_scheme", "block", f"{Q}activation_scheme is 'block'"),
    ("fp8", "weight_block_size", [128, 128], f"{Q}weight_block_size is [128, 128], which is not supported"),
    ("fp8", "kv_cache_scheme", {"num_bits": 8}, f"{Q}kv_cache_scheme is "),
    ("packed", "format", "marlin-24", f"{Q}format is 'marlin-24', which is not supported; supported: float-quantized,"),
    ("packed", "ignore", {}, f"{Q}ignore is {{}}, not a list"),
    ("packed", "config_groups", None, f"{Q}config_groups is missing"),
    ("packed", "config_groups", {}, f"{Q}config_groups has 0 groups"),
    ("packed", "config_groups.group_0.targets", ["re:.*mlp.*"], f"{GROUP}targets is ['re:.*mlp.*']"),
    ("packed", "config_groups.group_0.weights", [], f"{GROUP}weights is [], not an object"),
    ("packed", "config_groups.group_0.weights.num_bits", 8, f"{GROUP}weights.num_bits is 8"),
    ("packed", "config_groups.group_0.weights.group_size", 100, f"{GROUP}weights.group_size is 100"),
    ("packed", "config_groups.group_0.weights.strategy", "tensor_group", f"{GROUP}weights.strategy is 'tensor_group'"),
    ("packed", "config_groups.group_0.input_activations", {"num_bits": 8}, f"{GROUP}input_activations is "),
    ("packed", "sparsity_config", {"format": "sparse-24-bitmask"}, f"{Q}sparsity_config.format is 'sparse-24-bitmask'"),
    ("packed", "transform_config", {"u": 1}, f"{Q}transform_config is "),
    ("int8", "config_groups.group_0.input_activations", None, f"{GROUP}input_activations is missing"),
    ("int8", "config_groups.group_0.input_activations.dynamic", False, f"{GROUP}input_activations.dynamic is False"),
    ("int8", "config_groups.group_0.weights.symmetric", False, f"{GROUP}weights.symmetric is False"),
    ("int8", "config_groups.group_0.weights.strategy", "group", f"{GROUP}weights.strategy is 'group'"),
    ("fp8-channel", "config_groups.group_0.weights.strategy", "block", f"{GROUP}weights.strategy is 'block'"),
    ("fp8-channel", "config_groups.group_0.weights.num_bits", 4, f"{GROUP}weights.num_bits is 4"),
    ("fp8-channel", "config_groups.group_0.input_activations.type", "int", f"{GROUP}input_activations.type is 'int'"),
    ("fp8-channel", "config_groups.group_0.output_activations", {"num_bits": 8}, f"{GROUP}output_activations is "),
]


@pytest.mark.parametrize(("name", "key", "value", "message"), CONFIG_CASES, ids=[f"{n}-{k}" for n, k, _, _ in CONFIG_CASES])
def test_configuration(name: str, key: str, value: Any, message: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copy_of(folders[name], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    *sections, last = ["quantization_config", *key.split(".")]
    target = config
    for section in sections:
        target = target[section]
    target[last] = value
    (folder / "config.json").write_text(json.dumps(config))
    assert_refused(folder, message)


def test_a_configuration_that_is_no_object(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copy_of(folders["gptq"], tmp_path / "model")
    edit_config(folder, quantization_config="gptq")
    assert_refused(folder, "quantization_config is 'gptq', not an object")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.text("gptqre:(*.", max_size=6) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["group_0", "weights", "0"]), inner, max_size=2)
    ),
    max_leaves=4,
)


def paths(section: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Of every value in it."""
    found = []
    for key, value in section.items():
        found.append((*prefix, key))
        if isinstance(value, dict):
            found += paths(value, (*prefix, key))
    return found


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_configuration_loads_or_is_refused(folders: dict[str, Path], tmp_path: Path, data: st.DataObject) -> None:
    """Values of any kind in place of any other."""
    name = data.draw(st.sampled_from(sorted(FORMATS)))
    original = json.loads((folders[name] / "config.json").read_text())["quantization_config"]
    more = {"dynamic": None, "kv_cache_scheme": None, "sparsity_config": None, "modules_to_not_convert": None}
    config: Any = copy.deepcopy(more | original)
    *sections, last = data.draw(st.sampled_from(paths(config)))
    target = config
    for section in sections:
        target = target[section]
    target[last] = data.draw(JSON)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    message = ""
    try:
        read = read_quantization_config(tmp_path)
        assert read is not None
        read.excludes("model.layers.0.mlp.up_proj")
    except ModelLoadError as error:
        message = str(error)
    assert not message or re.fullmatch(rf"{re.escape(str(tmp_path / 'config.json'))}: .+", message)


Change = Callable[[dict[str, Tensor]], Any]


def put(part: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({f"{PROJ}.{part}": tensor})


def drop(*parts: str) -> Change:
    return lambda tensors: [tensors.pop(f"{PROJ}.{part}") for part in parts]


def edit(part: str, change: Callable[[Tensor], Any]) -> Change:
    return lambda tensors: change(tensors[f"{PROJ}.{part}"])


#: gate_proj is [192, 64]. @ stands for its name.
TENSOR_CASES: dict[str, tuple[str, Change, str]] = {
    "no qweight": ("gptq", drop("qweight"), f"@qweight is missing, though {PROJ} is quantised"),
    "no scales": ("gptq", drop("scales"), "@scales is missing, though"),
    "no zeros": ("awq", drop("qzeros"), "@qzeros is missing"),
    "no order": ("gptq-act-order", drop("g_idx"), "@g_idx is missing"),
    "no packed order": ("packed-act-order", drop("weight_g_idx"), "@weight_g_idx is missing"),
    "no packed zeros": ("packed-zeros", drop("weight_zero_point"), "@weight_zero_point is missing"),
    "no fp8 scale": ("fp8", drop("weight_scale"), "@weight_scale is missing"),
    "nothing": ("awq", drop("qweight", "scales", "qzeros"), "@weight is missing"),
    "a matrix of another size": (
        "gptq",
        lambda tensors: tensors.update(
            {
                f"{PROJ}.{part}": tensors[f"{PROJ}.{part}"][..., :n].clone()
                for part, n in (("qweight", 64), ("scales", 64), ("qzeros", 8))
            }
        ),
        "@qweight is of a matrix [64, 64], not [192, 64]",
    ),
    "scales of another size": ("gptq", put("scales", torch.ones(2, 191).half()), "@scales has shape [2, 191], not [2, 192]"),
    "zeros of another size": ("awq", put("qzeros", torch.ones(2, 24, dtype=INTS)), "@qzeros has shape [2, 24], not [1, 24]"),
    "an order of another size": ("gptq", put("g_idx", torch.ones(65, dtype=INTS)), "@g_idx has shape [65], not [64]"),
    "not a matrix": ("gptq", put("qweight", torch.ones(8, dtype=INTS)), "@qweight has shape [8], which is not a matrix"),
    "nothing in it": (
        "packed-rows",
        put("weight_packed", torch.ones(192, 0, dtype=INTS)),
        "@weight_packed has shape [192, 0], which is not a matrix",
    ),
    "other columns": ("awq", put("qweight", torch.ones(72, 24, dtype=INTS)), "@qweight is of 192 rows of 72 values; "),
    "fp8 columns": (
        "fp8",
        put("weight", torch.ones(192, 60).to(torch.float8_e4m3fn)),
        "@weight has shape [192, 60]; kernels take multiples of [8, 16]",
    ),
    "fp8 scales": ("fp8-channel", put("weight_scale", torch.ones(191, 1)), "@weight_scale has shape [191, 1], not [192, 1]"),
    "another type": ("gptq", put("qweight", torch.ones(8, 192)), "@qweight has type F32; in a gptq matrix it is I32"),
    "int8 for fp8": (
        "fp8",
        put("weight", torch.ones(192, 64, dtype=torch.int8)),
        "@weight has type I8; in a fp8 matrix it is F8_E4M3",
    ),
    "scales of integers": ("awq", put("scales", torch.ones(1, 192, dtype=INTS)), "@scales has type I32"),
    "groups of unequal size": (
        "gptq",
        put("g_idx", torch.zeros(64, dtype=INTS)),
        "@g_idx does not give each group 32 features",
    ),
    "groups that are not": ("gptq", put("g_idx", torch.full((64,), -7, dtype=INTS)), "@g_idx does not give each"),
    "scales of NaN": ("gptq", edit("scales", lambda x: x[1, 5].fill_(torch.nan)), "@scales holds NaN or an infinity"),
    "codes of NaN": ("fp8", edit("weight", lambda x: x.view(torch.uint8)[3, 4].fill_(0xFF)), "@weight holds NaN"),
    "scales too small": ("int8", edit("weight_scale", lambda x: x.mul_(1e-9)), "@weight has scales that fp16 cannot hold"),
    "plain": (
        "awq",
        lambda tensors: [drop("qweight", "scales", "qzeros")(tensors), put("weight", torch.ones(192, 64))(tensors)],
        f"@weight is plain (F32), but modules_to_not_convert does not except {PROJ} from awq",
    ),
    "plain fp8": ("fp8-channel", put("weight", torch.ones(192, 64)), "@weight has type F32; in a compressed-tensors"),
    "unknown": ("gptq", put("zp", torch.ones(3)), "@zp does not belong to LlamaForCausalLM"),
    "unknown type": ("gptq", put("zp", torch.ones(3, dtype=torch.uint8)), "@zp has type U8, which is not supported"),
    "embeddings": (
        "int8",
        lambda tensors: tensors.update(
            {
                "model.embed_tokens.weight": torch.ones(512, 64, dtype=torch.int8),
                "model.embed_tokens.weight_scale": torch.ones(512, 1),
            }
        ),
        "tensor model.embed_tokens.weight is quantised, which is not supported of embeddings",
    ),
}


@pytest.mark.parametrize("case", TENSOR_CASES)
def test_tensors(case: str, folders: dict[str, Path], tmp_path: Path) -> None:
    name, change, message = TENSOR_CASES[case]
    folder = copy_of(folders[name], tmp_path / "model")
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    assert_refused(folder, message.replace("@", f"tensor {PROJ}."))


def test_a_module_that_is_quantised_against_the_configuration(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copy_of(folders["packed"], tmp_path / "model")
    config = FORMATS["packed"].config
    edit_config(folder, quantization_config=config | {"ignore": ["re:.*gate_proj"]})
    assert_refused(folder, f"tensor {PROJ}.weight_packed is quantised, though ignore says that {PROJ} is plain")


def test_rows_that_are_no_blocks(tmp_path: Path) -> None:
    """80 features: a GPU takes them, a CPU only dequantised."""
    source = make_model(tmp_path / "source", with_tokenizer=False, hidden_size=80, intermediate_size=96, num_hidden_layers=1)
    write_quantized(source, FORMATS["fp8"], tmp_path / "model", tmp_path / "plain")
    words = "has rows of 80 values, but on cpu they must be multiples of 32; quantization=none dequantises them"
    with pytest.raises(ModelLoadError, match=words):
        load(tmp_path / "model")
    load(tmp_path / "model", scheme=None)
    load(tmp_path / "model", "emulated")
