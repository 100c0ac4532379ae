"""Histograms and arrays as fields of dataclasses that `plain_json` writes and reads, in the state file.

What is read back was observed by somebody: a histogram with buckets where nothing can be would, added up with others,
be an array of every bucket between.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainValidator

from kc_otel.stats.histogram import Buckets, Histogram
from kc_otel.stats.interval import Floats

_SCALES: Final = range(-16, 21)
_LEAST_EXPONENT, _MOST_EXPONENT = -1080.0, 512.0
"""Binary exponents of what `points` lets be observed; coarser buckets reach beyond by less than one of them."""
_INTEGERS: Final = ("scale", "count", "zero_count")
_REALS: Final = ("sum", "minimum", "maximum", "zero_threshold")


def can_be_observed(scale: NDArray[np.int64], offset: NDArray[np.int64], size: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether something can be in so many buckets from an offset on, of each."""
    base = 2.0**-scale
    within = (_LEAST_EXPONENT - base <= offset * base) & ((offset + size) * base <= _MOST_EXPONENT + base)
    found: NDArray[np.bool_] = (_SCALES.start <= scale) & (scale < _SCALES.stop) & ((size == 0) | within)
    return found


def observed(histogram: Histogram) -> Histogram:
    """Return a histogram, or raise a ValueError if nobody can have observed it."""
    for side in (histogram.positive, histogram.negative):
        if side.counts.min(initial=0) < 0:
            raise ValueError(f"not a histogram: {side.counts.min()} observations in a bucket")
        if histogram.layout is None and not can_be_observed(
            *map(np.array, (histogram.scale, side.offset, side.counts.size))
        ):
            raise ValueError(f"not a histogram: bucket {side.offset} at scale {histogram.scale}")
    return histogram


def _histogram(plain: Any) -> Histogram:
    try:
        numbers: dict[str, Any] = {
            side: Buckets(int(plain[side]["offset"]), np.array(plain[side]["counts"], np.int64).reshape(-1))
            for side in ("positive", "negative")
        }
        numbers |= {name: int(plain[name]) for name in _INTEGERS} | {name: float(plain[name]) for name in _REALS}
        layout = None if plain["layout"] is None else tuple(map(float, plain["layout"]))
        return observed(Histogram(**numbers, maximum_observed=bool(plain["maximum_observed"]), layout=layout))
    except (LookupError, TypeError, OverflowError) as error:
        raise ValueError(f"not a histogram: {error!r}") from None


def _finite(plain: Any) -> Floats:
    found = np.array(plain, np.float64)
    if not np.isfinite(found).all():
        raise ValueError("a number is missing, or is none")
    return found


StoredHistogram = Annotated[Histogram, PlainValidator(_histogram)]
StoredFloats = Annotated[Floats, PlainValidator(_finite)]
"""Finite numbers."""
