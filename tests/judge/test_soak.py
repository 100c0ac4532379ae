"""The soak in short: the evaluator over hundreds of panes of dependent tokens; `make soak` is its long form."""

from __future__ import annotations

import pytest

from kc_otel.judge.verdict import Status
from tests.benchmarks.soak import Soak


@pytest.mark.slow
@pytest.mark.parametrize("cv", [0.45, 1.0])
def test_what_keeps_its_limit_raises_no_alarm(cv: float) -> None:
    """Five slices exactly at their limit, where one alarm is allowed in ten times as many panes."""
    assert Soak(5, cv, panes=3000).alarms(1.0, ticks=300) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("cv", "most"), [(0.45, 4), (1.0, 12)])
def test_twice_the_limit_fails_within_panes_and_half_of_it_ends_that_within_panes(cv: float, most: int) -> None:
    """After panes within the limit, and before the fault has left the short window."""
    soak = Soak(5, cv, panes=10_000)
    for _ in range(20):
        assert Status.FAIL not in soak.tick(0.8).values()
    began = soak.until(2.0, lambda status: status is Status.FAIL, most)
    assert len(began) == 5
    ended = soak.until(0.5, lambda status: status is not Status.FAIL, 9)
    assert len(ended) == 5
