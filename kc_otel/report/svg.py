"""Drawings as SVG text: a quantity over time against its limit, a histogram, intervals. No library, no randomness.

Colours are classes that the document's style gives, so that a drawing follows light and dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from kc_otel.contract.words import number

__all__ = ["draw_distribution", "draw_history", "draw_interval"]

_WIDTH: Final = 540.0
_LEFT: Final = 56.0
_RIGHT: Final = 12.0
_TOP: Final = 14.0
_FAIL: Final = 3

Point = Sequence[Any]


def draw_history(points: Sequence[Point], label: str) -> str:
    """Estimate with its confidence band against the limit.

    Args:
        points: (time, estimate, lower, upper, limit, samples, status code), oldest first; at least one.
        label: What the drawing shows, for a screen reader.
    """
    height, bottom = 200.0, 178.0
    first, last = points[0][0], points[-1][0]
    estimates = [point[1] for point in points if point[1] is not None]
    limit = max(point[4] for point in points)
    bands = [point[3] for point in points if point[3] is not None]
    largest = max(estimates, default=0.0)
    top = max(1.25 * limit, 1.1 * largest, min(1.05 * max(bands, default=0.0), 3 * max(largest, limit))) or 1.0
    low = min(0.0, *estimates, *(point[2] for point in points if point[2] is not None)) if estimates else 0.0

    def x(at: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * ((at - first) / (last - first) if last > first else 0.5)

    def y(value: float) -> float:
        return bottom - (bottom - _TOP) * (min(max(value, low), top) - low) / (top - low)

    parts = []
    for value in _ticks(low, top):
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        )
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{number(value)}</text>')
    for at, anchor in ((first, "start"), ((first + last) / 2, "middle"), (last, "end")):
        text = datetime.fromtimestamp(at, UTC).strftime("%m-%d %H:%M:%S")
        parts.append(f'<text x="{x(at):.1f}" y="{height - 6}" text-anchor="{anchor}">{text}</text>')
    for run in _runs(points, lambda point: point[2] is not None and point[3] is not None):
        outline = [(x(p[0]), y(p[3])) for p in run] + [(x(p[0]), y(p[2])) for p in reversed(run)]
        parts.append(f'<polygon class="band" points="{_path(outline)}"/>')
    parts += [
        f'<polyline class="{kind}" points="{_path([(x(p[0]), y(p[1])) for p in run])}"/>'
        for kind, least in (("line", 0), ("over", _FAIL))
        for run in _runs(points, lambda point, least=least: point[1] is not None and point[6] >= least)
    ]
    parts.append(f'<polyline class="limit" points="{_path([(x(p[0]), y(p[4])) for p in points])}"/>')
    parts.append(
        f'<text class="limit-text" x="{_LEFT + 4}" y="{y(points[0][4]) - 5:.1f}">limit {number(points[0][4])}</text>'
    )
    return _svg(height, label, parts)


def draw_distribution(seen: Mapping[str, Any], label: str) -> str:
    """A histogram on a logarithmic axis, as `/api/v1/distribution` describes it; at least one bin."""
    height, bottom = 180.0, 158.0
    edges, total = seen["edges"], float(seen["total"])
    low, high = math.log10(edges[0]), math.log10(edges[-1])
    marks = [mark for mark in seen["marks"] if mark["value"] > 0]
    low = min([low, *(math.log10(mark["value"]) for mark in marks)])
    high = max([high, *(math.log10(mark["value"]) for mark in marks)])
    top: float = max([*seen["above"], *seen["below"], 1]) / total

    def x(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (math.log10(value) - low) / ((high - low) or 1.0)

    def y(share: float) -> float:
        return bottom - (bottom - _TOP) * share / top

    parts = [f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>']
    parts.append(f'<text x="{_LEFT - 6}" y="{_TOP + 4}" text-anchor="end">{number(100 * top)} %</text>')
    decades = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)
    every = max(1, math.ceil(len(decades) / 10))
    parts += [
        f'<text x="{x(10.0**decade):.1f}" y="{height - 6}" text-anchor="middle">1e{decade}</text>'
        for decade in decades
        if decade % every == 0
    ]
    for index, count in enumerate(seen["above"]):
        if count:
            left, right = x(edges[index]), x(edges[index + 1])
            up = y(count / total)
            parts.append(
                f'<rect class="bar" x="{left:.1f}" y="{up:.1f}" width="{right - left:.1f}" height="{bottom - up:.1f}"/>'
            )
    if any(seen["below"]):
        outline = [
            (x(edges[index + side]), y(count / total)) for index, count in enumerate(seen["below"]) for side in (0, 1)
        ]
        parts.append(f'<polyline class="other" points="{_path(outline)}"/>')
    for mark in marks:
        at = x(mark["value"])
        end = "end" if at > _WIDTH / 2 else "start"
        parts.append(f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(
            f'<text class="limit-text" x="{at + (-4 if end == "end" else 4):.1f}" y="{_TOP - 3}" '
            f'text-anchor="{end}">{html.escape(mark["text"])}</text>'
        )
    return _svg(height, label, parts)


def draw_interval(estimate: float, lower: float | None, upper: float | None, limit: float, label: str) -> str:
    """An estimate and its confidence interval on a line with the limit."""
    height, middle = 44.0, 16.0
    top = max(value for value in (1.2 * limit, 1.1 * estimate, 1.05 * (upper or 0.0), 1e-300))
    low = min(0.0, estimate, lower if lower is not None else 0.0)

    def x(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (value - low) / (top - low)

    left, right = x(lower if lower is not None else low), x(upper if upper is not None else top)
    text = f"limit {number(limit)}"
    parts = [
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{middle}" y2="{middle}"/>',
        f'<line class="interval" x1="{left:.1f}" x2="{right:.1f}" y1="{middle}" y2="{middle}"/>',
        f'<circle class="dot" cx="{x(estimate):.1f}" cy="{middle}" r="4"/>',
        f'<line class="limit" x1="{x(limit):.1f}" x2="{x(limit):.1f}" y1="2" y2="{middle + 12}"/>',
        f'<text class="limit-text" x="{x(limit):.1f}" y="{height - 4}" text-anchor="middle">{text}</text>',
    ]
    return _svg(height, label, parts)


def _runs(points: Sequence[Point], belongs: Any) -> list[list[Point]]:
    """Consecutive points that belong together."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if belongs(point):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round values."""
    size = 10.0 ** math.floor(math.log10(high - low))
    step = next(size * part for part in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if (high - low) / (size * part) <= 5.5)
    first = math.ceil(low / step)
    return [step * index for index in range(first, math.floor(high / step) + 1)]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH:g} {height:g}" role="img" aria-label="{html.escape(label, quote=True)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
