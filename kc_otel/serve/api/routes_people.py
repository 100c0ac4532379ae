"""What people do about alerts and routes: acknowledge, silence, pin; and what dry runs would have done."""

from __future__ import annotations

import time
from collections.abc import Mapping

from fastapi import APIRouter

from kc_otel.judge.escalation.alerts import Alert
from kc_otel.judge.escalation.people import Silence
from kc_otel.judge.plain_json import to_plain
from kc_otel.serve import people_orders as people
from kc_otel.serve.api.changes import Changes
from kc_otel.serve.api.people_input import Name, answered
from kc_otel.serve.api.people_views import (
    Acknowledged,
    AcknowledgeRequest,
    AlertList,
    AlertView,
    DryRun,
    Enabled,
    EnableRequest,
    EndRequest,
    Pinned,
    PinRequest,
    SilenceList,
    SilenceRequest,
    UnpinRequest,
)
from kc_otel.serve.api.served_names import ContractName, served_or_all
from kc_otel.serve.core import Core

__all__ = ["people_routes"]


def people_routes(core: Core, decided: Changes) -> APIRouter:
    """`/api/v1/alerts`, `silences`, `decisions/pin`, `decisions/unpin`, `webhooks/enable` and `dry-run`."""
    router = APIRouter(prefix="/api/v1")

    @router.get("/alerts", tags=["people"])
    async def alerts(contract: ContractName = None) -> AlertList:
        """Steps of the escalation policies that wait or fire, who acknowledged them, and what silences them."""
        served_or_all(core, contract)
        now = time.time()
        found = [
            _alert(core, alert, times, now)
            for name, state in core.policies.items()
            if contract in {None, name}
            for times in [{one.fingerprint: one.times for one in core.escalation.notifications[name].alerts}]
            for alert in state.alerts
        ]
        return AlertList(at=core.evaluated_at, alerts=found)

    @router.post("/alerts/acknowledge", tags=["people"])
    async def acknowledge(request: AcknowledgeRequest) -> Acknowledged:
        """Somebody is at work on alerts that fire: they go on firing, and their reminders stop."""
        with answered():
            taken = people.acknowledge(
                core, request.contract, request.clause, request.slice, request.by, request.why, time.time()
            )
        return Acknowledged(fingerprints=[alert.fingerprint for alert in taken])

    @router.get("/silences", tags=["people"])
    async def silences() -> SilenceList:
        """Silences in force, oldest first."""
        now = time.time()
        return SilenceList(silences=[one for one in core.people.silences if now < one.until])

    @router.post("/silences", tags=["people"])
    async def silence(request: SilenceRequest) -> Silence:
        """Nobody is told of some alerts until a time: no webhook, no log record. Everything else goes on."""
        with answered():
            return people.silence(
                core, request.contract, request.clause, request.slice, request.until, request.by, request.why,
                time.time(),
            )  # fmt: skip

    @router.post("/silences/{silence}/end", tags=["people"])
    async def unsilence(silence: Name, request: EndRequest) -> Silence:
        """A person ends a silence before its time; what still fires is said with the next evaluation."""
        with answered():
            return people.unsilence(core, silence, request.by, request.why, time.time())

    @router.post("/decisions/pin", tags=["decisions"])
    async def pin(request: PinRequest) -> Pinned:
        """A person decides which kernel serves a slice; that wins over every route."""
        with answered():
            people.pin(
                core, request.contract, request.slice, request.kernel, request.until, request.by, request.why,
                time.time(),
            )  # fmt: skip
        await decided.notify()
        return Pinned(pins=1, version=core.decisions.version)

    @router.post("/decisions/unpin", tags=["decisions"])
    async def unpin(request: UnpinRequest) -> Pinned:
        """A person ends pins; routes that are in force hold again."""
        with answered():
            ended = people.unpin(core, request.contract, request.slice, request.by, request.why, time.time())
        await decided.notify()
        return Pinned(pins=ended, version=core.decisions.version)

    @router.post("/webhooks/enable", tags=["people"])
    async def enable(request: EnableRequest) -> Enabled:
        """An endpoint that answered 410 is told again, first of what has waited."""
        with answered():
            waiting = people.enable(core, request.contract, request.endpoint, request.by, request.why, time.time())
        return Enabled(waiting=waiting)

    @router.get("/dry-run", tags=["decisions"])
    async def dry_run() -> DryRun:
        """Contracts that run dry, and the decision table that they would have published."""
        return DryRun(contracts=sorted(core.dry_run), decisions=to_plain(core.escalation.dry_run_decisions))

    return router


def _alert(core: Core, alert: Alert, times: Mapping[str, int], now: float) -> AlertView:
    cell, taken = alert.cell, core.people.acknowledged(alert.fingerprint)
    return AlertView(
        contract=cell.contract,
        clause=cell.clause,
        slice=cell.slice,
        kernel_train=cell.kernel_train,
        kernel_inference=cell.kernel_inference,
        on=alert.on,
        severity=alert.severity,
        phase=alert.phase.value,
        since=alert.since,
        started_at=alert.started_at,
        actions=[str(action) for action in alert.actions],
        reason=alert.verdict.reason,
        fingerprint=alert.fingerprint,
        acknowledged=taken,
        silenced=[one.id for one in core.people.silencing(cell, now)],
        notified=times.get(alert.fingerprint, 0),
        dry_run=cell.contract in core.dry_run,
    )
