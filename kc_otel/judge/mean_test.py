"""A clause as a limit on the mean of something that is never negative, against which bets can be made.

A mean counts from the smallest value that its quantity can take, a fraction or quantile is the share of what lies above
its threshold, and a limit from below on what has a largest value counts from there. Three kinds of clause have no such
form: a mean without a smallest value, a maximum, and a share of none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.bucket_layouts import ZERO_THRESHOLD
from kc_otel.contract.clause import Clause
from kc_otel.contract.limits import factors
from kc_otel.contract.model import Assumptions
from kc_otel.contract.registry.clause_metrics import DERIVED
from kc_otel.contract.slices import ALL
from kc_otel.judge.statistics import mean_range
from kc_otel.stats import Binned
from kc_otel.stats.e_detector import BETS
from kc_otel.stats.fractions import surely_above
from kc_otel.stats.interval_rows import HistogramRows

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MeanTest:
    """Hypothesis that the mean of something never negative is at most `limit`, in terms of a recorded quantity x.

    Attributes:
        limit: m; positive and finite.
        above: For a share: x counts as 1 above this, else as 0. None for a mean.
        low: For a mean: x counts from here.
        cap: For a mean: x counts up to here.
        top: For a mean that is limited from below: x counts from here down. None for the others.
    """

    limit: float
    above: float | None = None
    low: float = 0.0
    cap: float = math.inf
    top: float | None = None

    def in_limits(self, sample: Binned, *, most: bool = False) -> tuple[Floats, Floats]:
        """The least that observations count for, or the most, in limits, and how many there are of each [k], [k]."""
        if self.above is not None:
            over = sample.count[sample.upper > self.above].sum() if most else surely_above(sample, self.above)
            return np.array([0.0, 1.0 / self.limit]), np.array([sample.total - over, over], dtype=np.float64)
        edges = sample.upper if most == (self.top is None) else sample.lower
        return self._of_edges(edges), sample.count.astype(np.float64)

    def _of_edges(self, edges: Floats) -> Floats:
        if self.top is not None:
            return (self.top - np.minimum(edges, self.top)) / self.limit
        return (np.minimum(np.maximum(edges, self.low), self.cap) - self.low) / self.limit

    @property
    def top_in_limits(self) -> float:
        """The most that any observation can count for, in units of the limit; inf where there is no such."""
        if self.above is not None:
            return 1.0 / self.limit
        return math.inf if self.top is not None else (self.cap - self.low) / self.limit

    def gains(self, sample: Binned) -> Floats:
        """Return the gain of each bet on observations [bets]."""
        values, counts = self.in_limits(sample)
        return np.asarray(counts @ _gain(values))

    def gains_of_rows(self, rows: HistogramRows, shared: Floats | None = None) -> Floats:
        """Return the gain of each bet on each of many samples [R, bets].

        Args:
            rows: The samples.
            shared: Result of `gains_of_edges` for their shared edges, if known.
        """
        if self.above is not None:
            surely = rows.surely_above(self.above)
            return np.array([rows.total - surely, surely]).T @ _gain_of_share(self.limit)
        return rows.added_up(self._gain_at, rows.count, upper=self.top is not None, shared=shared)

    def gains_of_edges(self, shared: Floats) -> Floats:
        """Return each bet's gain on one observation per bin of a mean [B, bets], given lower and upper edges [2, B]."""
        return self._gain_at(shared[int(self.top is not None)])

    def _gain_at(self, edges: Floats) -> Floats:
        return _gain(self._of_edges(edges))


def _gain(values: Floats) -> Floats:
    """Return the gain of each bet on each value, in limits [values, bets]."""
    return np.log1p(BETS * (values[:, None] - 1.0))


@lru_cache(maxsize=1024)
def _gain_of_share(limit: float) -> Floats:
    """Return the gain of each bet on values up to a threshold and above it [2, bets]; read-only."""
    return _gain(np.array([0.0, 1.0 / limit]))


def mean_test(clause: Clause, assumptions: Assumptions, slice: str = ALL) -> MeanTest | None:
    """Return a clause's limit on a slice as a limit on the mean of something never negative; None if impossible.

    Raises:
        ValueError: If the contract does not state an assumption that the metric is made of.
    """
    limit, statistic = clause.limit_for(slice), clause.parsed_statistic
    match statistic.kind:
        case "max":
            return None
        case "quantile":
            return MeanTest(1.0 - statistic.argument, above=limit or ZERO_THRESHOLD)
        case "fraction":
            # Values that recorders count as 0 are not above it, as for the interval.
            return _share(limit, statistic.argument or ZERO_THRESHOLD)
    scale, offset = factors(clause.metric, assumptions) if clause.metric in DERIVED else (1.0, 0.0)
    if clause.opposite is not None:  # each of the two quantities has a mean of at least -limit
        scale = -scale
    at = (limit - offset) / scale
    low, high, cap = mean_range(clause)
    if clause.quantity is not None and clause.quantity.two_valued:
        return _share((at - low) / (high - low), (low + high) / 2.0)
    if scale < 0.0:
        top = min(high, clause.cap or math.inf)
        return MeanTest(top - at, top=top) if 0.0 < top - at < math.inf else None
    return MeanTest(at - low, low=low, cap=min(high, cap)) if 0.0 < at - low < math.inf else None


def _share(limit: float, above: float) -> MeanTest | None:
    return MeanTest(limit, above=above) if 0.0 < limit < 1.0 else None
