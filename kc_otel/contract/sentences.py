"""Clauses in words: the sentences that panels, alerts and rules share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from kc_otel.contract.clause import About, Clause
from kc_otel.contract.model import Observability
from kc_otel.contract.registry import DERIVED, QUANTITIES, Unit
from kc_otel.contract.slices import ALL
from kc_otel.contract.units import format_duration
from kc_otel.contract.words import with_unit

__all__ = ["ABOUT", "assurances", "claim", "limitation", "promise", "scopes"]

ABOUT: Final[Mapping[About, str]] = MappingProxyType(
    {"population": "what the slice will show", "traffic": "what its window saw only"}
)
"""What a verdict is about -> that in words: the same words everywhere."""


def limitation(clause: Clause, slices: Sequence[str] = ()) -> str:
    """What must stay at or below which limit, without the full stop: `Mean of tv_token must not be above 0.004`.

    Args:
        clause: The clause.
        slices: Slices of the contract, in their order; those with a limit of their own are named.
    """
    limit = _limit(clause, ALL)
    own = [f"{_limit(clause, name)} on {name}" for name in slices if name in clause.slices]
    except_on = f" ({', '.join(own)})" if own else ""
    return f"{_statistic(clause)} {clause.metric_text} must not be above {limit}{except_on}"


def promise(clause: Clause, slices: Sequence[str] = ()) -> str:
    """The clause as sentences: what must stay at or below which limit, where it differs, what the metric is, and why.

    Args:
        clause: The clause.
        slices: Slices of the contract, in their order; those with a limit of their own are named.
    """
    sentences = [
        f"{limitation(clause, slices)}.",
        _meaning(clause),
        "Each sequence counts once, with the mean over its tokens." if clause.by_sequence else "",
        claim(clause),
        clause.description.strip(),
    ]
    return " ".join(" ".join(sentence.split()) for sentence in sentences if sentence)


def claim(clause: Clause) -> str:
    """What a verdict on a clause is about, as a sentence."""
    quantity = clause.quantity
    tokens = clause.parsed_statistic.kind != "max" and quantity is not None and quantity.per is Unit.TOKEN
    more = "; tokens to come may differ by more than its confidence says" if tokens else ""
    return f"A verdict is about the {clause.about}: {ABOUT[clause.about]}{more}."


def scopes(abouts: Mapping[str, About]) -> list[str]:
    """What verdicts are about and on which clauses, a line each: `about the population, what the slice will show: tv`.

    Args:
        abouts: What the verdicts on each clause are about, by the clause's id, in the order to name them in.
    """
    return [
        f"about the {about}, {says}: {', '.join(ids)}"
        for about, says in ABOUT.items()
        if (ids := [clause for clause, of in abouts.items() if of == about])
    ]


def assurances(seen: Observability) -> tuple[str, str]:
    """What verdicts claim, as sentences: an interval and a PASS by `confidence`, a FAIL by `false_alarms`."""
    sure = (
        "At one evaluation and for one cell, the chance that a window's interval holds the truth, and that a PASS is "
        f"right, is at least {100.0 * seen.confidence:.10g} %."
    )
    apart = (
        "The expected time between false alarms, FAILs of what keeps its limit, is at least "
        f"{format_duration(seen.false_alarms)} for all cells of the contract together."
    )
    return sure, apart


def _limit(clause: Clause, slice: str) -> str:
    """Four digits and the unit: `0.004`, `0.15 nat`, `0.8 s`."""
    return with_unit(f"{clause.limit_for(slice):.4g}", clause.limit_unit)


def _statistic(clause: Clause) -> str:
    """What is limited, to be read before the metric's name: `Mean of`, `99.9th percentile of`."""
    parsed = clause.parsed_statistic
    return {
        "mean": "Mean of",
        "max": "Largest",
        "quantile": f"{parsed.argument * 100:.6g}th percentile of",
        "fraction": f"Share above {parsed.argument:g} of",
    }[parsed.kind]


def _meaning(clause: Clause) -> str:
    """What the clause's metric is, from the registry."""
    known = QUANTITIES.get(clause.metric) or DERIVED.get(clause.metric)
    return known.meaning if known else f"The OpenTelemetry histogram {clause.metric}."
