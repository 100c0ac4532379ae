"""Routes for the decision table, for alerts and promotions, and for what people order about them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, Literal
from urllib.parse import quote

from fastapi import APIRouter, HTTPException, Query, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from kc_otel.judge.escalation.alerts import Acknowledgement, Silence
from kc_otel.judge.promotion.machine import next_position, share_of
from kc_otel.judge.promotion.stages import Hold, Promotion, PromotionStatus, Stage, path_of
from kc_otel.serve import people_orders as people
from kc_otel.serve.api.routes_verdicts import CellKey
from kc_otel.serve.api.shapes import (
    ContractName,
    Name,
    Order,
    Reason,
    Signature,
    SignedOrder,
    Until,
    View,
    answered,
    check_known,
    ordered,
)  # fmt: skip
from kc_otel.serve.core import Core


class Changes:
    """A condition with an end."""

    def __init__(self) -> None:
        self._condition = asyncio.Condition()
        self._closed = False

    async def wait_for(self, happened: Callable[[], bool], seconds: float) -> bool:
        """Wait for a change, at most so long and not beyond shutdown; return True if there was one."""
        try:
            async with asyncio.timeout(seconds), self._condition:
                await self._condition.wait_for(lambda: self._closed or happened())
        except TimeoutError:
            pass
        return happened()

    async def notify(self) -> None:
        """Wake the waiting requests."""
        async with self._condition:
            self._condition.notify_all()

    async def close(self) -> None:
        """Nobody waits any longer."""
        self._closed = True
        await self.notify()


_MAX_NAMED: Final = 5
_MAX_CHARACTERS: Final = 80
"""Contracts that an answer names as not served, and characters of each."""


class Poll(View):
    """A router or trainer asks for the decision table, and says what it does with it."""

    after: int = -1
    """Version of the caller's table; -1 for none."""
    tag: str = ""
    """ETag of the caller's table; empty to compare the version only."""
    wait: Annotated[float, Field(ge=0.0, le=60.0)] = 0.0
    """Seconds to wait for a newer table."""
    obeys: list[str] = Field(default_factory=list, max_length=200)
    """Directives that the caller follows, CONTRACT/DIRECTIVE each; CONTRACT/route/IDS adds how it defines the slices
    that its table names."""
    kept: list[str] = Field(default_factory=list, max_length=200)
    """CONTRACT/SLICE/VERSION of requests that the caller keeps away from a version that it had sent requests to."""
    instance: Annotated[str, Field(max_length=200)] = ""
    """Id of the process; one that routes without an id counts as having applied no route."""
    closing: bool = False
    """True if the process is ending and no longer waited for."""


def decision_routes(core: Core, decided: Changes) -> APIRouter:
    """`/api/v1/decisions`, for routers and trainers."""
    router = APIRouter(prefix="/api/v1")

    @router.get(
        "/decisions",
        tags=["decisions"],
        response_model=None,
        responses={204: {"description": "The caller's table is in force."}},
    )
    async def decisions(poll: Annotated[Poll, Query()]) -> Response:
        """Return the decision table; 204 if the caller's table is still in force after the wait.

        The header `Age` has the seconds since the last evaluation. `KC-Unserved` names contracts of `obeys` that this
        evaluator does not serve, or whose policy fails.
        """
        if poll.closing:
            core.listeners.closed(poll.instance)
            return Response(status_code=204)
        asked = {subject.partition("/")[0][:_MAX_CHARACTERS] for subject in poll.obeys} - {""}
        unserved = {name for name in asked if name not in core.contracts or core.fails(name)}
        headers = {"KC-Unserved": " ".join(map(quote, sorted(unserved)[:_MAX_NAMED]))} if unserved else {}
        known = poll.tag in {"", core.decisions.tag}
        current = known and core.decisions.version == poll.after
        core.listeners.heard(
            poll.obeys,
            core.contracts,
            time.time(),
            instance=poll.instance,
            table_at=core.decisions.at if current else None,
            kept=poll.kept,
            versions=core.inference_versions,
        )
        if known and not await decided.wait_for(lambda: core.decisions.version != poll.after, poll.wait):
            return Response(status_code=204, headers={"Age": f"{core.age:.0f}", **headers})
        table = core.decisions
        return Response(
            table.to_json(),
            media_type="application/json",
            headers={"ETag": f'"{table.tag}"', "Cache-Control": "no-cache", "Age": f"{core.age:.0f}", **headers},
        )

    return router


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
    """Actions of the step, such as `route:train-kernel`; while it fires, without a route that a person has lifted."""
    reason: str
    """The last verdict's sentence."""
    fingerprint: str
    """Identifies the alert here, in webhooks and in events."""
    acknowledged: Acknowledgement | None
    silenced: list[str]
    """Ids of the silences that mute it."""
    notified: int
    """Times that it was announced that it fires, reminders included; endpoints may not have accepted all of it."""
    undelivered: list[str]
    """Messages about its incident that wait or were given up, a sentence for each endpoint."""
    dry_run: bool
    """True if the contract runs dry: none of the step's actions is carried out."""


class AlertList(View):
    """Alerts that wait or fire."""

    at: float | None
    """Unix time of the last evaluation; null before the first."""
    alerts: list[AlertView]


class AlertsRequest(SignedOrder):
    """An order about alerts."""

    contract: Name
    clause: Name | None = None
    """Only alerts of this clause."""
    slice: Name | None = None
    """Only alerts on this slice."""


class AcknowledgeRequest(AlertsRequest):
    """Request to acknowledge alerts, or to close incidents."""

    close: bool = False
    """Close the incidents that went away without proof of recovery; no alert is acknowledged then."""


class Acknowledged(View):
    """Alerts that were acknowledged, or incidents that were closed."""

    fingerprints: list[str]
    closed: list[str]
    """Incidents that went away without proof of recovery."""


class SilenceRequest(AlertsRequest):
    """Request to silence alerts for some time. Routes, holds, quarantines and halts are not silenced."""

    until: Until
    """Unix time at which it ends, seconds."""


class SilenceList(View):
    """Silences in force."""

    silences: list[Silence]


class PinRequest(SignedOrder):
    """A person decides which kernel serves a slice."""

    contract: Name
    slice: Name = "all"
    """The slice; `all` for every request."""
    kernel: Literal["train-kernel", "inference-kernel"]
    until: Until | None = None
    """Unix time at which it ends by itself, seconds; null for a pin that a person ends."""


class Decided(View):
    """Result of an order about routes or pins."""

    changed: int
    """Routes that were lifted, or pins that were made or ended."""
    version: int
    """Version of the decision table."""


class SliceRequest(SignedOrder):
    """A person lifts routes, or ends pins."""

    contract: Name
    slice: Name | None = None
    """Only those of this slice; of every slice when null."""


def people_routes(core: Core, decided: Changes) -> APIRouter:
    """`/api/v1/alerts`, `silences`, and orders about routes and pins."""
    router = APIRouter(prefix="/api/v1")

    @router.get("/alerts", tags=["people"])
    async def alerts(contract: ContractName = None) -> AlertList:
        """Return the escalation steps that wait or fire, with acknowledgements and silences."""
        check_known(core, contract)
        found = [
            alert for name in core.policies if contract in {None, name} for alert in _alerts(core, name, time.time())
        ]
        return AlertList(at=core.evaluated_at, alerts=found)

    @router.post("/alerts/acknowledge", tags=["people"])
    async def acknowledge(request: AcknowledgeRequest) -> Acknowledged:
        """Acknowledge firing alerts, which continue without reminders; or `close` unproven incidents instead."""
        order = request.model_dump(exclude={"close"})
        async with ordered(core):
            if request.close:
                closed = people.close(core, **order, now=time.time())
                return Acknowledged(fingerprints=[], closed=[incident.id for incident in closed])
            taken = people.acknowledge(core, **order, now=time.time())
        return Acknowledged(fingerprints=[alert.fingerprint for alert in taken], closed=[])

    @router.get("/silences", tags=["people"])
    async def silences() -> SilenceList:
        """Return the silences in force, oldest first."""
        now = time.time()
        return SilenceList(silences=[entry for entry in core.people.silences if now < entry.until])

    @router.post("/silences", tags=["people"])
    async def silence(request: SilenceRequest) -> Silence:
        """Silence alerts until a time, except for the end of alerts sent before. Routes and halts continue."""
        async with ordered(core):
            return people.silence(core, **request.model_dump(), now=time.time())

    @router.post("/silences/{silence}/end", tags=["people"])
    async def unsilence(silence: Name, request: SignedOrder) -> Silence:
        """End a silence before its time; alerts that still fire are reported with the next evaluation."""
        async with ordered(core):
            return people.unsilence(core, silence, **request.model_dump(), now=time.time())

    @router.post("/decisions/resume", tags=["decisions"])
    async def resume(request: SliceRequest) -> Decided:
        """Lift routes: send a slice's traffic back to the kernel versions that they avoid."""
        return await _lifted(core, decided, "route", request)

    @router.post("/decisions/pin", tags=["decisions"])
    async def pin(request: PinRequest) -> Decided:
        """Pin a slice to a kernel; a pin overrides every route."""
        async with ordered(core):
            people.pin(core, **request.model_dump(), now=time.time())
        await decided.notify()
        return Decided(changed=1, version=core.decisions.version)

    @router.post("/decisions/unpin", tags=["decisions"])
    async def unpin(request: SliceRequest) -> Decided:
        """End pins; the routes in force apply again."""
        return await _lifted(core, decided, "pin", request)

    return router


async def _lifted(core: Core, decided: Changes, kind: Literal["route", "pin"], request: SliceRequest) -> Decided:
    async with ordered(core):
        ended = people.lift(core, kind, **request.model_dump(), now=time.time())
    await decided.notify()
    return Decided(changed=ended, version=core.decisions.version)


def _alerts(core: Core, contract: str, now: float) -> Iterator[AlertView]:
    undelivered = {
        incident.key: [text for _, text in core.outbox.undelivered(contract, incident.id).values()]
        for incident in core.escalation.incidents.get(contract, ())
    }
    for alert in core.policies[contract].alerts:
        cell = alert.cell
        yield AlertView.of(
            alert,
            **cell._asdict(),
            phase=alert.phase.value,
            started_at=alert.started_at if alert.fires else None,
            actions=core.actions(alert),
            reason=alert.verdict.reason,
            acknowledged=core.people.acknowledged(alert.fingerprint),
            silenced=[silence.id for silence in core.people.silencing(cell, now)],
            notified=alert.told,
            undelivered=undelivered.get((alert.on, cell.kernel_train, cell.kernel_inference), []),
            dry_run=contract in core.dry_run,
        )


class PromotionView(View):
    """Position of a kernel version, and what its next step waits for."""

    contract: str
    kernel: str
    """Short fingerprint of the inference kernel version."""
    status: PromotionStatus
    position: str
    """Position, such as `canary at 5%`."""
    stage: Stage
    share: float
    """Share of the requests that it may serve, 0 to 1."""
    entered: float
    """Unix time since when it is there."""
    started: float
    attempt: int
    windows: int
    """Consecutive windows that have passed."""
    windows_needed: int
    failed_windows: int
    failure_limit: int
    next: str | None
    """Position that the next step leads to; null where there is none."""
    path: list[str]
    """Every position that a version passes under this contract."""
    missing: list[str]
    """Conditions that the next step waits for."""
    hold: Hold | None
    approved: list[str]
    reason: str
    """Reason for its position, in a sentence."""
    seen_serving: float | None
    """Unix time at which it was measured late after its rollback; null without such a measurement."""
    elsewhere: str
    """Sentence that says which of its evidence was made under another contract; empty for none."""


class PromotionList(View):
    """Promotions by contract, the newest first."""

    promotions: list[PromotionView]


class EvidenceView(View):
    """A piece of evidence, without its content."""

    id: int
    at: float
    what: str
    """The step in words."""
    checksum: str


class EvidenceList(View):
    """Records of a version's steps, oldest first."""

    evidence: list[EvidenceView]


class OrderRequest(Order):
    """A person's or their program's order about a version."""

    order: Literal["start", "evidence", "approve", "hold", "resume", "force", "rollback"]
    by: Signature
    """Person or program; kept with the event."""
    why: Reason = ""
    """Reason; required with hold, force and rollback."""
    stage: Stage | None = None
    """Stage to approve, or to force it into."""
    evidence: dict[str, Any] | None = None
    """With evidence: the record of `kc-otel gate run ... --evidence`."""
    start: bool = False
    """Start a version that is not known; where the order is refused, nothing is started."""


def promotion_routes(core: Core) -> APIRouter:
    """`/api/v1/promotions` and what is below it."""
    router = APIRouter(prefix="/api/v1/promotions", tags=["promotion"])

    @router.get("")
    async def promotions(contract: ContractName = None) -> PromotionList:
        """Return every kernel version in promotion, rolled back or replaced."""
        check_known(core, contract)
        return PromotionList(promotions=[_promotion(core, entry) for entry in core.promotions.all(contract)])

    @router.get("/{contract}/{kernel}")
    async def promotion(contract: str, kernel: str) -> PromotionView:
        """Return the stage of one kernel version."""
        with answered():
            return _promotion(core, core.promotions.of(contract, kernel))

    @router.post("/{contract}/{kernel}")
    async def order(contract: Name, kernel: Name, request: OrderRequest) -> PromotionView:
        """Start, hold, resume, force, approve or roll back a version."""
        async with ordered(core):
            core.promotions.tell(contract, kernel, now=time.time(), **request.model_dump())
        return _promotion(core, core.promotions.of(contract, kernel))

    @router.get("/{contract}/{kernel}/evidence")
    async def evidence(contract: str, kernel: str) -> EvidenceList:
        """Return the evidence stored for a version's steps."""
        found = core.promotions.evidence(contract, kernel)
        return EvidenceList(evidence=[EvidenceView.of(row, checksum=row.record["checksum"]) for row in found])

    @router.get("/{contract}/{kernel}/evidence/{number}", response_model=None)
    async def record(contract: str, kernel: str, number: int) -> Response:
        """Return a piece of evidence, which `kc-otel gate verify` checks."""
        for row in core.promotions.evidence(contract, kernel):
            if row.id == number:
                return JSONResponse(row.record)
        raise HTTPException(404, f"there is no evidence {number} of {kernel} under {contract}")

    return router


def _promotion(core: Core, promotion: Promotion) -> PromotionView:
    terms = core.contracts[promotion.contract].promotion
    path = path_of(terms)
    running = promotion.status is PromotionStatus.RUNNING
    following = next_position(promotion, terms) if running else None
    share, missing = share_of(promotion), list(promotion.missing)
    if following is not None and promotion.contract in core.dry_run:
        missing.insert(0, f"{promotion.contract} runs dry: no gate opens, and no FAIL rolls it back")
    return PromotionView.of(
        promotion,
        missing=missing,
        kernel=promotion.version,
        position=str(promotion.position),
        stage=promotion.position.stage,
        share=1.0 if share is None else share,
        windows=min(promotion.tally.passed, terms.windows),
        windows_needed=terms.windows,
        failed_windows=promotion.tally.failed,
        failure_limit=terms.failure_limit,
        next=None if following is None else str(following),
        path=[str(position) for position in path],
    )
