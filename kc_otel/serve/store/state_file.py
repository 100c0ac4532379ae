"""The one SQLite file that everything the evaluator must not forget lives in, and its transactions.

The operating system's lock on the file decides which of several evaluators is active: it is taken before anything is
decided, and is let go of when its holder ends in whatever way. The next holder continues from the state that the last
one wrote.

SQLite in WAL mode with `synchronous=FULL`: a commit returns, and is seen by readers, once it is on the disk, and what a
failed sync left out SQLite writes again with the next commit. Checkpoints, which sync twice, are part of commits.
SQLite has one writer, and so has this: a `turn` is the transaction of who may write now, others queue. The event loop
executes its statements, which touch memory and the system's cache, and a thread executes COMMIT. Meanwhile the event
loop reads by a second connection, which shows what was committed last; so nothing is read that the disk does not have.

A writer receives the `UnitOfWork`, writes into the transaction, and registers its changes in memory with `on_commit`.
Memory therefore follows the disk: it changes after the commit, all of it, or not at all.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

_CHECKPOINT_PAGES: Final = 4000
"""Pages of 4 KiB in `-wal` after which a commit copies them into the file: 16 MiB."""
_LOCK_POLL_SECONDS: Final = 0.02
_LOCK_BESIDE: Final = sys.platform != "linux"
"""True where flock differs from SQLite's locks: the state file itself is locked, so it cannot be moved away."""


_LOCK_WAIT_SECONDS: Final = 2.0
_DAMAGE_ERRORS: Final = (sqlite3.DatabaseError, ValueError, KeyError, TypeError, IndexError, OverflowError)
"""Exceptions raised by reading bytes that are not what was written."""
_DISK_ERRORS: Final = frozenset(
    getattr(sqlite3, f"SQLITE_{name}")
    for name in ("BUSY", "CANTOPEN", "FULL", "IOERR", "LOCKED", "NOMEM", "PERM", "READONLY")
)


class StateError(Exception):
    """The state file cannot be used; the message says what to do."""


class UnitOfWork:
    """Actions to take in memory after the transaction has ended; `error` is why it was not committed."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._is_committed = False
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
        """Execute the remaining writes and commit the transaction; roll it back if that fails."""
        try:
            if self._before and not connection.in_transaction:
                connection.execute("BEGIN IMMEDIATE")
            for write in self._before:
                write(connection)
            if connection.in_transaction:
                connection.execute("COMMIT")
            self._is_committed = True
        except BaseException as error:
            self.error = error
            roll_back(connection)
            raise

    def end(self) -> None:
        """Run the callbacks and release them: they hold the unit and bodies of requests in a cycle."""
        callbacks = self._committed if self._is_committed else self._rolled_back
        self._before, self._committed, self._rolled_back = [], [], []
        for callback in callbacks:
            callback()


class StateConnection(sqlite3.Connection):
    """A connection to the state file, which it holds. Use it from one thread, and `turn` from one event loop.

    It waits `patience` seconds for another that holds the file, and then raises a BlockingIOError.

    Attributes:
        path: The file; None in memory.
        is_committing: Whether a thread commits a turn, so that nothing else can be written.
        unit: The unit of work of the turn that is under way; None outside of one.
        join: Adds to a turn what waits for any commit, such as requests; they need none of their own then.
        commit_seconds: How long the last commit of a turn took; None before the first, and in memory.
    """

    def __init__(self, database: str, patience: float = 0.0) -> None:
        self._place = None if database == ":memory:" else Path(database)
        self.path = None if self._place is None else self._place.resolve()  # SQLite's `-wal` is beside that
        self.unit: UnitOfWork | None = None
        self.join: Callable[[UnitOfWork], None] = lambda _unit: None
        self.commit_seconds: float | None = None
        self._lock = None if self.path is None else _held(self.path, time.monotonic() + patience)
        self._writer: sqlite3.Connection | None = None
        """None in memory, where no commit waits and this is the only connection."""
        self.is_committing = self._is_closed = False
        self._turns = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "kc-otel-state")  # others' work keeps no commit waiting
        options: dict[str, Any] = {"isolation_level": None, "timeout": 0.0, "check_same_thread": False}
        try:
            super().__init__(database if self.path is None else str(self.path), **options)
            if self.path is None:
                return
            self._opened = self.path.stat()
            self._writer = _set_up(sqlite3.connect(self.path, **options))
            super().execute("PRAGMA query_only=ON")
        except BaseException:
            self.close()
            raise

    @property
    def in_transaction(self) -> bool:
        """True if a transaction has begun."""
        return super().in_transaction if self._writer is None else self._writer.in_transaction

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """Execute a statement. While a commit is under way it can only read, and reads what was committed before."""
        if self._writer is None or self.is_committing:
            return super().execute(sql, parameters)
        return self._writer.execute(sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> sqlite3.Cursor:
        """Execute a statement for each of the parameters, see `execute`."""
        if self._writer is None or self.is_committing:
            return super().executemany(sql, parameters)
        return self._writer.executemany(sql, parameters)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[UnitOfWork]:
        """Run all units of work inside in one transaction; there must be no `await`.

        It is on the disk when this ends, and what was left with `on_commit` is done. Cancelling the caller does not
        cancel the commit. A StateError says that nothing of it could be written.
        """
        await self._turns.acquire()
        unit = UnitOfWork()
        try:
            if self._is_closed:
                raise StateError("the state is closed")  # noqa: TRY301 - as any other
            self.unit = unit
            yield unit
            self.join(unit)
        except BaseException:
            if not self._is_closed:
                roll_back(self)
            unit.end()
            self._turns.release()
            raise
        finally:
            self.unit = None
        if self._writer is None:
            await self._end(unit)
            return
        self.is_committing = True  # at once: nobody else sees uncommitted data
        ending = asyncio.create_task(self._end(unit))
        ending.add_done_callback(lambda done: done.cancelled() or done.exception())  # if nobody waits any more
        await asyncio.shield(ending)

    def check_place(self) -> None:
        """Raise a StateError if the file was moved or replaced: another evaluator could lock its successor and act."""
        try:
            moved = self._place is not None and not os.path.samestat(self._place.stat(), self._opened)
        except FileNotFoundError:
            moved = True
        except OSError:  # a disk that cannot be asked just now says nothing about who holds the file
            return
        if moved:
            raise StateError(
                f"{self._place}: this is no longer the state file that was opened, so another evaluator may be acting; "
                "move it only while no evaluator runs"
            )

    def close(self) -> None:
        """Wait for a commit that is under way, copy the `-wal` file into the state file, and unlock it."""
        self._is_closed = True
        self._thread.shutdown()
        with suppress(sqlite3.ProgrammingError):  # it was never opened, or is closed already
            super().close()
        if self._writer is not None:
            with suppress(sqlite3.Error):  # the disk does not take it
                roll_back(self._writer)
            self._writer.close()
        if self._lock is not None:  # the last: closing a file lets go of every lock on it that the process has
            os.close(self._lock)
            self._lock = None

    async def aclose(self) -> None:
        """Close the file after all waiting turns."""
        async with self._turns:
            self.close()

    async def _end(self, unit: UnitOfWork) -> None:
        """Commit on the thread, and let the next have its turn."""
        began = time.monotonic()
        try:
            with _writing():
                if self._writer is None:
                    unit.commit(self)
                    return
                await asyncio.get_running_loop().run_in_executor(self._thread, unit.commit, self._writer)
                self.commit_seconds = time.monotonic() - began
        finally:
            self.is_committing = False
            unit.end()
            self._turns.release()


def _set_up(writer: sqlite3.Connection) -> sqlite3.Connection:
    (mode,) = writer.execute("PRAGMA journal_mode=WAL").fetchone()
    if mode != "wal":
        raise OSError(errno.ENOTSUP, "SQLite has no write-ahead log there")
    writer.execute("PRAGMA synchronous=FULL")
    writer.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
    writer.execute("PRAGMA cache_spill=OFF")  # else a large transaction may sync before its commit
    return writer


def _held(path: Path, until: float) -> int:
    """The file's lock, as a file that is open."""
    of = path.with_name(f"{path.name}-lock") if _LOCK_BESIDE else path
    file = os.open(of, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise
                time.sleep(_LOCK_POLL_SECONDS)
        if not path.exists() or not path.stat().st_size:  # files beside it belong to one that was moved away
            path.with_name(f"{path.name}-shm").unlink(missing_ok=True)
    except BaseException:
        os.close(file)
        raise
    return file


@contextmanager
def unit_of_work(connection: sqlite3.Connection) -> Iterator[UnitOfWork]:
    """Commit all writes inside, then run `on_commit`; or a StateError and none. A turn commits its units together."""
    turn: UnitOfWork | None = getattr(connection, "unit", None)
    if turn is None and getattr(connection, "is_committing", False):
        raise RuntimeError("the state is written outside of a turn, while that of another is under way")
    unit = turn or UnitOfWork()
    with _writing():
        try:
            if not connection.in_transaction:
                connection.execute("BEGIN IMMEDIATE")
            with unit.apart(connection):
                yield unit
            if turn is None:
                unit.commit(connection)
        finally:
            if turn is None:
                roll_back(connection)
                unit.end()


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise StateError(f"the state cannot be written, so nothing is decided: {error}") from error


def roll_back(connection: sqlite3.Connection) -> None:
    """Take back the transaction, unless SQLite has: one for which the disk has no room it ends itself."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")


class StateHeldError(StateError):
    """Another evaluator holds the state file."""


class DamagedStateError(StateError):
    """The state file contains data that no evaluator has written."""


def open_state(path: Path | None, *, patience: float = _LOCK_WAIT_SECONDS) -> StateConnection:
    """Open or create the state file and take its lock, within `patience` seconds; None gives a database in memory.

    Raises a StateHeldError, a DamagedStateError for what is no whole database, or a StateError.
    """
    target, connection = ":memory:" if path is None else str(path), None
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        connection = StateConnection(target, patience)
        (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise _damaged(target, found.splitlines()[-1])
    except (sqlite3.Error, OSError, UnicodeDecodeError, DamagedStateError) as error:
        if connection is not None:
            connection.close()
        raise error if isinstance(error, DamagedStateError) else _unusable(target, error) from None
    return connection


@contextmanager
def reading_state(connection: sqlite3.Connection) -> Iterator[None]:
    """Raise a DamagedStateError if a read inside meets data that no evaluator has written."""
    try:
        yield
    except _DAMAGE_ERRORS as error:
        if _of_the_disk(error):
            raise
        (_, _, path) = connection.execute("PRAGMA database_list").fetchone()
        raise _damaged(path or ":memory:", f"{type(error).__name__}: {error}".splitlines()[0]) from error


def _unusable(target: str, error: Exception) -> StateError:
    if isinstance(error, BlockingIOError) or "locked" in str(error):
        return StateHeldError(
            f"{target}: another evaluator is using this state file; stop it, give --state another file, or start with "
            "--standby to take over when it ends"
        )
    if _of_the_disk(error):
        return StateError(
            f"{target}: cannot open the state file ({error}); give --state a file in a folder that can be written"
        )
    return _damaged(target, str(error))


def _of_the_disk(error: Exception) -> bool:
    """Return True if the disk is at fault, and not its content."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return isinstance(error, OSError) or code in _DISK_ERRORS


def _damaged(target: str, why: str) -> DamagedStateError:
    return DamagedStateError(
        f"{target}: the state file is damaged, or is none ({why}). Routes, pins, silences and promotions are in it: "
        "remove FILE-wal and FILE-shm and put a copy in place of FILE, or give --state another file to begin without "
        "them; senders of cumulative histograms fill the windows anew within one export"
    )
