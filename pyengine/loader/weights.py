"""From a checkpoint to a model that can run: builds it, checks every name and shape first, then streams the tensors in."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from pyengine.config import LoadConfig
from pyengine.errors import ModelLoadError
from pyengine.layers.weights import Weight
from pyengine.loader.base import Checkpoint
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
        load_config: device, dtype and how weights are run: as quantised blocks that the file has ("gguf") or that are made now
            ("int8", "int4"), or plain, dequantised where they are not (None).
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
    model.load_weights(_with_progress(checkpoint, scheme, load_config.num_threads))
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
    architecture = checkpoint.arch.architecture
    for name, info in infos.items():
        if name not in shapes:
            if not model.ignores_weight(name):
                raise ModelLoadError(f"{info.file}: tensor {name} does not belong to {architecture} as configured")
        elif info.shape != shapes[name]:
            raise ModelLoadError(f"{info.file}: tensor {name} has shape {list(info.shape)}, not {list(shapes[name])}")
    missing = [name for name in shapes if name not in infos]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ModelLoadError(f"{checkpoint.path}: tensor {missing[0]} is missing{more}")


def _with_progress(checkpoint: Checkpoint, scheme: str | None, num_threads: int) -> Iterator[tuple[str, Weight]]:
    from tqdm import tqdm

    tensors: Iterator[tuple[str, Weight]] = checkpoint.tensors(quantized=scheme == "gguf")
    if scheme in SCHEMES:
        tensors = _quantized(checkpoint, tensors, scheme, num_threads)
    total = len(checkpoint.tensor_infos)
    # disable=None: no bar where stderr is not a terminal, so that logs stay readable.
    yield from tqdm(tensors, total=total, desc="Loading weights", unit="tensor", disable=None)


def _quantized(
    checkpoint: Checkpoint, tensors: Iterator[tuple[str, Weight]], scheme: str, num_threads: int
) -> Iterator[tuple[str, Weight]]:
    """The tensors in their order, matrices quantised by several threads that work a few tensors ahead.

    Each of torch's operators stays on its thread: its own pool waits at the end of every one, which is slow on shared cores.
    """

    def convert(name: str, weight: Weight) -> Weight:
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            return weight
        try:
            return quantize(name, weight, scheme)
        except ModelLoadError as error:
            raise ModelLoadError(f"{checkpoint.tensor_infos[name].file}: {error}") from error

    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    waiting: deque[tuple[str, Future[Weight]]] = deque()
    pool = ThreadPoolExecutor(num_threads, "quantize", initializer=torch.set_num_threads, initargs=(1,))
    try:
        for name, weight in tensors:
            waiting.append((name, pool.submit(convert, name, weight)))
            if len(waiting) > 2 * num_threads:
                ready, future = waiting.popleft()
                yield ready, future.result()
        for ready, future in waiting:
            yield ready, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(torch_threads)
