"""A picture of how each bound grows with the horizon, for the reward and for the gradient.

Straight lines on log-log axes: slope 1 where a bound adds up over tokens, slope 1/2 where KL goes through a root, slope
0 for what is measured on whole sequences. Where lines meet the ceiling they say nothing any more. For the gradient the
largest possible score grows with the horizon, which adds 1 to each slope.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import extra
from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL
from kc_otel.explain.budget import Backwards
from kc_otel.explain.chain import facts_on
from kc_otel.explain.clause_facts import Facts, sequence_bounds
from kc_otel.explain.explanation import Explanation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Curve", "curves", "draw", "horizons"]

FORMATS: Final = frozenset({".png", ".svg", ".pdf"})
_POINTS: Final = 121
_LARGEST_WITHOUT_ONE: Final = 8192
_STYLES: Final = {  # Okabe and Ito's palette, which all common kinds of colour vision tell apart, and a dash each
    "worst case": ("#D55E00", (0, (1, 1.2))),
    "log ratios": ("#CC79A7", (0, (5, 1.5, 1, 1.5))),
    "on policy": ("#0072B2", "solid"),
    "KL": ("#009E73", (0, (6, 2))),
    "measured": ("#000000", "solid"),
}


@dataclass(frozen=True, slots=True)
class Curve:
    """One bound on TV_seq over horizons.

    Attributes:
        family: Kind of statement: worst case, log ratios, on policy, KL, measured.
        clause: The clause whose limit it is of.
        tv: TV_seq at each horizon, at most 1.
    """

    family: str
    clause: str
    tv: NDArray[np.float64]


def horizons(horizon: int | None) -> NDArray[np.int64]:
    """Horizons to draw: from 1 token to eight times the contract's, evenly spaced on a logarithmic axis."""
    last = 8 * (horizon or _LARGEST_WITHOUT_ONE)
    return np.unique(np.geomspace(1, last, _POINTS).round().astype(np.int64))


def curves(contract: Contract, slice: str, at: NDArray[np.int64]) -> tuple[Curve, ...]:
    """The smallest bound of each family that a contract's clauses give on a slice, over horizons."""
    best: dict[str, Curve] = {}
    for clause in contract.clauses:
        for family, facts in _families(facts_on(contract, clause, slice)):
            tv = np.array([min(1.0, sequence_bounds(facts, int(steps))[0].value) for steps in at])
            if family not in best or tv.sum() < best[family].tv.sum():
                best[family] = Curve(family, clause.id, tv)
    return tuple(best[family] for family in _STYLES if family in best)


def draw(contract: Contract, explanation: Explanation, path: Path) -> None:
    """Draw the bounds of the first slice of an explanation to a file.

    Args:
        contract: The contract that was explained.
        explanation: What was explained: its horizon and budgets are marked.
        path: File to write: .png, .svg or .pdf.

    Raises:
        ValueError: If the suffix is none of these, or no clause bounds how far sequences are apart.
        ModuleNotFoundError: If Matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        msg = f"plot: {str(path)!r} is not a picture; end the name in {', '.join(sorted(FORMATS))}"
        raise ValueError(msg)
    slice = explanation.forwards[0].slice
    at = horizons(explanation.horizon)
    found = curves(contract, slice, at)
    if not found:
        msg = f"plot: no clause of {contract.name} bounds how far sequences are apart on {slice}; nothing to draw"
        raise ValueError(msg)
    figure_of, rc_context = _matplotlib()
    panels = _panels(contract, explanation)
    with rc_context({"font.size": 9, "svg.hashsalt": "kc-otel"}):
        figure = figure_of(figsize=(6.6 * len(panels) + 0.4, 4.6), layout="constrained")
        for index, panel in enumerate(panels):
            axes = figure.add_subplot(1, len(panels), index + 1)
            _draw_panel(axes, panel, found, at, explanation)
        where = "" if slice == ALL else f", slice {slice}"
        figure.suptitle(
            f"{contract.name}{where}: what the limits allow, by sequence length", x=0.01, ha="left", weight="bold"
        )
        # no time stamp, so that the same contract gives the same file
        metadata: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower(), {})
        figure.savefig(path, dpi=160, metadata=metadata)


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    label: str
    scale: Callable[[NDArray[np.int64]], NDArray[np.float64]]
    budget: Backwards | None


def _panels(contract: Contract, explanation: Explanation) -> Sequence[_Panel]:
    known = contract.assumptions
    budgets = {said.kind: said for said in explanation.backwards}
    panels = []
    if known.reward_range is not None:
        width = known.reward_range[1] - known.reward_range[0]
        title = f"Reward in [{known.reward_range[0]:g}, {known.reward_range[1]:g}]"
        label = "drift of the mean reward, at most"
        panels.append(_Panel(title, label, lambda at: np.full(at.shape, width), budgets.get("reward")))
    if known.advantage_max is not None and known.score_norm_max is not None:
        norm = 2.0 * known.advantage_max * known.score_norm_max
        title = f"Policy gradient, |A| <= {known.advantage_max:g}, score norm <= {known.score_norm_max:g} a token"
        panels.append(
            _Panel(title, "norm of the bias, at most", lambda at: norm * at.astype(np.float64), budgets.get("gradient"))
        )
    if not panels:
        panels.append(
            _Panel("Sequences", "total variation, at most", lambda at: np.ones(at.shape, dtype=np.float64), None)
        )
    return panels


def _families(facts: Facts) -> list[tuple[str, Facts]]:
    """The facts apart, one kind of statement each."""
    found = []
    if facts.sequence_tv is not None:
        found.append(("measured", Facts(sequence_tv=facts.sequence_tv)))
    if facts.mean_abs_log_ratio is not None:
        found.append(("log ratios", Facts(mean_abs_log_ratio=facts.mean_abs_log_ratio)))
    elif facts.mean_tv is not None and facts.every_tv is None:
        found.append(("on policy", Facts(mean_tv=facts.mean_tv)))
    if facts.mean_kl is not None:
        found.append(("KL", Facts(mean_kl=facts.mean_kl)))
    if facts.every_tv is not None:
        found.append(("worst case", Facts(every_tv=facts.every_tv)))
        if facts.every_kl is not None or facts.every_half_range is not None or facts.every_log_ratio is not None:
            every = Facts(
                every_kl=facts.every_kl,
                every_half_range=facts.every_half_range,
                every_log_ratio=facts.every_log_ratio,
            )
            found.append(("KL", every))
    return found


def _draw_panel(
    axes: Axes, panel: _Panel, found: Sequence[Curve], at: NDArray[np.int64], explanation: Explanation
) -> None:
    ceiling = panel.scale(at)
    axes.plot(at, ceiling, color="0.8", linewidth=6, solid_capstyle="butt", zorder=2.1)
    axes.annotate(
        "any two kernels",
        (at[0], ceiling[0]),
        (3, 9 if ceiling[0] == ceiling[-1] else 30),
        textcoords="offset points",
        color="0.45",
        va="bottom",
        ha="left",
    )
    labels = []
    for curve in found:
        colour, dash = _STYLES[curve.family]
        value = curve.tv * ceiling
        axes.plot(at, value, color=colour, linestyle=dash, linewidth=1.9, zorder=3)
        labels.append((curve, value, colour))
    lowest = min(float(value[value > 0].min()) for _, value, _ in labels if (value > 0).any()) if labels else 1e-9
    marks = [lowest]
    if panel.budget is not None:
        marks.append(panel.budget.budget)
        axes.axhline(panel.budget.budget, color="0.35", linewidth=0.9, linestyle=(0, (2, 2)), zorder=2)
        axes.annotate(
            f"budget {panel.budget.budget:.3g}" + (" (example)" if "example" in panel.budget.source else ""),
            (1.0, panel.budget.budget),
            (-3, 3),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            color="0.25",
            ha="right",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            zorder=4,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(float(at[0]), float(at[-1]))
    bottom, top = min(marks) / 3.0, float(ceiling.max()) * 4.0
    axes.set_ylim(bottom, top)
    _label_ends(axes, labels, bottom, top)
    if explanation.horizon is not None:
        axes.axvline(explanation.horizon, color="0.35", linewidth=0.9, linestyle=(0, (2, 2)), zorder=2)
        axes.annotate(
            f"T = {explanation.horizon:,}",
            (explanation.horizon, 0.0),
            (-3, 4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            color="0.25",
            ha="right",
        )
    axes.set_title(panel.title, loc="left", fontsize=9)
    axes.set_xlabel("sequence length, tokens")
    axes.set_ylabel(panel.label)
    axes.grid(which="major", color="0.93", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


_NAMES: Final = {
    "worst case": "worst case",
    "log ratios": "mean |l|",
    "on policy": "on policy",
    "KL": "KL + Pinsker",
    "measured": "measured",
}


def _label_ends(
    axes: Axes,
    lines: Sequence[tuple[Curve, NDArray[np.float64], str]],
    bottom: float,
    top: float,
) -> None:
    """Names at the right ends of lines, moved apart; lines that end on one spot share the room above each other."""
    gap, span = 0.062, np.log(top / bottom)
    wanted = [
        (float(np.log(max(float(value[-1]), bottom) / bottom) / span), curve, colour)
        for curve, value, colour in sorted(lines, key=lambda line: (float(line[1][-1]), float(line[1].sum())))
    ]
    places = [height for height, *_ in wanted]
    for index in range(len(places) - 2, -1, -1):  # from the top down, so that what is highest stays in place
        places[index] = min(places[index], places[index + 1] - gap)
    for (height, curve, colour), place in zip(wanted, places, strict=True):
        axes.annotate(
            f"{_NAMES[curve.family]}: {curve.clause}",
            (1.0, height),
            (1.03, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            color=colour,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "linewidth": 0.7,
                "shrinkA": 0,
                "shrinkB": 0,
                "relpos": (0.0, 0.5),
            },
        )


def _matplotlib() -> tuple[Callable[..., Any], Callable[..., Any]]:
    with extra("plots", "a plot"):
        from matplotlib import rc_context  # noqa: PLC0415 - only who draws needs it
        from matplotlib.figure import Figure  # noqa: PLC0415
    return Figure, rc_context
