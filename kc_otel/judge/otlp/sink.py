"""Destination of received telemetry, and counts of what was received."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from kc_otel.judge.otlp.request_limits import Limits

DURATION_BOUNDS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""Upper bounds of the buckets of durations, seconds: those that OpenTelemetry gives http.server.request.duration."""


@dataclass(frozen=True, slots=True)
class ExportResult:
    """Outcome of a request that was read: items that the sender must not send again, why, and the seconds it took."""

    rejected: int = 0
    message: str = ""
    seconds: float = 0.0


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
class Durations:
    """A histogram of durations in seconds: counts up to each of DURATION_BOUNDS, and beyond the last; the sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(DURATION_BOUNDS) + 1))
    sum: float = 0.0

    def __int__(self) -> int:
        """Total number of durations."""
        return sum(self.counts)

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(DURATION_BOUNDS, seconds)] += 1
        self.sum += seconds

    def copy(self) -> Durations:
        """Return a copy of the current values."""
        return Durations(list(self.counts), self.sum)


@dataclass(slots=True)
class RequestCounts:
    """Requests by transport (`grpc`, `http`, `api`) and outcome, and how long they took.

    They are the metrics kc.evaluator.requests and kc.evaluator.request.duration.

    Attributes:
        tell: Called with the transport, the outcome and the seconds of each request that was timed.
        in_flight: Says how many bytes of requests have arrived and are not answered yet.
    """

    tell: Callable[[str, str, float], None] = lambda _transport, _outcome, _seconds: None
    in_flight: Callable[[], int] = lambda: 0
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _durations: dict[tuple[str, str], Durations] = field(default_factory=dict)

    def add(self, transport: str, outcome: str, began: float | None = None) -> None:
        """Count one request, which began at `began` of `time.perf_counter`; None where nobody knows."""
        self._counts[transport, outcome] += 1
        if began is not None:
            seconds = time.perf_counter() - began
            self._durations.setdefault((transport, outcome), Durations()).add(seconds)
            self.tell(transport, outcome, seconds)

    def durations(self) -> Mapping[tuple[str, str], Durations]:
        """Durations of requests so far, by (transport, outcome)."""
        return {of: found.copy() for of, found in self._durations.items()}

    def snapshot(self) -> Mapping[tuple[str, str], int]:
        """Counts so far, by (transport, outcome)."""
        return dict(self._counts)
