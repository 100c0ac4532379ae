"""Requests that no snapshot has yet, in the state file; their senders are answered once they are on the disk.

    request -> group -> inbox, on the disk -> evaluator, in the order of the inbox -> answer
                                              evaluator -> snapshot, which takes what it has out of the inbox

Requests that arrive while the disk is busy are written together and synced once (group commit), with whatever else is
committed then. A snapshot deletes the requests it contains in its own transaction, so requests that a crash leaves in
the inbox are not in the snapshot. They are applied at the next start with their original arrival time.

`serve --record` also records arrivals and evaluations as files for `kc-otel replay` and any OTLP reader; the recording
is best effort.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.otlp.requests import ExportResult, Limits, MetricsSink, ThrottledError
from kc_otel.judge.otlp.traffic_entries import EVALUATED, RECEIVED, judged_metrics, marked_frame
from kc_otel.judge.otlp.wire_columns import ColumnMessage
from kc_otel.record.worker import BoundedWorker, ReasonCounts
from kc_otel.serve.store.state_file import StateConnection, StateError, UnitOfWork

if TYPE_CHECKING:
    from kc_otel.serve.core import Core
    from kc_otel.serve.shards import Shard

T = TypeVar("T")

_MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
"""Bytes that may wait for the disk before more is refused."""
_MAX_BODIES_PER_COMMIT: Final = 256
_MAX_REQUESTS_AT_ONCE: Final = 3
"""Requests that are applied before ports and ticks have the event loop again, if they take no longer than this:"""
_MAX_SECONDS_AT_ONCE: Final = 0.002
_log: Final = logging.getLogger(__name__)
_RECORDING_FILE_BYTES: Final = 64 * 1024 * 1024
_MAX_FRAMES: Final = 256
WRITING: Final = "writing the state"
"""Stage in which the evaluator fails while its disk is full: incoming data are rejected, and nothing is decided."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    id: int
    at: float
    body: bytes
    apply: Callable[[], Any]
    done: asyncio.Future[Any]

    def answer(self, result: Any) -> None:
        """Return a result to its sender, or raise an error there, unless it no longer waits."""
        if not self.done.done():
            (self.done.set_exception if isinstance(result, Exception) else self.done.set_result)(result)


class Inbox:
    """Keeps requests until a snapshot has them. Use it from the event loop that the state is used on."""

    def __init__(self, state: StateConnection) -> None:
        self._state = state
        state.execute("CREATE TABLE IF NOT EXISTS inbox (id INTEGER PRIMARY KEY, at REAL NOT NULL, body BLOB NOT NULL)")
        self._last: int = state.execute("SELECT coalesce(max(id), 0) FROM inbox").fetchone()[0]
        """Id of the newest request."""
        self._applied = 0
        """Id of the newest request that the evaluator has."""
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        self._writing: asyncio.Task[None] | None = None
        self._committed: deque[_Waiting] = deque()
        state.join = self._join

    @property
    def size(self) -> int:
        """Bytes of the bodies that no snapshot has: those in the inbox, and those that wait for the disk."""
        (kept,) = self._state.execute("SELECT coalesce(sum(length(body)), 0) FROM inbox").fetchone()
        return self._waiting_bytes + int(kept)

    def __len__(self) -> int:
        return int(self._state.execute("SELECT count(*) FROM inbox").fetchone()[0])

    def left(self) -> Iterator[tuple[float, bytes]]:
        """Yield (Unix time, body) of what an earlier process left; what was yielded counts as applied."""
        for id, at, body in self._state.execute("SELECT id, at, body FROM inbox ORDER BY id").fetchall():
            self._applied = id
            yield at, body

    async def append(self, body: bytes, at: float, apply: Callable[[], T]) -> T:
        """Commit a request, then call `apply` on the event loop, in the order of arrival; return what it returns.

        After a StateError nothing of the request is in the inbox. It is applied even if the caller no longer waits.
        """
        if self._waiting_bytes + len(body) > _MAX_WAITING_BYTES:
            raise StateError("the disk cannot keep up with what arrives")
        self._last += 1
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(self._last, at, body, apply, done))
        self._waiting_bytes += len(body)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all())
        return await done

    def take_out(self, unit: UnitOfWork) -> None:
        """Delete the applied requests, in the transaction of a snapshot that has them."""
        applied = self._applied
        unit.before_commit(lambda connection: connection.execute("DELETE FROM inbox WHERE id <= ?", (applied,)))

    async def settle(self) -> None:
        """Wait until all that has arrived is applied, or refused."""
        while self._writing is not None or self._committed:
            await asyncio.sleep(0)
            if self._writing is not None:
                await asyncio.wait([self._writing])

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                oldest = self._waiting[0]
                try:
                    async with self._state.turn():
                        pass  # they join it, if they have not joined another's
                except Exception as error:  # noqa: BLE001 - whatever it is, the senders are told
                    if self._waiting and self._waiting[0] is oldest:  # there was no turn
                        self._refuse(self._pop_group(), error)
        finally:
            self._writing = None

    def _join(self, unit: UnitOfWork) -> None:
        """Write the oldest waiting requests as a part of a turn."""
        if not (group := self._pop_group()):
            return
        rows = [(waiting.id, waiting.at, waiting.body) for waiting in group]
        unit.before_commit(lambda connection: connection.executemany("INSERT INTO inbox VALUES (?, ?, ?)", rows))
        unit.on_commit(lambda: self._accept(group))
        unit.on_rollback(lambda: self._refuse(group, unit.error))

    def _pop_group(self) -> list[_Waiting]:
        group = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MAX_BODIES_PER_COMMIT))]
        self._waiting_bytes -= sum(len(waiting.body) for waiting in group)
        return group

    def _accept(self, group: Sequence[_Waiting]) -> None:
        idle = not self._committed
        self._committed.extend(group)
        if idle:
            self._apply_next()

    def _apply_next(self) -> None:
        """Apply the oldest committed requests: a few at a time, so that ports and ticks come in between."""
        until = time.monotonic() + _MAX_SECONDS_AT_ONCE
        for _ in range(min(len(self._committed), _MAX_REQUESTS_AT_ONCE)):
            waiting = self._committed.popleft()
            self._applied = waiting.id  # also where it fails: it would fail again
            try:
                waiting.answer(waiting.apply())
            except Exception as error:  # noqa: BLE001 - it is raised in the caller of `append`
                waiting.answer(error)
            if time.monotonic() > until:
                break
        if self._committed:
            asyncio.get_running_loop().call_soon(self._apply_next)

    @staticmethod
    def _refuse(group: Sequence[_Waiting], error: BaseException | None) -> None:
        for waiting in group:
            waiting.answer(StateError(str(error)))


class NotKeptError(ThrottledError):
    """The disk cannot store the request now; the sender retries."""

    outcome = "not_kept"


class DurableSink(MetricsSink):
    """Commits metrics of a core or a shard to its inbox, then applies them; `record` gets all in that order."""

    def __init__(self, core: Core | Shard, record: Callable[[bytes, float], None] | None = None) -> None:
        self._core, self._record = core, record

    def columns(self, body: bytes, limits: Limits) -> ColumnMessage | None:
        """A serialized ExportMetricsServiceRequest as columns."""
        return self._core.evaluator.columns_of(body, limits.max_items)

    async def metrics(self, request: Any, at: float | None = None) -> ExportResult:
        """Take an ExportMetricsServiceRequest, or its columns, that arrived at `at`, Unix seconds; None for now.

        Raises a NotKeptError if the disk cannot store it now.
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
    """Apply the requests that are in the inbox; return how many there were."""
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
    """A folder of files, of which the oldest go beyond `limit` bytes; a thread writes them, and logs each gap."""

    def __init__(self, folder: Path, limit: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrafficRecordingError(f"{folder}: not writable ({error.strerror}); start without --record") from None
        self._folder, self._limit = folder, limit
        self._file_bytes = min(_RECORDING_FILE_BYTES, max(limit // 4, 1))
        self._file: int | None = None
        self._size = 0
        self._gaps = ReasonCounts(f"{folder}: the recording has a gap: %s")
        self._worker: BoundedWorker[bytes] = BoundedWorker(
            self._write, self._gaps.add, name="kc-otel-recording", max_bytes=_MAX_WAITING_BYTES, batch=_MAX_FRAMES
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
