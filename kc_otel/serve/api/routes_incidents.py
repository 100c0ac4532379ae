"""Routes for incidents, current and past."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, HTTPException, Query, Response

from kc_otel.judge.incidents.actions_taken import ActionTaken, actions_taken
from kc_otel.judge.incidents.incident import Diagnosis, Incident, IncidentState
from kc_otel.judge.verdict import Status
from kc_otel.serve import people_orders as people
from kc_otel.serve.api.people_input import ContractName, ordered, served_or_all
from kc_otel.serve.api.people_views import DiagnosisRequest
from kc_otel.serve.api.views import IncidentList, IncidentView
from kc_otel.serve.core import Core

_MAX_CELLS: Final = 20


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
            return people.diagnose(
                core, id, request.kind, request.slice, request.text, request.evidence, request.by, time.time()
            )

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
    return IncidentView(
        id=incident.id,
        contract=incident.contract,
        on=incident.on,
        status=Status(incident.status),
        state=incident.state,
        state_text=incident.state_text,
        headline=incident.headline,
        extents=list(incident.extents),
        since=incident.since,
        contained=incident.contained_at,
        until=incident.resolved_at,
        growth=list(incident.growth),
        grew=incident.growth_text,
        kernel_train=incident.kernel_train,
        kernel_inference=incident.kernel_inference,
        clauses=list(incident.clauses),
        slices=list(incident.slices),
        cells=list(cells),
        more=len(every) - len(cells),
        actions=list(actions),
        diagnoses=list(incident.diagnoses),
    )
