"""Which series there are, and that a place is given to the next one once a series is gone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kc_otel.judge.panes import PaneColumns
from kc_otel.judge.series import SeriesKey, grids
from kc_otel.judge.series_table import SeriesTable
from kc_otel.judge.window_rows import WindowRows

PAIR = ("a" * 12, "b" * 12)


@pytest.fixture
def known(contract: Any) -> SeriesTable:
    """An empty one, in which clauses are about one metric."""
    of = grids(contract())
    panes = PaneColumns(of, weighed=True)
    return SeriesTable(of, panes, [WindowRows(grid, panes, number) for number, grid in enumerate(of)], {"judged"})


def key(metric: str, slice: str = "all") -> SeriesKey:
    return SeriesKey(metric, slice, *PAIR)


def test_a_series_is_found_by_key_slice_and_metric_until_it_ends(known: SeriesTable) -> None:
    """One of two on a slice goes: the other is still found there; of a metric without any nothing is left."""
    first, second, third = key("judged"), key("judged", "code"), key("seen")
    made = {one: known.begin(one, empty=True) for one in (first, second, third)}
    assert known.by_key == made
    assert known.on("judged", "code") == {PAIR: made[second]}
    assert known.of("judged") == {first: made[first], second: made[second]}
    known.end([second, third])
    assert known.by_key == {first: made[first]}
    assert known.on("judged", "code") == {}
    assert known.metrics() == {"judged"}


def test_places_are_given_to_the_next(known: SeriesTable) -> None:
    """Numbers of all series, and rows of those that a clause is about, are used again; `other` has no row."""
    series = [known.begin(key("judged", str(number)), empty=True) for number in range(3)]
    seen, other = known.begin(key("seen"), empty=True), known.begin(key("judged", "other"), empty=True)
    assert ([one.number for one in series], [one.row for one in series]) == ([0, 1, 2], [0, 1, 2])
    assert (seen.number, seen.row, other.number, other.row) == (3, -1, 4, -1)
    known.end([key("judged", "1"), key("seen")])
    numbers = np.arange(5)
    assert known.keys(numbers) == [key("judged", "0"), None, key("judged", "2"), None, key("judged", "other")]
    assert known.living(numbers) == [key("judged", "0"), key("judged", "2"), key("judged", "other")]
    new = [known.begin(key("judged", name), empty=True) for name in ("x", "y")]
    assert {one.number for one in new} == {1, 3}
    assert sorted(one.row for one in new) == [1, 3]
    assert known.empty().number == -1
