"""vLLM: sampled tokens of its requests, with log-probabilities, for the comparison with the training kernel.

    KC_OTEL_CONTRACT=contracts/policy.yaml vllm serve MODEL                 # nothing else to change
    opentelemetry-instrument python -m vllm.entrypoints.openai.api_server   # the same under OpenTelemetry's launcher

    from kc_otel.integrations.vllm import KernelContractInstrumentor          # or in a program of your own

    KernelContractInstrumentor().instrument(contract="contracts/policy.yaml", spool="requests.sqlite")

The environment variables are those of `kc_otel.integrations.vllm.settings`. Importing this needs no vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kc_otel._extras import lazy

if TYPE_CHECKING:
    from kc_otel.integrations.vllm.delivery import Completion, RequestSink
    from kc_otel.integrations.vllm.instrumentor import KernelContractInstrumentor

__all__ = ["Completion", "KernelContractInstrumentor", "RequestSink"]

_HOMES: Final = {"Completion": "delivery", "KernelContractInstrumentor": "instrumentor", "RequestSink": "delivery"}


__getattr__ = lazy(__name__, _HOMES)
