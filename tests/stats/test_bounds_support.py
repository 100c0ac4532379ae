"""Support deficit: an interval for 1 - E_Q[w]."""

from __future__ import annotations

import numpy as np
import pytest

from kc_otel.stats import Binned, support_deficit

SIDES = {"alpha_lower": 0.025, "alpha_upper": 0.025}


def test_upper_side_holds_whatever_the_tail():
    """Cut at the cap the deficit looks larger, never smaller: with a rare huge ratio the upper side still covers."""
    w = np.concatenate([np.full(9999, 0.5), [4000.0]])
    found = support_deficit(Binned.of_samples(w), cap=10.0, **SIDES)
    assert found.estimate == pytest.approx(1 - w.mean())
    assert found.lower == 0.0
    assert found.upper >= 1 - np.minimum(w, 10).mean() > found.estimate
    assert "w cut at 10" in found.note
    nothing = support_deficit(Binned.of_samples(np.zeros(0)), **SIDES)
    assert (nothing.lower, nothing.upper, nothing.samples) == (0.0, 1.0, 0)


@pytest.mark.slow
def test_rare_large_ratios_make_no_deficit_of_none(three_sigma):
    """A hundred, once in 2000 tokens, makes up for all the others being below 1: no window may claim a deficit."""
    rng, runs, chance = np.random.default_rng(0), 1500, 5e-4
    usual = 0.95 / (1 - chance)
    assert chance * 100 + (1 - chance) * usual == pytest.approx(1.0)
    silent = bold = below = 0
    for many in rng.binomial(2000, chance, runs):
        w = Binned.of_samples(np.repeat([100.0, usual], [many, 2000 - many]))
        found = support_deficit(w, cap=10.0, alpha_lower=0.01, alpha_upper=0.01)
        vouched = support_deficit(w, cap=10.0, highest=100.0, alpha_lower=0.01, alpha_upper=0.01)
        silent, bold = silent + (found.lower > 0.0), bold + (vouched.lower > 0.0)
        below += found.upper < 0.0 or vouched.upper < 0.0
        assert found.upper == vouched.upper
    assert (silent, below) == (0, 0)
    assert bold <= three_sigma(0.01, runs) * runs


def test_a_vouched_range_that_is_broken_claims_nothing_below():
    """One ratio above the highest that the caller vouched for takes the lower bound back, and the note says so."""
    w = np.r_[np.full(5000, 0.9), 3.0]
    kept, broken = (support_deficit(Binned.of_samples(w), highest=high, **SIDES) for high in (4.0, 2.0))
    assert kept.lower > 0.05
    assert kept.note.endswith("the lower one if no ratio is above 4")
    assert broken.lower == 0.0
    assert "larger ones were observed" in broken.note


def test_alphas_belong_to_their_sides():
    sample = Binned.of_samples(np.random.default_rng(0).uniform(0.3, 1.5, 5000))
    base = support_deficit(sample, highest=2.0, alpha_lower=0.1, alpha_upper=0.1)
    low = support_deficit(sample, highest=2.0, alpha_lower=0.001, alpha_upper=0.1)
    high = support_deficit(sample, highest=2.0, alpha_lower=0.1, alpha_upper=0.001)
    assert low.lower < base.lower
    assert low.upper == base.upper
    assert high.upper > base.upper
    assert high.lower == base.lower
