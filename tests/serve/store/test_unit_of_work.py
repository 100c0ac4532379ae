"""Memory follows the disk: what a commit refuses is in force nowhere."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest

from kc_otel.serve.store.state_connection import unit_of_work
from kc_otel.serve.store.state_file import StateError
from tests.tools.full_disk import refuse_commits


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.execute("CREATE TABLE content (value TEXT)")
        yield connection


def test_what_is_committed_takes_force_in_the_order_of_the_calls(connection: sqlite3.Connection) -> None:
    done: list[str] = []
    with unit_of_work(connection) as unit:
        unit.on_commit(lambda: done.append("first"))
        unit.on_commit(lambda: done.append("second"))
        unit.on_rollback(lambda: done.append("never"))
        connection.execute("INSERT INTO content VALUES ('a')")
        assert done == []
    assert done == ["first", "second"]
    assert connection.execute("SELECT value FROM content").fetchall() == [("a",)]


def test_a_commit_that_is_refused_takes_force_nowhere(connection: sqlite3.Connection) -> None:
    done: list[str] = []
    refuse_commits(connection)

    def write() -> None:
        with unit_of_work(connection) as unit:
            unit.on_commit(lambda: done.append("never"))
            unit.on_rollback(lambda: done.append("undone"))
            connection.execute("INSERT INTO content VALUES ('a')")

    with pytest.raises(StateError, match="nothing is decided"):
        write()
    connection.set_authorizer(None)
    assert (done, connection.in_transaction) == (["undone"], False)
    assert connection.execute("SELECT value FROM content").fetchall() == []


def test_what_goes_wrong_inside_is_raised_as_it_is(connection: sqlite3.Connection) -> None:

    def write() -> None:
        with unit_of_work(connection):
            connection.execute("INSERT INTO content VALUES ('a')")
            raise LookupError("no such route")

    with pytest.raises(LookupError, match="no such route"):
        write()
    assert connection.execute("SELECT value FROM content").fetchall() == []
