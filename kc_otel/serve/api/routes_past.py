"""What a cell is made of: its past, and the distribution of what was observed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import APIRouter, HTTPException, Query

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.registry import DERIVED
from kc_otel.contract.slices import ALL
from kc_otel.contract.words import number
from kc_otel.judge.verdict import Cell
from kc_otel.serve.api.distribution import distribution_of
from kc_otel.serve.api.overview import Overviews
from kc_otel.serve.api.routes_shards import shard_views
from kc_otel.serve.api.served_names import served
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

__all__ = ["distribution_view", "find_clause", "past_routes"]


def past_routes(core: Core, overviews: Overviews, self_metrics: Callable[[], SelfMetrics]) -> APIRouter:
    """`/api/v1/overview`, `history`, `distribution` and `health`."""
    router = APIRouter(prefix="/api/v1")

    @router.get("/overview", tags=["verdicts"])
    async def overview() -> Overview:
        """What is broken now, since when, for whom, and what was done about it; worst first."""
        return overviews.now()

    @router.get("/history", tags=["verdicts"])
    async def history(
        contract: str,
        clause: str,
        slice: str = ALL,
        start: Annotated[float, Query(alias="from", description="Unix time, seconds.")] = 0.0,
        end: Annotated[float | None, Query(alias="to", description="Unix time, seconds; now when left out.")] = None,
    ) -> HistoryView:
        """The past of a clause on a slice: twenty points per long window, over twenty-four of them."""
        find_clause(core, contract, clause, slice)
        past = core.history.past(contract, clause, slice, start, time.time() if end is None else end)
        return HistoryView(
            step=core.history.step(contract),
            series=[
                SeriesView(
                    kernel_train=cell.kernel_train,
                    kernel_inference=cell.kernel_inference,
                    points=[dataclasses.astuple(one) for one in moments],
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
        """What was observed within a window, by size; for a derived metric, of the quantity it is made of."""
        found = find_clause(core, contract, clause, slice)
        return distribution_view(core, Cell(contract, clause, slice, kernel_train, kernel_inference), found, window)

    @router.get("/health", tags=["health"])
    async def health() -> HealthView:
        """What the evaluator received, dropped and refused, how long it takes, and whether webhooks get through."""
        now = time.time()
        found = self_metrics()
        return HealthView(
            evaluated_at=core.evaluated_at,
            tick_seconds=core.tick_seconds,
            series=core.evaluator.series_count,
            streams=core.evaluator.stream_count + sum(one.streams for one in shard_views(core)),
            points={labels["kc.outcome"]: int(value) for labels, value in found["kc.evaluator.points"]},
            requests={
                f"{labels['kc.transport']} {labels['kc.outcome']}": int(value)
                for labels, value in found["kc.evaluator.requests"]
            },
            failures=dict(core.evaluator.faults.present),
            streams_events=dict(core.evaluator.events),
            invalid={
                name: dict(core.evaluator.invalid_input(name, now, contract.observability.window))
                for name, contract in core.contracts.items()
            },
            listeners=core.listeners.view(core.contracts),
            outbox=list(core.outbox.status()),
            shards=shard_views(core),
        )

    return router


def distribution_view(
    core: Core, cell: Cell, clause: Clause, window: Literal["short", "long"] = "long"
) -> DistributionView:
    """What was observed of a cell's quantity within a window until the last evaluation."""
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
    for one in found.clauses:
        if one.id == clause:
            return one
    raise HTTPException(404, f"no clause {clause!r}; {contract} has {', '.join(one.id for one in found.clauses)}")


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
