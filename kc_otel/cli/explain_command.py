"""`kc-otel explain`: what a contract's limits promise, forwards and backwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kc_otel.cli.terminal import PrintJson, unusable
from kc_otel.contract.load import load

if TYPE_CHECKING:
    from kc_otel.explain.explanation import Explanation

__all__ = ["register"]

_STYLES: Final = {
    "title": "bold",
    "heading": "bold cyan",
    "clause": "bold",
    "plain": "",
    "quiet": "dim",
    "best": "bold green",
}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("explain")(explain_contract)


def explain_contract(
    contract: Annotated[str, typer.Argument(metavar="CONTRACT", help="A contract, or - .")],
    slice: Annotated[
        str | None, typer.Option("--slice", metavar="NAME", help="Only this slice's limits; `all` for all traffic.")
    ] = None,
    horizon: Annotated[
        int | None, typer.Option("--horizon", min=1, metavar="TOKENS", help="Instead of assumptions.horizon.")
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option("--budget", min=0.0, metavar="DRIFT", help="Reward drift to work backwards from."),
    ] = None,
    gradient_budget: Annotated[
        float | None,
        typer.Option("--gradient-budget", min=0.0, metavar="NORM", help="Gradient bias to work backwards from."),
    ] = None,
    as_json: PrintJson = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw how each bound grows with the horizon: .png, .svg or .pdf."),
    ] = None,
) -> None:
    """Say what a contract's limits guarantee about reward and gradient, what a budget needs, and which clause binds."""
    from kc_otel.explain import explain  # noqa: PLC0415 - a quick --help

    with unusable(ModuleNotFoundError):
        loaded = load(contract)
        explanation = explain(
            loaded, slice=slice, horizon=horizon, reward_budget=budget, gradient_budget=gradient_budget
        )
        if plot is not None:
            from kc_otel.explain.horizon_plot import draw  # noqa: PLC0415

            draw(loaded, explanation, plot)
    if as_json:
        from kc_otel.explain.explanation import as_json as data  # noqa: PLC0415

        typer.echo(json.dumps(data(explanation), indent=2))
    else:
        _print(explanation)
    if plot is not None:
        typer.echo(f"drawn to {plot}", err=True)


def _print(explanation: Explanation) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from kc_otel.explain.explanation_text import lines  # noqa: PLC0415

    console = Console(highlight=False, soft_wrap=True)
    for line in lines(explanation):
        console.print(Text(line.text, style=_STYLES[line.style]))
