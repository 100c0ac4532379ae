"""A clause's statistic with its interval, and its limit as one on the mean of something that is never negative.

Bets are made against the latter (`MeanTest`). A mean counts from the smallest value that its quantity can take, a
fraction or quantile is the share of what lies above its threshold, and a limit from below on what has a largest value
counts from there. Three kinds of clause have no such form: a mean without a smallest value, a maximum, and a share of
none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from kc_otel.contract.clause import Clause
from kc_otel.contract.limits import ZERO_THRESHOLD, factors
from kc_otel.contract.model import Assumptions, Observability
from kc_otel.contract.registry.clause_metrics import DERIVED, Unit
from kc_otel.contract.slices import ALL
from kc_otel.judge.points import series_name
from kc_otel.stats import Binned, Interval, reward_drift_interval
from kc_otel.stats.e_detector import BETS
from kc_otel.stats.interval import Floats, nothing
from kc_otel.stats.interval_rows import HistogramRows, IntervalRows
from kc_otel.stats.means import METHOD, mean_intervals, support_deficits
from kc_otel.stats.quantiles import (
    MAXIMUM_METHOD,
    QUANTILE_METHOD,
    SHARE_METHOD,
    fraction_intervals,
    maximum_intervals,
    quantile_intervals,
    two_valued_mean_intervals,
)

_CAP_IN_LIMITS: Final = 100.0
"""Cap of a `gen_ai.*` metric's mean, in limits, where the clause has none: such metrics have no range of their own."""
_MEASURED: Final = {
    "horizon": ("sequence_tokens", "a sequence had {seen:,.0f} tokens or more"),
    "advantage_max": ("advantage_abs", "an advantage of {seen:.3g} or more occurred"),
    "score_norm_max": ("score_norm", "a token's score had a norm of {seen:.3g} or more"),
}
"""Assumption -> key in `SAMPLING` of what is measured of it, and what breaks it."""


def metric_name(clause: Clause) -> str:
    """Name of the metric that the clause is computed from, with the operator where it is about one."""
    return series_name(clause.quantity.name if clause.quantity is not None else clause.metric, clause.operator)


def opposite_name(clause: Clause) -> str | None:
    """Name of the metric that bounds the clause's from the other side; None where one metric says all of it."""
    return None if clause.opposite is None else series_name(clause.opposite.name, clause.operator)


def samples_needed(clause: Clause, observability: Observability) -> int:
    """Observations below which the clause cannot pass: tokens, or prompts or sequences where these are its unit.

    Nor can it fail with fewer by an interval, except on a maximum: one observation above the limit is a fact, while a
    few below it say nothing of the next. A quantity observed once per batch or step may never be observed hundreds of
    times in a window, so the contract's minima are not for that.
    """
    if clause.quantity is not None and clause.quantity.per in {Unit.BATCH, Unit.STEP}:
        return 1
    return observability.minimum(clause)[1]


def rounded(number: int) -> int:
    """Up to two significant digits, for people.

    >>> rounded(13973)
    14000
    """
    if number <= 0:
        return 0
    unit = int(10 ** max(0, math.floor(math.log10(number)) - 1))
    return -(-number // unit) * unit


def clause_interval(
    clause: Clause,
    assumptions: Assumptions,
    sample: Binned,
    *,
    alpha_lower: float,
    alpha_upper: float,
    anytime: bool = False,
) -> Interval:
    """A clause's statistic on a sample, in the unit of its limit.

    The sample is of the metric `metric_name(clause)`; where the clause has an `opposite`, with those of that. `anytime`
    makes the sides hold at all sizes at once, for a sample that is looked at as it grows.
    """
    levels = {"alpha_lower": alpha_lower, "alpha_upper": alpha_upper}
    if clause.parsed_statistic.kind == "mean" and clause.opposite is not None:
        assert assumptions.reward_range is not None
        # Where only one side is at hand, as of identical kernels, it stands for both.
        opposite = sample.opposite or sample
        return reward_drift_interval(sample, opposite, assumptions.reward_range, **levels, anytime=anytime)
    if not sample.total:
        empty = nothing(_method(clause, anytime=anytime))
        return replace(empty, lower=0.0, upper=1.0) if clause.metric == "support_deficit" else empty
    return intervals_of_rows(clause, assumptions, HistogramRows.of(sample), **levels, anytime=anytime)[0]


def _method(clause: Clause, *, anytime: bool) -> str:
    kind, quantity = clause.parsed_statistic.kind, clause.quantity
    if kind == "max":
        return MAXIMUM_METHOD
    if kind == "quantile":
        return QUANTILE_METHOD[anytime]
    of_shares = kind == "fraction" or (quantity is not None and quantity.two_valued)
    return (SHARE_METHOD if of_shares else METHOD)[anytime]


def intervals_of_rows(
    clause: Clause,
    assumptions: Assumptions,
    rows: HistogramRows,
    *,
    alpha_lower: float,
    alpha_upper: float,
    anytime: bool = False,
) -> IntervalRows:
    """`clause_interval` of each row, for a clause without an `opposite`."""
    statistic = clause.parsed_statistic
    levels: dict[str, Any] = {"alpha_lower": alpha_lower, "alpha_upper": alpha_upper, "anytime": anytime}
    match statistic.kind:
        case "max":
            return maximum_intervals(rows, whole=clause.metric == "weights_lag")
        case "quantile":
            return quantile_intervals(rows, statistic.argument, **levels)
        case "fraction":
            # Values that recorders count as 0 are not above it, however wide the histogram's zero bucket is.
            return fraction_intervals(rows, statistic.argument or ZERO_THRESHOLD, **levels)
    if clause.metric == "support_deficit":
        assert clause.quantity is not None
        return support_deficits(rows, cap=clause.cap or clause.quantity.cap, highest=clause.cap, **levels)
    low, high, cap = mean_range(clause)
    if clause.quantity is not None and clause.quantity.two_valued:
        return two_valued_mean_intervals(rows, low=low, high=high, **levels)
    scale, _ = factors(clause.metric, assumptions) if clause.metric in DERIVED else (1.0, 0.0)
    return mean_intervals(rows, low=low, high=high, cap=cap, cut=clause.cap is not None, scale=scale, **levels)


def mean_range(clause: Clause) -> tuple[float, float, float]:
    """(low, high, cap) of a mean: the range of what is observed, and the |value| at which its intervals stop."""
    quantity = clause.quantity
    if quantity is None:
        return 0.0, math.inf, clause.cap or _CAP_IN_LIMITS * max(clause.limit_for("all"), 1e-9)
    return quantity.low, quantity.high, clause.cap or quantity.cap


@dataclass(frozen=True, slots=True)
class MeanTest:
    """Hypothesis that the mean of something never negative is at most `limit`, in terms of a recorded quantity x."""

    limit: float
    """m; positive and finite."""
    above: float | None = None
    """For a share: x counts as 1 above this, else as 0. None for a mean."""
    low: float = 0.0
    """For a mean: x counts from here."""
    cap: float = math.inf
    """For a mean: x counts up to here."""
    top: float | None = None
    """For a mean that is limited from below: x counts from here down. None for the others."""

    def in_limits(self, sample: Binned, *, most: bool = False) -> tuple[Floats, Floats]:
        """The least that observations count for, or the most, in limits, and how many there are of each [k], [k]."""
        if self.above is not None:
            surely = HistogramRows.of(sample).surely_above(self.above)[0] if sample.total else 0.0
            over = sample.count[sample.upper > self.above].sum() if most else surely
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

    def gains(self, rows: HistogramRows) -> Floats:
        """Return the gain of each bet on each sample [R, bets]."""
        if self.above is not None:
            surely = rows.surely_above(self.above)
            return np.array([rows.total - surely, surely]).T @ _gain(np.array([0.0, 1.0 / self.limit]))
        return rows.added_up(lambda edges: _gain(self._of_edges(edges)), rows.count, upper=self.top is not None)


def _gain(values: Floats) -> Floats:
    """Return the gain of each bet on each value, in limits [values, bets]."""
    return np.log1p(BETS * (values[:, None] - 1.0))


def mean_test(clause: Clause, assumptions: Assumptions, slice: str = ALL) -> MeanTest | None:
    """Return a clause's limit on a slice as a limit on the mean of something never negative; None if impossible."""
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


def measurable(clause: Clause) -> tuple[str, ...]:
    """Assumptions that a clause rests on and that can be compared with what arrives."""
    needs = DERIVED[clause.metric].needs if clause.metric in DERIVED else ()
    return tuple(name for name in needs if name in _MEASURED or name == "reward_range")


def broken_assumption(
    clause: Clause, assumptions: Assumptions, observed: Callable[[str], Binned | None], outside: Callable[[], int]
) -> str:
    """Return the first assumption of a clause that the data breaks, as a phrase for the verdict; empty if none.

    A derived metric is a mean times factors that the contract states; a clause does not PASS on a broken one.
    `observed` returns the observations of a quantity of `SAMPLING` by its key, `outside` counts rewards out of range.
    """
    for name in measurable(clause):
        if name == "reward_range":
            if count := outside():
                low, high = assumptions.reward_range or (0.0, 0.0)
                what = "a reward is" if count == 1 else f"{count:,} rewards are"
                return f"assumptions.reward_range is [{low:g}, {high:g}], but {what} outside of it"
            continue
        quantity, breach = _MEASURED[name]
        assumed, sample = getattr(assumptions, name), observed(quantity)
        if assumed is None or sample is None or not sample.total:
            continue
        seen = float(sample.lower[-1])  # no observation of the last bucket is below its lower edge
        if seen > assumed:
            return f"assumptions.{name} is {assumed:g}, but {breach.format(seen=seen)}"
    return ""
