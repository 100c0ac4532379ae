"""Sets of attribute values that satisfy a slice's conditions: emptiness and containment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from kc_otel.contract.slices import LAG, LENGTH, OF_TOKENS, Scalar, SliceCondition

Conditions = Sequence[SliceCondition]

_OF_ANSWERS: Final = OF_TOKENS | {LENGTH, LAG}
"""Attributes that nobody knows before a request is served."""


Bound = tuple[float, bool]
"""A bound on numbers, and whether it is left out itself: of two lower bounds the larger tuple is the tighter one."""


class _Interval(NamedTuple):
    """Numbers between two bounds; the upper one is that of their negatives."""

    low: Bound = (-math.inf, False)
    negative: Bound = (-math.inf, False)

    @property
    def empty(self) -> bool:
        (low, low_open), (negative, high_open) = self
        return low > -negative or (low == -negative and (low_open or high_open))

    def excludes(self, value: float) -> bool:
        return (value, False) < self.low or (-value, False) < self.negative


def satisfiable(conditions: Conditions) -> bool:
    """Return True if some value of an attribute satisfies all of these conditions."""
    named = _named(conditions)
    if named is not None:
        return bool(named)
    return not _interval(conditions).empty


def covers(wide: Mapping[str, Conditions], narrow: Mapping[str, Conditions]) -> bool:
    """Return True if every sequence that `narrow` matches is matched by `wide` too."""
    return all(
        attribute in narrow and all(_implied(narrow[attribute], condition) for condition in conditions)
        for attribute, conditions in wide.items()
    )


def disjoint(first: Mapping[str, Conditions], second: Mapping[str, Conditions]) -> bool:
    """Return True if it is certain that no request belongs to both, by attributes that are known before it is served.

    Text that spells a number or a boolean counts as that too, as in `SliceCondition.holds`.
    """
    return not all(
        _shared([*first[attribute], *second[attribute]]) for attribute in first.keys() & second.keys() - _OF_ANSWERS
    )


def _shared(conditions: Conditions) -> bool:
    """Return True unless it is certain that no value satisfies all of these conditions."""
    listed = [value for condition in conditions if condition.comparison == "in" for value in condition.values]
    if not listed:
        return satisfiable(conditions)
    return any(all(condition.holds(found) for condition in conditions) for value in listed for found in _spelled(value))


def _spelled(value: Scalar) -> list[Scalar]:
    """A value, its text, and the number or boolean that its text spells."""
    text = str(value)
    found: list[Scalar] = [value, text, *([text.lower() == "true"] if text.lower() in {"true", "false"} else [])]
    for kind in (int, float):
        with suppress(ValueError):
            found.append(kind(text))
    return found


def _named(conditions: Conditions) -> list[Scalar] | None:
    """The values that satisfy conditions of which at least one lists values; None where none does."""
    lists = [condition.values for condition in conditions if condition.comparison == "in"]
    if not lists:
        return None
    return [value for value in lists[0] if all(condition.holds(value) for condition in conditions)]


def _interval(conditions: Conditions) -> _Interval:
    low = negative = -math.inf, False
    for condition in conditions:
        value, is_open = condition.values[0], condition.comparison in {">", "<"}
        if condition.comparison in {"in", "!="} or isinstance(value, str | bool):
            continue
        if condition.comparison in {">=", ">"}:
            low = max(low, (value, is_open))
        else:
            negative = max(negative, (-value, is_open))
    excluded = {condition.values[0] for condition in conditions if condition.comparison == "!="}
    return _Interval((low[0], low[1] or low[0] in excluded), (negative[0], negative[1] or -negative[0] in excluded))


def _implied(known: Conditions, condition: SliceCondition) -> bool:
    """Return True if every value that satisfies `known` satisfies `condition`."""
    named = _named(known)
    if named is not None:
        return all(condition.holds(value) for value in named)
    interval, bound = _interval(known), condition.values[0]
    if condition.comparison == "in":
        is_point = interval.low[0] == -interval.negative[0] and not interval.empty
        return is_point and condition.holds(interval.low[0])
    if condition.comparison == "!=":
        if any(other.comparison == "!=" and other.values[0] == bound for other in known):
            return True
        # Only numbers satisfy >= and the like.
        return interval != _Interval() and (isinstance(bound, str | bool) or interval.excludes(bound))
    if condition.comparison in {">=", ">"}:
        return not isinstance(bound, str | bool) and interval.low >= (bound, condition.comparison == ">")
    return not isinstance(bound, str | bool) and interval.negative >= (-bound, condition.comparison == "<")
