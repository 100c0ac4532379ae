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

ALPHA = 0.1
SIDES = {"low": 0.0, "high": 1.0, "alpha_lower": ALPHA, "alpha_upper": ALPHA}
LAWS = {
    "most samples have seen nothing": (lambda rng, shape: (rng.random(shape) < 1e-4).astype(float), 1e-4),
    "the mean hides in few observations": (
        lambda rng, shape: np.where(rng.random(shape) < 2.5e-4, 0.2, 5e-5),
        2.5e-4 * 0.2 + (1 - 2.5e-4) * 5e-5,
    ),
    "(1 - w)+ of a Gaussian log ratio, as of a bf16 kernel": (
        lambda rng, shape: np.maximum(-np.expm1(rng.normal(0.0, 0.01, shape)), 0.0),
        float(stats.norm.cdf(0.0) - math.exp(0.01**2 / 2) * stats.norm.cdf(-0.01)),
    ),
    "the largest variance there is": (lambda rng, shape: (rng.random(shape) < 0.5).astype(float), 0.5),
}


def plausible(misses, runs, alpha=ALPHA):
    """Whether a miss rate of alpha explains as many misses."""
    return stats.binom.sf(misses - 1, runs, alpha) >= 1e-9


def missed(intervals, mean):
    """Whether any of some intervals misses a mean, on either side."""
    above = any(interval.lower > mean * (1 + 1e-12) for interval in intervals)
    return above, any(interval.upper < mean * (1 - 1e-12) for interval in intervals)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("n", [10, 500])
def test_fixed_intervals_cover(histogram_of, law, n):
    """No side misses more often than one time in ten, also from a histogram."""
    draw, mean = LAWS[law]
    samples = draw(np.random.default_rng(n), (200, n))
    for build, runs in ((Binned.of_samples, 200), (lambda row: histogram_of(row).binned(), 50)):
        wrong = np.sum([missed([mean_interval(build(row), **SIDES)], mean) for row in samples[:runs]], axis=0)
        assert all(plausible(count, runs) for count in wrong)


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
def test_anytime_intervals_never_miss_over_all_looks(law):
    """Looked at thirty times between 1 and 2000 observations, a side is ever wrong in at most alpha of the runs."""
    draw, mean = LAWS[law]
    looks = np.unique(np.geomspace(1, 2000, 30).astype(int))
    wrong = np.zeros(2)
    for row in draw(np.random.default_rng(5), (200, 2000)):
        wrong += missed([mean_interval(Binned.of_samples(row[:n]), **SIDES, anytime=True) for n in looks], mean)
    assert all(plausible(count, 200) for count in wrong)


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
