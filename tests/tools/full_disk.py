"""State files that cannot be written any more."""

import sqlite3
from typing import Any

__all__ = ["fill_disk", "refuse_commits", "relieve"]

_TRANSACTION = 22  # SQLITE_TRANSACTION, which the module has no name for


def _writer(connection: sqlite3.Connection) -> sqlite3.Connection:
    return getattr(connection, "_writer", None) or connection


def refuse_commits(connection: sqlite3.Connection) -> None:
    """From now on every COMMIT fails, after everything before it has been written."""

    def decide(action: int, what: str | None, *_: Any) -> int:
        return sqlite3.SQLITE_DENY if (action, what) == (_TRANSACTION, "COMMIT") else sqlite3.SQLITE_OK

    _writer(connection).set_authorizer(decide)


def fill_disk(connection: sqlite3.Connection) -> None:
    """From now on nothing that needs another page finds room."""
    connection.execute("PRAGMA max_page_count = 1")  # SQLite raises it to what the file has


def relieve(connection: sqlite3.Connection) -> None:
    _writer(connection).set_authorizer(None)
    connection.execute("PRAGMA max_page_count = 1000000")
