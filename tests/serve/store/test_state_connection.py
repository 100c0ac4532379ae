"""What is committed to the state file is on the disk when it is said to be, and only who asked for it waits."""

import asyncio
import gc
import json
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kc_otel.serve.durable_sink import Inbox
from kc_otel.serve.store.state_file import StateConnection, StateError, UnitOfWork, open_state, unit_of_work
from tests.tools.full_disk import refuse_commits, relieve
from tests.tools.slow_disk import slow_disk

pytestmark = pytest.mark.anyio

_SECTOR = 512
_WRITES = """
import asyncio, os, random, sys, time
from pathlib import Path
from kc_otel.serve.store import state_file
from kc_otel.serve.durable_sink import Inbox
from kc_otel.serve.store.state_file import StateError, open_state
from kc_otel.serve.store.state_file import unit_of_work

state_file._CHECKPOINT_PAGES = 25
path, slow, fails, shadow = map(Path, sys.argv[1:])
state = open_state(path)
with unit_of_work(state):
    state.execute("CREATE TABLE snapshot (n INTEGER PRIMARY KEY)")
    state.execute("CREATE TABLE filling (n INTEGER PRIMARY KEY, content BLOB)")
    state.execute("CREATE TABLE ordered (n INTEGER PRIMARY KEY)")
    inbox = Inbox(state)
applied, ended, longest, refused = [], False, 0.0, 0

def promised(what, n):
    print(what, n, len(list(shadow.glob("[0-9]*"))), flush=True)

async def ticks():
    global ended, refused
    for n in range(20):
        if n in (6, 13):
            fails.touch()
        try:
            async with state.turn():
                with unit_of_work(state) as unit:
                    for each in range(8):
                        state.execute("REPLACE INTO filling VALUES (?, randomblob(3000))", (each,))
                    state.executemany("INSERT OR IGNORE INTO snapshot VALUES (?)", [(one,) for one in applied])
                    inbox.take_out(unit)
            promised("tick", n)
        except StateError:
            refused += 1
        fails.unlink(missing_ok=True)
        await asyncio.sleep(0.05)
    ended = True

async def sends(first):
    n = first
    while not ended:
        try:
            await inbox.append(b"%d " % n + os.urandom(2000), time.time(), lambda: applied.append(n))
            promised("sent", n)
        except StateError:
            pass
        n += 4

async def orders():
    n = 0
    while not ended:
        await asyncio.sleep(random.choice([0.01, 0.1, 0.4, 0.8]))
        try:
            async with state.turn():
                with unit_of_work(state):
                    state.execute("INSERT INTO ordered VALUES (?)", (n,))
            promised("order", n)
        except StateError:
            pass
        n += 1

async def main():
    global longest
    slow.touch()
    running = asyncio.gather(ticks(), orders(), *(sends(n) for n in range(4)))
    while not running.done():
        began = time.monotonic()
        await asyncio.sleep(0.001)
        (count,) = state.execute("SELECT count(*) FROM filling").fetchone()
        longest = max(longest, time.monotonic() - began)
    await running
    slow.unlink()
    await state.aclose()
    print("end", refused, longest)

asyncio.run(main())
"""


@pytest.mark.slow
def test_nobody_waits_and_a_loss_of_power_takes_back_nothing_that_was_promised(tmp_path: Path) -> None:
    """Not one turn of the event loop waits for a sync, be it a checkpoint's.

    And at each of them the disk has all that was promised before, with any part of what has been written since: what
    was sent is in the inbox or in the snapshot, and not in both. Two syncs fail, and nothing is promised by them.
    """
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    slow, fails = tmp_path / "slow", tmp_path / "fails"
    environ = os.environ | slow_disk(
        tmp_path, KC_SLOW=str(slow), KC_SLOW_SECONDS="0.2", KC_FAIL=str(fails), KC_SHADOW=str(shadow)
    )
    arguments = [sys.executable, "-c", _WRITES, *map(str, (tmp_path / "state", slow, fails, shadow))]
    said = subprocess.run(arguments, env=environ, capture_output=True, text=True, check=True).stdout.splitlines()
    images = sorted(shadow.glob("[0-9]*"))
    assert not [image.name for image in images if "-held-" in image.name]
    _, refused, longest = said[-1].split()
    assert int(refused) >= 1
    assert float(longest) < 0.19
    promised = [(what, int(number), int(written)) for what, number, written in map(str.split, said[:-1])]
    assert sum(image.name.endswith("-synced-state") for image in images) > 10  # there were checkpoints
    chance, checked = random.Random(3), 0
    for at in range(promised[0][2], len(images)):
        told = {(what, number) for what, number, written in promised if written <= at}
        for _ in range(2):
            checked += 1
            found = after_a_loss_of_power(images, at, tmp_path / "lost" / str(checked), chance)
            missing = {entry for entry in told if entry[0] != "tick"} - found
            assert not missing, (images[at].name, missing)
    assert checked > 100
    closed = tmp_path / "closed"  # by closing all of it comes into the file, and that onto the disk
    closed.write_bytes([image for image in images if image.name.endswith("-synced-state")][-1].read_bytes())
    assert {entry[:2] for entry in promised if entry[0] != "tick"} <= content(closed)


def after_a_loss_of_power(images: list[Path], at: int, folder: Path, chance: random.Random) -> set[tuple[str, int]]:
    """What a state file has, as the disk may have it just before image `at` was made."""
    folder.mkdir(parents=True)
    past, future = images[:at], images[at:]
    state, log = (
        [image for image in past if image.name.endswith(name)][-1].read_bytes()
        for name in ("-synced-state", "-synced-state-wal")
    )
    following = next(image for image in future if image.name.endswith(("-synced-state", "-synced-state-wal")))
    if following.name.endswith("-synced-state"):  # a checkpoint: SQLite writes into `-wal` again once it is synced
        state = mixed(state, following.read_bytes(), chance)
    else:
        log = mixed(log, following.read_bytes(), chance)
    (folder / "state").write_bytes(state)
    (folder / "state-wal").write_bytes(log)
    return content(folder / "state")


def content(path: Path) -> set[tuple[str, int]]:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        snapshot = {n for (n,) in connection.execute("SELECT n FROM snapshot")}
        inbox = {int(bytes(body).split()[0]) for (body,) in connection.execute("SELECT body FROM inbox")}
        assert not snapshot & inbox
        orders = {n for (n,) in connection.execute("SELECT n FROM ordered")}
        return {("sent", n) for n in snapshot | inbox} | {("order", n) for n in orders}


def mixed(had: bytes, following: bytes, chance: random.Random) -> bytes:
    """Sectors of either; where there was none, zeros for those that did not get there."""
    had = had.ljust(len(following), b"\0")
    share = chance.choice([0.0, 0.1, 0.5, 0.9, 1.0])
    return b"".join(
        (following if chance.random() < share else had)[start : start + _SECTOR]
        for start in range(0, len(had), _SECTOR)
    )


class Commits:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        commit = UnitOfWork.commit

        def slow(unit: UnitOfWork, connection: sqlite3.Connection) -> None:
            self.begun.release()
            assert self.may_end.acquire(timeout=20)
            commit(unit, connection)

        monkeypatch.setattr(UnitOfWork, "commit", slow)

    async def begin(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, True, 20)


@pytest.fixture
def state(tmp_path: Path) -> Any:
    with closing(open_state(tmp_path / "state")) as connection:
        connection.execute("CREATE TABLE written (n INTEGER)")
        yield connection


async def write(state: StateConnection, *numbers: int, done: Callable[[], None] = lambda: None) -> None:
    async with state.turn():
        with unit_of_work(state) as unit:
            state.executemany("INSERT INTO written VALUES (?)", [(n,) for n in numbers])
            unit.on_commit(done)


def rows(state: sqlite3.Connection) -> list[int]:
    return [n for (n,) in state.execute("SELECT n FROM written ORDER BY rowid")]


async def test_while_a_commit_waits_what_was_committed_before_is_read_and_others_queue(state, monkeypatch):
    commits, done = Commits(monkeypatch), list[int]()
    writing = [asyncio.create_task(write(state, n, done=lambda n=n: done.append(n))) for n in range(3)]
    for n in range(3):
        await commits.begin()
        assert rows(state) == done == list(range(n))
        with pytest.raises(RuntimeError, match="outside of a turn"), unit_of_work(state):
            pass
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            state.execute("INSERT INTO written VALUES (9)")
        commits.may_end.release()
        await writing[n]
        assert rows(state) == done == list(range(n + 1))
    assert state.commit_seconds is not None


async def test_whoever_waits_may_be_cancelled_and_the_commit_is_not(state, monkeypatch):
    commits, done = Commits(monkeypatch), list[int]()
    first = asyncio.create_task(write(state, 1, done=lambda: done.append(1)))
    await commits.begin()
    second, third = (asyncio.create_task(write(state, n)) for n in (2, 3))
    await asyncio.sleep(0)
    first.cancel()
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert done == []
    commits.may_end.release(2)
    await third
    assert (rows(state), done) == ([1, 3], [1])


@pytest.mark.parametrize("where", ["inside", "commit"])
async def test_a_turn_that_fails_leaves_nothing_and_lets_the_next_have_theirs(state, where):
    undone: list[int] = []

    async def fail() -> None:
        async with state.turn():
            with unit_of_work(state) as unit:
                unit.on_rollback(lambda: undone.append(1))
                state.execute("INSERT INTO written VALUES (1)")
            if where == "inside":
                raise LookupError("no such contract")

    if where == "commit":
        refuse_commits(state)
    with pytest.raises((StateError, LookupError)):
        await fail()
    relieve(state)
    await write(state, 2)
    assert (rows(state), undone) == ([2], [1])


@pytest.mark.slow
async def test_closing_waits_for_those_who_wait_and_refuses_who_comes_later(tmp_path, monkeypatch):
    commits = Commits(monkeypatch)
    said: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
    state = open_state(tmp_path / "state")
    state.execute("CREATE TABLE written (n INTEGER)")
    first, second = (asyncio.create_task(write(state, n)) for n in (1, 2))
    await commits.begin()
    ending = asyncio.create_task(state.aclose())
    commits.may_end.release(2)
    await asyncio.gather(first, second, ending)
    with pytest.raises(StateError, match="is closed"):
        await write(state, 3)
    gc.collect()
    assert not said
    with closing(open_state(tmp_path / "state")) as connection:
        assert rows(connection) == [1, 2]


async def test_who_reads_or_writes_the_file_from_elsewhere_is_not_waited_for(tmp_path, state):
    """Such as somebody's sqlite3: who reads is in nobody's way, and a writer, who should not be there, is said."""
    with closing(sqlite3.connect(tmp_path / "state", isolation_level=None)) as other:
        other.execute("BEGIN")
        seen = rows(other)
        await write(state, *range(100))
        assert (rows(other), len(rows(state))) == (seen, 100)
        other.execute("COMMIT")
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        with pytest.raises(StateError, match="database is locked"):
            await write(state, 1)
        assert time.monotonic() - began < 1.0


def test_a_state_file_that_is_a_link_is_held_and_written_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "kept")
    with closing(open_state(tmp_path / "link")) as connection:
        connection.execute("CREATE TABLE written (n INTEGER)")
        asyncio.run(write(connection, 1))
        assert (tmp_path / "there" / "kept-wal").stat().st_size > 0
        with pytest.raises(StateError, match="another evaluator is using"):
            open_state(tmp_path / "there" / "kept", patience=0.0)


async def test_what_else_has_threads_keeps_no_disk_waiting(state: StateConnection) -> None:
    """Such as names that are looked up, one for each endpoint, where nobody answers."""
    release = threading.Event()
    others = [asyncio.create_task(asyncio.to_thread(release.wait, 20)) for _ in range(40)]
    await asyncio.wait_for(write(state, 1), 10)
    release.set()
    await asyncio.gather(*others)


async def test_those_who_come_while_the_disk_is_busy_are_written_together(tmp_path, state, monkeypatch):
    """One sync for all of them, and they are applied in the order in which they came; a snapshot empties the inbox."""
    inbox, commits, applied = Inbox(state), Commits(monkeypatch), list[int]()
    sending = [asyncio.create_task(inbox.append(b"first", 1.0, lambda: applied.append(0)))]
    await commits.begin()
    for n in range(1, 20):
        body = json.dumps(n).encode()
        sending.append(asyncio.create_task(inbox.append(body, float(n), lambda n=n: applied.append(n))))
    await asyncio.sleep(0.05)
    assert applied == []
    sending[7].cancel()
    commits.may_end.release(2)
    await asyncio.gather(*sending, return_exceptions=True)
    assert applied == list(range(20))
    assert not commits.begun.acquire(blocking=False) or not commits.begun.acquire(blocking=False)
    with closing(sqlite3.connect(tmp_path / "state")) as reader:
        assert reader.execute("SELECT count(*) FROM inbox").fetchone() == (20,)
    commits.may_end.release()
    async with state.turn() as unit:
        inbox.take_out(unit)
    assert (len(inbox), inbox.size) == (0, 0)


async def test_a_snapshot_takes_out_what_was_applied_and_not_what_waits_for_that(state: StateConnection) -> None:
    inbox, applied, taken_out = Inbox(state), list[int](), list[int]()

    async def snapshot() -> None:
        async with state.turn() as unit:
            inbox.take_out(unit)
            taken_out.append(len(applied))

    evaluating: list[asyncio.Task[None]] = []

    def apply(n: int) -> None:
        applied.append(n)
        if n == 1:
            evaluating.append(asyncio.create_task(snapshot()))

    await asyncio.gather(*(inbox.append(b"body", 1.0, lambda n=n: apply(n)) for n in range(20)))
    await asyncio.gather(*evaluating)
    assert 2 <= taken_out[0] < 20
    assert len(inbox) == 20 - taken_out[0]
    assert inbox.size == 4 * len(inbox)
