"""Intervals of many histograms at once, against those of each by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from kc_otel.stats import Buckets, Histogram
from kc_otel.stats.histogram_columns import HistogramColumns
from kc_otel.stats.interval_rows import HistogramRows, IntervalRows, rows_of
from kc_otel.stats.means import mean_intervals
from kc_otel.stats.quantiles import fraction_intervals, maximum_intervals, quantile_intervals, two_valued_mean_intervals

ALPHAS = {"alpha_lower": 0.005 / 7, "alpha_upper": 0.005}
RANGES = {
    "distance": {"low": 0.0, "high": math.inf, "cap": 1.0},
    "signed": {"low": -math.inf, "high": math.inf, "cap": 50.0},
    "cut": {"low": 0.0, "high": math.inf, "cap": 0.02, "cut": True},
    "share": {"low": 0.0, "high": 1.0, "cap": 1.0},
}
AT_ONCE: dict[str, Callable[[HistogramRows], IntervalRows]] = {
    **{f"mean of {name}": partial(mean_intervals, **ends, **ALPHAS) for name, ends in RANGES.items()},
    **{f"p{100 * rank}": partial(quantile_intervals, rank=rank, **ALPHAS) for rank in (0.5, 0.99, 0.999, 1e-4)},
    **{f"above {at}": partial(fraction_intervals, above=at, **ALPHAS) for at in (0.0, 0.0078125, 0.01, 5.0)},
    "two values": partial(two_valued_mean_intervals, low=0.0, high=1.0, **ALPHAS),
    "maximum": maximum_intervals,
}


def histogram(rng, *, scale=4, signed=False):
    """A histogram of 1 to 10^5 observations, as an SDK would send it or as the difference of two."""
    size = int(rng.integers(1, 40))
    up = rng.poisson(rng.choice([0.1, 5.0, 3000.0]), size)
    up[[0, -1]] += 1
    down = rng.poisson(3.0, 5) + 1 if signed else np.zeros(0, np.int64)
    zeros = int(rng.choice([0, 1, 50]))
    offset = -int(rng.integers(60, 200))
    edge = np.exp2(np.arange(offset, offset + size + 1) / 2**scale)
    inside = bool(rng.integers(2))
    low = -(2.0 ** (-20 / 2**scale)) if signed else 0.0 if zeros else edge[0]
    return Histogram(
        scale=scale,
        count=int(up.sum() + down.sum() + zeros),
        sum=float(up @ (edge[:-1] * 0.4 + edge[1:] * 0.6)) - float(down.sum()) * 2.0 ** (-23 / 2**scale),
        zero_count=zeros,
        positive=Buckets(offset, up.astype(np.int64)),
        negative=Buckets(-25, down.astype(np.int64)) if signed else Buckets.empty(),
        minimum=float(low),
        maximum=float(edge[-2] * 0.5 + edge[-1] * 0.5 if inside else edge[-1]),
        zero_threshold=float(rng.choice([0.0, 2.0**-30])),
        maximum_observed=inside,
    )


def samples(seed, count):
    rng = np.random.default_rng(seed)
    unknown = {"minimum": math.nan, "maximum": math.nan, "maximum_observed": True}
    return [
        replace(histogram(rng, scale=int(scale), signed=bool(signed)), **(unknown if scale == 3 else {}))
        for scale, signed in zip(rng.choice([3, 4], count), rng.random(count) < 0.3, strict=True)
    ]


def same(interval, other):
    """Up to rounding: the sides of a mean end where an iteration does."""
    numbers: Any = [(interval.estimate, other.estimate), (interval.lower, other.lower), (interval.upper, other.upper)]
    close = all(math.isclose(a, b, rel_tol=1e-7, abs_tol=1e-11) for a, b in numbers)
    return close and (interval.samples, interval.method, interval.note) == (other.samples, other.method, other.note)


@pytest.mark.parametrize("count", [80, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", AT_ONCE)
def test_rows_have_the_intervals_that_each_has_alone(name, count):
    """With values on both sides of 0, with extremes inside a bucket or unknown, within the range or beyond it."""
    given, seen = samples(list(AT_ONCE).index(name), count), 0
    for rows in rows_of(HistogramColumns.of(given)):
        found = AT_ONCE[name](rows)
        for row, place in enumerate(rows.places.tolist()):
            alone = AT_ONCE[name](HistogramRows.of(given[place].binned()))[0]
            assert same(found[row], alone), (found[row], alone)
            seen += 1
    assert seen > 0.375 * count


def test_each_kind_of_histograms_has_rows_of_its_own():
    """Another scale or zero bucket; what does not fit beside any other is alone, and what is empty nowhere."""
    rng = np.random.default_rng(4)
    alike = [replace(histogram(rng), zero_threshold=0.0) for _ in range(3)]
    other = replace(histogram(rng, scale=3), zero_threshold=0.0)
    wide = replace(alike[2], zero_threshold=2.0**-22)
    left = [
        Histogram.empty(4),
        replace(alike[1], count=2**53),
        Histogram(0, 1, 1e308, 0, Buckets(1023, np.array([1])), Buckets.empty(), 1e308, 1e308),
        replace(alike[0], minimum=math.nan),
    ]
    given = [alike[0], other, alike[1], *left, wide, alike[2]]
    found = {tuple(rows.places.tolist()) for rows in rows_of(HistogramColumns.of(given))}
    assert found == {(0, 2, 8), (1,), (7,), (4,), (5,), (6,)}
