"""Charts of a cell, drawn for whoever shows them: the page, and any other that can put SVG into a document."""

from __future__ import annotations

import time
from dataclasses import asdict, astuple
from datetime import UTC, tzinfo
from typing import Annotated, Any, Final, Literal
from zoneinfo import ZoneInfo

from fastapi import APIRouter, Query

from kc_otel.charts import (
    Chart,
    Marker,
    draw_distribution,
    draw_evidence,
    draw_history,
    draw_sparkline,
    markers_of,
    unit_word,
)
from kc_otel.contract.slices import ALL
from kc_otel.contract.words import place
from kc_otel.judge.verdict import Cell
from kc_otel.serve.api.routes_past import distribution_view, find_clause
from kc_otel.serve.core import Core

__all__ = ["chart_routes"]

_EVENTS: Final = 1000

Start = Annotated[float, Query(alias="from", description="Unix time, seconds.")]
End = Annotated[float | None, Query(alias="to", description="Unix time, seconds; now when left out.")]
Over = Annotated[Literal["time", "step"], Query(description="What goes from left to right: time, or trainer's steps.")]
Zone = Annotated[str, Query(description="Name of the time zone of the times that are written, such as Europe/Berlin.")]


def chart_routes(core: Core) -> APIRouter:
    """`/api/v1/charts/history`, `evidence`, `sparkline` and `distribution`."""
    router = APIRouter(prefix="/api/v1/charts", tags=["charts"])

    @router.get("/history")
    async def history(
        contract: str,
        clause: str,
        slice: str = ALL,
        kernel_train: str = "",
        kernel_inference: str = "",
        start: Start = 0.0,
        end: End = None,
        zone: Zone = "UTC",
        over: Over = "time",
    ) -> Chart | None:
        """A cell's past against its limit, with what happened to it; null where nothing is remembered."""
        found = find_clause(core, contract, clause, slice)
        past = _past(core, contract, clause, slice, start, end)
        own = Cell(contract, clause, slice, kernel_train, kernel_inference)
        return draw_history(
            f"{clause} on {place(slice)} over {over}{'s' if over == 'step' else ''}",
            past.pop(own, []),
            kernel=kernel_inference,
            others={cell.kernel_inference: points for cell, points in past.items()},
            markers=_markers(core, contract, clause, slice),
            unit=unit_word(found.limit_unit),
            step=core.history.step(contract),
            zone=_zone(zone),
            over=over,
        )

    @router.get("/evidence")
    async def evidence(
        contract: str,
        clause: str,
        slice: str = ALL,
        kernel_train: str = "",
        kernel_inference: str = "",
        start: Start = 0.0,
        end: End = None,
        zone: Zone = "UTC",
        over: Over = "time",
    ) -> Chart | None:
        """What was held against a cell's limit, as a share of an alarm; null where nothing was or can be."""
        find_clause(core, contract, clause, slice)
        own = Cell(contract, clause, slice, kernel_train, kernel_inference)
        past = _past(core, contract, clause, slice, start, end)
        points = past.pop(own, [])
        title = f"Evidence against {clause} on {place(slice)}"
        step = core.history.step(contract)
        return draw_evidence(title, points, others=past.values(), step=step, zone=_zone(zone), over=over)

    @router.get("/sparkline")
    async def sparkline(
        contract: str,
        clause: str,
        slice: str = ALL,
        kernel_train: str = "",
        kernel_inference: str = "",
        start: Start = 0.0,
        end: End = None,
        zone: Zone = "UTC",
    ) -> Chart | None:
        """A cell's past against its limit at a glance; null where nothing is remembered."""
        find_clause(core, contract, clause, slice)
        past = _past(core, contract, clause, slice, start, end)
        points = past.pop(Cell(contract, clause, slice, kernel_train, kernel_inference), [])
        title = f"{clause} on {place(slice)} over time"
        step = core.history.step(contract)
        markers = _markers(core, contract, clause, slice)
        return draw_sparkline(title, points, others=list(past.values()), markers=markers, step=step, zone=_zone(zone))

    @router.get("/distribution")
    async def distribution(
        contract: str, clause: str, slice: str = ALL, kernel_train: str = "", kernel_inference: str = ""
    ) -> Chart | None:
        """What was observed within the long window, by size, against all traffic; null where it was nothing."""
        found = find_clause(core, contract, clause, slice)
        own = Cell(contract, clause, slice, kernel_train, kernel_inference)
        seen = distribution_view(core, own, found).model_dump()
        whole = None if slice == ALL else distribution_view(core, own._replace(slice=ALL), found).model_dump()
        return draw_distribution(f"{seen['metric']} on {place(slice)} by size", seen, place(slice), whole)

    return router


def _past(
    core: Core, contract: str, clause: str, slice: str, start: float, end: float | None
) -> dict[Cell, list[tuple[Any, ...]]]:
    past = core.history.past(contract, clause, slice, start, time.time() if end is None else end)
    return {cell: [astuple(one) for one in moments] for cell, moments in past.items()}


def _markers(core: Core, contract: str, clause: str, slice: str) -> tuple[Marker, ...]:
    events = core.events.newest(contract, _EVENTS, verdicts=False)
    said = [asdict(event) | {"message": event.data.get("message", "")} for event in events]
    return markers_of(said, contract, clause, slice)


def _zone(name: str) -> tzinfo:
    """The zone; UTC where this machine does not know it: times name their zone."""
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        return UTC
