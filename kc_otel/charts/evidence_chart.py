"""Evidence against a cell's limit over time, as its distance from an alarm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, tzinfo
from typing import Final, Literal

from kc_otel.charts.axes import linear_axis
from kc_otel.charts.chart import TOP, Chart, across, drawing, label, swatch, upward
from kc_otel.charts.history_chart import GAP_FACTOR, VERDICTS, Point, known, moment, scene_of, stepped
from kc_otel.contract.words import number

_PLOT_HEIGHT: Final = 80
_ALARM: Final = 100.0
"""Per cent: the evidence at which a verdict becomes FAIL."""


def draw_evidence(
    title: str,
    points: Sequence[Point],
    *,
    others: Iterable[Sequence[Point]] = (),
    step: float = math.inf,
    zone: tzinfo = UTC,
    over: Literal["time", "step"] = "time",
) -> Chart | None:
    """Draw the evidence against a cell; None if there was never any. Arguments are as for the history.

    Points of other kernel versions only stretch the axis, so that both drawings have the same.
    """
    if over == "step":
        points, *others = (list(filter(stepped, found)) for found in (points, *others))
    held = [
        (p[0], None if p[7] is None else _ALARM * min(max(p[7], 0.0), 1.0), None, None, _ALARM, p[5], p[6])
        for p in points
    ]
    seen = list(filter(known, held))
    if not seen:
        return None
    values = linear_axis(0.0, 1.15 * _ALARM)
    every = sorted((p for found in (points, *others) for p in found), key=lambda p: p[0])
    scene = scene_of(every, over, zone, values, _PLOT_HEIGHT, GAP_FACTOR * step)
    most = max(seen, key=lambda p: p[1] or 0.0)
    text = f"Evidence that the limit is broken: {_percent(seen[-1])} of an alarm at {moment(seen[-1][0], zone)}" + (
        "" if most[1] == seen[-1][1] else f", {_percent(most)} at its highest, at {moment(most[0], zone)}"
    )
    text += ". FAIL begins at an alarm, and ends when later observations pass or no evidence is left."
    above = label("alarm", "100%", TOP + scene.y(_ALARM) - 5, anchor="end", kind="c-limit-text")
    behind = [*upward(values, _PLOT_HEIGHT, "% of an alarm"), *across(scene.span, _PLOT_HEIGHT, grid=False)]
    return Chart(
        svg=drawing(_PLOT_HEIGHT, title, text, behind, scene.curves(held, (), held), [above]),
        text=text,
        key=((swatch("c-line"), "evidence that the limit is broken"), (swatch("c-limit"), "alarm: FAIL begins")),
        columns=("Time", "Verdict", "Evidence"),
        rows=tuple(
            (round(scene.x(p[0]), 1), (moment(p[0], zone), f"{VERDICTS[p[6]][2]} {VERDICTS[p[6]][0]}", _percent(p)))
            for p in held
        ),
    )


def _percent(point: Point) -> str:
    return number(None) if point[1] is None else f"{math.floor(point[1])} %"
