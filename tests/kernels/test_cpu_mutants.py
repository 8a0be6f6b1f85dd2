"""A test of the tests: bugs planted in the CPU kernels must be caught by the kernel tests."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from native import ROOT
from planting import plant

from pyengine.ops import load_core

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

_TILE, _SOFTMAX = "csrc/attention/cpu/attention_tile.h", "csrc/attention/cpu/softmax.h"
_ROWS, _AMX_TILE = "csrc/attention/cpu/tile_rows.h", "csrc/attention/cpu/attention_tile_amx.h"
_SOFTMAX_ROWS, _FEW_PAGES = "csrc/attention/cpu/softmax_rows.h", "csrc/attention/cpu/few_rows.h"
_AMX_SOFTMAX, _FEW_ROWS = "csrc/attention/cpu/softmax_amx.h", "csrc/attention/cpu/bf16_rows.h"
_KEYS, _LAUNCH = "csrc/attention/cpu/key_block.h", "csrc/attention/cpu/paged_attention.cpp"
_RUNS = "csrc/attention/cpu/query_runs.h"
_LINEAR, _GEMM = "csrc/layers/cpu/linear.cpp", "csrc/cpu/gemm_tile.h"
_LINEAR_OUTPUT, _BF16_LINEAR = "csrc/layers/cpu/linear_output.h", "csrc/layers/cpu/bf16_linear_amx.h"
_PACKED_LINEAR = "csrc/layers/cpu/packed_linear_avx2.h"
_RESHAPE, _COPY = "csrc/cache/cpu/reshape_and_cache.cpp", "csrc/cache/cpu/copy_blocks.cpp"
_ACTIVATIONS, _W8A16 = "csrc/layers/cpu/activations.h", "csrc/quantization/cpu/w8a16_linear.cpp"
_W8A16_TILE, _W8A16_AMX = "csrc/quantization/cpu/w8a16_tile.h", "csrc/quantization/cpu/w8a16_tile_amx.h"
_W8A16_WEIGHT = "csrc/quantization/cpu/w8a16_weight.cpp"
_QUANTIZED, _QUANTIZED_AVX2 = "csrc/quantization/cpu/quantized_linear.cpp", "csrc/quantization/cpu/quantized_tile_avx2.h"
_QUANTIZED_TILE = "csrc/quantization/cpu/quantized_tile.h"
_QUANTIZED_ROWS, _FOUR_BLOCKS = "csrc/quantization/cpu/quantized_rows.h", "csrc/quantization/cpu/quantize_blocks_avx2.h"
_NORM, _ROTARY, _ACT = "csrc/layers/cpu/rms_norm.cpp", "csrc/layers/cpu/rotary.h", "csrc/layers/cpu/act_and_mul.cpp"


@dataclass(frozen=True)
class Mutant:
    """`old`, found once in `file`, becomes `new` in the kernels of `isa`; a test of test_`suite`.py must fail."""

    name: str
    file: str
    old: str
    new: str
    suite: str = "paged_attention"
    isa: str = "avx2"


MUTANTS = [
    Mutant("causal mask sees one key more", _ROWS, "last + 1 < in_use.end ?", "last + 2 < in_use.end ?"),
    Mutant("window one wider", _ROWS, "last - p_.sliding_window + 1", "last - p_.sliding_window"),
    Mutant("rows share keys that one does not see", _TILE, "end = keys.end < end ?", "end = keys.end > end ?"),
    Mutant(
        "keys before the common ones left out",
        _TILE,
        "{keys.begin, shared.begin < keys.end ? shared.begin : keys.end}",
        "{shared.begin, shared.begin}",
    ),
    Mutant(
        "keys that the last row alone sees",
        _TILE,
        "any.begin = keys.begin < any.begin ? keys.begin",
        "any.begin = true ? keys.begin",
    ),
    Mutant("keys of a page in its group's first columns", _KEYS, "group_size + column", "group_size"),
    Mutant(
        "odd columns taken for even ones",
        _FEW_PAGES,
        "_mm256_shuffle_ps(low, high, 0xdd)",
        "_mm256_shuffle_ps(low, high, 0x88)",
    ),
    Mutant("few rows see all of a page", _FEW_PAGES, "run_end < args.keys.end ? run_end : args.keys.end", "run_end"),
    Mutant("sums not rescaled", _SOFTMAX, "if (factor != 1.0f) scale_row(out_row, factor, ld);", "", isa="avx512"),
    Mutant("weighted sums not rescaled", _SOFTMAX_ROWS, "if (factor[r] != 1.0f) scale_row", "if (false) scale_row"),
    Mutant("sums of weights not rescaled", _SOFTMAX_ROWS, "state.sum[r] * factor[r] + sum", "state.sum[r] + sum"),
    Mutant("first keys of a window not masked", _SOFTMAX_ROWS, "{first, last}", "{last, last}"),
    Mutant(
        "later partition not rescaled", _SOFTMAX, "fma(load(b + j), fb, load(a + j) * fa)", "load(b + j) + load(a + j) * fa"
    ),
    Mutant("sink left out", _SOFTMAX, "sum = sum * factor + exp_scalar(*sink - new_max);", "sum = sum * factor;"),
    Mutant("ALiBi by the key's place in its block", _SOFTMAX, "index + set1(distance)", "index", isa="avx512"),
    Mutant("ALiBi by the key's place in its vector", _SOFTMAX_ROWS, "set1(distance + static_cast<float>(i))", "set1(distance)"),
    Mutant("soft-cap twice as hard", _SOFTMAX, "exp(x * set1(2.0f / cap))", "exp(x * set1(4.0f / cap))"),
    Mutant(
        "NaN in unwritten slots survives the mask",
        _SOFTMAX,
        "select_less(index, set1(end), x, hidden)",
        "x + select_less(index, set1(end), zero(), hidden)",
    ),
    Mutant("scale of the wrong token", _KEYS, "kv_head_ * head_stride + slot(position)]", "kv_head_ * head_stride]"),
    Mutant(
        "page table not followed",
        _KEYS,
        "table_[position >> p_.block_shift]",
        "table_[0] + (position >> p_.block_shift)",
    ),
    Mutant(
        "first partition of a window left out",
        _RUNS,
        "return run.begin / kPartition;",
        "return (run.begin + kPartition - 1) / kPartition;",
    ),
    Mutant(
        "a split partition merged twice",
        _LAUNCH,
        "for (int64_t i = num_parts > 0 ? 0 : 1; i < num_states",
        "for (int64_t i = 0; i < num_states",
    ),
    Mutant(
        "partitions of a split tile start elsewhere",
        _LAUNCH,
        "runner.run_partition(item.partition, state(",
        "runner.run_partition(item.partition + (item.state == 0), state(",
        "batch_invariance",
    ),
    Mutant(
        "rows of a tile not fused alike",
        _GEMM,
        "acc.v[r][j] = fma(x, columns[j], acc.v[r][j]);",
        "acc.v[r][j] = r > 0 ? x * columns[j] + acc.v[r][j] : fma(x, columns[j], acc.v[r][j]);",
        "batch_invariance",
    ),
    Mutant(
        "tokens of a shared prefix in the batch's order",
        _LAUNCH,
        "prefixes_.tokens + prefix.first_token",
        "prefixes_.tokens",
        "shared_prefix",
    ),
    Mutant(
        "another sequence's rows of a shared prefix",
        _LAUNCH,
        "const int first = part.first_token * prefix_shape_.group;",
        "const int first = 0;",
        "shared_prefix",
        "amx",
    ),
    Mutant("a shared prefix's later partitions left out", _LAUNCH, "i < parts.num_parts", "i < 1", "shared_prefix", "amx"),
    Mutant(
        "whole tiles of two lists in one item",
        _LAUNCH,
        "if (list != open || room <= 0)",
        "if (list->count == 0 || room <= 0)",
        "shared_prefix",
    ),
    Mutant("values that are not finite reach every row", _AMX_TILE, "if (not_finite == 0) continue;", "continue;", isa="amx"),
    Mutant(
        "rows that see a value that is not finite go on without it",
        _AMX_TILE,
        "if ((bad[step] & lanes) != 0) return true;",
        "if ((bad[step] & lanes) == 1) return true;",
        isa="amx",
    ),
    Mutant("last tile of rows as high as the first", _AMX_TILE, "if (count != configured)", "if (configured == 0)", isa="amx"),
    Mutant(
        "partly seen vector left out of the maximum",
        _AMX_SOFTMAX,
        "if (lanes != 0) b = max",
        "if (lanes > 1) b = max",
        isa="amx",
    ),
    Mutant(
        "keys before the window weighed", _AMX_SOFTMAX, "below(keys.end) & ~below(keys.begin)", "below(keys.end)", isa="amx"
    ),
    Mutant("weights cut, not rounded", _AMX_SOFTMAX, "_mm512_set1_epi32(0x8000)", "_mm512_set1_epi32(0)", isa="amx"),
    Mutant(
        "a step's second chain first",
        _FEW_ROWS,
        "add_one(second, a, k + kHalfStep, b_second, ldb, k);",
        "add_one(first, a, k + kHalfStep, b_second, ldb, k);",
        "batch_invariance",
        "amx",
    ),
    Mutant("subnormal numbers kept by fma", _FEW_ROWS, "before | 0x8040", "before", "batch_invariance", "amx"),
    Mutant("later depth blocks overwrite", _LINEAR, "ldc, k0 > 0,\n", "ldc, false,\n", "linear", "avx512"),
    Mutant("later depth blocks of packed rows overwrite", _PACKED_LINEAR, " k0 > 0,", " false,", "linear"),
    Mutant("steps of k with the first one's columns", _PACKED_LINEAR, "b + i * kPanel);", "b);", "linear"),
    Mutant("last values of k packed as one row's", _PACKED_LINEAR, "rows[r * stride + k]", "rows[k]", "linear"),
    Mutant("input packed without its stride", _PACKED_LINEAR, "row * p.input_stride, p", "row * p.in_features, p", "linear"),
    Mutant(
        "last row block of packed rows left out",
        _PACKED_LINEAR,
        "return int64_t{units_per_block} * num_blocks;",
        "return int64_t{units_per_block} * (num_blocks - (num_blocks > 1));",
        "linear",
    ),
    Mutant(
        "bias of the panel's first half",
        _LINEAR_OUTPUT,
        "load_partial(bias + column + j, count)",
        "load_partial(bias + column, count)",
        "linear",
    ),
    Mutant("a plain gate's bias for both", _LINEAR_OUTPUT, "gate_bias + p.out_features", "gate_bias", "linear"),
    Mutant(
        "sums of a gate and of what it gates in one place",
        _PACKED_LINEAR,
        "(p_.gated && !gates ? rows.num_rows * kPanel : 0)",
        "0",
        "linear",
    ),
    Mutant(
        "panels of a gate and of what it gates in one place",
        _LINEAR,
        "rows.c = c + i * plan_.panels_per_group * kPanel;",
        "rows.c = c;",
        "linear",
        "scalar",
    ),
    Mutant("units end between a gate and what it gates", _PACKED_LINEAR, " / together * together;", ";", "linear"),
    Mutant(
        "last row block left out",
        _LINEAR,
        "int64_t{plan.units_per_block} * plan.num_blocks;",
        "int64_t{plan.units_per_block} * (plan.num_blocks - (plan.num_blocks > 1));",
        "linear",
        "avx512",
    ),
    Mutant("input widened without its stride", _LINEAR, "row * p.input_stride;", "row * p.in_features;", "linear"),
    Mutant(
        "block of a panel left half paired",
        _BF16_LINEAR,
        "advance(kBlockSteps * plan_.panels * kHalfStep);",
        "advance(1);",
        "linear",
        "amx",
    ),
    Mutant("sums between blocks of k lost", _BF16_LINEAR, "} else if (!only) {", "} else if (false) {", "linear", "amx"),
    Mutant("last values of k repeated", _BF16_LINEAR, "rest[i] = x[k + i];", "rest[i] = x[k];", "linear", "amx"),
    Mutant("second row tile takes the first's rows", _BF16_LINEAR, "(rows + row_tile_bytes,", "(rows,", "linear", "amx"),
    Mutant("padding slots written", _RESHAPE, "if (slot < 0) continue;", "if (slot < -1) continue;", "cache_ops"),
    Mutant(
        "a run of tokens goes on past its page",
        _RESHAPE,
        "while (count < left &&",
        "while (count < kMostTokens &&",
        "cache_ops",
    ),
    Mutant("tiny rows of INT8 not zero", _RESHAPE, "if (largest < 0x1p-100f) largest = 0.0f;", "", "cache_ops"),
    Mutant("INT8 truncated", _RESHAPE, "__builtin_rintf(code)", "__builtin_truncf(code)", "cache_ops"),
    Mutant("FP8 scale of another head", _RESHAPE, "side.scale[head] : 1.0f", "side.scale[0] : 1.0f", "cache_ops"),
    Mutant(
        "copies backwards",
        _COPY,
        "block_mapping[2 * pair + 1] * block_bytes",
        "block_mapping[2 * pair] * block_bytes",
        "cache_ops",
    ),
    Mutant(
        "last piece of a block left out",
        _COPY,
        "(block_bytes + kBytesPerUnit - 1) / kBytesPerUnit",
        "block_bytes / kBytesPerUnit + (block_bytes < kBytesPerUnit)",
        "cache_ops",
    ),
    Mutant("norm without epsilon", _NORM, "static_cast<float>(n) + epsilon", "static_cast<float>(n)", "layer_ops"),
    Mutant(
        "norm's last elements left out", _NORM, "sum[0] = fma(v, v, sum[0]);", "sum[0] = fma(v, zero(), sum[0]);", "layer_ops"
    ),
    Mutant("rotation backwards", _ROTARY, "fnma(b, s, a * c)", "fma(b, s, a * c)", "layer_ops"),
    Mutant("pairs as halves", _ROTARY, "if (is_neox)", "if (true)", "layer_ops"),
    Mutant("gelu without the cubic term", _ACTIVATIONS, "set1(0.044715f)", "set1(0.0f)", "layer_ops"),
    Mutant("up from the gate's half", _ACT, "load(gate + p.d + i)", "load(gate + i)", "layer_ops"),
    Mutant("widened values keep their offset", _QUANTIZED_AVX2, "_mm256_set1_epi16(F::kOffset)", "none", "quantized_linear"),
    Mutant(
        "an earlier chunk's sums lost",
        _QUANTIZED_AVX2,
        "if constexpr (!kFirst) sum = sum + work.sums[r][v];",
        "",
        "quantized_linear",
    ),
    Mutant(
        "high bits of the other half",
        _QUANTIZED_AVX2,
        "load_bytes(high + 64 * (Step / 4))",
        "load_bytes(high)",
        "quantized_linear",
    ),
    Mutant(
        "minimum of the first columns for all",
        _QUANTIZED_AVX2,
        "load(scales() + F::kScales * kQuantPanel + vec * kLanes)",
        "load(scales() + F::kScales * kQuantPanel)",
        "quantized_linear",
    ),
    Mutant("bias left out", _QUANTIZED, "value += load_partial(bias + j, n);", ";", "quantized_linear"),
    Mutant("up takes the gate's bias", _QUANTIZED, "bias + p_.out_features : nullptr", "bias : nullptr", "quantized_linear"),
    Mutant("both panels of a pair gated by one", _QUANTIZED, "gates[1], c[1]", "gates[0], c[1]", "quantized_linear"),
    Mutant(
        "a pair's second panel by the first's weights", _QUANTIZED_TILE, "args[p]->panel", "args[0]->panel", "quantized_linear"
    ),
    Mutant(
        "all row tiles' gates in one place",
        _QUANTIZED,
        "gates + int64_t{first_row - plan_.first_row(unit.first_tile)} * kQuantPanel",
        "gates",
        "quantized_linear",
    ),
    Mutant("four blocks by the first one's scale", _FOUR_BLOCKS, "set1(inverse[b])", "set1(inverse[0])", "quantized_linear"),
    Mutant("tiny blocks rounded", _FOUR_BLOCKS, "_mm_or_si128(small, huge)", "huge", "quantized_linear"),
    Mutant(
        "sums of a block's halves exchanged",
        _QUANTIZED_ROWS,
        "blocks.sums[0][b], blocks.sums[1][b]",
        "blocks.sums[1][b], blocks.sums[0][b]",
        "quantized_linear",
    ),
    Mutant("a later group overwrites", _W8A16, "            group == 0,", "            true,", "w8a16_linear"),
    Mutant(
        "the gate's bias for both", _W8A16, "load_partial(bias + p_.out_features + j", "load_partial(bias + j", "w8a16_linear"
    ),
    Mutant("sums of a column's integers missing", _W8A16_WEIGHT, "sum += whole[j];", "", "w8a16_linear"),
    Mutant(
        "half of the bias taken back",
        _W8A16_TILE,
        "_mm512_slli_epi32(sum, 7)",
        "_mm512_slli_epi32(sum, 6)",
        "w8a16_linear",
        "avx512_vnni",
    ),
    Mutant(
        "last tile of integers forgotten",
        _W8A16_AMX,
        "    add(waiting_, 0, waiting_.num_rows);",
        "    add(waiting_, 0, waiting_.num_rows - 1);",
        "w8a16_linear",
        "amx",
    ),
    Mutant(
        "high bytes of vectors for tiles",
        _W8A16,
        "plan_.in_vectors() ? kVectorHighBias : 0",
        "kVectorHighBias",
        "w8a16_linear",
        "amx",
    ),
]


def _isa_of(output: str) -> str:
    """The instruction set that an object file is compiled for; empty for what is no kernel's."""
    target = next((part for part in Path(output).parts if part.startswith("cpu_")), "")
    return target.removeprefix("cpu_").removesuffix(".dir")


def _output_of(command: str) -> str:
    """The object that a compiler's command line makes; older versions of CMake do not say it apart."""
    words = shlex.split(command)
    return words[words.index("-o") + 1]


class Checkout:
    """A copy of the sources with its own build of `_C`. A bug goes into one instruction set's kernels, to save time."""

    def __init__(self, root: Path) -> None:
        self.root, self._build = root, root / "build"
        for folder in ("csrc", "tools"):
            shutil.copytree(ROOT / folder, root / folder)
        shutil.copytree(ROOT / "pyengine", root / "pyengine", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        shutil.copy(ROOT / "CMakeLists.txt", root)
        options = [f"-DPython_EXECUTABLE={sys.executable}", f"-DPYENGINE_OUTPUT_DIR={root / 'pyengine'}"]
        options += ["-DCMAKE_CXX_FLAGS_RELEASE=-O1", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
        subprocess.run(["cmake", "-S", str(root), "-B", str(self._build), "-G", "Ninja", *options], check=True)
        subprocess.run(["cmake", "--build", str(self._build), "--target", "_C"], check=True)
        units = json.loads((self._build / "compile_commands.json").read_text())
        outputs = {_output_of(unit["command"]): unit["command"] for unit in units}
        isas = {mutant.isa for mutant in MUTANTS}
        self._commands = {output: command for output, command in outputs.items() if _isa_of(output) in isas}
        self._link = next(line for line in self._ninja("commands", "_C").splitlines() if " -shared " in line)
        self._includes = {output: self._ninja("deps", output) for output in self._commands}

    def _ninja(self, *args: str) -> str:
        return subprocess.run(["ninja", "-t", *args], cwd=self._build, check=True, capture_output=True, text=True).stdout

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """With the bug in the extension; afterwards as before."""
        path = self.root / mutant.file
        units = [output for output in self._commands if _isa_of(output) == mutant.isa]
        outputs = [output for output in units if mutant.file in self._includes[output]]
        assert outputs, f"no {mutant.isa} kernel includes {mutant.file}"
        originals = {output: (self._build / output).read_bytes() for output in outputs}
        source = plant(path, mutant.old, mutant.new)
        try:
            for output in outputs:
                subprocess.run(self._commands[output], cwd=self._build, shell=True, check=True)
            subprocess.run(self._link, cwd=self._build, shell=True, check=True)
            yield
        finally:
            path.write_text(source)
            for output, content in originals.items():
                (self._build / output).write_bytes(content)

    def run_tests(self, suite: str, isa: str) -> subprocess.CompletedProcess[str]:
        tests = str(ROOT / "tests" / "kernels" / f"test_{suite}.py")
        options = [
            "-x",
            "-q",
            "-m",
            "not slow",
            "-k",
            f"cpu-{isa}",
            "-c",
            str(ROOT / "pyproject.toml"),
            "-p",
            "no:cacheprovider",
        ]
        command = [sys.executable, "-m", "pytest", *options, tests]
        return subprocess.run(command, cwd=self.root, capture_output=True, text=True, timeout=600)


def require(isa: str) -> None:
    """Skip where this machine cannot run the kernels that the bug is in."""
    supported = load_core().supported_isas()
    if isa not in supported:
        pytest.skip(f"this CPU lacks {isa}; it has {', '.join(supported)}")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return Checkout(tmp_path_factory.mktemp("checkout"))


@pytest.mark.parametrize(("suite", "isa"), sorted({(mutant.suite, mutant.isa) for mutant in MUTANTS}))
def test_unchanged_sources_pass(checkout: Checkout, suite: str, isa: str) -> None:
    require(isa)
    result = checkout.run_tests(suite, isa)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_caught(checkout: Checkout, mutant: Mutant) -> None:
    require(mutant.isa)
    with checkout.planted(mutant):
        result = checkout.run_tests(mutant.suite, mutant.isa)
    # 1: a test failed. Below 0: the bug crashed the process.
    assert result.returncode == 1 or result.returncode < 0, f"not caught: {result.returncode}\n{result.stdout}{result.stderr}"


def test_planted_bugs_differ() -> None:
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)
