"""`kc-otel gate --plan`: what a gate needs before it can open at all, with kernels that are identical."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import typer

from kc_otel.contract.errors import ContractError
from kc_otel.contract.load import load
from kc_otel.contract.slices import ALL
from kc_otel.judge.promotion.plan import Planned, Traffic, plan_gate, shares_of, spoken

__all__ = ["print_plan"]


def print_plan(
    path: str,
    *,
    windows: int,
    tokens_per_second: float | None,
    sampling: float | None,
    tokens_per_sequence: float | None,
    shares: Sequence[str],
) -> int:
    """Print the plan of a contract; 0 when the gate can open, 2 when it never can or something cannot be used."""
    try:
        contract = load(path)
        traffic = Traffic(
            tokens_per_second,
            sampling or contract.observability.sampling,
            tokens_per_sequence or contract.assumptions.horizon,
            {ALL: 1.0} | shares_of(contract, shares),
        )
    except ContractError as error:
        for problem in error.problems:
            typer.echo(str(problem), err=True)
        return 2
    except ValueError as error:
        typer.echo(str(error), err=True)
        return 2
    planned = plan_gate(contract, traffic, windows)
    _print_rows(planned, windows)
    return _conclude(planned, traffic)


def _print_rows(planned: Sequence[Planned], windows: int) -> None:
    typer.echo(f"at best, with identical kernels and {windows} window{'s' * (windows != 1)}:")
    heads = ("clause", "slice", "observations", "time")
    rows = [heads, *((each.clause, each.slice, _count(each), _time(each)) for each in planned)]
    widths = [max(len(row[at]) for row in rows) for at in range(3)]
    for row in rows:
        typer.echo(
            "  " + "  ".join((*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3])).rstrip()
        )


def _conclude(planned: Sequence[Planned], traffic: Traffic) -> int:
    never = [each for each in planned if each.never]
    for each in never:
        print(f"{each.clause} on {each.slice} can never pass: {each.why}", file=sys.stderr)
    if never:
        return 2
    for why in dict.fromkeys(each.why for each in planned if each.why):
        typer.echo(f"no time: {why}")
    timed = [each for each in planned if each.seconds is not None]
    if timed:
        last = max(timed, key=lambda each: each.seconds or 0.0)
        typer.echo(
            f"at {100 * traffic.sampling:g}% sampling this gate needs about {spoken(last.seconds or 0.0)}; "
            f"{last.clause} on {last.slice} takes longest"
        )
    return 0


def _count(each: Planned) -> str:
    if each.observations is None:
        return "never"
    return f"{each.observations:,} {each.unit}{'s' * (each.observations != 1)}"


def _time(each: Planned) -> str:
    if each.seconds is None:
        return "-"
    return "never" if each.seconds == math.inf else f"about {spoken(each.seconds)}"
