"""The file between serving and rescoring: an SQLite queue in write-ahead mode.

Any number of processes append, one reads. A commit survives the processes being killed at any instant; the file never
grows beyond its bound, and a full disk is met the same way as a full spool: nothing that was acknowledged is lost, what
comes next is refused.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from kc_otel.recordings.request import COLUMNS, Row

MIN_BYTES: Final = 1 << 20
"""Smallest bound of a spool's file."""

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


class SpoolError(Exception):
    """The spool's file cannot be used; the message says what to do."""


class SpoolFullError(SpoolError):
    """The spool's disk is full."""


def connect(path: Path, *, max_bytes: int | None = None, timeout: float = 5.0) -> sqlite3.Connection:
    """Open or create a spool.

    Args:
        path: The file.
        max_bytes: Largest size of the file; None to leave it to the writers.
        timeout: Seconds to wait while another process writes.

    Raises:
        SpoolError: If the file is no spool, or cannot be opened or written.
        SpoolFullError: If its disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Prompts and answers of users: for the account that serves, whatever its umask is. SQLite gives the files
        # beside it the same mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(path, isolation_level=None, timeout=timeout, check_same_thread=False)
    except (sqlite3.Error, OSError) as error:
        raise _unusable(path, error) from None
    try:
        ours = _prepared(connection, max_bytes)
    except sqlite3.Error as error:
        connection.close()
        raise _unusable(path, error) from None
    if not ours:
        connection.close()
        raise SpoolError(f"{path}: is a database of something else; give the spool a file of its own")
    return connection


def append(connection: sqlite3.Connection, rows: Sequence[Row]) -> None:
    """Write all of these rows, or none of them.

    Raises:
        sqlite3.OperationalError: If the spool or the disk is full, or another process holds it for too long.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.executemany(f"INSERT INTO requests ({COLUMNS}) VALUES (?, ?, ?, ?, ?)", rows)  # noqa: S608 - a constant
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite has rolled back by itself where the disk was full
            connection.execute("ROLLBACK")
        raise


def forget(connection: sqlite3.Connection, numbers: Iterable[int]) -> None:
    """Remove rows, so that neither the file nor its write-ahead log holds anything of them any more.

    While another process reads or writes, the log keeps its pages until the next call.

    Raises:
        sqlite3.OperationalError: If the file cannot be written; nothing is removed.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.executemany("DELETE FROM requests WHERE id = ?", [(number,) for number in numbers])
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def expire(connection: sqlite3.Connection, before: float) -> int:
    """Remove requests that were finished before a Unix time; how many. Those without a time stay.

    Raises:
        sqlite3.OperationalError: As for `forget`.
    """
    # Rows stand about in the order of their times: the old ones are the first.
    gone = 0
    while True:
        first = connection.execute(
            "SELECT id, json_extract(about, '$.at') FROM requests WHERE json_valid(about) ORDER BY id LIMIT ?",
            (_EXPIRED_AT_ONCE,),
        ).fetchall()
        old = [number for number, at in first if isinstance(at, int) and 0 < at < before * 1e9]
        if old:
            forget(connection, old)
            gone += len(old)
        if len(old) < _EXPIRED_AT_ONCE:
            return gone


def _prepared(connection: sqlite3.Connection, max_bytes: int | None) -> bool:
    """Return True if the database is a spool; an empty one is made into a spool."""
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
    if tables and connection.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION_ID:
        return False
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute(f"PRAGMA wal_autocheckpoint={_WAL_PAGES}")
    connection.execute("PRAGMA secure_delete=ON")  # what is removed is overwritten: it is what people asked and got
    if not tables:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(_TABLE)
        connection.execute(f"PRAGMA application_id={_APPLICATION_ID}")
        connection.execute("COMMIT")
    if max_bytes is not None:
        page = connection.execute("PRAGMA page_size").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count={max(max_bytes, MIN_BYTES) // page}")
    return True


def is_full(error: BaseException) -> bool:
    """Return True if an error means that the spool, or its disk, has no room."""
    name = getattr(error, "sqlite_errorname", "")
    return name == "SQLITE_FULL" or isinstance(error, SpoolFullError) or getattr(error, "errno", None) == errno.ENOSPC


def _unusable(path: Path, error: Exception) -> SpoolError:
    if is_full(error):
        return SpoolFullError(f"{path}: has no room ({error}); make some on its disk, and what comes then is kept")
    if isinstance(error, sqlite3.OperationalError | OSError):
        return SpoolError(f"{path}: cannot be opened as a spool ({error}); give a file in a folder that can be written")
    return SpoolError(f"{path}: is not a spool ({error}); move it away, or give another file")
