"""One engine per process, a worker that measures and an export loop; a forked child that goes on recording has its own.

A stream has one writer. A child's streams start when it first records, under a `service.instance.id` of its own; a
child that records nothing starts no thread and exports nothing.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

from opentelemetry import trace
from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID

from kc_otel.contract.model import Contract
from kc_otel.record.kernel import Kernel, KernelPair
from kc_otel.record.measurer import Measurer
from kc_otel.record.pairing import PairingBuffer
from kc_otel.record.sampling import Sampler
from kc_otel.record.telemetry import environment
from kc_otel.record.telemetry.counters import Counters, RecorderStats
from kc_otel.record.telemetry.export import VERSION, ExportLoop, scope_of
from kc_otel.record.work import BatchWork, Work
from kc_otel.record.worker import BoundedWorker, PerProcess

_log: Final = logging.getLogger("kc_otel")
_MAX_INTERVAL_SECONDS: Final = 60.0
_alive: Final[weakref.WeakSet[ProcessEngine]] = weakref.WeakSet()


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

    def submit(self, work: BatchWork) -> None:
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


class ProcessEngine(PerProcess):
    """Arguments for a recorder's engine, and the engine made in this process.

    Args are those of `Recorder`, with defaults resolved except for the exporter, the tracer and the interval.
    """

    engine: Engine | None
    _lock: threading.Lock

    def __init__(
        self,
        contract: Contract,
        pair: KernelPair,
        *,
        sampler: Sampler,
        metric_exporter: MetricExporter | None,
        tracer_provider: trace.TracerProvider | None,
        queue_bytes: int,
        pairing: tuple[int, float],
        export_interval: float | None,
        log: DriftLog | None,
        resource: Mapping[str, str] | None = None,
        serves: bool = True,
    ) -> None:
        self._serves = serves
        self._known: set[Kernel] = set()
        self.pair = self._met(contract, pair)
        self._resource = resource
        self._contract = contract
        self._sampler = sampler
        self._metric_exporter = metric_exporter
        self._tracer_provider = tracer_provider
        self._queue_bytes = queue_bytes
        self._pairing = pairing
        self._interval = _interval(export_interval, contract.observability.heartbeat)
        self._stopped = environment.sdk_disabled()
        self._instance = ""
        self._log = log
        super().__init__()
        _alive.add(self)

    def running(self) -> Engine | None:
        """Return this process's engine, started if necessary; None if recording is off. Never raises."""
        if self.engine is None and not self._stopped:
            with self._lock:
                if self.engine is None and not self._stopped:
                    try:
                        self.engine = self._start()
                    except Exception:  # noqa: BLE001 - the program must run, watched or not
                        _log.exception("contract %s: recording could not be started and is off", self._contract.name)
                        self._stopped = True
        return self.engine

    def rollout(self, train: Kernel | None, inference: Kernel | None) -> None:
        """Make another kernel pair the current one."""
        with self._lock:
            pair = KernelPair(train or self.pair.train, inference or self.pair.inference)
            self.pair = self._met(self._contract, pair)
            if self.engine is not None:
                self.engine.rollout(self.pair)

    def _met(self, contract: Contract, pair: KernelPair) -> KernelPair:
        """Say of a kernel that is new here where it is not what the contract declares."""
        for kernel, spec in ((pair.train, contract.kernels.train), (pair.inference, contract.kernels.inference)):
            if kernel not in self._known:
                self._known.add(kernel)
                kernel.log_otherwise(contract.name, spec, _log)
        return pair

    def shutdown(self, timeout: float) -> bool:
        """Stop for good; the first call waits, later ones do nothing."""
        with self._lock:
            first, self._stopped = not self._stopped, True
        return not first or self.engine is None or self.engine.shutdown(timeout)

    def _start(self) -> Engine:
        counters = Counters(self._contract.name)
        tokens, seconds = self._pairing
        measurer = Measurer(
            self._contract,
            self.pair,
            counters=counters,
            sampler=self._sampler,
            tracer=trace.get_tracer("kc_otel", VERSION, self._tracer_provider),
            pairing=PairingBuffer(max_tokens=tokens, max_age=seconds),
            start=time.time_ns(),
            serves=self._serves,
        )
        return Engine(measurer, counters, self._queue_bytes, self._export_loop(measurer, counters))

    def _export_loop(self, measurer: Measurer, counters: Counters) -> ExportLoop | None:
        # In front of the others, which are foreign and may fail.
        watching = () if self._log is None else tuple(self._log.attach(self._contract))
        if not watching and self._metric_exporter is None and not environment.exporter_names():
            return None
        same = (other for other in _alive if other._contract.name == self._contract.name)  # noqa: SLF001
        taken = {other._instance for other in same if other is self or not other._stopped}  # noqa: SLF001
        resource = environment.process_resource(taken, self._resource)
        self._instance = str(resource.attributes[SERVICE_INSTANCE_ID])
        return ExportLoop(
            measurer,
            exporters=lambda: (*watching, *self._exporters(counters)),
            resource=resource,
            interval=self._interval,
            timeout=environment.export_timeout(),
            scope=scope_of(self._contract),
        )

    def _exporters(self, counters: Counters) -> Sequence[MetricExporter]:
        if self._metric_exporter is not None:
            return (self._metric_exporter,)
        return environment.metric_exporters(counters.export_rejected)

    def _begin(self) -> None:
        self.engine = None
        self._lock = threading.Lock()


def _interval(given: float | None, heartbeat: float) -> float:
    if given is not None:
        if not given > 0.0:
            raise ValueError(f"export_interval: {given!r} is not a number of seconds above 0")
        return given
    interval = environment.export_interval(min(heartbeat / 3.0, _MAX_INTERVAL_SECONDS))
    if interval > heartbeat:
        _log.warning(
            "OTEL_METRIC_EXPORT_INTERVAL: every %g s is slower than the contract's heartbeat of %g s, "
            "which will be taken for silence",
            interval,
            heartbeat,
        )
    return interval


class DriftLog(Protocol):
    """Source of a recorder's scalars; `kc_otel.TrainingLog` is one. No method may block or raise."""

    def attach(self, contract: Contract) -> Sequence[MetricExporter]:
        """Start in this process, for a contract; return exporters that also receive the recorder's exports."""

    def scalars(self) -> Mapping[str, float]:
        """Finite numbers by name, as of the newest verdicts."""
