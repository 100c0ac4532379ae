"""Minimum observations for a clause to PASS at all, with two identical kernels.

Real kernels need more. The number comes from the evaluator's own interval, asked with equal log-probabilities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import Unit
from kc_otel.judge.statistics import clause_interval, samples_needed
from kc_otel.stats import Binned

_MAX_OBSERVATIONS: Final = 10**12
_ONE_AT_BEST: Final = frozenset({"ratio", "geometric_ratio", "support_deficit"})
"""Metrics that are computed from values which are 1, and not 0, where the kernels are identical."""


@dataclass(frozen=True, slots=True)
class Needed:
    """Requirements for a clause to PASS.

    Attributes:
        clause: Its id.
        slice: The slice.
        observations: Fewest observations with which it can, if the kernels are identical; None when no number does.
        unit: Unit of an observation: token, sequence, batch, or request.
        minimum: Observations that the contract requires before any verdict.
        minimum_name: Name of that number in the contract; empty when it asks for nothing.
    """

    clause: str
    slice: str
    observations: int | None
    unit: str
    minimum: int
    minimum_name: str


def observations_to_pass(contract: Contract, clause: Clause, slice: str) -> Needed:
    """The fewest observations with which a clause can PASS on a slice."""
    minimum = samples_needed(clause, contract.observability)
    name = contract.observability.minimum(clause)[0] if minimum > 1 else ""
    quantity = clause.quantity
    unit = "request" if quantity is None else str(quantity.per)
    return Needed(clause.id, slice, _fewest(contract, clause, slice), unit, minimum, name)


def _fewest(contract: Contract, clause: Clause, slice: str) -> int | None:
    alpha = (1.0 - contract.observability.confidence) / 2.0  # each of the two windows may err in half of it
    limit = clause.limit_for(slice)
    value = 1.0 if clause.metric in _ONE_AT_BEST else 0.0

    def passes(count: int) -> bool:
        sample = _identical(value, count)
        interval = clause_interval(clause, contract.assumptions, sample, alpha_lower=alpha, alpha_upper=alpha)
        return interval.upper <= limit

    if clause.allows_none(slice):
        return 1 if value <= clause.parsed_statistic.argument else None
    if clause.parsed_statistic.kind == "max" or (clause.quantity is not None and clause.quantity.per is Unit.BATCH):
        return 1 if value <= limit else None
    high = 2
    while not passes(high):
        high *= 2
        if high > _MAX_OBSERVATIONS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    return high


def _identical(value: float, count: int) -> Binned:
    edge = np.array([value])
    return Binned(
        lower=edge,
        upper=edge,
        count=np.array([count], dtype=np.int64),
        total=count,
        sum=value * count,
        minimum=value,
        maximum=value,
    )


def rounded(number: int) -> int:
    """Up to two significant digits, for people.

    >>> rounded(13973)
    14000
    """
    if number <= 0:
        return 0
    unit = int(10 ** max(0, math.floor(math.log10(number)) - 1))
    return -(-number // unit) * unit
