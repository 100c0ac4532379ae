"""Parts of a chart, and the elements that all drawings share."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from kc_otel.charts.axes import Axis
from kc_otel.contract.words import visible

TOP: Final = 20
"""Pixels above the plot: for the unit, and for signs of events."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing, without a width, and everything in it as text.

    Places from left to right are in thousandths: of `rows`, with a text for each of the columns, and of `marks`, single
    moments or values. `key` has (a small drawing of a sign, what it means) of everything drawn.
    """

    svg: str
    text: str
    key: tuple[tuple[str, str], ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[float, tuple[str, ...]], ...] = ()
    marks: tuple[tuple[float, str], ...] = ()


def drawing(
    height: int,
    title: str,
    text: str,
    behind: Iterable[str],
    plot: Iterable[str],
    above: Iterable[str],
    *,
    small: bool = False,
) -> str:
    """A drawing of three layers.

    The plot is `height` pixels high, its elements in coordinates of their own, 1000 wide, stretched with it; labels
    below it are outside of the drawing's own box. Horizontal places behind and above it are percentages. Title and text
    are for a screen reader. Nothing stands around a small one.
    """
    top, kind = (0, "chart small") if small else (TOP, "chart")
    stretched = (
        f'<svg y="{top}" width="100%" height="{height}" viewBox="0 0 1000 {height}" preserveAspectRatio="none">'
        f"{''.join(plot)}</svg>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" role="img" height="{height + top}">'
        f"<title>{escaped(title)}</title><desc>{escaped(text)}</desc>{''.join(behind)}{stretched}{''.join(above)}</svg>"
    )


def across(axis: Axis, height: int, *, grid: bool = True) -> list[str]:
    """Ticks of an axis from left to right; every other text gives way where the place is narrow."""
    parts = []
    for index, (value, text) in enumerate(axis.ticks):
        at = f"{100 * axis.at(value):.2f}%"
        if grid:
            parts.append(f'<line class="c-grid" x1="{at}" x2="{at}" y1="{TOP}" y2="{TOP + height}"/>')
        parts.append(label(text, at, TOP + height + 15, anchor="middle", kind="c-minor" if index % 2 else ""))
    return parts


def upward(axis: Axis, height: int, unit: str = "") -> list[str]:
    """Ticks of an axis from the bottom to the top, with lines across, and the unit above."""
    parts = []
    for value, text in axis.ticks:
        y = TOP + round(height * (1 - axis.at(value))) + 0.5
        parts.append(f'<line class="c-grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>')
        parts.append(label(text, "-8", y + 4, anchor="end"))
    said = ", ".join(part for part in (f"{axis.note} {unit}".strip(), "logarithmic" if axis.log else "") if part)
    return [*parts, label(said, "0", 10)] if said else parts


def label(text: str, x: str, y: float, *, anchor: str = "start", kind: str = "") -> str:
    """A text; `x` may be a percentage."""
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x}" y="{y:g}" text-anchor="{anchor}">{escaped(text)}</text>'


def path(kind: str, points: Sequence[tuple[float, float]]) -> str:
    """A line through points; one point is a dot."""
    ends = "h.01" if len(points) == 1 else ""
    return f'<path class="{kind}" d="M{_steps(points)}{ends}"/>'


def area(kind: str, points: Sequence[tuple[float, float]]) -> str:
    """A closed outline, filled."""
    return f'<path class="{kind}" d="M{_steps(points)}z"/>'


def swatch(*kinds: str) -> str:
    """Return a swatch of an element of a drawing, for its key."""
    lines = "".join(
        '<path class="c-band" d="M0 1h24v10H0z"/>' if kind == "c-band" else f'<path class="{kind}" d="M0 6h24"/>'
        for kind in kinds
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" class="swatch" aria-hidden="true" width="24" height="12">'
        f"{lines}</svg>"
    )


def unit_word(unit: str) -> str:
    """A unit, as OpenTelemetry writes it, as a reader does.

    >>> unit_word("{token}"), unit_word("1"), unit_word("nats")
    ('token', '', 'nats')
    """
    return "" if unit == "1" else re.sub(r"[{}]", "", unit)


def escaped(text: str) -> str:
    """Text in XML or HTML."""
    return html.escape(visible(text))


def _steps(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f} {y:.1f}" for x, y in points)


@cache
def chart_style() -> str:
    """The style sheet of charts: the palette, light and dark, and what each class of a drawing looks like."""
    return (files(__package__) / "charts.css").read_text(encoding="utf-8")
