"""From a checkpoint to a model that can run: builds it, checks every name and shape first, then streams the tensors in."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from pyengine.config import LoadConfig
from pyengine.errors import ModelLoadError
from pyengine.layers.weights import CheckpointWeight, QuantizedTensor, RepackedTensor, Weight, plain
from pyengine.loader.base import Checkpoint
from pyengine.loader.checkpoint_blocks import to_blocks
from pyengine.loader.quantize import SCHEMES, quantize
from pyengine.models.interfaces import CausalLM
from pyengine.models.registry import create_model
from pyengine.ops import Ops

logger = logging.getLogger(__name__)

#: torch's types of weights and activations, by the configuration's names.
MODEL_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(checkpoint: Checkpoint, load_config: LoadConfig, ops: Ops) -> CausalLM:
    """Build the checkpoint's model and load its weights, one tensor at a time, with a progress bar on a terminal.

    Peak memory is one copy of the weights and one merged tensor, and a few that are being quantised.

    Args:
        checkpoint: an open checkpoint.
        load_config: device, dtype and how weights are run: quantised as the checkpoint's are ("gguf", "gptq", ...), on CPUs in
            blocks; in blocks that are made of plain ones ("int8", "int4"); or plain, dequantised where they are not (None).
        ops: the device's kernels.

    Raises:
        ModelLoadError: one line naming the file, and the tensor that is missing, unknown, mis-shaped or unreadable.
    """
    scheme = load_config.quantization
    check_scheme(checkpoint, scheme)
    device = torch.device("cuda" if load_config.device == "cuda" else "cpu")
    started = time.monotonic()
    try:
        model = create_model(checkpoint.arch, ops=ops, dtype=MODEL_DTYPES[load_config.dtype], device=device)
    except ModelLoadError as error:
        raise ModelLoadError(f"{checkpoint.path}: {error}") from error
    check_tensors(checkpoint, model)
    model.load_weights(_without_spare_biases(checkpoint, model, _with_progress(checkpoint, load_config)))
    count, seconds = len(checkpoint.tensor_infos), time.monotonic() - started
    form = load_config.dtype if scheme is None else f"{scheme}, {load_config.dtype} activations"
    logger.info("loaded %d tensors of %s as %s in %.2f s", count, checkpoint.name, form, seconds)
    return model


def check_scheme(checkpoint: Checkpoint, scheme: str | None) -> None:
    """Compare the quantisation that weights are to be run in with what the checkpoint offers.

    Raises:
        ModelLoadError: naming the file and the scheme.
    """
    found = checkpoint.arch.quantization
    can_run = scheme in (None, found) or (scheme in SCHEMES and found is None) or scheme == checkpoint.format == "gguf"
    if not can_run:
        raise ModelLoadError(
            f"{checkpoint.path}: quantization {scheme!r} was asked for, but the checkpoint's is {found or 'none'}"
        )


def check_tensors(checkpoint: Checkpoint, model: CausalLM) -> None:
    """Compare names and shapes in the checkpoint's headers with what the model wants.

    Raises:
        ModelLoadError: naming file and tensor.
    """
    shapes, infos = model.weight_shapes(), checkpoint.tensor_infos
    architecture, spare = checkpoint.arch.architecture, _spare_biases(checkpoint, model)
    for name, info in infos.items():
        if name not in shapes:
            if not model.ignores_weight(name) and name not in spare:
                raise ModelLoadError(f"{info.file}: tensor {name} does not belong to {architecture} as configured")
        elif info.shape != shapes[name]:
            has = f"{info.stored_as} is of a matrix" if info.stored_as else f"{name} has shape"
            raise ModelLoadError(f"{info.file}: tensor {has} {list(info.shape)}, not {list(shapes[name])}")
    missing = [name for name in shapes if name not in infos]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ModelLoadError(f"{checkpoint.path}: tensor {missing[0]} is missing{more}")


def _spare_biases(checkpoint: Checkpoint, model: CausalLM) -> set[str]:
    """Biases that the model does not have: some tools give one to every projection that they quantise, of zeros."""
    shapes, infos = model.weight_shapes(), checkpoint.tensor_infos
    biases = (name for name in infos if name.endswith(".bias") and name not in shapes)
    weights = ((name, infos.get(name.removesuffix("bias") + "weight")) for name in biases)
    return {name for name, weight in weights if weight is not None and weight.stored_as}


def _without_spare_biases(
    checkpoint: Checkpoint, model: CausalLM, tensors: Iterator[tuple[str, Weight]]
) -> Iterator[tuple[str, Weight]]:
    spare = _spare_biases(checkpoint, model)
    for name, weight in tensors:
        if name not in spare:
            yield name, weight
        elif plain(weight).any():
            file, architecture = checkpoint.tensor_infos[name].file, checkpoint.arch.architecture
            raise ModelLoadError(f"{file}: tensor {name} is not zero, and does not belong to {architecture} as configured")


def _with_progress(checkpoint: Checkpoint, load_config: LoadConfig) -> Iterator[tuple[str, Weight]]:
    from tqdm import tqdm

    scheme = load_config.quantization

    def make_blocks(name: str, weight: Weight) -> Weight:
        return quantize(name, weight, scheme) if scheme and isinstance(weight, Tensor) and weight.ndim == 2 else weight

    def take_blocks(name: str, weight: Weight) -> Weight:
        return to_blocks(name, weight) if isinstance(weight, CheckpointWeight) else weight

    tensors = checkpoint.tensors(quantized=scheme is not None and scheme not in SCHEMES)
    if scheme in SCHEMES:
        tensors = _converted(checkpoint, tensors, make_blocks, load_config.num_threads)
    elif scheme not in (None, "gguf") and load_config.device == "cpu":
        tensors = _converted(checkpoint, tensors, take_blocks, load_config.num_threads)
    if load_config.repack:
        tensors = (
            (name, RepackedTensor(weight) if isinstance(weight, QuantizedTensor) else weight) for name, weight in tensors
        )
    total = len(checkpoint.tensor_infos)
    # disable=None: no bar where stderr is not a terminal, so that logs stay readable.
    yield from tqdm(tensors, total=total, desc="Loading weights", unit="tensor", disable=None)


def _converted(
    checkpoint: Checkpoint,
    tensors: Iterator[tuple[str, Weight]],
    convert: Callable[[str, Weight], Weight],
    num_threads: int,
) -> Iterator[tuple[str, Weight]]:
    """The tensors in their order, converted by several threads that work a few tensors ahead.

    Each of torch's operators stays on its thread: its own pool waits at the end of every one, which is slow on shared cores.
    """

    def named(name: str, weight: Weight) -> Weight:
        try:
            return convert(name, weight)
        except ModelLoadError as error:
            raise ModelLoadError(f"{checkpoint.tensor_infos[name].file}: {error}") from error

    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    waiting: deque[tuple[str, Future[Weight]]] = deque()
    pool = ThreadPoolExecutor(num_threads, "quantize", initializer=torch.set_num_threads, initargs=(1,))
    try:
        for name, weight in tensors:
            waiting.append((name, pool.submit(named, name, weight)))
            if len(waiting) > 2 * num_threads:
                ready, future = waiting.popleft()
                yield ready, future.result()
        for ready, future in waiting:
            yield ready, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(torch_threads)
