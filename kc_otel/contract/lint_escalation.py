"""Lint of the escalation policy: steps that can never fire, repeat each other, or act against themselves."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Final

from kc_otel.contract.errors import Loc, ProblemLevel
from kc_otel.contract.model import Contract
from kc_otel.contract.policy import EscalationStep
from kc_otel.contract.units import format_duration

__all__ = ["lint_escalation"]

_DAY: Final = 86400.0
_MINUTE: Final = 60.0
_TELLING: Final = frozenset({"notify", "webhook"})
_SEVERITY: Final = {"info": 0, "warning": 1, "critical": 2}

_Found = tuple[Loc, str, ProblemLevel]


def lint_escalation(contract: Contract) -> Iterator[_Found]:
    """Place, message and level of everything that is wrong with the policy."""
    steps = contract.escalation
    for index, step in enumerate(steps):
        here: Loc = ("escalation", index)
        yield from _clauses(contract, step, here)
        yield from _actions(contract, step, here)
        yield from _repeat(step, here)
        for name, seconds in (("for", step.after), ("clear_for", step.clear_for)):
            if seconds > _DAY:
                yield (
                    (*here, name),
                    f"{format_duration(seconds)} is more than a day; the steps of a ladder are minutes apart",
                    "warning",
                )
        yield from _order(steps, index, here)


def _clauses(contract: Contract, step: EscalationStep, here: Loc) -> Iterator[_Found]:
    known = [clause.id for clause in contract.clauses]
    for position, name in enumerate(step.clauses):
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"clauses are {', '.join(known)}"
            yield (*here, "clauses", position), f"no clause has the id {name!r}; {hint}", "error"
    if step.on == "invalid-input" and step.clauses:
        yield (
            (*here, "clauses"),
            "an input check is about batches, not clauses, so the step can never fire; leave clauses out",
            "error",
        )


def _repeat(step: EscalationStep, here: Loc) -> Iterator[_Found]:
    if "repeat" not in step.model_fields_set or step.repeat == 0:
        return
    if not any(action.kind in _TELLING for action in step.do):
        yield (*here, "repeat"), "the step tells nobody, so there is nobody to remind; leave repeat out", "error"
    elif step.repeat < _MINUTE:
        yield (
            (*here, "repeat"),
            f"{format_duration(step.repeat)} leaves nobody time to answer; write a minute or more, or 0s for none",
            "warning",
        )


def _actions(contract: Contract, step: EscalationStep, here: Loc) -> Iterator[_Found]:
    written: set[str] = set()
    for position, action in enumerate(step.do):
        loc: Loc = (*here, "do", position)
        if str(action) in written:
            yield loc, f"{action} is in the same step twice; keep one", "error"
            continue
        written.add(str(action))
        if action.kind == "route":
            if step.on != "fail":
                yield (
                    loc,
                    f"a route avoids a version that fails, and {step.on} names none; use it with on: fail",
                    "error",
                )
            if step.clauses and all(_names_no_kernel(contract, name) for name in step.clauses):
                message = (
                    "a route avoids the kernel version that a breach names, and points of gen_ai.* metrics name one "
                    "only where the service adds kc.kernel.train and kc.kernel.inference to them"
                )
                yield loc, message, "warning"
            if contract.kernels.train == contract.kernels.inference:
                message = (
                    "both kernels are described alike, so a route changes nothing; say under kernels how they differ"
                )
                yield loc, message, "error"
        if action.kind == "sample-more" and contract.observability.sampling == 1.0:
            yield loc, "every batch is measured already (observability.sampling is 1); leave sample-more out", "warning"


def _names_no_kernel(contract: Contract, id: str) -> bool:
    return any(clause.id == id and clause.metric.startswith("gen_ai.") for clause in contract.clauses)


def _order(steps: tuple[EscalationStep, ...], index: int, here: Loc) -> Iterator[_Found]:
    step = steps[index]
    for earlier_index, earlier in enumerate(steps[:index]):
        if earlier.on != step.on or not _overlap(earlier, step):
            continue
        same_clauses = set(earlier.clauses) == set(step.clauses)
        nothing_new = {str(action) for action in step.do} <= {str(action) for action in earlier.do}
        sooner_and_longer = earlier.after <= step.after and earlier.clear_for >= step.clear_for
        if same_clauses and nothing_new and sooner_and_longer and earlier.severity == step.severity:
            yield here, f"does nothing that escalation[{earlier_index}] has not done before; leave it out", "error"
        elif _SEVERITY[step.severity] > _SEVERITY[earlier.severity] and step.after < earlier.after:
            other = f"{earlier.severity} (escalation[{earlier_index}], for: {format_duration(earlier.after)})"
            yield (*here, "for"), f"{step.severity} comes before {other}; a ladder climbs", "warning"


def _overlap(one: EscalationStep, other: EscalationStep) -> bool:
    return not one.clauses or not other.clauses or bool(set(one.clauses) & set(other.clauses))
