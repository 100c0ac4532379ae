"""Routes for incidents, current and past."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, HTTPException, Query, Response
from pydantic import AfterValidator

from kc_otel.contract.slices import ALL
from kc_otel.judge.incidents.incident import ActionTaken, BrokenCell, Diagnosis, Incident, IncidentState, actions_taken
from kc_otel.judge.verdict import Status
from kc_otel.serve import people_orders as people
from kc_otel.serve.api.people_input import (
    ContractName,
    Name,
    Order,
    Reason,
    Signature,
    View,
    ordered,
    served_or_all,
    stated,
)
from kc_otel.serve.core import Core

_MAX_CELLS: Final = 20


class IncidentView(View):
    """Something that is or was broken, since when, for whom, and what was done about it."""

    id: str
    """The same from the first breach to the end."""
    contract: str
    on: str
    """Kind of fault, as escalation steps call it: fail, no-data, inconclusive, invalid-input."""
    status: Status
    state: IncidentState
    """`contained` where the routers show that users are kept from all that is broken, or from what was and is not given
    back."""
    state_text: str
    """The state as a sentence begins; it names routers that have not applied a route."""
    headline: str
    extents: list[tuple[str, str]]
    """(clause, how bad it is where it is worst), the worst clause first."""
    since: float
    contained: float | None
    """Unix time since when it is contained; null while it is not."""
    until: float | None
    """Unix time at which it was over; null while it lasts."""
    growth: list[tuple[float, int]]
    """(Unix time, slices that had been broken until then), for every minute that added some; `all` counts as one."""
    grew: str
    """The same in words; empty where it never grew."""
    kernel_train: str
    kernel_inference: str
    clauses: list[str]
    """Those that are broken still; all of them once none is."""
    slices: list[str]
    """Those where it is broken still; all of them once it is nowhere."""
    cells: list[BrokenCell]
    """The worst cells, each with its onset and its end. In a list of incidents: at most 20 of those broken still."""
    more: int
    """Cells beyond those."""
    actions: list[ActionTaken]
    diagnoses: list[Diagnosis]
    """Findings about it, oldest first; `/api/v1/incidents/{id}/diagnoses/{evidence}` returns their evidence."""


class IncidentList(View):
    """Incidents: those that last, the most urgent first, then those that are over, newest first."""

    at: float | None
    """Unix time of the last evaluation; null before the first."""
    incidents: list[IncidentView]


class DiagnosisRequest(Order):
    """Finding of locate or remedy about an incident."""

    kind: Literal["locate", "remedy"]
    text: Annotated[Reason, AfterValidator(stated)]
    """Finding, on one line: it is shown on the page, in reports and in messages."""
    evidence: dict[str, Any]
    """Evidence of the finding; numbers that are not finite are written as text."""
    by: Signature
    """Person or program that found it."""
    slice: Name = ALL
    """The slice that was looked at."""


def incident_routes(core: Core) -> APIRouter:
    """`/api/v1/incidents`."""
    router = APIRouter(prefix="/api/v1/incidents", tags=["incidents"])

    @router.get("")
    async def incidents(
        contract: ContractName = None,
        since: Annotated[float, Query(description="Only incidents that were open at or after this Unix time.")] = 0.0,
        state: Annotated[IncidentState | None, Query(description="Only incidents in this state.")] = None,
        limit: Annotated[int, Query(ge=1, le=1000, description="Largest number of ended incidents.")] = 100,
    ) -> IncidentList:
        """Return incidents, the most urgent first, each with its worst broken cells, or all cells if none is broken."""
        served_or_all(core, contract)
        found = [*core.incidents(contract), *core.past_incidents(contract, since, limit)]
        return IncidentList(
            at=core.evaluated_at, incidents=incident_views(core, [row for row in found if state in {None, row.state}])
        )

    @router.get("/{id}")
    async def incident(id: str) -> IncidentView:
        """Return an incident with every cell that it ever had."""
        found = core.incident(id)
        if found is None:
            raise HTTPException(404, f"no incident {id[:40]!r}; /api/v1/incidents has those that are kept")
        (view,) = incident_views(core, [found], whole=True)
        return view

    @router.post("/{id}/diagnoses")
    async def diagnose(id: str, request: DiagnosisRequest) -> Diagnosis:
        """Attach a finding of locate or remedy to an incident, also after it is over."""
        async with ordered(core):
            return people.diagnose(core, id, **request.model_dump(), now=time.time())

    @router.get("/{id}/diagnoses/{evidence}", response_model=dict[str, Any])
    async def rests_on(id: str, evidence: str) -> Response:
        """Return the evidence of a diagnosis, byte for byte: `evidence` is its SHA-256."""
        found = core.evidence(id, evidence)
        if found is None:
            raise HTTPException(404, f"no such evidence of incident {id[:40]!r}")
        return Response(found, media_type="application/json")

    return router


def incident_views(core: Core, found: Sequence[Incident], *, whole: bool = False) -> list[IncidentView]:
    """Incidents in the API's shape; `whole` with every cell."""
    outbox = core.outbox.status() if found else ()
    of_hooks = [
        {queue.endpoint: at for queue in outbox if (at := getattr(queue, name)) is not None}
        for name in ("oldest", "given_up", "disabled_at")
    ]
    return [_view(incident, actions_taken(incident, core.decisions, *of_hooks), whole=whole) for incident in found]


def _view(incident: Incident, actions: Iterable[ActionTaken], *, whole: bool) -> IncidentView:
    every = incident.cells if whole else incident.current
    cells = every if whole else every[:_MAX_CELLS]
    return IncidentView.of(
        incident,
        status=Status(incident.status),
        contained=incident.contained_at,
        until=incident.resolved_at,
        grew=incident.growth_text,
        cells=list(cells),
        more=len(every) - len(cells),
        actions=list(actions),
    )
