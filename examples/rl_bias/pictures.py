"""The three pictures of the README, the same bytes from the same numbers.

Colours are Okabe and Ito's, which people with any colour vision can tell apart; every line is labelled where it ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from examples.rl_bias import claims
from examples.rl_bias.exact import Pair
from examples.rl_bias.kernels import FAMILIES
from examples.rl_bias.tables import Pairs

BLACK, GREY, BLUE, GREEN, ORANGE, RED = "#000000", "#777777", "#0072B2", "#009E73", "#E69F00", "#D55E00"
STYLE = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "figure.facecolor": "white",
}
FLOOR = 1e-5
TOP = 30.0

Lines = list[tuple[str, str, str, Sequence[float]]]
"""(label, colour, line style, values) of each line."""


def draw(pairs: Pairs, longest: int, folder: Path) -> list[Path]:
    """Draws all of them into a folder and returns their paths."""
    with mpl.rc_context(STYLE):
        return [
            _save(over_horizons(pairs, longest), folder / "horizons.png"),
            _save(over_drift(pairs, min(longest, 6)), folder / "drift.png"),
            _save(over_samples(pairs, longest), folder / "samples.png"),
        ]


def over_horizons(pairs: Pairs, longest: int) -> Figure:
    """True bias and bounds over T, one panel per kernel at its reference scale."""
    figure, panels = _panels("bias / (A_max G_seq)")
    horizons = range(1, longest + 1)
    for family, axes in zip(FAMILIES, panels, strict=True):
        cases = [pairs(family, family.reference, horizon) for horizon in horizons]
        _bounds(axes, list(horizons), cases)
        axes.set_title(family.label)
        axes.set_xticks(list(horizons))
        axes.set_xlim(1, longest)
        if axes.get_subplotspec().is_last_row():
            axes.set_xlabel("horizon T")
    return figure


def over_drift(pairs: Pairs, horizon: int) -> Figure:
    """True bias and bounds over each family's own knob."""
    figure, panels = _panels(f"bias / (A_max G_seq), T = {horizon}")
    for family, axes in zip(FAMILIES, panels, strict=True):
        cases = [pairs(family, scale, horizon) for scale in family.scales]
        at = list(range(len(cases)))
        _bounds(axes, at, cases)
        axes.set_title(family.name)
        axes.set_xticks(at, [f"{scale:g}" for scale in family.scales])
        axes.set_xlim(0, at[-1])
        axes.set_xlabel(family.knob)
    return figure


def over_samples(pairs: Pairs, longest: int) -> Figure:
    """The direct estimate of TV_seq and its interval as sequences come in."""
    shown = [family for family in FAMILIES if family.label in {"bf16", "top-p 0.95", "noise 0.03"}]
    figure = Figure(figsize=(10.0, 3.3), layout="constrained")
    panels = figure.subplots(1, len(shown), sharey=True)
    sizes = np.unique(np.round(np.logspace(2, 5.5, 22)).astype(int))
    for family, axes in zip(shown, panels, strict=True):
        pair = pairs(family, family.reference, longest)
        values = claims.drawn(pair, int(sizes[-1]), seed=longest)
        intervals = [claims.interval_of(values[:n]) for n in sizes]
        lower, estimate, upper = (
            np.array([getattr(interval, side) for interval in intervals]) / pair.sequence_tv
            for side in ("lower", "estimate", "upper")
        )
        axes.fill_between(sizes, np.maximum(lower, 0.05), upper, color=BLUE, alpha=0.2, lw=0)
        axes.axhline(1.0, color=BLACK, lw=1.2, ls="--")
        axes.plot(sizes, estimate, color=BLUE, lw=1.8)
        axes.set(xscale="log", yscale="log", xlim=(sizes[0], sizes[-1]), ylim=(0.3, 30.0))
        axes.set_yticks([0.3, 1, 3, 10, 30], ["0.3", "1", "3", "10", "30"])
        axes.set_title(f"{family.label}, T = {longest}")
        axes.set_xlabel("sequences sampled from Q")
        axes.text(sizes[-1], 0.85, f"exact: {pair.sequence_tv:.3g}", ha="right", va="top", color=BLACK)
        at = len(sizes) // 4
        axes.text(sizes[at], upper[at] * 1.15, "99% interval", color=BLUE, ha="left", va="bottom")
    panels[0].set_ylabel("estimate of TV_seq / exact")
    return figure


def _bounds(axes: Axes, at: list[int], cases: list[Pair]) -> None:
    lines: Lines = [
        ("exp(T λ) - 1", RED, "-", [claims.paper(pair)["exp(T lam) - 1"] for pair in cases]),
        ("worst cases", ORANGE, "-", [claims.offline(pair).value for pair in cases]),
        ("coupling", GREEN, "-", [claims.from_rollouts(pair)["coupling"] for pair in cases]),
        ("2 TV_seq", BLUE, "-", [claims.from_sequences(pair) for pair in cases]),
        ("true, worst A", BLACK, "-", [pair.bias("adversarial") for pair in cases]),
        ("true, verifier", GREY, "--", [pair.bias("verifier") for pair in cases]),
    ]
    if not all(claims.covered(pair) for pair in cases):
        lines[0] = ("exp(T λ) - 1,\nnot valid here", RED, ":", lines[0][3])
    axes.set_yscale("log")
    axes.set_ylim(FLOOR, TOP)
    axes.axhspan(claims.VACUOUS, TOP, color="#f0f0f0", zorder=0, lw=0)
    ends = []
    for label, colour, style, values in lines:
        shown = [min(value, TOP * 100) if value > FLOOR / 10 else math.nan for value in values]
        axes.plot(at, shown, color=colour, ls=style, lw=1.7, marker="o", ms=2.6, clip_on=True)
        last = next((value for value in reversed(values) if not math.isnan(value)), math.nan)
        ends.append((min(max(last, FLOOR), TOP), label, colour))
    _label(axes, ends)


def _label(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Names at the right edge, moved apart where they would lie on each other."""
    ends = sorted(ends, key=lambda entry: entry[0])
    wanted = np.log10([end for end, _, _ in ends])
    gap = (math.log10(TOP) - math.log10(FLOOR)) * 0.057
    room = np.array([gap * label.count("\n") / 2 for _, label, _ in ends])
    placed = wanted.copy()
    for _ in range(200):  # neighbours that are too near push each other away
        near = gap + room[1:] + room[:-1] - np.diff(placed)
        if not (near > 1e-6).any():
            break
        push = np.maximum(near, 0.0) / 2
        placed[1:] += push
        placed[:-1] -= push
        placed[-1] = min(placed[-1], math.log10(TOP))
    for y, (_, label, colour) in zip(placed, ends, strict=True):
        axes.annotate(
            label,
            (1.0, 10**y),
            xycoords=("axes fraction", "data"),
            xytext=(5, 0),
            textcoords="offset points",
            color=colour,
            va="center",
            fontsize=8.5,
            annotation_clip=False,
        )


def _panels(ylabel: str) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(11.0, 6.4), layout="constrained")
    grid = figure.subplots(2, 3, sharey=True)
    for row in grid:
        row[0].set_ylabel(ylabel)
    first = grid[0][0]
    first.text(0.03, 3.4, "vacuous", transform=first.get_yaxis_transform(), color=GREY, fontsize=8.5)
    return figure, list(grid.ravel())


def _save(figure: Figure, path: Path) -> Path:
    """A PNG with a palette: a third of the size, and no date in it."""
    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(105)
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    image.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
    return path
