"""Charts: what is drawn where, and that nothing a kernel reports makes a drawing that cannot be read."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kc_otel.charts.axes import linear_axis, log_axis, time_axis
from kc_otel.charts.depth_chart import draw_depth
from kc_otel.charts.distribution_chart import draw_distribution
from kc_otel.charts.history_chart import Marker, draw_evidence, draw_history, draw_sparkline, markers_of

PAST = [
    [10.0, 0.01, 0.005, 0.015, 0.02, 9, 0, 0.0], [20.0, None, None, None, 0.02, 0, 2, None],
    [40.0, 0.1, 0.08, None, 0.02, 99, 3, 1.0], [90.0, 0.1, 0.08, 0.12, 0.02, 99, 3, 0.557],
]  # fmt: skip
SEEN = {
    "metric": "log_ratio", "unit": "nats", "window": 60.0, "edges": [0.01, 0.1, 1.0], "above": [3, 5], "below": [1, 0],
    "zero": 1, "total": 10, "mean": 0.1, "minimum": -0.02, "maximum": 0.9,
    "marks": [{"value": 0.02, "text": "limit of the mean <0.02>"}],
}  # fmt: skip


def paths(svg, kind):
    found = [node.get("d", "") for node in ET.fromstring(svg).iter() if node.get("class") == kind]
    return [[(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", d)] for d in found]


def texts(svg):
    return [node.text or "" for node in ET.fromstring(svg).iter() if node.tag.endswith("}text")]


def test_a_gap_in_the_past_is_a_gap_in_the_drawing():
    chart = draw_history("x", PAST)
    assert [len(line) for line in paths(chart.svg, "c-line")] == [1, 2]
    assert [len(line) for line in paths(chart.svg, "c-over")] == [2]
    broken = draw_history("x", PAST, step=10.0)
    assert [len(line) for line in paths(broken.svg, "c-line")] == [1, 1, 1]


def test_how_long_it_failed_is_told_in_time_not_in_points():
    """Points are thinned where they are old, so that their number says nothing."""
    assert draw_history("x", PAST).text.endswith(" FAIL for 50 s of it, first at 1970-01-01 00:00:40 UTC.")
    assert draw_history("x", PAST, step=10.0).text.endswith(" FAIL at 1970-01-01 00:01:30 UTC.")
    assert draw_history("x", PAST[:2]).text.endswith(" Never FAIL in that time.")
    ended = [*PAST, [95.0, *PAST[0][1:]]]
    assert " FAIL for 55 s of it" in draw_history("x", ended).text


def test_the_past_over_steps():
    """Points lie at their step, events between those before and after; points without one are left out."""
    past = [[*point, step] for point, step in zip(PAST, (100, None, 160, 200), strict=True)]
    chart = draw_history("x", past, over="step", markers=[Marker(65.0, "◆", "routed")])
    assert [place for place, _ in chart.rows] == [0.0, 600.0, 1000.0]
    assert [row[-1] for _, row in chart.rows] == ["100", "160", "200"]
    assert chart.columns[-1] == "Step"
    assert chart.marks == ((800.0, "routed"),)
    assert {"100", "160", "200"} <= set(texts(chart.svg))
    assert draw_history("x", PAST, over="step") is None
    assert "Step" not in draw_history("x", PAST).columns
    assert [row[-1] for _, row in draw_history("x", past).rows] == ["100", "-", "160", "200"]


def test_a_bound_that_is_not_there_reaches_to_the_end_of_the_plot():
    """Not bounded above: the band has no upper edge of its own."""
    (_, band) = paths(draw_history("x", PAST).svg, "c-band")
    assert band[0][1] == 0.0 < band[1][1]


def test_the_limit_is_where_the_axis_says():
    points = [
        [at, 0.5, 0.4, 0.6, limit, 5, code, None]
        for at, limit, code in ((0.0, 1.0, 0), (50.0, 0.25, 3), (100.0, 0.25, 3))
    ]
    chart = draw_history("x", points)
    (limit,) = paths(chart.svg, "c-limit")
    assert [x for x, _ in limit] == [0.0, 500.0, 500.0, 1000.0]
    (line,) = paths(chart.svg, "c-line")
    assert limit[0][1] < line[0][1] < limit[-1][1]


def test_the_limit_is_written_where_the_estimate_is_not():
    for estimate, side in ((0.022, 1), (0.018, -1)):
        chart = draw_history("x", [[at, estimate, estimate, estimate, 0.02, 5, 3, 1.0] for at in (0.0, 10.0)])
        line = paths(chart.svg, "c-limit")[0][0][1]
        (node,) = (element for element in ET.fromstring(chart.svg).iter() if element.get("class") == "c-limit-text")
        assert (float(node.get("y")) - 20 - line) * side > 0


def test_a_breach_by_orders_of_magnitude_keeps_its_limit_in_sight():
    """A logarithmic axis where a linear one would press either of the two to its end."""
    for estimate in (1e-6, 50.0):
        chart = draw_history("x", [[at, estimate, estimate / 2, 2 * estimate, 0.02, 5, 0, 0.0] for at in (0.0, 10.0)])
        (limit,), (line,) = paths(chart.svg, "c-limit"), paths(chart.svg, "c-line")
        assert abs(limit[0][1] - line[0][1]) > 20
        assert all(10 < y < 190 for _, y in (limit[0], line[0]))
        assert "logarithmic" in texts(chart.svg)


def test_what_happened_is_marked_once_where_signs_would_cover_each_other():
    events = [
        {"at": at, "kind": kind, "contract": "policy", "message": f"policy: {kind} {at:g}", "data": data}
        for at, kind, data in (
            (40.0, "firing", {"clause": "tv", "slice": "code"}),
            (40.2, "acknowledged", {"by": "ada", "slice": "code"}),
            (60.0, "firing", {"clause": "tv", "slice": "prose"}),
            (70.0, "silenced", {"by": "ada", "slice": "prose"}),
            (80.0, "promotion", {}),
            (95.0, "resolved", {"clause": "tv", "slice": "code"}),
        )
    ]
    found = markers_of(events, "policy", "tv", "code")
    assert [(mark.at, mark.sign) for mark in found] == [(40.0, "▲"), (40.2, "☞"), (80.0, "→"), (95.0, "▽")]
    assert markers_of(events, "other", "tv", "code") == ()
    assert [text for _, text in draw_history("x", PAST, markers=found).marks] == [
        "firing: firing 40; acknowledged: acknowledged 40.2", "promotion: promotion 80",
    ]  # fmt: skip


def test_every_value_is_also_text():
    chart = draw_history("x", PAST, unit="nats")
    assert [row[1][1] for row in chart.rows] == ["✓ PASS", "○ NO_DATA", "✕ FAIL", "✕ FAIL"]
    assert chart.rows[2][1] == ("1970-01-01 00:00:40 UTC", "✕ FAIL", "0.1", "0.08 to unbounded", "0.02", "99")
    assert [row[0] for row in chart.rows] == [0.0, 125.0, 375.0, 1000.0]
    assert {"✓", "○", "✕", "nats", "limit 0.02"} <= set(texts(chart.svg))
    seen = draw_distribution("x", SEEN, "code", whole=SEEN)
    assert [row[1] for row in seen.rows] == [("0.01 to 0.1", "3 (30 %)", "1 (10 %)"), ("0.1 to 1", "5 (50 %)", "0")]
    assert "size of log_ratio, nats" in texts(seen.svg)
    assert "limit of the mean <0.02>" in texts(seen.svg)


def test_other_kernel_versions_are_drawn_dotted():
    chart = draw_history("x", PAST, others={"old": PAST[:1], "silent": [[5.0, None, None, None, 0.02, 0, 2, None]]})
    assert len(paths(chart.svg, "c-other")) == 1
    assert [text for _, text in chart.key][-1] == "kernel old"
    assert "1 other kernel version on the same slice" in chart.text
    assert [text for _, text in draw_history("x", PAST[2:], kernel="new", others={"old": PAST[:2]}).marks] == [
        "kernel new is judged first"
    ]


def test_a_sparkline_has_the_curves_and_no_texts():
    glance = draw_sparkline("x", PAST[2:], others=[PAST[:2]])
    assert texts(glance.svg) == []
    assert [len(paths(glance.svg, kind)) for kind in ("c-line", "c-over", "c-other", "c-limit")] == [1, 1, 1, 1]
    assert all(0 <= y <= 48 for _, y in paths(glance.svg, "c-over")[0])
    assert draw_sparkline("x", [], others=[PAST]) is None


def test_what_happened_stands_in_a_sparkline_and_is_read_out():
    inside, outside = Marker(PAST[3][0], "▲", "firing: routed"), Marker(PAST[-1][0] + 99, "▽", "resolved: late")
    glance = draw_sparkline("x", PAST, markers=[inside, outside])
    assert texts(glance.svg) == ["▲"]
    assert "firing: routed" in glance.text
    assert "late" not in glance.text
    (line,) = [element for element in ET.fromstring(glance.svg).iter() if element.get("class") == "c-event"]
    assert (line.get("y1"), line.get("y2")) == ("0", "48")


def test_nothing_is_drawn_of_nothing():
    assert draw_history("x", []) is None
    assert draw_distribution("x", SEEN | {"edges": [], "above": [], "below": [], "zero": 10}, "code") is None


def test_one_moment_is_a_dot():
    assert len(paths(draw_history("x", PAST[-1:]).svg, "c-dot c-over")) == 1


def test_evidence_is_a_line_towards_an_alarm():
    chart = draw_evidence("x", PAST)
    assert [len(line) for line in paths(chart.svg, "c-line")] == [1, 2]
    (alarm,) = paths(chart.svg, "c-limit")
    assert paths(chart.svg, "c-over")[0][0][1] == alarm[0][1]
    assert [row[1][2] for row in chart.rows] == ["0 %", "-", "100 %", "55 %"]
    assert "55 % of an alarm" in chart.text
    assert "100 % at its highest" in chart.text
    assert draw_evidence("x", PAST[1:2]) is None
    beside = draw_evidence("x", PAST[2:], others=[PAST[:2]])
    assert [at for at, _ in beside.rows] == [at for at, _ in draw_history("x", PAST).rows[2:]]
    stepped = [[*point, step] for point, step in zip(PAST, (100, None, 160, 200), strict=True)]
    assert [place for place, _ in draw_evidence("x", stepped, over="step").rows] == [0.0, 600.0, 1000.0]


number = st.floats(0.0, 1e300)
optional = st.none() | number
point = st.tuples(st.floats(0, 2e9), optional, optional, optional, number, st.integers(0), st.integers(0, 3), optional)


@pytest.mark.slow
@given(st.lists(point, min_size=1), st.lists(st.text(), max_size=2))
def test_no_past_makes_a_drawing_that_cannot_be_read(points, names):
    points.sort(key=lambda point: point[0])
    markers = [Marker(points[0][0], "▲", name) for name in names]
    chart = draw_history("".join(names), points, others=dict.fromkeys(names, points), markers=markers)
    held = draw_evidence("x", points)
    assert held is None or not re.search(r"\b(nan|inf)\b", held.svg)
    assert not re.search(r"\b(nan|inf)\b", chart.svg)
    for line in paths(chart.svg, "c-line") + paths(chart.svg, "c-limit") + paths(chart.svg, "c-band"):
        assert all(0 <= x <= 1000 and 0 <= y <= 200 for x, y in line)


@example(1e300, 1.0000000000000001e291)
@given(st.floats(-1e300, 1e300), st.floats(1e-300, 1e300))
def test_ticks_are_round_few_and_within_their_axis(low, span):
    high = low + span
    if high <= low or span < 1e-9 * abs(low):
        return
    axis = linear_axis(low, high)
    values = [value for value, _ in axis.ticks]
    assert values == sorted(values)
    assert 1 <= len(values) <= 6
    assert all(low - span * 1e-6 <= value <= high + span * 1e-6 for value in values)


@pytest.mark.parametrize(("low", "high"), [(1e-12, 1.0), (0.01, 0.03), (1e-300, 1e300), (5.0, 5.0001)])
def test_a_logarithmic_axis_has_few_ticks(low, high):
    assert len(log_axis(low, high).ticks) <= 7


def test_time_ticks_are_full_hours_of_the_zone_and_name_its_days():
    start = datetime(2026, 1, 5, 9, 10, tzinfo=UTC).timestamp()
    kolkata = time_axis(start, start + 6 * 3600, ZoneInfo("Asia/Kolkata"))
    assert [text for _, text in kolkata.ticks] == ["15:00", "16:00", "17:00", "18:00", "19:00", "20:00"]
    berlin = ZoneInfo("Europe/Berlin")
    saturday = datetime(2026, 3, 28, 12, tzinfo=berlin).timestamp()
    night = time_axis(saturday, saturday + 23 * 3600, berlin)
    assert [text for _, text in night.ticks] == ["12:00", "18:00", "Mar 29", "06:00", "12:00"]


def test_six_quantities_are_six_kinds_of_line_and_the_mark_is_none_of_them():
    series = [(f"quantity {index}", [0.1 * (index + 1), 0.2]) for index in range(6)]
    chart = draw_depth("Drift", ["embedding", "head"], series, marked=1)
    kinds = re.findall(r'<path class="([a-z-]+)"', chart.svg)
    assert len(kinds) == len(set(kinds)) == 7
    assert [name for _, name in chart.key] == [name for name, _ in series]


def test_a_floor_of_zero_is_said_and_not_drawn():
    """At the bottom of a logarithmic axis it would look like the smallest number of that axis."""
    series = [("drift", [0.1, 0.2]), ("itself", [0.0, 0.0]), ("rounding", [math.nan, math.nan])]
    chart = draw_depth("Drift", ["embedding", "head"], series)
    assert [name for _, name in chart.key] == ["drift", "itself: none"]
    assert "c-over" not in chart.svg
