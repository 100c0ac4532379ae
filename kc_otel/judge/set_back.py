"""State of a clock that was ahead and has been set back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

Value = TypeVar("Value")


def not_later(value: Value, now: float, ahead: float) -> Value:
    """The value, in which what happened after `now` happened now, Unix seconds.

    Every number of its dataclasses, named tuples, tuples and mappings that lies between `now` and `ahead`, where the
    clock was, is a time: all else that is remembered is smaller by orders of magnitude. What is to end later than
    `ahead` still ends then.
    """
    found: Any = value
    if isinstance(found, float):
        found = now if now < found <= ahead else found
    elif isinstance(found, Mapping):
        found = {key: not_later(part, now, ahead) for key, part in found.items()}
    elif isinstance(found, tuple):
        parts = [not_later(part, now, ahead) for part in found]
        found = type(found)(*parts) if hasattr(found, "_fields") else tuple(parts)
    elif is_dataclass(found) and not isinstance(found, type):
        known = {field.name: getattr(found, field.name) for field in fields(found) if field.init}
        changed = {name: after for name, part in known.items() if (after := not_later(part, now, ahead)) != part}
        found = replace(found, **changed) if changed else found
    return cast("Value", found)
