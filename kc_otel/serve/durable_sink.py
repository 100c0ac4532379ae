"""Between the receivers and the core: nothing is applied, and no sender is told so, that is not in the inbox on disk.

`serve --record` also records arrivals and evaluations as files for
`kc-otel replay` and any OTLP reader; the recording is best effort.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.otlp.requests import ColumnSink, ExportResult, Limits, ThrottledError
from kc_otel.judge.otlp.traffic_entries import EVALUATED, RECEIVED, judged_metrics, marked_frame
from kc_otel.judge.otlp.wire_columns import ColumnMessage
from kc_otel.record.worker import BoundedWorker, ReasonCounts
from kc_otel.serve.store.state_connection import StateError

if TYPE_CHECKING:
    from kc_otel.serve.core import Core
    from kc_otel.serve.shards.shard import Shard

_log: Final = logging.getLogger(__name__)
_FILE_BYTES: Final = 64 * 1024 * 1024
_MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
_MAX_BATCH: Final = 256
WRITING: Final = "writing the state"
"""Stage in which the evaluator fails while its disk is full: incoming data are rejected, and nothing is decided."""


class NotKeptError(ThrottledError):
    """The disk cannot store the request now; the sender retries."""

    outcome = "not_kept"


class DurableSink(ColumnSink):
    """Takes what arrives for a core or a shard, metrics by way of its inbox; `record` is told of it in that order."""

    def __init__(self, core: Core | Shard, record: Callable[[bytes, float], None] | None = None) -> None:
        self._core, self._record = core, record

    def columns(self, body: bytes, limits: Limits) -> ColumnMessage | None:
        """A serialized ExportMetricsServiceRequest as columns."""
        return self._core.evaluator.columns_of(body, limits.max_items)

    async def metrics(self, request: Any, at: float | None = None) -> ExportResult:
        """Take an ExportMetricsServiceRequest, or its columns, that arrived at `at`, Unix seconds; None for now.

        Raises a NotKeptError if it cannot be kept at the moment.
        """
        now = time.time() if at is None else at
        # Whoever made columns of a request has seen that all of it is ours.
        kept = request.body if isinstance(request, ColumnMessage) else judged_metrics(request).SerializeToString()
        if not kept:
            return self._core.metrics(request, now)
        try:
            result = await self._core.inbox.append(kept, now, partial(self._apply, request, kept, now))
        except StateError as error:
            self._core.evaluator.faults.report("", WRITING, {"all contracts": error})
            raise NotKeptError(f"cannot be kept on disk at the moment: {error}") from None
        self._core.evaluator.faults.report("", WRITING, {})
        return result

    def _apply(self, request: Any, kept: bytes, at: float) -> ExportResult:
        if self._record is not None:
            self._record(kept, at)
        began = time.perf_counter()
        return replace(self._core.metrics(request, at), seconds=time.perf_counter() - began)


def recover(core: Core | Shard) -> int:
    """Apply what is in the inbox and not yet in the snapshot, and say how many requests that were."""
    core.evaluator.listening(time.time())  # while nobody listened, nobody was silent
    count, most = 0, Limits().max_items
    for at, body in core.inbox.left():
        try:
            columns = core.evaluator.columns_of(body, most)
            core.metrics(ExportMetricsServiceRequest.FromString(body) if columns is None else columns, at)
            count += 1
        except Exception:  # noqa: BLE001 - one request must not keep the evaluator from starting
            _log.exception("a request that arrived at %.3f cannot be applied", at)
    return count


class TrafficRecordingError(Exception):
    """The recording cannot be written; the message says what to do."""


class TrafficRecording:
    """Writes a recording: files in a folder, of which the oldest go beyond `limit` bytes.

    A thread of its own writes it in order, never blocks the evaluator, and logs each gap.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrafficRecordingError(f"{folder}: not writable ({error.strerror}); start without --record") from None
        self._folder, self._limit = folder, limit
        self._file_bytes = min(_FILE_BYTES, max(limit // 4, 1))
        self._file: int | None = None
        self._size = 0
        self._gaps = ReasonCounts(f"{folder}: the recording has a gap: %s")
        self._worker: BoundedWorker[bytes] = BoundedWorker(
            self._write, self._gaps.add, name="kc-otel-recording", max_bytes=_MAX_WAITING_BYTES, batch=_MAX_BATCH
        )

    def received(self, body: bytes, at: float) -> None:
        """A serialized ExportMetricsServiceRequest that arrived at a Unix time, seconds, is taken."""
        self._worker.put(lambda: marked_frame(body, at, RECEIVED), len(body) + 1)

    def evaluated(self, at: float) -> None:
        """Record that all cells were judged at a Unix time, seconds."""
        self._worker.put(lambda: marked_frame(b"", at, EVALUATED), 1)

    def close(self, timeout: float = 3.0) -> None:
        """Write what waits, for at most `timeout` seconds."""
        self._worker.close(timeout)
        self._end_file()

    def _write(self, frames: Sequence[bytes]) -> None:
        content = b"".join(frames)
        try:
            if self._file is None or self._size >= self._file_bytes:
                self._begin_file(len(content))
            assert self._file is not None
            if os.write(self._file, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # noqa: TRY301 - as the disk says it itself
        except OSError:
            self._end_file()  # data after half a message cannot be read
            raise
        self._size += len(content)

    def _begin_file(self, needed: int) -> None:
        self._end_file()
        files = sorted(self._folder.glob("*.otlp"))
        sizes = [file.stat().st_size for file in files]
        while files and sum(sizes) + max(needed, self._file_bytes) > self._limit:
            with suppress(OSError):
                files[0].unlink()
            del files[0], sizes[0]
        self._file = os.open(self._folder / f"{time.time_ns():020d}.otlp", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        self._size = 0

    def _end_file(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)
