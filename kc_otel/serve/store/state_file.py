"""The one SQLite file that everything the evaluator must not forget lives in, and whose holder is the one that acts.

The operating system's lock on the file decides which of several evaluators is active: it is taken before anything is
decided, there is one, and it is let go of when its holder ends in whatever way. What the next holder does goes on from
what the last one wrote: the same alerts, the same unsent webhooks under the same ids, the next version of the table.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Final

__all__ = ["StateError", "StateHeldError", "StatePlace", "open_state"]

_PATIENCE: Final = 2.0


class StateError(Exception):
    """The state file cannot be used; the message says what to do."""


class StateHeldError(StateError):
    """Another evaluator holds the state file."""


class StatePlace:
    """Whether a path still leads to the file that was opened.

    An evaluator whose file has been moved or replaced holds the lock of a file that no other looks at: two would act.

    Args:
        path: The state file, just opened; None for one in memory, which nobody can move.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file = None if path is None else _identity(path)

    def check(self) -> None:
        """Nothing, while the file is where it was.

        Raises:
            StateError: If it is not.
        """
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


def open_state(path: Path | None, *, patience: float = _PATIENCE) -> sqlite3.Connection:
    """Open or create the state file and take its lock; None gives a database in memory.

    Write-ahead logging makes a commit survive the process being killed at any instant, and a write-ahead log that is
    synchronised with every commit makes it survive the machine losing power.

    Args:
        path: The file.
        patience: How long to wait for another evaluator that holds it, seconds.

    Raises:
        StateHeldError: If another evaluator holds it.
        StateError: If the file is not a database, or cannot be written.
    """
    target = ":memory:" if path is None else str(path)
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(target, isolation_level=None, timeout=patience, check_same_thread=False)
    except (sqlite3.Error, OSError) as error:
        raise _unusable(target, error) from None
    try:
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        connection.close()
        raise _unusable(target, error) from None
    return connection


def _identity(path: Path) -> tuple[int, int]:
    status = os.stat(path)  # noqa: PTH116 - the same, and what a reader of inodes looks for
    return status.st_dev, status.st_ino


def _unusable(target: str, error: Exception) -> StateError:
    if "locked" in str(error):
        return StateHeldError(
            f"{target}: another evaluator is using this state file; stop it, give --state another file, or start with "
            "--standby to take over when it ends"
        )
    if isinstance(error, sqlite3.OperationalError | OSError):
        return StateError(
            f"{target}: cannot open the state file ({error}); give --state a file in a folder that can be written"
        )
    return StateError(f"{target}: not a usable state file ({error}); move it away, or give --state another file")
