"""What a contract asks of the rollouts that are learned from, and whether a correction keeps it.

A clause is read with the corrected rollouts in place of the plain ones: `tv_token` and `tv_seq` (with
`reward_drift_bound` and `gradient_bias_bound`, which follow from it) become the distances of `effects`,
`advantage_drift_*` what is still missing of the push. Without a correction these are the clause as it is judged by
sequence. For `tv_token` the smaller of both distances counts: token ratios bring steps to the training kernel's at the
rollouts' prefixes, ratios of sequences at its own. `chi2_token` becomes what the weights that are used cost in
effective sample size, E[c^2] / E[c]^2 - 1, which is the clause for c = w. All other metrics are of the kernels, and no
weight changes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.model import Contract
from kc_otel.contract.registry import DERIVED, QUANTITIES
from kc_otel.judge.statistics import factors
from kc_otel.offline.remedy.corrections import Correction
from kc_otel.offline.remedy.effects import Effects
from kc_otel.stats import Binned, Interval, affine, capped_mean_interval

__all__ = ["Aim", "RemedyBound", "RemedyTarget", "finding", "promises"]

Aim = Literal["token", "sequence", "positive", "negative", "ess"]
"""What of `Effects` a promise is about; `ess` is its squared weights against its weights."""

_AIMS: Final[dict[str, Aim]] = {
    "tv_token": "token",
    "tv_seq": "sequence",
    "advantage_drift_positive": "positive",
    "advantage_drift_negative": "negative",
    "chi2_token": "ess",
}
_BINS: Final = 1024
"""Distinct values from which an interval is computed from bins of neighbours: hundreds of them stay quick."""
_FIXED: Final = "is of the kernels themselves: weights do not change it"


@dataclass(frozen=True, slots=True)
class RemedyTarget:
    """A clause on a slice.

    Attributes:
        clause: Its id.
        metric: Its metric.
        slice: Name of the slice.
        limit: Largest value allowed.
        aim: What of a correction's effects it is about.
        scale: What that is multiplied by for the metric.
    """

    clause: str
    metric: str
    slice: str
    limit: float
    aim: Aim
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class RemedyBound:
    """Whether a correction keeps a promise.

    Attributes:
        promise: The promise.
        interval: The metric with the correction in place.
        state: `met` where the upper bound is within the limit, `broken` where the lower one is beyond it, else `open`.
    """

    promise: RemedyTarget
    interval: Interval
    state: Literal["met", "open", "broken"]


def promises(contract: Contract, slices: Sequence[str], *, advantages: bool) -> tuple[list[RemedyTarget], list[str]]:
    """What a correction can be asked to keep, on each slice, and a sentence for each clause that it cannot.

    Args:
        contract: The contract.
        slices: Slices with sequences in them.
        advantages: Whether advantages are known.

    Raises:
        ValueError: If a clause needs an assumption that the contract does not state.
    """
    asked: list[RemedyTarget] = []
    beyond: list[str] = []
    for clause in contract.clauses:
        base = DERIVED[clause.metric].base if clause.metric in DERIVED else clause.metric
        aim = _AIMS.get(base)
        if aim is None:
            beyond.append(f"{clause.id}: {clause.metric_text} {_FIXED}")
        elif clause.parsed_statistic.kind != "mean":
            beyond.append(f"{clause.id}: {clause.statistic_text} is not a mean, and only means are of the surrogate")
        elif aim in {"positive", "negative"} and not advantages:
            beyond.append(f"{clause.id}: the recording has no advantages")
        else:
            scale = factors(clause.metric, contract.assumptions)[0] if clause.metric in DERIVED else 1.0
            asked += [
                RemedyTarget(clause.id, clause.metric, name, clause.limit_for(name), aim, scale) for name in slices
            ]
    return asked, beyond


def finding(promise: RemedyTarget, correction: Correction, found: Effects, *, alpha: float, fewest: int) -> RemedyBound:
    """A promise against a correction's effects on the sequences of its slice.

    Args:
        promise: The promise.
        correction: The correction.
        found: Its effects, on the slice.
        alpha: Error probability of each side.
        fewest: Sequences below which nothing is met.
    """
    interval = _interval(promise.aim, correction, found, alpha)
    if promise.scale != 1.0:
        interval = affine(interval, promise.scale)
    if interval.lower > promise.limit:
        return RemedyBound(promise, interval, "broken")
    enough = interval.samples >= fewest and interval.upper <= promise.limit
    return RemedyBound(promise, interval, "met" if enough else "open")


def _interval(aim: Aim, correction: Correction, found: Effects, alpha: float) -> Interval:
    largest = correction.largest
    if aim == "ess":
        return _chi2(found, largest, alpha)
    values: NDArray[np.float64] = getattr(found, aim)
    if aim in {"positive", "negative"}:
        known = QUANTITIES[f"advantage_drift_{aim}"]
        return _mean(values[~np.isnan(values)], known.low, known.high, alpha, cap=known.cap)
    if aim == "sequence":
        return _distance(values, correction, "sequence", alpha)
    steps, whole = (
        _distance(each, correction, level, alpha / 2)
        for each, level in ((values, "token"), (found.sequence, "sequence"))
    )
    nearest = min(steps, whole, key=lambda each: each.estimate)
    return replace(nearest, lower=min(steps.lower, whole.lower), upper=min(steps.upper, whole.upper))


def _distance(values: NDArray[np.float64], correction: Correction, level: str, alpha: float) -> Interval:
    """With r the ratio that a weight c is held against, the integrand is 1/2 + c/2 - min(c, r)."""
    largest = correction.largest
    most = 0.5 if correction.never_above(level) else 0.5 + 0.5 * largest
    interval = _mean(values, 0.5 - 0.5 * largest if largest > 1.0 else 0.0, most, alpha)
    ends = {end: max(0.0, getattr(interval, end)) for end in ("estimate", "lower", "upper")}
    return replace(interval, **ends)


def _chi2(found: Effects, largest: float, alpha: float) -> Interval:
    """E[c^2] / E[c]^2 - 1 from the two means, each with half of the error probability."""
    square = _mean(found.square, 0.0, largest * largest, alpha / 2)
    mean = _mean(found.weight, 0.0, largest, alpha / 2)

    def ratio(above: float, below: float) -> float:
        return max(0.0, above / (below * below) - 1.0) if below > 0.0 else math.inf

    return Interval(
        ratio(square.estimate, mean.estimate),
        ratio(square.lower, mean.upper),
        ratio(square.upper, mean.lower),
        mean.samples,
        mean.method,
        "from E[c^2] and E[c]",
    )


def _mean(values: NDArray[np.float64], low: float, high: float, alpha: float, cap: float | None = None) -> Interval:
    if math.isfinite(low):
        values = values.clip(low, high)  # a mean of equal values may be off by its rounding
    return capped_mean_interval(
        Binned.of_samples(values).merged(_BINS),
        low=low,
        high=high,
        cap=cap or max(abs(low), abs(high)),
        alpha_lower=alpha,
        alpha_upper=alpha,
    )
