"""Where received telemetry goes, and the count of what was received."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from kc_otel.judge.otlp.request_limits import Limits

__all__ = ["ColumnSink", "ExportResult", "RequestCounts", "TelemetrySink"]


@dataclass(frozen=True, slots=True)
class ExportResult:
    """What became of one request that could be read.

    Attributes:
        rejected: Data points, spans or log records that were not taken; the sender must not send them again.
        message: Why, for the person who reads the sender's log; empty when there is nothing to say.
    """

    rejected: int = 0
    message: str = ""


class TelemetrySink(Protocol):
    """Takes decoded requests. The methods run on the servers' event loop: they are quick, or coroutines that wait.

    A method may raise `ThrottledError` to make the sender wait and send again.
    """

    def metrics(self, request: Any) -> ExportResult | Awaitable[ExportResult]:
        """Take an ExportMetricsServiceRequest."""
        ...

    def traces(self, request: Any) -> ExportResult | Awaitable[ExportResult]:
        """Take an ExportTraceServiceRequest."""
        ...

    def logs(self, request: Any) -> ExportResult | Awaitable[ExportResult]:
        """Take an ExportLogsServiceRequest."""
        ...


class ColumnSink(ABC):
    """A sink that can read metrics by itself, quicker than protobuf does."""

    @abstractmethod
    def columns(self, body: bytes, limits: Limits) -> Any | None:
        """A serialized ExportMetricsServiceRequest in a form that `metrics` takes; None where it has to be decoded."""


@dataclass(slots=True)
class RequestCounts:
    """Requests by transport (`grpc`, `http`, `api`) and outcome, for the metric kc.evaluator.requests."""

    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, transport: str, outcome: str) -> None:
        """Count one request."""
        self._counts[transport, outcome] += 1

    def snapshot(self) -> Mapping[tuple[str, str], int]:
        """Counts so far, by (transport, outcome)."""
        return dict(self._counts)
