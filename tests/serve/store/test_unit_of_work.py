"""Memory follows the disk: what a commit refuses is in force nowhere."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest

from kc_otel.serve.store.unit_of_work import unit_of_work


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.execute("CREATE TABLE content (value TEXT)")
        yield connection


def test_what_is_committed_takes_force_in_the_order_of_the_calls(connection: sqlite3.Connection) -> None:
    """And not before it is on disk."""
    done: list[str] = []
    with unit_of_work(connection) as unit:
        unit.on_commit(lambda: done.append("first"))
        unit.on_commit(lambda: done.append("second"))
        unit.on_rollback(lambda: done.append("never"))
        connection.execute("INSERT INTO content VALUES ('a')")
        assert done == []
    assert done == ["first", "second"]
    assert connection.execute("SELECT value FROM content").fetchall() == [("a",)]
