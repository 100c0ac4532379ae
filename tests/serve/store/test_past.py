"""The thinned past and the log of events: bounded, worst first, and there again after a restart."""

import math
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from kc_otel.judge.verdict import Cell, Evaluation, Status, Verdict
from kc_otel.serve.history import KEPT_STEPS, CellHistory, EventLog
from kc_otel.serve.store.state_file import StateError, unit_of_work
from tests.tools.escalations import advanced
from tests.tools.full_disk import refuse_commits, relieve

CELL = Cell("policy", "token-tv", "code", "t", "i")
STEP = 10.0
WINDOWS = {"policy": 20 * STEP}


@pytest.fixture
def history(connection):
    return CellHistory(connection, WINDOWS)


def verdict(at: float, status: Status = Status.PASS, cell: Cell = CELL, estimate: float = 0.1) -> Verdict:
    return Verdict(
        cell, status, at, 0.2, estimate, estimate / 2, math.inf, 10, "short", "m", "r", 1, "0" * 64, "population"
    )


def tick(history: CellHistory, connection: sqlite3.Connection, *verdicts: Verdict) -> None:
    with unit_of_work(connection) as unit:
        history.write("policy", Evaluation(verdicts[0].at, verdicts), unit)


def past(history: CellHistory, end: float) -> list[tuple[float, int]]:
    return [(point.at, point.status) for point in history.past("policy", "token-tv", "code", 0.0, end).get(CELL, [])]


def test_a_step_is_remembered_by_its_worst_evaluation(open_file: Callable, tmp_path: Path) -> None:
    connection = open_file(tmp_path / "state.sqlite")
    history = CellHistory(connection, WINDOWS)
    for at in range(1000, 1040):
        tick(history, connection, verdict(float(at), Status.FAIL if at == 1013 else Status.PASS))
    connection.close()
    again = CellHistory(open_file(tmp_path / "state.sqlite"), WINDOWS)
    assert past(again, 1040.0) == [(1000.0, 0), (1013.0, 3), (1020.0, 0), (1030.0, 0)]
    (moment, *_) = again.past("policy", "token-tv", "code", 0.0, 1040.0)[CELL]
    assert (moment.estimate, moment.lower, moment.upper, moment.limit) == (0.1, 0.05, None, 0.2)


def test_the_last_minutes_are_whole(connection, history):
    for at in range(1000, 1300):
        tick(history, connection, verdict(float(at)))
    times = [at for at, _ in past(history, 1300.0)]
    assert times == sorted(set(times))
    assert times[-120:] == [float(at) for at in range(1180, 1300)]
    assert times[:2] == [1000.0, 1010.0]


def test_a_breach_that_goes_on_begins_where_it_began(connection):
    history = CellHistory(connection, {"policy": 3600.0})
    for at in range(1800, 2000):
        tick(history, connection, verdict(float(at), Status.FAIL if at >= 1805 else Status.PASS))
    found = past(history, 2000.0)
    assert found[0] == (1805.0, 3)
    assert [at for at, _ in found[1:]] == [float(at) for at in range(1880, 2000)]


@pytest.mark.parametrize("lives", [1, 2, 5, 7])
def test_a_restart_leaves_no_gap_and_hides_no_breach(open_file: Callable, tmp_path: Path, lives: int) -> None:
    failed, times = {1003, 1019, 1021, 1034, 1040}, range(1000, 1045)
    for start in times[::lives]:
        connection = open_file(tmp_path / "state.sqlite")
        history = CellHistory(connection, WINDOWS)
        for at in range(start, min(start + lives, 1045)):
            tick(history, connection, verdict(float(at), Status.FAIL if at in failed else Status.PASS))
        connection.close()
    again = CellHistory(open_file(tmp_path / "state.sqlite"), WINDOWS)
    assert [(int(at // STEP), status) for at, status in past(again, 1046.0)] == [(step, 3) for step in range(100, 105)]


def test_the_past_is_bounded(connection, history):
    for index in range(3 * KEPT_STEPS):
        tick(history, connection, verdict(1000.0 + STEP * index))
    assert connection.execute("SELECT count(*) FROM cell_point").fetchone()[0] == KEPT_STEPS
    end = 1000.0 + STEP * 3 * KEPT_STEPS
    assert min(at for at, _ in past(history, end)) >= end - KEPT_STEPS * STEP


def test_a_pair_of_kernels_that_is_gone_is_forgotten_in_the_end(connection, history):
    successor = Cell("policy", "token-tv", "code", "t", "j")
    for index in range(3):
        tick(history, connection, verdict(1000.0 + STEP * index))
    for index in range(3, 3 + KEPT_STEPS // 2):
        tick(history, connection, verdict(1000.0 + STEP * index, cell=successor))
    assert set(history.past("policy", "token-tv", "code", 0.0, 1000.0 + STEP * KEPT_STEPS // 2)) == {CELL, successor}
    for index in range(3 + KEPT_STEPS // 2, 10 + KEPT_STEPS):
        tick(history, connection, verdict(1000.0 + STEP * index, cell=successor))
    assert connection.execute("SELECT count(*) FROM cell_line").fetchone()[0] == 1


def test_an_evaluation_that_was_rolled_back_is_written_by_the_next(connection, history):
    tick(history, connection, verdict(1000.0, Status.FAIL))
    refuse_commits(connection)
    with pytest.raises(StateError):
        tick(history, connection, verdict(1010.0))
    relieve(connection)
    tick(history, connection, verdict(1011.0))
    assert connection.execute("SELECT at, status FROM cell_point").fetchall() == [(1000.0, 3), (1011.0, 0)]


def test_names_that_begin_alike_are_told_apart(connection, history):
    other = Cell("policy", "token-tv", 'code"%', "t", "i")
    for at in (1000.0, 1010.0):
        tick(history, connection, verdict(at), verdict(at, cell=other))
    assert set(history.past("policy", "token-tv", "code", 0.0, 2000.0)) == {CELL}
    assert set(history.past("policy", "token-tv", 'code"%', 0.0, 2000.0)) == {other}


def test_events_are_read_in_order(connection, make_contract, make_verdict):
    contract = make_contract([{"on": "fail", "do": ["notify", {"webhook": "pager"}]}])
    _, edges = advanced(contract, [make_verdict("FAIL")], 5)
    store = EventLog(connection)
    store.transition(edges[0])
    store.record("other", "resumed", {"by": "ada", "why": "fixed"}, 6)
    assert [event.kind for event in store.newest()] == ["firing", "resumed"]
    assert [event.kind for event in store.newest(limit=1)] == ["resumed"]
    (event,) = store.newest(contract.name)
    assert (event.kind, event.at, event.data["slice"]) == ("firing", 5, "code")
    assert event.data["actions"] == ["notify", {"webhook": "pager"}]
    assert event.data["verdict"]["status"] == "FAIL"


def test_log_of_events_is_bounded(connection):
    store = EventLog(connection, max_events=10)
    for number in range(25):
        store.record("c", "note", {"n": number}, number)
    assert [event.data["n"] for event in store.newest()] == list(range(15, 25))


@pytest.mark.parametrize("data", ["'{'", "'[1]'", "'null'", "CAST(x'7bff7d' AS TEXT)", "CAST(x'00' AS TEXT)"])
def test_an_event_that_is_damaged_keeps_no_other_back(connection, data):
    store = EventLog(connection)
    for number in range(3):
        store.record("policy", "resumed", {"message": f"word {number}"}, 5.0)
    connection.execute(f"UPDATE events SET data = {data} WHERE id = 2")
    for found in (store.newest(), store.newest("policy", verdicts=False)):
        assert [event.kind for event in found] == ["resumed", "damaged", "resumed"]
        assert [event.message for event in found][::2] == ["word 0", "word 2"]
        assert (found[1].data, "damaged" in found[1].message) == ({}, True)
