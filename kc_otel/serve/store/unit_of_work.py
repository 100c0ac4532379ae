"""One transaction on the state file, and what takes force in memory because of it.

A writer receives the unit, writes into the transaction, and registers its changes in memory with `on_commit`. Memory
therefore follows the disk: it changes after the commit, all of it, or not at all. Work that may fail alone is `apart`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StateError(Exception):
    """The state file cannot be used; the message says what to do."""


class UnitOfWork:
    """Actions to take in memory after the transaction has ended; `error` is why it was not committed."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._before: list[Callable[[sqlite3.Connection], object]] = []
        self._committed: list[Callable[[], None]] = []
        self._rolled_back: list[Callable[[], None]] = []

    def before_commit(self, write: Callable[[sqlite3.Connection], object]) -> None:
        """Execute this at the end of the transaction, by the thread that commits."""
        self._before.append(write)

    def on_commit(self, adopt: Callable[[], None]) -> None:
        """Do this once everything is written, in the order of the calls; it may not fail."""
        self._committed.append(adopt)

    def on_rollback(self, undo: Callable[[], None]) -> None:
        """Do this when nothing was written."""
        self._rolled_back.append(undo)

    @contextmanager
    def apart(self, connection: sqlite3.Connection) -> Iterator[None]:
        """Add everything inside to the transaction, or nothing if an error leaves it; the error is raised."""
        before, committed, rolled_back = len(self._before), len(self._committed), len(self._rolled_back)
        connection.execute("SAVEPOINT apart")
        try:
            yield
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK TO apart")
                connection.execute("RELEASE apart")
            undo = self._rolled_back[rolled_back:]
            del self._before[before:], self._committed[committed:], self._rolled_back[rolled_back:]
            for callback in undo:
                callback()
            raise
        connection.execute("RELEASE apart")

    def commit(self, connection: sqlite3.Connection) -> None:
        """Execute what is left of the transaction, and commit it, or take it back where that fails."""
        try:
            if self._before and not connection.in_transaction:
                connection.execute("BEGIN IMMEDIATE")
            for write in self._before:
                write(connection)
            if connection.in_transaction:
                connection.execute("COMMIT")
        except BaseException as error:
            self.error = error
            roll_back(connection)
            raise

    def end(self, *, committed: bool) -> None:
        """Run the callbacks and release them: they hold the unit and bodies of requests in a cycle."""
        callbacks = self._committed if committed else self._rolled_back
        self._before, self._committed, self._rolled_back = [], [], []
        for callback in callbacks:
            callback()


@contextmanager
def unit_of_work(connection: sqlite3.Connection) -> Iterator[UnitOfWork]:
    """Write everything inside and then apply it, or nothing of it; as a part of the turn, if there is one.

    Outside of a turn this is a transaction by itself, and waits for the disk. A StateError says that it cannot be
    written, a commit that the disk refuses included.
    """
    turn: UnitOfWork | None = getattr(connection, "unit", None)
    if turn is None:
        yield from _by_itself(connection)
        return
    try:
        if not connection.in_transaction:
            connection.execute("BEGIN IMMEDIATE")
        with turn.apart(connection):
            yield turn
    except sqlite3.DatabaseError as error:
        raise _unwritten(error) from error


def _by_itself(connection: sqlite3.Connection) -> Iterator[UnitOfWork]:
    if getattr(connection, "is_committing", False):
        raise RuntimeError("the state is written outside of a turn, while that of another is under way")
    unit = UnitOfWork()
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield unit
        unit.commit(connection)
    except BaseException as error:
        roll_back(connection)
        unit.end(committed=False)
        if isinstance(error, sqlite3.DatabaseError):
            raise _unwritten(error) from error
        raise
    unit.end(committed=True)


def roll_back(connection: sqlite3.Connection) -> None:
    """Take back the transaction, unless SQLite has: one for which the disk has no room it ends itself."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def _unwritten(error: sqlite3.DatabaseError) -> StateError:
    return StateError(f"the state cannot be written, so nothing is decided: {error}")
