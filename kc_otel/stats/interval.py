"""Confidence intervals and operations on them.

Every interval of this package has two sides with an error probability each: `lower` lies above the true value with
probability at most `alpha_lower`, `upper` below it with probability at most `alpha_upper`, for independent observations
and any distribution. From a `Binned` sample they are conservative: a bin counts with its lower edge in a lower bound,
with its upper edge in an upper bound, so the probabilities hold whatever the values inside the bins were.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from kc_otel.stats.binned import Binned, usable

MAXIMUM: Final = "observed maximum"
MAXIMUM_NOTE: Final = "largest observation; larger ones may exist that were not observed"
_OPPOSITE: Final = {
    "upper": "lower",
    "lower": "upper",
    "min": "max",
    "max": "min",
    "above": "below",
    "below": "above",
}


@dataclass(frozen=True, slots=True)
class Interval:
    """A statistic of a sample and what it says about the distribution behind it.

    Attributes:
        estimate: Value of the statistic on the sample; nan without observations.
        lower: Lower confidence bound; -inf when none is claimed.
        upper: Upper confidence bound; inf when none is claimed.
        samples: Observations that it rests on.
        method: Name of the interval, such as `empirical Bernstein`.
        note: Note for the reader beside the numbers; empty for none.
    """

    estimate: float
    lower: float
    upper: float
    samples: int
    method: str
    note: str = ""


def nothing(method: str) -> Interval:
    """The interval of an empty sample: it claims nothing, so that it neither passes nor fails any limit."""
    return Interval(math.nan, -math.inf, math.inf, 0, method, "no observations")


def affine(interval: Interval, scale: float, offset: float = 0.0) -> Interval:
    """Interval of `scale * statistic + offset`; a negative scale swaps the sides.

    Each side keeps its error probability and what the note says of it, in the statistic's unit. For a negative scale
    the new lower side has that of the old upper side.

    Raises:
        ValueError: If the scale is zero or either number is not finite.
    """
    if not math.isfinite(scale) or scale == 0.0:
        raise ValueError(f"scale: {scale!r} is not a finite number other than 0")
    if not math.isfinite(offset):
        raise ValueError(f"offset: {offset!r} is not a finite number")
    ends = (interval.lower * scale + offset, interval.upper * scale + offset)
    return Interval(
        estimate=interval.estimate * scale + offset,
        lower=ends[0] if scale > 0 else ends[1],
        upper=ends[1] if scale > 0 else ends[0],
        samples=interval.samples,
        method=interval.method,
        note=note_in_unit(interval.note, scale, offset),
    )


def note_in_unit(note: str, scale: float, offset: float) -> str:
    """Return a note on values as one on `scale * value + offset`; a negative scale swaps the sides."""

    def word(said: str) -> str:
        return said if scale > 0 else _OPPOSITE[said]

    def end(said: str) -> str:
        return f"{float(said) * scale + offset:.4g}"

    def ends(said: re.Match[str]) -> str:
        low, high = (said[1], said[2]) if scale > 0 else (said[2], said[1])
        return f"cut to [{end(low)}, {end(high)}]"

    note = re.sub(r"\b(upper|lower)(?= bounds?\b)", lambda said: word(said[1]), note)
    note = re.sub(r"\b(min|max)\(value, (\S+)\)", lambda said: f"{word(said[1])}(value, {end(said[2])})", note)
    note = re.sub(r"\b(above|below) (\S+)(?=: no )", lambda said: f"{word(said[1])} {end(said[2])}", note)
    return re.sub(r"\bcut to \[(\S+), (\S+)\]", ends, note)


def maximum_interval(sample: Binned) -> Interval:
    """The largest observation. It describes the sample only: nothing bounds what was not observed.

    Where the sample does not say which value was the largest, the sides are the edges of the bin that holds it.
    """
    if not sample.total:
        return nothing(MAXIMUM)
    usable(sample)
    low, high = float(sample.lower[-1]), float(sample.upper[-1])
    if sample.maximum_observed and not math.isnan(sample.maximum):
        low = high = sample.maximum
    return Interval(high, low, high, sample.total, MAXIMUM, MAXIMUM_NOTE)
