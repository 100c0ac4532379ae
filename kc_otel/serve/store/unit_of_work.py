"""One transaction on the state file, and what takes force in memory because of it.

Whoever writes is given the unit, writes into the transaction, and leaves what it will remember with `on_commit`. Memory
therefore follows the disk: it changes after the commit, all of it, or not at all. What may fail alone is `apart`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kc_otel.serve.store.state_file import StateError

__all__ = ["UnitOfWork", "unit_of_work"]


class UnitOfWork:
    """What is to be done in memory when the transaction has ended; made by `unit_of_work`."""

    def __init__(self) -> None:
        self._committed: list[Callable[[], None]] = []
        self._rolled_back: list[Callable[[], None]] = []

    def on_commit(self, adopt: Callable[[], None]) -> None:
        """Do this once everything is written, in the order of the calls; it may not fail."""
        self._committed.append(adopt)

    def on_rollback(self, undo: Callable[[], None]) -> None:
        """Do this when nothing was written."""
        self._rolled_back.append(undo)

    @contextmanager
    def apart(self, connection: sqlite3.Connection) -> Iterator[None]:
        """Everything inside is part of the transaction, or nothing of it where an error leaves it; that is raised."""
        committed, rolled_back = len(self._committed), len(self._rolled_back)
        connection.execute("SAVEPOINT apart")
        try:
            yield
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK TO apart")
                connection.execute("RELEASE apart")
            undo = self._rolled_back[rolled_back:]
            del self._committed[committed:], self._rolled_back[rolled_back:]
            for callback in undo:
                callback()
            raise
        connection.execute("RELEASE apart")

    def end(self, *, committed: bool) -> None:
        """Do what was asked for."""
        for callback in self._committed if committed else self._rolled_back:
            callback()


@contextmanager
def unit_of_work(connection: sqlite3.Connection) -> Iterator[UnitOfWork]:
    """Everything inside is written and then takes force, or nothing of it.

    Raises:
        StateError: If it cannot be written, a commit that the disk refuses included.
    """
    unit = UnitOfWork()
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield unit
        connection.execute("COMMIT")
    except BaseException as error:
        if connection.in_transaction:  # SQLite itself ends one for which the disk has no room
            connection.execute("ROLLBACK")
        unit.end(committed=False)
        if isinstance(error, sqlite3.DatabaseError):
            msg = f"the state cannot be written, so nothing is decided: {error}"
            raise StateError(msg) from error
        raise
    unit.end(committed=True)
