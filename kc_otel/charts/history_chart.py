"""The past of a cell: its estimate and confidence interval against its limit, its verdicts, and what happened.

And the evidence against its limit over time, as its distance from an alarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Any, Final, Literal

import numpy as np

from kc_otel.charts.axes import Axis, linear_axis, log_axis, time_axis
from kc_otel.charts.chart import TOP, Chart, across, area, drawing, label, path, swatch, upward
from kc_otel.contract.words import duration, interval, number

_PLOT_HEIGHT: Final = 200
_STRIP_HEIGHT: Final = 14
"""Pixels of the strip of verdicts at the bottom of the plot."""
_MIN_EXACT_POWER: Final = 1e-290  # below which a power of ten is no longer exact
_LOGARITHMIC_RATIO: Final = 30.0
"""Between estimate and limit, from which on the axis is logarithmic: one of both would lie at its end."""
_MARKER_SPACING: Final = 12.0
"""Thousandths of the width within which markers are one."""
_ALERT_MARKERS: Final = {
    "firing": "▲", "silence-ended": "▲", "would-fire": "△", "resolved": "▽", "would-resolve": "▽",
}  # fmt: skip
_PERSON_MARKER: Final = "☞"


@dataclass(frozen=True, slots=True)
class Marker:
    """Something that happened at a moment (Unix time, seconds): a sign of one character, and a description."""

    at: float
    sign: str
    text: str


def markers_of(events: Iterable[Mapping[str, Any]], contract: str, clause: str, slice: str) -> tuple[Marker, ...]:
    """Alerts of a clause on a slice, what people did to it, and steps of promotions.

    Events are as `/api/v1/events` has them.
    """
    found = []
    for event in events:
        data, kind = event["data"], event["kind"]
        if event["contract"] != contract:
            continue
        if kind == "promotion":
            sign = "→"
        elif kind in _ALERT_MARKERS:
            sign = _ALERT_MARKERS[kind] if (data.get("clause"), data.get("slice")) == (clause, slice) else ""
        else:
            whole = data.get("clause") in {None, clause} and data.get("slice") in {None, slice}
            sign = _PERSON_MARKER if data.get("by") and whole else ""
        if sign:
            said = event["message"].removeprefix(f"{contract}: ")
            found.append(Marker(event["at"], sign, f"{kind.replace('-', ' ')}: {said}"))
    return tuple(found)


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

    Points are oldest first; `others` are those with other kernel versions than `kernel`, by version. Markers outside of
    the points' time are left out. Where more than some times `step`, seconds, pass, the line is broken.
    """
    if over == "step":
        points = list(filter(stepped, points))
        others = {name: list(filter(stepped, found)) for name, found in (others or {}).items()}
    others = {name: found for name, found in (others or {}).items() if any(map(known, found))}
    every = sorted((p for found in (points, *others.values()) for p in found), key=lambda p: p[0])
    if not every:
        return None
    scene = scene_of(every, over, zone, _value_axis(every), _PLOT_HEIGHT, GAP_FACTOR * step)
    x = scene.x
    new = [
        Marker(found[0][0], "◆", f"kernel {name} is judged first")
        for name, found in ((kernel, points), *others.items())
        if name and found and x(found[0][0]) > _MARKER_SPACING
    ]
    together = _together([(x(mark.at), mark) for mark in (*markers, *new) if every[0][0] <= mark.at <= every[-1][0]])
    text = _text(points, len(others), scene.gap, zone)
    columns: tuple[str, ...] = ("Time", "Verdict", "Estimate", "Interval", "Limit", "Samples")
    rows = [_row(point, zone) for point in points]
    if any(map(stepped, points)):
        columns = (*columns, "Step")
        known_steps = [f"{point[STEP_COLUMN]:,}" if stepped(point) else number(None) for point in points]
        rows = [(*row, said) for row, said in zip(rows, known_steps, strict=True)]
    above = [*_strip(points, scene), *_signs(together, _PLOT_HEIGHT), _limit(every[-1][4], points, scene)]
    behind = [*upward(scene.values, _PLOT_HEIGHT, unit), *across(scene.span, _PLOT_HEIGHT + _STRIP_HEIGHT, grid=False)]
    return Chart(
        svg=drawing(_PLOT_HEIGHT, title, text, behind, scene.curves(points, others.values(), every), above),
        text=text,
        key=tuple(_key(points, others)),
        columns=columns,
        rows=tuple((round(x(p[0]), 1), row) for p, row in zip(points, rows, strict=True)),
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
    """The same at a glance, without axes and of time alone; signs of markers stand in the plot."""
    every = sorted((p for found in (points, *others) for p in found), key=lambda p: p[0])
    if not points:
        return None
    scene = scene_of(every, "time", zone, _value_axis(every), SPARKLINE_HEIGHT, GAP_FACTOR * step)
    together = _together(
        [(scene.x(marker.at), marker) for marker in markers if scene.span.low <= marker.at <= scene.span.high]
    )
    text = ". ".join([_text(points, len(others), scene.gap, zone).rstrip("."), *(said for _, _, said in together)])
    signs = list(_signs(together, SPARKLINE_HEIGHT))
    return Chart(
        drawing(SPARKLINE_HEIGHT, title, text, (), scene.curves(points, others, every), signs, small=True), text
    )


def _value_axis(every: Sequence[Point]) -> Axis:
    limit = max(p[4] for p in every)
    estimates = [p[1] for p in every if p[1] is not None]
    least, largest = min(estimates, default=0.0), max(estimates, default=0.0)
    if min(least, limit) > _MIN_EXACT_POWER and not 1 / _LOGARITHMIC_RATIO < largest / limit < _LOGARITHMIC_RATIO:
        low, high = max(min(least, limit), max(largest, limit) * 1e-9), max(largest, limit)
        return log_axis(10.0 ** math.floor(math.log10(low / 1.2)), min(high * 3, 1e308))
    bound = max((p[3] for p in every if p[3] is not None), default=0.0)
    high = max(1.25 * limit, 1.15 * largest, min(1.05 * bound, 3 * max(largest, limit)))
    bound = min((p[2] for p in every if p[2] is not None), default=0.0)
    low = min(0.0, 1.15 * least, max(1.05 * bound, min(least, -limit)))
    return linear_axis(low, high)


def _limit(limit: float, points: Sequence[Point], scene: HistoryScene) -> str:
    """The limit's value at the end of its line, on the side where the estimate is not."""
    y = scene.y(limit)
    last = next((scene.y(p[1]) for p in reversed(points) if known(p)), y)
    below = 0 < y - last < 18
    return label(f"limit {number(limit)}", "100%", TOP + y + (14 if below else -5), anchor="end", kind="c-limit-text")


def _strip(points: Sequence[Point], scene: HistoryScene) -> Iterator[str]:
    """The verdicts as a strip below the plot: a colour, and a shape where there is room for it."""
    y = TOP + _PLOT_HEIGHT
    for code, (_, tone, shape) in enumerate(VERDICTS):
        for start, end in _spans(points, code, scene.gap):
            width = max(scene.x(end) - scene.x(start), 4.0) / 10
            left = min(scene.x(start) / 10, 100 - width)
            place = f'x="{left:.2f}%" width="{width:.2f}%"'
            yield f'<rect class="c-{tone}" {place} y="{y + 1}" height="{_STRIP_HEIGHT - 2}"/>'
            if width >= 5:
                yield label(shape, f"{left + width / 2:.2f}%", y + _STRIP_HEIGHT - 3, anchor="middle", kind="c-shape")


def _spans(points: Sequence[Point], code: int, gap: float) -> Iterator[tuple[float, float]]:
    """Yield the spans of a status, each up to the next evaluation if that came in time."""
    for run in runs(points, lambda point: point[6] == code, gap):
        following = next((p[0] for p in points if p[0] > run[-1][0]), run[-1][0])
        yield run[0][0], following if following - run[-1][0] <= gap else run[-1][0]


def _together(markers: Sequence[tuple[float, Marker]]) -> list[tuple[float, str, str]]:
    """(place, sign, text) of what happened, as one where the signs would cover each other."""
    found: list[list[tuple[float, Marker]]] = []
    for at, marker in sorted(markers, key=lambda pair: pair[0]):
        if found and at - found[-1][0][0] < _MARKER_SPACING:
            found[-1].append((at, marker))
        else:
            found.append([(at, marker)])
    return [
        (near[0][0], near[0][1].sign, "; ".join(dict.fromkeys(marker.text for _, marker in near))) for near in found
    ]


def _signs(together: Sequence[tuple[float, str, str]], height: int) -> Iterator[str]:
    """Above the plot; where that is small, within it and left of its line."""
    small = height == SPARKLINE_HEIGHT
    top, end = (0, height) if small else (TOP - 4, TOP + height)
    for at, sign, _ in together:
        x = f"{at / 10:.2f}%"
        yield f'<line class="c-event" x1="{x}" x2="{x}" y1="{top}" y2="{end}"/>'
        place = (f"{max(at / 10 - 0.3, 1.5):.2f}%", 12, "end") if small else (x, TOP - 7, "middle")
        yield label(sign, place[0], place[1], anchor=place[2], kind="c-sign")


def _key(points: Sequence[Point], others: Mapping[str, Sequence[Point]]) -> Iterator[tuple[str, str]]:
    if any(map(known, points)):
        yield swatch("c-band", "c-line"), "estimate with its confidence interval"
    if any(map(failing, points)):
        yield swatch("c-over"), "where it fails"
    yield swatch("c-limit"), "limit"
    names = list(others)
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield swatch("c-other"), f"kernel {names[0] or 'not seen yet'}{more}"


def _text(points: Sequence[Point], others: int, gap: float, zone: tzinfo) -> str:
    seen = list(filter(known, points))
    if not seen:
        return "No evaluation with data is remembered for this pair of kernels."
    estimates = [p[1] for p in seen]
    first, last = seen[0], seen[-1]
    said = (
        f"Estimate {number(min(estimates))} to {number(max(estimates))} over {duration(last[0] - first[0])} until "
        f"{moment(last[0], zone)}, last {number(last[1])} with the limit at {number(last[4])}."
    )
    failed = list(_spans(points, FAIL_CODE, gap))
    if not failed:
        said += " Never FAIL in that time."
    elif (seconds := sum(end - start for start, end in failed)) > 0:
        said += f" FAIL for {duration(seconds)} of it, first at {moment(failed[0][0], zone)}."
    else:
        said += f" FAIL at {moment(failed[-1][0], zone)}."
    if others:
        said += f" {others} other kernel {'version' if others == 1 else 'versions'} on the same slice."
    return said


def _row(point: Point, zone: tzinfo) -> tuple[str, ...]:
    at, estimate, lower, upper, limit, samples, code = point[:7]
    status, _, shape = VERDICTS[code]
    return (
        moment(at, zone), f"{shape} {status}", number(estimate), interval(lower, upper), number(limit), f"{samples:,}",
    )  # fmt: skip


SPARKLINE_HEIGHT: Final = 48
"""Pixels of a plot that is read at a glance."""
VERDICTS: Final[tuple[tuple[str, str, str], ...]] = (
    ("PASS", "pass", "✓"),
    ("INCONCLUSIVE", "open", "?"),
    ("NO_DATA", "silent", "○"),
    ("FAIL", "fail", "✕"),
    ("INVALID_INPUT", "silent", "⊘"),
)
"""(status, class, shape) by status code."""
FAIL_CODE: Final = 3
"""The status code of a broken promise."""
_MAX_SINGLE_POINTS: Final = 40
"""Points that are drawn one by one."""
GAP_FACTOR: Final = 3.5
"""Times the usual distance of points, beyond which nobody looked in between."""

Point = Sequence[Any]
"""(Unix time, estimate, lower, upper, limit, samples, status code, evidence as a share of an alarm, trainer's step).

None for what is not known or not bounded. The step may be left out.
"""
STEP_COLUMN: Final = 8


@dataclass(frozen=True, slots=True)
class HistoryScene:
    """Positions of moments and values in a plot 1000 wide, and the curves in it.

    Over the trainer's steps, `steps` are the times at which a step is known, ascending, and the steps.
    """

    span: Axis
    values: Axis
    height: int
    gap: float
    steps: tuple[Sequence[float], Sequence[int]] | None = None

    def x(self, at: float) -> float:
        """Thousandths of the width at which a unix time lies."""
        return 1000 * self.span.at(at if self.steps is None else float(np.interp(at, *self.steps)))

    def y(self, value: float) -> float:
        """Pixels from the top at which a value lies."""
        return self.height * (1 - self.values.at(value))

    def curves(
        self, points: Sequence[Point], others: Iterable[Sequence[Point]], every: Sequence[Point]
    ) -> Iterator[str]:
        """Yield the area beyond the limit, the band, other versions, the limit, and the estimate on top of all."""
        limits = [(self.x(p[0]), self.y(p[4])) for p in every]
        limits = _stairs([(0.0, limits[0][1]), *limits, (1000.0, limits[-1][1])])
        yield area("c-beyond", [(0.0, 0.0), *limits, (1000.0, 0.0)])
        for run in runs(points, lambda p: p[1] is not None and (p[2] is not None or p[3] is not None), self.gap):
            upper = [(self.x(p[0]), 0.0 if p[3] is None else self.y(p[3])) for p in run]
            lower = [(self.x(p[0]), float(self.height) if p[2] is None else self.y(p[2])) for p in reversed(run)]
            yield area("c-band", upper + lower)
        for found in others:
            yield from self._lines("c-other", found, known)
        yield path("c-limit", limits)
        yield from self._lines("c-line", points, known)
        yield from self._lines("c-over", points, failing)
        if len(points) <= (1 if self.height == SPARKLINE_HEIGHT else _MAX_SINGLE_POINTS):
            for p in filter(known, points):
                yield path("c-dot c-over" if failing(p) else "c-dot c-line", [(self.x(p[0]), self.y(p[1]))])

    def _lines(self, kind: str, points: Sequence[Point], belongs: Callable[[Point], bool]) -> Iterator[str]:
        for run in runs(points, belongs, self.gap):
            yield path(kind, [(self.x(p[0]), self.y(p[1])) for p in run])


def scene_of(every: Sequence[Point], over: str, zone: tzinfo, values: Axis, height: int, gap: float) -> HistoryScene:
    """The place of every moment of some points, ascending, over `time` or over `step`."""
    if over == "time":
        return HistoryScene(time_axis(every[0][0], every[-1][0], zone), values, height, gap)
    steps = [p[STEP_COLUMN] for p in every]
    span = linear_axis(float(min(steps)), float(max(steps)))
    return HistoryScene(span, values, height, gap, ([p[0] for p in every], steps))


def known(point: Point) -> bool:
    """Return True if there is an estimate."""
    return point[1] is not None


def stepped(point: Point) -> bool:
    """Return True if the trainer's step is known."""
    return len(point) > STEP_COLUMN and point[STEP_COLUMN] is not None


def failing(point: Point) -> bool:
    """Return True if there is an estimate and the verdict is FAIL."""
    return point[1] is not None and point[6] >= FAIL_CODE


def runs(points: Sequence[Point], belongs: Callable[[Point], bool], gap: float) -> list[list[Point]]:
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


def moment(at: float, zone: tzinfo) -> str:
    """A unix time as text, with its zone."""
    return datetime.fromtimestamp(at, zone).strftime("%Y-%m-%d %H:%M:%S %Z")


_EVIDENCE_HEIGHT: Final = 80
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
    scene = scene_of(every, over, zone, values, _EVIDENCE_HEIGHT, GAP_FACTOR * step)
    most = max(seen, key=lambda p: p[1] or 0.0)
    text = f"Evidence that the limit is broken: {_percent(seen[-1])} of an alarm at {moment(seen[-1][0], zone)}" + (
        "" if most[1] == seen[-1][1] else f", {_percent(most)} at its highest, at {moment(most[0], zone)}"
    )
    text += ". FAIL begins at an alarm, and ends when later observations pass or no evidence is left."
    above = label("alarm", "100%", TOP + scene.y(_ALARM) - 5, anchor="end", kind="c-limit-text")
    behind = [*upward(values, _EVIDENCE_HEIGHT, "% of an alarm"), *across(scene.span, _EVIDENCE_HEIGHT, grid=False)]
    return Chart(
        svg=drawing(_EVIDENCE_HEIGHT, title, text, behind, scene.curves(held, (), held), [above]),
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
