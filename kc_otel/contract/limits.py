"""Possible values of a clause's statistic, so the limits that mean something, and the factors of derived metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Assumptions
from kc_otel.contract.registry.clause_metrics import DERIVED, QUANTITIES

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
    """Values that a clause's statistic can take.

    `cap` is set when `high` comes from the cap on the mean of an unbounded quantity.
    """

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
