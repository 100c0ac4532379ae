"""Axes: where a value lies between two ends, and the round values that are written beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final

_SUPERSCRIPTS: Final = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_SCALED_BELOW: Final = 1e-3
_SCALED_FROM: Final = 1e5
_MAX_DRAWN_VALUE: Final = 1e306
_TICK_SECONDS: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200)
_DAY_SECONDS: Final = 86400


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from `low` to `high` with round (value, text) ticks; with `log` equal steps are equal ratios.

    `note` is shown beside the ticks, such as a power of ten that multiplies all of them.
    """

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    note: str = ""
    log: bool = False

    def at(self, value: float) -> float:
        """Return the position of a value, from 0 to 1; values beyond an end lie at that end."""
        if value <= self.low:
            return 0.0
        if value >= self.high:
            return 1.0
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear_axis(low: float, high: float, most: int = 5) -> Axis:
    """An axis with at most `most + 1` round ticks; one power of ten for all of them where they are tiny or huge.

    An axis that would have no length is one long.

    >>> [text for _, text in linear_axis(0.0, 0.022).ticks]
    ['0', '0.005', '0.01', '0.015', '0.02']
    >>> axis = linear_axis(0.0, 4.1e-6)
    >>> [text for _, text in axis.ticks], axis.note
    (['0', '1', '2', '3', '4'], '× 10⁻⁶')
    """
    low, high = min(max(low, -_MAX_DRAWN_VALUE), _MAX_DRAWN_VALUE), max(min(high, _MAX_DRAWN_VALUE), -_MAX_DRAWN_VALUE)
    if high - low < max(1 / _MAX_DRAWN_VALUE, 1e-12 * abs(low)):
        high = low + max(1.0, 1e-6 * abs(low))
    step = _round_step((high - low) / most)
    largest = max(abs(low), abs(high))
    power = 0 if _SCALED_BELOW <= largest < _SCALED_FROM else 3 * math.floor(math.log10(largest) / 3)
    whole = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    scaled = step / 10.0**power if power > -300 else step  # 10^-308 is the least that divides
    decimals = next((many for many in range(8) if math.isclose(round(scaled, many), scaled, rel_tol=1e-6)), 8)
    texts = ((step * index, f"{scaled * index:.{decimals}f}") for index in whole)
    trimmed = tuple((value, _trimmed(text)) for value, text in texts)
    return Axis(low, high, trimmed, f"\N{MULTIPLICATION SIGN} {_power(power)}" if power else "")


def log_axis(low: float, high: float, most: int = 6) -> Axis:
    """An axis of equal ratios: powers of ten, with 2 and 5 between them where there are few.

    >>> [text for _, text in log_axis(1e-4, 1.0).ticks]
    ['10⁻⁴', '0.001', '0.01', '0.1', '1']
    """
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = max(1, math.ceil((last - first + 1) / most))
    powers = [power for power in range(first, last + 1) if power % every == 0]
    ticks = [(10.0**power, _short(power)) for power in powers]
    if last - first < 2:
        between = (factor * 10.0**power for power in range(first - 1, last + 1) for factor in (2, 5))
        ticks += [(value, f"{value:.3g}") for value in between if low <= value <= high]
    return Axis(low, high, tuple(sorted(ticks)), log=True)


def time_axis(start: float, end: float, zone: tzinfo = UTC) -> Axis:
    """An axis of moments: full seconds, minutes, hours or days of the zone; a day is named where it begins.

    >>> [text for _, text in time_axis(0.0, 7200.0).ticks]
    ['Jan 1', '00:30', '01:00', '01:30', '02:00']
    """
    if end <= start:
        start, end = start - 30.0, start + 30.0
    wanted = (end - start) / 6
    step = next((seconds for seconds in _TICK_SECONDS if seconds >= wanted), 0) or _DAY_SECONDS * math.ceil(
        wanted / _DAY_SECONDS
    )
    ticks = tuple((at, _moment(at, step, zone)) for at in _moments(start, end, step, zone))
    return Axis(start, end, ticks)


def _moments(start: float, end: float, step: int, zone: tzinfo) -> Iterator[float]:
    day = datetime.fromtimestamp(start, zone).replace(hour=0, minute=0, second=0, microsecond=0, fold=0)
    while day.timestamp() <= end:
        for seconds in range(0, _DAY_SECONDS, step):
            if start <= (at := (day + timedelta(seconds=seconds)).timestamp()) <= end:
                yield at
        day += timedelta(days=max(1, step // _DAY_SECONDS))


def _moment(at: float, step: int, zone: tzinfo) -> str:
    moment = datetime.fromtimestamp(at, zone)
    if moment.hour == moment.minute == moment.second == 0:
        return f"{moment:%b} {moment.day}"
    return f"{moment:%H:%M:%S}" if step < 60 else f"{moment:%H:%M}"


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 2.5 and 5 times a power of ten that is not below `least`."""
    size = 10.0 ** math.floor(math.log10(least))
    return next(size * factor for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if size * factor >= least * (1 - 1e-9))


def _short(power: int) -> str:
    return f"{10.0**power:g}" if -3 <= power <= 4 else _power(power)


def _power(power: int) -> str:
    return f"10{str(power).translate(_SUPERSCRIPTS)}"


def _trimmed(text: str) -> str:
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text in {"-0", ""} else text
