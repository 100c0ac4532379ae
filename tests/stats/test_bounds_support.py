"""Support deficit and what removed it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.stats import Binned, ExponentialHistogram
from kc_otel.stats.support import kept_by_top_k, kept_by_top_p, removed_mass, support_deficit, tv_from_deficit

SIDES = {"alpha_lower": 0.025, "alpha_upper": 0.025}


def rows(seed: int, count: int, vocabulary: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(vocabulary, 0.5), count)


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.floats(0.05, 1.0))
def test_removed_mass_is_the_support_deficit(seed, k, p):
    """P outside the sampler's support is 1 - E_Q[w], whichever truncation removed it, and TV is at least that."""
    train, inference = rows(seed, 4, 12), rows(seed + 1, 4, 12)
    found = removed_mass(train, inference, top_k=k, top_p=p)
    kept = kept_by_top_k(inference, k)
    nucleus = np.where(kept, inference, 0)
    kept &= kept_by_top_p(nucleus / nucleus.sum(axis=1, keepdims=True), p)
    sampler = np.where(kept, inference, 0)
    sampler /= sampler.sum(axis=1, keepdims=True)
    mean_ratio = np.where(kept, train, 0).sum(axis=1)  # sum of q w over Q's support
    assert found.total == pytest.approx(1 - mean_ratio)
    tv = np.abs(train - sampler).sum(axis=1) / 2
    assert (tv >= tv_from_deficit(found.total) - 1e-12).all()
    assert (found.top_k >= 0).all()
    assert (found.top_p >= 0).all()
    assert found.underflow == pytest.approx(0.0)


def test_cutting_and_renormalising_attains_the_bound():
    """Where the sampler is P itself, cut, TV is the deficit exactly."""
    p = rows(3, 1, 30)[0]
    found = removed_mass(p, p, top_p=0.8)
    kept = kept_by_top_p(p, 0.8)
    q = np.where(kept, p, 0) / p[kept].sum()
    assert np.abs(p - q).sum() / 2 == pytest.approx(float(found.total))
    assert tv_from_deficit(float(found.total)) == float(found.total)
    assert tv_from_deficit(-0.1) == 0.0


def test_what_removed_the_mass_is_told_apart():
    """Top-k comes first, the nucleus is that of the renormalised rest, and zeros of Q count as underflow."""
    p = np.array([0.4, 0.3, 0.2, 0.06, 0.04])
    found = removed_mass(p, [0.5, 0.3, 0.1, 0.1, 0.0], top_k=4, top_p=0.8)
    assert float(found.top_k) == pytest.approx(0.04)
    assert float(found.top_p) == pytest.approx(0.2 + 0.06)
    assert float(found.underflow) == 0.0
    # 0.5 / 0.8 = 0.625 and 0.3 / 0.8: the nucleus of the two most probable tokens needs both for 0.7, but not for 0.6.
    two = removed_mass(p, [0.5, 0.3, 0.1, 0.05, 0.05], top_k=2, top_p=0.6)
    assert float(two.top_p) == pytest.approx(0.3)
    assert float(removed_mass(p, [0.5, 0.5, 0.0, 0.0, 0.0]).underflow) == pytest.approx(0.3)


@given(st.integers(0, 2**32 - 1), st.floats(0.01, 1.0))
def test_nucleus_is_the_smallest_set_that_reaches_p(seed, p):
    """The kept tokens have a mass of at least p, and less without the least probable of them."""
    row = rows(seed, 1, 20)[0]
    kept = kept_by_top_p(row, p)
    mass = row[kept].sum()
    assert mass >= p - 1e-9
    if p < 1:
        assert mass - row[kept].min() < p
    assert row[kept].min() >= row[~kept].max(initial=0.0)
    assert kept_by_top_k(row, 5).sum() == 5


@pytest.mark.slow
def test_interval_covers_the_deficit(three_sigma):
    """Over 2000 samples each side misses the exact deficit at most as often as its alpha allows."""
    rng = np.random.default_rng(0)
    p, q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.5, 0.35, 0.15, 0.0])
    missed = np.zeros(2)
    for _ in range(2000):
        w = (p / np.where(q > 0, q, 1))[rng.choice(4, 400, p=q)]
        found = support_deficit(Binned.of_samples(w), cap=2.0, alpha_lower=0.1, alpha_upper=0.1)
        missed += (found.lower > 0.05, found.upper < 0.05)
    assert (missed / 2000 <= three_sigma(0.1, 2000)).all()


def test_upper_side_holds_whatever_the_tail():
    """Cut at the cap the deficit looks larger, never smaller: with a rare huge ratio the upper side still covers."""
    w = np.concatenate([np.full(9999, 0.5), [4000.0]])
    found = support_deficit(Binned.of_samples(w), cap=10.0, **SIDES)
    assert found.estimate == pytest.approx(1 - w.mean())
    assert found.lower == 0.0
    assert found.upper >= 1 - np.minimum(w, 10).mean() > found.estimate
    assert "cap 10" in found.note


def test_alphas_belong_to_their_sides():
    """A smaller alpha on one side moves that side only."""
    sample = Binned.of_samples(np.random.default_rng(0).uniform(0.3, 1.5, 5000))
    base = support_deficit(sample, alpha_lower=0.1, alpha_upper=0.1)
    low = support_deficit(sample, alpha_lower=0.001, alpha_upper=0.1)
    high = support_deficit(sample, alpha_lower=0.1, alpha_upper=0.001)
    assert low.lower < base.lower
    assert low.upper == base.upper
    assert high.upper > base.upper
    assert high.lower == base.lower


def test_histogram_of_ratios_serves_as_well(histogram_of):
    """A histogram keeps the exact sum, so the estimate is the samples' and the interval contains theirs."""
    w = np.random.default_rng(0).uniform(0.8, 1.1, 5000)
    exact = support_deficit(Binned.of_samples(w), **SIDES)
    coarse = support_deficit(histogram_of(w).binned(), **SIDES)
    assert coarse.estimate == pytest.approx(exact.estimate)
    assert coarse.lower <= exact.lower < exact.upper <= coarse.upper
    nothing = support_deficit(ExponentialHistogram.empty(4).binned(), **SIDES)
    assert (nothing.lower, nothing.upper, nothing.samples) == (0.0, 1.0, 0)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: support_deficit(Binned.of_samples(np.ones(3)), cap=1.0, **SIDES), "cap: 1.0"),
        (lambda: support_deficit(Binned.of_samples(np.ones(3)), alpha_lower=2.0, alpha_upper=0.1), "alpha"),
        (lambda: removed_mass([0.5, 0.4], [0.5, 0.5]), "train: a row adds up to 0.9"),
        (lambda: removed_mass([0.5, 0.5], [1.0]), "inference: shape"),
        (lambda: removed_mass([0.5, math.nan], [0.5, 0.5]), "train: nan"),
        (lambda: removed_mass([0.5, 0.5], [0.5, 0.5], top_k=0), "top_k: 0"),
        (lambda: removed_mass([0.5, 0.5], [0.5, 0.5], top_p=0.0), "top_p: 0.0"),
        (lambda: removed_mass(1.0, 1.0), "train: 1.0"),
        (lambda: tv_from_deficit(1.5), "deficit: 1.5"),
    ],
)
def test_bad_input_is_named(call, says):
    """Each refusal names the argument and the value."""
    with pytest.raises(ValueError, match=says):
        call()
