"""A recorder's export loop, through the SDK's exporters.

The SDK's own metric pipeline aggregates one call per value, which is a hundred times too slow for tokens, and has no
way in for histograms that are already made. Its exporters and data classes are public, so the loop replaces only the
part between: it collects, wraps one resource around the metrics (the encoder merges two that are equal, so one export
owns one), and calls `MetricExporter.export`. Nothing here runs on a caller's thread except waiting with a deadline.

A fork waits until no export is under way, and none begins meanwhile: made in the middle of one, gRPC skips what
it does for a child, and the child dies or hangs now and then (2 in 42).
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol
from weakref import WeakSet

from opentelemetry import context
from opentelemetry.sdk.metrics.export import (
    ConsoleMetricExporter,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.util.types import AnyValue

from kc_otel.contract.model import Contract

VERSION: Final = importlib.metadata.version("kc-otel")
SCOPE: Final = InstrumentationScope("kc_otel", VERSION)
_FORK_SECONDS: Final = 1.0
"""Longest that a fork waits for exports to end: an endpoint that does not answer must not hold a program up."""
_loops: Final[WeakSet[ExportLoop]] = WeakSet()
_held: Final[list[threading.Lock]] = []


class DriftLog(Protocol):
    """Source of a recorder's scalars; `kc_otel.TrainingLog` is one. No method may block or raise."""

    def attach(self, contract: Contract) -> Sequence[MetricExporter]:
        """Start in this process, for a contract; return exporters that also receive the recorder's exports."""

    def scalars(self) -> Mapping[str, float]:
        """Finite numbers by name, as of the newest verdicts."""


def scope_of(contract: Contract, over: Collection[str] = ()) -> InstrumentationScope:
    """The scope of what a recorder exports: the version, slices and quantities of the contract that it applies.

    Slices `over` its cap on series are not among them: it counts them together as `other`.
    """
    slices = [f"{name}={digest}" for name, digest in contract.slice_digests.items() if name not in over]
    said: dict[str, AnyValue] = {
        "kc.contract.version": contract.metadata.version,
        "kc.contract.slices": slices,
        "kc.contract.quantities": sorted(set(contract.recorded_digests.values())),
    }
    return InstrumentationScope("kc_otel", VERSION, attributes=said)


class MetricSource(Protocol):
    """Source of the loop's metrics. Both methods are called by one thread at a time."""

    def collect(self, now: int) -> Sequence[Metric]:
        """Every stream as of `now`, unix nanoseconds, changed or not: a point per interval is the heartbeat."""

    def exported(self, error: object | None) -> None:
        """Report the result of the last export; None when every exporter accepted it."""


class ExportLoop:
    """Exports a source every `interval` seconds (inf for on request only), and once more when it is shut down.

    `exporters` makes the exporters, at once; it is called again with the next export when it raised. An export has
    `timeout` seconds.
    """

    def __init__(
        self,
        source: MetricSource,
        *,
        exporters: Callable[[], Sequence[MetricExporter]],
        resource: Resource,
        interval: float,
        timeout: float,
        scope: InstrumentationScope = SCOPE,
    ) -> None:
        self._source = source
        self._scope = scope
        self._make = exporters
        self._exporters: Sequence[MetricExporter] | None = None
        self._resource = resource
        self._interval = interval
        self._timeout = timeout
        self._changed = threading.Condition()
        self._asked = 0
        self._answered = 0
        self._accepted = True
        self._stopping = False
        self._closed = False
        self.exporting: Final = threading.Lock()
        _loops.add(self)
        try:
            # Not when they are first needed: a short program may need them at its exit, when the interpreter is too far
            # gone to import gRPC.
            self._exporters = exporters()
        except Exception as error:  # noqa: BLE001 - counted, and tried again with the next export
            source.exported(error)
        self._thread = threading.Thread(target=self._run, name="kc-otel-export", daemon=True)
        self._thread.start()

    def request(self) -> int:
        """Ask for an export now, without waiting for it; the ticket is answered when it is done."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()
            return self._asked

    def force_flush(self, timeout: float) -> bool:
        """Export now and wait at most `timeout` seconds; whether every exporter accepted in that time."""
        ticket = self.request()
        with self._changed:
            answered = self._changed.wait_for(
                lambda: self._answered >= ticket or not self._thread.is_alive(), max(timeout, 0.0)
            )
            return answered and self._answered >= ticket and self._accepted

    def shutdown(self, timeout: float) -> bool:
        """Export once more, close the exporters and stop, within `timeout` seconds; False if that was too short."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(max(timeout, 0.0))
        if not self._thread.is_alive():
            return self._accepted
        # The thread hangs in an export. Closing the exporter interrupts its retries; it may hang as well, so it
        # gets a thread of its own, and at interpreter exit, when none can be started, it is left alone.
        with suppress(RuntimeError):
            threading.Thread(target=self._close, name="kc-otel-close", daemon=True).start()
        return False

    def _run(self) -> None:
        # Exporters that are instrumented themselves must not make telemetry of telemetry.
        context.attach(context.set_value("suppress_instrumentation", True))
        stopping = False
        while not stopping:
            due = time.monotonic() + self._interval
            with self._changed:
                self._changed.wait_for(
                    lambda due=due: self._stopping or self._asked > self._answered or time.monotonic() >= due,  # type: ignore[misc]
                    None if math.isinf(self._interval) else self._interval,
                )
                ticket, stopping = self._asked, self._stopping
            error = self._export()
            # What no exporter takes, or a console shows, is not exported.
            if error is not None or any(not isinstance(e, ConsoleMetricExporter) for e in self._exporters or ()):
                self._source.exported(error)
            with self._changed:
                self._answered, self._accepted = ticket, error is None
                self._changed.notify_all()
        self._close()

    def _export(self) -> object | None:
        """Export once; return the reason for a failure, or None."""
        try:
            metrics = self._source.collect(time.time_ns())
            if self._exporters is None:
                self._exporters = self._make()
            data = MetricsData([ResourceMetrics(self._resource, [ScopeMetrics(self._scope, metrics, "")], "")])
            with self.exporting:
                refused = [_where(e) for e in self._exporters if not self._is_sent(e, data)]
        except Exception as error:  # noqa: BLE001 - an exporter is foreign code, and this thread has no caller
            return error
        return f"nothing gets through to {', '.join(refused)}; `kc-otel doctor` says why" if refused else None

    def _is_sent(self, exporter: MetricExporter, data: MetricsData) -> bool:
        """Return True if it was delivered; over HTTP, OpenTelemetry 1.39 raises where nobody listens."""
        try:
            return exporter.export(data, timeout_millis=self._timeout * 1000.0) is MetricExportResult.SUCCESS
        except OSError as error:
            if any(kind.__name__ == "ConnectionError" for kind in type(error).__mro__):  # Python's, or that of requests
                return False
            raise

    def _close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
        for exporter in self._exporters or ():
            try:
                exporter.shutdown(timeout_millis=self._timeout * 1000.0)
            except Exception as error:  # noqa: BLE001 - closing is best effort, and nobody is left to tell
                self._source.exported(error)


def _where(exporter: MetricExporter) -> str:
    """Return an exporter's destination: the endpoint of an OTLP exporter, the name of another."""
    return str(getattr(exporter, "_endpoint", "") or type(exporter).__name__)


def _before_fork() -> None:
    """Hold every export, as far as that takes no longer than a fork may wait."""
    end = time.monotonic() + _FORK_SECONDS
    for lock in [loop.exporting for loop in _loops]:
        if lock.acquire(timeout=max(end - time.monotonic(), 0.0)):
            _held.append(lock)


def _after_fork() -> None:
    while _held:
        _held.pop().release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
