"""Streams: what becomes of points that come twice, late, in the wrong order, after a reset or a gap."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kc_otel.judge.point_streams import MAX_WRITERS, REMEMBERED_TIMES, Horizon, PointStream
from kc_otel.judge.points import Point, origin_of
from kc_otel.stats import Buckets, Histogram

S = 10**9
LONG = 3600 * S
NOW = 10_000 * S
ORIGIN = origin_of(b"", b"")
HORIZON = Horizon(future=NOW, start=NOW - LONG, oldest=NOW - LONG - 60 * S, gap=300 * S)


def histogram(values: list[int]) -> Histogram:
    """Values 1, 2, 4, ... by exponent, one bucket each."""
    counts = np.bincount(values, minlength=1).astype(np.int64)
    total = float(sum(2.0**v for v in values))
    low, high = (2.0 ** min(values), 2.0 ** max(values)) if values else (math.nan, math.nan)
    return Histogram(0, len(values), total, 0, Buckets(-1, counts), Buckets.empty(), low, high)


def point(start: int, time: int, values: list[int], *, cumulative: bool = True, sum: float | None = None) -> Point:
    """Of these values, or with another sum."""
    value = histogram(values)
    value = value if sum is None else replace(value, sum=sum)
    return Point("m", ORIGIN, b"id", b"", {}, start, time, cumulative, value)


def explicit(edges: tuple[float, ...], time: int, counts: list[int]) -> Point:
    value = Histogram.explicit(edges, np.array(counts, dtype=np.int64), float(np.sum(counts)))
    return replace(point(NOW - 90, time, []), histogram=value)


def content(step_increments: list[Histogram]) -> Counter[int]:
    found: Counter[int] = Counter()
    for item in step_increments:
        for place, count in enumerate(item.positive.counts):
            found[item.positive.offset + place + 1] += int(count)
    return +found


def outcomes(stream: PointStream, *points: Point) -> list[tuple[str, str, int]]:
    steps = [stream.accept(item, HORIZON) for item in points]
    return [(step.outcome, step.event, step.increment.count if step.increment else 0) for step in steps]


OLD, START, BEGIN, DONE = NOW - 3 * LONG, NOW - LONG, NOW - 3000 * S, ("accepted", "", 1)
OUTCOMES = {
    "counts from the beginning where that is in the long window": (
        [point(NOW - LONG, NOW, [1, 1, 2])],
        [("accepted", "", 3)],
    ),
    "an older stream counts from its second point on": (
        [point(NOW - LONG - 1, NOW - 9, [1, 1]), point(NOW - LONG - 1, NOW, [1, 1, 2])],
        [("baseline", "", 0), DONE],
    ),
    "an unknown start says nothing of when it began": ([point(0, NOW, [1])], [("baseline", "", 0)]),
    "the same time again and an earlier time do not count": (
        [point(NOW - 100, NOW - age, values) for age, values in ((50, [1]), (50, [1]), (60, []), (40, [1, 2]))],
        [DONE, ("duplicate", "", 0), ("out_of_order", "", 0), DONE],
    ),
    "after a restart the new value counts from the new start": (
        [point(NOW - 90, NOW - 50, [1, 1, 1]), point(NOW - 40, NOW - 30, [2])],
        [("accepted", "", 3), ("accepted", "reset", 1)],
    ),
    "a value that went down under the same start is a reset": (
        [point(NOW - 90, NOW - 50, [1, 1, 1]), point(NOW - 90, NOW - 30, [1])],
        [("accepted", "", 3), ("accepted", "reset", 1)],
    ),
    "the last flush of a process counts after its successor began": (
        [point(NOW - 90, NOW - 50, [1]), point(NOW - 40, NOW - 30, [2]), point(NOW - 90, NOW - 35, [1, 1, 1])],
        [DONE, ("accepted", "reset", 1), ("accepted", "", 2)],
    ),
    "a step longer than the short window counts and is told": (
        [point(NOW - 1000 * S, NOW - 900 * S, [1]), point(NOW - 1000 * S, NOW, [1, 2, 2])],
        [DONE, ("accepted", "gap", 2)],
    ),
    "what was counted over a silence that no window covers is not counted": (
        [point(OLD, NOW - 2 * LONG, [1]), point(OLD, NOW, [1, 2, 2])],
        [("late", "", 0), ("baseline", "", 0)],
    ),
    "what no pane covers does not count": (
        [point(NOW - LONG - 100 * S, NOW + 1, [1]), point(NOW - LONG - 100 * S, NOW - LONG - 90 * S, [1])],
        [("future", "", 0), ("late", "", 0)],
    ),
    "more writers than are remembered lose counts, and none counts again from its start": (
        [
            *(point(NOW - 1000 + number, NOW - 500, [1, 1]) for number in range(MAX_WRITERS + 1)),
            point(NOW - 1000, NOW - 400, [1, 1, 1]),
        ],
        [("accepted", "", 2), *[("accepted", "reset", 2)] * MAX_WRITERS, ("baseline", "reset", 0)],
    ),
    "with other edges counting begins anew": (
        [explicit((1.0,), NOW - 50, [1, 2]), explicit((2.0,), NOW - 40, [5, 2]), explicit((2.0,), NOW - 30, [6, 2])],
        [("accepted", "", 3), ("baseline", "", 0), DONE],
    ),
    "a value that contradicts the one before, ten of 2.0 with less than nine of them, waits for the next": (
        [point(START, NOW - 9, [1] * 9), point(START, NOW - 5, [1] * 10, sum=12.0), point(START, NOW, [1] * 11)],
        [("accepted", "", 9), ("contradictory", "", 0), ("accepted", "", 2)],
    ),
    "which says that the one before was wrong": (
        [point(START, NOW - 9, [1] * 9, sum=35.0), *(point(START, NOW - 5 + n, [1] * (10 + 4 * n)) for n in range(3))],
        [("accepted", "", 9), ("contradictory", "", 0), *[("accepted", "", 4)] * 2],
    ),
    "points that are no later than the last, but hold what that does not, are another writer's and no duplicates": (
        [
            *[point(0, NOW - 5 * S, [1] * 9), point(0, NOW - 5 * S, [2] * 4)] * 2,
            *(point(0, NOW - 4 * S, [1] * 10), point(0, NOW - 4 * S, [2] * 5)),
        ],
        [("baseline", "", 0), ("two_writers", "", 0), *[("duplicate", "", 0)] * 2, *[("two_writers", "", 1)] * 2],
    ),
    "a process that begins again under its old start time is no second writer once the one before is silent": (
        [
            point(BEGIN, BEGIN + 10 * S, [1] * 40),
            *(point(BEGIN, BEGIN + (20 + 60 * turn) * S, [1] * (5 + 6 * turn)) for turn in range(20)),
        ],
        [("accepted", "", 40), ("accepted", "reset", 5), *[("accepted", "", 6)] * 19],
    ),
}


@pytest.mark.parametrize("case", OUTCOMES)
def test_each_point_of_a_cumulative_stream_has_its_outcome(case: str) -> None:
    points, expected = OUTCOMES[case]
    assert outcomes(PointStream(), *points) == expected


def test_delta_points_count_once() -> None:
    stream = PointStream()
    times = [NOW - 30, NOW - 10, NOW - 20]
    points = [point(time - 10, time, [1, 2], cumulative=False) for time in times]
    assert [outcome for outcome, _, _ in outcomes(stream, *points, *points)] == ["accepted"] * 3 + ["duplicate"] * 3
    many = [point(NOW - 9, NOW - 9 + i, [1], cumulative=False) for i in range(9)]
    many += [point(0, NOW - 5000 + i, [1], cumulative=False) for i in range(32)]
    assert {outcome for outcome, _, _ in outcomes(PointStream(), *many)} == {"accepted"}
    full = PointStream(times=list(range(NOW - REMEMBERED_TIMES, NOW)))
    assert outcomes(full, point(0, NOW - REMEMBERED_TIMES - 9, [1], cumulative=False)) == [("unordered", "", 0)]
    assert outcomes(full, point(0, NOW, [1], cumulative=False)) == [("accepted", "", 1)]
    assert len(full.times) == REMEMBERED_TIMES


def test_deltas_replayed_newest_first_all_count() -> None:
    """A long window of ten-second deltas counts in the worst order there is, and once."""
    stream = PointStream()
    points = [point(time - 10 * S, time, [1], cumulative=False) for time in range(NOW, NOW - LONG, -10 * S)]
    assert {outcome for outcome, _, _ in outcomes(stream, *points)} == {"accepted"}
    assert {outcome for outcome, _, _ in outcomes(stream, *points)} == {"duplicate"}


@pytest.mark.parametrize("cumulative", [True, False])
def test_after_clocks_went_forward_and_back_a_stream_goes_on(cumulative: bool) -> None:
    """Values with times that turned out to be wrong do not make those that follow old."""
    year = 365 * 24 * 3600 * S
    stream = PointStream()
    begin = NOW - 300 * S
    values = [1] if cumulative else []
    for i in range(40):
        then = HORIZON.future + year
        ahead = Horizon(then, then - 2 * year, then - 2 * year, year)
        stream.accept(point(begin, NOW + year - 40 + i, [1], cumulative=cumulative), ahead)
    after = [point(begin, NOW - 20 * S + i, [*values, 2], cumulative=cumulative) for i in range(3)]
    counted = [count for _, _, count in outcomes(stream, *after)]
    assert counted == ([1, 0, 0] if cumulative else [1, 1, 1])
    assert [outcome for outcome, _, _ in outcomes(stream, *after)][-1] == "duplicate"


def test_a_smaller_value_after_clocks_went_back_is_where_counting_begins() -> None:
    """What was dated by a wrong clock cannot be told from a reset, and must not count twice."""
    stream = PointStream()
    stream.accept(point(NOW - 90, NOW + 90 * S, [1, 1, 1]), replace(HORIZON, future=NOW + 100 * S))
    assert outcomes(stream, point(NOW - 90, NOW - 5, [1, 1]), point(NOW - 90, NOW, [1, 1, 2])) == [
        ("baseline", "", 0),
        ("accepted", "", 1),
    ]


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[tuple[int, int, list[int]]], list[int]]:
    """Snapshots (start, time, values so far) of up to three process lives, and an order of arrival with repeats."""
    snapshots, time = [], NOW - 1000 * S
    for _ in range(draw(st.integers(1, 3))):
        start, values = time, []
        for _ in range(draw(st.integers(1, 5))):
            time += draw(st.integers(1, 20)) * S
            values = values + draw(st.lists(st.integers(0, 6), max_size=4))
            snapshots.append((start, time, values))
        time += draw(st.integers(0, 5)) * S
    order = draw(st.lists(st.integers(0, len(snapshots) - 1), max_size=30))
    return snapshots, order


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(histories())
def test_any_arrival_order_counts_the_latest_snapshot_of_every_life(
    history: tuple[list[tuple[int, int, list[int]]], list[int]],
) -> None:
    """However points are lost, repeated and reordered, what is counted is each life's latest snapshot that arrived."""
    snapshots, order = history
    stream = PointStream()
    counted = []
    for place in order:
        start, time, values = snapshots[place]
        step = stream.accept(point(start, time, values), HORIZON)
        if step.increment is not None:
            assert step.outcome == "accepted"
            counted.append(step.increment)
    latest: dict[int, tuple[int, list[int]]] = {}
    for place in order:
        start, time, values = snapshots[place]
        latest[start] = max(latest.get(start, (0, [])), (time, values))
    expected = Counter(value for _, values in latest.values() for value in values)
    assert content(counted) == expected
    assert math.isclose(sum(item.sum for item in counted), sum(2.0**v * n for v, n in expected.items()))


@pytest.mark.parametrize("start", [0, NOW - 900 * S])
def test_two_writers_of_one_start_time_are_told_and_count_once(start: int) -> None:
    """Two senders without start times under one identity: nothing counts twice, and each going back is told."""
    stream, counted, said = PointStream(), 0, []
    for turn in range(1, 9):
        for sender, size in enumerate((30, 10)):
            time = NOW - 200 * S + (2 * turn + sender) * S
            step = stream.accept(point(start, time, [1] * (size * turn)), HORIZON)
            counted += step.increment.count if step.increment else 0
            said.append(step.outcome)
    assert counted == 8 * 40 - (0 if start else 30)
    assert said[1:] == ["accepted", *["accepted", "two_writers"] * 7]


def test_many_writers_of_one_start_time_are_told_and_do_not_pile_up() -> None:
    """More of them than are remembered count too little, never each whole value again."""
    stream, counted, said = PointStream(), 0, Counter()
    for turn in range(1, 6):
        for sender in range(8):
            step = stream.accept(point(0, NOW - 200 * S + (8 * turn + sender) * S, [sender] * (10 * turn)), HORIZON)
            counted += step.increment.count if step.increment else 0
            said[step.outcome] += 1
    assert counted <= 5 * 80
    assert said["two_writers"] >= 30
