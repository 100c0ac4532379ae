"""Relative error along the depth of a model, with noise floors and the boundary that was named."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kc_otel.charts.axes import log_axis
from kc_otel.charts.chart import TOP, Chart, drawing, label, path, swatch, upward
from kc_otel.contract.words import boundary_name, number

_SERIES: Final = (
    ("own error, on the training kernel's inputs", "local"),
    ("drift as they run, completions (decode)", "decode"),
    ("drift as they run, prompts (prefill)", "prefill"),
    ("training kernel against itself", "train_noise"),
    ("inference kernel against itself", "inference_noise"),
    ("rounding to the inference kernel's number format", "precision"),
)
_MAX_BOUNDARIES: Final = 10_000
"""Boundaries that are drawn: more than any model has."""
_NAME_SPACING: Final = 220
"""Thousandths of the width between two names below: as many as fit on a phone."""
_PLOT_HEIGHT: Final = 240
_LOWEST_ERROR: Final = 1e-9
_LINE_CLASSES: Final = ("c-line", "c-over", "c-over-too", "c-below", "c-below-too", "c-other")


def depth_chart(evidence: Mapping[str, Any]) -> Chart:
    """Own errors, drift of prompts and completions apart, and noise floors along depth; the culprit is marked.

    The evidence is JSON that locating wrote, perhaps of another version or by another program: a ValueError if it is
    something else.
    """
    try:
        rows = list(evidence["boundaries"])[:_MAX_BOUNDARIES]
        places = [_boundary(row["boundary"]) for row in rows]
        values = [(said, [_value(row, name) for row in rows]) for said, name in _SERIES]
        culprit = evidence["culprit"] and _boundary(evidence["culprit"]["boundary"])
        marked = places.index(culprit) if culprit in places else None
        title = f"Drift along depth, slice {evidence['slice']!s:.80}"
        return draw_depth(title, [f"{name:.80}" for name in places], values, marked)
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ValueError(f"this is not what locating found: {error!r:.80}") from None


def draw_depth(
    title: str, names: Sequence[str], series: Sequence[tuple[str, Sequence[float]]], marked: int | None = None
) -> Chart:
    """The chart of some quantities over the boundaries of a model, in the order of execution.

    A series has a value per boundary: nan is left out, what is below 1e-9 lies at the bottom, and what is nowhere above
    that is said to be none instead. `marked` is the index of the boundary that is marked.
    """
    seen = [value for _, values in series for value in values if math.isfinite(value) and value > _LOWEST_ERROR]
    axis = log_axis(min(seen, default=1e-6) / 2, max(seen, default=1.0) * 2)
    step = 1000 / len(names)
    plot, key = [], []
    for kind, (name, values) in zip(_LINE_CLASSES, series, strict=False):
        points = [
            (step * (index + 0.5), _PLOT_HEIGHT * (1 - axis.at(max(value, axis.low))))
            for index, value in enumerate(values)
            if not math.isnan(value)
        ]
        if not points:
            continue
        is_there = any(value > _LOWEST_ERROR for value in values)
        key.append((swatch(kind), name if is_there else f"{name}: none"))
        if is_there:
            plot.append(path(kind, points))
    above = []
    if marked is not None:
        at = step * (marked + 0.5)
        plot.append(path("c-mark", [(at, 0.0), (at, float(_PLOT_HEIGHT))]))
        anchor = "end" if at > 800 else "start" if at < 200 else "middle"
        above.append(label(names[marked], f"{at / 10:.2f}%", TOP - 4, anchor=anchor, kind="c-limit-text"))
    above += [
        label(said, f"{step * (index + 0.5) / 10:.2f}%", TOP + _PLOT_HEIGHT + 15, anchor="middle")
        for index, said in _layers(names, math.ceil(_NAME_SPACING / step))
    ]
    said = f"{len(names)} boundaries in the order of execution."
    if marked is not None:
        said += f" Marked: {names[marked]}."
    rows = tuple(
        (step * (index + 0.5), (name, *(number(values[index]) for _, values in series)))
        for index, name in enumerate(names)
    )
    svg = drawing(_PLOT_HEIGHT, title, said, upward(axis, _PLOT_HEIGHT, "relative error"), plot, above)
    return Chart(svg=svg, text=said, key=tuple(key), columns=("boundary", *(name for name, _ in series)), rows=rows)


def _boundary(said: Mapping[str, Any]) -> str:
    layer = said["layer"]
    return boundary_name(None if layer is None else int(layer), str(said["operator"]), int(said["part"]))


def _value(row: Mapping[str, Any], name: str) -> float:
    found = row[name]["estimate"] if name == "local" else row[name]
    value = float(found)
    # Completions that were not told apart are in the drift of all.
    return float(row["drift"]["estimate"]) if name == "decode" and math.isnan(value) else value


def _layers(names: Sequence[str], apart: int) -> list[tuple[int, str]]:
    """Places that are named below: where a layer begins, so many boundaries apart or more."""
    found: list[tuple[int, str]] = []
    for index, name in enumerate(names):
        layer = name.split(",")[0]
        begins = index == 0 or names[index - 1].split(",")[0] != layer
        if begins and (not found or index - found[-1][0] >= apart):
            found.append((index, layer))
    return found
