"""An estimate and its confidence interval on a line with the limit."""

from __future__ import annotations

from typing import Final

from kc_otel.charts.axes import linear_axis
from kc_otel.charts.chart import TOP, Chart, across, area, drawing, label, path
from kc_otel.contract.words import interval, number

__all__ = ["draw_interval"]

_HEIGHT: Final = 28


def draw_interval(
    title: str, estimate: float, lower: float | None, upper: float | None, limit: float, *, failing: bool = False
) -> Chart:
    """The chart of an interval; a side that is None is not bounded, and ends in an arrow.

    Args:
        title: What is drawn.
        estimate: Drawn as a dot.
        lower: Lower end.
        upper: Upper end.
        limit: Drawn as a line across.
        failing: Whether the verdict is FAIL.
    """
    ends = [limit, estimate, lower or 0.0, upper or 0.0]
    axis = linear_axis(min(0.0, 1.1 * min(ends)), 1.15 * max(ends))
    middle, mark = _HEIGHT / 2, 1000 * axis.at(limit)
    kind = "c-over" if failing else "c-line"
    left = 0.0 if lower is None else 1000 * axis.at(lower)
    right = 1000.0 if upper is None else 1000 * axis.at(upper)
    plot = [
        area("c-beyond", [(mark, 0.0), (1000.0, 0.0), (1000.0, float(_HEIGHT)), (mark, float(_HEIGHT))]),
        path("c-limit", [(mark, 0.0), (mark, float(_HEIGHT))]),
        path(kind, [(left, middle), (right, middle)]),
        path(f"c-dot {kind}", [(1000 * axis.at(estimate), middle)]),
    ]
    above = []
    for at, bound, sign, anchor in ((left, lower, "◂", "end"), (right, upper, "▸", "start")):
        if bound is None:
            above.append(label(sign, f"{at / 10:.2f}%", TOP + middle + 4.5, anchor=anchor, kind=f"{kind}-end"))
        else:
            plot.append(path(kind, [(at, middle - 5), (at, middle + 5)]))
    side = "end" if mark > 800 else "middle"
    above.append(label(f"limit {number(limit)}", f"{mark / 10:.2f}%", TOP - 4, anchor=side, kind="c-limit-text"))
    text = f"Estimate {number(estimate)}, interval {interval(lower, upper)}, limit {number(limit)}."
    return Chart(svg=drawing(_HEIGHT, title, text, across(axis, _HEIGHT), plot, above), text=text)
