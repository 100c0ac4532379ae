"""Faults that take two places of a contract to see: impossible limits, names that lead nowhere, steps that never fire.

Every rule is a pure function of the contract. An error is a contract that cannot do what it says; a warning is one that
can, but probably not what was meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Final

from kc_otel.contract.errors import LintFinding, Loc
from kc_otel.contract.lint_clauses import lint_clauses
from kc_otel.contract.measuring_paths import AUTOMATIC
from kc_otel.contract.model import Contract, KernelSpec
from kc_otel.contract.policy import EscalationStep
from kc_otel.contract.regions import satisfiable
from kc_otel.contract.slices import POSITION, TURN, SliceCondition
from kc_otel.contract.units import format_duration

_SENT_ATTRIBUTES: Final = frozenset[str]().union(*AUTOMATIC.values())
_MISSPELT: Final = _SENT_ATTRIBUTES - {TURN}  # `turns`, how many a conversation has, is no misspelling of it
_NUMERIC_KEYS: Final = frozenset({"prompt_tokens", "completion_tokens", "temperature", "advantage", POSITION, TURN})
"""Attributes that our own instrumentation sends, as numbers."""
_SMALLEST_ALPHA: Final = 1e-9


def lint(contract: Contract) -> list[LintFinding]:
    """Everything about a contract that no field can say on its own, in the order of its sections."""
    return [
        *_slices(contract),
        *lint_clauses(contract),
        *_observability(contract),
        *_escalation(contract),
    ]


def _slices(contract: Contract) -> Iterator[LintFinding]:
    for name, spec in contract.slices.items():
        for attribute, raw in spec.where.items():
            yield from _where(raw, attribute, spec.conditions[attribute], ("slices", name, "where", attribute))
        if spec.of_tokens and _route(contract) is not None:
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
    elif attribute not in _SENT_ATTRIBUTES and (near := get_close_matches(attribute, _MISSPELT, n=1, cutoff=0.85)):
        yield LintFinding(here, f"no integration sends {attribute!r}; did you mean {near[0]!r}?", "warning")


def _numeric(value: object) -> bool:
    try:
        float(str(value))
    except ValueError:
        return False
    return True


def _observability(contract: Contract) -> Iterator[LintFinding]:
    seen = contract.observability
    for name in ("window", "long_window", "heartbeat"):
        if getattr(seen, name) == 0:
            yield LintFinding(("observability", name), "0s holds no data; write a duration such as 5m")
    if seen.window > seen.long_window:
        yield LintFinding(
            ("observability", "window"),
            f"{format_duration(seen.window)} is longer than long_window ({format_duration(seen.long_window)}); "
            "make long_window the longer one",
        )
    if seen.heartbeat > seen.window > 0:
        yield LintFinding(
            ("observability", "heartbeat"),
            f"{format_duration(seen.heartbeat)} is longer than window ({format_duration(seen.window)}): "
            "the window would be empty before silence is detected; write a shorter heartbeat",
        )
    if seen.false_alarms < seen.window:
        yield LintFinding(
            ("observability", "false_alarms"),
            f"{format_duration(seen.false_alarms)} is shorter than window ({format_duration(seen.window)}): every "
            "window could raise one; write a longer time, such as 30d",
        )
    if 1.0 - seen.confidence < _SMALLEST_ALPHA:
        yield LintFinding(
            ("observability", "confidence"),
            f"{seen.confidence!r} is so close to 1 that no number of samples decides; write 0.99 or 0.999",
        )
    judged = {
        (clause.quantity.key if clause.quantity else clause.metric, clause.operator) for clause in contract.clauses
    }
    needed = len(judged) * (len(contract.slices) + 1)
    if seen.max_series < needed:
        yield LintFinding(
            ("observability", "max_series"),
            f"one kernel pair needs {needed} streams ({len(judged)} quantities on {len(contract.slices) + 1} slices), "
            f"more than {seen.max_series}: some slices would be counted as 'other'; write {2 * needed} or more",
            "warning",
        )


def circles(contracts: Sequence[Contract]) -> Iterator[tuple[int, LintFinding]]:
    """Index of the contract, and what is wrong, for every route that closes a circle.

    Where the routes of others lead from a contract's training kernel back to its inference kernel, a request is sent in
    circles once all of them fire, and no healthy kernel is left for it.
    """
    edges: dict[KernelSpec, list[tuple[KernelSpec, str]]] = {}
    for index, contract in enumerate(contracts):
        loc = _route(contract)
        source, target = contract.kernels.inference, contract.kernels.train
        if loc is None or source == target:  # one without a route, and one that lint refuses by itself
            continue
        names = _way(edges, target, source)
        if names is not None:
            message = (
                f"routes from {_shown(source)} to {_shown(target)}, and {' and '.join(names)} from there back: "
                "requests would loop between the kernels; remove one of the routes"
            )
            yield index, LintFinding(loc, message)
        edges.setdefault(source, []).append((target, contract.name))


def _route(contract: Contract) -> Loc | None:
    for index, step in enumerate(contract.escalation):
        for position, action in enumerate(step.do):
            if action.kind == "route":
                return "escalation", index, "do", position
    return None


def _way(
    edges: dict[KernelSpec, list[tuple[KernelSpec, str]]], start: KernelSpec, end: KernelSpec
) -> tuple[str, ...] | None:
    """Contracts whose routes lead from one kernel to another, the fewest; None where none do."""
    found: list[tuple[KernelSpec, tuple[str, ...]]] = [(start, ())]
    seen = {start}
    for kernel, names in found:
        if kernel == end:
            return names
        for following, name in edges.get(kernel, ()):
            if following not in seen:
                seen.add(following)
                found.append((following, (*names, name)))
    return None


def _shown(kernel: KernelSpec) -> str:
    return " ".join(part for part in (kernel.engine, kernel.dtype, kernel.quantization) if part)


def _escalation(contract: Contract) -> Iterator[LintFinding]:
    for index, step in enumerate(contract.escalation):
        here: Loc = ("escalation", index)
        yield from _clauses(contract, step, here)
        yield from _actions(contract, step, here)


def _clauses(contract: Contract, step: EscalationStep, here: Loc) -> Iterator[LintFinding]:
    known = [clause.id for clause in contract.clauses]
    for position, name in enumerate(step.clauses):
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"clauses are {', '.join(known)}"
            yield LintFinding((*here, "clauses", position), f"no clause has the id {name!r}; {hint}")
    if step.on == "invalid-input" and step.clauses:
        yield LintFinding(
            (*here, "clauses"),
            "input checks apply to batches, not to clauses, so the step can never fire; remove clauses",
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
            if step.clauses and all(_names_no_kernel(contract, name) for name in step.clauses):
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


def _names_no_kernel(contract: Contract, id: str) -> bool:
    return any(clause.id == id and clause.metric.startswith("gen_ai.") for clause in contract.clauses)
