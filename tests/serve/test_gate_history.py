"""The past that gates look back on: every status is in it, numbers where they are said, and it hardly grows."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from kc_otel.judge.verdict import Cell, Evaluation, Status, Verdict
from kc_otel.serve.gate_history import GateHistory

CELLS = 100


def evaluation(at: float, status: Callable[[int], Status], kernel: str = "b") -> Evaluation:
    """An evaluation in which every number is new."""
    verdicts = (
        Verdict(
            Cell("policy", "tv", f"slice-{i}", "a", kernel), status(i), at, 0.5, at + i, at + i + 0.25, at + i + 0.5,
            int(at), "short", "mixture betting", f"{at} and {i}", 1, "h", "traffic",
        )
        for i in range(CELLS)
    )  # fmt: skip
    return Evaluation(at, tuple(verdicts))


@pytest.mark.slow
@pytest.mark.parametrize("changing", [False, True])
def test_a_round_costs_next_to_nothing(changing: bool) -> None:
    """Rounds with new numbers, also with statuses that change in each of them, stay within 16 bytes a cell."""

    def status(at: int) -> Callable[[int], Status]:
        return lambda i: Status.PASS if not changing or (at + i) % 2 else Status.INCONCLUSIVE

    history = GateHistory()
    for at in range(20):
        history.add("policy", evaluation(6.0 * at, status(at)))
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for at in range(20, 120):
        history.add("policy", evaluation(6.0 * at, status(at)))
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(history.since("policy", 0.0)) == 120
    assert grown / (100 * CELLS) < 16.0


def test_statuses_are_those_of_their_time_and_the_newest_numbers_are_whole() -> None:
    """Every evaluation says what was PASS then; the newest one, and the last with a FAIL, say their own numbers."""
    history, sent = GateHistory(), []
    for at in range(40):
        failing = at in {3, 9}
        sent.append(evaluation(6.0 * at, lambda i, failing=failing: Status.FAIL if failing and i == 5 else Status.PASS))
        history.add("policy", sent[-1])
    found = history.since("policy", 12.0)
    assert [entry.at for entry in found] == [entry.at for entry in sent[2:]]
    for seen, was in zip(found, sent[2:], strict=True):
        assert [(v.cell, v.status, v.window) for v in seen.verdicts] == [
            (v.cell, v.status, v.window) for v in was.verdicts
        ]
    assert found[-1] == sent[-1]
    assert found[7] == sent[9]
    assert [entry.at for entry in found if entry.fails("b")] == [18.0, 54.0]


def test_what_it_shares_is_bounded_when_kernels_come_and_go() -> None:
    """Versions without end leave neither verdicts to share nor evaluations with a FAIL."""
    history = GateHistory()
    for at in range(60):
        history.add("policy", evaluation(6.0 * at, lambda _: Status.FAIL, kernel=f"k{at}"))
    past = history._past["policy"]
    assert len(past.shared) <= 4 * CELLS + 164
    assert len(past.failed) == 8
