"""Where a cell's evaluations lie in a drawing, over time or over the trainer's steps, and the curves through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo
from typing import Any, Final

import numpy as np

from kc_otel.charts.axes import Axis, linear_axis, time_axis
from kc_otel.charts.chart import area, path

__all__ = [
    "FAIL",
    "GAP",
    "SMALL",
    "STEP",
    "VERDICTS",
    "HistoryScene",
    "Point",
    "failing",
    "known",
    "moment",
    "runs",
    "scene_of",
    "stepped",
]

SMALL: Final = 48
"""Pixels of a plot that is read at a glance."""
VERDICTS: Final[tuple[tuple[str, str, str], ...]] = (
    ("PASS", "pass", "✓"),
    ("INCONCLUSIVE", "open", "?"),
    ("NO_DATA", "silent", "○"),
    ("FAIL", "fail", "✕"),
)
"""(status, class, shape) by status code."""
FAIL: Final = 3
"""The status code of a broken promise."""
_FEW: Final = 40
"""Points that are drawn one by one."""
GAP: Final = 3.5
"""Times the usual distance of points, beyond which nobody looked in between."""

Point = Sequence[Any]
"""(Unix time, estimate, lower, upper, limit, samples, status code, evidence as a share of an alarm, trainer's step).

None for what is not known or not bounded. The step may be left out.
"""
STEP: Final = 8


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
class HistoryScene:
    """Where moments and values lie in a plot 1000 wide, and the curves in it."""

    span: Axis
    values: Axis
    height: int
    gap: float
    steps: _Steps | None = None

    def x(self, at: float) -> float:
        """Thousandths of the width at which a unix time lies."""
        return 1000 * self.span.at(at if self.steps is None else self.steps.at(at))

    def y(self, value: float) -> float:
        """Pixels from the top at which a value lies."""
        return self.height * (1 - self.values.at(value))

    def curves(
        self, points: Sequence[Point], others: Iterable[Sequence[Point]], every: Sequence[Point]
    ) -> Iterator[str]:
        """What is beyond the limit, the band, other versions, the limit, and the estimate on top of all."""
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
        if len(points) <= (1 if self.height == SMALL else _FEW):
            for p in filter(known, points):
                yield path("c-dot c-over" if failing(p) else "c-dot c-line", [(self.x(p[0]), self.y(p[1]))])

    def _lines(self, kind: str, points: Sequence[Point], belongs: Callable[[Point], bool]) -> Iterator[str]:
        for run in runs(points, belongs, self.gap):
            yield path(kind, [(self.x(p[0]), self.y(p[1])) for p in run])


def scene_of(every: Sequence[Point], over: str, zone: tzinfo, values: Axis, height: int, gap: float) -> HistoryScene:
    """The place of every moment of some points, ascending, over `time` or over `step`."""
    steps = _Steps([p[0] for p in every], [p[STEP] for p in every]) if over == "step" else None
    span = steps.axis if steps else time_axis(every[0][0], every[-1][0], zone)
    return HistoryScene(span, values, height, gap, steps)


def known(point: Point) -> bool:
    """Whether something was estimated."""
    return point[1] is not None


def stepped(point: Point) -> bool:
    """Whether the trainer's step is known."""
    return len(point) > STEP and point[STEP] is not None


def failing(point: Point) -> bool:
    """Whether something was estimated, and the verdict is FAIL."""
    return point[1] is not None and point[6] >= FAIL


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
