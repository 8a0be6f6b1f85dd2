"""What the worker asks of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from pyengine.layers.attention_metadata import AttentionMetadata, LayerKVCache, LogitsRows
from pyengine.layers.weights import Weight


class CausalLM(Protocol):
    """A decoder that turns a batch of tokens into hidden states, and some of those into logits."""

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name (Hugging Face's) and shape of every tensor that `load_weights` must get."""

    def ignores_weight(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor though the model has no use for it."""

    def load_weights(self, weights: Iterable[tuple[str, Weight]]) -> None:
        """Copy every tensor into its place. A matrix may come quantised where the device's kernels can run it.

        Raises:
            ModelLoadError: naming the tensor that is unknown, mis-shaped or missing.
        """

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """input_ids int64 [num_tokens] -> a new tensor [num_tokens, hidden_size]."""

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        kv_caches: Sequence[LayerKVCache],
        metadata: AttentionMetadata,
        rows: LogitsRows | None = None,
    ) -> Tensor:
        """Run the layers, on a CPU by `Ops`, views and new tensors alone, so that a step can be recorded.

        Args:
            hidden: the tokens' embeddings [num_tokens, hidden_size], overwritten.
            positions: int64 [num_tokens].
            kv_caches: one for each layer.
            rows: the tokens whose hidden states are wanted; there may be none. None: all tokens. Once the model has taken
                them from a tensor (`LogitsRows.of`), it computes these rows only.

        Returns:
            Hidden states [num_rows, hidden_size], after the last norm.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [num_rows, hidden_size] -> fp32 [num_rows, vocab_size]."""
