"""Miss rates where they are hardest to keep, over thousands of runs: rare events, tails, many looks.

A check fails if a miss rate of alpha would give as many misses with probability below 1e-9 (exact binomial), so that
all of them together cry wolf less than once in a million. Seeds are fixed.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from kc_otel.stats import Binned, capped_mean_interval, mean_interval

UNIT = {"low": 0.0, "high": 1.0}


def rare_ones(rng, shape):
    """1 with probability 1e-4: most samples have seen nothing."""
    return (rng.random(shape) < 1e-4).astype(float), 1e-4


def thousandths(rng, shape):
    """1 with probability 1e-3."""
    return (rng.random(shape) < 1e-3).astype(float), 1e-3


def two_points(rng, shape):
    """5e-5 nearly always, 0.2 once in four thousand: the mean, 1e-4, hides in few observations."""
    return np.where(rng.random(shape) < 2.5e-4, 0.2, 5e-5), 2.5e-4 * 0.2 + (1 - 2.5e-4) * 5e-5


def drifts(rng, shape):
    """(1 - w)+ for a Gaussian log ratio of deviation 0.01: what a bf16 kernel looks like."""
    log_ratio = rng.normal(0.0, 0.01, shape)
    mean = stats.norm.cdf(0.0) - math.exp(0.01**2 / 2) * stats.norm.cdf(-0.01)
    return np.maximum(-np.expm1(log_ratio), 0.0), float(mean)


def coins(rng, shape):
    """Fair coins: the largest variance there is."""
    return (rng.random(shape) < 0.5).astype(float), 0.5


LAWS = [rare_ones, thousandths, two_points, drifts, coins]


def plausible(misses, runs, alpha):
    """Whether a miss rate of alpha explains as many misses."""
    return stats.binom.sf(misses - 1, runs, alpha) >= 1e-9


def missed(intervals, mean):
    low = sum(i.lower > mean * (1 + 1e-12) for i in intervals)
    return low, sum(i.upper < mean * (1 - 1e-12) for i in intervals)


def check(law, runs, n, alpha, build=Binned.of_samples):
    samples, mean = law(np.random.default_rng(n), (runs, n))
    got = [mean_interval(build(row), **UNIT, alpha_lower=alpha, alpha_upper=alpha) for row in samples]
    assert all(plausible(count, runs, alpha) for count in missed(got, mean))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("n", [10, 500])
def test_fixed_intervals_cover(histogram_of, law, n):
    """No side misses more often than one time in ten, also from a histogram."""
    check(law, 200, n, 0.1)
    check(law, 50, n, 0.2, lambda row: histogram_of(row).binned())


@pytest.mark.slow
def test_capped_means_of_heavy_tails_are_covered():
    """For a Pareto tail of index 1.5 the lower side is for the mean itself, the upper for the mean of min(x, cap)."""
    rng, runs, n, alpha, cap = np.random.default_rng(8), 3000, 1000, 0.05, 5.0
    # x = scale * (U^(-2/3) - 1): mean 2 scale, and E min(x, cap) in closed form
    scale = 0.005
    samples = scale * (rng.random((runs, n)) ** (-1 / 1.5) - 1.0)
    cut = scale / 0.5 * (1.0 - (1.0 + cap / scale) ** -0.5)
    levels = {"alpha_lower": alpha, "alpha_upper": alpha}
    got = [capped_mean_interval(Binned.of_samples(x), low=0.0, high=math.inf, cap=cap, **levels) for x in samples]
    assert plausible(sum(i.lower > 2 * scale for i in got), runs, alpha)
    assert plausible(sum(i.upper < cut for i in got), runs, alpha)
    assert all((i.upper == math.inf) == bool((x > cap).any()) for i, x in zip(got, samples, strict=True))


def looks(n, count=30):
    return np.unique(np.geomspace(1, n, count).astype(int))


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
def test_anytime_intervals_never_miss_over_all_looks(law):
    """Looked at thirty times between 1 and 2000 observations, a side is ever wrong in at most alpha of the runs."""
    runs, n, alpha = 200, 2000, 0.1
    samples, mean = law(np.random.default_rng(5), (runs, n))
    low = high = 0
    for row in samples:
        got = [
            mean_interval(Binned.of_samples(row[:t]), **UNIT, alpha_lower=alpha, alpha_upper=alpha, anytime=True)
            for t in looks(n)
        ]
        below, above = missed(got, mean)
        low, high = low + bool(below), high + bool(above)
    assert plausible(low, runs, alpha)
    assert plausible(high, runs, alpha)


@pytest.mark.slow
def test_bounds_are_for_the_average_of_changing_means():
    """Where the mean jumps half way, the betting interval covers the average, at a miss rate of at most alpha."""
    rng, runs, n, alpha = np.random.default_rng(12), 1000, 400, 0.1
    means = np.where(np.arange(n) < n // 2, 0.01, 0.4)
    samples = (rng.random((runs, n)) < means).astype(float)
    got = [mean_interval(Binned.of_samples(x), **UNIT, alpha_lower=alpha, alpha_upper=alpha) for x in samples]
    assert all(plausible(count, runs, alpha) for count in missed(got, means.mean()))


def test_a_window_of_two_thousand_tokens_can_pass():
    """A drift of 5e-4 passes a limit of 0.004 with 2000 tokens at confidence 0.99."""
    x, _ = drifts(np.random.default_rng(1), 2000)
    sample = Binned.of_samples(x * 0.0005 / x.mean())
    levels = {"alpha_lower": 0.005, "alpha_upper": 0.005}
    assert mean_interval(sample, **UNIT, **levels).upper < 0.004
