"""Routes for a cell's history, and the distribution of its observations."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import numpy as np
from fastapi import APIRouter, HTTPException, Query
from numpy.typing import NDArray

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import DERIVED
from kc_otel.contract.slices import ALL
from kc_otel.contract.words import number
from kc_otel.judge.verdict import Cell
from kc_otel.serve.api.overview import Overviews
from kc_otel.serve.api.people_input import served
from kc_otel.serve.api.views import (
    DistributionView,
    HealthView,
    HistoryView,
    MarkView,
    Overview,
    SeriesView,
)
from kc_otel.serve.core import Core
from kc_otel.serve.otlp_out import SelfMetrics
from kc_otel.stats import Binned

_PER_DECADE: Final = 8
_MAX_DECADES: Final = 12
"""Decades below the largest observation with bins of their own; smaller values go into the lowest bin."""


def past_routes(core: Core, overviews: Overviews, self_metrics: Callable[[], SelfMetrics]) -> APIRouter:
    """`/api/v1/overview`, `history`, `distribution` and `health`."""
    router = APIRouter(prefix="/api/v1")

    @router.get("/overview", tags=["verdicts"])
    async def overview() -> Overview:
        """Return current faults: since when, for whom, and the actions taken; worst first."""
        return overviews.now()

    @router.get("/history", tags=["verdicts"])
    async def history(
        contract: str,
        clause: str,
        slice: str = ALL,
        start: Annotated[float, Query(alias="from", description="Unix time, seconds.")] = 0.0,
        end: Annotated[float | None, Query(alias="to", description="Unix time, seconds; now when left out.")] = None,
    ) -> HistoryView:
        """Return the history of a clause on a slice: twenty points per long window, over twenty-four of them."""
        find_clause(core, contract, clause, slice)
        past = core.history.past(contract, clause, slice, start, time.time() if end is None else end)
        return HistoryView(
            step=core.history.step(contract),
            series=[
                SeriesView(
                    kernel_train=cell.kernel_train,
                    kernel_inference=cell.kernel_inference,
                    points=[dataclasses.astuple(moment) for moment in moments],
                )
                for cell, moments in past.items()
            ],
        )

    @router.get("/distribution", tags=["verdicts"])
    async def distribution(
        contract: str,
        clause: str,
        slice: str = ALL,
        kernel_train: str = "",
        kernel_inference: str = "",
        window: Literal["short", "long"] = "long",
    ) -> DistributionView:
        """Return the distribution of a window's observations; for a derived metric, of its underlying quantity."""
        found = find_clause(core, contract, clause, slice)
        return distribution_view(core, Cell(contract, clause, slice, kernel_train, kernel_inference), found, window)

    @router.get("/health", tags=["health"])
    async def health() -> HealthView:
        """Return counts of received, dropped and rejected data, evaluation times, and the state of webhooks."""
        now = time.time()
        found = self_metrics()
        return HealthView(
            evaluated_at=core.evaluated_at,
            tick_seconds=core.tick_seconds,
            series=core.evaluator.series_count,
            streams=core.evaluator.stream_count + sum(shard.streams for shard in core.shards),
            points={labels["kc.outcome"]: int(value) for labels, value in found["kc.evaluator.points"]},
            requests={
                f"{labels['kc.transport']} {labels['kc.outcome']}": int(value)
                for labels, value in found["kc.evaluator.requests"]
            },
            failures=dict(core.evaluator.faults.present),
            streams_events=dict(core.evaluator.events),
            invalid={
                name: _by_reason(core.evaluator.invalid_input(name, now, contract.observability.window).values())
                for name, contract in core.contracts.items()
            },
            listeners=core.listeners.view(core.contracts),
            outbox=list(core.outbox.status()),
            shards=core.shards,
        )

    return router


def _by_reason(pairs: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for found in pairs:
        total.update(found)
    return dict(sorted(total.items()))


def distribution_view(
    core: Core, cell: Cell, clause: Clause, window: Literal["short", "long"] = "long"
) -> DistributionView:
    """Return the distribution of a cell's quantity in a window that ends at the last evaluation."""
    observability = core.contracts[cell.contract].observability
    seconds = observability.window if window == "short" else observability.long_window
    seen = distribution_of(core.evaluator.distribution(cell, seconds, core.evaluated_at or time.time()))
    quantity = clause.quantity
    return DistributionView(
        metric=quantity.key if quantity is not None else clause.metric,
        unit=quantity.unit if quantity is not None else clause.limit_unit,
        window=seconds,
        marks=_marks(clause, cell.slice),
        **dataclasses.asdict(seen),
    )


def find_clause(core: Core, contract: str, clause: str, slice: str) -> Clause:
    """The clause; an answer with status 404 that names what there is when contract, slice or clause is unknown."""
    found = served(core, contract)
    if slice not in {ALL, *found.slices}:
        raise HTTPException(404, f"contract {contract} has no slice {slice!r}; there are {_names(found)}")
    for known in found.clauses:
        if known.id == clause:
            return known
    raise HTTPException(404, f"no clause {clause!r}; {contract} has {', '.join(known.id for known in found.clauses)}")


def _names(contract: Contract) -> str:
    return ", ".join((ALL, *contract.slices))


def _marks(clause: Clause, slice: str) -> list[MarkView]:
    """The limit, where it is a value of the quantity; a fraction's threshold."""
    if clause.metric in DERIVED:
        return []
    statistic, limit = clause.parsed_statistic, clause.limit_for(slice)
    if statistic.kind == "fraction":
        return [MarkView(value=statistic.argument, text=f"counted above {number(statistic.argument)}")]
    return [MarkView(value=limit, text=f"limit of the {clause.statistic_text} {number(limit)}")]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Observations by size.

    Attributes:
        edges: Edges of the bins of |value|, ascending and positive, [k + 1]; empty where all are zero.
        above: Observations per bin that are positive, [k].
        below: Observations per bin that are negative, [k].
        zero: Observations that are zero, or too small to be told from it.
        total: Number of observations.
        mean: Their mean; None when unknown.
        minimum: The smallest; None when unknown.
        maximum: The largest; None when unknown.
    """

    edges: tuple[float, ...]
    above: tuple[int, ...]
    below: tuple[int, ...]
    zero: int
    total: int
    mean: float | None
    minimum: float | None
    maximum: float | None


def distribution_of(sample: Binned) -> Distribution:
    """A sample's distribution; each source bin goes where its geometric middle is.

    >>> import numpy as np
    >>> found = distribution_of(Binned.of_samples(np.array([0.0, 1.0, -1.0, 10.0])))
    >>> found.zero, sum(found.above), sum(found.below), len(found.edges)
    (1, 2, 1, 10)
    """
    size, sign = _middles(sample)
    used = sign != 0
    mean = sample.sum / sample.total if sample.total else math.nan
    common = (_finite(mean), _finite(sample.minimum), _finite(sample.maximum))
    if not used.any():
        return Distribution((), (), (), sample.total, sample.total, *common)
    index = np.floor(np.log10(size[used]) * _PER_DECADE + 1e-9).astype(np.int64)
    index = np.maximum(index, index.max() - _PER_DECADE * _MAX_DECADES)
    first, bins = int(index.min()), int(index.max() - index.min()) + 1
    count, positive = sample.count[used], sign[used] > 0
    return Distribution(
        edges=tuple(float(edge) for edge in 10.0 ** ((first + np.arange(bins + 1)) / _PER_DECADE)),
        above=_counts(index[positive] - first, count[positive], bins),
        below=_counts(index[~positive] - first, count[~positive], bins),
        zero=int(sample.count[~used].sum()),
        total=sample.total,
        mean=common[0],
        minimum=common[1],
        maximum=common[2],
    )


def _middles(sample: Binned) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """|middle| of every bin and its sign; the sign of a bin that reaches or crosses zero is 0."""
    lower, upper = sample.lower, sample.upper
    sign = np.where(lower > 0, 1.0, np.where(upper < 0, -1.0, 0.0))
    near = np.where(sign > 0, lower, -upper)
    far = np.where(sign > 0, upper, -lower)
    far = np.where(np.isfinite(far), far, near)  # an open end counts where it begins
    known = sign != 0
    size = np.zeros_like(lower)
    size[known] = np.sqrt(near[known]) * np.sqrt(far[known])
    return size, sign


def _counts(index: NDArray[np.int64], count: NDArray[np.int64], bins: int) -> tuple[int, ...]:
    found = np.zeros(bins, dtype=np.int64)
    np.add.at(found, index, count)
    return tuple(int(total) for total in found)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
