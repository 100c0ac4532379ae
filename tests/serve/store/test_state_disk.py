"""What is committed to the state file gets onto the disk without anybody waiting who did not ask for it."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kc_otel.serve.store import state_connection
from kc_otel.serve.store.state_connection import StateConnection
from kc_otel.serve.store.state_disk import StateDisk
from kc_otel.serve.store.state_file import StateError, open_state
from kc_otel.serve.store.unit_of_work import unit_of_work
from tests.tools.slow_disk import slow_disk

_SECTOR = 512
_WRITES = """
import asyncio, os, random, sys, time
from pathlib import Path
from kc_otel.serve.store import state_connection
from kc_otel.serve.store.state_disk import StateDisk
from kc_otel.serve.store.state_file import open_state

state_connection._LARGE = 100_000
state, slow, shadow = map(Path, sys.argv[1:])
connection = open_state(state)
connection.execute("CREATE TABLE written (n INTEGER PRIMARY KEY, content BLOB)")
connection.execute("CREATE TABLE ordered (n INTEGER PRIMARY KEY)")
disk = StateDisk(connection)
longest = 0.0

async def ticks():
    for n in range(40):
        await disk.room()
        connection.execute("BEGIN IMMEDIATE")
        for each in range(8):
            connection.execute("REPLACE INTO written VALUES (?, randomblob(3000))", (1000 + each,))
        connection.execute("INSERT INTO written VALUES (?, randomblob(300))", (n,))
        connection.execute("COMMIT")
        await disk.synced()
        print("tick", n, len(list(shadow.glob("[0-9]*"))), flush=True)

async def orders(ticking):
    n = 0
    while not ticking.done():
        await asyncio.sleep(random.choice([0.01, 0.1, 0.4, 0.8]))
        connection.execute("INSERT INTO ordered VALUES (?)", (n,))
        await disk.synced()
        print("order", n, len(list(shadow.glob("[0-9]*"))), flush=True)
        n += 1

async def main():
    global longest
    slow.touch()
    ticking = asyncio.create_task(ticks())
    ordering = asyncio.create_task(orders(ticking))
    while not ordering.done():
        began = time.monotonic()
        await asyncio.sleep(0.001)
        (count,) = connection.execute("SELECT count(*) FROM written").fetchone()
        longest = max(longest, time.monotonic() - began)
    await ticking
    slow.unlink()
    await disk.close()
    print("longest", longest)

asyncio.run(main())
"""


@pytest.mark.slow
def test_nobody_waits_and_a_loss_of_power_takes_back_nothing_that_was_promised(tmp_path: Path) -> None:
    """Not one turn of the event loop waits for a sync, be it a checkpoint's.

    And at each of them the disk has all that was promised before, with any part of what has been written since.
    """
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    slow = tmp_path / "slow"
    environ = os.environ | slow_disk(tmp_path, KC_SLOW=str(slow), KC_SLOW_SECONDS="0.1", KC_SHADOW=str(shadow))
    arguments = [sys.executable, "-c", _WRITES, str(tmp_path / "state"), str(slow), str(shadow)]
    said = subprocess.run(arguments, env=environ, capture_output=True, text=True, check=True).stdout.splitlines()
    images = sorted(shadow.glob("[0-9]*"))
    assert not [image.name for image in images if "-held-" in image.name]
    assert float(said[-1].split()[1]) < 0.09
    promised = [(what, int(number), int(written)) for what, number, written in map(str.split, said[:-1])]
    assert sum("cut-state-wal" in image.name for image in images) > 5  # it was emptied again and again
    chance, checked = random.Random(3), 0
    for at in range(promised[0][2], len(images)):
        told = {what: number for what, number, written in promised if written <= at}
        for _ in range(3):
            checked += 1
            found = after_a_loss_of_power(images, at, tmp_path / "lost" / str(checked), chance)
            assert all(found[what] >= number for what, number in told.items()), (images[at].name, found, told)
    assert checked > 200
    closed = tmp_path / "closed"  # by closing all of it comes into the file, and that onto the disk
    closed.write_bytes([image for image in images if image.name.endswith("-synced-state")][-1].read_bytes())
    with closing(sqlite3.connect(closed)) as connection:
        assert connection.execute("SELECT max(n) FROM written WHERE n < 1000").fetchone() == (39,)


def after_a_loss_of_power(images: list[Path], at: int, folder: Path, chance: random.Random) -> dict[str, int]:
    """The last rows of a state file as the disk may have it just before image `at` was made."""
    folder.mkdir(parents=True)
    past, future = images[:at], images[at:]
    state = [image for image in past if image.name.endswith("-synced-state")][-1].read_bytes()
    following = next((image for image in future if image.name.endswith(("-synced-state", "-state-wal"))), None)
    if following is not None and following.name.endswith("-synced-state"):  # only now SQLite writes into the file
        state = mixed(state, following.read_bytes(), chance)
    before = [image for image in past if image.name.endswith("-state-wal")][-1]
    log = before.read_bytes()
    following = next((image for image in future if image.name.endswith("-state-wal")), None)
    emptied = "-cut-" in before.name
    if following is not None and not (emptied and chance.random() < 0.5):  # or the disk does not know that it was
        log = mixed(b"" if emptied else log, following.read_bytes(), chance)
    (folder / "state").write_bytes(state)
    (folder / "state-wal").write_bytes(log)
    with closing(sqlite3.connect(folder / "state")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        tables = {"tick": "written WHERE n < 1000", "order": "ordered"}
        asked = {what: connection.execute(f"SELECT max(n) FROM {table}") for what, table in tables.items()}
        return {what: -1 if (row := cursor.fetchone())[0] is None else row[0] for what, cursor in asked.items()}


def mixed(had: bytes, following: bytes, chance: random.Random) -> bytes:
    """Sectors of either; where there was none, zeros for those that did not get there."""
    had = had.ljust(len(following), b"\0")
    share = chance.choice([0.0, 0.1, 0.5, 0.9, 1.0])
    return b"".join(
        (following if chance.random() < share else had)[start : start + _SECTOR]
        for start in range(0, len(following), _SECTOR)
    )


@pytest.mark.parametrize("newest", [False, True])
def test_a_log_that_another_process_reads_is_not_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newest: bool
) -> None:
    """Such as somebody's sqlite3, at an old or at the newest snapshot: what he reads stays, nobody waits for him."""
    monkeypatch.setattr(state_connection, "_LARGE", 10_000)
    log, anew = tmp_path / "state-wal", list[None]()
    begin_anew = StateConnection.begin_anew
    monkeypatch.setattr(StateConnection, "begin_anew", lambda self: (anew.append(None), begin_anew(self)))

    async def read() -> None:
        with closing(open_state(tmp_path / "state")) as connection:
            connection.execute("CREATE TABLE written (content)")
            disk = StateDisk(connection)
            if newest:
                connection.execute("INSERT INTO written VALUES (randomblob(100000))")
            with closing(sqlite3.connect(tmp_path / "state", isolation_level=None)) as reader:
                reader.execute("BEGIN")
                seen = reader.execute("SELECT count(*) FROM written").fetchone()
                if not newest:
                    connection.execute("INSERT INTO written VALUES (randomblob(100000))")
                began = time.monotonic()
                await disk.synced()
                await disk.room()
                assert time.monotonic() - began < 1.0
                assert log.stat().st_size > 100_000
                assert not anew, "not all of it is in the file"
                assert reader.execute("SELECT count(*) FROM written").fetchone() == seen
            connection.execute("INSERT INTO written VALUES (1)")
            await disk.synced()
            await disk.room()
            assert log.stat().st_size < 10_000
            assert connection.execute("SELECT count(*) FROM written").fetchone() == (2,)

    asyncio.run(read())


def test_those_who_wait_at_the_same_time_wait_for_one_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And who comes when nothing has been written since waits for none; what another left behind is waited for."""
    syncs: list[None] = []
    monkeypatch.setattr(StateConnection, "sync", lambda _self: syncs.append(None))

    async def wait() -> None:
        with closing(open_state(tmp_path / "state")) as connection:
            del syncs[:]
            disk = StateDisk(connection)
            await disk.synced()
            assert len(syncs) == 1
            connection.execute("CREATE TABLE written (n)")
            connection.execute("INSERT INTO written VALUES (1)")
            await asyncio.gather(*(disk.synced() for _ in range(20)))
            await disk.synced()
            assert len(syncs) == 2
            connection.execute("INSERT INTO written VALUES (2)")
            await disk.synced()
            assert len(syncs) == 3

    asyncio.run(wait())


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[OSError]]:
    """Errors that the next syncs end with."""
    errors: list[OSError] = []
    sync = os.fdatasync

    def fdatasync(file: int) -> None:
        if errors:
            raise errors.pop()
        sync(file)

    monkeypatch.setattr(state_connection.os, "fdatasync", fdatasync)
    yield errors
    assert not errors


def test_what_a_disk_did_not_take_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: list[OSError]
) -> None:
    """A sync that failed says nothing of what it left out, and the next one would succeed without it."""
    written: list[tuple[int, int]] = []

    def pwrite(file: int, data: bytes, at: int) -> int:
        written.append((at, at + len(data)))
        return os.write(file, data) if os.lseek(file, at, os.SEEK_SET) == at else 0

    async def wait() -> None:
        with closing(open_state(tmp_path / "state")) as connection:
            connection.execute("CREATE TABLE written (content)")
            disk = StateDisk(connection)
            connection.execute("INSERT INTO written VALUES (randomblob(3000000))")
            before = (tmp_path / "state-wal").read_bytes()
            monkeypatch.setattr(state_connection.os, "pwrite", pwrite)
            failing.extend([OSError(errno.EIO, "Input/output error")] * 2)
            for _ in range(2):
                with pytest.raises(StateError, match="cannot be forced to the disk"):
                    await disk.synced()
            del written[:]
            await disk.synced()
            assert written[0][0] == 0
            assert all(one[1] == other[0] for one, other in itertools.pairwise(written))
            assert written[-1][1] == len(before)
            assert (tmp_path / "state-wal").read_bytes() == before
            del written[:]
            connection.execute("INSERT INTO written VALUES (1)")
            await disk.synced()
            assert not written

    asyncio.run(wait())


def test_what_is_committed_while_all_is_written_again_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: list[OSError]
) -> None:
    """SQLite writes below the end of its log where a transaction that was taken back had come further."""
    monkeypatch.setattr(state_connection, "_PART", 4096)
    pwrite, ends, is_there = os.pwrite, list[int](), threading.Event()

    def slow(file: int, data: bytes, at: int) -> int:
        """Whoever may come between reading and writing where SQLite goes on has the time for it."""
        if at <= ends[0] < at + len(data):
            is_there.set()
            time.sleep(0.1)
        return pwrite(file, data, at)

    async def wait() -> None:
        with closing(open_state(tmp_path / "state")) as connection:
            connection.execute("CREATE TABLE written (n INTEGER PRIMARY KEY, content)")
            ends.append((tmp_path / "state-wal").stat().st_size)
            monkeypatch.setattr(state_connection.os, "pwrite", slow)
            connection.execute("PRAGMA cache_size=10")
            connection.execute("BEGIN")
            for _ in range(100):
                connection.execute("INSERT INTO written (content) VALUES (randomblob(10000))")
            connection.execute("ROLLBACK")
            disk = StateDisk(connection)
            failing.append(OSError(errno.EIO, "Input/output error"))
            with pytest.raises(StateError):
                await disk.synced()
            again = asyncio.create_task(disk.synced())
            assert await asyncio.to_thread(is_there.wait, 20)
            for n in range(100):
                connection.execute("INSERT INTO written VALUES (?, randomblob(2000))", (n,))
                await asyncio.sleep(0.001)
            await again
            await disk.synced()
            for name in ("state", "state-wal"):
                (tmp_path / f"copy{name[5:]}").write_bytes((tmp_path / name).read_bytes())
        with closing(sqlite3.connect(tmp_path / "copy")) as copy:
            assert copy.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert copy.execute("SELECT count(*) FROM written").fetchone() == (100,)

    asyncio.run(wait())


def test_closing_waits_for_what_is_under_way_and_for_what_follows_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is closed that a thread has in its hands, and who waits is told that the disk has it."""
    monkeypatch.setattr(state_connection, "_LARGE", 10_000)
    sync, checkpoint = StateConnection.sync, StateConnection.checkpoint
    monkeypatch.setattr(StateConnection, "sync", lambda self: (time.sleep(0.05), sync(self))[1])
    monkeypatch.setattr(StateConnection, "checkpoint", lambda self: (time.sleep(0.05), checkpoint(self))[1])

    async def wait() -> None:
        connection = open_state(tmp_path / "state")
        connection.execute("CREATE TABLE written (content)")
        connection.execute("INSERT INTO written VALUES (randomblob(3000000))")
        disk = StateDisk(connection)
        first = asyncio.create_task(disk.synced())
        await asyncio.sleep(0.01)
        connection.execute("INSERT INTO written VALUES (randomblob(3000000))")
        later = asyncio.create_task(disk.synced())
        await asyncio.sleep(0)
        await asyncio.gather(disk.close(), first, later)
        assert disk._syncing is disk._emptying is None

    asyncio.run(wait())
    assert not caplog.text
    with closing(open_state(tmp_path / "state")) as connection:
        assert connection.execute("SELECT count(*) FROM written").fetchone() == (2,)


def test_who_still_waits_is_told_where_closing_could_not_write_it(tmp_path: Path, failing: list[OSError]) -> None:
    """Nobody will try again."""

    async def wait() -> None:
        connection = open_state(tmp_path / "state")
        connection.execute("CREATE TABLE written (content)")
        disk = StateDisk(connection)
        failing.append(OSError(errno.EIO, "Input/output error"))
        await disk.close()
        with pytest.raises(StateError, match="could not be forced to the disk"):
            await disk.synced()

    asyncio.run(wait())


class Broken:
    """A connection for checkpoints on a disk that takes nothing."""

    def __init__(self, sound: sqlite3.Connection) -> None:
        self._sound, self.close = sound, sound.close

    def execute(self, statement: str) -> sqlite3.Cursor:
        if "checkpoint" in statement:
            raise sqlite3.OperationalError("disk I/O error")
        return self._sound.execute(statement)


def test_a_copy_that_fails_is_said_once_and_takes_nothing_from_who_waits_for_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was committed is on the disk; of what the copy tried to sync nobody knows, so it is written again."""
    monkeypatch.setattr(state_connection, "_LARGE", 10_000)
    written, real = list[int](), os.pwrite

    def pwrite(file: int, data: bytes, at: int) -> int:
        written.append(file)
        return real(file, data, at)

    async def wait() -> None:
        with closing(open_state(tmp_path / "state")) as connection:
            connection.execute("CREATE TABLE written (content)")
            disk = StateDisk(connection)
            sound = connection._copier
            connection._copier = Broken(sound)
            for _ in range(3):
                connection.execute("INSERT INTO written VALUES (randomblob(20000))")
                await disk.synced()
                await disk.room()
                assert connection.failed != connection.mended
            assert caplog.text.count("the state file's log cannot be copied into it, and grows: disk I/O error") == 1
            connection._copier = sound
            monkeypatch.setattr(state_connection.os, "pwrite", pwrite)
            connection.execute("INSERT INTO written VALUES (1)")
            await disk.synced()
            await disk.room()
            assert connection._lock in written, "what the file did not take is written again, too"
            assert (tmp_path / "state-wal").stat().st_size < 10_000

    asyncio.run(wait())


def test_where_the_log_cannot_be_begun_anew_sqlite_syncs_by_itself(tmp_path: Path) -> None:
    """It is only told not to while a snapshot keeps it from writing over what was there; when all is closed it does."""
    log = tmp_path / "state-wal"
    with closing(open_state(tmp_path / "state")) as connection:

        def syncs() -> bool:
            return bool(connection.execute("PRAGMA synchronous").fetchone()[0])

        connection.execute("CREATE TABLE written (content)")
        connection.hold()
        assert not syncs()
        assert connection.checkpoint()
        connection.execute("PRAGMA query_only=ON")
        with pytest.raises(sqlite3.Error):
            connection.begin_anew()
        assert syncs()
        connection.execute("PRAGMA query_only=OFF")
        connection.hold()
        assert not syncs()
        assert connection.checkpoint()
        before = log.stat().st_size
        connection.execute("INSERT INTO written VALUES (1)")
        assert log.stat().st_size > before, "what is copied is not written over"
        connection.hold()
        assert connection.checkpoint()
        connection.begin_anew()
        assert not syncs()
        assert log.stat().st_size == before


@pytest.mark.slow
def test_the_log_is_bounded_also_where_nobody_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is always one more commit while it is copied: then the event loop waits once, rather than for ever."""
    monkeypatch.setattr(state_connection, "_LARGE", 10_000)
    monkeypatch.setattr(state_connection, "_MOST", 500_000)
    checkpoint, sizes, end = StateConnection.checkpoint, list[int](), time.monotonic() + 4.0
    monkeypatch.setattr(StateConnection, "checkpoint", lambda self: (checkpoint(self), time.sleep(0.02))[0])

    async def write() -> None:
        with closing(open_state(tmp_path / "state")) as connection:
            connection.execute("CREATE TABLE written (n INTEGER PRIMARY KEY, content)")
            disk = StateDisk(connection)
            syncing = asyncio.create_task(disk.synced())
            while time.monotonic() < end:
                connection.execute("REPLACE INTO written VALUES (1, randomblob(3000))")
                await asyncio.sleep(0.001)
                if syncing.done():
                    syncing = asyncio.create_task(disk.synced())
                sizes.append((tmp_path / "state-wal").stat().st_size)
            await syncing
            await disk.close()

    asyncio.run(write())
    assert 500_000 < max(sizes) < 5_000_000
    assert sum(later < earlier for earlier, later in itertools.pairwise(sizes)) > 2


def test_who_writes_into_the_file_from_elsewhere_is_not_waited_for(tmp_path: Path) -> None:
    """Nobody should; but ports answer."""
    with closing(open_state(tmp_path / "state")) as connection:
        connection.execute("CREATE TABLE written (content)")
        with closing(sqlite3.connect(tmp_path / "state", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            began = time.monotonic()
            with pytest.raises(StateError, match="database is locked"), unit_of_work(connection):
                connection.execute("INSERT INTO written VALUES (1)")
            assert time.monotonic() - began < 1.0


def test_a_state_file_that_is_a_link_is_synced_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite has its log beside the file, not beside the link."""
    (tmp_path / "there").mkdir()
    (tmp_path / "state").symlink_to(tmp_path / "there" / "kept")
    synced: list[str] = []
    monkeypatch.setattr(
        state_connection.os, "fdatasync", lambda file: synced.append(str(Path(f"/proc/self/fd/{file}").readlink()))
    )
    with closing(open_state(tmp_path / "state")) as connection:
        connection.execute("CREATE TABLE written (content)")
        connection.sync()
    assert set(synced) == {str(tmp_path / "there" / "kept-wal")}


def test_what_else_has_threads_keeps_no_disk_waiting(tmp_path: Path) -> None:
    """Such as names that are looked up, one for each endpoint, where nobody answers."""

    async def wait() -> None:
        release = threading.Event()
        others = [asyncio.create_task(asyncio.to_thread(release.wait, 20)) for _ in range(40)]
        with closing(open_state(tmp_path / "state")) as connection:
            connection.execute("CREATE TABLE written (content)")
            await asyncio.wait_for(StateDisk(connection).synced(), 10)
        release.set()
        await asyncio.gather(*others)

    asyncio.run(wait())


def test_nobody_is_forgotten_when_waiting_ends_in_another_way(tmp_path: Path, failing: list[OSError]) -> None:
    """A failure that nobody waits for any more is no error of its own; closing ends every wait, for it writes all."""

    async def wait() -> None:
        said: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        connection = open_state(tmp_path / "state")
        connection.execute("CREATE TABLE written (content)")
        disk = StateDisk(connection)
        failing.append(OSError(errno.EIO, "Input/output error"))
        waiting = asyncio.create_task(disk.synced())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        if disk._syncing is not None:
            await asyncio.wait([disk._syncing])
        connection.execute("INSERT INTO written VALUES (1)")
        waiting = asyncio.create_task(disk.synced())
        await asyncio.sleep(0)
        await disk.close()
        await waiting
        gc.collect()
        assert not said

    asyncio.run(wait())
