"""What the evaluator knows: contracts, verdicts, cells, events."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from kc_otel.contract.model import Contract
from kc_otel.contract.sentences import assurances, promise
from kc_otel.contract.slices import ALL
from kc_otel.judge.verdict import Status
from kc_otel.serve.api.served_names import ContractName, served_or_all
from kc_otel.serve.api.views import (
    CellList,
    CellView,
    ClauseView,
    ContractList,
    ContractView,
    EventList,
    VerdictList,
    view_of,
)
from kc_otel.serve.core import Core
from kc_otel.serve.history import GLANCES

__all__ = ["verdict_routes"]


def verdict_routes(core: Core) -> APIRouter:
    """`/api/v1/contracts`, `verdicts`, `cells` and `events`."""
    router = APIRouter(prefix="/api/v1")

    @router.get("/contracts", tags=["contracts"])
    async def contracts() -> ContractList:
        """Every contract, its clauses, and the kernel versions that have reported."""
        return ContractList(contracts=[_contract(core, contract) for contract in core.contracts.values()])

    @router.get("/verdicts", tags=["verdicts"])
    async def verdicts(contract: ContractName = None, status: Status | None = None) -> VerdictList:
        """The newest verdict of every cell."""
        served_or_all(core, contract)
        found = [view_of(verdict) for verdict, _, _ in core.history.cells(contract) if status in {None, verdict.status}]
        return VerdictList(at=core.evaluated_at, verdicts=found)

    @router.get("/cells", tags=["verdicts"])
    async def cells(
        contract: ContractName = None,
        clause: str | None = None,
        slice: str | None = None,
        glances: Annotated[int, Query(ge=0, le=GLANCES, description="Evaluations of the recent past.")] = GLANCES,
    ) -> CellList:
        """Every cell: its verdict, since when, what fires, and its recent past."""
        served_or_all(core, contract)
        return CellList(at=core.evaluated_at, cells=_cells(core, contract, clause, slice, glances))

    @router.get("/events", tags=["events"])
    async def events(
        contract: ContractName = None,
        after: Annotated[int, Query(ge=0, lt=2**63, description="Only events with greater ids.")] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        newest: Annotated[int | None, Query(ge=1, le=10_000, description="The last so many, instead.")] = None,
        verdicts: Annotated[bool, Query(description="With changes of verdicts; only for the newest.")] = True,
    ) -> EventList:
        """What changed: verdicts, alerts, routes, what people did. Oldest first."""
        served_or_all(core, contract)
        if newest is not None:
            found = core.events.newest(contract, newest, verdicts=verdicts)
        else:
            found = core.events.events(contract, after, limit)
        return EventList(events=list(found))

    return router


def _cells(core: Core, contract: str | None, clause: str | None, slice: str | None, most: int) -> list[CellView]:
    firing: dict[tuple[str, str, str], list[str]] = {}
    for *key, severity in core.firing():
        firing.setdefault((key[0], key[1], key[2]), []).append(severity)
    found = []
    for verdict, since, glances in core.history.cells(contract, most):
        cell = verdict.cell
        if (clause, slice) != (clause and cell.clause, slice and cell.slice):
            continue
        fires = firing.get((cell.contract, cell.clause, cell.slice), [])
        found.append(CellView(verdict=view_of(verdict), since=since, firing=sorted(fires), history=glances))
    return found


def _contract(core: Core, contract: Contract) -> ContractView:
    own = [verdict for verdict, _, _ in core.history.cells(contract.name)]
    return ContractView(
        name=contract.name,
        version=contract.metadata.version,
        hash=contract.hash,
        owner=contract.metadata.owner,
        description=contract.metadata.description,
        clauses=[
            ClauseView(
                id=clause.id,
                section=section,
                metric=clause.metric,
                statistic=clause.statistic_text,
                limit=clause.limit_for(ALL),
                unit=clause.limit_unit,
                per=clause.quantity and str(clause.quantity.per),
                slices={name: clause.limit_for(name) for name in clause.slices},
                description=clause.description,
                meaning=promise(clause, tuple(contract.slices)),
            )
            for section in ("numerical", "statistical", "runtime")
            for clause in getattr(contract, section)
        ],
        slices={name: spec.where for name, spec in contract.slices.items()},
        kernels=list(core.evaluator.kernels(contract.name)),
        status=max((verdict.status for verdict in own), key=lambda status: status.code, default=Status.NO_DATA),
        directives=_directives(core, contract.name),
        window=contract.observability.window,
        long_window=contract.observability.long_window,
        confidence=contract.observability.confidence,
        claims=list(assurances(contract.observability)),
        runbook=contract.metadata.runbook,
    )


def _directives(core: Core, contract: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in core.decisions.directives:
        if one.contract == contract:
            found.setdefault(one.kind.value, []).append({"slice": one.slice, "reason": one.reason, "since": one.since})
    return found
