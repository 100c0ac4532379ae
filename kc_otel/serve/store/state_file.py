"""The one SQLite file that everything the evaluator must not forget lives in, and whose holder is the one that acts.

The operating system's lock on the file decides which of several evaluators is active: it is taken before anything is
decided, there is one, and it is let go of when its holder ends in whatever way. The next holder continues from the
state that the last one wrote: the same alerts, the same unsent webhooks under the same ids, the next version of the
table.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from kc_otel.serve.store.state_connection import StateConnection, StateError

_LOCK_WAIT_SECONDS: Final = 2.0
_DAMAGE_ERRORS: Final = (sqlite3.DatabaseError, ValueError, KeyError, TypeError, IndexError, OverflowError)
"""Exceptions raised by reading bytes that are not what was written."""
_DISK_ERRORS: Final = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
    }
)


class StateHeldError(StateError):
    """Another evaluator holds the state file."""


class DamagedStateError(StateError):
    """The state file contains data that no evaluator has written."""


class StatePlace:
    """Check that a path still leads to the file that was opened; one in memory nobody can move.

    An evaluator whose file has been moved or replaced locks a file that no other process opens: two would act.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file = None if path is None else _identity(path)

    def check(self) -> None:
        """Raise a StateError if the file is no longer where it was."""
        if self._path is None:
            return
        try:
            there = _identity(self._path)
        except FileNotFoundError:
            there = None
        except OSError:  # a disk that cannot be asked just now says nothing about who holds the file
            return
        if there != self._file:
            msg = (
                f"{self._path}: this is no longer the state file that was opened, so another evaluator may be acting; "
                "move it only while no evaluator runs"
            )
            raise StateError(msg)


def open_state(path: Path | None, *, patience: float = _LOCK_WAIT_SECONDS) -> StateConnection:
    """Open or create the state file and take its lock; None gives a database in memory.

    It waits `patience` seconds for another evaluator that holds the file, and then raises a StateHeldError. A file that
    is no whole database raises a DamagedStateError, one that cannot be written a StateError.
    """
    target = ":memory:" if path is None else str(path)
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        connection = StateConnection(target, patience)
    except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
        raise _unusable(target, error) from None
    try:
        (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise _damaged(target, found.splitlines()[-1])
    except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
        connection.close()
        raise _unusable(target, error) from None
    except DamagedStateError:
        connection.close()
        raise
    return connection


@contextmanager
def reading_state(connection: sqlite3.Connection) -> Iterator[None]:
    """Raise a DamagedStateError if a read inside meets data that no evaluator has written."""
    try:
        yield
    except _DAMAGE_ERRORS as error:
        if _of_the_disk(error):
            raise
        (_, _, path) = connection.execute("PRAGMA database_list").fetchone()
        raise _damaged(path or ":memory:", f"{type(error).__name__}: {error}".splitlines()[0]) from error


def set_aside(path: Path, at: float) -> Path:
    """Rename a damaged state file and the files that belong to it, so that the next evaluator starts empty.

    Its new name is that of the file, `.damaged-` and the time in UTC.
    """
    aside = path.with_name(f"{path.name}.damaged-{datetime.fromtimestamp(at, UTC):%Y%m%dT%H%M%S}Z")
    for part in ("-wal", "-shm", ""):
        beside = path.with_name(path.name + part)
        if beside.exists():
            beside.rename(aside.with_name(aside.name + part))
    return aside


def _identity(path: Path) -> tuple[int, int]:
    status = os.stat(path)  # noqa: PTH116 - the same, and what a reader of inodes looks for
    return status.st_dev, status.st_ino


def _unusable(target: str, error: Exception) -> StateError:
    if isinstance(error, BlockingIOError) or "locked" in str(error):
        return StateHeldError(
            f"{target}: another evaluator is using this state file; stop it, give --state another file, or start with "
            "--standby to take over when it ends"
        )
    if _of_the_disk(error):
        return StateError(
            f"{target}: cannot open the state file ({error}); give --state a file in a folder that can be written"
        )
    return _damaged(target, str(error))


def _of_the_disk(error: Exception) -> bool:
    """Return True if the disk is at fault, and not its content."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return isinstance(error, OSError) or code in _DISK_ERRORS


def _damaged(target: str, why: str) -> DamagedStateError:
    return DamagedStateError(
        f"{target}: the state file is damaged, or is none ({why}). Routes, pins, silences and promotions are in it: "
        "put back a copy, or start with --set-aside-damaged to move it away and begin without them; senders of "
        "cumulative histograms fill the windows anew within one export"
    )
