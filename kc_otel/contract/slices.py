"""Slices of traffic: which attributes of a sequence put it into which slice, and which slice covers another.

A condition is a plain value (equality), a list of values (any of them), or text that starts with a comparison
(`">= 8192"`, `"!= code"`, and `">= 1024, < 8192"` for both at once). A slice's conditions all have to hold.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

ALL: Final = "all"
"""The slice of every sequence that the training kernel's weights sampled, as far as it is known which did."""
STALE: Final = "stale"
"""The slice of what older weights sampled: its drift is the kernels' and the weights' age together. No clause is judged
on it; it tells how much of a total is which."""
STALE_BY_LAG: Final = {"stale-1": 1, "stale-2": 2, "stale-4": 4, "stale-8": 8}
"""Parts of `stale`, and the lag from which on each holds what was sampled; a sequence's, of the oldest weights."""
OLDER: Final = (STALE, *STALE_BY_LAG)
LAG: Final = "lag"
"""The attribute that says how many versions the weights that sampled are behind the training kernel's. A recorder fills
it in where it knows both. Observations with a lag above 0 are in `stale`, and only in those slices that select by
it."""
OTHER: Final = "other"
"""The slice that takes what the cap on series left no room for."""
UNJUDGED: Final = frozenset({OTHER, *OLDER})
"""Slices that streams may be of and no clause is judged on."""
LENGTH: Final = "completion_tokens"
"""The attribute that every sequence has: how many sampled tokens of it count. A recorder fills it in from the mask."""

POSITION: Final = "position"
"""Attribute of a token: its index in the response, 0 for the first that counts; masked tokens after it count too."""
TURN: Final = "turn"
"""Attribute of a token: the number of its turn, from 1; masked tokens (tool output, a user) separate turns."""
PHASE: Final = "phase"
"""Attribute of a token: `prefill` for the first of each turn, `decode` for those after it."""
PREFILL: Final = "prefill"
DECODE: Final = "decode"
OF_TOKENS: Final = frozenset({POSITION, TURN, PHASE})
"""Attributes of tokens. A recorder fills them in from the mask; a sequence may have them as attributes of its own."""
POSITION_EDGES: Final = (0, 16, 64, 256, 1024, 4096, 16384, 65536)
TURNS: Final = 4
PLACES: Final = tuple(f"{POSITION}:{at}" for at in POSITION_EDGES) + tuple(f"{TURN}:{n + 1}" for n in range(TURNS))
"""Slices of `kc.drift.tv_place`. No contract can declare one: names of slices have no colon."""

_SCALARS: Final = (str, int, float, bool)
Scalar = str | int | float | bool

_COMPARISON: Final = re.compile(r"\s*(>=|<=|!=|==|>|<)\s*(.*?)\s*")
_COMPARE: Final[dict[str, Callable[[Any, float], Any]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True, slots=True)
class SliceCondition:
    """One comparison of an attribute's value: `in` several values, or `!=`, `>=`, `<=`, `>`, `<` one."""

    comparison: str
    values: tuple[Scalar, ...]

    def holds(self, value: Scalar | None) -> bool:
        """Return True if a value satisfies the condition; a missing attribute never does."""
        if value is None:
            return False
        if self.comparison == "in":
            return any(_same(value, wanted) for wanted in self.values)
        if self.comparison == "!=":
            return not _same(value, self.values[0])
        bound = self.values[0]
        if isinstance(value, str | bool) or isinstance(bound, str | bool):
            return False
        return bool(_COMPARE[self.comparison](value, bound))

    def holds_for(self, values: Any) -> Any:
        """Return a mask of the numbers in an array that satisfy the condition."""
        numbers = [value for value in self.values if not isinstance(value, str | bool)]
        if self.comparison in _COMPARE and numbers:
            return _COMPARE[self.comparison](values, numbers[0])
        found = values != values  # noqa: PLR0124 - none of them; the array may be of any library
        for number in numbers if self.comparison in {"in", "!="} else ():
            found = found | (values == number)
        return ~found if self.comparison == "!=" else found


def parse_condition(raw: object) -> tuple[SliceCondition, ...]:
    """Conditions from what a contract says of one attribute; ValueError if they cannot be read."""
    if isinstance(raw, list):
        if not raw:
            raise ValueError("an empty list matches nothing; name at least one value")
        if not all(isinstance(item, _SCALARS) for item in raw):
            raise ValueError(f"{raw!r} has values other than text, numbers and booleans; write only these")
        return (SliceCondition("in", tuple(raw)),)
    if isinstance(raw, str):
        if not _COMPARISON.fullmatch(raw):
            return (SliceCondition("in", (raw,)),)
        return tuple(_comparison(part) for part in raw.split(","))
    if isinstance(raw, _SCALARS):
        return (SliceCondition("in", (raw,)),)
    raise ValueError(f'{raw!r} is not a condition; write a value, a list of values, or a comparison such as ">= 8192"')


def match(where: Mapping[str, Sequence[SliceCondition]], attributes: Mapping[str, Scalar]) -> bool:
    """Return True if a sequence with these attributes belongs to a slice with these conditions."""
    return all(condition.holds(attributes.get(name)) for name, conditions in where.items() for condition in conditions)


def _comparison(text: str) -> SliceCondition:
    found = _COMPARISON.fullmatch(text)
    if not found or not found[2]:
        raise ValueError(f'{text.strip()!r} is not a comparison; write an operator and a value, such as ">= 8192"')
    sign, value = found[1], _number_or_text(found[2])
    if sign == "==":
        return SliceCondition("in", (value,))
    if sign != "!=" and isinstance(value, str):
        raise ValueError(f"{text.strip()!r} compares with text; write a number after {sign}")
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


Conditions = Sequence[SliceCondition]

_OF_ANSWERS: Final = OF_TOKENS | {LENGTH, LAG}
"""Attributes that nobody knows before a request is served."""


def satisfiable(conditions: Conditions) -> bool:
    """Return True if some value of an attribute satisfies all of these conditions."""
    return any(_all_hold(conditions, value) for value in _tried(conditions))


def covers(wide: Mapping[str, Conditions], narrow: Mapping[str, Conditions]) -> bool:
    """Return True if every sequence that `narrow` matches is matched by `wide` too."""
    return all(
        attribute in narrow
        and all(
            _all_hold(conditions, value)
            for value in _tried([*conditions, *narrow[attribute]])
            if _all_hold(narrow[attribute], value)
        )
        for attribute, conditions in wide.items()
    )


def disjoint(first: Mapping[str, Conditions], second: Mapping[str, Conditions]) -> bool:
    """Return True if certainly no request belongs to both, by attributes known before it is served, however spelled."""
    for attribute in first.keys() & second.keys() - _OF_ANSWERS:
        both = [*first[attribute], *second[attribute]]
        if not any(_all_hold(both, found) for value in _tried(both) for found in _spelled(value)):
            return True
    return False


def _all_hold(conditions: Conditions, value: Scalar) -> bool:
    return all(condition.holds(value) for condition in conditions)


def _tried(conditions: Conditions) -> Iterator[Scalar]:
    """Values that stand for all others: what holds changes only at the values that conditions name."""
    yield "\0"  # text that none names
    for value in dict.fromkeys(value for condition in conditions for value in condition.values):
        yield value
        if not isinstance(value, str | bool):
            yield from (math.nextafter(value, side) for side in (-math.inf, math.inf))


def _spelled(value: Scalar) -> list[Scalar]:
    """A value, its text, and the number or boolean that its text spells."""
    text = str(value)
    found: list[Scalar] = [value, text, *([text.lower() == "true"] if text.lower() in {"true", "false"} else [])]
    for kind in (int, float):
        with suppress(ValueError):
            found.append(kind(text))
    return found
