"""The past of a cell: its estimate and confidence interval against its limit, its verdicts, and what happened."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Any, Final, Literal

import numpy as np

from kc_otel.charts.axes import Axis, linear_axis, log_axis, time_axis
from kc_otel.charts.chart import TOP, Chart, across, area, drawing, label, path, swatch, upward
from kc_otel.charts.markers import Marker
from kc_otel.contract.words import duration, interval, number

__all__ = ["Point", "draw_evidence", "draw_history", "draw_sparkline"]

_HEIGHT: Final = 200
_SMALL: Final = 48
_LOW: Final = 80
"""Pixels of the plot of the evidence."""
_STRIP: Final = 14
"""Pixels of the strip of verdicts at the bottom of the plot."""
_VERDICTS: Final = (
    ("PASS", "pass", "✓"),
    ("INCONCLUSIVE", "open", "?"),
    ("NO_DATA", "silent", "○"),
    ("FAIL", "fail", "✕"),
)
"""(status, class, shape) by status code."""
_FAIL: Final = 3
_ALARM: Final = 100.0
"""Per cent: the evidence at which a verdict becomes FAIL."""
_TINY: Final = 1e-290  # below which a power of ten is no longer exact
_RATIO: Final = 30.0
"""Between estimate and limit, from which on the axis is logarithmic: one of both would lie at its end."""
_FEW: Final = 40
"""Points that are drawn one by one."""
_NEAR: Final = 12.0
"""Thousandths of the width within which markers are one."""
_GAP: Final = 3.5
"""Times the usual distance of points, beyond which nobody looked in between."""

Point = Sequence[Any]
"""(Unix time, estimate, lower, upper, limit, samples, status code, evidence as a share of an alarm, trainer's step).

None for what is not known or not bounded. The step may be left out.
"""
_STEP: Final = 8


def draw_history(
    title: str,
    points: Sequence[Point],
    *,
    kernel: str = "",
    others: Mapping[str, Sequence[Point]] | None = None,
    markers: Sequence[Marker] = (),
    unit: str = "",
    step: float = math.inf,
    zone: tzinfo = UTC,
    over: Literal["time", "step"] = "time",
) -> Chart | None:
    """The chart of a cell's past; None where there is no point, or over steps none whose step is known.

    Args:
        title: What is drawn.
        points: Oldest first.
        kernel: Inference kernel version of the points, to say when it was judged first.
        others: Points of the same clause and slice with other kernel versions, by version.
        markers: Those outside of the points' time are left out.
        unit: Of the estimate; empty where it has none.
        step: Seconds between two points at the most; where more time passes, the line is broken.
        zone: Of the times that are written.
        over: What goes from left to right: time, or the trainer's steps. What happened between two steps lies between.
    """
    if over == "step":
        points = list(filter(_stepped, points))
        others = {name: list(filter(_stepped, found)) for name, found in (others or {}).items()}
    others = {name: found for name, found in (others or {}).items() if any(map(_known, found))}
    every = sorted((p for found in (points, *others.values()) for p in found), key=lambda p: p[0])
    if not every:
        return None
    scene = _scene(every, over, zone, _value_axis(every), _HEIGHT, _GAP * step)
    x = scene.x
    new = [
        Marker(found[0][0], "◆", f"kernel {name} is judged first")
        for name, found in ((kernel, points), *others.items())
        if name and found and x(found[0][0]) > _NEAR
    ]
    together = _together([(x(one.at), one) for one in (*markers, *new) if every[0][0] <= one.at <= every[-1][0]])
    text = _text(points, len(others), zone)
    stepped = any(map(_stepped, points))
    above = [
        *_strip(points, scene),
        *_signs(together, _HEIGHT),
        _limit(every[-1][4], points, scene),
    ]
    behind = [*upward(scene.values, _HEIGHT, unit), *across(scene.span, _HEIGHT + _STRIP, grid=False)]
    return Chart(
        svg=drawing(_HEIGHT, title, text, behind, scene.curves(points, others.values(), every), above),
        text=text,
        key=tuple(_key(points, others)),
        columns=("Time", "Verdict", "Estimate", "Interval", "Limit", "Samples", *(("Step",) if stepped else ())),
        rows=tuple((round(x(p[0]), 1), (*_row(p, zone), *_step(p, stepped))) for p in points),
        marks=tuple((round(at, 1), said) for at, _, said in together),
    )


def draw_sparkline(
    title: str,
    points: Sequence[Point],
    *,
    others: Sequence[Sequence[Point]] = (),
    markers: Sequence[Marker] = (),
    step: float = math.inf,
    zone: tzinfo = UTC,
) -> Chart | None:
    """The same at a glance, without axes; None where there is no point.

    Args:
        title: What is drawn.
        points: As for the chart.
        others: Points of other kernel versions.
        markers: As for the chart; their signs stand in the plot.
        step: As for the chart.
        zone: As for the chart.
    """
    every = sorted((p for found in (points, *others) for p in found), key=lambda p: p[0])
    if not points:
        return None
    scene = _Scene(time_axis(every[0][0], every[-1][0], zone), _value_axis(every), _SMALL, _GAP * step)
    together = _together([(scene.x(one.at), one) for one in markers if scene.span.low <= one.at <= scene.span.high])
    text = ". ".join([_text(points, len(others), zone).rstrip("."), *(said for _, _, said in together)])
    signs = list(_signs(together, _SMALL))
    return Chart(drawing(_SMALL, title, text, (), scene.curves(points, others, every), signs, small=True), text)


def draw_evidence(
    title: str,
    points: Sequence[Point],
    *,
    others: Iterable[Sequence[Point]] = (),
    step: float = math.inf,
    zone: tzinfo = UTC,
    over: Literal["time", "step"] = "time",
) -> Chart | None:
    """How what is held against a cell's limit grew and went; None where nothing was ever held.

    Args:
        title: What is drawn.
        points: As for the history.
        others: Points of other kernel versions, so that both drawings have the same time axis.
        step: As for the history.
        zone: As for the history.
        over: As for the history.
    """
    if over == "step":
        points, *others = (list(filter(_stepped, found)) for found in (points, *others))
    held = [
        (p[0], None if p[7] is None else _ALARM * min(max(p[7], 0.0), 1.0), None, None, _ALARM, p[5], p[6])
        for p in points
    ]
    known = list(filter(_known, held))
    if not known:
        return None
    values = linear_axis(0.0, 1.15 * _ALARM)
    every = sorted((p for found in (points, *others) for p in found), key=lambda p: p[0])
    scene = _scene(every, over, zone, values, _LOW, _GAP * step)
    most = max(known, key=lambda p: p[1] or 0.0)
    text = f"Evidence against the limit: {_percent(known[-1])} of an alarm at {_moment(known[-1][0], zone)}" + (
        "" if most[1] == known[-1][1] else f", {_percent(most)} at most, at {_moment(most[0], zone)}"
    )
    text += ". At an alarm the verdict is FAIL; chance alone gets there once in the time that the contract allows."
    above = label("alarm", "100%", TOP + scene.y(_ALARM) - 5, anchor="end", kind="c-limit-text")
    behind = [*upward(values, _LOW, "% of an alarm"), *across(scene.span, _LOW, grid=False)]
    return Chart(
        svg=drawing(_LOW, title, text, behind, scene.curves(held, (), held), [above]),
        text=text,
        key=((swatch("c-line"), "evidence against the limit"), (swatch("c-limit"), "alarm: the verdict is FAIL")),
        columns=("Time", "Verdict", "Evidence"),
        rows=tuple(
            (round(scene.x(p[0]), 1), (_moment(p[0], zone), f"{_VERDICTS[p[6]][2]} {_VERDICTS[p[6]][0]}", _percent(p)))
            for p in held
        ),
    )


def _percent(point: Point) -> str:
    return number(None) if point[1] is None else f"{math.floor(point[1])} %"


@dataclass(frozen=True, slots=True)
class _Steps:
    """The trainer's step at any time, by the times at which it is known, ascending."""

    times: Sequence[float]
    steps: Sequence[int]

    @property
    def axis(self) -> Axis:
        return linear_axis(float(min(self.steps)), float(max(self.steps)))

    def at(self, time: float) -> float:
        return float(np.interp(time, self.times, self.steps))


@dataclass(frozen=True, slots=True)
class _Scene:
    """Where moments and values lie in a plot 1000 wide, and the curves in it."""

    span: Axis
    values: Axis
    height: int
    gap: float
    steps: _Steps | None = None

    def x(self, at: float) -> float:
        return 1000 * self.span.at(at if self.steps is None else self.steps.at(at))

    def y(self, value: float) -> float:
        return self.height * (1 - self.values.at(value))

    def curves(
        self, points: Sequence[Point], others: Iterable[Sequence[Point]], every: Sequence[Point]
    ) -> Iterator[str]:
        """What is beyond the limit, the band, other versions, the limit, and the estimate on top of all."""
        limits = [(self.x(p[0]), self.y(p[4])) for p in every]
        limits = _stairs([(0.0, limits[0][1]), *limits, (1000.0, limits[-1][1])])
        yield area("c-beyond", [(0.0, 0.0), *limits, (1000.0, 0.0)])
        for run in _runs(points, lambda p: p[1] is not None and (p[2] is not None or p[3] is not None), self.gap):
            upper = [(self.x(p[0]), 0.0 if p[3] is None else self.y(p[3])) for p in run]
            lower = [(self.x(p[0]), float(self.height) if p[2] is None else self.y(p[2])) for p in reversed(run)]
            yield area("c-band", upper + lower)
        for found in others:
            yield from self._lines("c-other", found, _known)
        yield path("c-limit", limits)
        yield from self._lines("c-line", points, _known)
        yield from self._lines("c-over", points, _failing)
        if len(points) <= (1 if self.height == _SMALL else _FEW):
            for p in filter(_known, points):
                yield path("c-dot c-over" if _failing(p) else "c-dot c-line", [(self.x(p[0]), self.y(p[1]))])

    def _lines(self, kind: str, points: Sequence[Point], belongs: Callable[[Point], bool]) -> Iterator[str]:
        for run in _runs(points, belongs, self.gap):
            yield path(kind, [(self.x(p[0]), self.y(p[1])) for p in run])


def _scene(every: Sequence[Point], over: str, zone: tzinfo, values: Axis, height: int, gap: float) -> _Scene:
    steps = _Steps([p[0] for p in every], [p[_STEP] for p in every]) if over == "step" else None
    span = steps.axis if steps else time_axis(every[0][0], every[-1][0], zone)
    return _Scene(span, values, height, gap, steps)


def _known(point: Point) -> bool:
    return point[1] is not None


def _stepped(point: Point) -> bool:
    return len(point) > _STEP and point[_STEP] is not None


def _step(point: Point, stepped: bool) -> tuple[str, ...]:
    return (f"{point[_STEP]:,}" if _stepped(point) else number(None),) if stepped else ()


def _failing(point: Point) -> bool:
    return point[1] is not None and point[6] >= _FAIL


def _value_axis(every: Sequence[Point]) -> Axis:
    limit = max(p[4] for p in every)
    estimates = [p[1] for p in every if p[1] is not None]
    least, largest = min(estimates, default=0.0), max(estimates, default=0.0)
    if min(least, limit) > _TINY and not 1 / _RATIO < largest / limit < _RATIO:
        low, high = max(min(least, limit), max(largest, limit) * 1e-9), max(largest, limit)
        return log_axis(10.0 ** math.floor(math.log10(low / 1.2)), min(high * 3, 1e308))
    bound = max((p[3] for p in every if p[3] is not None), default=0.0)
    high = max(1.25 * limit, 1.15 * largest, min(1.05 * bound, 3 * max(largest, limit)))
    bound = min((p[2] for p in every if p[2] is not None), default=0.0)
    low = min(0.0, 1.15 * least, max(1.05 * bound, min(least, -limit)))
    return linear_axis(low, high)


def _runs(points: Sequence[Point], belongs: Callable[[Point], bool], gap: float) -> list[list[Point]]:
    """Points that belong together: without one that does not, or a long silence, in between."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if runs[-1] and (not belongs(point) or point[0] - runs[-1][-1][0] > gap):
            runs.append([])
        if belongs(point):
            runs[-1].append(point)
    return [run for run in runs if run]


def _stairs(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of a line that stays level until its next point."""
    found = [points[0]]
    for x, y in points[1:]:
        if y != found[-1][1]:
            found += [(x, found[-1][1]), (x, y)]
    return [*found, points[-1]]


def _limit(limit: float, points: Sequence[Point], scene: _Scene) -> str:
    """The limit's value at the end of its line, on the side where the estimate is not."""
    y = scene.y(limit)
    last = next((scene.y(p[1]) for p in reversed(points) if _known(p)), y)
    below = 0 < y - last < 18
    return label(f"limit {number(limit)}", "100%", TOP + y + (14 if below else -5), anchor="end", kind="c-limit-text")


def _strip(points: Sequence[Point], scene: _Scene) -> Iterator[str]:
    """The verdicts as a strip below the plot: a colour, and a shape where there is room for it."""
    y = TOP + _HEIGHT
    for code, (_, tone, shape) in enumerate(_VERDICTS):
        for run in _runs(points, _has(code), scene.gap):
            following = next((p[0] for p in points if p[0] > run[-1][0]), run[-1][0])
            end = following if following - run[-1][0] <= scene.gap else run[-1][0]
            width = max(scene.x(end) - scene.x(run[0][0]), 4.0) / 10
            left = min(scene.x(run[0][0]) / 10, 100 - width)
            place = f'x="{left:.2f}%" width="{width:.2f}%"'
            yield f'<rect class="c-{tone}" {place} y="{y + 1}" height="{_STRIP - 2}"/>'
            if width >= 5:
                yield label(shape, f"{left + width / 2:.2f}%", y + _STRIP - 3, anchor="middle", kind="c-shape")


def _has(code: int) -> Callable[[Point], bool]:
    return lambda point: point[6] == code


def _together(markers: Sequence[tuple[float, Marker]]) -> list[tuple[float, str, str]]:
    """(place, sign, text) of what happened, as one where the signs would cover each other."""
    found: list[list[tuple[float, Marker]]] = []
    for at, marker in sorted(markers, key=lambda one: one[0]):
        if found and at - found[-1][0][0] < _NEAR:
            found[-1].append((at, marker))
        else:
            found.append([(at, marker)])
    return [
        (near[0][0], near[0][1].sign, "; ".join(dict.fromkeys(marker.text for _, marker in near))) for near in found
    ]


def _signs(together: Sequence[tuple[float, str, str]], height: int) -> Iterator[str]:
    """Above the plot; where that is small, within it and left of its line."""
    small = height == _SMALL
    top, end = (0, height) if small else (TOP - 4, TOP + height)
    for at, sign, _ in together:
        x = f"{at / 10:.2f}%"
        yield f'<line class="c-event" x1="{x}" x2="{x}" y1="{top}" y2="{end}"/>'
        place = (f"{max(at / 10 - 0.3, 1.5):.2f}%", 12, "end") if small else (x, TOP - 7, "middle")
        yield label(sign, place[0], place[1], anchor=place[2], kind="c-sign")


def _key(points: Sequence[Point], others: Mapping[str, Sequence[Point]]) -> Iterator[tuple[str, str]]:
    if any(map(_known, points)):
        yield swatch("c-band", "c-line"), "estimate with its confidence interval"
    if any(map(_failing, points)):
        yield swatch("c-over"), "where it fails"
    yield swatch("c-limit"), "limit"
    names = list(others)
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield swatch("c-other"), f"kernel {names[0] or 'not seen yet'}{more}"


def _text(points: Sequence[Point], others: int, zone: tzinfo) -> str:
    known = list(filter(_known, points))
    if not known:
        return "No evaluation with data is remembered for this pair of kernels."
    estimates = [p[1] for p in known]
    first, last = known[0], known[-1]
    said = (
        f"Estimate {number(min(estimates))} to {number(max(estimates))} over {duration(last[0] - first[0])} until "
        f"{_moment(last[0], zone)}, last {number(last[1])} with the limit at {number(last[4])}."
    )
    over = sum(p[6] >= _FAIL for p in points)
    said += f" {over:,} of {len(points):,} evaluations are FAIL." if over else " No evaluation is FAIL."
    if others:
        said += f" {others} other kernel {'version' if others == 1 else 'versions'} on the same slice."
    return said


def _row(point: Point, zone: tzinfo) -> tuple[str, ...]:
    at, estimate, lower, upper, limit, samples, code = point[:7]
    status, _, shape = _VERDICTS[code]
    return (
        _moment(at, zone), f"{shape} {status}", number(estimate), interval(lower, upper), number(limit), f"{samples:,}",
    )  # fmt: skip


def _moment(at: float, zone: tzinfo) -> str:
    return datetime.fromtimestamp(at, zone).strftime("%Y-%m-%d %H:%M:%S %Z")
