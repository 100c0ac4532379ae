"""Charts of a cell, drawn for whoever shows them: the page, and any other that can put SVG into a document."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, astuple, dataclass
from datetime import UTC, tzinfo
from typing import Annotated, Any, Final, Literal
from zoneinfo import ZoneInfo

from fastapi import APIRouter, Depends, HTTPException, Query

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
from kc_otel.diagnose.depth_picture import depth_chart
from kc_otel.judge.verdict import Cell
from kc_otel.serve.api.routes_past import distribution_view, find_clause
from kc_otel.serve.core import Core

__all__ = ["chart_routes"]

_EVENTS: Final = 1000

Start = Annotated[float, Query(alias="from", description="Unix time, seconds.")]
End = Annotated[float | None, Query(alias="to", description="Unix time, seconds; now when left out.")]
Over = Annotated[Literal["time", "step"], Query(description="What goes from left to right: time, or trainer's steps.")]
Zone = Annotated[str, Query(description="Name of the time zone of the times that are written, such as Europe/Berlin.")]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A cell, and the period of its past."""

    cell: Cell
    start: float
    end: float | None
    zone: tzinfo


def _asked(
    contract: str,
    clause: str,
    slice: str = ALL,
    kernel_train: str = "",
    kernel_inference: str = "",
    start: Start = 0.0,
    end: End = None,
    zone: Zone = "UTC",
) -> _Asked:
    return _Asked(Cell(contract, clause, slice, kernel_train, kernel_inference), start, end, _zone(zone))


Asked = Annotated[_Asked, Depends(_asked)]


def chart_routes(core: Core) -> APIRouter:
    """`/api/v1/charts/history`, `evidence`, `sparkline`, `distribution` and `depth`."""
    router = APIRouter(prefix="/api/v1/charts", tags=["charts"])

    @router.get("/history")
    async def history(asked: Asked, over: Over = "time") -> Chart | None:
        """A cell's past against its limit, with what happened to it; null where nothing is remembered."""
        cell = asked.cell
        found = find_clause(core, cell.contract, cell.clause, cell.slice)
        points, others = _past(core, asked)
        return draw_history(
            f"{cell.clause} on {place(cell.slice)} over {over}{'s' if over == 'step' else ''}",
            points,
            kernel=cell.kernel_inference,
            others={other.kernel_inference: found for other, found in others.items()},
            markers=_markers(core, cell),
            unit=unit_word(found.limit_unit),
            step=core.history.step(cell.contract),
            zone=asked.zone,
            over=over,
        )

    @router.get("/evidence")
    async def evidence(asked: Asked, over: Over = "time") -> Chart | None:
        """What was held against a cell's limit, as a share of an alarm; null where nothing was or can be."""
        cell = asked.cell
        find_clause(core, cell.contract, cell.clause, cell.slice)
        points, others = _past(core, asked)
        title = f"Evidence against {cell.clause} on {place(cell.slice)}"
        step = core.history.step(cell.contract)
        return draw_evidence(title, points, others=others.values(), step=step, zone=asked.zone, over=over)

    @router.get("/sparkline")
    async def sparkline(asked: Asked) -> Chart | None:
        """A cell's past against its limit at a glance; null where nothing is remembered."""
        cell = asked.cell
        find_clause(core, cell.contract, cell.clause, cell.slice)
        points, others = _past(core, asked)
        title = f"{cell.clause} on {place(cell.slice)} over time"
        step, markers = core.history.step(cell.contract), _markers(core, cell)
        return draw_sparkline(title, points, others=list(others.values()), markers=markers, step=step, zone=asked.zone)

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

    @router.get("/depth")
    async def depth(
        incident: Annotated[str, Query(description="Id of the incident.")],
        evidence: Annotated[str, Query(description="SHA-256 of what a diagnosis of it rests on.")],
    ) -> Chart | None:
        """Drift along the depth of the model, as locate found it; null where the evidence is of something else."""
        found = core.evidence(incident, evidence)
        if found is None:
            raise HTTPException(404, f"no such evidence of incident {incident[:40]!r}")
        try:
            return depth_chart(json.loads(found))
        except ValueError:
            return None

    return router


def _past(core: Core, asked: _Asked) -> tuple[list[tuple[Any, ...]], dict[Cell, list[tuple[Any, ...]]]]:
    """The cell's own past, and that of the same clause and slice with other kernels."""
    cell, end = asked.cell, time.time() if asked.end is None else asked.end
    past = core.history.past(cell.contract, cell.clause, cell.slice, asked.start, end)
    found = {each: [astuple(one) for one in moments] for each, moments in past.items()}
    return found.pop(cell, []), found


def _markers(core: Core, cell: Cell) -> tuple[Marker, ...]:
    events = core.events.newest(cell.contract, _EVENTS, verdicts=False)
    said = [asdict(event) | {"message": event.data.get("message", "")} for event in events]
    return markers_of(said, cell.contract, cell.clause, cell.slice)


def _zone(name: str) -> tzinfo:
    """The zone; UTC where this machine does not know it: times name their zone."""
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        return UTC
