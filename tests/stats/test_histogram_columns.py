"""Histograms in columns say what they say by themselves, also when they are merged."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.stats import Buckets, Histogram
from kc_otel.stats.histogram_columns import HistogramColumns, SideColumns, merged

sides = st.builds(
    lambda offset, counts: Buckets(offset, np.array(counts, np.int64)).trimmed(),
    st.integers(-3000, 3000),
    st.lists(st.sampled_from([0, 1, 2, 300, 70_000, 2**40]), max_size=5),
)


def histogram(scale, zeros, up, down, extremes):
    count = zeros + 1 + int(up.counts.sum() + down.counts.sum())
    low, high, observed = extremes
    return Histogram(scale, count, 0.5 * count, zeros + 1, up, down, low, high, 2.0**-20, observed)


histograms = st.builds(
    histogram,
    st.sampled_from([4, 4, 4, 3]),
    st.integers(0, 9),
    sides,
    sides,
    st.sampled_from([(-1.0, 2.0, True), (-1.0, 2.0, False), (-3.0, 1.0, True), (math.nan, math.nan, True)]),
)


def said(part):
    buckets = [(side.trimmed().offset, side.trimmed().counts.tolist()) for side in (part.positive, part.negative)]
    numbers = (part.scale, part.count, part.zero_count, part.zero_threshold, part.maximum_observed)
    return numbers, buckets, repr((part.minimum, part.maximum)), pytest.approx(part.sum)


@given(st.lists(histograms, max_size=8))
def test_columns_hold_what_they_are_made_of(parts):
    """Each by itself, some of them, and those of two columns after each other."""
    columns = HistogramColumns.of(parts)
    assert [said(part) for part in columns.objects()] == [said(part) for part in parts]
    back = np.arange(len(parts))[::-1]
    twice = HistogramColumns.joined([columns, columns.taken(back)])
    assert [said(part) for part in twice.objects()] == [said(part) for part in [*parts, *parts[::-1]]]


@given(st.lists(st.tuples(st.integers(0, 3), histograms), max_size=10))
def test_merged_columns_are_unions(given):
    """Of one scale or several, of known and of unknown extremes, and so far apart that buckets have to be coarser."""
    rows, columns = merged(
        np.array([row for row, _ in given], np.int64), HistogramColumns.of([part for _, part in given])
    )
    assert rows.tolist() == sorted({row for row, _ in given})
    for row, union in zip(rows.tolist(), columns.objects(), strict=True):
        assert said(union) == said(Histogram.union([part for of, part in given if of == row]))


@pytest.mark.parametrize("wide", [[0], [1], [2], [0, 1], [1, 2], [0, 1, 2], []])
def test_a_union_that_is_too_wide_is_made_beside_the_others(wide):
    """Each of three rows has two parts; in some they are farther apart than a histogram has buckets."""
    low, far = (histogram(4, 0, Buckets(at, np.array([3])), Buckets.empty(), (-1.0, 2.0, True)) for at in (-2500, 2500))
    given = [(row, part) for row in range(3) for part in (low, far if row in wide else low)]
    rows, columns = merged(np.array([row for row, _ in given]), HistogramColumns.of([part for _, part in given]))
    assert rows.tolist() == [0, 1, 2]
    unions = [Histogram.union([part for of, part in given if of == row]) for row in range(3)]
    assert [said(whole) for whole in columns.objects()] == [said(whole) for whole in unions]


def test_counts_take_as_few_bytes_as_they_need():
    widths = [SideColumns.of([Buckets(0, np.array([most]))]).counts.itemsize for most in (255, 256, 70_000, 2**40)]
    assert widths == [1, 2, 4, 8]
