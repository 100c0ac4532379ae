"""Parts of a recorder in a process: a worker that measures, and a loop that exports."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

from opentelemetry.sdk.metrics.export import MetricExporter

from kc_otel.contract.model import Contract
from kc_otel.record.kernel import KernelPair
from kc_otel.record.measurer import Measurer
from kc_otel.record.telemetry.counters import Counters, RecorderStats
from kc_otel.record.telemetry.export import ExportLoop
from kc_otel.record.work import QueuedBatch, Work
from kc_otel.record.worker import BoundedWorker

_WORK_BYTES: Final = 1024
"""Bytes that a queued batch counts besides its arrays, so that empty batches cannot pile up either."""
_EXPIRY_SECONDS: Final = 1.0
_REASONS: Final = {
    "failed": ("measure-failed", ""),
    "closed": ("shutdown", "the recorder is shut down"),
    "queue-full": ("queue-full", "measuring is slower than recording: lower sampling or raise queue_bytes"),
    "too-large": ("too-large", "raise queue_bytes"),
}
"""Reasons of the worker -> the recorder's, and what to do about it."""


class Engine:
    """Measures on a thread of its own and exports on another; every method may be called from any thread."""

    def __init__(self, measurer: Measurer, counters: Counters, queue_bytes: int, loop: ExportLoop | None) -> None:
        self._measurer = measurer
        self.counters = counters
        self._loop = loop
        self._worker: BoundedWorker[Work] = BoundedWorker(
            self._measure, self._dropped, name="kc-otel-measure", max_bytes=queue_bytes, wake=self._until_expiry
        )

    def submit(self, work: QueuedBatch) -> None:
        """Queue a copy of a batch that holds the caller's own arrays, or count why not. Never raises."""
        try:
            size = _WORK_BYTES + work.nbytes
        except Exception as error:  # noqa: BLE001 - whatever it was that the caller gave
            self.counters.dropped("capture-failed", error)
            return
        self._worker.put(work.taken, size)

    def rollout(self, pair: KernelPair) -> None:
        """Make `pair` the current one, after what is queued; the streams of other pairs are exported once more."""
        if self._worker.open:
            self._worker.put(lambda: pair, 0)

    def force_flush(self, timeout: float) -> bool:
        """Measure the queue and export; return True if both were done within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        drained = self._worker.flush(timeout)
        return (self._loop is None or self._loop.force_flush(deadline - time.monotonic())) and drained

    def request_export(self) -> None:
        """Ask for an export of what is measured by now, without waiting for it."""
        if self._loop is not None:
            self._loop.request()

    def shutdown(self, timeout: float) -> bool:
        """Measure the queue, export and stop; return True if that was done within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        drained = self._worker.close(timeout)
        self._measurer.close()
        return (self._loop is None or self._loop.shutdown(deadline - time.monotonic())) and drained

    def stats(self) -> RecorderStats:
        """Return the counts so far."""
        batches, size = self._worker.depth()
        sides, tokens = self._measurer.unpaired
        return replace(
            self.counters.values(),
            queued_batches=batches,
            queued_bytes=size,
            unpaired=sides,
            unpaired_tokens=tokens,
            slices_as_other=self._measurer.slices_as_other,
        )

    def _measure(self, waiting: Sequence[Work]) -> None:
        self._measurer.expire(time.monotonic())
        for work in waiting:
            if self._measurer.handle(work, time.monotonic()) and self._loop is not None:
                self._loop.request()

    def _until_expiry(self) -> float | None:
        """Sides and prompts that wait for others have to be given up in time, whether anything else comes or not."""
        return _EXPIRY_SECONDS if self._measurer.waiting else None

    def _dropped(self, reason: str, why: object, count: int) -> None:
        known, remedy = _REASONS.get(reason, (reason, ""))
        self.counters.dropped(known, f"{why}; {remedy}" if remedy else why, count)


class DriftLog(Protocol):
    """Source of a recorder's scalars; `kc_otel.TrainingLog` is one. No method may block or raise."""

    def attach(self, contract: Contract) -> Sequence[MetricExporter]:
        """Start in this process, for a contract; return exporters that also receive the recorder's exports."""

    def scalars(self) -> Mapping[str, float]:
        """Finite numbers by name, as of the newest verdicts."""
