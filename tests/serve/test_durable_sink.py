"""What was acknowledged is judged after a crash, once; what cannot be kept is refused so that its sender keeps it."""

import asyncio
import shutil
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kc_otel.judge.verdict import Status
from kc_otel.offline.replay import evaluations_recorded, read_recordings
from kc_otel.serve import durable_sink
from kc_otel.serve.core import Core
from kc_otel.serve.durable_sink import DurableSink, NotKeptError, TrafficRecording, recover
from kc_otel.serve.self_metrics import read
from kc_otel.serve.store.state_file import StateError, UnitOfWork
from tests.tools.full_disk import refuse_commits, relieve
from tests.tools.verdicts import windows_of

pytestmark = pytest.mark.anyio


def taken(core: Core, *requests: Any) -> None:
    async def send() -> None:
        sink = DurableSink(core)
        for request in requests:
            await sink.metrics(request)

    asyncio.run(send())


def content(core: Core) -> dict[Any, tuple[int, float]]:
    """Observations and their sums, but for the order in which floating-point numbers are added."""
    found = windows_of(core.evaluator, time.time())
    return {series: (binned.total, float(f"{binned.sum:.12g}")) for series, binned in found.items()}


@pytest.mark.parametrize("ticks", [0, 1, 2])
def test_a_crash_loses_nothing_that_was_taken_and_counts_nothing_twice(make_core, open_file, drift, tmp_path, ticks):
    """Whatever was saved by the last tick, the rest is applied from the inbox: the same content, the same verdicts."""
    connection = open_file(tmp_path / "state")
    core = make_core(connection)
    for number, sigma in enumerate((0.3, 0.4)):
        taken(core, drift(sigma))
        if number < ticks:
            core.tick(time.time())
    before = content(core)
    assert before
    connection.close()

    again = make_core(open_file(tmp_path / "state"))
    assert recover(again) == 2 - ticks
    assert content(again) == before
    again.tick(time.time())
    assert {verdict.status for verdict, _ in again.history.cells()} == {Status.FAIL}
    assert len(again.inbox) == again.inbox.size == 0


async def test_what_arrives_while_a_snapshot_is_committed_is_of_the_next_one(
    make_core, open_file, drift, tmp_path, monkeypatch
):
    """Acknowledged or not, it is in the inbox or in the snapshot after a crash at any time, and not in both."""
    connection = open_file(tmp_path / "state")
    core, committing, may_commit = make_core(connection), threading.Event(), threading.Event()
    commit = UnitOfWork.commit

    def slow(unit: UnitOfWork, writer: sqlite3.Connection) -> None:
        committing.set()
        may_commit.wait(10)
        commit(unit, writer)

    sink = DurableSink(core)
    await sink.metrics(drift(0.3))
    monkeypatch.setattr(UnitOfWork, "commit", slow)
    ticking = asyncio.create_task(core.evaluate(time.time()))
    await asyncio.to_thread(committing.wait, 10)
    core.metrics(drift(0.5))  # as one that was kept before, and is applied now
    arriving = asyncio.create_task(sink.metrics(drift(0.4)))
    await asyncio.sleep(0.05)
    assert not arriving.done()
    may_commit.set()
    await asyncio.gather(ticking, arriving)
    assert core.inbox.size > 0
    before = content(core)
    assert all(state.streams.changed for state in core.evaluator.states.values())
    core.tick(time.time())
    connection.close()
    again = make_core(open_file(tmp_path / "state"))
    assert (recover(again), content(again)) == (0, before)


def test_a_tick_that_cannot_be_written_leaves_the_inbox_as_it_is(make_core, open_file, drift, tmp_path):
    """Panes and inbox are of one transaction: after a refused commit all is still applied, or of the next commit."""
    connection = open_file(tmp_path / "state")
    core = make_core(connection)
    taken(core, drift(0.3))
    refuse_commits(connection)
    for tick in (lambda: core.tick(time.time()), lambda: asyncio.run(core.evaluate(time.time()))):
        with pytest.raises(StateError):
            tick()
    relieve(connection)
    shutil.copytree(tmp_path, tmp_path.with_name("crashed"))
    again = make_core(open_file(tmp_path.with_name("crashed") / "state"))
    assert recover(again) == 1
    assert content(again) == content(core)
    core.tick(time.time())
    connection.close()
    later = make_core(open_file(tmp_path / "state"))
    assert (recover(later), content(later)) == (0, content(core))


def test_the_inbox_size_is_what_no_snapshot_has(make_core, open_file, drift, tmp_path):
    """It grows with what arrives, stays while the state cannot be written, and is nothing once it was."""
    connection = open_file(tmp_path / "state")
    core, request = make_core(connection), drift(0.3)

    def said(name: str) -> float:
        return read(core, Counter(), Counter())[name][0][-1]

    assert read(make_core(), Counter(), Counter())["kc.evaluator.inbox.size"] == []
    assert said("kc.evaluator.inbox.size") == 0
    assert said("kc.evaluator.disk.free") == pytest.approx(shutil.disk_usage(tmp_path).free, abs=2**30)
    taken(core, request, request)
    size = 2 * request.ByteSize()
    assert said("kc.evaluator.inbox.size") == size
    assert make_core(_copied(connection, open_file, tmp_path)).inbox.size == size
    refuse_commits(connection)
    with pytest.raises(StateError):
        core.tick(time.time())
    assert said("kc.evaluator.inbox.size") == size
    relieve(connection)
    asyncio.run(core.evaluate(time.time()))
    assert said("kc.evaluator.inbox.size") == 0


def _copied(connection: sqlite3.Connection, open_file: Callable[..., Any], tmp_path: Path) -> sqlite3.Connection:
    tmp_path.mkdir(exist_ok=True)
    connection.execute("VACUUM INTO ?", (str(tmp_path / "copy"),))
    return open_file(tmp_path / "copy")  # type: ignore[no-any-return]


@pytest.mark.slow
async def test_a_record_is_judged_again_as_it_was(make_core, open_file, drift, tmp_path, monkeypatch):
    """What was taken and when it was judged are in one order, as it happened, however much waits for the disk."""
    core, happened = make_core(open_file(tmp_path / "state")), list[float | None]()
    taking, judging = core.metrics, core.tick
    monkeypatch.setattr(core, "metrics", lambda *of: (happened.append(None), taking(*of))[1])
    monkeypatch.setattr(core, "tick", lambda now: (happened.append(now), judging(now))[1])
    core.recording = TrafficRecording(tmp_path / "recording", 1 << 30)
    sink = DurableSink(core, core.recording.received)
    for _ in range(3):
        await asyncio.gather(*(sink.metrics(drift(0.3)) for _ in range(3)), core.evaluate(time.time()))
    await sink.metrics(drift(0.3))
    core.recording.close()
    damage: list[str] = []
    entries = list(read_recordings([tmp_path / "recording"], damage))
    assert [entry.at if entry.is_evaluation else None for entry in entries] == happened
    assert len([moment for moment in happened if moment is not None]) == 3
    assert evaluations_recorded([tmp_path / "recording"])
    assert damage == []
    again = make_core()
    for entry in entries:
        if not entry.is_evaluation:
            again.metrics(entry.read(), entry.at)
    assert {series: total for series, (total, _) in content(again).items()} == {
        series: total for series, (total, _) in content(core).items()
    }


async def test_more_than_the_disk_takes_is_refused(make_core, open_file, drift, tmp_path, monkeypatch):
    """Memory has a bound: who comes above it is told to try again, and those who wait are taken."""
    core, request = make_core(open_file(tmp_path / "state")), drift(0.3)
    monkeypatch.setattr(durable_sink, "_MAX_WAITING_BYTES", 3 * request.ByteSize())
    sink = DurableSink(core)
    found = await asyncio.gather(*(sink.metrics(request) for _ in range(5)), return_exceptions=True)
    assert [isinstance(answer, NotKeptError) for answer in found] == [False, False, False, True, True]
    assert len(core.inbox) == 3
