"""What is committed to the state file gets onto the disk without anybody waiting who did not ask for it."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from kc_otel.serve.store import state_connection
from kc_otel.serve.store.state_connection import StateConnection
from kc_otel.serve.store.state_disk import StateDisk
from kc_otel.serve.store.state_file import StateError, open_state
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


def test_a_log_that_another_process_reads_is_not_emptied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as somebody's sqlite3: what he reads stays, and nobody waits for him."""
    monkeypatch.setattr(state_connection, "_LARGE", 10_000)
    log = tmp_path / "state-wal"

    async def read() -> None:
        with closing(open_state(tmp_path / "state")) as connection:
            connection.execute("CREATE TABLE written (content)")
            disk = StateDisk(connection)
            with closing(sqlite3.connect(tmp_path / "state", isolation_level=None)) as reader:
                reader.execute("BEGIN")
                assert reader.execute("SELECT count(*) FROM written").fetchone() == (0,)
                connection.execute("INSERT INTO written VALUES (randomblob(100000))")
                began = time.monotonic()
                await disk.synced()
                assert time.monotonic() - began < 1.0
                assert log.stat().st_size > 100_000
                assert reader.execute("SELECT count(*) FROM written").fetchone() == (0,)
            connection.execute("INSERT INTO written VALUES (1)")
            await disk.synced()
            assert log.stat().st_size < 10_000

    asyncio.run(read())


def test_those_who_wait_at_the_same_time_wait_for_one_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And who comes when nothing has been written since waits for none."""
    syncs: list[None] = []
    monkeypatch.setattr(StateConnection, "sync", lambda _self: syncs.append(None))

    async def wait() -> None:
        with closing(open_state(tmp_path / "state")) as connection:
            connection.execute("CREATE TABLE written (n)")
            disk = StateDisk(connection)
            connection.execute("INSERT INTO written VALUES (1)")
            await asyncio.gather(*(disk.synced() for _ in range(20)))
            await disk.synced()
            assert len(syncs) == 1
            connection.execute("INSERT INTO written VALUES (2)")
            await disk.synced()
            assert len(syncs) == 2

    asyncio.run(wait())


def test_what_a_disk_did_not_take_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync that failed says nothing of what it left out, and the next one succeeds without it."""

    def failing(_file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async def wait() -> None:
        with closing(open_state(tmp_path / "state")) as connection:
            connection.execute("CREATE TABLE written (n)")
            disk = StateDisk(connection)
            connection.execute("INSERT INTO written VALUES (1)")
            with monkeypatch.context() as patch:
                patch.setattr(state_connection.os, "fdatasync", failing)
                with pytest.raises(StateError, match="cannot be forced to the disk"):
                    await disk.synced()
                await disk.synced()  # is in the file itself, by way of SQLite's own syncs
            (tmp_path / "copy").write_bytes((tmp_path / "state").read_bytes())
            with closing(sqlite3.connect(tmp_path / "copy")) as copy:
                assert copy.execute("SELECT n FROM written").fetchall() == [(1,)]

    asyncio.run(wait())
