"""Intervals miss no more often than they say, where that is hardest: tiny means, skew, coins, few observations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from kc_otel.stats import Binned, fraction_interval, mean_interval, quantile_interval

UNIT = {"low": 0.0, "high": 1.0}


def rare_ones(rng, shape):
    """One in ten thousand is 1: the mean is 1e-4 and most samples have seen nothing."""
    return (rng.random(shape) < 1e-4).astype(float), 1e-4


def coins(rng, shape):
    """Fair coins: the largest variance there is."""
    return (rng.random(shape) < 0.5).astype(float), 0.5


def rare_and_small(rng, shape):
    """Mostly 1e-5 to 1e-4, and 1 in twenty thousand near 1: an average hides in a tail."""
    big = rng.random(shape) < 5e-5
    return np.where(big, rng.uniform(0.8, 1.0, shape), rng.uniform(1e-5, 1e-4, shape)), (
        5e-5 * 0.9 + (1 - 5e-5) * 5.5e-5
    )


def skewed(rng, shape):
    """U^30 of a uniform U: mean 1/31, most values tiny."""
    return rng.random(shape) ** 30.0, 1 / 31


def nearly_one(rng, shape):
    """The mirror image: mean 1 - 1e-4."""
    x, mean = rare_ones(rng, shape)
    return 1 - x, 1 - mean


LAWS = [rare_ones, coins, rare_and_small, skewed, nearly_one]


def misses(samples, mean, alpha, build):
    low = high = 0
    for row in samples:
        got = mean_interval(build(row), **UNIT, alpha_lower=alpha, alpha_upper=alpha)
        low, high = low + (got.lower > mean), high + (got.upper < mean)
    return low, high


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("n", "runs"), [(2, 1500), (5, 1500), (200, 1500)])
def test_mean_interval_covers(three_sigma, law, n, runs):
    """Each side misses the true mean at most alpha of the time, at any sample size."""
    samples, mean = law(np.random.default_rng(n), (runs, n))
    allowed = three_sigma(0.1, runs) * runs
    assert max(misses(samples, mean, 0.1, Binned.of_samples)) <= allowed


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("binned", [False, True])
def test_mean_interval_covers_at_the_size_of_a_window(three_sigma, histogram_of, law, binned):
    """At the size of real windows, exact or binned at scale 4, misses stay at or below alpha."""
    build = (lambda row: histogram_of(row).binned()) if binned else Binned.of_samples
    for n, runs in ((2000, 3000), (20_000, 600)):
        samples, mean = law(np.random.default_rng(n), (runs, n))
        assert max(misses(samples, mean, 0.05, build)) <= three_sigma(0.05, runs) * runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("law", "n", "ratio"),
    [(rare_ones, 20_000, 0.12), (rare_and_small, 20_000, 0.13), (skewed, 20_000, 0.33), (coins, 20_000, 1.25)],
)
def test_width_against_hoeffding(histogram_of, law, n, ratio):
    """For small means the interval is several times narrower than Hoeffding's, and for coins little wider."""
    samples, _ = law(np.random.default_rng(7), (20, n))
    level = {"alpha_lower": 0.005, "alpha_upper": 0.005}
    for build in (Binned.of_samples, lambda row: histogram_of(row).binned()):
        ours = [mean_interval(build(row), **UNIT, **level) for row in samples]
        hoeffding = math.sqrt(math.log(1 / 0.005) / (2 * n))
        width = np.mean([i.upper - i.estimate for i in ours]) / hoeffding
        assert width <= ratio


def exact_misses(interval, n, rank, alpha):
    """Exact error probabilities of a quantile interval for continuous data: ranks are all that matters."""
    got = interval(Binned.of_samples(np.arange(1.0, n + 1)), rank, alpha_lower=alpha, alpha_upper=alpha)
    count = stats.binom(n, rank)
    low = count.cdf(got.lower - 1) if math.isfinite(got.lower) else 0.0
    high = count.sf(got.upper - 1) if math.isfinite(got.upper) else 0.0
    return low, high


@pytest.mark.parametrize("rank", [0.01, 0.5, 0.9, 0.99, 0.999])
@pytest.mark.parametrize("n", [1, 10, 300, 6000])
def test_quantile_intervals_cover_exactly(rank, n):
    """Computed, not simulated: no side misses more often than alpha."""
    for alpha in (0.001, 0.05):
        assert max(exact_misses(quantile_interval, n, rank, alpha)) <= alpha * (1 + 1e-9)


@pytest.mark.slow
def test_quantile_interval_covers_discrete_and_binned_data(three_sigma, histogram_of):
    """Ties and buckets make the interval wider, never wrong."""
    rng, runs, alpha = np.random.default_rng(11), 1500, 0.1
    x = rng.geometric(0.3, (runs, 100)).astype(float)
    true = stats.geom.ppf(0.9, 0.3)
    got = [quantile_interval(histogram_of(row).binned(), 0.9, alpha_lower=alpha, alpha_upper=alpha) for row in x]
    assert np.mean([i.lower > true for i in got]) <= three_sigma(alpha, runs)
    assert np.mean([i.upper < true for i in got]) <= three_sigma(alpha, runs)


@pytest.mark.parametrize("n", [1, 5, 50, 400])
def test_clopper_pearson_covers_exactly(n):
    """Summed over all outcomes, no side misses more often than alpha at any true fraction, tiny ones included."""
    alpha = 0.05
    got = [
        fraction_interval(
            Binned.of_samples(np.r_[np.ones(k), np.zeros(n - k)]), 0.5, alpha_lower=alpha, alpha_upper=alpha
        )
        for k in range(n + 1)
    ]
    lower, upper = np.array([i.lower for i in got]), np.array([i.upper for i in got])
    for p in (1e-6, 1e-4, 0.01, 0.1, 0.5, 0.9, 0.9999):
        weight = stats.binom.pmf(np.arange(n + 1), n, p)
        assert weight[lower > p].sum() <= alpha * (1 + 1e-9)
        assert weight[upper < p].sum() <= alpha * (1 + 1e-9)
