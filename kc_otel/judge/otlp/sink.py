"""Destination of received telemetry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Protocol

from kc_otel.judge.otlp.request_limits import Limits


@dataclass(frozen=True, slots=True)
class ExportResult:
    """Outcome of a request that was read: items that the sender must not send again, why, and the seconds it took."""

    rejected: int = 0
    message: str = ""
    seconds: float = 0.0


class TelemetrySink(Protocol):
    """Takes decoded metrics, on the servers' event loop: quickly, or as a coroutine that waits."""

    def metrics(self, request: Any) -> ExportResult | Awaitable[ExportResult]:
        """Take an ExportMetricsServiceRequest; a `ThrottledError` makes the sender wait and send again."""
        ...


class ColumnSink(ABC):
    """A sink that can read metrics by itself, quicker than protobuf does."""

    @abstractmethod
    def columns(self, body: bytes, limits: Limits) -> Any | None:
        """A serialized ExportMetricsServiceRequest in a form that `metrics` takes; None where it has to be decoded."""
