"""kc-otel: kernel contracts on OpenTelemetry.

    import kc_otel

    train, inference = kc_otel.Kernel("torch", dtype="bfloat16"), kc_otel.Kernel("vllm", dtype="fp8")
    recorder = kc_otel.Recorder("contracts/policy.yaml", train=train, inference=inference)
    recorder.compare(train_logprobs, rollout_logprobs, mask=completion_mask)

Names are imported when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kc_otel.client.training_log import TrainingLog
    from kc_otel.contract import Contract, ContractError, load
    from kc_otel.record.kernel import Kernel
    from kc_otel.record.recorder import Recorder
    from kc_otel.report.notebook import compare

__all__ = ["Contract", "ContractError", "Kernel", "Recorder", "TrainingLog", "compare", "load"]

_HOMES: Final = {
    "Contract": "kc_otel.contract",
    "ContractError": "kc_otel.contract",
    "Kernel": "kc_otel.record.kernel",
    "Recorder": "kc_otel.record.recorder",
    "TrainingLog": "kc_otel.client.training_log",
    "compare": "kc_otel.report.notebook",
    "load": "kc_otel.contract",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - reads a file, and few ask

        return version("kc-otel")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
