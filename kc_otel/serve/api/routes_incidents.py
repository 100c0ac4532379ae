"""Routes for incidents, current and past, and for the overview: what is broken now, the first that a person needs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, HTTPException, Query, Response
from pydantic import AfterValidator

from kc_otel.contract.slices import ALL
from kc_otel.contract.words import listed, place
from kc_otel.judge.escalation.alerts import People
from kc_otel.judge.incidents.incident import ActionTaken, BrokenCell, Diagnosis, Incident, IncidentState, actions_taken
from kc_otel.judge.point_streams import Missing
from kc_otel.judge.verdict import Cell, Status
from kc_otel.serve import people_orders as people
from kc_otel.serve.api.shapes import ContractName, Name, Order, Reason, Signature, View, check_known, ordered, stated
from kc_otel.serve.core import Core
from kc_otel.serve.traffic import kept_away, traffic_seen

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
    """Unix time of its onset, or, where it broke again after a pause, of the end of that pause."""
    went_away: bool
    """True if it is unproven: nothing of it has been broken for a window, and nothing shows that users are safe. A
    route or a pin that does not contain it may remain."""
    only_route_left: bool
    """True if it is over and only a route that was ordered is left of it, until a person resumes the slice."""
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
        check_known(core, contract)
        found = [*core.incidents(contract), *core.past.over(contract, since, limit)]
        views = [_view(core, incident) for incident in found if state in {None, incident.state}]
        return IncidentList(at=core.evaluated_at, incidents=views)

    @router.get("/{id}")
    async def incident(id: str) -> IncidentView:
        """Return an incident with every cell that it ever had."""
        found = core.incident(id)
        if found is None:
            raise HTTPException(404, f"no incident {id[:40]!r}; /api/v1/incidents has those that are kept")
        return _view(core, found, whole=True)

    @router.post("/{id}/diagnoses")
    async def diagnose(id: str, request: DiagnosisRequest) -> Diagnosis:
        """Attach a finding of locate or remedy to an incident, also after it is over."""
        async with ordered(core):
            return people.diagnose(core, id, **request.model_dump(), now=time.time())

    @router.get("/{id}/diagnoses/{evidence}", response_model=dict[str, Any])
    async def rests_on(id: str, evidence: str) -> Response:
        """Return the evidence of a diagnosis, byte for byte: `evidence` is its SHA-256."""
        found = core.past.evidence(id, evidence)
        if found is None:
            raise HTTPException(404, f"no such evidence of incident {id[:40]!r}")
        return Response(found, media_type="application/json")

    return router


def _view(core: Core, incident: Incident, *, whole: bool = False) -> IncidentView:
    """An incident in the API's shape; `whole` with every cell."""
    every = incident.cells if whole else incident.current
    cells = every if whole else every[:_MAX_CELLS]
    undelivered, window = core.outbox.undelivered(incident.contract, incident.id), core.window(incident.contract)
    return IncidentView.of(
        incident,
        state_text=incident.text_at(core.seen_at, window),
        since=incident.lasting_since(window),
        went_away=incident.fell_silent(core.seen_at, window),
        contained=incident.contained_at,
        until=incident.resolved_at,
        grew=incident.growth_text,
        cells=list(cells),
        more=len(every) - len(cells),
        actions=list(actions_taken(incident, core.decisions, undelivered)),
    )


_KERNELS: Final = {"train-kernel": "training kernel", "inference-kernel": "inference kernel"}


class InForceView(View):
    """Something that holds until a person or a time ends it.

    A route whose cause is not broken any more, a pin, a silence, an acknowledgement, a dry run.
    """

    contract: str
    kind: str
    """route, pin, silence, acknowledgement, dry-run."""
    slice: str
    since: float
    until: float | None = None
    """Unix time at which it ends by itself; null when a person ends it."""
    id: str = ""
    """Name by which a person ends it, where its slice is not enough."""
    text: str


class Overview(View):
    """Current faults, and the decisions in force."""

    at: float | None
    """Unix time of the last evaluation; null before the first."""
    started_at: float
    """Unix time of the start of the evaluator."""
    now: float
    """Unix time of the answer."""
    version: str
    heard: bool
    """True if any kernel has ever reported."""
    otlp_port: int
    """Port of this process that takes OTLP over HTTP."""
    counts: dict[str, dict[Status, int]]
    """Number of cells by contract and status."""
    no_traffic: dict[str, int]
    """Of those without data, how many have no traffic by order; by contract."""
    incidents: list[IncidentView]
    """Worst first."""
    missing: list[Missing]
    """Points that arrive and are not judged: verdicts say nothing about them. Ends a window, and at least a minute,
    after the last."""
    in_force: list[InForceView]


def overview_routes(core: Core, version: str) -> APIRouter:
    """`/api/v1/overview`, made once per evaluation however many people look."""
    router = APIRouter(prefix="/api/v1", tags=["verdicts"])
    made: tuple[tuple[float | None, int, People], Overview] | None = None

    @router.get("/overview")
    async def overview() -> Overview:
        """Return current faults: since when, for whom, and the actions taken; worst first."""
        nonlocal made
        state = (core.evaluated_at, core.decisions.version, core.people)
        if made is None or made[0] != state:
            made = state, _overview(core, version)
        return made[1].model_copy(update={"now": time.time()})

    return router


def _overview(core: Core, version: str) -> Overview:
    counts: dict[str, Counter[Status]] = {name: Counter() for name in core.contracts}
    silent: Counter[str] = Counter()
    heard, away = False, kept_away(core)
    for verdict, _ in core.history.cells():
        counts.setdefault(verdict.cell.contract, Counter())[verdict.status] += 1
        silent[verdict.cell.contract] += away(verdict)
        heard = heard or bool(verdict.cell.kernel_inference)
    lasting = core.incidents()
    return Overview(
        at=core.evaluated_at,
        started_at=core.started_at,
        now=time.time(),
        version=version,
        heard=heard,
        otlp_port=core.otlp_port,
        counts={name: dict(count) for name, count in counts.items()},
        no_traffic=dict(silent),
        incidents=[_view(core, incident) for incident in lasting],
        missing=[row for name in core.contracts for row in core.evaluator.missing(name, core.seen_at)],
        in_force=[*_routes(core, lasting), *_by_people(core)],
    )


def _by_people(core: Core) -> Iterator[InForceView]:
    for name in sorted(core.dry_run & core.contracts.keys()):
        yield InForceView(
            contract=name, kind="dry-run", slice="all", since=core.started_at,
            text=f"{name} is in dry run: its actions are only recorded",
        )  # fmt: skip
    for pin in core.decisions.pins:
        yield InForceView(
            contract=pin.contract, kind="pin", slice=pin.slice, since=pin.at, until=pin.until,
            text=f"{place(pin.slice)} is pinned to the {_KERNELS.get(pin.kernel, pin.kernel)} by {pin.by} ({pin.why})"
            + f"; but {pin.outdated}" * bool(pin.outdated),
        )  # fmt: skip
    for silence in core.people.silences:
        yield InForceView(
            contract=silence.contract, kind="silence", slice=silence.slice or "all", since=silence.at,
            until=silence.until, id=silence.id, text=f"{silence.where} is silenced by {silence.by} ({silence.why})",
        )  # fmt: skip
    firing = {alert.fingerprint: alert.cell for alert in core.firing()}
    taken: dict[tuple[str, str, str, float], list[Cell]] = {}
    for ack in core.people.acknowledgements:
        if ack.fingerprint in firing:
            taken.setdefault((ack.contract, ack.by, ack.why, ack.at), []).append(firing[ack.fingerprint])
    for (contract, by, why, at), cells in taken.items():
        places = dict.fromkeys(f"{cell.clause} on {place(cell.slice)}" for cell in cells)
        yield InForceView(
            contract=contract, kind="acknowledgement", slice=cells[0].slice, since=at,
            text=f"{by} is at work on {listed(list(places))} ({why})",
        )  # fmt: skip


def _routes(core: Core, lasting: Sequence[Incident]) -> list[InForceView]:
    """Routes in force whose cause is over: they outlive it until a person ends them."""
    now = core.seen_at
    broken = {
        (incident.contract, incident.kernel_inference, cell.slice) for incident in lasting for cell in incident.broken
    }
    left = [route for route in core.decisions.routes if (route.contract, route.avoid, route.slice) not in broken]
    traffic = {name: traffic_seen(core, name, core.escalation, now) for name in {route.contract for route in left}}
    return [
        InForceView(
            contract=route.contract,
            kind="route",
            slice=route.slice,
            since=route.since,
            text=f"{place(route.slice)} is to be routed from kernel {route.avoid} to the training kernel: "
            f"{route.reason}{f'; but {behind}' if behind else ''}",
        )
        for route in left
        for behind in [traffic[route.contract].behind(route.slice, route.since, None)]
    ]
