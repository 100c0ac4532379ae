"""Charts of a cell as SVG, for the page and for other programs."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, astuple, dataclass
from datetime import UTC, tzinfo
from typing import Annotated, Any, Final, Literal
from zoneinfo import ZoneInfo

from fastapi import APIRouter, Depends, HTTPException, Query

from kc_otel.charts.chart import Chart, unit_word
from kc_otel.charts.depth_chart import depth_chart
from kc_otel.charts.distribution_chart import draw_distribution
from kc_otel.charts.history_chart import Marker, draw_evidence, draw_history, draw_sparkline, markers_of
from kc_otel.charts.place_chart import draw_places
from kc_otel.contract.slices import ALL
from kc_otel.contract.words import place
from kc_otel.judge.verdict import Cell
from kc_otel.serve.api.routes_past import distribution_view, find_clause
from kc_otel.serve.core import Core

_MAX_EVENTS: Final = 1000

Start = Annotated[float, Query(alias="from", description="Unix time, seconds.")]
End = Annotated[float | None, Query(alias="to", description="Unix time, seconds; now when left out.")]
Over = Annotated[Literal["time", "step"], Query(description="Horizontal axis: time, or training steps.")]
Zone = Annotated[str, Query(description="Time zone of the labels, such as Europe/Berlin.")]


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
    """`/api/v1/charts/history`, `evidence`, `sparkline`, `distribution`, `depth` and `places`."""
    router = APIRouter(prefix="/api/v1/charts", tags=["charts"])

    @router.get("/history")
    async def history(asked: Asked, over: Over = "time") -> Chart | None:
        """Return a cell's history against its limit, with its events; null without a history."""
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
        """Return the evidence against a cell's limit, as a share of an alarm; null where there is none."""
        cell = asked.cell
        find_clause(core, cell.contract, cell.clause, cell.slice)
        points, others = _past(core, asked)
        title = f"Evidence against {cell.clause} on {place(cell.slice)}"
        step = core.history.step(cell.contract)
        return draw_evidence(title, points, others=others.values(), step=step, zone=asked.zone, over=over)

    @router.get("/sparkline")
    async def sparkline(asked: Asked) -> Chart | None:
        """Return a small chart of a cell's history against its limit; null without a history."""
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
        """Return a cell's distribution in the long window, against all traffic; null where nothing was observed."""
        found = find_clause(core, contract, clause, slice)
        own = Cell(contract, clause, slice, kernel_train, kernel_inference)
        seen = distribution_view(core, own, found).model_dump()
        whole = None if slice == ALL else distribution_view(core, own._replace(slice=ALL), found).model_dump()
        return draw_distribution(f"{seen['metric']} on {place(slice)} by size", seen, place(slice), whole)

    @router.get("/depth")
    async def depth(
        incident: Annotated[str, Query(description="Id of the incident.")],
        evidence: Annotated[str, Query(description="SHA-256 of a diagnosis's evidence.")],
    ) -> Chart | None:
        """Return drift by layer, as locate found it; null for other evidence."""
        found = core.evidence(incident, evidence)
        if found is None:
            raise HTTPException(404, f"no such evidence of incident {incident[:40]!r}")
        try:
            return depth_chart(json.loads(found))
        except ValueError:
            return None

    @router.get("/places")
    async def places(incident: Annotated[str, Query(description="Id of the incident.")]) -> Chart | None:
        """Return the drift of an incident's kernels by position and turn; null if no recorder reports it."""
        of = core.incident(incident)
        if of is None or of.contract not in core.contracts:
            raise HTTPException(404, f"no incident {incident[:40]!r} of a contract that is served")
        found = core.by_place(of)
        confidence = core.contracts[of.contract].observability.confidence
        return draw_places("Drift by position and turn", found, confidence)

    return router


def _past(core: Core, asked: _Asked) -> tuple[list[tuple[Any, ...]], dict[Cell, list[tuple[Any, ...]]]]:
    """The cell's own past, and that of the same clause and slice with other kernels."""
    cell, end = asked.cell, time.time() if asked.end is None else asked.end
    past = core.history.past(cell.contract, cell.clause, cell.slice, asked.start, end)
    found = {key: [astuple(moment) for moment in moments] for key, moments in past.items()}
    return found.pop(cell, []), found


def _markers(core: Core, cell: Cell) -> tuple[Marker, ...]:
    events = core.events.newest(cell.contract, _MAX_EVENTS, verdicts=False)
    said = [asdict(event) | {"message": event.data.get("message", "")} for event in events]
    return markers_of(said, cell.contract, cell.clause, cell.slice)


def _zone(name: str) -> tzinfo:
    """Return the zone, or UTC if this machine does not know it: labels name their zone."""
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):
        return UTC
