"""The decision table in SQLite: one row, in the transaction of the evaluator's tick. Nothing here commits."""

from __future__ import annotations

import json
import sqlite3

from kc_otel.routing.table import DecisionTable

__all__ = ["DecisionStore"]


class DecisionStore:
    """Keeps the decision table over restarts.

    Args:
        connection: The evaluator's connection; it owns the transactions.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        connection.execute(
            "CREATE TABLE IF NOT EXISTS decision_table ("
            " only INTEGER PRIMARY KEY CHECK (only = 1), version INTEGER NOT NULL, content TEXT NOT NULL) STRICT"
        )

    def load(self) -> DecisionTable:
        """The table that was saved last; an empty one of version 0 when there is none."""
        row = self._connection.execute("SELECT content FROM decision_table").fetchone()
        return DecisionTable() if row is None else DecisionTable.from_json(json.loads(row[0]))

    def save(self, table: DecisionTable) -> None:
        """Keep the table in place of the last one."""
        self._connection.execute(
            "INSERT INTO decision_table (only, version, content) VALUES (1, ?, ?)"
            " ON CONFLICT (only) DO UPDATE SET version = excluded.version, content = excluded.content",
            (table.version, json.dumps(table.to_json(), separators=(",", ":"), allow_nan=False)),
        )
