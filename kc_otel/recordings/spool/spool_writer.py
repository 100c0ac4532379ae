"""The serving side of the spool: queue and return, whatever the disk does.

A request is acknowledged when it is committed, which `SpoolStats.written` counts. Before that it waits in a bounded
queue in memory; whatever finds no room, there or in the file, is counted by reason and logged once.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kc_otel.contract.units import format_duration
from kc_otel.record.worker import BoundedWorker, PerProcess, ReasonCounts
from kc_otel.recordings.request import Row, SampledRequest, encode, size_of
from kc_otel.recordings.spool.spool_file import SpoolError, append, connect, expire, is_full

_BATCH_REQUESTS: Final = 256
_RETRY_SECONDS: Final = 5.0
_EXPIRE_SECONDS: Final = 60.0
_log: Final = logging.getLogger("kc_otel")


@dataclass(frozen=True, slots=True)
class SpoolStats:
    """Outcomes of the requests of this process.

    Attributes:
        written: Acknowledged: committed to the file.
        waiting: In the queue, not yet written.
        dropped: Not kept, by reason: `queue-full`, `too-large`, `spool-full`, `spool-failed`, `unwritable`, `closed`.
    """

    written: int = 0
    waiting: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


class Spool(PerProcess):
    """Keeps served requests in a bounded file until `kc-otel rescore` has scored them.

    `put` may be called from any thread and never waits for the disk. A forked child that goes on gets a
    queue and a connection of its own.

    Args:
        path: The file; several processes may share it.
        max_bytes: Largest size of the file. A request of 1,000 prompt and 500 sampled tokens takes about 9 KB.
        max_age: Seconds after which a request that nobody scored is removed, while this process or a rescorer runs.
        queue_bytes: Most bytes that wait to be written.

    Raises:
        ValueError: If a bound leaves no room for anything.
    """

    _connection: sqlite3.Connection | None
    _written: int

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int = 1 << 30,
        max_age: float = 7 * 86400.0,
        queue_bytes: int = 64 << 20,
    ) -> None:
        for name, value in (("max_bytes", max_bytes), ("queue_bytes", queue_bytes)):
            if value < 1 << 16:
                raise ValueError(f"{name}: {value!r} leaves no room for anything; leave it out for the default")
        if not max_age > 0.0:
            raise ValueError(f"max_age: {max_age!r} is not a number of seconds above 0; leave it out for the default")
        self.path: Final = Path(path)
        self._max_age = max_age
        self._max_bytes = max_bytes
        self._dropped = ReasonCounts("spool: requests are not kept (%s)")
        self._worker: BoundedWorker[SampledRequest] = BoundedWorker(
            self._write, self._dropped.add, name="kc-otel-spool", max_bytes=queue_bytes, batch=_BATCH_REQUESTS
        )
        super().__init__()

    def put(self, request: SampledRequest) -> None:
        """Queue a request; never raises and never waits."""
        self._worker.put(lambda: request, size_of(request))

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until the queue is written or dropped; return True if that was done within `timeout` seconds."""
        return self._worker.flush(timeout)

    def close(self, timeout: float = 5.0) -> bool:
        """Write what waits, and accept no more; whether it was done within `timeout` seconds."""
        done = self._worker.close(timeout)
        if done and self._connection is not None:
            self._connection.close()
            self._connection = None
        return done

    def stats(self) -> SpoolStats:
        """Counts of the requests written, waiting and dropped in this process."""
        return SpoolStats(self._written, self._worker.depth()[0], self._dropped.values())

    def _begin(self) -> None:
        self._connection = None
        self._written = 0
        self._expired = -_EXPIRE_SECONDS

    def _write(self, requests: Sequence[SampledRequest]) -> None:
        rows: list[Row] = []
        for request in requests:
            try:
                rows.append(encode(request))
            except Exception as error:  # noqa: BLE001 - one odd request must not cost the others
                self._dropped.add("unwritable", error)
        try:
            if self._connection is None:
                self._connection = connect(self.path, max_bytes=self._max_bytes, timeout=_RETRY_SECONDS)
            self._expire(self._connection)
            append(self._connection, rows)
        except (sqlite3.Error, SpoolError, OSError) as error:
            full = is_full(error)
            self._dropped.add("spool-full" if full else "spool-failed", f"{self.path}: {error}", len(rows))
            if not full and self._connection is not None:
                self._connection.close()  # a file that was moved away or a broken disk: open it anew for the next batch
                self._connection = None
        else:
            self._written += len(rows)

    def _expire(self, connection: sqlite3.Connection) -> None:
        if time.monotonic() - self._expired < _EXPIRE_SECONDS:
            return
        self._expired = time.monotonic()
        if gone := expire(connection, time.time() - self._max_age):
            _log.warning("%s: %d requests were older than %s and are removed unscored; does kc-otel rescore run?",
                         self.path, gone, format_duration(self._max_age))  # fmt: skip
