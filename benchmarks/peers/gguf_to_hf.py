"""A Llama-type GGUF file, dequantised, as a Hugging Face folder in fp32: what peers run that read no GGUF.

python benchmarks/peers/gguf_to_hf.py FILE.gguf FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    file, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    source = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    config = source.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**config))  # a model of its own: saving the quantised one would keep its scheme
    model.load_state_dict(source.state_dict())
    model.tie_weights()
    model.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
