"""Values in the state file by contract, kind and key: dataclasses as JSON, or bytes. Nothing here commits."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from kc_otel.judge.plain_json import read_json, to_json

Value = TypeVar("Value")


class Values:
    """Everything that is read as a whole at the start; contract and key are empty for what has none."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        connection.execute(
            "CREATE TABLE IF NOT EXISTS state_values (contract TEXT, kind TEXT, key, data BLOB NOT NULL, "
            "PRIMARY KEY (contract, kind, key))"
        )

    def load(self, kind: str, of: type[Value], default: Value, contract: str = "") -> Value:
        """Return the value that `save` has written."""
        row = self._connection.execute(
            "SELECT data FROM state_values WHERE (contract, kind, key) = (?, ?, '')", (contract, kind)
        ).fetchone()
        return default if row is None else read_json(of, row[0])

    def save(self, kind: str, value: Any, contract: str = "") -> None:
        """Write the only value of a kind."""
        self.write(contract, kind, {"": to_json(value)})

    def read(self, kind: str) -> list[tuple[str, Any, Any]]:
        """Contract, key and data of all values of a kind, by key."""
        return self._connection.execute(
            "SELECT contract, key, data FROM state_values WHERE kind = ? ORDER BY key", (kind,)
        ).fetchall()

    def keys(self, contract: str, kind: str) -> list[Any]:
        """Return the keys of a contract's values of a kind."""
        rows = self._connection.execute(
            "SELECT key FROM state_values WHERE (contract, kind) = (?, ?)", (contract, kind)
        )
        return [key for (key,) in rows]

    def write(self, contract: str, kind: str, values: Mapping[Any, bytes | str | None]) -> None:
        """Write values by their keys where they have changed; None for those that are gone."""
        self._connection.executemany(
            "INSERT INTO state_values VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET data = excluded.data "
            "WHERE data <> excluded.data",
            [(contract, kind, key, data) for key, data in values.items() if data is not None],
        )
        self._connection.executemany(
            "DELETE FROM state_values WHERE (contract, kind, key) = (?, ?, ?)",
            [(contract, kind, key) for key, data in values.items() if data is None],
        )

    def forget_others(self, kinds: Iterable[str], contracts: Iterable[str]) -> None:
        """Delete the values of these kinds that are of other contracts."""
        self._connection.execute(
            "DELETE FROM state_values WHERE kind IN (SELECT value FROM json_each(?)) AND contract NOT IN "
            "(SELECT value FROM json_each(?))",
            (json.dumps([*kinds]), json.dumps([*contracts])),
        )
