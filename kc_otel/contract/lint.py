"""What takes two places of a contract to see: limits that cannot be, names that lead nowhere, steps that never fire.

Every rule is a pure function of the contract that yields findings with the place they are about. An error is a
contract that cannot do what it says; a warning is one that can, but probably not what was meant.

Routes that lead back to where they came from, over several contracts that one evaluator serves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Final

from kc_otel.contract.errors import LintFinding, Loc
from kc_otel.contract.lint_clauses import lint_clauses
from kc_otel.contract.lint_escalation import lint_escalation
from kc_otel.contract.measuring_paths import AUTOMATIC
from kc_otel.contract.model import Contract, KernelSpec
from kc_otel.contract.promotion import lint_promotion
from kc_otel.contract.regions import satisfiable
from kc_otel.contract.slices import SliceCondition
from kc_otel.contract.units import format_duration
from kc_otel.contract.words import did_you_mean

__all__ = ["circles", "lint"]


_SENT: Final = frozenset[str]().union(*AUTOMATIC.values())
_NUMBERS: Final = frozenset({"prompt_tokens", "completion_tokens", "response_tokens", "temperature", "advantage"})
"""Attributes that our own instrumentation sends, as numbers."""
_FORMAT: Final = re.compile(
    r"auto|half|float|double|(?:bf|bfloat)16|(?:float|fp|mxfp|nvfp|nf|tf|u?int|mxint|i?q)(?:2|3|4|5|6|8|16|19|32|64)"
    r"(?:[_-]\w+)*|w\d+a\d+\w*|e\dm\d\w*"
)
_FORMATS: Final = ("bfloat16", "float16", "float32", "float64", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "fp4")
_SMALLEST_ALPHA: Final = 1e-9


def lint(contract: Contract) -> list[LintFinding]:
    """Everything about a contract that no field can say on its own, in the order of its sections."""
    return [
        *_kernels(contract),
        *_slices(contract),
        *lint_clauses(contract),
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
                hint = did_you_mean(given.lower(), _FORMATS, "some are")
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
