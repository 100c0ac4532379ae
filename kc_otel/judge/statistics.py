"""A clause's statistic with its interval, from what a window holds."""

from __future__ import annotations

import math
from typing import Final

from kc_otel.contract.bucket_layouts import ZERO_THRESHOLD
from kc_otel.contract.clause import Clause
from kc_otel.contract.limits import factors
from kc_otel.contract.model import Assumptions, Observability
from kc_otel.contract.registry.clause_metrics import DERIVED, Unit
from kc_otel.judge.points import series_name
from kc_otel.stats import (
    Binned,
    Interval,
    affine,
    capped_mean_interval,
    fraction_interval,
    maximum_interval,
    quantile_interval,
    reward_drift_interval,
    support_deficit,
    two_valued_mean_interval,
)
from kc_otel.stats.interval_rows import (
    HistogramRows,
    IntervalRows,
    fraction_intervals,
    maximum_intervals,
    mean_intervals,
    quantile_intervals,
    two_valued_mean_intervals,
)

_CAP_IN_LIMITS: Final = 100.0
"""Cap of a `gen_ai.*` metric's mean, in limits, where the clause has none: such metrics have no range of their own."""


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

    Args:
        clause: Clause to evaluate.
        assumptions: The contract's constants, for derived metrics.
        sample: Observations of the metric `metric_name(clause)`; where it has an `opposite`, with those of that.
        alpha_lower: Error probability of the lower side.
        alpha_upper: Error probability of the upper side.
        anytime: Whether the sample is looked at as it grows, so that the sides have to hold at all sizes at once.

    Raises:
        ValueError: If the contract does not state an assumption that the metric is made of.
    """
    statistic = clause.parsed_statistic
    match statistic.kind:
        case "max":
            return maximum_interval(sample)
        case "quantile":
            return quantile_interval(
                sample, statistic.argument, alpha_lower=alpha_lower, alpha_upper=alpha_upper, anytime=anytime
            )
        case "fraction":
            # Values that recorders count as 0 are not above it, however wide the histogram's zero bucket is.
            above = statistic.argument or ZERO_THRESHOLD
            return fraction_interval(sample, above, alpha_lower=alpha_lower, alpha_upper=alpha_upper, anytime=anytime)
    if clause.metric not in DERIVED:
        return _mean(clause, sample, alpha_lower, alpha_upper, anytime=anytime)
    return _derived(clause, assumptions, sample, alpha_lower, alpha_upper, anytime=anytime)


def intervals_of_rows(
    clause: Clause, assumptions: Assumptions, rows: HistogramRows, *, alpha_lower: float, alpha_upper: float
) -> IntervalRows | None:
    """`clause_interval` of each row, for sizes fixed beforehand; None where each is to be asked by itself.

    Raises:
        ValueError: If the contract does not state an assumption that the metric is made of.
    """
    statistic, levels = clause.parsed_statistic, {"alpha_lower": alpha_lower, "alpha_upper": alpha_upper}
    match statistic.kind:
        case "max":
            return maximum_intervals(rows)
        case "quantile":
            return quantile_intervals(rows, statistic.argument, **levels)
        case "fraction":
            return fraction_intervals(rows, statistic.argument or ZERO_THRESHOLD, **levels)
    if clause.metric not in DERIVED:
        return _mean_of_rows(clause, rows, alpha_lower, alpha_upper)
    if clause.metric == "support_deficit" or clause.opposite is not None:
        return None
    scale, offset = factors(clause.metric, assumptions)
    sides = (alpha_upper, alpha_lower) if scale < 0 else (alpha_lower, alpha_upper)
    return _mean_of_rows(clause, rows, *sides).affine(scale, offset)


def _derived(
    clause: Clause, assumptions: Assumptions, sample: Binned, alpha_lower: float, alpha_upper: float, *, anytime: bool
) -> Interval:
    if clause.metric == "support_deficit":
        assert clause.quantity is not None
        return support_deficit(
            sample,
            cap=clause.cap or clause.quantity.cap,
            highest=clause.cap,
            alpha_lower=alpha_lower,
            alpha_upper=alpha_upper,
            anytime=anytime,
        )
    scale, offset = factors(clause.metric, assumptions)
    if clause.opposite is not None:
        assert assumptions.reward_range is not None
        # Where only one side is at hand, as of identical kernels, it stands for both.
        return reward_drift_interval(
            sample,
            sample.opposite or sample,
            assumptions.reward_range,
            alpha_lower=alpha_lower,
            alpha_upper=alpha_upper,
            anytime=anytime,
        )
    if scale < 0:  # the sides change places, and their error probabilities with them
        alpha_lower, alpha_upper = alpha_upper, alpha_lower
    return affine(_mean(clause, sample, alpha_lower, alpha_upper, anytime=anytime), scale, offset)


def mean_range(clause: Clause) -> tuple[float, float, float]:
    """(low, high, cap) of a mean: the range of what is observed, and the |value| at which its intervals stop."""
    quantity = clause.quantity
    if quantity is None:
        return 0.0, math.inf, clause.cap or _CAP_IN_LIMITS * max(clause.limit_for("all"), 1e-9)
    return quantity.low, quantity.high, clause.cap or quantity.cap


def _mean(clause: Clause, sample: Binned, alpha_lower: float, alpha_upper: float, *, anytime: bool) -> Interval:
    quantity = clause.quantity
    low, high, cap = mean_range(clause)
    if quantity is not None and quantity.two_valued:
        return two_valued_mean_interval(
            sample, low=low, high=high, alpha_lower=alpha_lower, alpha_upper=alpha_upper, anytime=anytime
        )
    return capped_mean_interval(
        sample,
        low=low,
        high=high,
        cap=cap,
        alpha_lower=alpha_lower,
        alpha_upper=alpha_upper,
        cut=clause.cap is not None,
        anytime=anytime,
    )


def _mean_of_rows(clause: Clause, rows: HistogramRows, alpha_lower: float, alpha_upper: float) -> IntervalRows:
    low, high, cap = mean_range(clause)
    levels = {"alpha_lower": alpha_lower, "alpha_upper": alpha_upper}
    if clause.quantity is not None and clause.quantity.two_valued:
        return two_valued_mean_intervals(rows, low=low, high=high, **levels)
    return mean_intervals(rows, low=low, high=high, cap=cap, cut=clause.cap is not None, **levels)
