"""Intervals for quantiles, fractions and the maximum."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kc_otel.stats import (
    Binned,
    Histogram,
    Interval,
    fraction_interval,
    maximum_interval,
    mean_interval,
    quantile_interval,
    two_valued_mean_interval,
)
from kc_otel.stats.quantiles import binomial_ranks

LEVELS = {"alpha_lower": 0.01, "alpha_upper": 0.05}
ranks = st.sampled_from([0.001, 0.25, 0.5, 0.9, 0.99, 0.999])
levels = st.sampled_from([1e-9, 0.001, 0.01, 0.3, 0.9])
values = st.lists(st.one_of(st.floats(-5, 5), st.just(0.0)), min_size=1, max_size=60).map(np.array)


@given(st.one_of(st.integers(1, 3000), st.sampled_from([10**6, 10**9])), ranks, levels, levels)
def test_order_statistics_are_the_sharpest_that_keep_their_level(n, rank, alpha_lower, alpha_upper):
    r, s = (int(at[0]) for at in binomial_ranks(np.array([float(n)]), rank, alpha_lower, alpha_upper))
    count = stats.binom(n, rank)
    assert count.cdf(r - 1) <= alpha_lower * (1 + 1e-9)
    assert count.cdf(r) > alpha_lower * (1 - 1e-9)
    assert count.sf(s - 1) <= alpha_upper * (1 + 1e-9)
    assert count.sf(s - 2) > alpha_upper * (1 - 1e-9)


def test_quantile_interval_by_hand():
    got = quantile_interval(Binned.of_samples(np.arange(1.0, 101.0)), 0.5, **LEVELS)
    count = stats.binom(100, 0.5)
    assert got == Interval(50.0, count.ppf(0.01), count.isf(0.05) + 1, 100, "order statistics")


@given(values, ranks, st.integers(0, 5))
def test_bins_only_widen_quantiles(histogram_of, x, rank, scale):
    exact = quantile_interval(Binned.of_samples(x), rank, **LEVELS)
    bins = histogram_of(x, scale).binned()
    binned = quantile_interval(bins, rank, **LEVELS)
    assert binned.lower <= exact.lower <= exact.estimate <= exact.upper <= binned.upper
    assert exact.estimate == np.sort(x)[max(math.ceil(x.size * rank), 1) - 1]
    for edge, value in ((bins.lower, exact.lower), (bins.upper, exact.upper)):
        if math.isfinite(value):
            inside = (bins.lower <= value) & (value <= bins.upper)
            assert (binned.lower if edge is bins.lower else binned.upper) in edge[inside]


def test_upper_bound_needs_the_number_that_the_note_says():
    short = quantile_interval(Binned.of_samples(np.arange(5.0)), 0.99, **LEVELS)
    assert short.upper == math.inf
    needed = int(short.note.removeprefix("an upper bound needs at least ").removesuffix(" observations"))
    assert quantile_interval(Binned.of_samples(np.arange(needed - 1.0)), 0.99, **LEVELS).upper == math.inf
    enough = quantile_interval(Binned.of_samples(np.arange(float(needed))), 0.99, **LEVELS)
    assert (enough.upper, enough.note) == (needed - 1.0, "")


def test_a_quantile_in_an_open_bin_is_its_finite_edge():
    open_ended = Histogram.explicit((0.1, 1.0), np.array([1, 0, 999]), 5000.0).binned()
    got = quantile_interval(open_ended, 0.5, **LEVELS)
    assert (got.estimate, got.lower, got.upper) == (1.0, 1.0, math.inf)


@given(values, st.integers(0, 5), st.floats(-6, 6))
def test_bins_only_widen_fractions(histogram_of, x, scale, above):
    """Bins that the threshold may cut count against each side, and the note counts them."""
    exact = fraction_interval(Binned.of_samples(x), above, **LEVELS)
    bins = histogram_of(x, scale).binned()
    binned = fraction_interval(bins, above, **LEVELS)
    assert exact.estimate == pytest.approx((x > above).mean())
    assert binned.lower <= exact.lower + 1e-12
    assert binned.upper >= exact.upper - 1e-12
    opens = (bins.lower == above) & (above > bins.minimum) & (above > 0)
    cut = int(bins.count[(bins.lower <= above) & (above < bins.upper) & ~opens].sum())
    assert binned.note == (f"{cut} of them in the bin of the threshold {above:g}" if cut else "")


def test_a_threshold_on_an_edge_cuts_no_bin(histogram_of):
    """Positive buckets are open below, so what lies in the one that begins at the threshold lies above it."""
    x = np.array([0.1, 0.25, 0.2500001, 0.26, 3.0])
    found = fraction_interval(histogram_of(x, 4).binned(), 0.25, **LEVELS)
    assert found == fraction_interval(Binned.of_samples(x), 0.25, **LEVELS)
    assert found.estimate == 0.6
    edge = fraction_interval(histogram_of(x[1:], 4).binned(), 0.25, **LEVELS)
    assert edge.lower <= fraction_interval(Binned.of_samples(x[1:]), 0.25, **LEVELS).lower


def test_fractions_of_huge_samples_are_finite_and_sharp():
    n, k = 10**10, 10**6
    bins = Binned(np.array([0.0, 1.0]), np.array([0.0, 1.0]), np.array([n - k, k]), n, float(k), 0.0, 1.0)
    got = fraction_interval(bins, 0.5, alpha_lower=0.01, alpha_upper=0.01)
    half = stats.norm.isf(0.01) * math.sqrt(k) / n
    assert got.lower == pytest.approx(k / n - half, rel=1e-5)
    assert got.upper == pytest.approx(k / n + half, rel=1e-5)


def test_maximum_of_a_window_is_known_to_its_bucket(histogram_of):
    """Where a cumulative maximum did not move, the window's is between the edges of its last bucket."""
    old = histogram_of([1.0, 9.0])
    window = old.merged(histogram_of([3.0, 1.0])).since(old)
    got = maximum_interval(window.binned())
    assert got.lower == pytest.approx(2 ** (25 / 16))
    assert got.upper == got.estimate == pytest.approx(2 ** (26 / 16))
    old = histogram_of([0.0, 9.0])
    zeros = old.merged(histogram_of([0.0, 0.0])).sized(4, 0.5, 160).since(old.sized(4, 0.5, 160))
    assert maximum_interval(zeros.binned()).upper == 0.0, "the sum says that all of them are 0"


@given(st.integers(0, 400), st.integers(1, 400), st.sampled_from([(0.0, 1.0), (-2.0, 3.0)]))
def test_a_mean_of_two_values_is_a_rescaled_share_and_narrower_than_a_bet(ones, zeros, ends):
    """Clopper and Pearson's bounds on the line from low to high, inside those that allow for anything between."""
    low, high = ends
    coins = Binned.of_samples(np.repeat([low, high], [zeros, ones]))
    got = two_valued_mean_interval(coins, low=low, high=high, **LEVELS)
    exact = stats.beta.ppf(0.01, ones, zeros + 1) if ones else 0.0, stats.beta.ppf(0.95, ones + 1, zeros)
    assert (got.lower, got.upper) == pytest.approx([low + (high - low) * side for side in exact])
    assert got.estimate == pytest.approx((low * zeros + high * ones) / (zeros + ones))
    bet = mean_interval(coins, low=low, high=high, **LEVELS)
    assert got.upper - got.lower <= (bet.upper - bet.lower) * (1 + 1e-9)


def test_a_third_value_breaks_the_promise_of_two(histogram_of):
    """From a histogram the ends are recognised; what lies between leaves no bound, and the note says how many."""
    x = np.repeat([0.0, 1.0], [900, 100])
    plain, binned = (
        two_valued_mean_interval(sample, low=0.0, high=1.0, **LEVELS)
        for sample in (Binned.of_samples(x), histogram_of(x).binned())
    )
    assert (plain.lower, plain.upper) == (binned.lower, binned.upper)
    broken = two_valued_mean_interval(histogram_of(np.r_[x, 0.5]).binned(), low=0.0, high=1.0, **LEVELS)
    assert (broken.lower, broken.upper) == (-math.inf, math.inf)
    assert broken.estimate == pytest.approx(100.5 / 1001)
    assert broken.note == "1 observations are neither 0 nor 1: no bound is claimed"
    assert two_valued_mean_interval(Binned.of_samples(np.array([])), low=0.0, high=1.0, **LEVELS).samples == 0


def test_an_observation_at_the_threshold_is_not_above_it_because_its_bucket_begins_there(histogram_of):
    """A bucket that was drawn in to the smallest observation holds that one, so its lower edge is not open."""
    x = np.r_[np.full(99, 0.3), 0.301]
    bins = histogram_of(x).binned()
    assert (bins.lower.tolist(), bins.total) == ([0.3], 100)
    exact, binned = (fraction_interval(sample, 0.3, **LEVELS) for sample in (Binned.of_samples(x), bins))
    assert exact.estimate == 0.01
    assert binned.lower == 0.0
    assert binned.upper >= exact.upper


def test_no_observations_claim_nothing():
    empty = Binned.of_samples(np.array([]))
    for got in (
        mean_interval(empty, low=0.0, high=1.0, **LEVELS),
        quantile_interval(empty, 0.5, **LEVELS),
        fraction_interval(empty, 0.5, **LEVELS),
        maximum_interval(empty),
    ):
        assert math.isnan(got.estimate)
        assert (got.lower, got.upper, got.samples, got.note) == (-math.inf, math.inf, 0, "no observations")
