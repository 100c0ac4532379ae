"""Sets of attribute values that satisfy a slice's conditions: emptiness and containment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kc_otel.contract.slices import Scalar, SliceCondition

Conditions = Sequence[SliceCondition]


@dataclass(frozen=True, slots=True)
class _Interval:
    low: float | None = None
    low_open: bool = False
    high: float | None = None
    high_open: bool = False

    @property
    def empty(self) -> bool:
        if self.low is None or self.high is None:
            return False
        return self.low > self.high or (self.low == self.high and (self.low_open or self.high_open))

    @property
    def point(self) -> float | None:
        return self.low if self.low == self.high and not self.empty else None


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


def _named(conditions: Conditions) -> list[Scalar] | None:
    """The values that satisfy conditions of which at least one lists values; None where none does."""
    lists = [condition.values for condition in conditions if condition.comparison == "in"]
    if not lists:
        return None
    return [value for value in lists[0] if all(condition.holds(value) for condition in conditions)]


def _interval(conditions: Conditions) -> _Interval:
    result = _Interval()
    for condition in conditions:
        value = condition.values[0]
        if condition.comparison in {"in", "!="} or isinstance(value, str | bool):
            continue
        is_open = condition.comparison in {">", "<"}
        if condition.comparison in {">=", ">"}:
            if result.low is None or value > result.low or (value == result.low and is_open):
                result = _Interval(value, is_open, result.high, result.high_open)
        elif result.high is None or value < result.high or (value == result.high and is_open):
            result = _Interval(result.low, result.low_open, value, is_open)
    excluded = {condition.values[0] for condition in conditions if condition.comparison == "!="}
    return _Interval(
        result.low, result.low_open or result.low in excluded, result.high, result.high_open or result.high in excluded
    )


def _implied(known: Conditions, condition: SliceCondition) -> bool:
    """Return True if every value that satisfies `known` satisfies `condition`."""
    named = _named(known)
    if named is not None:
        return all(condition.holds(value) for value in named)
    interval, bound = _interval(known), condition.values[0]
    if condition.comparison == "in":
        return interval.point is not None and condition.holds(interval.point)
    if condition.comparison == "!=":
        return _excludes(known, interval, bound)
    if isinstance(bound, str | bool):
        return False
    if condition.comparison in {">=", ">"}:
        low = interval.low
        return low is not None and (
            low > bound or (low == bound and (condition.comparison == ">=" or interval.low_open))
        )
    high = interval.high
    return high is not None and (
        high < bound or (high == bound and (condition.comparison == "<=" or interval.high_open))
    )


def _excludes(known: Conditions, interval: _Interval, value: Scalar) -> bool:
    if any(condition.comparison == "!=" and condition.values[0] == value for condition in known):
        return True
    if interval.low is None and interval.high is None:
        return False
    if isinstance(value, str | bool):
        return True  # only numbers satisfy >= and the like
    below = interval.low is not None and (value < interval.low or (value == interval.low and interval.low_open))
    above = interval.high is not None and (value > interval.high or (value == interval.high and interval.high_open))
    return below or above
