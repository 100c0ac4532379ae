"""Small values in the state file, by name, as JSON. Nothing here commits."""

from __future__ import annotations

import sqlite3
from typing import Any, TypeVar

from kc_otel.judge.plain_json import read_json, to_json

__all__ = ["KeyValueStore"]

Value = TypeVar("Value")


class KeyValueStore:
    """What must survive a restart and is too small for a table of its own.

    Args:
        connection: The state file; its owner owns the transactions.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        connection.execute(
            "CREATE TABLE IF NOT EXISTS key_values (name TEXT PRIMARY KEY, content TEXT NOT NULL) STRICT"
        )

    def load(self, name: str, kind: type[Value]) -> Value | None:
        """The value that was saved last; None when there is none."""
        row = self._connection.execute("SELECT content FROM key_values WHERE name = ?", (name,)).fetchone()
        return None if row is None else read_json(kind, row[0])

    def save(self, name: str, value: Any) -> None:
        """Keep a value in place of the last one; None keeps nothing."""
        if value is None:
            self._connection.execute("DELETE FROM key_values WHERE name = ?", (name,))
            return
        self._connection.execute(
            "INSERT INTO key_values (name, content) VALUES (?, ?)"
            " ON CONFLICT (name) DO UPDATE SET content = excluded.content",
            (name, to_json(value)),
        )
