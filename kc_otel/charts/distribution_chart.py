"""Distribution of a window's observations, by size, on a logarithmic axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kc_otel.charts.axes import Axis, linear_axis, log_axis
from kc_otel.charts.chart import TOP, Chart, across, area, drawing, label, path, swatch, unit_word, upward
from kc_otel.contract.words import duration, number

_PLOT_HEIGHT: Final = 180

Seen = Mapping[str, Any]
"""Observations by size, as the API's `distribution_of` has them, with metric, unit, window and marks."""


def draw_distribution(title: str, seen: Seen, name: str, whole: Seen | None = None) -> Chart | None:
    """The chart of a distribution; None where nothing was observed, or only zeros.

    The observations are of the slice `name`; `whole` are those on all traffic, for comparison.
    """
    edges, total = seen["edges"], seen["total"]
    if not edges:
        return None
    whole = whole if whole is not None and whole["edges"] else None
    marks = [mark for mark in seen["marks"] if mark["value"] > 0]
    ends = [edges[0], edges[-1], *(mark["value"] for mark in marks)]
    ends += [whole["edges"][0], whole["edges"][-1]] if whole else []
    sizes = log_axis(min(ends), max(ends), most=7)
    signed = any(seen["below"])
    highest = max(*seen["above"], *seen["below"]) / total
    if whole:
        highest = max(highest, max(whole["above"]) / whole["total"])
    shares = linear_axis(0.0, 112 * highest, most=4)
    own = _stairs(edges, seen["above"], total, sizes, shares)
    plot = [area("c-bars", own), path("c-line", own)]
    key = [(swatch("c-band", "c-line"), f"{name}, above 0" if signed else name)]
    if signed:
        plot.append(path("c-below", _stairs(edges, seen["below"], total, sizes, shares)))
        key.append((swatch("c-below"), f"{name}, below 0"))
    if whole:
        plot.append(path("c-other", _stairs(whole["edges"], whole["above"], whole["total"], sizes, shares)))
        key.append((swatch("c-other"), "all traffic, above 0" if signed else "all traffic"))
    above = []
    for mark in marks:
        x = sizes.at(mark["value"])
        end, gap = ("end", -5) if x > 0.5 else ("start", 5)
        plot.append(path("c-limit", [(1000 * x, 0.0), (1000 * x, float(_PLOT_HEIGHT))]))
        above.append(
            f'<svg x="{100 * x:.2f}%">{label(mark["text"], str(gap), TOP + 10, anchor=end, kind="c-limit-text")}</svg>'
        )
    text = _text(seen, whole is not None)
    unit = f"size of {seen['metric']}" if signed else seen["metric"]
    unit += f", {unit_word(seen['unit'])}" if unit_word(seen["unit"]) else ""
    behind = [*upward(shares, _PLOT_HEIGHT, "% of observations"), *across(sizes, _PLOT_HEIGHT, grid=False)]
    behind.append(label(unit, "50%", TOP + _PLOT_HEIGHT + 32, anchor="middle"))
    columns = ("Size", f"{name}, above 0", "Below 0") if signed else ("Size", name)
    return Chart(
        svg=drawing(_PLOT_HEIGHT, title, text, behind, plot, above),
        text=text,
        key=tuple(key),
        columns=columns,
        rows=tuple(
            (
                round(1000 * sizes.at((edges[index] * edges[index + 1]) ** 0.5), 1),
                (
                    f"{number(edges[index])} to {number(edges[index + 1])}",
                    _share(count, total),
                    *((_share(seen["below"][index], total),) if signed else ()),
                ),
            )
            for index, count in enumerate(seen["above"])
        ),
        marks=tuple((round(1000 * sizes.at(mark["value"]), 1), mark["text"]) for mark in marks),
    )


def _stairs(
    edges: Sequence[float], counts: Sequence[int], total: int, sizes: Axis, shares: Axis
) -> list[tuple[float, float]]:
    xs = [1000 * sizes.at(edge) for edge in edges]
    ys = [_PLOT_HEIGHT * (1 - shares.at(100 * count / total)) for count in counts]
    corners = [(xs[index + side], y) for index, y in enumerate(ys) for side in (0, 1)]
    return [(xs[0], float(_PLOT_HEIGHT)), *corners, (xs[-1], float(_PLOT_HEIGHT))]


def _share(count: int, total: int) -> str:
    return f"{count:,} ({number(100 * count / total)} %)" if count else "0"


def _text(seen: Seen, compared: bool) -> str:
    said = (
        f"{seen['total']:,} observations of {seen['metric']} in {duration(seen['window'])}: smallest "
        f"{number(seen['minimum'])}, mean {number(seen['mean'])}, largest {number(seen['maximum'])}."
    )
    if seen["zero"]:
        said += f" {number(100 * seen['zero'] / seen['total'])} % are zero, and not on the logarithmic axis."
    return f"{said} Dotted: all traffic." if compared else said
