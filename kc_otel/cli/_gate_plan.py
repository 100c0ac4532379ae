"""`kc-otel gate --plan`: what a gate needs before it can open at all, with kernels that are identical."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import typer

from kc_otel.contract.errors import ContractError
from kc_otel.contract.load import load
from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL
from kc_otel.explain.samples import observations_to_pass

__all__ = ["Planned", "Traffic", "plan_gate", "print_plan", "spoken"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a gate will see.

    Attributes:
        tokens_per_second: Tokens that the inference kernel generates; None when unknown.
        sampling: Share of them that is measured.
        tokens_per_sequence: Tokens of a sequence; None when unknown.
        shares: Part of the traffic in a slice, by its name; a slice that is not named has no known time.
    """

    tokens_per_second: float | None
    sampling: float
    tokens_per_sequence: float | None
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Planned:
    """What one cell of a gate needs at best.

    Attributes:
        clause: Its id.
        slice: The slice.
        observations: Fewest observations per window; None when no number lets the clause pass.
        unit: What an observation is.
        seconds: Until the gate's last window can pass; None when it cannot be told, inf when never.
        why: Why it can never pass, or why the time cannot be told; empty otherwise.
    """

    clause: str
    slice: str
    observations: int | None
    unit: str
    seconds: float | None
    why: str

    @property
    def never(self) -> bool:
        """Whether the gate can never open because of this cell."""
        return self.observations is None or self.seconds == math.inf


def plan_gate(contract: Contract, traffic: Traffic, windows: int) -> tuple[Planned, ...]:
    """What each clause needs on each slice.

    A clause has to pass in `windows` windows that share no data. It may do so on the short window, or on the long one,
    which then has to pass in between: the first takes as long as its observations, each further one a whole window.

    Args:
        contract: The contract.
        traffic: What the gate will see.
        windows: Consecutive windows that have to pass.
    """
    found = []
    for clause in contract.clauses:
        for slice in (ALL, *contract.slices):
            needed = observations_to_pass(contract, clause, slice)
            count = None if needed.observations is None else max(needed.observations, needed.minimum)
            if count is None:
                why = "not even identical kernels can show that this limit is kept; loosen it"
                found.append(Planned(clause.id, slice, None, needed.unit, math.inf, why))
                continue
            rate, why = _rate(traffic, slice, needed.unit)
            seconds = None if rate is None else _seconds(contract, count / rate, windows)
            if seconds == math.inf:
                assert rate is not None
                why = (
                    f"{count / rate:.3g} s of traffic do not fit into the long window of "
                    f"{contract.observability.long_window:g} s; sample more, or lengthen it"
                )
            found.append(Planned(clause.id, slice, count, needed.unit, seconds, why))
    return tuple(found)


def spoken(seconds: float) -> str:
    """A time for people, in the largest unit of which there are two or more.

    >>> spoken(2400.0)
    '40 minutes'
    """
    for unit, length in (("day", 86400.0), ("hour", 3600.0), ("minute", 60.0)):
        if seconds >= 2 * length:
            number = seconds / length
            return f"{number:.0f} {unit}s" if number >= 10 else f"{number:.2g} {unit}s"
    number = math.ceil(seconds)
    return f"{number} second{'s' * (number != 1)}"


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
            {ALL: 1.0} | _shares(contract, shares),
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


def _rate(traffic: Traffic, slice: str, unit: str) -> tuple[float | None, str]:
    """Observations per second, or why that cannot be told."""
    if unit not in {"token", "sequence"}:
        return None, f"what comes once per {unit} does not follow from the tokens"
    if traffic.tokens_per_second is None:
        return None, "give --tokens-per-second"
    if slice not in traffic.shares:
        return None, f"give --share {slice}=PART of the traffic"
    tokens = traffic.tokens_per_second * traffic.sampling * traffic.shares[slice]
    if unit == "token":
        return tokens, ""
    if traffic.tokens_per_sequence is None:
        return None, "give --tokens-per-sequence"
    return tokens / traffic.tokens_per_sequence, ""


def _seconds(contract: Contract, first: float, windows: int) -> float:
    watched = contract.observability
    for window in (watched.window, watched.long_window):
        if first <= window:
            return first + (windows - 1) * window
    return math.inf


def _count(each: Planned) -> str:
    if each.observations is None:
        return "never"
    return f"{each.observations:,} {each.unit}{'s' * (each.observations != 1)}"


def _time(each: Planned) -> str:
    if each.seconds is None:
        return "-"
    return "never" if each.seconds == math.inf else f"about {spoken(each.seconds)}"


def _shares(contract: Contract, texts: Sequence[str]) -> dict[str, float]:
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in contract.slices:
            raise ValueError(
                f"--share: the contract has no slice {name!r}; there are {', '.join(contract.slices) or 'none'}"
            )
        try:
            share = float(value)
        except ValueError:
            share = math.nan
        if not 0.0 < share <= 1.0:
            raise ValueError(f"--share: {value!r} is not a part of the traffic; write {name}=0.1 for a tenth")
        found[name] = share
    return found
