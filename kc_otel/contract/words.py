"""Wording of numbers, spans of time and places, the same everywhere, and suggestions for misspelt names."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from decimal import ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal
from difflib import get_close_matches
from typing import Any, Final

FAILS_CHECKS: Final = "invalid"
"""Outcome of the sequences of a kernel pair of which too many fail the input checks."""
NO_REPORT: Final = "no report for"
"""First words of a NO_DATA cell's reason where nobody knows why its recorder is silent; how long it is follows."""
RUN_ENDED: Final = "the run ended"
"""First words of a NO_DATA cell's reason where its recorder shut down cleanly."""
NOTHING_TO_MEASURE: Final = "nothing to measure"
"""First words of a NO_DATA cell's reason where all its sequences are kept from being measured on purpose, or were
sampled by older weights."""
NEXT_DUE: Final = "next report due by"
"""First words of a NO_DATA cell's reason where each recorder shut down cleanly and the next job is not due yet."""
NOTIFYING: Final = frozenset({"notify", "webhook"})
"""Actions that only tell people."""
MEASURED_LATER: Final = "it may still serve, or what it had answered before is measured late"
"""Explanation of measurements of a version after its rollback."""
ABOVE_RECENTLY: Final = "recent observations are above"
"""First words of a FAIL's reason where the window's estimate keeps the limit, and the newest observations do not."""
ABOVE_EARLIER: Final = "earlier observations were above"
"""First words of a FAIL's reason where the window's estimate keeps the limit, and a breach is not cleared yet."""
_ROUNDING_ERROR: Final = 1e-9
"""Relative error that floating-point arithmetic may have added; rounding ignores it."""
_MAX_SEARCHED_NAMES: Final = 100
"""Names that a hint is looked for in; comparing all with all would take minutes on a hostile file."""


def number(value: float | None) -> str:
    """Three significant digits, `0.123`; a dash for what is not known."""
    return "-" if value is None else f"{value + 0.0:.3g}"  # a negative zero is zero


def rounded(value: float, digits: int = 3) -> str:
    """The nearest number of a few significant digits: `0.0707`, `4.88e-06`, `16,384`."""
    return _digits(value, digits, ROUND_HALF_EVEN)


def rounded_down(value: float, digits: int = 3) -> str:
    """Round a limit or lower bound down to a few digits: 0.003125 is `0.00312`."""
    return _digits(value * (1.0 + _ROUNDING_ERROR), digits, ROUND_FLOOR)


def with_unit(text: str, unit: str) -> str:
    """A number with its UCUM unit in words: `0.15 nat`, `1 step`, `2 steps`."""
    name = unit.strip("{}")
    return text if unit == "1" else f"{text} {name}{'s' * (name == 'step' and text != '1')}"


def duration(seconds: float) -> str:
    """A span of time in its two largest units: `12 min 34 s`, `1 d 1 h`."""
    left = max(0, round(seconds))
    parts: list[str] = []
    for name, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or (name == "s" and not parts):
            parts.append(f"{count} {name}")
        elif parts:
            break
    return " ".join(parts[:2])


def plural(unit: str) -> str:
    """The plural of a unit.

    >>> plural("token"), plural("batch")
    ('tokens', 'batches')
    """
    return f"{unit}es" if unit.endswith("ch") else f"{unit}s"


def interval(lower: float | None, upper: float | None) -> str:
    """A confidence interval; a side that is not known does not bound anything: `0.1 to unbounded`."""
    if lower is None and upper is None:
        return "-"
    sides = ["unbounded" if side is None else number(side) for side in (lower, upper)]
    return " to ".join(sides)


def dilution(reason: str, *, past: bool = False) -> str:
    """Return why the estimate of a FAIL with this reason keeps its limit, as a phrase; empty where it does not."""
    if reason.startswith(ABOVE_EARLIER):
        return f"{ABOVE_EARLIER} it, and the breach {'was' if past else 'is'} not cleared yet"
    if not reason.startswith(ABOVE_RECENTLY):
        return ""
    if past:
        return f"{ABOVE_RECENTLY.replace('are', 'were')} it; the window still held earlier ones"
    return f"{ABOVE_RECENTLY} it; the window still holds earlier ones"


def moment(at: float) -> str:
    """A Unix time as `1970-01-01 00:00:00 UTC`."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def place(slice: str) -> str:
    """A slice as a reader knows it: `all traffic`, or its name."""
    return "all traffic" if slice == "all" else slice


def named_place(slice: str) -> str:
    """A slice as a reader knows it who may take its name for another: `all traffic`, or `slice code`."""
    return place(slice) if slice == "all" else f"slice {slice}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Names as an enumeration, cut where it gets long: `a, b, c and 2 more`."""
    if len(names) > most + 1:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def together(rows: Iterable[tuple[Hashable, str]]) -> dict[Any, list[str]]:
    """The names of each key: what is said of twenty slices alike is printed once."""
    found: dict[Any, list[str]] = {}
    for key, name in rows:
        names = found.setdefault(key, [])
        if name not in names:
            names.append(name)
    return found


def table_lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a line for the header, if there is one, and each row, in columns."""
    whole = [*([header] if header else []), *rows]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    for row in whole:
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


def _digits(value: float, digits: int, rounding: str) -> str:
    if not math.isfinite(value) or value == 0.0:
        return "0" if value == 0.0 else "infinity" if value > 0 else "-infinity"
    if abs(value) >= 10 ** (digits - 1):
        whole = Decimal(value).to_integral_value(rounding)
        return f"{whole:,}" if abs(value) < 1e12 else f"{value:.{digits}g}"
    return f"{float(Context(prec=digits, rounding=rounding).create_decimal(Decimal(value))):.{digits}g}"


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "declared are") -> str:
    """A hint at what was meant by a name that is not known."""
    names = list(known)
    near = get_close_matches(name, names[:_MAX_SEARCHED_NAMES], n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"{otherwise} {', '.join(names[:_MAX_SEARCHED_NAMES])}" if names else "declare it under slices first"


def boundary_name(layer: int | None, operator: str, part: int) -> str:
    """Return how an operator's output in a model is called; the layer is None before and after the layers."""
    named = operator + (f" (output {part + 1})" if part else "")
    return named if layer is None else f"layer {layer}, {named}"
