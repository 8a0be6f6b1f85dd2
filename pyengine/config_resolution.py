"""From what a user set to what an engine runs with: defaults meet the checkpoint and the machine. Pure, and done once."""

from __future__ import annotations

from typing import Any

from pyengine.config import (
    CHECKPOINT_QUANTIZATIONS,
    GIB,
    CacheConfig,
    DeviceConfig,
    DType,
    EngineArgs,
    EngineConfig,
    HardwareInfo,
    LoadConfig,
    ModelArchConfig,
    ModelConfig,
    ResolvedDevice,
    SchedulerConfig,
    UsageContext,
)
from pyengine.errors import ConfigError
from pyengine.tenants import Tenant

HEAD_DIMS = (32, 64, 80, 96, 112, 120, 128, 192, 256)
#: What a step may take beside streams by default, of the time that it would take without prompt tokens: servers on CPUs.
SERVER_MAX_STEP_RATIO = 3.0
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
    quantization = _resolve_quantization(args, arch, device)
    return LoadConfig(
        device=device,
        dtype=_resolve_dtype(args, arch, device),
        quantization=quantization,
        repack=_resolve_repack(args, device, quantization, hardware),
        num_threads=args.num_threads or hardware.num_cores,
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
    if args.device == "auto" and hardware.has_cuda and not hardware.has_cuda_kernels:
        notes.append(
            "runs on the CPU: there is a CUDA device, but this build has no CUDA kernels; rebuild with PYENGINE_CUDA=1"
        )
    max_model_len = args.max_model_len or arch.max_position_embeddings
    if arch.quantization == "gguf" and load.quantization is None:
        notes.append(f"GGUF weights are dequantised to {dtype}" + ("" if device == "cpu" else f" on {device}"))
    if load.quantization in CHECKPOINT_QUANTIZATIONS and device == "cpu":
        notes.append(f"{load.quantization} weights run as blocks of 32 values, which cpu kernels multiply with")
    if load.repack:
        notes.append("quantised weights are repacked to 8 bits, 256 to a scale, and multiplied with 16-bit activations")
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
        return "cuda" if hardware.has_cuda and hardware.has_cuda_kernels else "cpu"
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
        raise ConfigError(
            "max_num_batched_tokens",
            f"{budget} tokens are fewer than the {args.max_num_seqs} sequences of a step; set max_num_seqs to {budget} or less",
        )
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


def _resolve_repack(args: EngineArgs, device: ResolvedDevice, quantization: str | None, hardware: HardwareInfo) -> bool:
    """Whether quantised weights are rounded anew, to 8 bits."""
    if args.repack == "int8" and device != "cpu":
        raise ConfigError("repack", f"int8 runs on cpu, not on {device}")
    if args.repack == "int8" and quantization is None:
        raise ConfigError("repack", "int8 is made from quantised weights, but these run unquantised; see quantization")
    return (
        device == "cpu" and quantization is not None and (args.repack == "int8" or (args.repack == "auto" and hardware.has_amx))
    )


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
