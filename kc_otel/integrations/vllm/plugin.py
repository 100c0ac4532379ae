"""Plugin of vLLM's group `vllm.general_plugins`, called in each of its processes.

It may be called several times in a process, must not stop vLLM from starting, and does nothing unless enabled by
environment variables, which vLLM's processes inherit. One that nobody asked to instrument imports nothing else of
kc-otel, and its worker gets two methods, which describe its kernel and its weights.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

_log: Final = logging.getLogger("kc_otel")
WORKER_METHOD: Final = "kc_otel_described"
"""Name under which the worker's class gets `described`, so that `collective_rpc` can call it."""
WEIGHTS_METHOD: Final = "kc_otel_weights"  # name under which the worker's class gets `worker_digests`
WORKER_MODULE: Final = "vllm.v1.worker.worker_base"
_ERROR_LOGGED = "KC_OTEL_VLLM_ERROR_LOGGED"
"""Set for processes that this one starts, so that each of vLLM's does not say the same."""


def load() -> None:
    """Instrument this process if the environment says so; failures are logged once, by the first process."""
    try:
        # Also for a program that instruments itself, whose workers are other processes.
        add_worker_method()
        if not configured(os.environ):
            return
        log_with_vllm()  # before anything can go wrong
        from kc_otel.integrations.vllm.instrumentor import KernelContractInstrumentor  # noqa: PLC0415

        instrumentor = KernelContractInstrumentor()
        if not instrumentor.is_instrumented_by_opentelemetry:
            instrumentor.instrument(skip_dep_check=True)
    except Exception as error:  # noqa: BLE001 - whatever it is, vLLM has to start
        if not os.environ.get(_ERROR_LOGGED):
            os.environ[_ERROR_LOGGED] = "1"
            _log.error("kc-otel: vLLM is not instrumented: %s", error)


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
    """Describe the kernel of a worker, its attention layers and device; runs there, as a method of the worker."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    return {"attention": "+".join(sorted(backends)), "hardware": _hardware()}


def worker_digests(worker: Any, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Digests of what a worker's model holds, under a trainer's names; it runs there, as a method of the worker."""
    from kc_otel.record.measure.weight_tensors import module_digests  # noqa: PLC0415 - only where it is asked

    found: dict[str, Any] = module_digests(worker.get_model(), shapes)
    return found


def _hardware() -> str:
    import torch  # noqa: PLC0415 - only where vLLM runs
    from vllm.platforms import current_platform  # noqa: PLC0415

    name = str(current_platform.get_device_name())
    # Every CPU is "cpu" there, and the instructions that it has decide which kernels torch takes.
    return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()}" if name == "cpu" else name


WORKER_METHODS: Final = {WORKER_METHOD: described, WEIGHTS_METHOD: worker_digests}


def log_with_vllm() -> None:
    """Have the records of `kc_otel` go where vLLM's go, at its level, unless the program has handlers of its own.

    The root logger's handlers get them from INFO on, whatever level a dependency of vLLM gave that logger.
    """
    if _log.handlers:
        return
    level = _log.level
    if logging.getLogger().handlers:
        level = level or logging.INFO
    else:
        _log.parent = logging.getLogger("vllm")
    _log.setLevel(level)  # forgets which levels were enabled before, too
