"""The soak in short: the evaluator over hundreds of panes of groups; `make soak` is its long form."""

from __future__ import annotations

import numpy as np
import pytest

from kc_otel.judge.verdict import Status, Verdict
from tests.benchmarks.soak import SMALL, STEPS, TRAFFIC, Soak, Traffic


def fails(verdict: Verdict) -> bool:
    return verdict.status is Status.FAIL


@pytest.mark.slow
@pytest.mark.parametrize("traffic", [*TRAFFIC, SMALL], ids=str)
def test_what_keeps_its_limit_raises_no_alarm(traffic: Traffic) -> None:
    """Five slices exactly at their limit, where one alarm is allowed in ten times as many panes."""
    assert Soak(5, traffic, panes=2000).alarms(1.0, panes=200) == 0


@pytest.mark.slow
def test_sequences_as_the_unit_of_groups_raise_alarms_within_the_limit() -> None:
    """What the default is there for: at the limit, 16 rollouts of a prompt are not 16 observations."""
    sequences = Traffic(16, 16, unit="sequence")
    assert Soak(5, sequences, panes=2000).alarms(1.0, panes=200) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("traffic", "alarms"), [(STEPS[0], True), (STEPS[1], False)], ids=str)
def test_a_factor_common_to_each_step_breaks_a_limit_for_every_step_and_none_on_average(
    traffic: Traffic, alarms: bool
) -> None:
    """CV 0.3 around 80 % of the limit: some steps are beyond it, the average over steps is not."""
    assert (Soak(5, traffic, panes=2000).alarms(0.8, panes=600) > 0) is alarms


@pytest.mark.slow
@pytest.mark.parametrize(("traffic", "most"), [(TRAFFIC[0], 4), (TRAFFIC[1], 12), (TRAFFIC[3], 2)], ids=str)
def test_twice_the_limit_fails_within_panes_and_ends_within_panes_of_the_repair(traffic: Traffic, most: int) -> None:
    """After panes within the limit, the median of the slices; 16 prompts with a CV of 0.5 take two."""
    soak = Soak(5, traffic, panes=10_000)
    for _ in range(20):
        assert not any(map(fails, soak.tick(0.8).values()))
    assert np.median([*soak.until(2.0, fails, 3 * most).values()]) <= most
    assert len(soak.until(0.5, lambda verdict: verdict.ended or verdict.status is Status.PASS, 20)) == 5


@pytest.mark.slow
def test_a_fault_on_a_small_slice_ends_within_half_an_hour_of_its_repair() -> None:
    """1,200 sequences an hour, for whose limit a PASS never comes: INCONCLUSIVE afterwards, and ended."""
    soak = Soak(5, SMALL, panes=10_000)
    for _ in range(20):
        soak.tick(0.5)
    assert len(soak.until(2.0, fails, 60)) == 5
    assert len(soak.until(0.5, lambda verdict: verdict.ended, 60)) == 5
    assert {verdict.status for verdict in soak.tick(0.5).values()} == {Status.INCONCLUSIVE}
