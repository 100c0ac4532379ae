"""The one SQLite file that everything the evaluator must not forget lives in."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["StateError", "open_state", "transaction"]


class StateError(Exception):
    """The state file cannot be used; the message says what to do."""


def open_state(path: Path | None) -> sqlite3.Connection:
    """Open or create the state file; None gives a database in memory.

    Write-ahead logging makes a commit survive the process being killed at any instant.

    Raises:
        StateError: If the file is not a database, cannot be written, or another evaluator holds it.
    """
    target = ":memory:" if path is None else str(path)
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(target, isolation_level=None, timeout=2.0, check_same_thread=False)
    except (sqlite3.Error, OSError) as error:
        raise StateError(_unusable(target, error)) from None
    try:
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        connection.close()
        raise StateError(_unusable(target, error)) from None
    return connection


def _unusable(target: str, error: Exception) -> str:
    if "locked" in str(error):
        return f"{target}: another evaluator is using this state file; stop it, or give --state another file"
    if isinstance(error, sqlite3.OperationalError | OSError):
        return f"{target}: cannot open the state file ({error}); give --state a file in a folder that can be written"
    return f"{target}: not a usable state file ({error}); move it away, or give --state another file"


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Everything inside is written, or nothing is."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
