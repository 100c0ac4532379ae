"""Slices of traffic: which attributes of a sequence put it into which slice.

A condition is a plain value (equality), a list of values (any of them), or text that starts with a comparison
(`">= 8192"`, `"!= code"`, and `">= 1024, < 8192"` for both at once). A slice's conditions all have to hold.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["ALL", "OTHER", "Scalar", "SliceCondition", "match", "parse_condition"]

ALL: Final = "all"
"""The slice that every sequence belongs to."""
OTHER: Final = "other"
"""The slice that takes what the cap on series left no room for."""

_SCALARS: Final = (str, int, float, bool)
Scalar = str | int | float | bool

_COMPARISON: Final = re.compile(r"\s*(>=|<=|!=|==|>|<)\s*(.*?)\s*")
_COMPARE: Final[dict[str, Callable[[float, float], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True, slots=True)
class SliceCondition:
    """One comparison of an attribute's value.

    Attributes:
        comparison: One of `in`, `!=`, `>=`, `<=`, `>`, `<`.
        values: The values compared with; more than one only for `in`.
    """

    comparison: str
    values: tuple[Scalar, ...]

    def holds(self, value: Scalar | None) -> bool:
        """Whether an attribute of this value satisfies the condition; a missing attribute never does."""
        if value is None:
            return False
        if self.comparison == "in":
            return any(_same(value, wanted) for wanted in self.values)
        if self.comparison == "!=":
            return not _same(value, self.values[0])
        bound = self.values[0]
        if isinstance(value, str | bool) or isinstance(bound, str | bool):
            return False
        return _COMPARE[self.comparison](value, bound)


def parse_condition(raw: object) -> tuple[SliceCondition, ...]:
    """Conditions from what a contract says of one attribute.

    Raises:
        ValueError: If it is neither a value, a list of values nor comparisons with numbers.
    """
    if isinstance(raw, list):
        if not raw:
            msg = "an empty list matches nothing; name at least one value"
            raise ValueError(msg)
        if not all(isinstance(item, _SCALARS) for item in raw):
            msg = f"{raw!r} must be a list of plain values"
            raise ValueError(msg)
        return (SliceCondition("in", tuple(raw)),)
    if isinstance(raw, str):
        if not _COMPARISON.fullmatch(raw):
            return (SliceCondition("in", (raw,)),)
        return tuple(_comparison(part) for part in raw.split(","))
    if isinstance(raw, _SCALARS):
        return (SliceCondition("in", (raw,)),)
    msg = f'{raw!r} is not a condition; write a value, a list of values, or a comparison such as ">= 8192"'
    raise ValueError(msg)


def match(where: Mapping[str, Sequence[SliceCondition]], attributes: Mapping[str, Scalar]) -> bool:
    """Whether a sequence with these attributes belongs to a slice with these conditions."""
    return all(condition.holds(attributes.get(name)) for name, conditions in where.items() for condition in conditions)


def _comparison(text: str) -> SliceCondition:
    found = _COMPARISON.fullmatch(text)
    if not found or not found[2]:
        msg = f'{text.strip()!r} is not a comparison; write an operator and a value, such as ">= 8192"'
        raise ValueError(msg)
    sign, value = found[1], _number_or_text(found[2])
    if sign == "==":
        return SliceCondition("in", (value,))
    if sign != "!=" and isinstance(value, str):
        msg = f"{text.strip()!r} compares with text; {sign} needs a number"
        raise ValueError(msg)
    return SliceCondition(sign, (value,))


def _number_or_text(text: str) -> Scalar:
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if math.isfinite(number):
            return number
    return text


def _same(value: Scalar, wanted: Scalar) -> bool:
    if isinstance(value, bool) or isinstance(wanted, bool) or isinstance(value, str) != isinstance(wanted, str):
        return str(value).lower() == str(wanted).lower()
    return value == wanted
