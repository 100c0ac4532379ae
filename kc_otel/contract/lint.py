"""What takes two places of a contract to see: limits that cannot be, names that lead nowhere, steps that never fire.

Every rule is a pure function of the contract that yields findings with the place they are about. An error is a
contract that cannot do what it says; a warning is one that can, but probably not what was meant.

Routes that lead back to where they came from, over several contracts that one evaluator serves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.errors import Loc, ProblemLevel
from kc_otel.contract.limits import Range, range_of
from kc_otel.contract.lint_escalation import lint_escalation
from kc_otel.contract.measuring_paths import AUTOMATIC
from kc_otel.contract.model import Contract, KernelSpec
from kc_otel.contract.promotion import lint_promotion
from kc_otel.contract.regions import satisfiable
from kc_otel.contract.registry import DERIVED, QUANTITIES, Origin, Unit
from kc_otel.contract.slices import ALL, SliceCondition
from kc_otel.contract.units import format_duration
from kc_otel.contract.words import listed

__all__ = ["LintFinding", "circles", "lint"]


_SECTIONS: Final = ("numerical", "statistical", "runtime")
_HOME: Final = {
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
_SENT: Final = frozenset[str]().union(*AUTOMATIC.values())
_NUMBERS: Final = frozenset({"prompt_tokens", "completion_tokens", "response_tokens", "temperature", "advantage"})
"""Attributes that our own instrumentation sends, as numbers."""
_FORMAT: Final = re.compile(
    r"auto|half|float|double|(?:bf|bfloat)16|(?:float|fp|mxfp|nvfp|nf|tf|u?int|mxint|i?q)(?:2|3|4|5|6|8|16|19|32|64)"
    r"(?:[_-]\w+)*|w\d+a\d+\w*|e\dm\d\w*"
)
_FORMATS: Final = ("bfloat16", "float16", "float32", "float64", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "fp4")
_SMALLEST_ALPHA: Final = 1e-9
_SEARCHED: Final = 100
"""Names that a hint is looked for in; comparing all with all would take minutes on a hostile file."""


@dataclass(frozen=True, slots=True)
class LintFinding:
    """Something to correct.

    Attributes:
        loc: Place in the contract.
        message: What is wrong and what to write instead.
        level: Error or warning.
    """

    loc: Loc
    message: str
    level: ProblemLevel = "error"


def lint(contract: Contract) -> list[LintFinding]:
    """Everything about a contract that no field can say on its own, in the order of its sections."""
    return [
        *_kernels(contract),
        *_slices(contract),
        *_clauses(contract),
        *_observability(contract),
        *(LintFinding(*found) for found in lint_escalation(contract)),
        *(LintFinding(*found) for found in lint_promotion(contract.promotion)),
    ]


def _kernels(contract: Contract) -> Iterator[LintFinding]:
    for role in ("train", "inference"):
        spec: KernelSpec = getattr(contract.kernels, role)
        for field in ("dtype", "kv_cache_dtype"):
            given = getattr(spec, field)
            if given is not None and not _FORMAT.fullmatch(given.lower().removeprefix("torch.")):
                hint = _did_you_mean(given.lower(), _FORMATS, "some are")
                what = f"{given!r} is no number format that is known here; {hint}"
                yield LintFinding(("kernels", role, field), what, "warning")


def _slices(contract: Contract) -> Iterator[LintFinding]:
    seen: dict[object, str] = {}
    for name, spec in contract.slices.items():
        for attribute, conditions in spec.conditions.items():
            yield from _where(spec.where[attribute], attribute, conditions, ("slices", name, "where", attribute))
        region = frozenset((attribute, frozenset(conditions)) for attribute, conditions in spec.conditions.items())
        if region in seen:
            yield LintFinding(("slices", name), f"matches exactly what {seen[region]!r} matches; keep one of them")
        seen.setdefault(region, name)


def _where(written: object, attribute: str, conditions: Sequence[SliceCondition], here: Loc) -> Iterator[LintFinding]:
    texts = (one for one in conditions if one.comparison == "in" and not any(map(_numeric, one.values)))
    if not satisfiable(conditions):
        yield LintFinding(here, f"{written!r} can never match: no value satisfies all of it")
    elif attribute in _NUMBERS and any(texts):
        yield LintFinding(here, f'{written!r} can never match: {attribute} is a number; write such as ">= 8192"')
    elif attribute not in _SENT and (near := get_close_matches(attribute, _SENT, n=1, cutoff=0.85)):
        yield LintFinding(here, f"nothing sends {attribute!r} by itself; did you mean {near[0]!r}?", "warning")


def _numeric(value: object) -> bool:
    try:
        float(str(value))
    except ValueError:
        return False
    return True


def _clauses(contract: Contract) -> Iterator[LintFinding]:
    if not contract.clauses:
        yield LintFinding((), "promises nothing; add a clause under numerical, statistical or runtime")
    ids: dict[str, str] = {}
    promises: dict[object, str] = {}
    for section in _SECTIONS:
        for index, clause in enumerate(getattr(contract, section)):
            here: Loc = (section, index)
            if clause.id in ids:
                yield LintFinding((*here, "id"), f"{clause.id!r} is already the id of {ids[clause.id]}; choose another")
            ids.setdefault(clause.id, f"{section}[{index}]")
            yield from _section(clause, section, here)
            yield from _references(contract, clause, here)
            impossible = list(_limits(contract, clause, here))
            yield from impossible or _tail(contract, clause, here)
            yield from _samples(contract, clause, here)
            yield from _population(contract, clause, here)
            limits = (clause.limit, *sorted(clause.slices.items()))
            promise = (clause.metric_text, clause.parsed_statistic, limits, clause.cap, clause.unit)
            if promise in promises and promises[promise] != clause.id:
                yield LintFinding(here, f"promises exactly what {promises[promise]!r} promises", "warning")
            promises.setdefault(promise, clause.id)


def _section(clause: Clause, section: str, here: Loc) -> Iterator[LintFinding]:
    source = QUANTITIES[clause.metric].source if clause.metric in QUANTITIES else None
    home = _HOME[source] if source else "statistical" if clause.metric in DERIVED else "runtime"
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
            yield LintFinding((*here, "slices", name), "'all' has the clause's own limit; change limit instead")
        elif name not in contract.slices:
            yield LintFinding(
                (*here, "slices", name), f"no slice is named {name!r}; {_did_you_mean(name, contract.slices)}"
            )
    if clause.metric in DERIVED:
        for name in DERIVED[clause.metric].needs:
            if getattr(contract.assumptions, name) is None:
                yield LintFinding(
                    (*here, "metric"),
                    f"{clause.metric} needs assumptions.{name}; write `assumptions: {{{name}: {_EXAMPLE[name]}}}` "
                    "with your own value",
                )
    if clause.cap is not None and clause.parsed_statistic.kind != "mean":
        yield LintFinding((*here, "cap"), "a cap only bounds a mean; leave it out")
    elif clause.cap is not None and clause.quantity is not None and clause.quantity.two_valued:
        yield LintFinding(
            (*here, "cap"), f"{clause.metric} has two values, and a mean of them is a share; leave it out"
        )
    elif clause.cap is not None and clause.metric == "support_deficit" and clause.cap <= 1:
        yield LintFinding(
            (*here, "cap"), "is a ratio that none exceeds, and a mean of 1 needs ratios of 1; write a number above 1"
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
        yield LintFinding(
            loc,
            f"{shown} is more than {possible.noun} can be ({possible.low:g}..{possible.high:g}); "
            f"did you mean {_in_range(limit, possible.high):g}?",
        )
    elif limit == possible.high:
        yield LintFinding(
            loc, f"{shown} can never be exceeded: {possible.noun} is at most {shown}; write a smaller limit"
        )
    elif limit == possible.low and clause.parsed_statistic.kind == "mean" and not clause.allows_none(ALL):
        yield LintFinding(
            loc,
            f"{shown} can never be shown to be kept: from samples, {clause.metric} is only known to be below "
            "something larger; write the smallest value that matters",
            "warning",
        )


def _in_range(limit: float, high: float) -> float:
    """What was probably meant: most limits out of range were written in thousandths."""
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
            f"a p{100 * statistic.argument:g} cannot PASS at confidence {confidence:g} below {needed} "
            f"observations, but {name} is {minimum}; raise it, or write a lower rank",
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
        f"what is above {cap:g} counts as {cap:g}, however far it is, and no clause limits how often it is above; add "
        f"`{{id: {clause.id}-tail, {clause.tail_text}, limit: 1%}}` with the share that you can bear",
        "warning",
    )


def _population(contract: Contract, clause: Clause, here: Loc) -> Iterator[LintFinding]:
    """Tokens of a window tell less about those to come than their confidence says; whoever acts on them has to say so.

    A maximum is left out, and a share of none: that one token was above it is a fact, whatever comes next.
    """
    quantity, kind = clause.quantity, clause.parsed_statistic.kind
    if clause.unit is not None or quantity is None or quantity.per is not Unit.TOKEN:
        return
    if kind == "max" or clause.allows_none(ALL):
        return
    acting = contract.acts_on(clause)
    if acting:
        yield LintFinding(
            (*here, "metric"),
            f"{listed(acting, 6)}: each acts on verdicts about the tokens of one window, of which "
            f"{clause.statistic_text} has no form by sequence; what the slice shows next may differ by more than the "
            "confidence says; act on a clause about sequences instead, or write `unit: token` where this window is "
            "what matters",
            "warning",
        )


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
            "the window would be empty before silence is noticed; write a shorter heartbeat",
        )
    if seen.false_alarms < seen.window:
        yield LintFinding(
            ("observability", "false_alarms"),
            f"{format_duration(seen.false_alarms)} is shorter than window ({format_duration(seen.window)}): every "
            "window would raise one; write a time that an engineer on call would bear, such as 30d",
        )
    if 1.0 - seen.confidence < _SMALLEST_ALPHA:
        yield LintFinding(
            ("observability", "confidence"),
            f"{seen.confidence!r} leaves no room for error, so no number of samples decides; write 0.99 or 0.999",
        )
    judged = {
        (clause.quantity.key if clause.quantity else clause.metric, clause.operator) for clause in contract.clauses
    }
    needed = len(judged) * (len(contract.slices) + 1)
    if seen.max_series < needed:
        yield LintFinding(
            ("observability", "max_series"),
            f"{len(judged)} quantities on {len(contract.slices) + 1} slices are {needed} streams for one kernel pair, "
            f"more than {seen.max_series}: slices would be lost to 'other'; write {2 * needed} or more",
            "warning",
        )


def _did_you_mean(name: str, known: Iterable[str], otherwise: str = "declared are") -> str:
    names = list(known)
    near = get_close_matches(name, names[:_SEARCHED], n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"{otherwise} {', '.join(names[:_SEARCHED])}" if names else "declare it under slices first"


def circles(contracts: Sequence[Contract]) -> Iterator[tuple[int, LintFinding]]:
    """Index of the contract, and what is wrong, for every route that closes a circle.

    A contract routes from the kernel under `inference` to the one under `train`. Where the routes of others lead from
    there back to the first, a request that all of them are about is sent in circles once all of them fire, and no
    healthy kernel is left for it.
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
                f"routes from {_shown(source)} to {_shown(target)}, and {' and '.join(names)} from there back: a "
                "request that they are all about would go in circles; leave one of the routes out"
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
