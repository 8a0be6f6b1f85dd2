"""The logits of every token of a text, from the model as an engine with the same arguments would run it.

An engine's API gives at most a few log-probabilities a position; comparing two models' distributions takes all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pyengine.config import EngineArgs
from pyengine.config_resolution import resolve, resolve_load
from pyengine.errors import InvalidRequestError
from pyengine.layers.attention_metadata import AttentionMetadata
from pyengine.loader.checkpoint import open_checkpoint
from pyengine.loader.weights import load_model
from pyengine.worker.backends import create_backend
from pyengine.worker.hardware import detect_hardware
from pyengine.worker.step_replay import create_step_runner
from pyengine.worker.worker import kv_cache_spec


class Evaluator:
    """A loaded model without a scheduler: one sequence at a time.

    Args:
        args: model, device, dtype, quantization, kv_cache_dtype, num_threads and max_num_batched_tokens count.

    Raises:
        ConfigError, ModelLoadError: as an engine with these arguments would.
    """

    def __init__(self, args: EngineArgs) -> None:
        self.checkpoint = open_checkpoint(args.model, revision=args.revision, download_dir=args.download_dir)
        hardware = detect_hardware()
        load_config = resolve_load(args, self.checkpoint.arch, hardware)
        self._backend = create_backend(load_config.device, load_config.num_threads)
        self._model = load_model(self.checkpoint, load_config, self._backend.ops)
        hardware = replace(hardware, available_memory=self._backend.available_memory())
        self.config = resolve(args, self.checkpoint.name, self.checkpoint.arch, hardware)

    def logits(self, token_ids: Sequence[int], *, chunk: int = 128) -> Iterator[Tensor]:
        """Run a sequence from its start in steps of `chunk` tokens.

        Yields:
            fp32 [at most chunk, vocab_size] on the CPU, valid until the next one. Row i of all of them is what is expected
            after token i.

        Raises:
            InvalidRequestError: no tokens, more than the model's context, or one that is not in its vocabulary.
        """
        arch, limit = self.config.model.arch, self.config.model.max_model_len
        if not 0 < len(token_ids) <= limit:
            raise InvalidRequestError("token_ids", f"there must be 1 to {limit} tokens, got {len(token_ids)}")
        if not all(0 <= token < arch.vocab_size for token in token_ids):
            raise InvalidRequestError("token_ids", f"must be of 0 to {arch.vocab_size - 1}")
        block_size, device = self.config.cache.block_size, self._backend.device
        num_blocks = -(-len(token_ids) // block_size)
        # Block 0 is the null block.
        pool = self._backend.allocate_pool(kv_cache_spec(arch, self.config.cache), num_blocks + 1, host=False)
        step = create_step_runner(
            self._model,
            [pool.layer(index) for index in range(arch.num_layers)],
            replay=self._backend.name == "cpu" and not self.config.device.enforce_eager,
            max_num_tokens=chunk,
            max_num_rows=chunk,
        )
        block_table = torch.arange(1, num_blocks + 1, dtype=torch.int32, device=device)[None]
        with torch.inference_mode():
            for start in range(0, len(token_ids), chunk):
                part = torch.tensor(token_ids[start : start + chunk], dtype=torch.int64, device=device)  # [count]
                count, end = len(part), start + len(part)
                positions = torch.arange(start, end, device=device)  # [count]
                metadata = AttentionMetadata(
                    num_seqs=1,
                    num_tokens=count,
                    max_query_len=count,
                    max_seq_len=end,
                    query_start_loc=torch.tensor([0, count], dtype=torch.int32, device=device),
                    seq_lens=torch.tensor([end], dtype=torch.int32, device=device),
                    block_table=block_table,
                    slot_mapping=positions + block_size,
                )
                self._backend.plan_attention(
                    metadata,
                    [count],
                    [end],
                    num_heads=arch.num_heads,
                    num_kv_heads=arch.num_kv_heads,
                    head_dim=arch.head_dim,
                )
                yield step.compute_logits(step.forward(part, positions, metadata)).cpu()
