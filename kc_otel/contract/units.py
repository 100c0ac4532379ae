"""Numbers with units, as people write them in a contract: `5m`, `800ms`, `2%`, `0.004`."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["format_duration", "parse_duration", "parse_limit"]

_SECONDS: Final = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ns|us|ms|s|m|h|d)")
_NUMBER: Final = re.compile(r"[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?")


def parse_duration(text: object) -> float:
    """Seconds in `90s`, `5m`, `1h30m`, `800ms`.

    Raises:
        ValueError: If it is not a sequence of numbers with units.
    """
    if not isinstance(text, str) or not text:
        msg = f"{text!r} is not a duration; write a number with a unit, such as 30s, 5m or 1h30m"
        raise ValueError(msg)
    parts = _PART.findall(text)
    if "".join(number + unit for number, unit in parts) != text:
        msg = f"{text!r} is not a duration; write numbers with units ns, us, ms, s, m, h or d, such as 30s, 5m or 1h30m"
        raise ValueError(msg)
    return float(sum(float(number) * _SECONDS[unit] for number, unit in parts))


def format_duration(seconds: float) -> str:
    """The shortest exact way to write `seconds` with whole numbers of d, h, m, s or ms."""
    milliseconds = round(seconds * 1000)
    if milliseconds <= 0:
        return "0s"
    parts = []
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, milliseconds = divmod(milliseconds, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts)


def parse_limit(value: object, unit: str) -> float:
    """A clause's limit in the unit of its metric.

    Args:
        value: A number, or text such as `800ms` (where `unit` is `s`) or `2%` (where `unit` is `1`).
        unit: UCUM unit of the metric.

    Raises:
        ValueError: If the text is not a number or its unit is not one of the metric's dimension.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        msg = f"{value!r} is not a number"
        raise ValueError(msg)  # noqa: TRY004 - pydantic turns only ValueErrors into field errors
    if isinstance(value, int | float):
        return float(value)
    text = value.strip()
    if _NUMBER.fullmatch(text):
        return float(text)
    if text.endswith("%") and _NUMBER.fullmatch(text[:-1].strip()):
        if unit != "1":
            msg = f"{value!r} is a share, but the metric's unit is {unit}; write a number in {unit}"
            raise ValueError(msg)
        return float(text[:-1]) / 100.0
    try:
        seconds = parse_duration(text)
    except ValueError:
        msg = f"{value!r} is not a number with a known unit; write it in {unit}"
        raise ValueError(msg) from None
    if unit != "s":
        msg = f"{value!r} is a duration, but the metric's unit is {unit}; write a plain number"
        raise ValueError(msg)
    return seconds
