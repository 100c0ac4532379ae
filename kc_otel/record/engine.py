"""What runs behind a recorder in one process: a queue, the thread that measures, and the export loop.

A forked child makes its own engine, so nothing here survives a fork.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.resources import Resource

from kc_otel.record import capture
from kc_otel.record.measurer import Measurer
from kc_otel.record.telemetry.counters import Counters, RecorderCounts
from kc_otel.record.telemetry.export import ExportLoop, MetricSource
from kc_otel.record.telemetry.pair_streams import KernelPair
from kc_otel.record.work import Work
from kc_otel.record.worker import WorkQueue

__all__ = ["Engine", "Export", "RecorderStats"]

_WORK_BYTES: Final = 1024
"""What a queued batch takes besides its arrays, so that empty batches cannot pile up either."""
_EXPIRY_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Export:
    """How an engine exports; see `ExportLoop`."""

    exporters: Callable[[], Sequence[MetricExporter]]
    resource: Resource
    interval: float
    timeout: float


@dataclass(frozen=True, slots=True)
class RecorderStats(RecorderCounts):
    """What a recorder did in this process and what it could not do, with what waits at this moment.

    Attributes:
        queued_batches: Batches that wait to be measured.
        queued_bytes: Bytes that they hold.
        unpaired: Sequences that wait for their other side.
        unpaired_tokens: Tokens that they hold.
        slices_as_other: Slices that the contract's `max_series` leaves no room for; they are counted as `other`.
    """

    queued_batches: int = 0
    queued_bytes: int = 0
    unpaired: int = 0
    unpaired_tokens: int = 0
    slices_as_other: tuple[str, ...] = ()


class Engine:
    """Starts its threads at once; every method may be called from any thread."""

    def __init__(self, measurer: Measurer, counters: Counters, queue_bytes: int, export: Export | None) -> None:
        self._measurer = measurer
        self.counters = counters
        self._queue: WorkQueue[Work] = WorkQueue(queue_bytes)
        self._loop = None if export is None else _loop(measurer, export)
        self._worker = threading.Thread(target=self._work, name="kc-otel-measure", daemon=True)
        self._worker.start()

    def submit(self, takes: Callable[[], bool], arrays: dict[str, Any], make: Callable[[], Work]) -> None:
        """Queue a batch, or count why not. Never raises.

        Args:
            takes: Whether the batch is in the sample.
            arrays: What it holds, to know its size.
            make: Copies the arrays; called once there is room for them.
        """
        reason = "sampling-failed"
        try:
            if not takes():
                self.counters.unsampled()
                return
            reason = "capture-failed"
            size = _WORK_BYTES + sum(capture.size_of(tree) for tree in arrays.values())
            if not self._queue.reserve(size):
                self._refused(size)
                return
            try:
                work = make()
            except BaseException:
                self._queue.release(size)
                raise
            self._queue.put(work, size)
        except Exception as error:  # noqa: BLE001 - the caller's kernel must not fail because watching it did
            self.counters.dropped(reason, error)

    def rollout(self, pair: KernelPair) -> None:
        """Make `pair` the current one, after what is queued; the streams of other pairs are exported once more."""
        if self._queue.reserve(0):
            self._queue.put(Work("rollout", pair), 0)

    def force_flush(self, timeout: float) -> bool:
        """Measure what is queued and export; whether both were done within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        drained = self._queue.drain(timeout)
        return (self._loop is None or self._loop.force_flush(deadline - time.monotonic())) and drained

    def shutdown(self, timeout: float) -> bool:
        """Measure what is queued, export a last time and stop; whether it was done within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        self._queue.close()
        self._worker.join(max(timeout, 0.0))
        drained = not self._worker.is_alive()
        if not drained:
            batches, _ = self._queue.depth()
            self.counters.dropped("shutdown", "the queue was not empty when the time to shut down was over", batches)
        return (self._loop is None or self._loop.shutdown(deadline - time.monotonic())) and drained

    def stats(self) -> RecorderStats:
        """What has happened so far."""
        batches, size = self._queue.depth()
        sides, tokens = self._measurer.unpaired
        return RecorderStats(
            **asdict(self.counters.values()),
            queued_batches=batches,
            queued_bytes=size,
            unpaired=sides,
            unpaired_tokens=tokens,
            slices_as_other=self._measurer.slices_as_other,
        )

    def _refused(self, size: int) -> None:
        if not self._queue.open:
            self.counters.dropped("shutdown", "the recorder is shut down")
        elif size > self._queue.max_bytes:
            why = f"a batch of {size} bytes is larger than the queue of {self._queue.max_bytes}; raise queue_bytes"
            self.counters.dropped("too-large", why)
        else:
            self.counters.dropped(
                "queue-full", "measuring is slower than recording; lower sampling or raise queue_bytes"
            )

    def _work(self) -> None:
        while not self._queue.finished:
            taken = self._queue.get(_EXPIRY_SECONDS if self._measurer.unpaired[0] else None)
            self._measurer.expire(time.monotonic())
            if taken is None:
                continue
            work, size = taken
            try:
                if self._measurer.handle(work, time.monotonic()) and self._loop is not None:
                    self._loop.request()
            except Exception as error:  # noqa: BLE001 - one bad batch must not stop the measuring of the others
                self.counters.dropped("measure-failed", error)
            finally:
                del work, taken
                self._queue.done(size)


def _loop(source: MetricSource, export: Export) -> ExportLoop:
    return ExportLoop(
        source,
        exporters=export.exporters,
        resource=export.resource,
        interval=export.interval,
        timeout=export.timeout,
    )
