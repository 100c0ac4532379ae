"""Exponential histograms as values: merging, subtracting, coarsening, and the bins that bounds see."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.metrics._internal.exponential_histogram.mapping.logarithm_mapping import LogarithmMapping

from kc_otel.stats import Binned, Buckets, Histogram
from kc_otel.stats.histogram import MAX_BUCKETS

ordinary = st.one_of(
    st.just(0.0), st.floats(-1e3, 1e3), st.floats(1e-12, 1e-3), st.sampled_from([1.0, 0.5, -2.0, 2.0**-30])
)
samples = st.lists(ordinary, max_size=40).map(np.array)
some = st.lists(ordinary, min_size=1, max_size=40).map(np.array)
finite = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300)
scales = st.integers(-2, 6)


def content(h):
    """What two equal histograms share, apart from the rounding of the sum."""
    sides = [h.positive.trimmed(), h.negative.trimmed()]
    return (h.scale, h.count, h.zero_count, *((s.offset, tuple(s.counts.tolist())) for s in sides))


def assert_same(a, b):
    assert content(a) == content(b)
    assert a.sum == pytest.approx(b.sum, rel=1e-9, abs=1e-9)
    assert [a.minimum, a.maximum] == pytest.approx([b.minimum, b.maximum], rel=0, abs=0, nan_ok=True)


@given(samples, some, scales, scales)
def test_merging_is_the_histogram_of_both_samples(histogram_of, x, y, first, second):
    merged = histogram_of(x, first).merged(histogram_of(y, second))
    expected = histogram_of(np.concatenate([x, y]), min(first, second) if x.size else second)
    assert_same(merged, expected)
    assert merged.maximum_observed
    assert_same(Histogram.union([histogram_of(part, second) for part in (y, x, y)]), histogram_of([*y, *x, *y], second))


@given(some, scales, st.integers(0, 5))
def test_coarsening_is_the_histogram_at_that_scale(histogram_of, x, scale, by):
    assert_same(histogram_of(x, scale).downscaled(scale - by), histogram_of(x, scale - by))


@given(samples, samples)
def test_since_undoes_merging(histogram_of, x, y):
    earlier, later = histogram_of(x), histogram_of(y)
    delta = earlier.merged(later).since(earlier)
    assert delta is not None
    assert content(delta) == content(later)
    assert delta.sum == pytest.approx(later.sum, rel=1e-9, abs=1e-9)
    if y.size:
        assert delta.minimum <= y.min()
        assert delta.maximum >= y.max()
        if delta.maximum_observed:
            assert delta.maximum == y.max()
        bins = delta.binned()
        assert bins.lower[-1] <= y.max() <= bins.upper[-1]


def test_since_knows_when_the_largest_value_moved(histogram_of):
    """A cumulative maximum that did not move says only that nothing larger came."""
    old, new = histogram_of([2.0, 3.0, 5.0]), histogram_of([3.0])
    still = old.merged(new).since(old)
    assert (still.maximum_observed, still.maximum) == (False, pytest.approx(2 ** (26 / 16)))
    assert still.binned().lower[-1] < 3.0 < still.binned().upper[-1]
    moved = old.merged(histogram_of([9.0])).since(old)
    assert (moved.maximum_observed, moved.maximum) == (True, 9.0)
    again = still.merged(histogram_of([2.0]))
    assert not again.maximum_observed
    assert still.merged(histogram_of([4.0])).maximum_observed


@given(some, some)
def test_since_refuses_what_is_no_continuation(histogram_of, x, y):
    """A stream that lost observations was reset, and has no difference."""
    assume(x.size > y.size)
    assert histogram_of(y).since(histogram_of(x)) is None
    swapped = np.concatenate([y, np.full(x.size, 7e5)])
    if not (np.abs(x) > 6e5).any():
        assert histogram_of(swapped).since(histogram_of(np.append(x, -7e5))) is None


@given(some, st.integers(-4, 8))
def test_bins_contain_every_value(histogram_of, x, scale):
    """Bins ascend, hold all observations, and each observation lies within the bin of its rank."""
    bins = histogram_of(x, scale).binned()
    assert bins.total == bins.count.sum() == x.size
    assert (bins.count > 0).all()
    assert (np.diff(bins.lower) >= 0).all()
    assert (np.diff(bins.upper) >= 0).all()
    rank = np.searchsorted(np.cumsum(bins.count), np.arange(1, x.size + 1))
    ordered = np.sort(x)
    assert (bins.lower[rank] <= ordered).all()
    assert (ordered <= bins.upper[rank]).all()
    assert bins.lower[0] == bins.minimum == ordered[0]
    assert bins.upper[-1] == bins.maximum == ordered[-1]


@given(st.lists(finite, min_size=1, max_size=20).map(np.array), st.integers(-10, 4))
def test_huge_and_tiny_values_keep_their_place(histogram_of, x, scale):
    """From the smallest to the largest double nothing overflows, and values stay inside their bins."""
    with np.errstate(over="ignore"):
        h = histogram_of(x, scale, zero=0.0)
    bins = Histogram.union([h, h]).binned()
    assert bins.total == 2 * x.size
    assert bins.lower[0] <= x.min()
    assert bins.upper[-1] >= x.max()
    assert not np.isnan(bins.lower).any()
    assert not np.isnan(bins.upper).any()


def test_the_largest_double_has_a_bin():
    """The last bucket of the doubles ends at infinity, without a warning, when the maximum is not known."""
    top = Histogram(4, 1, 1.7e308, 0, Buckets(16383, np.array([1])), Buckets.empty())
    assert top.binned().upper[-1] == math.inf
    assert top.binned().lower[0] == pytest.approx(2.0 ** (1023 + 15 / 16))


@pytest.mark.parametrize("scale", [1, 4, 20])
def test_edges_agree_with_the_sdk(scale):
    """The OpenTelemetry SDK puts values into the buckets whose edges these are, up to the last digit."""
    mapping = LogarithmMapping(scale)
    values = [*np.exp(np.random.default_rng(scale).uniform(-20, 20, 300)).tolist(), 1.0, 2.0, 0.25, 1024.0]
    for value in values:
        index = mapping.map_to_index(value)
        binned = Histogram(scale, 1, value, 0, Buckets(index, np.array([1])), Buckets.empty()).binned()
        assert binned.lower[0] * (1 - 1e-14) <= value <= binned.upper[0] * (1 + 1e-14)


def test_far_apart_ranges_are_made_coarser_instead_of_large(histogram_of):
    """Merging two fine histograms of very different values stays within MAX_BUCKETS and loses no observation."""
    merged = histogram_of([1e-3], 20).merged(histogram_of([1e3, 1e3], 20))
    assert merged.positive.counts.size <= MAX_BUCKETS
    assert merged.scale < 20
    assert merged.positive.counts.sum() == 3
    assert_same(merged, histogram_of([1e-3, 1e3, 1e3], merged.scale))


@given(some, some, st.floats(0.0, 2.0))
def test_a_wider_zero_bucket_takes_what_it_reaches_into(histogram_of, x, y, zero):
    """Histograms with different zero buckets merge into bins that ascend and still hold every value."""
    merged = histogram_of(x).merged(histogram_of(y, zero=zero))
    both, bins = np.sort(np.concatenate([x, y])), merged.binned()
    assert merged.zero_threshold >= max(zero, 2.0**-30)
    assert merged.count == bins.count.sum() == both.size
    assert (bins.upper[:-1] <= bins.lower[1:] * (1 + 1e-12 * np.sign(bins.lower[1:]))).all()
    rank = np.searchsorted(np.cumsum(bins.count), np.arange(1, both.size + 1))
    assert (bins.lower[rank] <= both).all()
    assert (both <= bins.upper[rank]).all()


def test_a_zero_bucket_that_cuts_a_bucket_grows_to_its_outer_edge(histogram_of):
    """What cannot be told apart from zero any more is counted there, and the zero bucket says how wide it became."""
    merged = histogram_of([1.95, 1.99, 5.0]).merged(histogram_of([0.0], zero=1.93))
    assert (merged.zero_threshold, merged.zero_count) == (2.0, 3)
    assert merged.binned().upper[0] == 2.0


def test_scales_are_aligned_before_ranges_are_compared(histogram_of):
    """A fine histogram far from a coarse one costs no more resolution than the coarse one's scale."""
    assert histogram_of([1e3], 20).merged(histogram_of([1e-3], 4)).scale == 4


@given(some, some)
def test_unknown_extremes_become_bucket_edges_when_merged(histogram_of, x, y):
    """A sender that leaves out minimum and maximum does not make another sender's extremes true of both."""
    a, b = histogram_of(x), histogram_of(y)
    blind = Histogram(4, a.count, a.sum, a.zero_count, a.positive, a.negative, zero_threshold=2.0**-30)
    merged = blind.merged(b)
    assert merged.minimum <= min(x.min(), y.min())
    assert merged.maximum >= max(x.max(), y.max())
    if merged.maximum_observed:
        assert merged.maximum == y.max() >= x.max()


def test_empty_histograms_are_neutral(histogram_of):
    empty, full = Histogram.empty(2), histogram_of([1.0, -3.0, 0.0])
    assert full.merged(empty) is full
    assert empty.merged(full) is full
    assert full.since(empty) is full
    assert full.since(full).count == 0
    assert empty.binned().total == 0
    assert Histogram.union([]).count == 0
    assert Buckets.empty().plus(full.positive, -1).counts.sum() == -1


@settings(max_examples=50)
@given(some)
def test_samples_are_their_own_bins(x):
    """The exact view has one bin of no width per distinct value and an exact sum."""
    bins = Binned.of_samples(x.astype(np.float32))
    assert (bins.lower == bins.upper).all()
    assert bins.total == bins.count.sum() == x.size
    assert bins.sum == pytest.approx(float(x.astype(np.float32).sum(dtype=np.float64)))
    np.testing.assert_array_equal(np.repeat(bins.lower, bins.count), np.sort(x.astype(np.float32)))


def test_explicit_buckets_are_clipped_to_the_extremes():
    """An explicit-bucket histogram has open ends, which minimum and maximum close where they are known."""
    known = Histogram.explicit((0.1, 1.0), np.array([2, 0, 3]), 9.0, 0.05, 4.0).binned()
    np.testing.assert_array_equal(known.lower, [0.05, 1.0])
    np.testing.assert_array_equal(known.upper, [0.1, 4.0])
    unknown = Histogram.explicit((0.1, 1.0), np.array([2, 1, 3]), 9.0).binned()
    np.testing.assert_array_equal(unknown.lower, [-math.inf, 0.1, 1.0])
    np.testing.assert_array_equal(unknown.upper, [0.1, 1.0, math.inf])


def test_the_extremes_of_a_union_are_bounded_by_each_parts_own_buckets(histogram_of):
    """Aligning a part to a coarser scale widens its buckets, and not what is known of its extremes."""
    fine = replace(histogram_of(np.array([-1.1, 1.1]), 4), minimum=math.nan, maximum=math.nan)
    together = Histogram.union([fine, histogram_of(np.array([0.5]), 0)])
    assert (together.minimum, together.maximum) == (fine.binned().lower[0], fine.binned().upper[-1])
