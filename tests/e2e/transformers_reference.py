"""What Transformers thinks of a sequence: one forward pass in fp32 says whether each of its tokens is the greedy one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pyengine.loader.checkpoint import Checkpoint

NEAR_TIE = 1e-3


@dataclass(frozen=True)
class Judgement:
    """Of one sequence, by Transformers' logits before each of its tokens but the first."""

    logprobs: list[float]  # of tokens 1, 2, ...
    behind: list[float]  # of the same tokens: the best logit minus the token's; 0 for the greedy one
    gaps: list[float]  # the best logit minus the second best

    def first_difference(self, start: int) -> int | None:
        """First token from `start` on that greedy decoding would not have taken, near ties aside; None if there is none.

        A sequence is judged in its own context. So tokens before a difference are those of Transformers' own greedy run, up to
        a step whose two best logits are closer than NEAR_TIE.
        """
        return next((i + 1 for i, behind in enumerate(self.behind) if i + 1 >= start and behind >= NEAR_TIE), None)


class TransformersReference:
    """A checkpoint in Transformers, in fp32.

    Args:
        model: a causal model of Transformers.
    """

    def __init__(self, model: Any) -> None:
        self._model = model.eval()

    @staticmethod
    def from_folder(path: Path) -> TransformersReference:
        """As Transformers reads a Hugging Face folder."""
        return TransformersReference(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))

    @staticmethod
    def from_gguf(path: Path) -> TransformersReference:
        """As Transformers reads a GGUF file, which takes minutes."""
        return TransformersReference(
            AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        )

    @staticmethod
    def from_checkpoint(checkpoint: Checkpoint) -> TransformersReference:
        """Transformers' network on tensors that this engine's loader has read."""
        arch = checkpoint.arch
        config = LlamaConfig(
            vocab_size=arch.vocab_size,
            hidden_size=arch.hidden_size,
            intermediate_size=arch.intermediate_size,
            num_hidden_layers=arch.num_layers,
            num_attention_heads=arch.num_heads,
            num_key_value_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            max_position_embeddings=arch.max_position_embeddings,
            rms_norm_eps=arch.rms_norm_eps,
            rope_theta=arch.rope_theta,
            tie_word_embeddings=arch.tie_word_embeddings,
        )
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        state = {name: tensor.float() for name, tensor in checkpoint.tensors()}
        model = model.to_empty(device="cpu")
        model.model.rotary_emb = LlamaRotaryEmbedding(config)  # computed, in no checkpoint
        missing = model.load_state_dict(state, strict=False).missing_keys
        assert missing in ([], ["lm_head.weight"])
        model.tie_weights()
        return TransformersReference(model)

    @torch.inference_mode()
    def judge(self, token_ids: list[int]) -> Judgement:
        """Look at a whole sequence, prompt and output."""
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # more only wait for each other with a model this small
        try:
            logits = self._model(torch.tensor([token_ids])).logits[0, :-1].double()  # [tokens - 1, vocabulary]
        finally:
            torch.set_num_threads(num_threads)
        own = torch.tensor(token_ids[1:])[:, None]
        best = logits.topk(2, dim=-1).values
        return Judgement(
            logprobs=torch.log_softmax(logits, -1).gather(1, own)[:, 0].tolist(),
            behind=(best[:, :1] - logits.gather(1, own))[:, 0].tolist(),
            gaps=(best[:, 0] - best[:, 1]).tolist(),
        )
