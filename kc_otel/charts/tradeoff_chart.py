"""Bias against variance: one point for each way to choose between them, and the limit that the bias has to keep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kc_otel.charts.axes import linear_axis, log_axis
from kc_otel.charts.chart import TOP, Chart, across, area, drawing, label, path, swatch, upward
from kc_otel.contract.words import interval, number

__all__ = ["TradeoffPoint", "draw_tradeoff"]

_HEIGHT: Final = 220
_MOST: Final = 100.0
"""Variance at which the axis ends: what costs more lies at its end."""
_KINDS: Final = {"met": "c-line", "open": "c-below", "broken": "c-over"}
_WORDS: Final = {
    "met": "within the limit",
    "open": "not decided by this recording",
    "broken": "beyond the limit",
}


@dataclass(frozen=True, slots=True)
class TradeoffPoint:
    """One way to choose.

    Attributes:
        name: What it is called.
        variance: What it costs, at least 1; may be inf.
        bias: What it leaves.
        lower: Lower bound of that.
        upper: Upper bound of that; may be inf.
        state: `met`, `open` or `broken`.
        chosen: Whether it is the one to take; its name is written beside it.
    """

    name: str
    variance: float
    bias: float
    lower: float
    upper: float
    state: str
    chosen: bool = False


def draw_tradeoff(title: str, points: Sequence[TradeoffPoint], limit: float) -> Chart | None:
    """The chart; None without points.

    Args:
        title: What is drawn.
        points: Their estimates are drawn, in the order given, chosen ones on top.
        limit: Drawn as a line across.
    """
    if not points:
        return None
    costs = [min(point.variance, _MOST) for point in points]
    x = log_axis(1.0, max(1.2, 1.1 * max(costs)))
    biases = [point.bias for point in points]
    y = linear_axis(min(0.0, 1.1 * min(biases)), 1.15 * max(limit, *biases, 1e-300))
    top = _HEIGHT * (1 - y.at(limit))
    plot = [
        area("c-beyond", [(0.0, 0.0), (1000.0, 0.0), (1000.0, top), (0.0, top)]),
        path("c-limit", [(0.0, top), (1000.0, top)]),
    ]
    above = [label(f"limit {number(limit)}", "100%", TOP + top - 5, anchor="end", kind="c-limit-text")]
    for point, cost in sorted(zip(points, costs, strict=True), key=lambda one: one[0].chosen):
        at = (1000 * x.at(cost), _HEIGHT * (1 - y.at(point.bias)))
        plot.append(path(f"c-dot {_KINDS[point.state]}", [at]))
        if point.chosen:
            side, gap = ("end", "-8") if at[0] > 500 else ("start", "8")
            text = label(point.name, gap, TOP + at[1] - 8, anchor=side, kind="c-sign")
            above.append(f'<svg x="{at[0] / 10:.2f}%">{text}</svg>')
    count = {state: sum(point.state == state for point in points) for state in _KINDS}
    text = f"{title}: " + ", ".join(f"{count[state]} {_WORDS[state]}" for state in _KINDS if count[state]) + "."
    unit = "variance, in that of no correction; logarithmic"
    behind = [*upward(y, _HEIGHT, "bias left"), *across(x, _HEIGHT)]
    behind.append(label(unit, "50%", TOP + _HEIGHT + 32, anchor="middle"))
    return Chart(
        svg=drawing(_HEIGHT, title, text, behind, plot, above),
        text=text,
        key=tuple((swatch(kind), _WORDS[state]) for state, kind in _KINDS.items() if count[state]),
        columns=("Correction", "Variance", "Left", "Interval"),
        rows=tuple(
            (round(1000 * x.at(cost), 1), (point.name, number(point.variance), number(point.bias), _interval(point)))
            for point, cost in sorted(zip(points, costs, strict=True), key=lambda one: one[1])
        ),
    )


def _interval(point: TradeoffPoint) -> str:
    return interval(*(end if math.isfinite(end) else None for end in (point.lower, point.upper)))
