"""Drift along the responses: by position and by turn, each with its interval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kc_otel.charts.axes import linear_axis
from kc_otel.charts.chart import TOP, Chart, drawing, label, path, swatch, upward
from kc_otel.contract.slices import POSITION, POSITION_EDGES, TURN, TURNS
from kc_otel.contract.words import number
from kc_otel.stats import Interval

_PLOT_HEIGHT: Final = 180


def draw_places(title: str, found: Mapping[str, Interval], confidence: float) -> Chart | None:
    """The chart of the mean of (1-w)+ over prompts in each of PLACES, with intervals; None without any."""
    if not found:
        return None
    step = 1000 / len(found)
    axis = linear_axis(0.0, 1.05 * max(interval.upper for interval in found.values()), most=4)
    plot, above, rows = [], [], []
    for index, (place, interval) in enumerate(found.items()):
        at, name = step * (index + 0.5), place_text(place)
        heights = [_PLOT_HEIGHT * (1 - axis.at(value)) for value in (interval.lower, interval.upper, interval.estimate)]
        plot.append(path("c-line", [(at, heights[0]), (at, heights[1])]))
        plot.append(path("c-line c-dot", [(at, heights[2])]))
        above.append(label(_short(place), f"{at / 10:.2f}%", TOP + _PLOT_HEIGHT + 15, anchor="middle"))
        values = (interval.estimate, interval.lower, interval.upper)
        rows.append((at, (name, *map(number, values), f"{interval.samples:,}")))
    most = max(found, key=lambda place: found[place].lower)
    text = (
        f"Mean of (1-w)+ over the tokens of a prompt that lie there, with the interval of {100 * confidence:g} % by "
        f"prompt of each. Below a bin of positions is its first token. Surely largest at {place_text(most)}: at least "
        f"{number(found[most].lower)}."
    )
    return Chart(
        svg=drawing(_PLOT_HEIGHT, title, text, upward(axis, _PLOT_HEIGHT, "(1-w)+"), plot, above),
        text=text,
        key=((swatch("c-line"), f"interval of {100 * confidence:g} %, mean"),),
        columns=("place", "mean", "at least", "at most", "prompts"),
        rows=tuple(rows),
    )


def _short(place: str) -> str:
    """Return one of PLACES as the axis has room for it: the first token of a position, or the turn."""
    kind, _, first = place.partition(":")
    return first if kind == POSITION else f"turn {first}" + "+" * (int(first) == TURNS)


def place_text(place: str) -> str:
    """Return one of PLACES in words.

    >>> place_text("position:64"), place_text("position:65536"), place_text("turn:2"), place_text("turn:4")
    ('tokens 64 to 255', 'tokens from 65536', 'turn 2', 'turn 4 and later')
    """
    kind, _, first = place.partition(":")
    if kind == TURN:
        return f"turn {first} and later" if int(first) == TURNS else f"turn {first}"
    assert kind == POSITION
    beyond = next((edge for edge in POSITION_EDGES if edge > int(first)), None)
    return f"tokens from {first}" if beyond is None else f"tokens {first} to {beyond - 1}"
