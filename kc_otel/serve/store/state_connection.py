"""A connection to the state file that never waits for the disk, and what makes its commits last.

A commit is in the file `-wal` when it returns: it outlives the process, however that ends. It outlives the machine when
`sync` has returned, which is called on a thread. Nothing else of SQLite waits for a disk but the checkpoint that copies
what is in `-wal` into the file: it has a connection of its own, because a connection that waits is one that nobody can
read from.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

__all__ = ["StateConnection"]

_LARGE: Final = 16 * 1024 * 1024
"""Bytes of `-wal` after which they are copied into the file."""
_ASKED: Final = 0.02
_LOCK_BESIDE: Final = sys.platform != "linux"
"""Where flock is of another kind than the locks of SQLite, the file itself has it: it cannot be moved away from it."""


class StateConnection(sqlite3.Connection):
    """A connection to the state file, which it holds, for one thread; `sync` and `checkpoint` may be on another.

    Args:
        database: Path of the file, or `:memory:`.
        timeout: How long to wait for another that holds it, seconds.
        kwargs: What sqlite3.connect takes besides.

    Raises:
        BlockingIOError: If another holds it.
        OSError: If it cannot be opened.
        sqlite3.Error: If it cannot be opened, or is none.
    """

    def __init__(self, database: str, timeout: float = 0.0, **kwargs: Any) -> None:
        self._path = None if database == ":memory:" else Path(database)
        self._lock = None if self._path is None else _held(self._path, time.monotonic() + timeout)
        self._other: sqlite3.Connection | None = None
        self._doubtful = False
        try:
            super().__init__(database, isolation_level=None, timeout=timeout, check_same_thread=False, **kwargs)
            self.execute("PRAGMA journal_mode=WAL")
            self.execute("PRAGMA synchronous=NORMAL")
            self.execute("PRAGMA wal_autocheckpoint=0")
            if self._path is not None:
                self._other = sqlite3.connect(database, isolation_level=None, check_same_thread=False)
                self._other.execute("PRAGMA synchronous=NORMAL")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Copy what is in `-wal` into the file, and let go of it."""
        if self._other is not None:
            self._other.close()
        with suppress(sqlite3.ProgrammingError):  # it was never opened
            super().close()
        if self._lock is not None:  # the last: closing a file lets go of every lock on it that the process has
            os.close(self._lock)
            self._lock = None

    @property
    def is_long(self) -> bool:
        """Whether there is so much in `-wal` that it should be copied."""
        with suppress(OSError):
            return self._path is not None and _log_of(self._path).stat().st_size > _LARGE
        return False

    def sync(self) -> bool:
        """Return when all that was committed is on the disk.

        Returns:
            Whether there is one.

        Raises:
            OSError: If the disk does not take it. What it then has nobody knows: the next call writes all of it again.
            sqlite3.Error: If that cannot be written.
        """
        if self._path is None:
            return False
        if self._doubtful:
            if not self.checkpoint():
                raise OSError(errno.EBUSY, "another process reads the state file")
            self._doubtful = False
            return True
        try:
            file = os.open(_log_of(self._path), os.O_RDONLY)
        except FileNotFoundError:  # nothing was ever written
            return True
        try:
            os.fdatasync(file)
        except OSError:
            self._doubtful = True
            raise
        finally:
            os.close(file)
        return True

    def checkpoint(self) -> bool:
        """Copy what is in `-wal` into the file, and return when that is on the disk. Others read and write meanwhile.

        Returns:
            Whether all of it was copied that was there at the beginning.

        Raises:
            sqlite3.Error: If it cannot be written.
        """
        if self._other is None:
            return False
        busy, there, copied = self._other.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        return not busy and there == copied

    def begin_anew(self) -> None:
        """Empty `-wal`: its content is in the file, and nothing has been written since `checkpoint`.

        SQLite would wait for the disk at the first write after it, lest what follows is on the disk before the head of
        `-wal` is, and is taken for what was there before. A file that has been emptied has nothing of before.
        """
        (version,) = self.execute("PRAGMA user_version").fetchone()
        self.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        self.execute("PRAGMA synchronous=OFF")
        self.execute(f"PRAGMA user_version={version}")
        self.execute("PRAGMA synchronous=NORMAL")

    def settle(self) -> None:
        """Do all of it, where nobody else waits."""
        self.sync()
        if self.is_long and self.checkpoint():
            self.begin_anew()


def _held(path: Path, until: float) -> int:
    """The file's lock, as a file that is open."""
    of = path.with_name(f"{path.name}-lock") if _LOCK_BESIDE else path
    file = os.open(of, os.O_RDWR | os.O_CREAT, 0o644)
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                os.close(file)
                raise
            time.sleep(_ASKED)
        except BaseException:
            os.close(file)
            raise
        else:
            return file


def _log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")
