"""Drift along depth: every line is another line, and what is nowhere is said instead of drawn at the bottom."""

from __future__ import annotations

import math
import re

from kc_otel.charts.depth_chart import draw_depth


def test_six_quantities_are_six_kinds_of_line_and_the_mark_is_none_of_them():
    """Read in grey, too."""
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
