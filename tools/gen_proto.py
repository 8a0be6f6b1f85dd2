"""Generates `pyengine/server/proto` from `protos/`: `make proto`.

protoc names Python modules after the .proto's path, which would put them into a package `pyengine.v1` of their own; they are
moved into `pyengine.server.proto` and their imports of each other made relative. Everything else is protoc's output as it is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "protos" / "pyengine" / "v1" / "inference.proto"
TARGET = ROOT / "pyengine" / "server" / "proto"


def generate() -> dict[str, str]:
    """Run protoc; returns file name -> content."""
    from grpc_tools import protoc

    package = SOURCE.parent.relative_to(ROOT / "protos")
    absolute = f"from {'.'.join(package.parts)} import {SOURCE.stem}_pb2 "
    relative = f"from . import {SOURCE.stem}_pb2 "
    with tempfile.TemporaryDirectory() as folder:
        arguments = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
        includes = [f"-I{ROOT / 'protos'}", f"-I{files('grpc_tools') / '_proto'}"]
        status = protoc.main(["protoc", *includes, *arguments, str(SOURCE)])
        if status != 0:
            raise SystemExit(f"protoc failed with status {status}")
        generated = {path.name: path.read_text() for path in sorted((Path(folder) / package).iterdir())}
    grpc_module = f"{SOURCE.stem}_pb2_grpc.py"
    if absolute not in generated[grpc_module]:
        raise SystemExit(f"{grpc_module}: no line starts with {absolute!r}; has protoc changed?")
    generated[grpc_module] = generated[grpc_module].replace(absolute, relative)
    return generated


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the committed files are not up to date")
    check = parser.parse_args().check
    stale = False
    for name, content in generate().items():
        path = TARGET / name
        if path.is_file() and path.read_text() == content:
            continue
        stale = True
        if not check:
            path.write_text(content)
        print(f"{'stale' if check else 'written'}: {path.relative_to(ROOT)}")
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main())
