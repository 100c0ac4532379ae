"""Statistics of what was observed, in float64, and how near a store's answer has to be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kc_otel.contract import Contract
from kc_otel.judge.verdict import Status
from tests.tools.panel_rows import PAIR, Labels, World, by, exports_within, observed, stretched

GROWTH = 2.0 ** (1.0 / 16.0)
"""Upper edge of a bucket, as a multiple of the lower one."""
_ROOT = math.sqrt(GROWTH)
_EXACT = 1e-9
_ZERO = 1e-120
"""More than the bucket of zeros is wide."""


@dataclass(frozen=True)
class Within:
    """A number between two others."""

    low: float
    high: float

    def __post_init__(self) -> None:
        assert self.low <= self.high, self


@dataclass(frozen=True, eq=False)
class Distribution:
    """A histogram: at every edge of a bucket, the share of these values below it; and how many there are a second."""

    values: np.ndarray
    rate: float


Answer = float | Within | Distribution


def agrees(answer: Mapping[str, Any], expected: Answer) -> bool:
    """Whether a series of an instant query's result has the value that is expected."""
    if isinstance(expected, Distribution):
        return "histogram" in answer and _distributed(answer["histogram"][1], expected)
    if "value" not in answer:
        return False
    value = float(answer["value"][1])
    if isinstance(expected, Within):
        slack = _EXACT * max(abs(expected.low), abs(expected.high))
        return expected.low - slack <= value <= expected.high + slack
    return value == pytest.approx(expected, rel=_EXACT, abs=1e-12)


def _distributed(answer: Mapping[str, Any], expected: Distribution) -> bool:
    edges, counts = (np.array([float(bucket[place]) for bucket in answer["buckets"]]) for place in (2, 3))
    below = np.searchsorted(np.sort(expected.values), edges, side="right") / expected.values.size
    # A value that lies on an edge to float32's last bit may be counted on either side of it.
    near = np.allclose(np.cumsum(counts) / counts.sum(), below, rtol=0.0, atol=1.5 / expected.values.size)
    return bool(near) and float(answer["count"]) == pytest.approx(expected.rate, rel=_EXACT)


def mean(parts: Iterable[np.ndarray]) -> float:
    """Exact: histograms keep the sum."""
    return float(np.concatenate(list(parts)).mean())


def quantile(parts: Iterable[np.ndarray], rank: float) -> Within:
    """Interpolated within its bucket, on a logarithmic scale; one value more or less below it makes no difference.

    Source: Prometheus documentation, `histogram_quantile`, native histograms with exponential buckets.
    """
    values = np.concatenate(list(parts))
    # The upper edge of a positive value's bucket, and that of a negative one's, mirrored, in steps of GROWTH.
    sizes = np.ceil(np.log2(np.abs(values, where=values != 0, out=np.ones_like(values))) * 16)
    order = np.lexsort((np.where(values < 0, -sizes, sizes), np.sign(values)))
    signs, sizes = np.sign(values)[order], sizes[order]

    def at(place: float) -> float:
        index = int(np.clip(math.ceil(place) - 1, 0, values.size - 1))
        same = np.flatnonzero((signs == signs[index]) & (sizes == sizes[index]))
        fraction = float(np.clip((place - same[0]) / same.size, 0.0, 1.0))
        inward = fraction if signs[index] > 0 else 1.0 - fraction
        return float(signs[index] * GROWTH ** (sizes[index] - 1.0 + inward))

    return Within(at(rank * values.size - 1.5) - _ZERO, at(rank * values.size + 1.5) + _ZERO)


def per_second(world: World, quantity: str, names: Iterable[str]) -> dict[Labels, Answer]:
    """Observations per second."""
    return {key: one.rate for key, one in distribution(world, quantity, names).items()}


def distribution(world: World, quantity: str, names: Iterable[str] = ()) -> dict[Labels, Distribution]:
    """Everything that was observed."""

    def of(parts: Iterable[np.ndarray]) -> Distribution:
        values = np.concatenate(list(parts))
        return Distribution(values, values.size * stretched(world, world.rate) / world.rate)

    return by(names, observed(world, quantity, world.rate), of)


def constants(contract: Contract) -> dict[str, float]:
    """What the mean of a quantity is multiplied by to bound something else, by the metric."""
    given = contract.assumptions
    low, high = given.reward_range
    return {
        "clip_budget_share": 1.0 / math.log1p(given.clip),
        "reward_drift_bound": high - low,
        "gradient_bias_bound": 2.0 * given.advantage_max * given.horizon * given.score_norm_max,
    }


# What the generated recording rules find


@dataclass(frozen=True)
class _Judged:
    """What rules say of a clause on a slice and a pair of kernel versions."""

    estimate: float
    lower: Within
    upper: Within
    limit: float
    samples: float

    def status(self, needed: int) -> int:
        if self.samples < needed:
            return Status.INCONCLUSIVE.code
        assert not self.lower.low <= self.limit < self.lower.high, "choose traffic that leaves no doubt"
        assert not self.upper.low <= self.limit < self.upper.high, "choose traffic that leaves no doubt"
        if self.lower.low > self.limit:
            return Status.FAIL.code
        return Status.PASS.code if self.upper.high <= self.limit else Status.INCONCLUSIVE.code


def by_rules(name: str, how: Callable[[Any], Any]) -> Callable[[World], dict[Labels, Answer]]:
    """A number that rules tell of the picked clause and slice, over its pairs of kernel versions."""

    def found(world: World) -> dict[Labels, Answer]:
        values = [getattr(one, name) for one in _judged(world).values()]
        if isinstance(values[0], Within):
            return {frozenset(): Within(how(one.low for one in values), how(one.high for one in values))}
        return {frozenset(): how(values)}

    return found


def status_by_rules(world: World) -> dict[Labels, Answer]:
    """The worst verdict of the rules on the picked clause and slice."""
    return {frozenset(): max(one.status(_needed(world)) for one in _judged(world).values())}


def _needed(world: World) -> int:
    """Observations of the picked clause without which there is no verdict."""
    seen = world.contract.observability
    return seen.min_sequences if world.clause.quantity.per == "sequence" else seen.min_samples


def _judged(world: World) -> dict[Labels, _Judged]:
    """What the short window finds where that decides, else what the long one does."""
    seen = world.contract.observability
    short, long = (_judged_in(world, window) for window in (seen.window, seen.long_window))
    decides = {key: one.status(_needed(world)) != Status.INCONCLUSIVE.code for key, one in short.items()}
    return {key: short[key] if decides[key] else long[key] for key in short}


def _judged_in(world: World, window: float) -> dict[Labels, _Judged]:
    """The mean of a quantity in [0, 1], with the interval of Maurer and Pontil 2009, Theorem 4.

    Rules take the deviation from buckets: it is no smaller than that of the values, and not larger than when every
    value is off by half a bucket. Both windows hold all exports. Their number of observations is divided by the most
    that extrapolation can have added, which is 2.2 steps.
    """
    clause, contract = world.clause, world.contract
    scale = constants(contract).get(clause.metric, 1.0)
    alpha = (1.0 - contract.observability.confidence) / 2.0
    cells = len(contract.clauses) * (1 + len(contract.slices)) * 4
    limit = clause.limit_for(world.picked["slice"])
    more = stretched(world, window) / (1.0 + 2.2 / (exports_within(world, window) - 1))

    def of(parts: Iterable[np.ndarray]) -> _Judged:
        values = np.concatenate(list(parts))
        n, middle, deviation = values.size * more, float(values.mean()), float(values.std())
        most = GROWTH * deviation + _ROOT * (_ROOT - 1.0) * math.sqrt((values**2).mean()) + (_ROOT - 1.0) * middle

        def half(s: float, level: float) -> float:
            log = math.log(2.0 / level)
            return s * math.sqrt(2.0 * log / (n - 1.0)) + 7.0 * log / (3.0 * (n - 1.0))

        lower = [scale * max(middle - half(s, alpha / cells), 0.0) for s in (most, deviation)]
        upper = [scale * min(middle + half(s, alpha), 1.0) for s in (deviation, most)]
        return _Judged(scale * middle, Within(*lower), Within(*upper), limit, n)

    return by(PAIR, observed(world, clause.quantity.key, window), of)
