"""Rolling windows hold exactly what was observed in them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kc_otel.judge.series import PaneColumns, PaneGrid
from kc_otel.stats import Buckets, Histogram

WIDTH, SIZE = 30.0, 10
NOW = 1_800_000_000.0


class Panes:
    def __init__(self) -> None:
        self.grid = PaneGrid(WIDTH, SIZE)
        self.columns = PaneColumns([self.grid])

    def add(self, time: float, now: float, part: Histogram) -> None:
        for row in (2, 1, 0):
            self.columns.count(row, min(time, now), now, part)

    def count(self, now: float) -> int:
        return self.columns.binned(0, 1, now).total


def of(exponents: list[int]) -> Histogram:
    counts = np.bincount(exponents).astype(np.int64)
    values = [2.0**e for e in exponents]
    return Histogram(0, len(values), sum(values), 0, Buckets(-1, counts), Buckets.empty(), min(values), max(values))


@pytest.mark.parametrize("explicit", [False, True])
def test_a_clock_that_goes_back_loses_nothing(explicit: bool) -> None:
    """What was counted at times that are the future again counts as of now, once, and ages from there."""
    history = Panes()
    for age, value in ((0, 1), (95, 2), (130, 3)):
        history.add(NOW + age, NOW + age, Histogram.explicit((), np.array([1]), 0.0) if explicit else of([value]))
    assert history.count(NOW + 130) == 3
    head = history.grid.index(NOW + 5)
    history.columns.changed.clear()
    history.columns.turn_back(NOW + 5)
    assert {pane for _, pane in history.columns.changed} == {head, head + 3, head + 4}
    assert [history.count(NOW + age) for age in (5, 130, 299, 300)] == [3, 3, 3, 0]
    history.columns.changed.clear()
    history.columns.turn_back(NOW + 5)
    assert not history.columns.changed


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 900), st.integers(0, 60), st.lists(st.integers(0, 9), min_size=1, max_size=3)),
        min_size=1,
        max_size=25,
    ),
    st.lists(st.integers(0, 1000), max_size=6),
)
def test_window_equals_a_direct_histogram(events: list[tuple[int, int, list[int]]], reads: list[int]) -> None:
    history = Panes()
    arrivals = sorted((time + delay, time, values) for time, delay, values in events)
    clock = sorted({*reads, 1000, *(arrival for arrival, _, _ in arrivals)})
    for now in clock:
        for arrival, time, values in arrivals:
            if arrival == now:
                history.add(NOW + time, NOW + now, of(values))
        head = history.grid.index(NOW + now)
        inside = [
            value
            for arrival, time, values in arrivals
            if arrival <= now and head - SIZE < history.grid.index(NOW + time) <= head
            for value in values
        ]
        if now in reads or now == 1000:
            bins = history.columns.binned(0, 1, NOW + now)
            assert bins.total == len(inside) == history.count(NOW + now)
            if inside:
                assert bins.sum == sum(2.0**value for value in inside)
                assert bins.upper.tolist() == sorted({2.0**value for value in inside})
                assert bins.count.tolist() == np.unique(inside, return_counts=True)[1].tolist()
                assert (bins.minimum, bins.maximum) == (2.0 ** min(inside), 2.0 ** max(inside))
