"""The configuration tree.

`EngineArgs` is what a user may set: every field is an `LLM` argument and a server flag of the same name. `resolve` turns it,
with what the checkpoint and the machine say, into an `EngineConfig` once; after that nothing changes. No environment variable
takes part (the kernels' forced instruction set and the log level are read where they apply, once).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pyengine.errors import ConfigError
from pyengine.tenants import Tenant

Device = Literal["auto", "cpu", "cuda", "emulated"]
ResolvedDevice = Literal["cpu", "cuda", "emulated"]
DType = Literal["float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"]
PreemptionMode = Literal["auto", "recompute", "swap"]
SchedulingPolicy = Literal["fcfs", "priority"]
#: Who uses an engine: a program that wants throughput, or clients that watch their streams. Defaults may differ (vLLM's term).
UsageContext = Literal["llm_class", "server"]

#: quant_method of Hugging Face folders whose weights can be run.
CHECKPOINT_QUANTIZATIONS = ("gptq", "awq", "fp8", "compressed-tensors")
#: What `quantization` may be. gguf: the file's own blocks; int8, int4: blocks made from plain weights at load.
QUANTIZATIONS = ("none", "gguf", "int8", "int4", *CHECKPOINT_QUANTIZATIONS)
#: What a step may take beside streams by default, of the time that it would take without prompt tokens: servers on CPUs.
SERVER_MAX_STEP_RATIO = 3.0
HEAD_DIMS = (32, 64, 80, 96, 112, 120, 128, 192, 256)
GIB = 1024**3


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
    quantization: str | None = None  # the checkpoint's own by default; int8, int4: made from plain weights; none: dequantised
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
    seed: int = 0  # of weights that are random and of nothing else: unseeded requests differ
    num_threads: int | None = None  # CPU kernel threads; the process's cores by default
    enforce_eager: bool = False  # run each step op by op, recording none to replay it
    tensor_parallel_size: int = 1  # devices that share each layer's weights
    disable_log_stats: bool = False  # no periodic log line with throughput and KV usage

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer", "revision", "download_dir", "served_model_name", "chat_template"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(name, f"must be a text that is not empty, got {value!r}")
        for name in ("block_size", "long_prefill_token_threshold", "seed"):
            if not isinstance(getattr(self, name), int):
                raise ConfigError(name, f"must be an integer, got {getattr(self, name)!r}")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_kv_blocks", "num_threads"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(name, f"must be a positive integer, got {value!r}")
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

    has_cuda: bool
    available_memory: int  # bytes of the memory that the KV pool comes from
    num_cores: int


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
    seed: int = 0


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
    num_threads: int
    seed: int
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


_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}


def kv_bytes_per_block(arch: ModelArchConfig, block_size: int, kv_cache_dtype: str) -> int:
    """Bytes of one KV block over all layers, K and V, scales included."""
    values = 2 * arch.num_layers * arch.num_kv_heads * block_size
    scales = 4 * values if kv_cache_dtype == "int8" else 0  # one fp32 scale a token and head
    return values * arch.head_dim * _DTYPE_BYTES[kv_cache_dtype] + scales


def resolve_load(args: EngineArgs, arch: ModelArchConfig, hardware: HardwareInfo) -> LoadConfig:
    """Device, dtype and threads, and whatever can be refused before weights are read. Pure; `resolve` agrees with it.

    Raises:
        ConfigError: naming the argument that does not fit.
    """
    device = _resolve_device(args, hardware)
    if arch.head_dim not in HEAD_DIMS:
        raise ConfigError("model", f"head size {arch.head_dim} is not supported; supported: {HEAD_DIMS}")
    _check_step_fits(args, arch, hardware)
    limit = arch.max_position_embeddings
    if args.max_model_len is not None and args.max_model_len > limit:
        raise ConfigError("max_model_len", f"{args.max_model_len} is more than the model's own {limit}")
    return LoadConfig(
        device=device,
        dtype=_resolve_dtype(args, arch, device),
        quantization=_resolve_quantization(args, arch, device),
        num_threads=args.num_threads or hardware.num_cores,
        seed=args.seed,
        max_num_batched_tokens=_resolve_token_budget(args, device, args.max_model_len or limit),
        max_num_seqs=args.max_num_seqs,
    )


def resolve(
    args: EngineArgs,
    model: str,
    arch: ModelArchConfig,
    hardware: HardwareInfo,
    tenants: tuple[Tenant, ...] = (),
    usage_context: UsageContext = "llm_class",
) -> EngineConfig:
    """The one place where defaults meet the model and the machine. Pure.

    Args:
        args: what the user set.
        model: the checkpoint's resolved name (args.model, or the default model's).
        arch: what the checkpoint says.
        hardware: what the machine says; memory after the weights are loaded.
        tenants: what the file args.tenants says.
        usage_context: who uses the engine.

    Raises:
        ConfigError: naming the argument that does not fit.
    """
    load = resolve_load(args, arch, hardware)
    device, dtype = load.device, load.dtype
    notes: list[str] = []
    max_model_len = args.max_model_len or arch.max_position_embeddings
    if arch.quantization == "gguf" and load.quantization is None:
        notes.append(f"GGUF weights are dequantised to {dtype}" + ("" if device == "cpu" else f" on {device}"))
    if load.quantization in CHECKPOINT_QUANTIZATIONS and device == "cpu":
        notes.append(f"{load.quantization} weights run as blocks of 32 values, which cpu kernels multiply with")
    kv_dtype: DType = dtype if load.quantization is None or device != "cpu" else "bfloat16"
    cache = _resolve_cache(args, arch, device, kv_dtype, max_model_len, hardware, notes)
    return EngineConfig(
        model=ModelConfig(
            model=model,
            served_model_name=args.served_model_name or model,
            arch=arch,
            dtype=dtype,
            max_model_len=max_model_len,
            tokenizer=args.tokenizer,
            skip_tokenizer_init=args.skip_tokenizer_init,
            chat_template=args.chat_template,
            quantization=load.quantization,
            seed=args.seed,
        ),
        cache=cache,
        scheduler=SchedulerConfig(
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=load.max_num_batched_tokens,
            max_model_len=max_model_len,
            long_prefill_token_threshold=args.long_prefill_token_threshold,
            enable_chunked_prefill=args.enable_chunked_prefill,
            policy=args.scheduling_policy,
            preemption_mode=args.preemption_mode,
            static_batching=args.static_batching,
            tenants=tenants,
            target_itl=args.target_itl_ms / 1e3 if args.target_itl_ms else None,
            max_step_ratio=_resolve_step_ratio(args, device, usage_context),
        ),
        device=DeviceConfig(device=device, num_threads=load.num_threads, enforce_eager=args.enforce_eager),
        notes=tuple(notes),
    )


def _resolve_device(args: EngineArgs, hardware: HardwareInfo) -> ResolvedDevice:
    if args.device == "auto":
        return "cuda" if hardware.has_cuda else "cpu"
    if args.device == "cuda" and not hardware.has_cuda:
        raise ConfigError("device", "cuda was asked for, but this torch sees no CUDA device")
    return args.device


def _check_step_fits(args: EngineArgs, arch: ModelArchConfig, hardware: HardwareInfo) -> None:
    """Refuse steps whose largest buffers alone are more than the memory that is there.

    The bounds are lower ones: of a sequence its row of fp32 logits, of a token its hidden state and MLP activation in 16 bits.
    """
    for name, unit, num_bytes in (
        ("max_num_seqs", "sequences", 4 * arch.vocab_size),
        ("max_num_batched_tokens", "tokens", 2 * (arch.hidden_size + arch.intermediate_size)),
    ):
        wanted, fit = getattr(args, name), hardware.available_memory // num_bytes
        # What is not asked for, or is no more than the default of max_num_seqs, is left for the KV pool to refuse.
        if wanted is not None and wanted > max(fit, EngineArgs.max_num_seqs):
            memory = f"{num_bytes} bytes each are more than the {hardware.available_memory / GIB:.2f} GiB available"
            raise ConfigError(name, f"{wanted} {unit} in a step, at least {memory}, which hold at most {fit}")


def _resolve_token_budget(args: EngineArgs, device: ResolvedDevice, max_model_len: int) -> int:
    """Query tokens of one step."""
    budget = args.max_num_batched_tokens or (2048 if device == "cuda" else 512)
    if not args.enable_chunked_prefill:
        if args.max_num_batched_tokens is not None and budget < max_model_len:
            raise ConfigError(
                "max_num_batched_tokens",
                f"{budget} must be max_model_len={max_model_len} or more without chunked prefill",
            )
        budget = max(budget, max_model_len)
    if budget < args.max_num_seqs and args.max_num_batched_tokens is not None:
        raise ConfigError("max_num_batched_tokens", f"{budget} must be max_num_seqs={args.max_num_seqs} or more")
    return max(budget, args.max_num_seqs)


def _resolve_step_ratio(args: EngineArgs, device: ResolvedDevice, usage_context: UsageContext) -> float | None:
    """On a CPU a step of prompts takes many times as long as one of streams; on a GPU hardly longer."""
    is_wanted = args.target_itl_ms is None and device == "cpu" and usage_context == "server"
    return SERVER_MAX_STEP_RATIO if is_wanted and args.enable_chunked_prefill and not args.static_batching else None


def _resolve_dtype(args: EngineArgs, arch: ModelArchConfig, device: ResolvedDevice) -> DType:
    scheme = _resolve_quantization(args, arch, device)
    needs_16_bits = device != "cpu" and scheme in CHECKPOINT_QUANTIZATIONS
    if args.dtype == "float32" and needs_16_bits:
        raise ConfigError("dtype", f"{scheme} weights run on {device} with float16 or bfloat16, not with float32")
    if args.dtype != "auto":
        return args.dtype
    if device != "cuda" and not needs_16_bits:
        return "float32"
    return "bfloat16" if arch.dtype == "float32" else arch.dtype


def _resolve_quantization(args: EngineArgs, arch: ModelArchConfig, device: ResolvedDevice) -> str | None:
    """The scheme that the kernels run; None: plain weights, dequantised where the checkpoint's are not."""
    scheme = args.quantization
    if scheme == "none":
        return None
    if scheme in CHECKPOINT_QUANTIZATIONS and scheme != arch.quantization:
        raise ConfigError("quantization", f"{scheme} was asked for, but the checkpoint's is {arch.quantization or 'none'}")
    if scheme in ("gguf", "int8", "int4") and device != "cpu":
        remedy = "leave it out to dequantise the weights" if scheme == "gguf" else "leave it out to run plain weights"
        raise ConfigError("quantization", f"{scheme} runs on cpu, not on {device}; {remedy}")
    if scheme in ("int8", "int4") and arch.quantization is not None:
        raise ConfigError(
            "quantization", f"{scheme} is made from plain weights, but the checkpoint's are {arch.quantization}; leave it out"
        )
    if scheme is None:
        return None if arch.quantization == "gguf" and device != "cpu" else arch.quantization
    return scheme


def _resolve_cache(
    args: EngineArgs,
    arch: ModelArchConfig,
    device: ResolvedDevice,
    auto_dtype: DType,
    max_model_len: int,
    hardware: HardwareInfo,
    notes: list[str],
) -> CacheConfig:
    kv_dtype: Any = {"auto": auto_dtype, "fp8": "fp8_e4m3"}.get(args.kv_cache_dtype, args.kv_cache_dtype)
    block_bytes = kv_bytes_per_block(arch, args.block_size, kv_dtype)
    blocks_per_seq = -(-max_model_len // args.block_size)
    if args.num_kv_blocks is not None:
        num_blocks = args.num_kv_blocks
        fit = hardware.available_memory // block_bytes
        if num_blocks > fit:
            size = f"{num_blocks * block_bytes / GIB:.2f} GiB; {hardware.available_memory / GIB:.2f} GiB are available"
            raise ConfigError("num_kv_blocks", f"{num_blocks} blocks of {block_bytes} bytes are {size}, for at most {fit}")
    else:
        share = args.gpu_memory_utilization or (0.9 if device == "cuda" else 0.5)
        fit = int(hardware.available_memory * share) // block_bytes
        num_blocks = min(fit, args.max_num_seqs * blocks_per_seq)
        if num_blocks < 1:
            raise ConfigError(
                "gpu_memory_utilization",
                f"no KV block of {block_bytes} bytes fits in {share:g} of {hardware.available_memory} bytes",
            )
        size = f"{num_blocks * block_bytes / GIB:.2f} GiB of {kv_dtype}"
        notes.append(f"KV pool: {num_blocks} blocks of {args.block_size} tokens ({size}, touched as used)")
    if num_blocks < blocks_per_seq:
        tokens = num_blocks * args.block_size
        notes.append(
            f"the KV pool holds {tokens} tokens, fewer than max_model_len={max_model_len}: longer requests are refused"
        )
    return CacheConfig(
        block_size=args.block_size,
        kv_cache_dtype=kv_dtype,
        num_blocks=num_blocks,
        num_cpu_blocks=int(args.swap_space * GIB) // block_bytes,
        enable_prefix_caching=args.enable_prefix_caching,
    )
