"""Problems of clauses: impossible limits, unknown names, samples that never suffice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.errors import LintFinding, Loc
from kc_otel.contract.limits import Range, range_of
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import DERIVED, QUANTITIES, Origin, Unit
from kc_otel.contract.slices import ALL
from kc_otel.contract.words import did_you_mean, listed

_SECTIONS: Final = ("numerical", "statistical", "runtime")
_SECTION_OF: Final = {
    Origin.LOGITS: "numerical",
    Origin.OPERATORS: "numerical",
    Origin.LOGPROBS: "statistical",
    Origin.ADVANTAGES: "statistical",
    Origin.TRUNCATION: "statistical",
    Origin.REWARDS: "statistical",
    Origin.RUNTIME: "runtime",
}
_EXAMPLE: Final = {
    "reward_range": "[0, 1]",
    "horizon": "4096",
    "advantage_max": "5",
    "score_norm_max": "40",
    "clip": "0.2",
}


def lint_clauses(contract: Contract) -> Iterator[LintFinding]:
    """Everything about clauses that no field of theirs can say on its own."""
    if not contract.clauses:
        yield LintFinding((), "the contract has no clause; add one under numerical, statistical or runtime")
    ids: dict[str, str] = {}
    for section in _SECTIONS:
        for index, clause in enumerate(getattr(contract, section)):
            here: Loc = (section, index)
            if clause.id in ids:
                yield LintFinding((*here, "id"), f"{clause.id!r} is already the id of {ids[clause.id]}; choose another")
            ids.setdefault(clause.id, f"{section}[{index}]")
            yield from _section(clause, section, here)
            yield from _references(contract, clause, here)
            yield from _cap(clause, here)
            impossible = list(_limits(contract, clause, here))
            yield from impossible or _tail(contract, clause, here)
            yield from _samples(contract, clause, here)
            yield from _population(contract, clause, here)
            yield from _beyond_gradient(contract, clause, here)


def _section(clause: Clause, section: str, here: Loc) -> Iterator[LintFinding]:
    source = QUANTITIES[clause.metric].source if clause.metric in QUANTITIES else None
    home = _SECTION_OF[source] if source else "statistical" if clause.metric in DERIVED else "runtime"
    if home != section:
        why = (
            f"is measured from {source}"
            if source
            else "is a bound"
            if clause.metric in DERIVED
            else "is a runtime metric"
        )
        yield LintFinding((*here, "metric"), f"{clause.metric} {why}; move the clause to {home}")


def _references(contract: Contract, clause: Clause, here: Loc) -> Iterator[LintFinding]:
    for name in clause.slices:
        if name == ALL:
            yield LintFinding((*here, "slices", name), "'all' takes the clause's own limit; set limit instead")
        elif name not in contract.slices:
            yield LintFinding(
                (*here, "slices", name), f"no slice is named {name!r}; {did_you_mean(name, contract.slices)}"
            )
        elif name not in contract.slices_for(clause):
            yield LintFinding(
                (*here, "slices", name),
                f"{name!r} selects tokens by their position, but {clause.metric} is not about tokens; leave it out",
            )
    if clause.metric in DERIVED:
        for name in DERIVED[clause.metric].needs:
            if getattr(contract.assumptions, name) is None:
                yield LintFinding(
                    (*here, "metric"),
                    f"{clause.metric} needs assumptions.{name}; write `assumptions: {{{name}: {_EXAMPLE[name]}}}` "
                    "with your own value",
                )


def _cap(clause: Clause, here: Loc) -> Iterator[LintFinding]:
    if clause.cap is None:
        return
    if clause.parsed_statistic.kind != "mean":
        yield LintFinding((*here, "cap"), "only a mean takes a cap; remove it")
    elif clause.quantity is not None and clause.quantity.two_valued:
        yield LintFinding((*here, "cap"), f"{clause.metric} takes only two values, so its mean needs no cap; remove it")
    elif clause.metric == "support_deficit" and clause.cap <= 1:
        yield LintFinding(
            (*here, "cap"),
            "the mean ratio without a deficit is 1, and cannot be 1 with ratios capped there; write a number above 1",
        )


def _limits(contract: Contract, clause: Clause, here: Loc) -> Iterator[LintFinding]:
    quantity, statistic = QUANTITIES.get(clause.metric), clause.parsed_statistic
    if quantity and statistic.kind == "fraction" and not quantity.low <= statistic.argument < quantity.high:
        never = "always" if statistic.argument < quantity.low else "never"
        yield LintFinding(
            (*here, "statistic"),
            f"{clause.metric} is {never} above {statistic.argument:g}; "
            f"write a threshold within {quantity.low:g}..{quantity.high:g}",
        )
        return
    possible = range_of(clause, contract.assumptions)
    if possible is None:
        return
    places: list[tuple[Loc, str]] = [((*here, "limit"), ALL)]
    places += [((*here, "slices", name), name) for name in clause.slices if name != ALL]
    for loc, name in places:
        yield from _limit(clause, clause.limit_for(name), possible, loc)


def _limit(clause: Clause, limit: float, possible: Range, loc: Loc) -> Iterator[LintFinding]:
    shown = f"{limit:g}"
    if not math.isfinite(limit):
        yield LintFinding(loc, f"{shown} is not a limit; write a finite number")
    elif limit < possible.low:
        yield LintFinding(
            loc, f"{shown} can never be kept: {possible.noun} is at least {possible.low:g}; write a larger limit"
        )
    elif possible.cap is not None and limit >= possible.high:
        yield LintFinding(
            loc,
            f"{shown} can never be exceeded: the interval is for the mean of min(value, {possible.cap:g}), "
            f"at most {possible.high:g}; write a smaller limit or a larger cap",
        )
    elif limit > possible.high:
        percent = clause.parsed_statistic.kind == "fraction" and limit < 100
        meant = f"{shown}%" if percent else f"{_in_range(limit, possible.high):g}"
        yield LintFinding(
            loc,
            f"{shown} is more than {possible.noun} can be ({possible.low:g}..{possible.high:g}); did you mean {meant}?",
        )
    elif limit == possible.high:
        yield LintFinding(
            loc, f"{shown} can never be exceeded: {possible.noun} is at most {shown}; write a smaller limit"
        )
    elif limit == possible.low and clause.parsed_statistic.kind == "mean" and not clause.allows_none(ALL):
        yield LintFinding(
            loc,
            f"{shown} can never PASS: samples only show that {clause.metric} is below a larger value; write the "
            "smallest value that matters",
            "warning",
        )


def _in_range(limit: float, high: float) -> float:
    """Return the limit that was probably meant: most limits out of range were written in thousandths."""
    meant = limit / 1000.0
    while meant >= high:
        meant /= 10.0
    return meant


def _samples(contract: Contract, clause: Clause, here: Loc) -> Iterator[LintFinding]:
    statistic, confidence = clause.parsed_statistic, contract.observability.confidence
    if statistic.kind != "quantile":
        return
    # n observations, all at or below the limit, leave a chance of rank**n that the quantile is above it; each of the
    # two windows may err in half of 1 - confidence.
    needed = math.ceil(math.log((1.0 - confidence) / 2.0) / math.log(statistic.argument))
    name, minimum = contract.observability.minimum(clause)
    if minimum < needed:
        where: Loc = (*here, "statistic") if clause.statistic else (*here, "metric")
        yield LintFinding(
            where,
            f"a p{100 * statistic.argument:g} cannot PASS at confidence {confidence:g} with fewer than {needed} "
            f"observations, and {name} is {minimum}; raise it, or write a lower rank",
            "warning",
        )


def _tail(contract: Contract, clause: Clause, here: Loc) -> Iterator[LintFinding]:
    """A mean of min(value, cap) forgives whatever is above the cap: a second clause says how often it may be."""
    quantity, cap = clause.quantity, clause.cap
    if cap is None or quantity is None or clause.parsed_statistic.kind != "mean" or quantity.two_valued:
        return
    if cap >= quantity.high or clause.metric == "support_deficit" or contract.tail_of(clause) is not None:
        return
    yield LintFinding(
        (*here, "cap"),
        f"values above {cap:g} count as {cap:g}, and no clause limits how many there are; add "
        f"`{{id: {clause.id}-tail, {clause.tail_text}, limit: 1%}}` with the share that you accept",
        "warning",
    )


def _beyond_gradient(contract: Contract, clause: Clause, here: Loc) -> Iterator[LintFinding]:
    """A bias as large as the gradient itself is no limit on anything."""
    most = range_of(clause, contract.assumptions) if clause.metric == "gradient_bias_bound" else None
    if most is None or not math.isfinite(most.high) or clause.limit_for(ALL) < most.high / 2.0:
        return
    yield LintFinding(
        (*here, "limit"),
        f"{clause.limit_for(ALL):g} is as large as the gradient itself can be, A_max G_seq = {most.high / 2.0:.3g}: a "
        "bias within it may reverse any gradient; limit tv_seq or k3, or measure the bias with "
        "estimated_gradient_bias",
        "warning",
    )


def _population(contract: Contract, clause: Clause, here: Loc) -> Iterator[LintFinding]:
    """A policy that acts on tokens must say so: they tell less about later ones than their confidence says."""
    quantity, kind = clause.quantity, clause.parsed_statistic.kind
    if clause.unit is not None or quantity is None or quantity.per is not Unit.TOKEN:
        return
    if kind == "max" or clause.allows_none(ALL):
        return
    acting = contract.acts_on(clause)
    if acting:
        yield LintFinding(
            (*here, "metric"),
            f"{listed(acting, 6)} would act on verdicts that cover only the tokens of one window, because "
            f"{clause.statistic_text} cannot be judged by prompt; let a clause that is judged by prompt trigger it, or "
            "write `unit: token` if this window is what matters",
            "warning",
        )
