"""Numbers with units, as people write them in a contract: `5m`, `800ms`, `2%`, `0.004`."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from functools import lru_cache
from typing import Final

# Decimal, so that 35ms is 0.035 and 0.7% is 0.007 to the last bit: the content hash and `diff` compare limits exactly.
_SECONDS: Final = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
_DURATION_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ns|us|ms|s|m|h|d)")
_NUMBER: Final = re.compile(r"[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?")


def parse_duration(text: object) -> float:
    """Seconds in `90s`, `5m`, `1h30m`, `800ms`; ValueError for anything else."""
    if not isinstance(text, str) or not text:
        raise ValueError(f"{text!r} is not a duration; write a number with a unit, such as 30s, 5m or 1h30m")
    parts = _DURATION_PART.findall(text)
    if "".join(number + unit for number, unit in parts) != text:
        raise ValueError(
            f"{text!r} is not a duration; write numbers with units ns, us, ms, s, m, h or d and no spaces, "
            "such as 30s, 5m or 1h30m"
        )
    seconds = float(sum(Decimal(number) * _SECONDS[unit] for number, unit in parts))
    if not math.isfinite(seconds):
        raise ValueError("the duration is too long; write a number with a unit, such as 30s, 5m or 1h30m")
    return seconds


@lru_cache(maxsize=256)
def format_duration(seconds: float) -> str:
    """The shortest way to write `seconds` with whole numbers of d, h, m, s, ms, us and ns."""
    rest = Decimal(repr(float(seconds)))
    parts = []
    for unit in ("d", "h", "m", "s", "ms", "us", "ns"):
        count = int(rest // _SECONDS[unit])
        if count > 0:
            rest -= count * _SECONDS[unit]
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def parse_limit(value: object, unit: str) -> float:
    """A limit in the metric's UCUM unit: a number, `800ms` where that is `s`, `2%` where it is `1`; or ValueError."""
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
            raise ValueError(f"{value!r} is a share, but the metric's unit is {unit}; write a number in {unit}")
        return float(Decimal(text[:-1].strip()) / 100)
    try:
        seconds = parse_duration(text)
    except ValueError:
        raise ValueError(f"{value!r} is not a number with a known unit and no space; write it in {unit}") from None
    if unit != "s":
        raise ValueError(f"{value!r} is a duration, but the metric's unit is {unit}; write a plain number")
    return seconds
