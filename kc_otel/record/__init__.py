"""What a trainer or an engine imports: a recorder of two kernels' log-probabilities, logits and operators.

    from kc_otel.record import Kernel, Recorder

`measure` says what drift is, in NumPy and torch; `telemetry` makes OTLP of it, the rest is between.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kc_otel.record.engine import RecorderStats
    from kc_otel.record.kernel import Kernel
    from kc_otel.record.recorder import Recorder
    from kc_otel.record.rollout_quarantine import Quarantine, quarantine

__all__ = ["Kernel", "Quarantine", "Recorder", "RecorderStats", "quarantine"]

_HOMES: Final = {
    "Kernel": "kernel",
    "Quarantine": "rollout_quarantine",
    "Recorder": "recorder",
    "RecorderStats": "engine",
    "quarantine": "rollout_quarantine",
}


def __getattr__(name: str) -> Any:
    # When first used: a tool that only needs a kernel's fingerprint loads no exporter.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
