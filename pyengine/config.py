"""The configuration tree.

`EngineArgs` is what a user may set: every field is an `LLM` argument and a server flag of the same name. `config_resolution`
turns it, with what the checkpoint and the machine say, into an `EngineConfig` once; after that nothing changes. No environment
variable takes part (the kernels' forced instruction set and the log level are read where they apply, once).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from pyengine.errors import ConfigError
from pyengine.tenants import Tenant

Device = Literal["auto", "cpu", "cuda", "emulated"]
ResolvedDevice = Literal["cpu", "cuda", "emulated"]
DType = Literal["float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"]
Repack = Literal["auto", "none", "int8"]
PreemptionMode = Literal["auto", "recompute", "swap"]
SchedulingPolicy = Literal["fcfs", "priority"]
#: Who uses an engine: a program that wants throughput, or clients that watch their streams. Defaults may differ (vLLM's term).
UsageContext = Literal["llm_class", "server"]

#: quant_method of Hugging Face folders whose weights can be run.
CHECKPOINT_QUANTIZATIONS = ("gptq", "awq", "fp8", "compressed-tensors")
#: What `quantization` may be. gguf: the file's own blocks; int8, int4: blocks made from plain weights at load.
QUANTIZATIONS = ("none", "gguf", "int8", "int4", *CHECKPOINT_QUANTIZATIONS)
GIB = 1024**3
MAX_NUM_THREADS = 1024  # of the CPU kernels' pool: csrc/cpu/thread_pool.h


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """What a user may set. `None` means: decided by `resolve` from the model and the machine."""

    model: str | None = None  # Hugging Face folder, GGUF file or hub id; None: the default model
    tokenizer: str | None = None  # the model's own by default
    revision: str | None = None  # branch, tag or commit on the hub
    download_dir: str | None = None  # hub cache; Hugging Face's default by default
    served_model_name: str | None = None  # the name clients use; the model by default
    skip_tokenizer_init: bool = False  # token ids in and out only
    chat_template: str | None = None  # a Jinja file or text; the tokenizer's own by default
    device: Device = "auto"  # auto: cuda where torch has it, else cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # weights and activations
    quantization: str | None = None  # default: the checkpoint's (gguf, gptq, ...); int8, int4: of plain weights; none: plain
    repack: Repack = "auto"  # int8: quantised weights to 8 bits, activations to 16; none: as they are; auto: int8 with AMX
    kv_cache_dtype: KVCacheDType = "auto"  # auto: bfloat16 beside weights that are run quantised, else the model's dtype
    max_model_len: int | None = None  # longest prompt + output, tokens; the model's own by default
    max_num_seqs: int = 256  # sequences in one step
    max_num_batched_tokens: int | None = None  # query tokens in one step; cpu 512, cuda 2048
    long_prefill_token_threshold: int = 0  # a prompt's share of one step, tokens; 0: the whole budget
    enable_chunked_prefill: bool = True  # False: a prompt is computed in one step or not at all
    target_itl_ms: float | None = None  # ms between two tokens of a stream to keep to; 0: any; servers on cpu: thrice the least
    scheduling_policy: SchedulingPolicy = "fcfs"  # priority: a lower number is more urgent, and preempts
    tenants: str | None = None  # file that says who shares the engine, and on what terms; YAML or JSON
    block_size: int = 16  # tokens in one KV block; a power of two, 8 and up
    num_kv_blocks: int | None = None  # device blocks; fitted to memory by default
    gpu_memory_utilization: float | None = None  # share of available memory for the engine; cuda 0.9, cpu 0.5
    swap_space: float = 1.0  # CPU pool for swapped sequences, GiB; its pages are untouched until used
    preemption_mode: PreemptionMode = "auto"  # auto: the cheaper by estimate
    enable_prefix_caching: bool = True  # reuse the KV blocks of equal prompt prefixes
    static_batching: bool = False  # run each batch, rows that ended included, to its end; only to compare with
    seed: int | None = None  # makes requests without one repeatable, in the order in which they arrive; else each run differs
    num_threads: int | None = None  # CPU kernel threads; the process's cores by default
    enforce_eager: bool = False  # run each step op by op, recording none to replay it
    tensor_parallel_size: int = 1  # devices that share each layer's weights
    disable_log_stats: bool = False  # no periodic log line with throughput and KV usage

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer", "revision", "download_dir", "served_model_name", "chat_template", "tenants"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(name, f"must be a text that is not empty, got {value!r}")
        for name in ("block_size", "long_prefill_token_threshold"):
            if not isinstance(getattr(self, name), int):
                raise ConfigError(name, f"must be an integer, got {getattr(self, name)!r}")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise ConfigError("seed", f"must be an integer, got {self.seed!r}")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_kv_blocks", "num_threads"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(name, f"must be a positive integer, got {value!r}")
        if self.num_threads is not None and self.num_threads > MAX_NUM_THREADS:
            raise ConfigError("num_threads", f"must be {MAX_NUM_THREADS} at most, got {self.num_threads}")
        for name in ("swap_space", "gpu_memory_utilization", "target_itl_ms"):
            value = getattr(self, name)
            is_missing = value is None and name != "swap_space"
            if not is_missing and (not isinstance(value, int | float) or isinstance(value, bool)):
                raise ConfigError(name, f"must be a number, got {value!r}")
        for switch in fields(self):
            if isinstance(switch.default, bool) and not isinstance(getattr(self, switch.name), bool):
                raise ConfigError(switch.name, f"must be True or False, got {getattr(self, switch.name)!r}")
        if self.block_size < 8 or self.block_size & (self.block_size - 1):
            raise ConfigError("block_size", f"must be a power of two, 8 or more, got {self.block_size}")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError("gpu_memory_utilization", f"must be in (0, 1], got {self.gpu_memory_utilization}")
        if not 0 <= self.swap_space < 2**20:
            raise ConfigError("swap_space", f"must be 0 or more GiB, got {self.swap_space}")
        if self.target_itl_ms is not None:
            if not 0 <= self.target_itl_ms < 1e6:
                raise ConfigError("target_itl_ms", f"must be 0 or more milliseconds, got {self.target_itl_ms}")
            if self.target_itl_ms and (not self.enable_chunked_prefill or self.static_batching):
                raise ConfigError("target_itl_ms", "needs chunked prefill, and no static batching")
        if self.long_prefill_token_threshold < 0:
            raise ConfigError("long_prefill_token_threshold", "must be 0 or more")
        if self.tensor_parallel_size != 1:
            raise ConfigError("tensor_parallel_size", "only 1 is supported")
        if self.quantization not in (None, *QUANTIZATIONS):
            raise ConfigError("quantization", f"{self.quantization!r} is not supported; supported: {', '.join(QUANTIZATIONS)}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(name, f"must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")


_CHOICES: dict[str, tuple[str, ...]] = {
    "device": ("auto", "cpu", "cuda", "emulated"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "kv_cache_dtype": ("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"),
    "repack": ("auto", "none", "int8"),
    "preemption_mode": ("auto", "recompute", "swap"),
    "scheduling_policy": ("fcfs", "priority"),
}


@dataclass(frozen=True, kw_only=True)
class ModelArchConfig:
    """What a checkpoint says of its network, whatever its format. Loaders fill it; models read it."""

    architecture: str  # a class name of Hugging Face's, say LlamaForCausalLM
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    attn_logit_softcap: float = 0.0
    dtype: DType = "float32"  # of the checkpoint's weights
    quantization: str | None = None  # the checkpoint's scheme, say "gguf" or "gptq"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HardwareInfo:
    """What the machine offers. Measured once, at start."""

    has_cuda: bool  # torch sees a device
    has_cuda_kernels: bool = True  # in this build
    available_memory: int  # bytes of the memory that the KV pool comes from
    num_cores: int
    has_amx: bool = False  # and CPU kernels that use it


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    model: str  # folder, file or hub id, as given
    served_model_name: str
    arch: ModelArchConfig
    dtype: DType
    max_model_len: int
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    chat_template: str | None = None
    quantization: str | None = None
    seed: int | None = None  # of the seeds that unseeded requests get; None: those are random


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    block_size: int
    kv_cache_dtype: Literal["float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "int8"]
    num_blocks: int  # usable device blocks; ids 1..num_blocks. Block 0 is the null block, and is in no count
    num_cpu_blocks: int  # blocks of the swap pool; ids 0..num_cpu_blocks - 1
    enable_prefix_caching: bool


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int  # 0: none
    enable_chunked_prefill: bool
    policy: SchedulingPolicy
    preemption_mode: PreemptionMode
    static_batching: bool = False
    tenants: tuple[Tenant, ...] = ()  # none: every request is anybody's
    target_itl: float | None = None  # seconds that a step beside streams may take
    max_step_ratio: float | None = None  # or this many times what it would take without prompt tokens; None: any time


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """What must be known before the weights are loaded; the rest is resolved after, when the memory left is known."""

    device: ResolvedDevice
    dtype: DType
    quantization: str | None
    repack: bool = False  # quantised weights to 8 bits, for activations of 16
    num_threads: int
    max_num_batched_tokens: int = 0  # of the largest step, with max_num_seqs: what a profiling run computes; 0: none is made
    max_num_seqs: int = 0


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    device: ResolvedDevice
    num_threads: int
    enforce_eager: bool = False


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The resolved tree. Pure data: it can be compared, logged and sent to another process."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    device: DeviceConfig
    notes: tuple[str, ...] = field(default=())  # one line for each thing that was fitted to the machine
