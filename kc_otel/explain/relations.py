"""How the clauses of a contract stand to each other: which disagree, which imply which, which can never fail.

A contract has only upper limits, and two identical kernels keep all of them: clauses cannot contradict each other in
the strict sense. What is called a disagreement here are two limits for one and the same number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.regions import covers
from kc_otel.contract.registry import QUANTITIES
from kc_otel.contract.slices import ALL
from kc_otel.explain.implications import Implied, Proviso, bound_on, never_exceeded
from kc_otel.explain.promise import Promise, promise_of
from kc_otel.explain.purpose import outcome_attributes
from kc_otel.judge.sample_sizes import Needed, observations_to_pass, rounded

__all__ = ["CONDITIONS", "Relation", "RelationKind", "relations"]

RelationKind = Literal["disagree", "implied", "nearly implied", "never fails", "idle slice limit", "slow"]

CONDITIONS: Final[dict[Proviso, str]] = {
    "traffic": "of the traffic itself; on few samples either may be decided first",
    "support": "P << Q",
    "same tokens": "where both are measured on the same tokens",
    "horizon": "for sequences of at most the horizon",
    "prefixes": "logits compared on the inference kernel's own prefixes",
}
_NEAR: Final = 1.05
"""A limit that another clause keeps to within this factor adds nothing that anybody would notice."""
_ROUNDING: Final = 1.0 + 1e-9


@dataclass(frozen=True, slots=True)
class Relation:
    """Something about clauses that a reader may want to change.

    Attributes:
        kind: What it is.
        clauses: Ids, the one that it is about first.
        slices: Slices on which it is so.
        sentence: What is so, and why.
        conditions: What the statement takes beyond arithmetic.
        suggestion: What to do about it; doing nothing may be right.
    """

    kind: RelationKind
    clauses: tuple[str, ...]
    slices: tuple[str, ...]
    sentence: str
    conditions: tuple[Proviso, ...]
    suggestion: str


def relations(contract: Contract, horizon: int | None) -> tuple[Relation, ...]:
    """Every relation between a contract's clauses, and every clause that can never fail or hardly ever pass.

    Args:
        contract: The contract.
        horizon: T, for what follows for sequences from tokens.
    """
    slices = (ALL, *contract.slices)
    found: list[Relation] = []
    for index, clause in enumerate(contract.clauses):
        found += _vacuous(contract, clause, slices)
        found += _idle(contract, clause)
        found += _slow(contract, clause, slices)
        for other_index, other in enumerate(contract.clauses):
            if other_index != index:
                found += _pair(contract, clause, other, horizon, slices, first=other_index < index)
    order = ("disagree", "never fails", "implied", "nearly implied", "idle slice limit", "slow")
    return tuple(sorted(found, key=lambda relation: order.index(relation.kind)))


def _pair(
    contract: Contract, clause: Clause, other: Clause, horizon: int | None, slices: Sequence[str], *, first: bool
) -> Iterable[Relation]:
    """Whether `other` being kept keeps `clause`; for one number, which of two limits counts."""
    mine, theirs = ([promise_of(one, name, contract.assumptions) for name in slices] for one in (clause, other))
    if _one_number(mine[0], theirs[0]):
        if first:  # once for a pair
            yield from _disagreement(clause, other, mine, theirs, slices)
        return
    implied: dict[str, Implied] = {}
    for name, own, known in zip(slices, mine, theirs, strict=True):
        said = bound_on(known, own, horizon)
        if said is None or said.value > own.limit * _NEAR:
            continue
        if "traffic" in said.conditions and outcome_attributes(contract, name):
            continue
        implied[name] = said
    if set(implied) != set(slices) and (ALL not in implied or not _only_outcomes(contract, implied)):
        return
    worst = max(implied, key=lambda name: implied[name].value / max(clause.limit_for(name), 1e-300))
    said, limit = implied[worst], promise_of(clause, worst, contract.assumptions).limit
    kind: RelationKind = "implied" if said.value <= limit * _ROUNDING else "nearly implied"
    where = f" on {worst}" if worst != ALL else ""
    is_ = f"{_statistic(other)} <= {other.limit_for(worst):.4g} keeps {_statistic(clause)} at or below"
    scale = clause.limit_for(worst) / limit if limit else 1.0
    value = said.value * scale
    margin = (
        f"{value:.4g}, and the limit is {clause.limit_for(worst):.4g}"
        if kind == "implied"
        else f"{value:.4g}, {100 * (said.value / limit - 1):.1g} % above the limit of {clause.limit_for(worst):.4g}"
    )
    suggestion = _about_implied(contract, clause, other, worst, value, said)
    yield Relation(
        kind,
        (clause.id, other.id),
        tuple(name for name in slices if name in implied),
        f"{is_} {margin}{where} ({said.by})",
        tuple(sorted(said.conditions)),
        suggestion,
    )


def _about_implied(contract: Contract, clause: Clause, other: Clause, slice: str, value: float, said: Implied) -> str:
    """What to do about a clause that another one implies."""
    if promise_of(clause, slice, contract.assumptions).metric == "tv_seq":
        return f"keep {clause.id}: it measures what {other.id} only guarantees, and still stands when {other.id} fails"
    if other.parsed_statistic.kind == "max" and clause.parsed_statistic.kind != "max":
        return f"keep {clause.id}: {other.id} speaks of what was observed, {clause.id} of what was not, too"
    own, known = (observations_to_pass(contract, one, slice) for one in (clause, other))
    counts = own.observations, known.observations
    if own.unit == known.unit and counts[0] is not None and counts[0] < (counts[1] or math.inf):
        than = f"{counts[1]:,}" if counts[1] is not None else "never"
        return f"keep {clause.id} because it is decided sooner: from {counts[0]:,} {own.unit}s on, {other.id} {than}"
    if "traffic" in said.conditions:
        return f"keep {clause.id} only for what its own number tells people"
    return f"drop {clause.id}, or tighten it below {value:.3g}"


def _only_outcomes(contract: Contract, implied: dict[str, Implied]) -> bool:
    """Whether the slices left out are those that the sampled sequences themselves choose."""
    return all(name in implied or outcome_attributes(contract, name) for name in contract.slices)


def _one_number(one: Promise, other: Promise) -> bool:
    key = (one.metric, one.kind, one.argument, one.by_sequence)
    return key == (other.metric, other.kind, other.argument, other.by_sequence)


def _disagreement(
    clause: Clause, other: Clause, mine: Sequence[Promise], theirs: Sequence[Promise], slices: Sequence[str]
) -> Iterable[Relation]:
    differing = [
        (name, own.limit, known.limit)
        for name, own, known in zip(slices, mine, theirs, strict=True)
        if not 1.0 / _ROUNDING <= own.limit / max(known.limit, 1e-300) <= _ROUNDING
    ]
    ids = (clause.id, other.id)
    number = f"{mine[0].kind} of {mine[0].metric}"
    if not differing:
        sentence = f"both limit one number, the {number}, at the same value"
        yield Relation("implied", ids, tuple(slices), sentence, (), "keep one of them")
        return
    name, own, known = differing[0]
    looser, tighter = ids if own > known else ids[::-1]
    low, high = sorted((own, known))
    where = f" on {name}" if name != ALL else ""
    sentence = (
        f"both limit one number, the {number}: {tighter} at {low:.4g} and {looser} at {high:.4g}{where}, "
        f"so that {looser} can only fail once {tighter} has"
    )
    suggestion = f"keep {tighter}, or raise it if {looser} is what was meant"
    yield Relation("disagree", ids, tuple(name for name, _, _ in differing), sentence, (), suggestion)


def _vacuous(contract: Contract, clause: Clause, slices: Sequence[str]) -> Iterable[Relation]:
    reasons = {
        name: reason
        for name in slices
        if not outcome_attributes(contract, name)
        and (reason := never_exceeded(promise_of(clause, name, contract.assumptions)))
    }
    if ALL in reasons:
        yield Relation(
            "never fails",
            (clause.id,),
            tuple(reasons),
            f"{_statistic(clause)} <= {clause.limit_for(ALL):.4g} cannot be broken by any kernel: {reasons[ALL]}",
            ("traffic",),
            "lower the limit, or limit tv_token, k3 or abs_log_ratio instead",
        )


def _idle(contract: Contract, clause: Clause) -> Iterable[Relation]:
    """A slice's limit that is looser than that of traffic which contains the slice."""
    statistic = clause.parsed_statistic
    quantity = QUANTITIES.get(clause.metric)
    additive = statistic.kind == "fraction" or (statistic.kind == "mean" and (quantity is None or quantity.low >= 0.0))
    if clause.metric in {"k1", "support_deficit"}:
        additive = False
    for name in clause.slices:
        wider = [ALL] + [
            other
            for other, spec in contract.slices.items()
            if other != name and covers(spec.conditions, contract.slices[name].conditions)
        ]
        for wide in wider:
            limit, own = clause.limit_for(wide), clause.limit_for(name)
            if own <= limit:
                continue
            what = "all traffic" if wide == ALL else wide
            if statistic.kind == "max":
                sentence = f"{clause.id} allows {own:.4g} on {name}, but no token of {what} may exceed {limit:.4g}"
                suggestion = f"raise the limit of {what}, or drop that of {name}"
                yield Relation("idle slice limit", (clause.id,), (name,), sentence, (), suggestion)
            elif additive and not clause.by_sequence and limit > 0.0:
                sentence = (
                    f"{clause.id} allows {own:.4g} on {name} and {limit:.4g} on {what}: from {100 * limit / own:.3g} % "
                    f"of the {what if wide != ALL else 'traffic'} on, {name} cannot use its own limit without {what} "
                    "failing"
                )
                suggestion = f"right while {name} is a smaller share than that; else raise the limit of {what}"
                yield Relation("idle slice limit", (clause.id,), (name,), sentence, (), suggestion)


def _slow(contract: Contract, clause: Clause, slices: Sequence[str]) -> Iterable[Relation]:
    needed = [observations_to_pass(contract, clause, name) for name in slices]
    hardest = max(needed, key=lambda one: float("inf") if one.observations is None else one.observations)
    if not hardest.minimum_name or (hardest.observations is not None and hardest.observations <= hardest.minimum):
        return
    yield Relation(
        "slow",
        (clause.id,),
        tuple(one.slice for one in needed if one.observations is None or one.observations > one.minimum),
        _slow_sentence(contract, clause, hardest),
        (),
        _slow_suggestion(clause, hardest),
    )


def _slow_sentence(contract: Contract, clause: Clause, needed: Needed) -> str:
    where = f" on {needed.slice}" if needed.slice != ALL else ""
    limit, confidence = clause.limit_for(needed.slice), contract.observability.confidence
    if needed.observations is None:
        return f"{clause.id} <= {limit:.4g}{where} cannot PASS at confidence {confidence:g}, however many samples come"
    return (
        f"{clause.id} <= {limit:.4g}{where} cannot PASS below {needed.observations:,} {needed.unit}s at confidence "
        f"{confidence:g}, even from identical kernels; {needed.minimum_name} is {needed.minimum:,}"
    )


def _slow_suggestion(clause: Clause, needed: Needed) -> str:
    if needed.observations is None:
        return "raise the limit, or lower the confidence"
    capped = clause.quantity is not None and clause.quantity.cap < clause.quantity.high
    cap = ", or write a smaller cap" if capped and clause.parsed_statistic.kind == "mean" else ""
    return f"have windows of {rounded(needed.observations):,} {needed.unit}s and more, or raise the limit{cap}"


def _statistic(clause: Clause) -> str:
    return f"{clause.id} ({clause.statistic_text} of {clause.metric_text})"
