"""The state file's lock: one holder at a time, whatever happens to the last one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from kc_otel.serve import server
from kc_otel.serve.server import active
from kc_otel.serve.store.state_file import StateError, StateHeldError, StatePlace, open_state


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
