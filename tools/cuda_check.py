"""`make cuda-check`: compiles every CUDA source with nvcc and checks the machine code. No GPU is needed.

1. CMake builds the extension with PYENGINE_CUDA=ON against the installed torch (a CPU one will do): every csrc/*/cuda/*.cu for
   sm_80 and sm_90, plus PTX for newer GPUs; warnings, register spills and local memory are errors. It must load.
2. The objects are disassembled. Each kernel must have the instructions that it is written for, no local memory, and fit the
   register file and the shared memory of both architectures.
3. The table of kernels goes to docs/kernels.md, between its markers.

Needs nvcc (PATH or /usr/local/cuda/bin) and cuobjdump and nvdisasm: from the toolkit, or `pip install nvidia-cuda-cuobjdump
nvidia-cuda-nvdisasm`. Exit status 0: all holds; 1: something does not, and the last lines say what.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import sass
from sass import Kernel

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "cuda-check"
DOC = ROOT / "docs" / "kernels.md"
BEGIN, END = "<!-- cuda-check: begin -->", "<!-- cuda-check: end -->"
NVCC_FLAGS = "-Xptxas -warn-spills,-warn-lmem-usage -Werror all-warnings"


@dataclass(frozen=True)
class Architecture:
    """Limits of one GPU architecture, from the CUDA programming guide's table of compute capabilities."""

    name: str
    registers: int  # of an SM, and at most of a block
    max_warps: int
    max_blocks: int
    shared_per_sm: int
    shared_per_block: int


ARCHITECTURES = {
    "sm_80": Architecture("sm_80", 65536, 64, 32, 164 * 1024, 163 * 1024),
    "sm_90": Architecture("sm_90", 65536, 64, 32, 228 * 1024, 227 * 1024),
}
RESERVED_SHARED = 1024  # of every block, by the driver

#: What kernels must be made of: pattern of the name, then (what it is called, pattern of instructions).
HMMA, LDSM = ("HMMA.16816", r"HMMA\.16816"), ("LDSM", "LDSM")
ASYNC_128 = ("LDGSTS ...128", r"LDGSTS\..*\b128")
EXPECTED: list[tuple[str, list[tuple[str, str]]]] = [
    (r"(decode|prefill)_mma_kernel", [HMMA, LDSM, ASYNC_128]),
    (r"weight_gemm_kernel", [HMMA]),
    (r"weight_gemm_kernel<pyengine::cuda::(Gptq|Fp8)Weights", [("LDG.E.128", r"LDG\.E\..*128|LDG\.E\.128")]),
    (r"int8_gemm_kernel", [("IMMA.16832", r"IMMA\.16832\.S8\.S8"), ("LDG.E.128", r"LDG\.E\..*128|LDG\.E\.128")]),
    (r"attention_simt_kernel", [("LDS.128", r"LDS\.128"), ("FFMA", "FFMA")]),
    (r"combine_kernel", [("LDG.E.128", r"LDG\.E\..*128|LDG\.E\.128")]),
    (r"copy_blocks_kernel<uint4>", [("LDG.E.128", r"LDG\.E\.128"), ("STG.E.128", r"STG\.E\.128")]),
    (r"rms_norm_kernel<(float, 4|__half, 8|__nv_bfloat16, 8)>", [("LDG.E.128", r"LDG\.E\.128"), ("STG.E.128", r"STG\.E\.128")]),
]
#: Blocks that must fit on an SM at once, by pattern of the kernel's name: what docs/kernels.md promises.
RESIDENT: list[tuple[str, str, int]] = [
    (r"decode_mma_kernel<\w+, \(pyengine::cuda::KvFormat\)[012], 128>", "sm_90", 2),
    (r"(weight|int8)_gemm_kernel<.*, 1>", "sm_90", 2),
]
STATIC_SHARED = {
    "rms_norm_kernel": 32,
    "quantize_int8_rows_kernel": 16,
}  # dynamic shared memory of the small kernels that have some


class CheckError(Exception):
    """A check that did not hold, or a tool that is missing."""


@dataclass
class Row:
    """One kernel on one architecture, with how it is launched."""

    kernel: Kernel
    shared_bytes: int
    step_bytes: int

    @property
    def blocks_per_sm(self) -> int:
        arch = ARCHITECTURES[self.kernel.arch]
        warps = -(-self.kernel.threads // 32)
        per_warp = -(-self.kernel.registers * 32 // 256) * 256
        by_registers = arch.registers // (per_warp * warps)
        by_shared = arch.shared_per_sm // (self.shared_bytes + RESERVED_SHARED)
        return min(by_registers, by_shared, arch.max_warps // warps, arch.max_blocks)

    @property
    def occupancy(self) -> float:
        arch = ARCHITECTURES[self.kernel.arch]
        return self.blocks_per_sm * -(-self.kernel.threads // 32) / arch.max_warps


def find_tool(name: str, hint: str) -> str:
    """Path of a tool: on PATH, in /usr/local/cuda, or in a wheel of this Python."""
    wheels = Path(sys.prefix).glob(f"lib*/python*/site-packages/nvidia/*/bin/{name}")
    for candidate in (shutil.which(name), f"/usr/local/cuda/bin/{name}", *map(str, wheels)):
        if candidate and Path(candidate).exists():
            return candidate
    raise CheckError(f"{name} was not found; {hint}")


def run(command: Sequence[str], what: str) -> None:
    """Run with the output shown; a failure is a CheckError that says what failed."""
    print(f"cuda-check: {what}", flush=True)
    begin = time.monotonic()
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        raise CheckError(f"{what}: failed, see above")
    print(f"cuda-check: {what}: {time.monotonic() - begin:.0f} s", flush=True)


def build(nvcc: str, jobs: int) -> list[Path]:
    """Build and link the CUDA extension; returns the kernels' objects."""
    for line in (f"CMake with {nvcc}", f"build folder {BUILD.relative_to(ROOT)}"):
        print(f"cuda-check: {line}", flush=True)
    configure = [
        *("cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja"),
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DPYENGINE_OUTPUT_DIR={BUILD}",
        "-DPYENGINE_CUDA=ON",
        f"-DCMAKE_CUDA_COMPILER={nvcc}",
        f"-DCMAKE_CUDA_FLAGS={NVCC_FLAGS}",
        "-DCMAKE_CUDA_ARCHITECTURES=80-real;90",
    ]
    run(configure, "configure")
    run(
        ["cmake", "--build", str(BUILD), "--target", "_C", "-j", str(jobs)], "compile for sm_80, sm_90 and compute_90, and link"
    )
    objects = sorted(BUILD.glob("CMakeFiles/_C.dir/csrc/*/cuda/*.o"))
    sources = sorted(ROOT.glob("csrc/*/cuda/*.cu"))
    if len(objects) < len(sources):
        raise CheckError(f"{len(sources)} CUDA sources, but {len(objects)} objects")
    return objects


def check_loads() -> None:
    """The linked extension loads in this torch and has the ops for CUDA tensors."""
    program = (
        "import importlib.util, sys, torch\n"
        "spec = importlib.util.spec_from_file_location('_C', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "assert module.has_cuda, 'built without CUDA'\n"
        "has = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        "for op in ('paged_attention', 'reshape_and_cache', 'copy_blocks', 'swap_blocks'):\n"
        "    assert has('pyengine::' + op, 'CUDA'), op\n"
    )
    libraries = list(BUILD.glob("_C*.so"))
    if len(libraries) != 1:
        raise CheckError(f"expected one _C*.so in {BUILD}, found {len(libraries)}")
    run([sys.executable, "-c", program, str(libraries[0])], "load the extension")


def read_shapes() -> dict[str, tuple[int, int, int]]:
    """Threads, dynamic shared memory and bytes a step of attention and matrix kernels, printed by tools/kernel_shapes.cpp."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "shapes"
        sources = [ROOT / "tools" / "kernel_shapes.cpp", *sorted((ROOT / "csrc" / "emulation").glob("*.cpp"))]
        flags = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-Wno-unknown-pragmas"]
        run(["g++", *flags, *map(str, sources), "-o", str(program)], "read the launch shapes")
        lines = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
    table = {}
    for line in lines:
        name, threads, shared, step = line.split("\t")
        table[name] = int(threads), int(shared), int(step)
    return table


def collect(objects: Sequence[Path], cuobjdump: str) -> list[Row]:
    """Every kernel of every object on every architecture."""
    shapes = read_shapes()
    rows = []
    for number, path in enumerate(objects, 1):
        print(f"cuda-check: disassemble {path.name} ({number}/{len(objects)})", flush=True)
        for kernel in sass.read_object(path, cuobjdump):
            base = kernel.name.split("<")[0]
            threads, shared, step = shapes.get(kernel.name, (kernel.threads, STATIC_SHARED.get(base, 0), 0))
            kernel.threads = kernel.threads or threads
            if kernel.threads != threads:
                raise CheckError(f"{kernel.name}: launched with {threads} threads, __launch_bounds__ says {kernel.threads}")
            rows.append(Row(kernel, shared, step))
    return sorted(rows, key=lambda row: (row.kernel.name, row.kernel.arch))


def violations(rows: Sequence[Row]) -> list[str]:
    """What does not hold, one line each."""
    found = []
    for row in rows:
        kernel, arch = row.kernel, ARCHITECTURES[row.kernel.arch]
        where = f"{kernel.name} on {kernel.arch}"
        if kernel.count("LDL|STL") or kernel.local_bytes:
            found.append(f"{where}: uses local memory ({kernel.local_bytes} bytes, {kernel.count('LDL|STL')} accesses)")
        if kernel.registers * kernel.threads > arch.registers:
            found.append(f"{where}: {kernel.registers} registers x {kernel.threads} threads do not fit {arch.registers}")
        if row.shared_bytes > arch.shared_per_block:
            found.append(f"{where}: {row.shared_bytes} bytes of shared memory, a block may have {arch.shared_per_block}")
        for pattern, instructions in EXPECTED:
            if re.match(pattern, kernel.name):
                found += [f"{where}: no {title} instruction" for title, regex in instructions if not kernel.count(regex)]
        for pattern, name, blocks in RESIDENT:
            if re.match(pattern, kernel.name) and kernel.arch == name and row.blocks_per_sm < blocks:
                found.append(f"{where}: {row.blocks_per_sm} blocks fit on an SM, {blocks} should")
    for pattern, _ in EXPECTED:
        found += [f"no kernel matches {pattern}"] * (not any(re.match(pattern, row.kernel.name) for row in rows))
    return found


def display_name(name: str) -> str:
    """A kernel's name as the table shows it."""
    for old, new in (
        ("(pyengine::cuda::KvFormat)0", "model"),
        ("(pyengine::cuda::KvFormat)1", "fp8"),
        ("(pyengine::cuda::KvFormat)2", "int8"),
        ("__nv_bfloat16", "bf16"),
        ("__half", "fp16"),
        ("Weights<", "<"),
        ("_kernel", ""),
    ):
        name = name.replace(old, new)
    return re.sub(r"\(anonymous namespace\)::|pyengine::cuda::|_NV_ANON_NAMESPACE::", "", name)


def table(rows: Sequence[Row]) -> str:
    """Markdown: one line a kernel; figures of sm_80 / sm_90 where they differ."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.kernel.name, []).append(row)
    lines = [
        "| kernel | threads | registers | shared, KB | blocks an SM | occupancy | mma | LDSM | LDGSTS | loop | bytes a step |",
        "|" + "---|" * 11,
    ]
    for name, group in by_name.items():
        both = [
            [str(row.kernel.registers) for row in group],
            [f"{row.shared_bytes / 1024:.1f}" for row in group],
            [str(row.blocks_per_sm) for row in group],
            [f"{row.occupancy:.0%}" for row in group],
            [str(row.kernel.count("[HI]MMA")) for row in group],
            [str(row.kernel.count("LDSM")) for row in group],
            [str(row.kernel.count("LDGSTS")) for row in group],
            [str(row.kernel.main_loop().total() or "") for row in group],
            [str(row.step_bytes or "") for row in group],
        ]
        cells = [" / ".join(dict.fromkeys(values)) for values in both]
        lines.append(f"| {display_name(name)} | {group[0].kernel.threads} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_doc(text: str) -> None:
    """Replace what stands between the markers of docs/kernels.md."""
    old = DOC.read_text(encoding="utf-8")
    if BEGIN not in old or END not in old:
        raise CheckError(f"{DOC.relative_to(ROOT)} lacks the markers {BEGIN} and {END}")
    new = f"{old[: old.index(BEGIN)]}{BEGIN}\n{text}\n{old[old.index(END) :]}"
    if new != old:
        DOC.write_text(new, encoding="utf-8")
        print(f"cuda-check: wrote the table into {DOC.relative_to(ROOT)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="compilers at once")
    arguments = parser.parse_args()
    begin = time.monotonic()
    try:
        nvcc = find_tool("nvcc", "install the CUDA toolkit, or put its bin folder on PATH")
        hint = "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm, or install the full CUDA toolkit"
        cuobjdump, nvdisasm = find_tool("cuobjdump", hint), find_tool("nvdisasm", hint)
        os.environ["PATH"] = f"{Path(nvdisasm).parent}{os.pathsep}{os.environ['PATH']}"  # cuobjdump calls it
        objects = build(nvcc, arguments.jobs)
        check_loads()
        rows = collect(objects, cuobjdump)
        text = table(rows)
        print(text)
        write_doc(text)
        found = violations(rows)
    except (CheckError, subprocess.CalledProcessError) as error:
        print(f"cuda-check: FAILED: {error}", file=sys.stderr)
        return 1
    for line in found:
        print(f"cuda-check: FAILED: {line}", file=sys.stderr)
    kernels = len({row.kernel.name for row in rows})
    verdict = f"{len(found)} violations" if found else "all checks hold"
    print(f"cuda-check: {kernels} kernels, {len(rows)} machine codes, {verdict}; {time.monotonic() - begin:.0f} s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
