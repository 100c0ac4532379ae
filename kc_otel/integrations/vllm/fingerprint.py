"""What a vLLM engine is, as a kernel version: from its configuration, and from workers what only they know."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kc_otel.record.kernel import Kernel

__all__ = ["WORKER_METHOD", "described", "kernel_of", "logprobs_mode_of"]

WORKER_METHOD: Final = "kc_otel_described"
"""Name under which the worker's class gets `described`, so that `collective_rpc` can call it."""

_SPLITS: Final = (
    ("tp", "tensor_parallel_size"),
    ("pp", "pipeline_parallel_size"),
    ("dp", "data_parallel_size"),
    ("dcp", "decode_context_parallel_size"),
)
_ENVIRONMENT: Final = ("VLLM_BATCH_INVARIANT", "VLLM_CPU_ATTN_SPLIT_KV", "VLLM_CPU_INT4_W4A8")
"""Variables that change what vLLM computes without appearing in its configuration."""
_MODES: Final = {"raw_logprobs": "raw", "processed_logprobs": "processed"}


def described(worker: Any) -> dict[str, str]:
    """What only a worker knows; it runs there, as a method of the worker.

    Returns:
        `attention`: backends of the model's attention layers, and `hardware`: the device's name.
    """
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    return {"attention": "+".join(sorted(backends)), "hardware": _hardware()}


def kernel_of(
    config: Any, version: str, workers: Sequence[Mapping[str, str]], environment: Mapping[str, str]
) -> Kernel:
    """The kernel version of an engine.

    Args:
        config: vLLM's `VllmConfig`.
        version: vLLM's version.
        workers: What each worker said of itself; empty when none could be asked.
        environment: The process's environment variables.
    """
    model, cache, parallel, compilation = (
        config.model_config, config.cache_config, config.parallel_config, config.compilation_config,
    )  # fmt: skip
    splits = [f"{short}={size}" for short, name in _SPLITS if (size := getattr(parallel, name, 1)) != 1]
    extra: dict[str, Any] = {name.lower(): environment[name] for name in _ENVIRONMENT if environment.get(name)}
    speculative = getattr(config, "speculative_config", None)
    if speculative is not None:
        extra["speculative"] = str(getattr(speculative, "method", "yes"))
    return Kernel(
        "vllm",
        version=version,
        dtype=model.dtype,
        quantization=model.quantization,
        kv_cache_dtype=cache.cache_dtype,
        attention=_joined(workers, "attention"),
        parallelism=",".join(splits),
        compile=_compilation(model, compilation),
        hardware=_joined(workers, "hardware"),
        extra=extra,
    )


def logprobs_mode_of(config: Any) -> str | None:
    """`raw` or `processed`; None when the engine reports logits in place of log-probabilities."""
    return _MODES.get(str(getattr(config.model_config, "logprobs_mode", "raw_logprobs")))


def _compilation(model: Any, compilation: Any) -> str:
    if model.enforce_eager:
        return "eager"
    graphs = getattr(compilation.cudagraph_mode, "name", compilation.cudagraph_mode)
    mode = getattr(compilation, "mode", None)
    return f"{getattr(mode, 'name', mode)},graphs={graphs}".lower()


def _joined(workers: Sequence[Mapping[str, str]], name: str) -> str:
    return "+".join(sorted({worker[name] for worker in workers if worker.get(name)}))


def _hardware() -> str:
    import torch  # noqa: PLC0415 - only where vLLM runs
    from vllm.platforms import current_platform  # noqa: PLC0415

    name = str(current_platform.get_device_name())
    # Every CPU is "cpu" there, and the instructions that it has decide which kernels torch takes.
    return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}" if name == "cpu" else name
