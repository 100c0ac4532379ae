"""A clause on one slice as mathematics sees it: a statistic of a quantity, and a number that it does not exceed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kc_otel.contract.clause import Clause
from kc_otel.contract.limits import scale_of
from kc_otel.contract.model import Assumptions
from kc_otel.contract.registry import DERIVED

__all__ = ["Promise", "promise_of"]

_SAME_MEAN = {
    "clip_budget_share": "abs_log_ratio",
    "reward_drift_bound": "tv_seq",
    "gradient_bias_bound": "tv_seq",
}


@dataclass(frozen=True, slots=True)
class Promise:
    """A statistic of a quantity and its limit. A derived metric is written as the mean that it is made of.

    Attributes:
        metric: Key of a quantity, or `k1`, `support_deficit`, or a `gen_ai.*` metric; with the operator's name where it
            is of one, so that two operators are never taken for one.
        kind: Statistic.
        argument: Rank in (0, 1) of a quantile, threshold of a fraction.
        limit: Largest value allowed, in the quantity's unit.
        by_sequence: Whether a token quantity's mean weighs every sequence alike.
    """

    metric: str
    kind: Literal["mean", "max", "quantile", "fraction"]
    limit: float
    argument: float = 0.0
    by_sequence: bool = False

    @property
    def tail(self) -> tuple[float, float]:
        """(a, q) of a maximum, quantile or fraction: all observations but a share q are at most a."""
        if self.kind == "fraction":
            return self.argument, min(1.0, self.limit)
        if self.kind == "quantile":
            # 1 - 0.999 is not 0.001 to the last bit, and a share is compared with shares that people write
            return self.limit, round(1.0 - self.argument, 12)
        return self.limit, 0.0


def promise_of(clause: Clause, slice: str, assumptions: Assumptions) -> Promise:
    """The promise of a clause on a slice.

    A cap on what has a largest value leaves the mean itself less bounded than its limit says. A derived metric whose
    assumptions are missing (`lint` refuses that) keeps its name and says nothing.
    """
    statistic, limit, metric = clause.parsed_statistic, clause.limit_for(slice), clause.metric
    quantity = clause.quantity
    if clause.cap is not None and quantity is not None and clause.cap < quantity.high < math.inf:
        limit *= quantity.high / clause.cap  # x <= min(x, cap) high / cap, for x from 0 to high
    scale = scale_of(metric, assumptions) if metric in DERIVED else None
    if metric in _SAME_MEAN and scale is not None and scale > 0.0 and math.isfinite(scale):
        metric, limit = _SAME_MEAN[metric], limit / scale
    if clause.operator is not None:
        metric = clause.metric_text
    return Promise(metric, statistic.kind, limit, statistic.argument, clause.by_sequence)
