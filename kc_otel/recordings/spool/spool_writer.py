"""The serving side of the spool: hand over and return, whatever the disk does.

A request is acknowledged when it is committed, which `SpoolStats.written` counts. Before that it waits in a bounded
queue in memory; whatever finds no room, there or in the file, is counted by reason and logged once.
"""

from __future__ import annotations

import atexit
import logging
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kc_otel.record.worker import WorkQueue
from kc_otel.recordings.request import Row, SampledRequest, encode, size_of
from kc_otel.recordings.spool.spool_file import SpoolError, append, connect

__all__ = ["Spool", "SpoolStats"]

_log: Final = logging.getLogger("kc_otel")
_BATCH: Final = 256
_RETRY_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class SpoolStats:
    """What became of the requests that this process handed over.

    Attributes:
        written: Acknowledged: committed to the file.
        waiting: In the queue, not yet written.
        dropped: Not kept, by reason: `queue-full`, `spool-full`, `spool-failed`, `unwritable`, `closed`.
    """

    written: int = 0
    waiting: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


class Spool:
    """Keeps served requests in a bounded file until `kc-otel rescore` has scored them.

    `put` may be called from any thread and never waits for the disk. A forked child that goes on handing over gets a
    queue and a connection of its own.

    Args:
        path: The file; several processes may share it.
        max_bytes: Largest size of the file. A request of 1,000 prompt and 500 sampled tokens takes about 9 KB.
        queue_bytes: Most bytes that wait to be written.

    Raises:
        ValueError: If a bound leaves no room for anything.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int = 1 << 30, queue_bytes: int = 64 << 20) -> None:
        for name, value in (("max_bytes", max_bytes), ("queue_bytes", queue_bytes)):
            if value < 1 << 16:
                raise ValueError(f"{name}: {value!r} leaves no room for anything; leave it out for the default")
        self.path: Final = Path(path)
        self._max_bytes = max_bytes
        self._queue_bytes = queue_bytes
        self._closed = False
        self._begin()
        atexit.register(self.close)

    def put(self, request: SampledRequest) -> None:
        """Hand over a request; never raises and never waits."""
        self._own()
        size = size_of(request)
        if not self._queue.reserve(size):
            self._drop("closed" if self._closed else "queue-full", "requests come faster than the disk takes them")
            return
        self._queue.put(request, size)
        if self._thread is None:
            self._start()

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until what was handed over is written or dropped; whether that was done within `timeout` seconds."""
        self._own()
        return self._queue.drain(timeout)

    def close(self, timeout: float = 5.0) -> bool:
        """Write what waits, and accept no more; whether it was done within `timeout` seconds."""
        atexit.unregister(self.close)
        self._closed = True
        drained = self.flush(timeout)
        self._queue.close()
        if self._thread is not None:
            self._thread.join(timeout)
        return drained

    def stats(self) -> SpoolStats:
        """What was written, what waits and what was dropped in this process."""
        self._own()
        with self._lock:
            return SpoolStats(self._written, self._queue.depth()[0], dict(self._dropped))

    def _own(self) -> None:
        if os.getpid() != self._pid:  # a fork copied locks that its parent's threads may have held
            self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._queue: WorkQueue[SampledRequest] = WorkQueue(self._queue_bytes)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._written = 0
        self._dropped: Counter[str] = Counter()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="kc-otel-spool", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        queue = self._queue
        connection: sqlite3.Connection | None = None
        try:
            while True:
                first = queue.get(None)
                if first is None:
                    return
                items = [first]
                while len(items) < _BATCH and (more := queue.get(0.0)) is not None:
                    items.append(more)
                connection = self._write(connection, [request for request, _ in items])
                for _, size in items:
                    queue.done(size)
        finally:
            if connection is not None:
                connection.close()

    def _write(
        self, connection: sqlite3.Connection | None, requests: Sequence[SampledRequest]
    ) -> sqlite3.Connection | None:
        rows: list[Row] = []
        try:
            for request in requests:
                try:
                    rows.append(encode(request))
                except Exception as error:  # noqa: BLE001 - one odd request must not cost the others
                    self._drop("unwritable", error)
            connection = connection or connect(self.path, max_bytes=self._max_bytes, timeout=_RETRY_SECONDS)
            append(connection, rows)
        except (sqlite3.Error, SpoolError, OSError) as error:
            full = isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"
            self._drop("spool-full" if full else "spool-failed", f"{self.path}: {error}", len(rows))
            if full or connection is None:
                return connection
            connection.close()  # a file that was moved away or a broken disk: open it anew for the next batch
            return None
        with self._lock:
            self._written += len(rows)
        return connection

    def _drop(self, reason: str, why: object, count: int = 1) -> None:
        with self._lock:
            first = reason not in self._dropped
            self._dropped[reason] += count
        if first:
            _log.warning("spool: requests are not kept (%s): %s; further ones are only counted", reason, why)
