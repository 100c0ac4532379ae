"""FAIL rests on what is held against a limit: when it comes, what it says, and how it ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kc_otel.contract.words import dilution
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.verdict import Status, Verdict
from tests.tools.verdicts import verdicts_of, window_of

LIMIT = 0.004
WIDTH = 30.0


class Watched:
    """An evaluator of one clause, and a process that reports to it once per pane."""

    def __init__(self, contract: Any, sender: Any, now: float, metric: str = "kc.drift.tv_token") -> None:
        self.now, self.source, self.evaluator = now, sender(metric), Evaluator([contract])
        self.evaluator.ingest_metrics(self.source.request(now), now)

    def pane(self, values: Any) -> Verdict:
        """What is said after one more pane with these values."""
        self.now += WIDTH
        self.evaluator.ingest_metrics(self.source.request(self.now, values), self.now)
        return self.verdict()

    def verdict(self) -> Verdict:
        """The verdict on all traffic."""
        return next(verdict for verdict in verdicts_of(self.evaluator, self.now) if verdict.cell.slice == "all")


@pytest.fixture
def watched(contract: Any, sender: Any, now: float) -> Watched:
    """A clause on the mean of tv_token that is never above 0.004."""
    return Watched(contract(), sender, now)


def test_a_fail_comes_with_its_evidence_whatever_the_minimum(watched: Watched) -> None:
    """Evidence grows until it is an alarm, with fewer observations than a PASS would take."""
    rng, found = np.random.default_rng(1), []
    while not found or found[-1].status is not Status.FAIL:
        assert len(found) < 10
        found.append(watched.pane(rng.gamma(4.0, 4 * LIMIT / 4.0, 10)))
    evidence = [verdict.evidence for verdict in found]
    assert evidence[-1] == 1.0
    assert all(later > earlier for earlier, later in zip([0.0, *evidence], evidence, strict=False))
    assert {verdict.status for verdict in found[:-1]} == {Status.INCONCLUSIVE}
    assert found[-1].samples < 100
    assert found[-1].reason.endswith("; false alarms are expected 30d apart or more")
    assert watched.verdict() == found[-1]


def test_a_fail_whose_window_is_below_the_limit_says_that_a_part_is_not(watched: Watched) -> None:
    """What was good before the fault pulls the estimate down: the sentence does not hold it against the limit."""
    watched.pane(np.full(30_000, LIMIT / 100))
    found = watched.pane(np.full(3000, 2 * LIMIT))
    assert found.status is Status.FAIL
    assert found.estimate < LIMIT
    assert found.reason.startswith("recent observations are above limit 0.004; estimate 0.000")
    assert dilution(found.reason) == "recent observations are above it; the window still holds earlier ones"
    after = watched.pane(np.full(4, LIMIT / 4))
    assert (after.status, after.evidence < 1.0) == (Status.FAIL, True)
    assert after.reason.startswith("earlier observations were above limit 0.004; estimate 0.000")
    assert dilution(after.reason) == "earlier observations were above it, and the breach is not cleared yet"


@pytest.mark.slow
def test_a_fail_ends_on_what_came_after_the_fault(watched: Watched) -> None:
    """A PASS of the observations since, while the windows' own interval still lies above the limit."""
    assert watched.pane(np.full(20_000, 10 * LIMIT)).status is Status.FAIL
    found = watched.pane(np.zeros(3000))
    assert (found.status, found.samples, found.evidence) == (Status.PASS, 3000, 0.0)
    assert found.upper <= LIMIT
    assert window_of(watched.evaluator, found.cell, watched.now).total == 23_000
    again = watched.verdict()
    assert (again.status, again.samples, again.evidence) == (Status.PASS, 3000, 0.0)
    for _ in range(130):  # until the fault has left the long window, and the memory of it with it
        found = watched.pane(np.zeros(100))
        assert found.status is Status.PASS
    (held,) = [known for cell, known in watched.evaluator.states["policy"].evidence.cells.items() if cell == found.cell]
    assert held.after is None


def test_a_fail_ends_when_its_evidence_is_gone(watched: Watched) -> None:
    """Bets lose what they had won: then nothing is known, until there is enough for a PASS."""
    assert watched.pane(np.full(20_000, 10 * LIMIT)).status is Status.FAIL
    found = [watched.pane(np.full(4, LIMIT / 4)) for _ in range(12)]
    states = [verdict.status for verdict in found]
    last = states.index(Status.INCONCLUSIVE)
    assert 1 <= last <= 10
    assert set(states[:last]) == {Status.FAIL}
    assert set(states[last:]) == {Status.INCONCLUSIVE}
    assert found[0].reason.endswith("; not cleared yet")
    assert [verdict.evidence for verdict in found[:last]] == sorted(
        [verdict.evidence for verdict in found[:last]], reverse=True
    )
    assert found[last].evidence == 0.0
    assert found[last].samples == 4 * (last + 1)


@pytest.mark.slow
def test_a_fault_that_is_over_is_not_forgotten_by_time_alone(watched: Watched) -> None:
    """Without observations nothing speaks for a cell: old ones that leave the windows clear nothing."""
    assert watched.pane(np.full(20_000, 10 * LIMIT)).status is Status.FAIL
    for _ in range(121):
        watched.pane([])
    assert watched.pane([LIMIT]).status is Status.FAIL


def test_what_nothing_can_be_held_against_fails_by_its_interval_and_says_so(contract, sender, now):
    """A mean whose limit is the smallest value; a maximum is a fact, and a deficit with a cap has evidence."""
    made = contract(statistical=[{"id": "d", "metric": "support_deficit", "unit": "token", "limit": 0.05, "cap": 10}])
    assert Watched(made, sender, now, "kc.drift.ratio").pane(np.full(9000, 0.5)).reason.endswith("30d apart or more")
    made = contract(statistical=[{"id": "d", "metric": "abs_log_ratio", "statistic": "max", "limit": 1}])
    worst = Watched(made, sender, now, "kc.drift.abs_log_ratio").pane([2.0])
    assert (worst.status, np.isnan(worst.evidence)) == (Status.FAIL, True)
    assert worst.reason.startswith("lower bound 2 > limit 1 with 1 samples in 5m (largest observation")
    assert "alone" not in worst.reason
    made = contract(statistical=[{"id": "d", "metric": "tv_token", "unit": "token", "limit": 0}])
    mean = Watched(made, sender, now).pane(np.full(9000, 0.5))
    assert (mean.status, np.isnan(mean.evidence)) == (Status.FAIL, True)
    assert mean.reason.endswith(" in 5m, in this evaluation alone")


def test_a_pass_of_what_came_after_ends_a_fail_before_its_evidence_is_gone(contract, sender, now):
    """Slow bets found a share of 2 % where 1 % may be; 600 observations without any pass, and begin anew."""
    share = {"id": "share", "metric": "tv_token", "statistic": "fraction > 0.1", "limit": 0.01}
    watched = Watched(contract(statistical=[share]), sender, now)
    values = np.zeros(400)
    values[:8] = 0.5
    while watched.pane(values).status is not Status.FAIL:
        assert watched.now < now + 40 * WIDTH
    few = watched.pane(np.zeros(400))
    assert few.status is Status.FAIL
    assert 0.0 < few.evidence < 1.0
    found = watched.pane(np.zeros(200))
    assert (found.status, found.samples, found.evidence) == (Status.PASS, 600, 0.0)
    assert watched.verdict() == found


def test_an_interval_above_the_limit_is_no_fail_before_the_evidence_is(watched: Watched) -> None:
    """Neither does the longer window, which lies below the limit, take back what the short one shows."""
    for _ in range(12):
        assert watched.pane(np.full(2000, LIMIT / 100)).status is Status.PASS
    rng = np.random.default_rng(3)
    found = watched.pane(rng.gamma(1.0, 1.5 * LIMIT, 100))
    for _ in range(9):
        found = watched.pane([])
    assert found.lower > found.limit
    assert 0.0 < found.evidence < 1.0
    assert (found.status, found.window, found.samples) == (Status.INCONCLUSIVE, "short", 100)
    assert found.reason.endswith(f": {100 * found.evidence:.0f} % of the evidence for an alarm")


def test_what_came_in_other_buckets_before_the_new_ones_is_older(contract: Any, sender: Any, now: float) -> None:
    """After an alarm a series changes its buckets between two evaluations: what counts since is in the new ones."""
    watched = Watched(contract(), sender, now)
    old, evaluator = sender(cumulative=False, edges=(LIMIT / 4, 0.1)), watched.evaluator
    evaluator.ingest_metrics(old.request(now + 30.0, np.full(3000, 0.05)), now + 30.0)
    evaluator.evaluate(now + 30.0)
    evaluator.ingest_metrics(old.request(now + 60.0, np.full(900, LIMIT / 8)), now + 60.0)
    watched.now = now + 400.0
    verdict = watched.pane(np.full(7, LIMIT / 8))
    (held,) = evaluator.states["policy"].evidence.cells.values()
    assert (held.after.count, verdict.samples, verdict.status) == (7, 7, Status.INCONCLUSIVE)
