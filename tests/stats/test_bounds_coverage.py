"""Intervals miss no more often than they say, where that is hardest: tiny means, skew, coins, few observations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from kc_otel.stats import Binned, fraction_interval, quantile_interval


def coins(rng, shape):
    """Fair coins: the largest variance there is."""
    return (rng.random(shape) < 0.5).astype(float), 0.5


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
