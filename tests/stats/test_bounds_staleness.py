"""Engine mismatch apart from weight staleness."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.stats.staleness import mismatch_at_no_lag, split_drift


def kernels(seed: int, vocabulary: int = 6) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Three next-token distributions, and Q's sample in exact proportion: new, old, sampler, tokens."""
    rng = np.random.default_rng(seed)
    z = rng.normal(0, 1, vocabulary)
    count = np.maximum((3000 * np.exp(z) / np.exp(z).sum()).round().astype(int), 1)
    q = count / count.sum()
    old, new = (
        v / v.sum() for v in (q * np.exp(0.1 * rng.normal(size=vocabulary)), q * np.exp(rng.normal(size=vocabulary)))
    )
    return new, old, q, np.repeat(np.arange(vocabulary), count)


@given(st.integers(0, 2**32 - 1))
def test_each_factor_is_the_divergence_that_it_is_named_after(divergences, seed):
    """With Q's sample in exact proportion, tv and k3 of each factor are those of its two distributions."""
    new, old, q, token = kernels(seed)
    found = split_drift(np.log(new)[token], np.log(old)[token], np.log(q)[token])
    for factor, after, before in ((found.total, new, q), (found.mismatch, old, q), (found.staleness, new, old)):
        exact = divergences(before, after)
        assert factor.k3 == pytest.approx(exact["kl_pq"], abs=1e-10)
        assert factor.tv == pytest.approx(exact["tv"], abs=1e-10)
    assert found.total.tv <= found.staleness.tv + found.mismatch.tv + 1e-12


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_parts_add_up(seed, sequences):
    """k1 adds up, variances add up with twice the covariance, shares add up to one; for tokens and sequences."""
    rng = np.random.default_rng(seed)
    now, rollout, sampler = rng.normal(-2, 1, (3, 60))
    lengths = [10, 20, 5, 25] if sequences else None
    found = split_drift(now, rollout, sampler, lengths=lengths)
    assert found.samples == (4 if sequences else 60)
    assert found.staleness.k1 + found.mismatch.k1 == pytest.approx(found.total.k1)
    assert found.staleness.variance + found.mismatch.variance + 2 * found.covariance == pytest.approx(
        found.total.variance
    )
    assert found.staleness.variance_share + found.mismatch.variance_share == pytest.approx(1)
    assert found.staleness.abs_share + found.mismatch.abs_share == pytest.approx(1)
    assert (found.total.abs_share, found.total.variance_share) == (1.0, pytest.approx(1.0))
    assert found.total.mean_abs <= found.staleness.mean_abs + found.mismatch.mean_abs + 1e-12
    log_w = now - sampler
    if sequences:
        log_w = np.add.reduceat(log_w, [0, 10, 30, 35])
    assert found.total.mean_abs == pytest.approx(np.abs(log_w).mean())


def test_each_part_alone_is_the_total():
    """Fresh weights leave only mismatch, equal engines only staleness."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(-2, 1, (2, 100))
    fresh, engines = split_drift(a, a, b), split_drift(a, b, b)
    assert fresh.mismatch == fresh.total
    assert fresh.staleness.mean_abs == fresh.staleness.tv == fresh.staleness.k3 == 0.0
    assert engines.staleness == engines.total
    assert engines.mismatch.variance_share == 0.0
    same = split_drift(a, a, a)
    assert math.isnan(same.total.variance_share)
    assert math.isnan(same.mismatch.abs_share)


def lagged(rng, n: int, *, power: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Mean l^2 of 40 tokens per sequence: mismatch 4e-4, staleness 1e-4 times a power of the lag."""
    lag = rng.integers(0, 6, n)
    return (4e-4 + 1e-4 * lag**power) * rng.chisquare(40, n) / 40, lag


@pytest.mark.slow
@pytest.mark.parametrize("degree", [1, 2])
def test_intercept_covers_the_mismatch(degree, three_sigma):
    """Over 2000 runs each side of each interval misses its truth as often as alpha says; the fit is not rejected."""
    rng = np.random.default_rng(0)
    missed, rejected = np.zeros(6), 0
    for _ in range(2000):
        found = mismatch_at_no_lag(*lagged(rng, 300, power=degree), alpha=0.1, degree=degree)
        slope = 1e-4 if degree == 1 else 0.0
        for at, (interval, truth) in enumerate(((found.mismatch, 4e-4), (found.per_lag, slope), (found.fresh, 4e-4))):
            missed[2 * at : 2 * at + 2] += (interval.lower > truth, interval.upper < truth)
        rejected += found.misfit < 0.05
    # Chi-square means of 50 are a little skewed, so t intervals miss a little more on one side: half a point more.
    assert (missed / 2000 <= three_sigma(0.1, 2000) + 0.015).all()
    assert (missed / 2000 >= 0.06).all()
    assert rejected / 2000 == pytest.approx(0.05, abs=0.04)


def test_wrong_degree_is_noticed():
    """Drift that grows with the square of the lag makes a straight line's misfit tiny, and a parabola's not."""
    values, lags = lagged(np.random.default_rng(1), 4000, power=2)
    line, curve = (mismatch_at_no_lag(values, lags, alpha=0.01, degree=d) for d in (1, 2))
    assert line.misfit < 1e-6
    assert curve.misfit > 0.01
    assert curve.mismatch.lower < 4e-4 < curve.mismatch.upper
    assert not line.mismatch.lower < 4e-4 < line.mismatch.upper


def test_groups_and_line_are_least_squares():
    """Group means are those of the sequences; intercept, slope and HC3 errors are the textbook's on a small case."""
    y, x = np.array([1.0, 2.0, 2.5, 4.0, 6.0]), np.array([0.0, 0.0, 1.0, 1.0, 2.0])
    found = mismatch_at_no_lag(y, x, alpha=0.05)
    slope, intercept = np.polyfit(x, y, 1)
    assert (found.mismatch.estimate, found.per_lag.estimate) == (pytest.approx(intercept), pytest.approx(slope))
    assert [(g.lag, g.samples, g.mean) for g in found.groups] == [(0.0, 2, 1.5), (1.0, 2, 3.25), (2.0, 1, 6.0)]
    design = np.column_stack([np.ones(5), x])
    hat = design @ np.linalg.inv(design.T @ design) @ design.T
    e = (y - hat @ y) / (1 - np.diag(hat))
    bread = np.linalg.inv(design.T @ design)
    error = math.sqrt((bread @ (design.T * e**2) @ design @ bread)[0, 0])
    from scipy.stats import t

    assert found.mismatch.upper - intercept == pytest.approx(t.ppf(0.95, 3) * error)
    assert found.fresh is not None
    assert found.fresh.estimate == 1.5
    assert found.fresh.upper - 1.5 == pytest.approx(t.ppf(0.95, 1) * math.sqrt(0.5) / math.sqrt(2))
    assert math.isnan(found.misfit)
    assert mismatch_at_no_lag(y, x + 1, alpha=0.05).fresh is None


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: split_drift([-1.0], [-1.0, -2.0], [-1.0]), "train_rollout: 2 values"),
        (lambda: split_drift([-1.0], [-1.0], [-1.0, -2.0]), "inference: 2 values"),
        (lambda: split_drift([math.nan], [-1.0], [-1.0]), "train_now: nan"),
        (lambda: split_drift([-1.0], [-1.0], [-1.0], lengths=[2]), "lengths: add up to 2"),
        (lambda: mismatch_at_no_lag([1.0, 2.0, 3.0], [1, 1, 1], alpha=0.1), "lags: 1 distinct"),
        (lambda: mismatch_at_no_lag([1.0, 2.0, 3.0], [0, 1], alpha=0.1), "lags: 2 values"),
        (lambda: mismatch_at_no_lag([1.0, 2.0, 3.0], [0, 1, -2], alpha=0.1), "lags: -2.0"),
        (lambda: mismatch_at_no_lag([1.0, 2.0, 3.0], [0, 1, 2], alpha=0.0), "alpha: 0.0"),
        (lambda: mismatch_at_no_lag([1.0, 2.0, 3.0], [0, 1, 2], alpha=0.1, degree=3), "degree: 3"),
    ],
)
def test_bad_input_is_named(call, says):
    """Each refusal names the argument and the value."""
    with pytest.raises(ValueError, match=says):
        call()
