"""A limit on the drift of the expected reward: two histograms, one verdict, on either side of 0."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kc_otel.contract.load import load_text
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.verdict import Status, Verdict
from kc_otel.stats import reward_sides
from tests.judge.conftest import NOW, Sender, make_contract, merge
from tests.tools.contracts import contract_text
from tests.tools.verdicts import verdicts_of

LIMIT = 0.1
CLAUSE = {"id": "reward", "metric": "reward_drift", "limit": LIMIT}


class Rewarded:
    """An evaluator of one clause on rewards in [-1, 1], and a process that reports to it once per pane."""

    def __init__(self, **observability: Any) -> None:
        contract = make_contract(
            statistical=[CLAUSE],
            slices={},
            assumptions={"reward_range": [-1, 1]},
            observability={"window": "5m", "long_window": "1h", "heartbeat": "60s", **observability},
        )
        self.now, self.evaluator = NOW, Evaluator([contract])
        self.sides = [Sender(f"kc.drift.reward_{name}_by_prompt") for name in ("above", "below")]
        self.rng = np.random.default_rng(0)
        self._send([[], []])

    def pane(self, sequences: int, drift: float) -> Verdict:
        """What is said after one more pane, in which E_P[r] - E_Q[r] is `drift`: rewards are -1 and 1, as often.

        W is 1 - drift and 1 + drift on these, times noise of mean 1.
        """
        good = self.rng.integers(0, 2, sequences)
        noise = self.rng.normal(-0.005, 0.1, sequences)
        log_ratio = np.log1p(drift * (2.0 * good - 1.0)) + noise
        self.now += 30.0
        self._send(reward_sides(log_ratio, 2.0 * good - 1.0, (-1.0, 1.0)))
        (found,) = verdicts_of(self.evaluator, self.now)
        return found

    def _send(self, sides: Any) -> None:
        requests = [sender.request(self.now, values) for sender, values in zip(self.sides, sides, strict=True)]
        self.evaluator.ingest_metrics(merge(*requests), self.now)


@pytest.mark.parametrize("drift", [0.0, 0.05, -0.05])
def test_what_is_within_the_limit_passes(drift: float) -> None:
    """On either side of 0, in the unit of the rewards; the reason has the sign."""
    found = Rewarded().pane(4000, drift)
    assert found.status is Status.PASS
    assert abs(drift) <= found.upper <= LIMIT
    assert found.lower <= abs(drift)
    assert found.samples == 4000
    assert f"E_P[r] - E_Q[r] is {'-' if drift < 0 else ''}" in found.reason
    assert found.about == "population"


@pytest.mark.parametrize("drift", [0.3, -0.3])
def test_what_is_beyond_the_limit_fails_and_clears(drift: float) -> None:
    """Evidence of either side is enough; a PASS takes what both histograms say after the fault."""
    watched, found = Rewarded(), []
    while not found or found[-1].status is not Status.FAIL:
        assert len(found) < 40
        found.append(watched.pane(50, drift))
    assert found[-1].evidence == 1.0
    assert {verdict.status for verdict in found[:-1]} == {Status.INCONCLUSIVE}
    after = watched.pane(4000, 0.0)
    assert (after.status, after.samples, after.evidence) == (Status.PASS, 4000, 0.0)


@pytest.mark.slow
def test_the_limit_itself_raises_no_false_alarm() -> None:
    """At 100 % of the limit 80 panes hold less than an alarm takes."""
    watched = Rewarded(false_alarms="1h")
    assert all(watched.pane(200, LIMIT).status is not Status.FAIL for _ in range(80))


def test_one_histogram_alone_decides_nothing() -> None:
    """Where the other side never came, the drift may be anything on it."""
    watched = Rewarded()
    watched.now += 30.0
    watched.evaluator.ingest_metrics(watched.sides[0].request(watched.now, np.zeros(4000)), watched.now)
    (found,) = verdicts_of(watched.evaluator, watched.now)
    assert found.status is Status.INCONCLUSIVE
    assert math.isinf(found.upper)


@pytest.mark.parametrize(
    ("clause", "message"),
    [
        ({"limit": 3}, "a reward drift over this reward_range"),
        ({"cap": 2}, "reward_drift takes no cap"),
        ({"statistic": "p99"}, "reward_drift is always a mean"),
        ({"unit": "token"}, "is observed once per sequence"),
    ],
)
def test_what_a_clause_cannot_say_is_refused(clause: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        load_text(contract_text(assumptions={"reward_range": [-1, 1]}, statistical=[CLAUSE | clause]))
