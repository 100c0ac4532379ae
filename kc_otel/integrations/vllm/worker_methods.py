"""Two methods that kc-otel adds to a vLLM worker: they describe its kernel and its weights.

Every process of vLLM imports this, and one that nobody asked to instrument imports nothing else of kc-otel.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

WORKER_METHOD: Final = "kc_otel_described"
"""Name under which the worker's class gets `described`, so that `collective_rpc` can call it."""
WEIGHTS_METHOD: Final = "kc_otel_weights"
"""Name under which the worker's class gets `worker_digests`."""
WORKER_MODULE: Final = "vllm.v1.worker.worker_base"


def configured(environment: Mapping[str, str]) -> bool:
    """Return whether the environment asks for instrumentation."""
    return bool(environment.get("KC_OTEL_CONTRACT")) and not is_disabled(environment)


def is_disabled(environment: Mapping[str, str]) -> bool:
    """Return whether OpenTelemetry is switched off for the process."""
    return environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def add_worker_method() -> None:
    """Let workers of this process answer what they are asked of their kernel and weights, if there may be any."""
    module = sys.modules.get(WORKER_MODULE)
    if module is not None:
        for name, method in WORKER_METHODS.items():
            setattr(module.WorkerBase, name, method)


def described(worker: Any) -> dict[str, str]:
    """Describe the kernel of a worker; runs there, as a method of the worker.

    Returns:
        `attention`: backends of the model's attention layers, and `hardware`: the device's name.
    """
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    return {"attention": "+".join(sorted(backends)), "hardware": _hardware()}


def worker_digests(worker: Any, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Digests of what a worker's model holds, under a trainer's names; it runs there, as a method of the worker."""
    from kc_otel.record.measure.weight_digests import module_digests  # noqa: PLC0415 - only where it is asked

    found: dict[str, Any] = module_digests(worker.get_model(), shapes)
    return found


def _hardware() -> str:
    import torch  # noqa: PLC0415 - only where vLLM runs
    from vllm.platforms import current_platform  # noqa: PLC0415

    name = str(current_platform.get_device_name())
    # Every CPU is "cpu" there, and the instructions that it has decide which kernels torch takes.
    return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}" if name == "cpu" else name


WORKER_METHODS: Final = {WORKER_METHOD: described, WEIGHTS_METHOD: worker_digests}
