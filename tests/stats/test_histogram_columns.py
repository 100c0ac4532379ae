"""Histograms in columns say what they say by themselves, also when they are merged."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel import machine_code
from kc_otel.stats import Buckets, ExponentialHistogram
from kc_otel.stats.histogram_columns import HistogramColumns, SideColumns, merged

sides = st.builds(
    lambda offset, counts: Buckets(offset, np.array(counts, np.int64)).trimmed(),
    st.integers(-3000, 3000),
    st.lists(st.sampled_from([0, 1, 2, 300, 70_000, 2**40]), max_size=5),
)


def histogram(scale, zeros, up, down, extremes):
    count = zeros + 1 + int(up.counts.sum() + down.counts.sum())
    low, high, observed = extremes
    return ExponentialHistogram(scale, count, 0.5 * count, zeros + 1, up, down, low, high, 2.0**-20, observed)


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
        assert said(union) == said(ExponentialHistogram.union([part for of, part in given if of == row]))


@pytest.mark.parametrize("wide", [[0], [1], [2], [0, 1], [1, 2], [0, 1, 2], []])
def test_a_union_that_is_too_wide_is_made_beside_the_others(wide):
    """Each of three rows has two parts; in some they are farther apart than a histogram has buckets."""
    low, far = (histogram(4, 0, Buckets(at, np.array([3])), Buckets.empty(), (-1.0, 2.0, True)) for at in (-2500, 2500))
    given = [(row, part) for row in range(3) for part in (low, far if row in wide else low)]
    rows, columns = merged(np.array([row for row, _ in given]), HistogramColumns.of([part for _, part in given]))
    assert rows.tolist() == [0, 1, 2]
    unions = [ExponentialHistogram.union([part for of, part in given if of == row]) for row in range(3)]
    assert [said(whole) for whole in columns.objects()] == [said(whole) for whole in unions]


def test_counts_take_as_few_bytes_as_they_need():
    widths = [SideColumns.of([Buckets(0, np.array([most]))]).counts.itemsize for most in (255, 256, 70_000, 2**40)]
    assert widths == [1, 2, 4, 8]


@given(
    st.lists(st.tuples(st.integers(-40, 40), st.lists(st.integers(0, 2**50), max_size=6)), min_size=1, max_size=8),
    st.integers(0, 3),
    st.sampled_from([1, -1]),
    st.sampled_from([1, -1]),
    st.data(),
)
def test_machine_code_moves_buckets_as_numpy_does(sides, shift, step, times, data):
    """Parts that are taken, cut and added up, in every width of counts, with the library and without."""
    counts = [np.array(said, np.int64) >> 16 * shift for _, said in sides]
    columns = SideColumns.of([Buckets(offset, numbers) for (offset, _), numbers in zip(sides, counts, strict=True)])
    which = np.array(data.draw(st.lists(st.integers(0, len(sides) - 1), max_size=9)), np.int64)
    begins = np.array(data.draw(st.lists(st.integers(8, 40), min_size=len(sides), max_size=len(sides))), np.int64)
    found = []
    for code in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not code:
                patch.setattr(machine_code, "is_available", lambda: False)
            totals = [np.zeros(60), np.zeros(60, np.int64)]
            for total in totals:
                columns.add_to(total, begins, step=step, times=times)
            taken = columns.taken(which)
            up = columns.added_up(np.arange(len(sides)) // 2, len(sides))
            found.append([*totals, *((side.offset, side.size, side.counts) for side in (taken, up))])
    for value, other in zip(*found, strict=True):
        np.testing.assert_equal(value, other)


@pytest.mark.skipif(not machine_code.is_available(), reason="needs a C compiler")
def test_a_bucket_outside_is_written_nowhere():
    """Whoever says a wrong place gets the error that NumPy would raise, before anything beyond is touched."""
    columns = SideColumns.of([Buckets(0, np.array([1, 2, 3])), Buckets(0, np.array([4]))])
    for begins, step in (([0, 5], 1), ([3, 0], 1), ([1, 0], -1), ([-1, 0], 1), ([0, 2**62], 1)):
        with pytest.raises(IndexError, match="outside of 5"):
            columns.add_to(np.zeros(5), np.array(begins), step=step)
    with pytest.raises(IndexError, match="outside of 4"):
        SideColumns(columns.offset, np.array([3, 2]), columns.counts).taken(np.array([1]))
