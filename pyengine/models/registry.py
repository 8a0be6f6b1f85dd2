"""Which class runs which architecture. A new model is a class here and its tensors' names in it."""

from __future__ import annotations

import torch

from pyengine.config import ModelArchConfig
from pyengine.errors import ModelLoadError
from pyengine.models.interfaces import CausalLM
from pyengine.models.llama import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from pyengine.ops import Ops

_MODELS = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}
SUPPORTED_ARCHITECTURES = tuple(_MODELS)


def create_model(arch: ModelArchConfig, *, ops: Ops, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """A model without its weights.

    Args:
        arch: what the checkpoint says.
        ops: the kernels of the device.
        dtype: of weights and activations.
        device: where they live.

    Raises:
        ModelLoadError: naming the architecture, or the part of it, that is not supported.
    """
    model_class = _MODELS.get(arch.architecture)
    if model_class is None:
        known = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ModelLoadError(f"architecture {arch.architecture} is not supported; supported: {known}")
    return model_class(arch, ops=ops, dtype=dtype, device=device)
