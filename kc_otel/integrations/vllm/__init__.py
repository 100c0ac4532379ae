"""vLLM: what its requests sampled, with log-probabilities, kept for the comparison with the training kernel.

    KC_OTEL_CONTRACT=contracts/policy.yaml vllm serve MODEL                 # nothing else to change
    opentelemetry-instrument python -m vllm.entrypoints.openai.api_server   # the same under OpenTelemetry's launcher

    from kc_otel.integrations.vllm import KernelContractInstrumentor          # or in a program of your own

    KernelContractInstrumentor().instrument(contract="contracts/policy.yaml", spool="requests.sqlite")

The environment variables are those of `kc_otel.integrations.vllm.settings`. Importing this needs no vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kc_otel.integrations.vllm.completion import Completion
    from kc_otel.integrations.vllm.delivery import RecorderSink, RequestSink
    from kc_otel.integrations.vllm.instrumentor import KernelContractInstrumentor

__all__ = ["Completion", "KernelContractInstrumentor", "RecorderSink", "RequestSink"]

_HOMES: Final = {
    "Completion": "completion",
    "KernelContractInstrumentor": "instrumentor",
    "RecorderSink": "delivery",
    "RequestSink": "delivery",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
