"""The ops' call signatures, as types. Each is the schema of the same name in docs/architecture.md."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ReshapeAndCache(Protocol):
    def __call__(
        self,
        key: Tensor,
        value: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Scatter new keys and values to their slots in the cache.

        Args:
            key: [num_tokens, num_kv_heads, head_dim], the token stride free.
            value: as key.
            k_cache: [num_blocks, num_kv_heads, block_size, head_dim], written; K dimension-major on the CPU.
            v_cache: [num_blocks, num_kv_heads, block_size, head_dim], written.
            slot_mapping: int64 [num_tokens], block * block_size + offset; -1: the token is skipped.
            k_scale: fp32; INT8 cache: [num_blocks, num_kv_heads, block_size], written; FP8: [num_kv_heads], read; else None.
            v_scale: as k_scale.
        """


class PagedAttention(Protocol):
    def __call__(
        self,
        out: Tensor,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        max_query_len: int,
        max_seq_len: int,
        scale: float,
        sliding_window: int = 0,
        logit_softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        lse: Tensor | None = None,
        plan: Tensor | None = None,
        workspace: Tensor | None = None,
    ) -> None:
        """Causal attention of a mixed batch over the paged KV cache (Kwon et al., 2023).

        Args:
            out: [num_tokens, num_heads, head_dim], written; the token stride free.
            query: [num_tokens, num_heads, head_dim], sequences end to end; the token stride free.
            k_cache: [num_blocks, num_kv_heads, block_size, head_dim]; K dimension-major on the CPU.
            v_cache: [num_blocks, num_kv_heads, block_size, head_dim].
            block_table: int32 [num_seqs, max_blocks].
            query_start_loc: int32 [num_seqs + 1]; sequence i owns the rows from its element to the next.
            seq_lens: int32 [num_seqs], tokens in the cache; a sequence's queries are the last of them.
            max_query_len: no query is longer.
            max_seq_len: no element of seq_lens is larger.
            scale: of the logits.
            sliding_window: positions a query sees, its own included; 0: all before it.
            logit_softcap: c of c * tanh(logit / c); 0: none.
            alibi_slopes: fp32 [num_heads]; adds slope * (key position - query position).
            sinks: fp32 [num_heads], one more logit in each softmax's sum.
            k_scale: as reshape_and_cache's, read.
            v_scale: as k_scale.
            lse: fp32 [num_tokens, num_heads], written: log of each softmax's sum.
            plan: int32 [num_work, 4], split-KV work list; GPUs only.
            workspace: fp32 [size], written: partial results of split-KV; with plan.
        """


class CopyBlocks(Protocol):
    def __call__(self, pool: Tensor, block_mapping: Tensor) -> None:
        """Copy whole blocks inside one pool.

        Args:
            pool: [num_blocks, ...], contiguous, written.
            block_mapping: int64 [num_pairs, 2] on the pool's device: source, destination. No block is both.
        """


class SwapBlocks(Protocol):
    def __call__(self, src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
        """Copy whole blocks from one pool to another, on the device or in host memory.

        Args:
            src: [num_src_blocks, ...], contiguous.
            dst: [num_dst_blocks, ...], contiguous, written; blocks as large as src's.
            block_mapping: int64 [num_pairs, 2] in host memory: source, destination.
        """


class RmsNorm(Protocol):
    def __call__(self, out: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None:
        """out = input / sqrt(mean(input^2) + epsilon) * weight (Zhang and Sennrich, 2019).

        Args:
            out: [num_tokens, hidden_size], written; may be input.
            input: [num_tokens, hidden_size], the token stride free.
            weight: [hidden_size].
        """


class FusedAddRmsNorm(Protocol):
    def __call__(self, input: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
        """residual += input, then input = rms_norm(residual).

        Args:
            input: [num_tokens, hidden_size], written; the token stride free.
            residual: [num_tokens, hidden_size], written; the token stride free.
            weight: [hidden_size].
        """


class RotaryEmbeddingOp(Protocol):
    def __call__(
        self, positions: Tensor, query: Tensor, key: Tensor | None, cos_sin_cache: Tensor, is_neox: bool = True
    ) -> None:
        """Rotate the first rotary_dim dimensions of each head by its token's position (Su et al., 2021).

        Args:
            positions: int64 [num_tokens].
            query: [num_tokens, num_heads, head_dim], written; the token stride free.
            key: [num_tokens, num_kv_heads, head_dim], written; or None.
            cos_sin_cache: fp32 [max_position, rotary_dim], cosines then sines.
            is_neox: pairs are the two halves (NeoX); else neighbours (GPT-J).
        """


class SiluAndMul(Protocol):
    def __call__(self, out: Tensor, input: Tensor) -> None:
        """out = silu(input[:, :d]) * input[:, d:].

        Args:
            out: [num_tokens, d], written.
            input: [num_tokens, 2 d], the token stride free.
        """


class GeluAndMul(Protocol):
    def __call__(self, out: Tensor, input: Tensor, tanh_approximation: bool = True) -> None:
        """out = gelu(input[:, :d]) * input[:, d:].

        Args:
            out: [num_tokens, d], written.
            input: [num_tokens, 2 d], the token stride free.
            tanh_approximation: GELU's tanh form (Hendrycks and Gimpel, 2016); else by the error function.
        """


class RotaryReshapeAndCache(Protocol):
    def __call__(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos_sin_cache: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        is_neox: bool = True,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """`rotary_embedding` of queries and keys, then `reshape_and_cache`; the keys themselves stay as they are.

        Args:
            positions: int64 [num_tokens].
            query: [num_tokens, num_heads, head_dim], written; the token stride free.
            key: [num_tokens, num_kv_heads, head_dim], the token stride free.
            value: as key.
            cos_sin_cache: fp32 [max_position, rotary_dim], cosines then sines.
            k_cache: as `reshape_and_cache`.
            v_cache: as `reshape_and_cache`.
            slot_mapping: int64 [num_tokens]; a token with -1 has its query rotated only.
            is_neox: pairs are the two halves (NeoX); else neighbours (GPT-J).
            k_scale: as `reshape_and_cache`.
            v_scale: as `reshape_and_cache`.
        """


class MergeAttentionStates(Protocol):
    def __call__(self, out: Tensor, part_out: Tensor, part_lse: Tensor, part_start: Tensor, lse: Tensor | None = None) -> None:
        """Merge attention over disjoint sets of keys, in part order: each part counts by its share of the softmax's sum.

        Args:
            out: [num_rows, num_heads, head_dim], written; the row stride free.
            part_out: fp32 [num_parts, num_heads, head_dim].
            part_lse: fp32 [num_parts, num_heads], natural log; -inf for an empty part.
            part_start: int32 [num_rows + 1]; row i merges parts part_start[i]:part_start[i + 1].
            lse: fp32 [num_rows, num_heads], written; or None.
        """


class ApplyPenalties(Protocol):
    def __call__(
        self,
        logits: Tensor,
        prompt_mask: Tensor,
        output_counts: Tensor,
        repetition: Tensor,
        presence: Tensor,
        frequency: Tensor,
    ) -> None:
        """Repetition penalty on tokens of prompt or output, then frequency and presence penalties on those of the output.

        Args:
            logits: fp32 [num_rows, vocab_size], written; the row stride free.
            prompt_mask: bool [num_rows, vocab_size].
            output_counts: int32 [num_rows, vocab_size].
            repetition: fp32 [num_rows]; 1 for none.
            presence: fp32 [num_rows]; 0 for none.
            frequency: fp32 [num_rows]; 0 for none.
        """


class ApplyBitmask(Protocol):
    def __call__(self, logits: Tensor, bitmask: Tensor) -> None:
        """Set the logits of tokens whose bit is 0 to -inf.

        Args:
            logits: fp32 [num_rows, vocab_size], written; the row stride free.
            bitmask: int32 [num_rows, ceil(vocab_size / 32)], the lowest bit first.
        """


class SampleTopKTopP(Protocol):
    def __call__(
        self,
        token_ids: Tensor,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> None:
        """Draw a token a row after temperature, min_p, top_k and top_p; `pyengine.sampling.draw` has the rules.

        Args:
            token_ids: int64 [num_rows], written; -1 where the largest logit is not finite or a logit is NaN.
            logits: fp32 [num_rows, vocab_size], the row stride free; -inf for tokens that are ruled out.
            temperature: fp32 [num_rows]; 0 (below 1e-30) takes the most likely token.
            top_k: int32 [num_rows]; 0 for off.
            top_p: fp32 [num_rows], in (0, 1]; 1 for off.
            min_p: fp32 [num_rows], in [0, 1]; 0 for off.
            seeds: int64 [num_rows].
            positions: int64 [num_rows], of the token in the output; (seed, position) decides the draw.
        """


class GptqLinear(Protocol):
    def __call__(
        self,
        out: Tensor,
        input: Tensor,
        qweight: Tensor,
        scales: Tensor,
        qzeros: Tensor,
        group_size: int,
        bias: Tensor | None = None,
    ) -> None:
        """out = input weight^T + bias with 4-bit weights as GPTQ checkpoints have them (Frantar et al., 2022).

        A weight is (q - zero) * scale in input's type. Rows of k are in the order of their groups. Each sum has a fixed order
        of k, whatever the number of rows is; so it is in the next three ops. GPUs take fp16 and bf16.

        Args:
            out: [num_tokens, out_features], written; in input's type.
            input: [num_tokens, in_features], the token stride free.
            qweight: int32 [in_features / 8, out_features], the lowest k in the lowest bits.
            scales: [in_features / group_size, out_features], in input's type.
            qzeros: int32 [in_features / group_size, out_features / 8], zero - 1, the lowest column in the lowest bits.
            group_size: values of k that share scale and zero; a multiple of 32.
            bias: [out_features].
        """


class AwqLinear(Protocol):
    def __call__(
        self,
        out: Tensor,
        input: Tensor,
        qweight: Tensor,
        scales: Tensor,
        qzeros: Tensor,
        group_size: int,
        bias: Tensor | None = None,
    ) -> None:
        """As `gptq_linear`, with weights as AWQ checkpoints have them (Lin et al., 2023).

        Args:
            out: [num_tokens, out_features], written; in input's type.
            input: [num_tokens, in_features], the token stride free.
            qweight: int32 [in_features, out_features / 8]; a word's columns, from the lowest bits: 0 2 4 6 1 3 5 7.
            scales: [in_features / group_size, out_features], in input's type.
            qzeros: int32 [in_features / group_size, out_features / 8], zeros in the order of qweight's columns.
            group_size: values of k that share scale and zero; a multiple of 32.
            bias: [out_features].
        """


class Fp8Linear(Protocol):
    def __call__(self, out: Tensor, input: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> None:
        """out = input (weight * weight_scale)^T + bias with FP8 weights. GPUs take fp16 and bf16; a NaN code has no meaning.

        Args:
            out: [num_tokens, out_features], written; in input's type.
            input: [num_tokens, in_features], the token stride free.
            weight: e4m3 [out_features, in_features].
            weight_scale: fp32 [out_features], or [1] for all.
            bias: [out_features].
        """


class Int8Linear(Protocol):
    def __call__(
        self,
        out: Tensor,
        input: Tensor,
        input_scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """out = (input * input_scale) (weight * weight_scale)^T + bias, input and weight int8; sums are exact.

        Args:
            out: [num_tokens, out_features], written.
            input: int8 [num_tokens, in_features], the token stride free; see `quantize_int8_rows`.
            input_scale: fp32 [num_tokens].
            weight: int8 [out_features, in_features].
            weight_scale: fp32 [out_features], or [1] for all.
            bias: [out_features], in out's type.
        """


class QuantizeInt8Rows(Protocol):
    def __call__(self, out: Tensor, scale: Tensor, input: Tensor) -> None:
        """Round each row to int8, to nearest even, with scale = max |row| / 127. Not a finite row: scale NaN, codes 0.

        Args:
            out: int8 [num_tokens, in_features], written.
            scale: fp32 [num_tokens], written.
            input: [num_tokens, in_features], the token stride free.
        """


class PackLinearWeight(Protocol):
    def __call__(self, packed: Tensor, weight: Tensor) -> None:
        """packed[p, k, j] = weight[16 p + j, k], zero beyond the last row. CPU only.

        Args:
            packed: [ceil(out_features / 16), in_features, 16], written.
            weight: [out_features, in_features].
        """


class LinearOp(Protocol):
    def __call__(self, out: Tensor, input: Tensor, packed_weight: Tensor, bias: Tensor | None = None) -> None:
        """out = input weight^T + bias, each sum in the order of k whatever the number of rows is. CPU only.

        Args:
            out: [num_tokens, out_features], written; in input's type or fp32.
            input: [num_tokens, in_features], the token stride free.
            packed_weight: [ceil(out_features / 16), in_features, 16], see `pack_linear_weight`.
            bias: [out_features].
        """


class GatedLinear(Protocol):
    def __call__(self, out: Tensor, input: Tensor, packed_weight: Tensor, activation: str, bias: Tensor | None = None) -> None:
        """out = act(input gate^T) * (input up^T), with the bits of `linear` and the activation apart. CPU only.

        Args:
            out: fp32 [num_tokens, out_features], written.
            input: fp32 [num_tokens, in_features], the token stride free.
            packed_weight: of panels turn about of gate and up, 2 ceil(out_features / 16) in all; see `pack_linear_weight`.
            activation: silu or gelu_tanh.
            bias: [2 out_features], the gate's first.
        """


class PackQuantizedWeight(Protocol):
    def __call__(self, packed: Tensor, weight: Tensor, format: str) -> None:
        """Rearrange a weight's GGUF blocks for `quantized_linear`; no value changes. CPU only.

        Args:
            packed: uint8 [ceil(out_features / 16), in_features / block size, tile bytes], written; csrc/quantization/params.h
                has the layout.
            weight: uint8 [out_features, row bytes], the blocks as the file has them; the row stride free.
            format: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 (blocks of 32), Q4_K, Q5_K or Q6_K (blocks of 256).
        """


class QuantizedLinear(Protocol):
    def __call__(self, out: Tensor, input: Tensor, packed_weight: Tensor, format: str, bias: Tensor | None = None) -> None:
        """out = input weight^T + bias with each row of input rounded to int8, one scale for 32 values. CPU only.

        Products of 32 values are exact integers, and their scaled sums are added in the order of k, whatever the number of
        rows is. A row with a NaN or an infinity gives NaN.

        Args:
            out: [num_tokens, out_features], written; in input's type or fp32.
            input: [num_tokens, in_features], the token stride free.
            packed_weight: see `pack_quantized_weight`.
            format: packed_weight's.
            bias: [out_features].
        """


class QuantizedGatedLinear(Protocol):
    def __call__(
        self,
        out: Tensor,
        input: Tensor,
        packed_weight: Tensor,
        format: str,
        activation: str,
        bias: Tensor | None = None,
    ) -> None:
        """out = act(input gate^T) * (input up^T), products as `quantized_linear` has them. CPU only.

        Args:
            out: [num_tokens, out_features], written; in input's type or fp32.
            input: [num_tokens, in_features], the token stride free.
            packed_weight: of panels turn about of gate and up, 2 ceil(out_features / 16) in all; see `pack_quantized_weight`.
            format: packed_weight's.
            activation: silu or gelu_tanh.
            bias: [2 out_features], the gate's first.
        """


class QuantizedEmbedding(Protocol):
    def __call__(self, out: Tensor, indices: Tensor, packed_weight: Tensor, format: str) -> None:
        """out[i] = row indices[i] of the weight, dequantised. CPU only.

        Args:
            out: [num_tokens, in_features], written; fp32, fp16 or bf16.
            indices: int64 [num_tokens].
            packed_weight: see `pack_quantized_weight`.
            format: packed_weight's.
        """


class PackW8A16Weight(Protocol):
    def __call__(self, packed: Tensor, factors: Tensor, weight: Tensor) -> None:
        """Round a weight to int8 for `w8a16_linear`, a group of a row's values to one scale = max |value| / 127. CPU only.

        There are as few groups of at most 576 values as can be, of as even a number of steps of 64 as can be.

        Args:
            packed: int8 [ceil(out_features / 32), ceil(in_features / 64), 2048], written; csrc/quantization/params.h has the
                layout.
            factors: fp32 [ceil(out_features / 32), ceil(in_features / 576), 64], written: scales (NaN for values that are not
                finite) and sums of the integers.
            weight: fp32 [out_features, in_features], the row stride free.
        """


class W8A16Linear(Protocol):
    def __call__(self, out: Tensor, input: Tensor, packed_weight: Tensor, factors: Tensor, bias: Tensor | None = None) -> None:
        """out = input weight^T + bias with int8 weights and each row of input rounded to 16 bits. CPU only.

        A group's sums are exact integers. Scaled, they are added in the order of k, whatever the number of rows is. A row with
        a NaN or an infinity gives NaN.

        Args:
            out: [num_tokens, out_features], written; in input's type or fp32.
            input: [num_tokens, in_features], the token stride free.
            packed_weight: see `pack_w8a16_weight`.
            factors: packed_weight's.
            bias: [out_features].
        """


class W8A16GatedLinear(Protocol):
    def __call__(
        self,
        out: Tensor,
        input: Tensor,
        packed_weight: Tensor,
        factors: Tensor,
        activation: str,
        bias: Tensor | None = None,
    ) -> None:
        """out = act(input gate^T) * (input up^T), products as `w8a16_linear` has them. CPU only.

        Args:
            out: [num_tokens, out_features], written; in input's type or fp32.
            input: [num_tokens, in_features], the token stride free.
            packed_weight: of panels turn about of gate and up, 2 ceil(out_features / 32) in all; see `pack_w8a16_weight`.
            factors: packed_weight's.
            activation: silu or gelu_tanh.
            bias: [2 * out_features], the gate's first.
        """


class W8A16Embedding(Protocol):
    def __call__(self, out: Tensor, indices: Tensor, packed_weight: Tensor, factors: Tensor) -> None:
        """out[i] = row indices[i] of the weight, dequantised. CPU only.

        Args:
            out: [num_tokens, in_features], written; fp32, fp16 or bf16.
            indices: int64 [num_tokens].
            packed_weight: see `pack_w8a16_weight`.
            factors: packed_weight's.
        """


class Argmax(Protocol):
    def __call__(self, token_ids: Tensor, maxima: Tensor, logits: Tensor) -> None:
        """The largest logit of each row and its token: of equals the lowest id, the first NaN if there is one. CPU only.

        Args:
            token_ids: int64 [num_rows], written.
            maxima: fp32 [num_rows], written.
            logits: fp32 [num_rows, vocab_size], the row stride free.
        """
