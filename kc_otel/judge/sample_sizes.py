"""Numbers of observations: the fewest for a PASS, with their time, and the typical ones until an early stop.

Nothing is simulated: the evaluator's bounds are asked about samples. The fewest for a PASS are those of two identical
kernels; real ones need more. A typical sample varies as much as it is large (an exponential law: a coefficient of
variation of 1), and has the expected shares; half of all gates take more.
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
_MOST_TO_PASS: Final = 10**12
_MOST_TYPICAL: Final = 10**8
_TYPICAL_PRECISION: Final = 100
"""A typical number is exact to one part in so many."""
_LAW_POINTS: Final = 1000
"""Points of the law that stand for more observations than that."""
_ONE_AT_BEST: Final = frozenset({"ratio", "geometric_ratio", "support_deficit"})
"""Metrics that are computed from values which are 1, and not 0, where the kernels are identical."""


@dataclass(frozen=True, slots=True)
class Needed:
    """Requirements for a clause to PASS on a slice."""

    clause: str
    slice: str
    observations: int | None
    """Fewest with which it can, if the kernels are identical; None when no number does."""
    unit: str
    minimum: int
    """Observations that the contract requires before any verdict."""
    minimum_name: str
    """Name of that number in the contract; empty when it asks for nothing."""


def observations_to_pass(contract: Contract, clause: Clause, slice: str) -> Needed:
    """The fewest observations with which a clause can PASS on a slice."""
    minimum = samples_needed(clause, contract.observability)
    name = contract.observability.minimum(clause)[0] if minimum > 1 else ""
    return Needed(clause.id, slice, _fewest(contract, clause, slice), _unit(clause), minimum, name)


def seconds_to_pass(contract: Contract, needed: Needed, tokens_per_second: float) -> float | None:
    """Return the least time until a gate's last window can pass, seconds, by the tokens that are measured on a slice.

    None where observations do not follow from tokens, inf where they do not fit into the long window. Windows share no
    data: the first takes as long as its observations, each further one a whole window, short or long. Prompts have one
    rollout, and rollouts the horizon.
    """
    tokens = {"token": 1, "sequence": contract.assumptions.horizon, "prompt": contract.assumptions.horizon}
    each = tokens.get(needed.unit)
    if needed.observations is None or each is None:
        return None
    first = max(needed.observations, needed.minimum) * each / tokens_per_second
    for window in (contract.observability.window, contract.observability.long_window):
        if first <= window:
            return first + (contract.promotion.windows - 1) * window
    return math.inf


def _unit(clause: Clause) -> str:
    return "request" if clause.quantity is None else str(clause.quantity.per)


def _fewest(contract: Contract, clause: Clause, slice: str) -> int | None:
    alpha = (1.0 - contract.observability.confidence) / 2.0  # each of the two windows may err in half of it
    limit = clause.limit_for(slice)
    value = 1.0 if clause.metric in _ONE_AT_BEST else 0.0

    def passes(count: int) -> bool:
        sample = Binned.of_counts(np.array([value]), np.array([count]))
        interval = clause_interval(clause, contract.assumptions, sample, alpha_lower=alpha, alpha_upper=alpha)
        return interval.upper <= limit

    if clause.allows_none(slice):
        return 1 if value <= clause.parsed_statistic.argument else None
    if clause.parsed_statistic.kind == "max" or (clause.quantity is not None and clause.quantity.per is Unit.BATCH):
        return 1 if value <= limit else None
    return _least(passes, 2, _MOST_TO_PASS, _MOST_TO_PASS)


def _least(decided: Callable[[int], bool], first: int, most: int, precision: int) -> int | None:
    """Return the least number from `first` on that decides, to one part in `precision`; None where `most` does not."""
    low = high = first
    while not decided(high):
        low, high = high, 2 * high
        if high > most:
            return None
    while high - low > max(1, low // precision):
        middle = (low + high) // 2
        low, high = (low, middle) if decided(middle) else (middle, high)
    return high


@dataclass(frozen=True, slots=True)
class TypicalSizes:
    """Typical observations for one cell of a gate."""

    clause: str
    slice: str
    unit: str
    sizes: tuple[int | None, ...]
    """For each of `TRUTHS`; None where no such number is known."""


def typical_sizes(contract: Contract) -> tuple[TypicalSizes, ...]:
    """Return the typical observations of each clause on each slice."""
    found = []
    for clause in contract.clauses:
        known: dict[float, tuple[int | None, ...]] = {}
        for slice in contract.slices_for(clause):
            limit = clause.limit_for(slice)
            if limit not in known:
                known[limit] = tuple(typical_size(contract, clause, slice, truth) for truth in TRUTHS)
            found.append(TypicalSizes(clause.id, slice, _unit(clause), known[limit]))
    return tuple(found)


def typical_size(contract: Contract, clause: Clause, slice: str, truth: float) -> int | None:
    """Observations after which a clause is typically decided; None where its statistic says nothing of that.

    `truth` is the true value of the statistic, in limits: below 1 the clause is to PASS, above 1 to FAIL.
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

    first = max(samples_needed(clause, contract.observability), 2)
    return _least(decided, first, _MOST_TYPICAL, _TYPICAL_PRECISION)


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
        return Binned.of_counts(np.array([low, high]), np.array([count - above, above]))

    return sample


def _exponential(mean: float, high: float) -> Callable[[int], Binned]:
    """Samples of an exponential law, cut at the largest value that there is."""

    def sample(count: int) -> Binned:
        points = min(count, _LAW_POINTS)
        values = -np.log1p(-(np.arange(points) + 0.5) / points)
        ends = np.linspace(0, count, points + 1).astype(np.int64)
        return Binned.of_counts(np.minimum(values * (mean / values.mean()), high), np.diff(ends))

    return sample
