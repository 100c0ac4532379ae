"""The file between serving and rescoring: an SQLite queue in write-ahead mode.

Any number of processes append through a `Spool`, one reads through a `SpoolReader`. A request is acknowledged when it
is committed, which `SpoolStats.written` counts; before that it waits in a bounded queue in memory. A commit survives
the processes being killed at any instant; the file never grows beyond its bound, and a full disk is met the same way as
a full spool: nothing that was acknowledged is lost, what comes next is counted by reason and logged once.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Self

from kc_otel.contract.units import format_duration
from kc_otel.record.kernel import Kernel
from kc_otel.record.worker import BoundedWorker, PerProcess, ReasonCounts
from kc_otel.recordings.request import COLUMNS, Row, SampledRequest, decode, encode, size_of

MIN_BYTES: Final = 1 << 20

_TABLE: Final = """CREATE TABLE IF NOT EXISTS requests (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    request_id TEXT NOT NULL,
    prompt_ids BLOB NOT NULL,
    token_ids BLOB NOT NULL,
    logprobs BLOB NOT NULL,
    about TEXT NOT NULL
) STRICT"""
_APPLICATION_ID: Final = 0x6B63_5350  # "kcSP"
_WAL_PAGES: Final = 256
_EXPIRED_AT_ONCE: Final = 500
_LOOK_AHEAD: Final = 65_536
"""Requests among which a reader looks for the other rollouts of a prompt."""
_QUEUE_BYTES: Final = 64 << 20
_BATCH_REQUESTS: Final = 256
_RETRY_SECONDS: Final = 5.0
_EXPIRE_SECONDS: Final = 60.0
_log: Final = logging.getLogger("kc_otel")


class SpoolError(Exception):
    """The spool's file cannot be used; the message says what to do."""


@dataclass(frozen=True, slots=True)
class SpoolStats:
    """Requests of this process: those committed to the file, those in the queue, and those not kept, by reason."""

    written: int = 0
    waiting: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


class Spool(PerProcess):
    """Keeps served requests in a bounded file, up to `max_age` seconds, until `kc-otel rescore` has scored them.

    A forked child gets a queue and a connection of its own. 1,000 prompt and 500 sampled tokens take about 9 KB.
    """

    _connection: sqlite3.Connection | None
    _written: int

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int = 1 << 30, max_age: float = 7 * 86400.0) -> None:
        if not max_age > 0.0:
            raise ValueError(f"max_age: {max_age!r} is not a number of seconds above 0; leave it out for the default")
        self.path: Final = Path(path)
        self._max_age = max_age
        self._max_bytes = max_bytes
        self._dropped = ReasonCounts("spool: requests are not kept (%s)")
        self._worker: BoundedWorker[SampledRequest] = BoundedWorker(
            self._write, self._dropped.add, name="kc-otel-spool", max_bytes=_QUEUE_BYTES, batch=_BATCH_REQUESTS
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
                self._connection = _connect(self.path, self._max_bytes)
            self._expire(self._connection)
            self._connection.execute("BEGIN IMMEDIATE")
            with self._connection as spool:
                spool.executemany(f"INSERT INTO requests ({COLUMNS}) VALUES (?, ?, ?, ?, ?)", rows)  # noqa: S608 - a constant
        except (sqlite3.Error, SpoolError, OSError) as error:
            full = _is_full(error.__cause__ or error)
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
        if gone := _expire(connection, time.time() - self._max_age):
            _log.warning("%s: %d requests were older than %s and are removed unscored; does kc-otel rescore run?",
                         self.path, gone, format_duration(self._max_age))  # fmt: skip


class SpoolReader:
    """The one reader of a spool; what `take` returned and `done` did not confirm is there again for the next."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Final = Path(path)
        self._seen = 0
        self._waiting: dict[bytes, list[int]] = {}
        """Digest of a prompt -> numbers of its requests that were seen and not taken."""
        # A lock of the operating system ends with the process, however it ends.
        self._lock = os.open(f"{self.path}.reader", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._connection = _connect(self.path)
        except (OSError, SpoolError) as error:
            os.close(self._lock)
            if isinstance(error, SpoolError):
                raise
            raise SpoolError(f"{self.path}: another process is rescoring this spool; stop it first") from None

    def take(self, limit: int) -> list[tuple[int, SampledRequest]]:
        """The next requests with their numbers, about `limit`: all that wait of a prompt, the oldest prompt first."""
        rows: list[Any] = []
        try:
            self._look_ahead()
            while self._waiting and not rows:
                rows = self._next(limit)
        except sqlite3.Error as error:
            raise SpoolError(f"{self.path}: cannot be read ({error})") from None
        found = []
        for number, *row in rows:
            try:
                found.append((number, decode(tuple(row))))
            except ValueError as error:
                _log.warning("%s: %s; it is removed", self.path, error)
                self.done([number])
        return found

    def kernel(self) -> Kernel | None:
        """The kernel of the oldest request that can be read; None while there is none."""
        try:
            first = f"SELECT id, {COLUMNS} FROM requests ORDER BY id LIMIT 1"  # noqa: S608 - constants
            while found := self._connection.execute(first).fetchone():
                try:
                    return decode(tuple(found[1:])).kernel
                except ValueError as error:
                    _log.warning("%s: %s; it is removed", self.path, error)
                    self.done([found[0]])
        except sqlite3.Error as error:
            raise SpoolError(f"{self.path}: cannot be read ({error})") from None
        return None

    def _look_ahead(self) -> None:
        """Note the numbers of the next requests by their prompt, whose rollouts are mixed with those of others."""
        room = _LOOK_AHEAD - sum(map(len, self._waiting.values()))
        query = "SELECT id, prompt_ids FROM requests WHERE id > ? ORDER BY id LIMIT ?"
        for number, prompt in self._connection.execute(query, (self._seen, room)):
            self._waiting.setdefault(blake2b(bytes(prompt), digest_size=16).digest(), []).append(number)
            self._seen = number

    def _next(self, limit: int) -> list[Any]:
        """Rows of the oldest prompts; those that expired are not there any more."""
        chosen: list[int] = []
        while self._waiting and len(chosen) < limit:
            prompt = next(iter(self._waiting))
            numbers = self._waiting[prompt]
            chosen += numbers[:limit]
            del numbers[:limit]
            if not numbers:
                del self._waiting[prompt]
        among = ", ".join("?" * len(chosen))
        return self._connection.execute(
            f"SELECT id, {COLUMNS} FROM requests WHERE id IN ({among}) ORDER BY id",  # noqa: S608 - constants
            chosen,
        ).fetchall()

    def done(self, numbers: Iterable[int]) -> None:
        """Forget requests whose drift has been exported; after a SpoolError a restart scores them again."""
        try:
            _forget(self._connection, numbers)
        except sqlite3.Error as error:
            raise SpoolError(f"{self.path}: scored requests cannot be removed ({error})") from None

    def __len__(self) -> int:
        """Requests in the file, those that were taken included."""
        return int(self._connection.execute("SELECT count(*) FROM requests").fetchone()[0])

    def close(self) -> None:
        """Let another process read."""
        self._connection.close()
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def waiting(path: Path, most: int) -> list[SampledRequest]:
    """Return the oldest requests that wait in a spool, beside its reader; they stay. SpoolError if it is none."""
    connection = _connect(path)
    try:
        rows = connection.execute(f"SELECT {COLUMNS} FROM requests ORDER BY id LIMIT ?", (most,)).fetchall()  # noqa: S608 - a constant
    except sqlite3.Error as error:
        raise SpoolError(f"{path}: cannot be read ({error})") from None
    finally:
        connection.close()
    found = []
    for row in rows:
        with suppress(ValueError):  # its reader removes and names it
            found.append(decode(row))
    return found


def _connect(path: Path, max_bytes: int | None = None) -> sqlite3.Connection:
    """Open or create a spool, of at most so many bytes where it is written."""
    other = SpoolError(f"{path}: is a database of something else; give the spool a file of its own")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with private_database(path, _APPLICATION_ID, _TABLE, other) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute(f"PRAGMA wal_autocheckpoint={_WAL_PAGES}")
            if max_bytes is not None:
                page = connection.execute("PRAGMA page_size").fetchone()[0]
                connection.execute(f"PRAGMA max_page_count={max(max_bytes, MIN_BYTES) // page}")
    except (sqlite3.Error, OSError) as error:
        raise _unusable(path, error) from error
    return connection


@contextmanager
def private_database(path: Path, application_id: int, table: str, other: Exception) -> Iterator[sqlite3.Connection]:
    """Open or create a database of one kind for the serving account alone; `other` is raised for another kind."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    with ExitStack() as unless_it_works:
        connection = sqlite3.connect(path, isolation_level=None, timeout=_RETRY_SECONDS, check_same_thread=False)
        unless_it_works.callback(connection.close)
        tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if tables and connection.execute("PRAGMA application_id").fetchone()[0] != application_id:
            raise other
        connection.execute("PRAGMA secure_delete=ON")
        if not tables:
            connection.execute("BEGIN IMMEDIATE")
            with connection:
                connection.execute(table)
                connection.execute(f"PRAGMA application_id={application_id}")
        yield connection
        unless_it_works.pop_all()


def _forget(connection: sqlite3.Connection, numbers: Iterable[int]) -> None:
    """Remove rows from the file and its log; while another process reads or writes, the log keeps its pages."""
    connection.execute("BEGIN IMMEDIATE")
    with connection:
        connection.executemany("DELETE FROM requests WHERE id = ?", [(number,) for number in numbers])
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _expire(connection: sqlite3.Connection, before: float) -> int:
    """Remove requests that were finished before a Unix time; how many. Those without a time stay."""
    # Rows stand about in the order of their times: the old ones are the first.
    gone = 0
    while True:
        first = connection.execute(
            "SELECT id, json_extract(about, '$.at') FROM requests WHERE json_valid(about) ORDER BY id LIMIT ?",
            (_EXPIRED_AT_ONCE,),
        ).fetchall()
        old = [number for number, at in first if isinstance(at, int) and 0 < at < before * 1e9]
        if old:
            _forget(connection, old)
            gone += len(old)
        if len(old) < _EXPIRED_AT_ONCE:
            return gone


def _is_full(error: BaseException) -> bool:
    """Return True if an error means that the spool, or its disk, has no room."""
    return getattr(error, "sqlite_errorname", "") == "SQLITE_FULL" or getattr(error, "errno", None) == errno.ENOSPC


def _unusable(path: Path, error: Exception) -> SpoolError:
    if _is_full(error):
        return SpoolError(f"{path}: has no room ({error}); make some on its disk, and what comes then is kept")
    if isinstance(error, sqlite3.OperationalError | OSError):
        return SpoolError(f"{path}: cannot be opened as a spool ({error}); give a file in a folder that can be written")
    return SpoolError(f"{path}: is not a spool ({error}); move it away, or give another file")
