"""Routes for people's actions on alerts and routes: acknowledge, silence, pin; and dry-run results."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

from fastapi import APIRouter

from kc_otel.judge.escalation.alerts import Alert
from kc_otel.judge.escalation.notices import Acknowledgement, Silence
from kc_otel.judge.plain_json import to_plain
from kc_otel.serve import people_orders as people
from kc_otel.serve.api.changes import Changes
from kc_otel.serve.api.people_input import ContractName, Name, SignedOrder, Until, View, ordered, served_or_all
from kc_otel.serve.api.views import CellKey
from kc_otel.serve.core import Core


class AlertView(CellKey):
    """A step of an escalation policy that waits or fires for a cell."""

    on: str
    """Condition of the step: fail, no-data, inconclusive or invalid-input."""
    severity: str
    phase: Literal["pending", "firing"]
    since: float
    """Unix time of the first matching verdict, seconds."""
    started_at: float | None
    """Unix time of firing, seconds; null while pending."""
    actions: list[str]
    """Actions of the step, such as `route:train-kernel`."""
    reason: str
    """The last verdict's sentence."""
    fingerprint: str
    """Identifies the alert here, in webhooks and in events."""
    acknowledged: Acknowledgement | None
    silenced: list[str]
    """Ids of the silences that mute it."""
    notified: int
    """Number of notices sent that it fires, reminders included."""
    dry_run: bool
    """True if the contract runs dry: none of the step's actions is carried out."""


class AlertList(View):
    """Alerts that wait or fire."""

    at: float | None
    """Unix time of the last evaluation; null before the first."""
    alerts: list[AlertView]


class AcknowledgeRequest(SignedOrder):
    """Request to acknowledge alerts."""

    contract: Name
    clause: Name | None = None
    """Only alerts of this clause."""
    slice: Name | None = None
    """Only alerts on this slice."""


class Acknowledged(View):
    """Alerts that were taken on, and incidents that were closed."""

    fingerprints: list[str]
    closed: list[str]
    """Incidents that went away without proof of recovery."""


class SilenceRequest(SignedOrder):
    """Request to silence alerts for some time. Routes, holds, quarantines and halts are not silenced."""

    contract: Name
    clause: Name | None = None
    """Only this clause."""
    slice: Name | None = None
    """Only this slice."""
    until: Until
    """Unix time at which it ends, seconds."""


class SilenceList(View):
    """Silences in force."""

    silences: list[Silence]


class EndRequest(SignedOrder):
    """Request to end something before its time."""


class PinRequest(SignedOrder):
    """A person decides which kernel serves a slice."""

    contract: Name
    slice: Name = "all"
    """The slice; `all` for every request."""
    kernel: Literal["train-kernel", "inference-kernel"]
    until: Until | None = None
    """Unix time at which it ends by itself, seconds; null for a pin that a person ends."""


class UnpinRequest(SignedOrder):
    """Request to end pins."""

    contract: Name
    slice: Name | None = None
    """Only this slice's; every pin of the contract when null."""


class EnableRequest(SignedOrder):
    """An endpoint that answered 410 is told again."""

    contract: Name
    """A contract that names it; it is told of all that do."""
    endpoint: Name


class Enabled(View):
    """Number of messages that an endpoint is sent now."""

    waiting: int
    """Messages about the contract that wait for it."""


class Pinned(View):
    """Result of pinning or unpinning."""

    pins: int
    """Pins that were made or ended."""
    version: int
    """Version of the decision table."""


class DryRun(View):
    """Contracts that run dry, and what they would have done."""

    contracts: list[str]
    decisions: dict[str, Any]
    """The decision table that they would have published."""


def people_routes(core: Core, decided: Changes) -> APIRouter:
    """`/api/v1/alerts`, `silences`, `decisions/pin`, `decisions/unpin`, `webhooks/enable` and `dry-run`."""
    router = APIRouter(prefix="/api/v1")

    @router.get("/alerts", tags=["people"])
    async def alerts(contract: ContractName = None) -> AlertList:
        """Return the escalation steps that wait or fire, with acknowledgements and silences."""
        served_or_all(core, contract)
        now = time.time()
        found = [
            _alert(core, alert, times, now)
            for name, state in core.policies.items()
            if contract in {None, name}
            for times in [{sent.fingerprint: sent.times for sent in core.escalation.notifications[name].alerts}]
            for alert in state.alerts
        ]
        return AlertList(at=core.evaluated_at, alerts=found)

    @router.post("/alerts/acknowledge", tags=["people"])
    async def acknowledge(request: AcknowledgeRequest) -> Acknowledged:
        """Acknowledge firing alerts, which continue without reminders, and close unproven incidents."""
        async with ordered(core):
            taken, closed = people.acknowledge(core, **request.model_dump(), now=time.time())
        return Acknowledged(
            fingerprints=[alert.fingerprint for alert in taken], closed=[incident.id for incident in closed]
        )

    @router.get("/silences", tags=["people"])
    async def silences() -> SilenceList:
        """Return the silences in force, oldest first."""
        now = time.time()
        return SilenceList(silences=[entry for entry in core.people.silences if now < entry.until])

    @router.post("/silences", tags=["people"])
    async def silence(request: SilenceRequest) -> Silence:
        """Silence alerts until a time: no webhook, no log record. Routes and halts continue."""
        async with ordered(core):
            return people.silence(core, **request.model_dump(), now=time.time())

    @router.post("/silences/{silence}/end", tags=["people"])
    async def unsilence(silence: Name, request: EndRequest) -> Silence:
        """End a silence before its time; alerts that still fire are reported with the next evaluation."""
        async with ordered(core):
            return people.unsilence(core, silence, **request.model_dump(), now=time.time())

    @router.post("/decisions/pin", tags=["decisions"])
    async def pin(request: PinRequest) -> Pinned:
        """Pin a slice to a kernel; a pin overrides every route."""
        async with ordered(core):
            people.pin(core, **request.model_dump(), now=time.time())
        await decided.notify()
        return Pinned(pins=1, version=core.decisions.version)

    @router.post("/decisions/unpin", tags=["decisions"])
    async def unpin(request: UnpinRequest) -> Pinned:
        """End pins; the routes in force apply again."""
        async with ordered(core):
            ended = people.unpin(core, **request.model_dump(), now=time.time())
        await decided.notify()
        return Pinned(pins=ended, version=core.decisions.version)

    @router.post("/webhooks/enable", tags=["people"])
    async def enable(request: EnableRequest) -> Enabled:
        """Send again to an endpoint that answered 410, beginning with the messages that waited."""
        async with ordered(core):
            waiting = people.enable(core, **request.model_dump(), now=time.time())
        return Enabled(waiting=waiting)

    @router.get("/dry-run", tags=["decisions"])
    async def dry_run() -> DryRun:
        """Return the contracts in dry run, and the decision table that they would have published."""
        return DryRun(contracts=sorted(core.dry_run), decisions=to_plain(core.escalation.dry_run_decisions))

    return router


def _alert(core: Core, alert: Alert, times: Mapping[str, int], now: float) -> AlertView:
    cell, taken = alert.cell, core.people.acknowledged(alert.fingerprint)
    return AlertView.of(
        alert,
        **cell._asdict(),
        phase=alert.phase.value,
        actions=[str(action) for action in alert.actions],
        reason=alert.verdict.reason,
        acknowledged=taken,
        silenced=[silence.id for silence in core.people.silencing(cell, now)],
        notified=times.get(alert.fingerprint, 0),
        dry_run=cell.contract in core.dry_run,
    )
