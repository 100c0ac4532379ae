"""The page's pictures, the same bytes from the same numbers. Colours are Okabe and Ito's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from PIL import Image

from examples.real_model.figures import ALL
from examples.real_model.kernels import PAIRS
from examples.real_model.prompts import SLICES
from kc_otel import load_contract

BLACK, GREY, BLUE, GREEN, ORANGE, RED = "#000000", "#777777", "#0072B2", "#009E73", "#E69F00", "#D55E00"
PINK, SKY = "#CC79A7", "#56B4E9"
STYLE: Final = {
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
NOT_DRAWN: Final = 1e-4
"""Token TV below which a pair would press all others together."""
LIMIT: Final = load_contract(Path(__file__).with_name("grpo.yaml")).clauses[0].limit_for("all")
OF_SLICE: Final = dict(zip(SLICES, (BLUE, ORANGE, GREY, RED, GREEN, PINK), strict=True))
OF_PAIR: Final = {
    "llama-q4_1": ORANGE, "vllm-bf16": BLUE, "hf-bf16": SKY, "vllm-w8a8": GREEN, "vllm-fp8-kv": RED,
    "vllm-awq": PINK, "vllm-gptq": GREY, "both-bf16": BLACK,
}  # fmt: skip
_BOUNDS: Final = (
    ("half_range", "worst half range", GREY, ":"),
    ("sum_of_token_tv", "sum of token TV", ORANGE, "-"),
    ("coupling", "coupling", GREEN, "-"),
    ("kl_over_steps", "KL over steps", BLUE, "-"),
    ("sequence_tv", "TV of sequences", BLACK, "-"),
)
Figures = Mapping[str, Any]


def draw(found: Figures, runs: Figures, folder: Path) -> list[Path]:
    """Draw what there are numbers for; returns the files."""
    with mpl.rc_context(STYLE):
        drawn = {"slices": by_slice(found), "chain": chains(found), "where": where(found)}
        if runs:
            drawn["rl"] = training(runs)
        return [save(figure, folder / f"real-model-{name}.png") for name, figure in drawn.items()]


def by_slice(found: Figures) -> Figure:
    """Token TV of each pair, one dot for each kind of text, a bar for the average that hides them."""
    names = sorted(found, key=lambda name: found[name]["slices"][ALL]["token_tv_exact"])
    equal = [name for name in names if found[name]["slices"][ALL]["token_tv_exact"] < NOT_DRAWN]
    names = [name for name in names if name not in equal]
    figure = Figure(figsize=(10.0, 0.5 * len(names) + 1.3), layout="constrained")
    axes = figure.subplots()
    for row, name in enumerate(names):
        slices = found[name]["slices"]
        values = {kind: slices[kind]["token_tv_exact"] for kind in SLICES if kind in slices}
        axes.plot([min(values.values()), max(values.values())], [row, row], color="#dddddd", lw=7, zorder=1)
        for slice, value in values.items():
            axes.plot(value, row, "o", color=OF_SLICE[slice], ms=8, zorder=3, mec="white", mew=0.7)
        mean = slices[ALL]["token_tv_exact"]
        axes.plot([mean, mean], [row - 0.32, row + 0.32], color=BLACK, lw=2, zorder=2)
        axes.text(max(values.values()) * 1.12, row, f"{mean:.2g}", va="center", color=BLACK)
    axes.set(xscale="log", ylim=(-0.6, len(names) - 0.4))
    decimals(axes.xaxis)
    axes.set_yticks(range(len(names)), [PAIRS[name].title for name in names])
    axes.set_xlabel("total variation of the next token against the training kernel, from full logits")
    axes.set_title("Kernels differ by kind of text: dots are slices, the bar is the average")
    for row, name in enumerate(equal):
        said = f"far to the left: {PAIRS[name].title}, {found[name]['slices'][ALL]['token_tv_exact']:.2g}"
        axes.text(0.99, 0.04 + 0.08 * row, said, transform=axes.transAxes, ha="right", color=GREY)
    for kind in SLICES:
        axes.plot([], [], "o", color=OF_SLICE[kind], label=kind)
    axes.legend(ncols=len(SLICES), loc="upper center", bbox_to_anchor=(0.5, -0.55 / len(names) - 0.1), frameon=False)
    axes.grid(axis="y", visible=False)
    return figure


def chains(found: Figures) -> Figure:
    """Every bound of the chain beside the truth, over the horizon."""
    shown = [name for name in ("vllm-bf16", "llama-q4_1", "vllm-fp8-kv") if name in found]
    figure = Figure(figsize=(10.0, 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(shown), sharey=True, squeeze=False)[0], shown, strict=True):
        points = found[name]["chain"]
        at = [point["horizon"] for point in points]
        for key, label, colour, style in _BOUNDS:
            values = [point[key] for point in points]
            axes.plot(at, values, color=colour, ls=style, marker="o", ms=3, lw=2 if key == "sequence_tv" else 1.5,
                      label=label)  # fmt: skip
        axes.set(xscale="log", ylim=(0, 1.03), xlabel="tokens")
        axes.set_xticks(at, [str(place) for place in at])
        axes.minorticks_off()
        axes.set_title(PAIRS[name].title)
    figure.axes[0].set_ylabel("total variation")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), ncols=len(_BOUNDS), loc="outside lower center",
                  frameon=False)  # fmt: skip
    return figure


def where(found: Figures) -> Figure:
    """Token TV over the place in the answer, and over the inference kernel's entropy."""
    figure = Figure(figsize=(10.0, 3.6), layout="constrained")
    place, entropy = figure.subplots(1, 2, sharey=True)
    for name, colour in OF_PAIR.items():
        if name in found:
            _line(place, found[name]["position"], colour, name)
            _line(entropy, found[name]["entropy"], colour, name)
    place.set(yscale="log", ylabel="token TV")
    decimals(place.yaxis)
    place.set_title("by place in the answer")
    entropy.set_title("by entropy of the next token, nats")
    figure.legend(*place.get_legend_handles_labels(), ncols=4, loc="outside lower center", frameon=False)
    return figure


def _line(axes: Axes, bins: list[Figures], colour: str, name: str) -> None:
    labels = [f"{part['from']:g}+" for part in bins]
    axes.plot(range(len(bins)), [part["tv"] for part in bins], color=colour, marker="o", ms=3, label=PAIRS[name].title)
    axes.set_xticks(range(len(bins)), labels)


def training(runs: Figures) -> Figure:
    """Rewards with and without correction, and the drift of the runs that a fault was put into."""
    figure = Figure(figsize=(10.0, 3.6), layout="constrained")
    reward, drift = figure.subplots(1, 2)
    for name, colour in (("uncorrected", ORANGE), ("corrected", BLUE)):
        if name in runs:
            steps = runs[name]["steps"]
            reward.plot([step["step"] for step in steps], [step["reward"] for step in steps], color=colour, label=name)
    reward.set(xlabel="step", ylabel="mean reward")
    reward.set_title("GRPO, rollouts with an fp8 KV cache")
    reward.legend(frameon=False)
    for name, colour in (("stale", ORANGE), ("rope", RED), ("fp8", BLUE)):
        if name not in runs:
            continue
        steps = [step for step in runs[name]["steps"] if step.get("estimate") is not None]
        drift.plot([step["step"] for step in steps], [step["estimate"] for step in steps], color=colour, label=name)
        for step in steps:
            failed = step["status"] == "FAIL"
            drift.plot(step["step"], step["estimate"], "X" if failed else "o", color=colour, ms=8 if failed else 5)
    if any(name in runs for name in ("stale", "rope", "fp8")):
        drift.axvline(next(run["fault_at"] for run in runs.values() if run["fault"]) - 0.5, color=BLACK, ls="--", lw=1)
    drift.axhline(LIMIT, color=GREY, lw=1)
    drift.text(0, LIMIT * 1.08, "limit", color=GREY)
    drift.set(yscale="log", xlabel="step", ylabel="token TV of the window")
    drift.xaxis.set_major_locator(MaxNLocator(integer=True))
    decimals(drift.yaxis)
    drift.set_title("A fault from the dashed line on; X is FAIL")
    drift.legend(frameon=False)
    return figure


def decimals(axis: Axis) -> None:
    """Label a logarithmic axis at 1, 2 and 5 of each decade, without powers of ten."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def save(figure: Figure, path: Path) -> Path:
    """A PNG with a palette: a third of the size, and no date in it."""
    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(105)
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    image.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    return path
