"""A connection to the state file that never waits for the disk, and what makes its commits last.

A commit is in the file `-wal` when it returns: it outlives the process, however that ends. It outlives the machine when
`sync` has returned, on a thread. SQLite itself would wait for a disk in two places more. One is the checkpoint, which
copies what is in `-wal` into the file: it has a connection of its own, because a connection that waits is one that
nobody can read from. The other is the first commit into a `-wal` that is begun anew over what was there, lest what
follows is on the disk before the new beginning is, and is taken for a part of the old. So it is never begun over what
was there: a third connection that holds a snapshot keeps SQLite from it, and once all is copied the file is emptied.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

__all__ = ["StateConnection"]

_LARGE: Final = 16 * 1024 * 1024
"""Bytes of `-wal` after which they are copied into the file."""
_MOST: Final = 8 * _LARGE
"""Bytes of it after which it is emptied even if that waits for the disk."""
_PART: Final = 1024 * 1024
"""Bytes that are written again at a time."""
_ASKED: Final = 0.02
"""Seconds between two looks whether the file is free."""
_LOCK_BESIDE: Final = sys.platform != "linux"
"""Where flock is of another kind than the locks of SQLite, the file itself has it: it cannot be moved away from it."""


class StateConnection(sqlite3.Connection):
    """A connection to the state file, which it holds, for one thread; `sync` and `checkpoint` may be on others.

    Args:
        database: Path of the file, or `:memory:`.
        patience: How long to wait for another that holds it, seconds.
        kwargs: What sqlite3.connect takes besides.

    Attributes:
        failed: Times that the disk did not take something.
        mended: How many of them there were when all was last written again, and that was synced.

    Raises:
        BlockingIOError: If another holds it.
        OSError: If it cannot be opened.
        sqlite3.Error: If it cannot be opened, or is none.
    """

    def __init__(self, database: str, patience: float = 0.0, **kwargs: Any) -> None:
        self._path = None if database == ":memory:" else Path(database).resolve()  # SQLite's `-wal` is beside that
        self._lock = None if self._path is None else _held(self._path, time.monotonic() + patience)
        self._snapshot: sqlite3.Connection | None = None
        self._copier: sqlite3.Connection | None = None
        self.failed, self.mended, self._is_copied = 1, 0, True  # what was there before may not be on the disk
        try:
            super().__init__(
                database if self._path is None else str(self._path),
                isolation_level=None,
                timeout=patience,
                check_same_thread=False,
                **kwargs,
            )
            self._set_up()
        except BaseException:
            self.close()
            raise

    def _set_up(self) -> None:
        (mode,) = self.execute("PRAGMA journal_mode=WAL").fetchone()
        if self._path is not None and mode != "wal":
            raise OSError(errno.ENOTSUP, "SQLite has no write-ahead log there")
        self.execute("PRAGMA synchronous=NORMAL")
        self.execute("PRAGMA wal_autocheckpoint=0")
        self.execute("PRAGMA busy_timeout=0")  # from now on nobody else writes, and who reads is not waited for
        if self._path is not None:
            self._snapshot = _beside(self._path)
            self._copier = _beside(self._path)
            self._copier.execute("PRAGMA synchronous=NORMAL")

    def close(self) -> None:
        """Copy what is in `-wal` into the file, and let go of it."""
        for other in (self._snapshot, self._copier):
            if other is not None:
                other.close()
        self._snapshot = self._copier = None
        with suppress(sqlite3.Error):  # it was never opened, is closed already, or is none
            if self.in_transaction:
                self.execute("ROLLBACK")
            self.execute("PRAGMA synchronous=NORMAL")
        with suppress(sqlite3.ProgrammingError):
            super().close()
        if self._lock is not None:  # the last: closing a file lets go of every lock on it that the process has
            os.close(self._lock)
            self._lock = None

    @property
    def changes(self) -> int:
        """Rows that were changed so far; `total_changes` is a number of 32 bits."""
        return int(self.execute("SELECT total_changes()").fetchone()[0])

    @property
    def is_long(self) -> bool:
        """Whether there is so much in `-wal` that it should be copied."""
        return self._log_size() > _LARGE

    @property
    def is_far_too_long(self) -> bool:
        """Whether there is so much in it that it has to be emptied, whoever waits for the disk then."""
        return self._log_size() > _MOST

    def sync(self) -> bool:
        """Return when all that was committed is on the disk, if that took what it was given before.

        Returns:
            Whether there is a disk.

        Raises:
            OSError: If it does not take it; `failed` counts that.
        """
        if self._path is None:
            return False
        file = os.open(_log_of(self._path), os.O_RDONLY)
        try:
            os.fdatasync(file)
        except OSError:
            self.failed += 1
            raise
        finally:
            os.close(file)
        return True

    def write_again(self) -> Iterator[None]:
        """Let the system take all of `-wal` for new, in parts, between which there may be commits.

        What a disk has of what it did not take nobody knows, and the next sync would succeed without it. It is for the
        thread that commits: what is behind the end that SQLite knows of it writes over.

        Raises:
            OSError: If it cannot be written.
        """
        if self._path is None:
            return
        file = os.open(_log_of(self._path), os.O_RDWR)
        try:
            yield from _again(file)
        finally:
            os.close(file)

    def hold(self) -> None:
        """Have a snapshot of what is there now: SQLite does not begin `-wal` anew over it, and so need not wait.

        Raises:
            sqlite3.Error: If it cannot be written. SQLite may wait then.
        """
        snapshot = self._snapshot
        if snapshot is None:
            return
        try:
            # A snapshot holds `-wal` only if there is something in it that is in no other place.
            (version,) = self.execute("PRAGMA user_version").fetchone()
            self.execute(f"PRAGMA user_version={version}")
            self.execute("PRAGMA synchronous=NORMAL")
            if snapshot.in_transaction:
                snapshot.execute("COMMIT")
            snapshot.execute("BEGIN")
            snapshot.execute("SELECT count(*) FROM sqlite_master").fetchone()
            self.execute("PRAGMA synchronous=OFF")
        except sqlite3.Error:
            if not snapshot.in_transaction:
                self.execute("PRAGMA synchronous=NORMAL")
            raise

    def checkpoint(self) -> bool:
        """Copy what is in `-wal` up to the snapshot into the file, and return when that is on the disk.

        Returns:
            Whether all of it was copied that was there at the beginning.

        Raises:
            OSError: If the disk does not take it.
            sqlite3.Error: The same.
        """
        if self._copier is None or self._lock is None:
            return False
        try:
            if not self._is_copied and not _LOCK_BESIDE:
                deque(_again(self._lock), 0)  # closing another descriptor would unlock the file
                os.fdatasync(self._lock)
            self._is_copied = False
            busy, there, copied = self._copier.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            self._is_copied = True
        except (sqlite3.Error, OSError):
            self.failed += 1  # it syncs `-wal` first
            raise
        return not busy and there == copied

    def begin_anew(self) -> None:
        """Empty `-wal`: all of it is in the file, on the disk; for what has been written since, this waits.

        No `sync` may be under way, which could write again what is gone. Where another process reads `-wal` it stays.

        Raises:
            sqlite3.Error: If it cannot be written. SQLite may wait for the disk then.
        """
        assert self._snapshot is not None, "there is no `-wal` in memory"
        self.execute("PRAGMA synchronous=NORMAL")
        self._snapshot.execute("COMMIT")
        try:
            (stays, _, _) = self.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.Error:
            self.failed += 1
            raise
        if not stays:  # what was emptied has nothing of before that could be taken for a part of what follows
            self.execute("PRAGMA synchronous=OFF")
        self.hold()

    def settle(self) -> None:
        """Do all of it, where nobody else waits.

        Raises:
            OSError: If the disk does not take it.
            sqlite3.Error: The same.
        """
        failed = self.failed
        if failed != self.mended:
            deque(self.write_again(), 0)
        self.sync()
        self.mended = failed
        if self.is_long:
            self.hold()
            if self.checkpoint():
                self.begin_anew()

    def _log_size(self) -> int:
        with suppress(OSError):
            return 0 if self._path is None else _log_of(self._path).stat().st_size
        return 0


def _beside(path: Path) -> sqlite3.Connection:
    """Another connection to the file."""
    return sqlite3.connect(path, isolation_level=None, timeout=0.0, check_same_thread=False)


def _again(file: int) -> Iterator[None]:
    """Write a file as it is, in parts."""
    at = 0
    while part := os.pread(file, _PART, at):
        at += os.pwrite(file, part, at)
        yield


def _held(path: Path, until: float) -> int:
    """The file's lock, as a file that is open."""
    of = path.with_name(f"{path.name}-lock") if _LOCK_BESIDE else path
    file = os.open(of, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise
                time.sleep(_ASKED)
        if not path.exists() or not path.stat().st_size:  # what is beside it is of one that was moved away
            path.with_name(f"{path.name}-shm").unlink(missing_ok=True)
    except BaseException:
        os.close(file)
        raise
    return file


def _log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")
