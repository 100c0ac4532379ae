"""A confidence sequence against plain loops written straight from the paper."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.stats import (
    Binned,
    capped_mean_interval,
    fraction_interval,
    mean_interval,
    quantile_interval,
)

UNIT = {"low": 0.0, "high": 1.0}
LEVELS = {"alpha_lower": 0.02, "alpha_upper": 0.05}
streams = st.lists(
    st.one_of(st.floats(0, 1), st.floats(0, 1e-3), st.sampled_from([0.0, 1.0])), min_size=1, max_size=40
).map(np.array)
BETS = [2.0 ** (power / 2) for power in range(-32, 41)]
WEIGHTS = np.array([max(bet, 1.0) ** -0.125 for bet in BETS]) / sum(max(bet, 1.0) ** -0.125 for bet in BETS)


def wealth(x, mean):
    """Mixture over the fixed bets of the product of 1 + lambda (x - m), lambda = c / (1 + c m)."""
    return float(WEIGHTS @ [np.prod([1 + c / (1 + c * mean) * (v - mean) for v in x]) for c in BETS])


@given(streams)
def test_anytime_betting_ends_where_the_mixture_has_won_one_over_alpha(x):
    """Either side, scaled to the range, is where the wealth of the fixed mixture is 1/alpha."""
    got = mean_interval(Binned.of_samples(3 * x - 1), low=-1, high=2, **LEVELS, anytime=True)
    for y, bound, alpha in ((x, (got.lower + 1) / 3, 0.02), (1 - x, (2 - got.upper) / 3, 0.05)):
        if bound < 1e-12:
            assert wealth(y, 0.0) * alpha <= 1 + 1e-6
        else:
            assert wealth(y, bound) * alpha == pytest.approx(1, rel=1e-5)


def test_looking_at_every_size_costs_a_fifth_of_the_width():
    """For a small drift the anytime interval contains that of a fixed size, and is less than 1.2 times as wide."""
    x = np.minimum(np.exp(np.random.default_rng(2).normal(-6, 1, 20_000)), 1.0)
    fixed, anytime = (mean_interval(Binned.of_samples(x), **UNIT, **LEVELS, anytime=always) for always in (False, True))
    assert anytime.lower < fixed.lower < x.mean() < fixed.upper < anytime.upper
    assert anytime.upper - anytime.lower < 1.2 * (fixed.upper - fixed.lower)


LOOKS = [20, 25, 32, 40, 50, 63, 79, 99, 124, 155, 194, 243, 304, 380]


def ever_missed(of, truth, runs=200, seed=5):
    """In how many of `runs` streams each side misses the truth at one of the looks or more."""
    rng = np.random.default_rng(seed)
    missed = np.zeros(2, dtype=int)
    for _ in range(runs):
        stream = rng.exponential(1.0, LOOKS[-1])
        bounds = [of(Binned.of_samples(stream[:count])) for count in LOOKS]
        missed += any(interval.lower > truth for interval in bounds), any(interval.upper < truth for interval in bounds)
    return missed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "truth", "least"),
    [
        (
            lambda sample, **more: fraction_interval(sample, 2.0, alpha_lower=0.05, alpha_upper=0.05, **more),
            math.exp(-2),
            20,
        ),
        (
            lambda sample, **more: quantile_interval(sample, 0.9, alpha_lower=0.05, alpha_upper=0.05, **more),
            math.log(10),
            20,
        ),
        (
            lambda sample, **more: capped_mean_interval(
                sample, low=0.0, high=math.inf, cap=3.0, cut=True, alpha_lower=0.05, alpha_upper=0.05, **more
            ),
            1.0 - math.exp(-3.0),
            0,
        ),
    ],
)
def test_shares_quantiles_and_cut_means_hold_at_all_looks_together(of, truth, least):
    """Over fourteen looks either side misses in at most alpha of 200 streams; the exact ones of one size in more."""
    assert (ever_missed(lambda sample: of(sample, anytime=True), truth) <= 200 * 0.05).all()
    assert ever_missed(of, truth).sum() >= least


def test_what_lies_beyond_a_cap_counts_as_the_cap_where_that_is_the_claim():
    """Interval and estimate are those of the cut sample, from a histogram within its buckets."""
    x = np.random.default_rng(3).exponential(1.0, 500)
    claim = {"low": 0.0, "high": math.inf, "cap": 2.0, **LEVELS}
    cut = capped_mean_interval(Binned.of_samples(np.minimum(x, 2.0)), **claim)
    got = capped_mean_interval(Binned.of_samples(x), cut=True, **claim)
    assert (got.lower, got.estimate, got.upper) == pytest.approx((cut.lower, cut.estimate, cut.upper))
    assert got.note == "for the mean of min(value, 2)"
    assert capped_mean_interval(Binned.of_samples(x), **claim).upper == math.inf
