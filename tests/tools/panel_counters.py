"""What panels say of counters, of evaluators and of recorders, and of what recorders say of themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

from kc_otel.judge.otlp.sink import DURATION_BOUNDS
from tests.tools.panel_answers import Answer
from tests.tools.panel_cells import Expected, alone
from tests.tools.panel_evaluators import Moment
from tests.tools.panel_rows import (
    Counter,
    Labels,
    Rows,
    World,
    by,
    increase,
    of_evaluators,
    of_recorders,
    quarantined,
    rate,
)
from tests.tools.panel_traffic import DROPPED, TRAFFIC, Batch

OUTCOME = ("kc_contract", "kc_outcome")
REASON = ("kc_contract", "kc_reason")


def total(rows: Callable[[World], Rows]) -> Expected:
    """All rows together; 0 where there are none."""
    return lambda world: alone(float(sum(value for _, value in rows(world))))


def grouped(names: tuple[str, ...], rows: Callable[[World], Rows], how: Any = sum) -> Expected:
    """Rows by labels."""
    return lambda world: by(names, rows(world), how)


def in_range(counter: Callable[[World], Counter]) -> Expected:
    """What a counter grew by in the dashboard's range; nothing, not 0, where nobody counts and no evaluator lives."""

    def found(world: World) -> dict[Labels, Answer]:
        rows = increase(world, counter(world), world.range)
        everything = alone(float(sum(value for _, value in rows)))
        return everything if rows else alive(lambda _: everything)(world)

    return found


def rates(names: tuple[str, ...], counter: Callable[[World], Counter]) -> Expected:
    """What a counter grows by in a second, by labels."""
    return grouped(names, lambda world: rate(world, counter(world)))


# Evaluators


def points(wanted: Callable[[str], bool] = lambda _: True) -> Callable[[World], Rows]:
    """Data points per second, of some outcomes."""

    def found(world: World) -> Rows:
        counter = of_evaluators(world, ["kc_outcome"], lambda moment: moment.points)
        return rate(world, [row for row in counter if wanted(row[0]["kc_outcome"])])

    return found


def requests(world: World) -> Counter:
    return of_evaluators(world, ["kc_transport", "kc_outcome"], lambda moment: moment.requests)


def attempts(world: World) -> Counter:
    return of_evaluators(world, ["kc_endpoint", "kc_outcome"], lambda moment: moment.attempts)


def answered(rank: float) -> Expected:
    """A quantile of the time to an answer, by transport and outcome, with an even spread within a bucket."""

    def bounds(moment: Moment) -> dict[tuple[str, str, str], int]:
        names = [*map(str, DURATION_BOUNDS), "inf"]
        return {
            (*of, name): count
            for of, found in moment.durations.items()
            for name, count in zip(names, accumulate(found.counts), strict=True)
        }

    def found(world: World) -> dict[Labels, Answer]:
        names = ("kc_transport", "kc_outcome")
        rows = rate(world, of_evaluators(world, [*names, "le"], bounds))
        per_bound = [({**labels, "le": ""}, (float(labels["le"]), value)) for labels, value in rows]
        return by(names, per_bound, lambda each: _quantile(rank, each))

    return found


def _quantile(rank: float, rows: Iterable[tuple[float, float]]) -> float:
    """As Prometheus interpolates."""
    counts: dict[float, float] = {}
    for bound, value in rows:
        counts[bound] = counts.get(bound, 0.0) + value
    wanted, low, before = rank * counts[math.inf], 0.0, 0.0
    for bound, count in sorted(counts.items()):
        if count >= wanted:
            return low if bound == math.inf else low + (bound - low) * (wanted - before) / (count - before)
        low, before = bound, count
    return math.nan


def failures(world: World) -> Counter:
    return of_evaluators(world, ["kc_contract"], lambda moment: moment.failures)


def waiting(world: World) -> Rows:
    return world.rows(lambda moment: [({"kc_endpoint": name}, number) for name, number in moment.waiting.items()])


def age(world: World) -> dict[Labels, Answer]:
    """Seconds since the last evaluation of any evaluator."""
    last = [moment.at for moment in world.now()]
    return alone(world.at - max(last)) if last else {}


def alive(expected: Expected) -> Expected:
    """What is said as long as an evaluator lives: one that has judged within the last minute."""
    return lambda world: expected(world) if any(seconds < 60 for seconds in age(world).values()) else {}


def known(of: Callable[[Moment], float]) -> Callable[[World], Rows]:
    """One number of each evaluator."""
    return lambda world: world.rows(lambda moment: [({}, of(moment))])


# Recorders


def invalid(world: World) -> Counter:
    return of_recorders(world, lambda _batch, _name: {("kc_reason", "nan_logprob"): 1})


def dropped(world: World) -> Counter:
    return of_recorders(world, lambda _batch, _name: {("kc_reason", "no-logprobs"): DROPPED})


def refused(world: World) -> Counter:
    return of_recorders(world, lambda _, name: {None: float(TRAFFIC[name].refused)})


def tokens(world: World) -> Counter:
    return of_recorders(world, lambda batch, _: {None: batch.log_ratio.size})


def outcomes(place: int) -> Callable[[World], Counter]:
    """Sequences, tokens, or the sum of (1-w)+, of what quarantine kept and of what it did not."""

    def count(batch: Batch, name: str) -> dict[tuple[str, str], float]:
        return {("kc_outcome", outcome): float(sums[place]) for outcome, sums in quarantined(batch, name).items()}

    return lambda world: of_recorders(world, count)


def drift_of_outcomes(world: World) -> dict[Labels, Answer]:
    """Total variation per token of what is kept and of what is not."""
    drift, size = (rates(OUTCOME, outcomes(place))(world) for place in (2, 1))
    return {key: drift[key] / size[key] for key in drift}


def sampling(world: World) -> Rows:
    found = [({"kc_contract": world.contract.name}, one.sampling) for one in TRAFFIC.values()]
    return [row for row in found if world.takes(row[0])]


def kernels(world: World) -> dict[Labels, Answer]:
    """A row for each version that a recorder reports, with its fields."""
    names = ("__name__", "instance", "kc_contract", "kc_kernel_role", "kc_kernel_version")
    found = set()
    for recorder, pair in world.recorded.kernels.items():
        for role, kernel in zip(("train", "inference"), pair, strict=True):
            values = ("kc_kernel_info", recorder, world.contract.name, role, kernel.fingerprint)
            spelled = {"engine": kernel.engine, "engine_version": kernel.version, "dtype": kernel.dtype}
            fields = ((f"kc_kernel_{name}", text) for name, text in spelled.items() if text)
            found.add(frozenset((*zip(names, values, strict=True), *fields)))
    return {key: 1.0 for key in found if world.takes(dict(key), ("contract",))}


def reported_kernels(world: World) -> dict[Labels, Answer]:
    """The kernel versions that any recorder reports."""
    return dict.fromkeys((without(key, ("__name__", "instance")) for key in kernels(world)), 1.0)


def without(key: Labels, names: Iterable[str]) -> Labels:
    return frozenset(pair for pair in key if pair[0] not in names)
