"""Walks over dataclasses by their types alone: to JSON and back, and to times that are not later than a clock set back.

Fields that are not known are ignored. Numbers that are not finite are the texts NaN, Infinity and -Infinity: what is
stored must not lose them. Output for others has null instead: `for_others`, `finite_or_none`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar, cast

import pydantic_core
from pydantic import TypeAdapter

Value = TypeVar("Value")
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)
"""Adapters are slow to make."""


def to_json(value: Any) -> str:
    """A dataclass, or plain values that hold some, as compact JSON; arrays are lists.

    >>> to_json({"limit": float("inf"), "samples": 3})
    '{"limit":"Infinity","samples":3}'
    """
    return pydantic_core.to_json(value, inf_nan_mode="strings", fallback=lambda array: array.tolist()).decode()


def to_plain(value: Any) -> Any:
    """The same as dictionaries, lists, texts and finite numbers."""
    return json.loads(to_json(value))


def for_others(value: Any) -> Any:
    """The same as `to_plain`, with None for numbers that are not finite."""
    return json.loads(pydantic_core.to_json(value, inf_nan_mode="null"))


def read_json(kind: type[Value], text: str | bytes) -> Value:
    """The value that `to_json` wrote; a ValueError if it is not one of this kind."""
    value: Value = _adapter(kind).validate_json(text)
    return value


def read_plain(kind: type[Value], plain: Any) -> Value:
    """The value that `to_plain` wrote; a ValueError if it is not one of this kind."""
    value: Value = _adapter(kind).validate_python(plain)
    return value


def finite_or_none(value: float) -> float | None:
    """The number, or None for nan and infinities, which JSON for other people cannot carry."""
    return value if math.isfinite(value) else None


def not_later(value: Value, now: float, ahead: float = math.inf) -> Value:
    """The value, in which what happened after `now` happened now, Unix seconds.

    Every number of its dataclasses, named tuples, sequences and mappings that lies between `now` and `ahead`, where the
    clock was, is a time: all else that is remembered is smaller by orders of magnitude. What is to end later than
    `ahead` still ends then.
    """
    found: Any = value
    if isinstance(found, float):
        found = now if now < found <= ahead else found
    elif isinstance(found, Mapping):
        found = {key: not_later(part, now, ahead) for key, part in found.items()}
    elif isinstance(found, list):
        found = [not_later(part, now, ahead) for part in found]
    elif isinstance(found, tuple):
        parts = [not_later(part, now, ahead) for part in found]
        found = type(found)(*parts) if hasattr(found, "_fields") else tuple(parts)
    elif is_dataclass(found) and not isinstance(found, type):
        known = {field.name: getattr(found, field.name) for field in fields(found) if field.init}
        changed = {name: after for name, part in known.items() if (after := not_later(part, now, ahead)) != part}
        found = replace(found, **changed) if changed else found
    return cast("Value", found)
