"""Typical numbers of observations until a gate that may stop early is decided on a clause.

No simulation: the bounds that the gate uses are asked about a sample that is as a typical one would be. Observations
vary as much as they are large (an exponential law: a coefficient of variation of 1), and shares are the expected ones.
Half of all gates take more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from kc_otel.contract.clause import Clause
from kc_otel.contract.limits import factors
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import DERIVED, Unit
from kc_otel.judge.statistics import clause_interval, samples_needed
from kc_otel.stats import Binned

TRUTHS: Final = (0.5, 0.8, 2.0)
"""Truth in limits for which sizes are said: what to expect, the worst that one should plan for, and a fault."""
_MAX_OBSERVATIONS: Final = 10**8
_LAW_POINTS: Final = 1000
"""Points of the law that stand for more observations than that."""


@dataclass(frozen=True, slots=True)
class TypicalSizes:
    """Typical observations for one cell of a gate.

    Attributes:
        clause: Its id.
        slice: The slice.
        unit: Unit of an observation.
        sizes: Observations for each of `TRUTHS`; None where no such number is known.
    """

    clause: str
    slice: str
    unit: str
    sizes: tuple[int | None, ...]


def typical_sizes(contract: Contract) -> tuple[TypicalSizes, ...]:
    """Return the typical observations of each clause on each slice."""
    found = []
    for clause in contract.clauses:
        known: dict[float, tuple[int | None, ...]] = {}
        for slice in contract.slices_for(clause):
            limit = clause.limit_for(slice)
            if limit not in known:
                known[limit] = tuple(typical_size(contract, clause, slice, truth) for truth in TRUTHS)
            unit = "request" if clause.quantity is None else str(clause.quantity.per)
            found.append(TypicalSizes(clause.id, slice, unit, known[limit]))
    return tuple(found)


def typical_size(contract: Contract, clause: Clause, slice: str, truth: float) -> int | None:
    """Observations after which a clause is typically decided; None where its statistic says nothing of that.

    Args:
        contract: The contract: its confidence, its minima, and the number of its cells.
        clause: One of its clauses.
        slice: The slice whose limit counts.
        truth: True value of the statistic, in limits: below 1 the clause is to PASS, above 1 to FAIL.
    """
    sample = _typical(contract, clause, slice, truth)
    if sample is None:
        return None
    alpha = (1.0 - contract.observability.confidence) / 2.0
    cells = len(contract.clauses) * (1 + len(contract.slices))
    limit, assumptions = clause.limit_for(slice), contract.assumptions

    def decided(count: int) -> bool:
        bounds = clause_interval(
            clause, assumptions, sample(count), alpha_lower=alpha / cells, alpha_upper=alpha, anytime=True
        )
        return bounds.upper <= limit if truth < 1.0 else bounds.lower > limit

    low, high = 0, max(samples_needed(clause, contract.observability), 2)
    if decided(high):
        return high
    while not decided(high):
        low, high = high, 2 * high
        if high > _MAX_OBSERVATIONS:
            return None
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if decided(middle) else (middle, high)
    return high


def _typical(contract: Contract, clause: Clause, slice: str, truth: float) -> Callable[[int], Binned] | None:
    """A typical sample of each size, where the statistic is `truth` limits."""
    statistic, limit, quantity = clause.parsed_statistic, clause.limit_for(slice), clause.quantity
    per = None if quantity is None else quantity.per
    if statistic.kind == "max" or per is Unit.BATCH or limit <= 0.0 or clause.metric == "support_deficit":
        return None
    if statistic.kind == "fraction":
        return _with_share(truth * limit, statistic.argument, statistic.argument + 1.0)
    if statistic.kind == "quantile":
        return _with_share((1.0 - statistic.argument) ** (1.0 / truth), limit / 2.0, 2.0 * limit)
    scale, offset = factors(clause.metric, contract.assumptions) if clause.metric in DERIVED else (1.0, 0.0)
    mean = (truth * limit - offset) / scale
    if quantity is not None and quantity.two_valued:
        return _with_share((mean - quantity.low) / (quantity.high - quantity.low), quantity.low, quantity.high)
    if quantity is not None and quantity.low < 0.0:
        return None
    return _exponential(mean, math.inf if quantity is None else quantity.high) if mean > 0.0 else None


def _with_share(share: float, low: float, high: float) -> Callable[[int], Binned] | None:
    """Samples of two values, the higher one with a share."""
    if not 0.0 < share < 1.0:
        return None

    def sample(count: int) -> Binned:
        above = round(share * count)
        return _binned(np.array([low, high]), np.array([count - above, above]))

    return sample


def _exponential(mean: float, high: float) -> Callable[[int], Binned]:
    """Samples of an exponential law, cut at the largest value that there is."""

    def sample(count: int) -> Binned:
        points = min(count, _LAW_POINTS)
        values = -np.log1p(-(np.arange(points) + 0.5) / points)
        ends = np.linspace(0, count, points + 1).astype(np.int64)
        return _binned(np.minimum(values * (mean / values.mean()), high), np.diff(ends))

    return sample


def _binned(values: np.ndarray, counts: np.ndarray) -> Binned:
    there = counts > 0
    values, counts = values[there], counts[there]
    return Binned(
        lower=values,
        upper=values,
        count=counts.astype(np.int64),
        total=int(counts.sum()),
        sum=float(values @ counts),
        minimum=float(values[0]),
        maximum=float(values[-1]),
    )
