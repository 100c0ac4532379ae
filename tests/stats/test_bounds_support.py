"""Support deficit: an interval for 1 - E_Q[w]."""

from __future__ import annotations

import numpy as np
import pytest

from kc_otel.stats import Binned, ExponentialHistogram, support_deficit

SIDES = {"alpha_lower": 0.025, "alpha_upper": 0.025}


@pytest.mark.slow
def test_the_upper_side_covers_the_deficit(three_sigma):
    """Over 2000 samples it misses the exact deficit at most as often as its alpha allows."""
    rng = np.random.default_rng(0)
    p, q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.5, 0.35, 0.15, 0.0])
    missed = 0
    for _ in range(2000):
        w = (p / np.where(q > 0, q, 1))[rng.choice(4, 400, p=q)]
        missed += support_deficit(Binned.of_samples(w), cap=2.0, alpha_lower=0.01, alpha_upper=0.1).upper < 0.05
    assert missed / 2000 <= three_sigma(0.1, 2000)


def test_the_upper_side_holds_whatever_the_tail_and_nothing_is_claimed_below():
    """Cut at the cap the deficit looks larger, never smaller: with a rare huge ratio the upper side still covers."""
    w = np.concatenate([np.full(9999, 0.5), [4000.0]])
    found = support_deficit(Binned.of_samples(w), cap=10.0, **SIDES)
    assert found.estimate == pytest.approx(1 - w.mean())
    assert found.lower == 0.0
    assert found.upper >= 1 - np.minimum(w, 10).mean() > found.estimate
    assert "w cut at 10" in found.note


def test_histogram_of_ratios_serves_as_well(histogram_of):
    """A histogram keeps the exact sum, so the estimate is the samples', and its upper side is no smaller."""
    w = np.random.default_rng(0).uniform(0.8, 1.1, 5000)
    exact = support_deficit(Binned.of_samples(w), **SIDES)
    coarse = support_deficit(histogram_of(w).binned(), **SIDES)
    assert coarse.estimate == pytest.approx(exact.estimate)
    assert exact.upper <= coarse.upper
    nothing = support_deficit(ExponentialHistogram.empty(4).binned(), **SIDES)
    assert (nothing.lower, nothing.upper, nothing.samples) == (0.0, 1.0, 0)
