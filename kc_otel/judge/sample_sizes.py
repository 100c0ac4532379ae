"""Numbers of observations: the fewest for a PASS, the typical ones until an early stop, and a gate's.

Nothing is simulated: the evaluator's bounds are asked about samples. The fewest for a PASS are those of two identical
kernels; real ones need more. A typical sample varies as much as it is large (an exponential law: a coefficient of
variation of 1), and has the expected shares; half of all gates take more. A gate's plan is its least time in traffic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kc_otel.contract.clause import Clause
from kc_otel.contract.limits import factors
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import DERIVED, Unit
from kc_otel.contract.units import format_duration
from kc_otel.contract.words import did_you_mean, duration, plural
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


@dataclass(frozen=True, slots=True)
class Traffic:
    """Expected traffic of a gate: all tokens, None when unknown, the share that is measured, and slices' shares."""

    tokens_per_second: float | None
    sampling: float
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Planned:
    """Minimum requirements of one cell of a gate.

    `observations` is None when no number lets the clause pass; `seconds` until the last window can pass is None when it
    cannot be told, and inf when never. `why` says why it can never pass, or why the time is unknown.
    """

    clause: str
    slice: str
    observations: int | None
    unit: str
    seconds: float | None
    why: str

    @property
    def never(self) -> bool:
        """True if this cell prevents the gate from ever opening."""
        return self.observations is None or self.seconds == math.inf


def plan_gate(contract: Contract, traffic: Traffic, windows: int) -> tuple[Planned, ...]:
    """Return the minimum requirements of each clause on each slice.

    A clause has to pass in `windows` windows that share no data. It may do so on the short window, or on the long one,
    which then has to pass in between: the first takes as long as its observations, each further one a whole window.
    """
    found = []
    for clause in contract.clauses:
        for slice in contract.slices_for(clause):
            needed = observations_to_pass(contract, clause, slice)
            if needed.observations is None:
                why = "not even identical kernels can show that this limit is kept; loosen it"
                found.append(Planned(clause.id, slice, None, needed.unit, math.inf, why))
                continue
            count = max(needed.observations, needed.minimum)
            rate, why = _rate(contract, traffic, slice, needed.unit)
            seconds = None if rate is None else _seconds(contract, count / rate, windows)
            if rate is not None and seconds == math.inf:
                why = (
                    f"about {duration(count / rate)} of traffic do not fit into the long window of "
                    f"{format_duration(contract.observability.long_window)}; sample more, or lengthen it"
                )
            found.append(Planned(clause.id, slice, count, needed.unit, seconds, why))
    return tuple(found)


def shares_of(contract: Contract, texts: Sequence[str]) -> dict[str, float]:
    """Parts of the traffic by slice, from `SLICE=PART`; a ValueError for another form, or another slice."""
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in contract.slices:
            raise ValueError(
                f"--share: the contract has no slice {name!r}; {did_you_mean(name, contract.slices, 'there are')}"
            )
        try:
            share = float(value)
        except ValueError:
            share = math.nan
        if not 0.0 < share <= 1.0:
            raise ValueError(f"--share: {value!r} is not a part of the traffic; write {name}=0.1 for a tenth")
        found[name] = share
    return found


def _rate(contract: Contract, traffic: Traffic, slice: str, unit: str) -> tuple[float | None, str]:
    """Observations per second, or why that cannot be told; prompts have one rollout, and rollouts the horizon."""
    if unit not in {"token", "sequence", "prompt"}:
        return None, f"the number of {plural(unit)} does not follow from the number of tokens"
    if traffic.tokens_per_second is None:
        return None, "give --tokens-per-second"
    if slice not in traffic.shares:
        return None, f"give --share {slice}=PART of the traffic"
    tokens = traffic.tokens_per_second * traffic.sampling * traffic.shares[slice]
    if unit == "token":
        return tokens, ""
    horizon = contract.assumptions.horizon
    return (None, "state assumptions.horizon") if horizon is None else (tokens / horizon, "")


def _seconds(contract: Contract, first: float, windows: int) -> float:
    watched = contract.observability
    for window in (watched.window, watched.long_window):
        if first <= window:
            return first + (windows - 1) * window
    return math.inf
