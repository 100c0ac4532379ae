"""Routes for promotions of kernel versions: position, open requirements, evidence, and people's orders."""

from __future__ import annotations

import time
from typing import Any, Literal

from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import JSONResponse

from kc_otel.judge.promotion.machine import next_position, share_of
from kc_otel.judge.promotion.stages import Hold, Promotion, PromotionStatus, Stage, path_of
from kc_otel.serve.api.shapes import (
    ContractName,
    Name,
    Order,
    Reason,
    Signature,
    View,
    answered,
    ordered,
    served_or_all,
)
from kc_otel.serve.core import Core


def promotion_routes(core: Core) -> APIRouter:
    """`/api/v1/promotions` and what is below it."""
    router = APIRouter(prefix="/api/v1/promotions", tags=["promotion"])

    @router.get("")
    async def promotions(contract: ContractName = None) -> PromotionList:
        """Return every kernel version in promotion, rolled back or replaced."""
        served_or_all(core, contract)
        return PromotionList(promotions=[_view(core, entry) for entry in core.promotions.all(contract)])

    @router.get("/{contract}/{kernel}")
    async def promotion(contract: str, kernel: str) -> PromotionView:
        """Return the stage of one kernel version."""
        with answered():
            return _view(core, core.promotions.of(contract, kernel))

    @router.post("/{contract}/{kernel}")
    async def order(contract: Name, kernel: Name, request: OrderRequest) -> PromotionView:
        """Start, hold, resume, force, approve or roll back a version."""
        async with ordered(core):
            said = core.promotions.tell(contract, kernel, now=time.time(), **request.model_dump())
        core.announce_all(said)
        return _view(core, core.promotions.of(contract, kernel))

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


def _view(core: Core, promotion: Promotion) -> PromotionView:
    terms = core.contracts[promotion.contract].promotion
    path = path_of(terms)
    running = promotion.status is PromotionStatus.RUNNING
    following = next_position(promotion, terms) if running else None
    share = share_of(promotion)
    return PromotionView.of(
        promotion,
        kernel=promotion.version,
        position=str(promotion.position),
        stage=promotion.position.stage,
        share=1.0 if share is None else share,
        windows=min(promotion.tally.passed, terms.windows),
        windows_needed=terms.windows,
        failed_windows=promotion.tally.failed,
        failure_limit=terms.failure_limit,
        next=None if following is None else str(following),
        next_share=None if following is None else following.share,
        path=[str(position) for position in path],
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
    next_share: float | None
    """Share of the requests that it would serve there."""
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
