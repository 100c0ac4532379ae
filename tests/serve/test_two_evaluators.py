"""The state file's lock: one holder at a time, whatever happens to the last one."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from kc_otel.serve import server
from kc_otel.serve.server import active
from kc_otel.serve.store.state_file import StateError, StateHeldError, StatePlace, open_state

WORKER = Path(__file__).with_name("two_holders.py")


def test_a_second_evaluator_is_refused_unless_it_stands_by(tmp_path: Path) -> None:
    """The error says how to wait instead."""
    path = tmp_path / "state.sqlite"
    holder = open_state(path)
    with pytest.raises(StateHeldError, match="start with --standby to take over"):
        open_state(path, patience=0.0)
    holder.close()
    open_state(path).close()


@pytest.mark.slow
def test_a_standby_takes_over_when_the_file_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before; and it sees what the last holder wrote."""
    monkeypatch.setattr(server, "_LOOK_SECONDS", 0.01)
    path = tmp_path / "state.sqlite"
    holder = open_state(path)
    holder.execute("CREATE TABLE written (a)")

    async def wait() -> None:
        waiting = asyncio.create_task(active(path, asyncio.Event(), standby=True))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        holder.close()
        connection = await asyncio.wait_for(waiting, 5)
        assert connection is not None
        assert connection.execute("SELECT count(*) FROM written").fetchone() == (0,)
        connection.close()

    asyncio.run(wait())


def test_a_standby_that_is_told_to_stop_stops(tmp_path: Path) -> None:
    """Without ever having held the file."""
    path = tmp_path / "state.sqlite"
    holder = open_state(path)

    async def wait() -> None:
        stop = asyncio.Event()
        waiting = asyncio.create_task(active(path, stop, standby=True))
        await asyncio.sleep(0.05)
        stop.set()
        assert await asyncio.wait_for(waiting, 5) is None

    asyncio.run(wait())
    holder.close()


@pytest.mark.parametrize("how", ["moved", "replaced"])
def test_a_state_file_that_is_moved_away_is_noticed(tmp_path: Path, how: str) -> None:
    """Its lock guards nothing any more: another evaluator could open a new file at the same path."""
    path = tmp_path / "state.sqlite"
    connection = open_state(path)
    place = StatePlace(path)
    place.check()
    path.rename(tmp_path / "backup.sqlite")
    if how == "replaced":
        open_state(path).close()
    with pytest.raises(StateError, match="another evaluator may be acting"):
        place.check()
    connection.close()
    StatePlace(None).check()


def test_a_new_file_may_be_begun_where_another_was_that_is_still_held(tmp_path: Path) -> None:
    """What lies beside it is of the one that was moved away, and is not taken for its own."""
    path = tmp_path / "state.sqlite"
    holds = "import sys; from pathlib import Path; from kc_otel.serve.store.state_file import open_state\n"
    holds += "held = open_state(Path(sys.argv[1])); held.execute('CREATE TABLE a (b)'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", holds, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline()
        path.rename(tmp_path / "moved.sqlite")
        connection = open_state(path)
        connection.execute("CREATE TABLE c (d)")
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("c",)]
        connection.close()
        holder.communicate("end\n")
        assert holder.returncode == 0


@pytest.mark.slow
def test_there_is_one_holder_however_many_wait_and_however_they_end(tmp_path: Path) -> None:
    """Four processes take turns, some are killed while they hold it: no two turns overlap, and none is lost."""
    rng, path = random.Random(6), tmp_path / "state.sqlite"
    outputs: list[Path] = []
    with ExitStack() as stack:

        def start() -> subprocess.Popen:
            outputs.append(tmp_path / f"{len(outputs)}.txt")
            file = stack.enter_context(outputs[-1].open("w"))
            process = subprocess.Popen([sys.executable, str(WORKER), str(path), "1000000"], stdout=file)
            stack.callback(process.wait, 10)
            stack.callback(process.kill)
            return process

        def turns_so_far() -> int:
            return sum(output.read_text().count("holds") for output in outputs)

        running = [start() for _ in range(4)]
        deadline = time.monotonic() + 120
        for _ in range(8):
            before = turns_so_far()
            while turns_so_far() < before + 5:
                assert time.monotonic() < deadline
                time.sleep(rng.uniform(0.0, 0.02))
            victim = running.pop(0)
            victim.kill()
            assert victim.wait(10) == -signal.SIGKILL
            running.append(start())
    turns = []
    for output in outputs:
        lines = re.findall(r"^(holds|lets go) (\d+) (\d+)$", output.read_text(), re.MULTILINE)
        for (what, began, count), following in itertools.zip_longest(lines, lines[1:]):
            if what == "holds":
                ended = int(following[1]) if following else int(began)  # killed in the middle
                turns.append((int(began), ended, int(count)))
    turns.sort()
    assert len(turns) > 30
    for turn, other in itertools.pairwise(turns):
        assert turn[1] <= other[0], "two held the file at once"
        assert turn[2] < other[2], "what a holder wrote was lost"
