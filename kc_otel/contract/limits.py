"""Possible values of a clause's statistic, the factors of derived metrics, and the resolution of histograms.

A value below a 20th of the smallest limit on a quantity changes no verdict, so it counts as zero; from there on the
buckets of scale 4 (4.4 % wide) reach nine powers of two up, those of scale 3 (9.1 %) nineteen. Bounds become wider by
limit/20 at most for the zero bucket, and by half a bucket for the scale (`tests/judge/test_bucket_layouts.py`). Larger
values are sent at a lower scale, as the SDKs do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Assumptions, Contract
from kc_otel.contract.registry.clause_metrics import DERIVED, QUANTITIES, RECORDED, SAMPLING, Quantity, Unit
from kc_otel.contract.slices import ALL

_NOUN: Final = {
    "tv_token": "a total variation",
    "tv_seq": "a total variation",
    "tv_exact": "a total variation",
    "reward_drift": "a reward drift over this reward_range",
    "reward_drift_bound": "a reward drift over this reward_range",
    "gradient_bias_bound": "a gradient bias under these assumptions",
    "support_deficit": "a probability",
    "js": "a Jensen-Shannon divergence",
    "top1_disagreement": "a share of tokens",
}


@dataclass(frozen=True, slots=True)
class Range:
    """Values that a clause's statistic can take; `cap` is set when `high` comes from the cap on a mean."""

    low: float
    high: float
    noun: str
    cap: float | None = None


def range_of(clause: Clause, assumptions: Assumptions) -> Range | None:
    """Values that the clause's statistic can take; None when an assumption that it needs is missing."""
    statistic, metric = clause.parsed_statistic, clause.metric
    noun = _NOUN.get(metric, metric)
    if statistic.kind == "fraction":
        return Range(0.0, 1.0, "a fraction")
    if metric == "support_deficit":
        return Range(0.0, 1.0, noun)
    if clause.base not in QUANTITIES:
        return Range(0.0, math.inf, metric)
    quantity = QUANTITIES[clause.base]
    scale = scale_of(metric, assumptions) if metric in DERIVED else 1.0
    if scale is None:
        return None
    low = 0.0 if metric in DERIVED else quantity.low
    cap = clause.cap or quantity.cap
    if statistic.kind != "mean" or cap >= quantity.high:
        return Range(low, scale * quantity.high, noun)
    return Range(max(low, -cap), scale * cap, noun, cap)


def scale_of(metric: str, assumptions: Assumptions) -> float | None:
    """Return the size of the factor from a derived metric's base mean to the metric; None without an assumption."""
    try:
        return abs(factors(metric, assumptions)[0])
    except ValueError:
        return None


def factors(metric: str, assumptions: Assumptions) -> tuple[float, float]:
    """(scale, offset) with which a derived metric is `scale * mean(base) + offset`.

    k1 = -E[l]; support deficit = 1 - E[w]; clip-budget share = E|l| / log(1 + clip); reward drift <= (r_max - r_min)
    TV_seq; gradient bias <= 2 A_max G_seq TV_seq, G_seq = horizon * score_norm_max. Source: Xu and Wu 2026,
    arXiv:2606.07581. Raises ValueError if an assumption is missing.
    """
    given = {name: getattr(assumptions, name) for name in DERIVED[metric].needs}
    if missing := [name for name, value in given.items() if value is None]:
        msg = f"{metric} needs assumptions.{' and assumptions.'.join(missing)}; write them into the contract"
        raise ValueError(msg)
    return DERIVED[metric].factors(*given.values())


MOST_BUCKETS: Final = 160
ZERO_THRESHOLD: Final = 2.0**-30
"""Values no farther from zero than this always count as zero."""
WIDEST_ZERO: Final = 0.5
_SHARE_OF_LIMIT: Final = 20.0
_FINE, _COARSE = 4, 3
_FINE_OCTAVES: Final = (MOST_BUCKETS - 1) >> _FINE
"""Powers of two that fit at the fine scale; one bucket is empty and says where the zero bucket ends."""
_SMALLEST_THRESHOLD, _LARGEST_THRESHOLD = -30, -5
"""Powers of two, of quantities that are no number of steps."""
_MAX_LOG_RATIO: Final = 64.0
"""Largest |log ratio|; larger values of other quantities are rare enough for a lower scale."""
_FIXED_THRESHOLDS: Final = {"weights_lag": -1, "ratio": -5, "geometric_ratio": -5}
"""Thresholds, powers of two, of numbers of steps, and of ratios and their means: these are 1 where kernels agree, and
no limit on how far they are from 1 needs small ones."""
_UNLIMITED_THRESHOLD_EXPONENT: Final = -20
_TV_UNLIMITED: Final = -9
"""Thresholds, powers of two, of what is recorded without a limit on it."""


class BucketLayout(NamedTuple):
    """Buckets: edges differ by 2^(2^-scale); the zero bucket reaches to the threshold on both sides."""

    scale: int
    zero_threshold: float

    @property
    def growth(self) -> float:
        """Upper edge of a bucket, as a multiple of the lower one."""
        growth: float = 2.0 ** (2.0**-self.scale)
        return growth


def bucket_layouts(contract: Contract) -> dict[str, BucketLayout]:
    """Layout of each quantity of RECORDED, by its key."""
    return {key: bucket_layout(contract, quantity) for key, quantity in RECORDED.items()}


def bucket_layout(contract: Contract, quantity: Quantity) -> BucketLayout:
    """Layout of a quantity under a contract."""
    limits = [
        _told_apart(contract, clause, slice)
        for clause in contract.clauses
        if quantity in (clause.quantity, clause.opposite)
        for slice in (ALL, *clause.slices)
    ]
    return _layout(quantity, min(limits, default=math.inf))


def _told_apart(contract: Contract, clause: Clause, slice: str) -> float:
    """The smallest value that a clause has to tell from others, in the unit of its quantity."""
    statistic = clause.parsed_statistic
    if statistic.kind == "fraction":
        return abs(statistic.argument)
    limit = clause.limit_for(slice)
    if clause.metric in DERIVED:
        scale = scale_of(clause.metric, contract.assumptions)
        limit = 0.0 if scale is None else limit / scale  # the evaluator reports a missing assumption
    return abs(limit)


def _layout(quantity: Quantity, limit: float) -> BucketLayout:
    if quantity.key in SAMPLING:
        return BucketLayout(_COARSE, 2.0**_LARGEST_THRESHOLD)
    fixed = _FIXED_THRESHOLDS.get(quantity.base or quantity.key)
    if fixed is not None:
        return BucketLayout(_FINE, 2.0**fixed)
    threshold = _threshold(quantity.key, limit)
    if quantity.base and QUANTITIES[quantity.base].per is Unit.TOKEN:
        reach = 1.0  # a mean over a sequence is far smaller than its largest token
    else:
        reach = quantity.high if math.isfinite(quantity.high) else min(2.0 * quantity.cap, _MAX_LOG_RATIO)
    octaves = math.ceil(math.log2(reach)) - threshold
    return BucketLayout(_FINE if octaves <= _FINE_OCTAVES else _COARSE, 2.0**threshold)


def _threshold(key: str, limit: float) -> int:
    if math.isinf(limit):
        return _TV_UNLIMITED if key == "tv_token" else _UNLIMITED_THRESHOLD_EXPONENT
    if limit <= 0.0:
        return _SMALLEST_THRESHOLD
    return max(_SMALLEST_THRESHOLD, min(_LARGEST_THRESHOLD, math.floor(math.log2(limit / _SHARE_OF_LIMIT))))
