"""Rows of windows say what merging their panes would say, whatever arrives when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from kc_otel.judge.histograms import ExplicitHistogram, Histogram
from kc_otel.judge.panes import PaneColumns, PaneGrid, PaneHistory
from kc_otel.judge.window_rows import WindowRows
from kc_otel.stats import Buckets, ExponentialHistogram
from kc_otel.stats.histogram_rows import rows_of

START = 1_800_000_000.0
PANES, WIDTH = 4, 30.0


def histogram(offset: int, counts: list[int], *, scale: int = 4, negative: bool = False) -> ExponentialHistogram:
    """Observations in some buckets, and two in the zero bucket."""
    side, none = Buckets(offset, np.array(counts, np.int64)), Buckets.empty()
    low, high = (-(2.0**20), 2.0**-20) if negative else (-(2.0**-20), 2.0**20)
    up, down = (none, side) if negative else (side, none)
    return ExponentialHistogram(scale, sum(counts) + 2, 0.1 * offset, 2, up, down, low, high, 2.0**-20)


histograms = st.builds(
    histogram,
    st.integers(-100, 100),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    scale=st.sampled_from([4, 4, 4, 4, 3]),
    negative=st.booleans(),
)
explicit = st.builds(ExplicitHistogram.of_count, st.integers(1, 5))
steps = st.lists(
    st.tuples(
        st.sampled_from([0.0, 5.0, 30.0, 31.0, 90.0, 200.0, 2000.0, -10.0, -40.0]),
        st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 160.0), histograms | explicit), max_size=4),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(steps)
@example([(200.0, [], True), (50.0, [(1, 132.0, histogram(5, [9, 3]))], True)])  # no evaluation for two panes
def test_rows_are_the_panes_put_together(taken: Any) -> None:
    """Late and odd ones, panes that leave, pauses, clocks that go back and on, and ticks that are left out."""
    grid = PaneGrid(WIDTH, PANES)
    panes = PaneColumns([grid])
    histories = [PaneHistory(grid, panes, 0, row) for row in range(3)]
    windows, now = WindowRows(grid, panes, 0), START
    for row, history in enumerate(histories):
        windows.begin(row, history, empty=True)
    for pause, arrived, ticks in taken:
        now += pause
        for row, age, part in arrived:
            if histories[row].make_way(part):
                windows.read_anew(row)
            if isinstance(part, ExplicitHistogram):
                histories[row].add(now - age, now, part)
                windows.read_anew(row)
            else:
                panes.count(row, now - age, now, part)
        if ticks:
            windows.move(now)
            compare(windows, histories, now)
    windows.move(now)
    compare(windows, histories, now)


def compare(windows: WindowRows, histories: list[PaneHistory], now: float) -> None:
    """Each row that follows says what its history does."""
    numbers = np.flatnonzero(windows.following(np.arange(len(histories))))
    found = windows.state().rows(numbers)
    whole = [[part for part in histories[number].parts(now) if is_usual(part)] for number in numbers.tolist()]
    assert [place for place, parts in enumerate(whole) if parts] == found.places.tolist()
    for at, place in enumerate(found.places.tolist()):
        (row,) = rows_of([whole[place]])
        assert found.total[at] == row.total[0]
        assert found.sum[at] == pytest.approx(row.sum[0], abs=1e-9)
        assert (found.minimum[at], found.maximum[at]) == (row.minimum[0], row.maximum[0])
        assert found.observed[at] == row.observed[0]
        used, same = found.count[at] > 0, row.count[0] > 0
        assert found.count[at][used].tolist() == row.count[0][same].tolist()
        assert found.lower[at][used].tolist() == row.lower[0][same].tolist()
        assert found.upper[at][used].tolist() == row.upper[0][same].tolist()


def is_usual(part: Histogram) -> bool:
    """Whether it can be in a row at all."""
    return isinstance(part, ExponentialHistogram)
