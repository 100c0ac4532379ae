"""Numbers, spans of time and places in words, the same on the page and in a report."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

__all__ = ["duration", "interval", "listed", "moment", "number", "place", "shown", "visible"]


def number(value: float | None) -> str:
    """Three significant digits; a dash for what is not known.

    >>> number(0.12345), number(None)
    ('0.123', '-')
    """
    return "-" if value is None else f"{value + 0.0:.3g}"  # a negative zero is zero


def duration(seconds: float) -> str:
    """A span of time in its two largest units.

    >>> duration(42), duration(754), duration(90000)
    ('42 s', '12 min 34 s', '1 d 1 h')
    """
    left = max(0, round(seconds))
    parts: list[str] = []
    for name, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or (name == "s" and not parts):
            parts.append(f"{count} {name}")
        elif parts:
            break
    return " ".join(parts[:2])


def interval(lower: float | None, upper: float | None) -> str:
    """A confidence interval; a side that is not known does not bound anything.

    >>> interval(0.1, None), interval(None, None)
    ('0.1 to unbounded', '-')
    """
    if lower is None and upper is None:
        return "-"
    sides = ["unbounded" if side is None else number(side) for side in (lower, upper)]
    return " to ".join(sides)


def moment(at: float) -> str:
    """A Unix time as a date and a time of day, UTC.

    >>> moment(0)
    '1970-01-01 00:00:00 UTC'
    """
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def place(slice: str) -> str:
    """A slice as a reader knows it.

    >>> place("all"), place("code")
    ('all traffic', 'code')
    """
    return "all traffic" if slice == "all" else slice


def listed(names: Sequence[str], most: int = 3) -> str:
    """Names as an enumeration, cut where it gets long.

    >>> listed(["a", "b"]), listed(["a", "b", "c", "d"])
    ('a and b', 'a, b, c and 1 more')
    """
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def shown(version: str) -> str:
    """A kernel version by its short fingerprint.

    >>> shown("")
    'not seen yet'
    """
    return version or "not seen yet"


def visible(text: str) -> str:
    """Without characters that are not seen but change how the others are read, or that no XML may contain.

    >>> visible("x" + chr(0x202E)) == "x" + chr(0xFFFD)
    True
    """
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]", "\ufffd", text)
