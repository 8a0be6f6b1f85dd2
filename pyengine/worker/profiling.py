"""How much memory the largest step needs: measured by running it once, before the KV pool takes the rest."""

from __future__ import annotations

import torch

from pyengine.config import DType, ModelArchConfig
from pyengine.layers.attention_metadata import AttentionMetadata
from pyengine.models.interfaces import CausalLM
from pyengine.worker.backend import Backend, KVCacheSpec
from pyengine.worker.step_replay import EagerStepRunner

_BLOCK_SIZE = 16


def profile_peak_memory(
    model: CausalLM, backend: Backend, arch: ModelArchConfig, *, dtype: DType, num_tokens: int, num_rows: int
) -> int | None:
    """Bytes beside the weights at the peak of a step of `num_tokens` query tokens that samples `num_rows` sequences.

    The step is made up: sequences of one block each, which all read the null block of a pool that has no other, and write
    nothing. None where the device's memory is no matter.
    """

    def run() -> None:
        spec = KVCacheSpec(
            num_layers=arch.num_layers,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            block_size=_BLOCK_SIZE,
            dtype=dtype,
        )
        pool = backend.allocate_pool(spec, 1, host=False)
        pool.data.zero_()
        query_lens = [min(_BLOCK_SIZE, num_tokens - start) for start in range(0, num_tokens, _BLOCK_SIZE)]
        starts = torch.zeros(len(query_lens) + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(query_lens).cumsum(0)
        device = backend.device
        metadata = AttentionMetadata(
            num_seqs=len(query_lens),
            num_tokens=num_tokens,
            max_query_len=max(query_lens),
            max_seq_len=max(query_lens),
            query_start_loc=starts.to(device),
            seq_lens=torch.tensor(query_lens, dtype=torch.int32).to(device),
            block_table=torch.zeros(len(query_lens), 1, dtype=torch.int32).to(device),
            slot_mapping=torch.full((num_tokens,), -1).to(device),
        )
        ids = torch.zeros(num_tokens, dtype=torch.int64).to(device)
        step = EagerStepRunner(model, [pool.layer(i) for i in range(arch.num_layers)])
        with torch.inference_mode():
            step.compute_logits(step.forward(ids, torch.zeros_like(ids), metadata)[:num_rows])

    return backend.measure_peak_memory(run)
