"""What broke, as one thing each: while it lasts, and long after."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, HTTPException, Query, Response

from kc_otel.judge.incidents.actions_taken import actions_taken
from kc_otel.judge.incidents.incident import Diagnosis, Incident, IncidentState
from kc_otel.judge.verdict import Status
from kc_otel.serve import people_orders as people
from kc_otel.serve.api.people_input import answered
from kc_otel.serve.api.people_views import DiagnosisRequest
from kc_otel.serve.api.served_names import ContractName, served_or_all
from kc_otel.serve.api.views import IncidentList, IncidentView
from kc_otel.serve.core import Core

__all__ = ["incident_routes", "incident_views"]

_MOST_CELLS: Final = 20


def incident_routes(core: Core) -> APIRouter:
    """`/api/v1/incidents`."""
    router = APIRouter(prefix="/api/v1/incidents", tags=["incidents"])

    @router.get("")
    async def incidents(
        contract: ContractName = None,
        since: Annotated[float, Query(description="Only those that lasted at or after this Unix time.")] = 0.0,
        state: Annotated[IncidentState | None, Query(description="Only those in this state.")] = None,
        limit: Annotated[int, Query(ge=1, le=1000, description="The most of those that are over.")] = 100,
    ) -> IncidentList:
        """Incidents, the most urgent first; of each the worst cells that are broken still, of all once none is."""
        served_or_all(core, contract)
        found = [*core.incidents(contract), *core.past_incidents(contract, since, limit)]
        return IncidentList(
            at=core.evaluated_at, incidents=incident_views(core, [one for one in found if state in {None, one.state}])
        )

    @router.get("/{id}")
    async def incident(id: str) -> IncidentView:
        """One incident with every cell that it ever had."""
        found = core.incident(id)
        if found is None:
            raise HTTPException(404, f"no incident {id[:40]!r}; /api/v1/incidents has those that are kept")
        (view,) = incident_views(core, [found], whole=True)
        return view

    @router.post("/{id}/diagnoses")
    async def diagnose(id: str, request: DiagnosisRequest) -> Diagnosis:
        """What locate or remedy found out stands on the incident from now on, also when it is over."""
        with answered():
            return people.diagnose(
                core, id, request.kind, request.slice, request.text, request.evidence, request.by, time.time()
            )

    @router.get("/{id}/diagnoses/{evidence}", response_model=dict[str, Any])
    async def rests_on(id: str, evidence: str) -> Response:
        """What a diagnosis rests on, byte for byte: `evidence` is its SHA-256."""
        found = core.evidence(id, evidence)
        if found is None:
            raise HTTPException(404, f"no such evidence of incident {id[:40]!r}")
        return Response(found, media_type="application/json")

    return router


def incident_views(core: Core, found: Sequence[Incident], *, whole: bool = False) -> list[IncidentView]:
    """Incidents in the API's shape; `whole` with every cell."""
    waiting = {one.endpoint: one.oldest for one in core.outbox.status() if one.oldest is not None} if found else {}
    return [_view(core, one, waiting, whole=whole) for one in found]


def _view(core: Core, one: Incident, waiting: dict[str, float], *, whole: bool) -> IncidentView:
    every = one.cells if whole else one.current
    cells = every if whole else every[:_MOST_CELLS]
    return IncidentView(
        id=one.id,
        contract=one.contract,
        on=one.on,
        status=Status(one.status),
        state=one.state,
        headline=one.headline,
        extents=list(one.extents),
        since=one.since,
        contained=one.contained_at,
        until=one.resolved_at,
        growth=list(one.growth),
        grew=one.growth_text,
        kernel_train=one.kernel_train,
        kernel_inference=one.kernel_inference,
        clauses=list(one.clauses),
        slices=list(one.slices),
        cells=list(cells),
        more=len(every) - len(cells),
        actions=list(actions_taken(one, core.decisions, waiting)),
        diagnoses=list(one.diagnoses),
    )
