"""Faults that take two places of a contract to see: impossible limits, names that lead nowhere, steps that never fire.

Every rule is a pure function of the contract. An error is a contract that cannot do what it says; a warning is one that
can, but probably not what was meant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.errors import LintFinding, Loc
from kc_otel.contract.limits import Range, range_of
from kc_otel.contract.measuring_paths import AUTOMATIC
from kc_otel.contract.model import Contract
from kc_otel.contract.policy import EscalationStep
from kc_otel.contract.registry.clause_metrics import DERIVED, QUANTITIES, Unit
from kc_otel.contract.slices import ALL, LAG, POSITION, TURN, SliceCondition, satisfiable
from kc_otel.contract.units import format_duration
from kc_otel.contract.words import did_you_mean, listed

_SENT_ATTRIBUTES: Final = frozenset[str]().union(*AUTOMATIC.values())
_SUGGESTED: Final = _SENT_ATTRIBUTES - {TURN, LAG}  # `turns` and `lang` are no misspellings of them
_NUMERIC_KEYS: Final = frozenset({"prompt_tokens", "completion_tokens", "temperature", "advantage", POSITION, TURN})
_SMALLEST_ALPHA: Final = 1e-9
_SLICES_OF_ALL: Final = 2
"""Beside the declared slices, recorders count in `all` and in `stale`."""
_DURATIONS: Final = ("window", "long_window", "heartbeat")
_BURST: Final = 0.8
"""Share of the window for which one burst of failures is surely a FAIL: its end falls anywhere in a pane."""
_SECTIONS: Final = ("numerical", "statistical", "runtime")
_EXAMPLE: Final = {
    "reward_range": "[0, 1]",
    "horizon": "4096",
    "advantage_max": "5",
    "score_norm_max": "40",
    "clip": "0.2",
}


def lint(contract: Contract) -> list[LintFinding]:
    """Everything about a contract that no field can say on its own, in the order of its sections."""
    return [*_slices(contract), *_clauses(contract), *_observability(contract), *_escalation(contract)]


def _slices(contract: Contract) -> Iterator[LintFinding]:
    routes = any(action.kind == "route" for step in contract.escalation for action in step.do)
    for name, spec in contract.slices.items():
        for attribute, raw in spec.where.items():
            yield from _where(raw, attribute, spec.conditions[attribute], ("slices", name, "where", attribute))
        if spec.of_tokens and routes:
            yield LintFinding(
                ("slices", name),
                "selects tokens by an attribute that no request has before it is answered, so a route of this slice "
                "moves no requests; use another action here, or a clause on `all`",
                "warning",
            )


def _where(written: object, attribute: str, conditions: Sequence[SliceCondition], here: Loc) -> Iterator[LintFinding]:
    texts = (
        condition
        for condition in conditions
        if condition.comparison == "in" and not any(map(_numeric, condition.values))
    )
    if not satisfiable(conditions):
        yield LintFinding(here, f"{written!r} can never match, because no value satisfies every condition; change one")
    elif attribute in _NUMERIC_KEYS and any(texts):
        yield LintFinding(
            here,
            f'{written!r} can never match, as {attribute} is a number; write one, or a comparison such as ">= 8192"',
        )
    elif attribute not in _SENT_ATTRIBUTES and (near := get_close_matches(attribute, _SUGGESTED, n=1, cutoff=0.85)):
        yield LintFinding(here, f"no integration sends {attribute!r}; did you mean {near[0]!r}?", "warning")


def _numeric(value: object) -> bool:
    try:
        float(str(value))
    except ValueError:
        return False
    return True


def _observability(contract: Contract) -> Iterator[LintFinding]:
    seen = contract.observability
    window = f"window ({format_duration(seen.window)})"
    faults = [(name, getattr(seen, name) == 0, "0s holds no data; write a duration such as 5m") for name in _DURATIONS]
    faults += [
        ("window", seen.window > seen.long_window, "it is longer than long_window; make long_window the longer one"),
        (
            "heartbeat",
            seen.heartbeat > seen.window > 0,
            f"it is longer than {window}, which would be empty before silence is detected; write a shorter one",
        ),
        (
            "false_alarms",
            seen.false_alarms < seen.window,
            f"it is shorter than {window}, each of which could raise one; write a longer time, such as 30d",
        ),
        (
            "confidence",
            1.0 - seen.confidence < _SMALLEST_ALPHA,
            f"{seen.confidence!r} is so close to 1 that no number of samples decides; write 0.99 or 0.999",
        ),
    ]
    yield from (LintFinding(("observability", name), said) for name, wrong, said in faults if wrong)
    slices, per_slice = len(contract.slices) + _SLICES_OF_ALL, contract.streams_per_slice
    if contract.slices and seen.max_series < slices * per_slice:
        yield LintFinding(
            ("observability", "max_series"),
            f"one kernel pair needs {slices * per_slice} streams ({per_slice} for each of {slices} slices), more than "
            f"{seen.max_series}: recorders count the last slices together, as 'other', and they have no verdicts; "
            f"write {2 * slices * per_slice} or more",
            "warning",
        )


def _escalation(contract: Contract) -> Iterator[LintFinding]:
    known = [clause.id for clause in contract.clauses]
    for index, step in enumerate(contract.escalation):
        here: Loc = ("escalation", index)
        for position, name in enumerate(step.clauses):
            if name not in known:
                hint = did_you_mean(name, known, "clauses are")
                yield LintFinding((*here, "clauses", position), f"no clause has the id {name!r}; {hint}")
        if step.on == "invalid-input" and step.clauses:
            yield LintFinding(
                (*here, "clauses"),
                "input checks apply to batches, not to clauses, so the step can never fire; remove clauses",
            )
        yield from _late_pages(contract, step, here)
        yield from _actions(contract, step, here)


def _late_pages(contract: Contract, step: EscalationStep, here: Loc) -> Iterator[LintFinding]:
    window = contract.observability.window
    sooner = (other.do for other in contract.escalation if other.on == "fail" and other.after <= _BURST * window)
    paged = {action for do in sooner for action in do}
    pages = [action.target or "" for action in step.do if action.kind == "webhook" and action not in paged]
    if step.on == "fail" and pages and step.after > _BURST * window > 0:
        yield LintFinding(
            (*here, "for"),
            f"a single burst of failures never lasts that long: {listed(pages)} is told of it only if nothing "
            f"refutes it; write less than window ({format_duration(window)}), such as 2m",
            "warning",
        )


def _actions(contract: Contract, step: EscalationStep, here: Loc) -> Iterator[LintFinding]:
    written: set[str] = set()
    for position, action in enumerate(step.do):
        loc: Loc = (*here, "do", position)
        if str(action) in written:
            yield LintFinding(loc, f"{action} occurs twice in this step; remove one")
            continue
        written.add(str(action))
        if action.kind == "route":
            if step.on != "fail":
                yield LintFinding(
                    loc, f"a route needs a failing kernel version, and {step.on} has none; write on: fail"
                )
            latencies = {clause.id for clause in contract.clauses if clause.metric.startswith("gen_ai.")}
            if step.clauses and latencies.issuperset(step.clauses):
                message = (
                    "a route needs the kernel version of a breach, which gen_ai.* metrics have only if the service "
                    "adds the attributes kc.kernel.train and kc.kernel.inference; add them, or remove the route"
                )
                yield LintFinding(loc, message, "warning")
            if contract.kernels.train == contract.kernels.inference:
                message = (
                    "both kernels are declared alike, so a route changes nothing; declare under kernels how they differ"
                )
                yield LintFinding(loc, message)


def _clauses(contract: Contract) -> Iterator[LintFinding]:
    if not contract.clauses:
        yield LintFinding((), "the contract has no clause; add one under numerical, statistical or runtime")
    ids: dict[str, str] = {}
    for section in _SECTIONS:
        for index, clause in enumerate(getattr(contract, section)):
            here: Loc = (section, index)
            if clause.id in ids:
                yield LintFinding((*here, "id"), f"{clause.id!r} is already the id of {ids[clause.id]}; choose another")
            ids.setdefault(clause.id, f"{section}[{index}]")
            yield from _references(contract, clause, here)
            yield from _cap(clause, here)
            impossible = list(_limits(contract, clause, here))
            yield from impossible or _tail(contract, clause, here)
            yield from _samples(contract, clause, here)
            yield from _population(contract, clause, here)


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
                f"{name!r} selects tokens by their position, but {clause.metric} is not about tokens; leave it out"
                if contract.slices[name].of_tokens
                else f"{name!r} selects by lag, which {clause.metric} limits itself; leave it out",
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
