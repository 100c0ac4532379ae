"""The promotions of kernel versions: where each is, what is missing, its evidence, and what people tell it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Response
from fastapi.responses import JSONResponse

from kc_otel.judge.promotion.machine import share_of
from kc_otel.judge.promotion.plan import Traffic, observed_traffic, plan_steps, shares_of
from kc_otel.judge.promotion.promotion_state import OrderError, Promotion, PromotionStatus, path_of
from kc_otel.serve.api.people_input import Name
from kc_otel.serve.api.promotion_views import (
    EvidenceList,
    EvidenceView,
    OrderRequest,
    PlanView,
    PromotionList,
    PromotionView,
    StepView,
)
from kc_otel.serve.api.served_names import ContractName, served, served_or_all
from kc_otel.serve.core import Core

__all__ = ["promotion_routes"]


def promotion_routes(core: Core) -> APIRouter:
    """`/api/v1/promotions` and what is below it."""
    router = APIRouter(prefix="/api/v1/promotions", tags=["promotion"])
    _add_plan(router, core)  # before what has a kernel in the same place of the path
    _add_states(router, core)
    _add_evidence(router, core)
    return router


def _add_states(router: APIRouter, core: Core) -> None:
    @router.get("")
    async def promotions(
        contract: ContractName = None,
    ) -> PromotionList:
        """Every kernel version that is on its way, was rolled back, or was replaced."""
        served_or_all(core, contract)
        return PromotionList(promotions=[_view(core, one) for one in core.promotions.all(contract)])

    @router.get("/{contract}/{kernel}")
    async def promotion(contract: str, kernel: str) -> PromotionView:
        """Where one kernel version is."""
        with _answered():
            return _view(core, core.promotions.of(contract, kernel))

    @router.post("/{contract}/{kernel}")
    async def order(contract: Name, kernel: Name, request: OrderRequest) -> PromotionView:
        """A person or their program starts, holds, resumes, forces, approves, confirms or rolls back a version."""
        now, promotions = time.time(), core.promotions
        with _answered():
            if request.order == "start":
                said = promotions.start(contract, kernel, request.by, now)
            elif request.order == "evidence":
                if request.evidence is None:
                    raise OrderError("hand the evidence over, as `kc-otel gate run --evidence` wrote it")
                said = promotions.admit(contract, kernel, request.evidence, request.by, now)
            else:
                said = promotions.tell(
                    contract, kernel, request.order, request.by, request.why, now,
                    stage=request.stage, position=request.position,
                )  # fmt: skip
            core.announce_all(said)
            return _view(core, promotions.of(contract, kernel))


def _add_evidence(router: APIRouter, core: Core) -> None:
    @router.get("/{contract}/{kernel}/evidence")
    async def evidence(contract: str, kernel: str) -> EvidenceList:
        """What was kept of a version's steps."""
        with _answered():
            found = core.promotions.evidence(contract, kernel)
        views = [EvidenceView(id=one.id, at=one.at, what=one.what, checksum=one.record["checksum"]) for one in found]
        return EvidenceList(evidence=views)

    @router.get("/{contract}/{kernel}/evidence/{number}", response_model=None)
    async def record(contract: str, kernel: str, number: int) -> Response:
        """One piece of evidence, as `kc-otel gate verify` checks it."""
        with _answered():
            found = core.promotions.evidence(contract, kernel)
        for one in found:
            if one.id == number:
                return JSONResponse(one.record)
        raise HTTPException(404, f"there is no evidence {number} of {kernel} under {contract}")


def _add_plan(router: APIRouter, core: Core) -> None:
    @router.get("/{contract}/plan")
    async def plan(
        contract: str,
        tokens_per_second: Annotated[
            float | None,
            Query(gt=0.0, allow_inf_nan=False, description="All traffic; else what the last evaluation has seen."),
        ] = None,
        tokens_per_sequence: Annotated[float | None, Query(ge=1.0, allow_inf_nan=False)] = None,
        share: Annotated[list[str] | None, Query(description="SLICE=PART of the traffic.")] = None,
    ) -> PlanView:
        """How long each position of a promotion takes at best, with identical kernels."""
        found = served(core, contract)
        seen = observed_traffic(found, core.promotions.latest(contract).verdicts)
        try:
            shares = {**seen.shares, **shares_of(found, share or [])}
        except ValueError as error:
            raise HTTPException(422, str(error)) from None
        traffic = Traffic(
            tokens_per_second or seen.tokens_per_second,
            seen.sampling,
            tokens_per_sequence or seen.tokens_per_sequence,
            shares,
        )
        steps = [
            StepView(
                position=str(step.position),
                seconds=step.seconds if step.seconds is not None and math.isfinite(step.seconds) else None,
                never=step.seconds == math.inf,
                slowest=step.slowest,
                why=step.why,
            )
            for step in plan_steps(found, traffic)
        ]
        return PlanView(sampling=traffic.sampling, tokens_per_second=traffic.tokens_per_second, steps=steps)


@contextmanager
def _answered() -> Iterator[None]:
    try:
        yield
    except LookupError as error:
        raise HTTPException(404, str(error.args[0])) from None
    except OrderError as error:
        raise HTTPException(409, str(error)) from None


def _view(core: Core, one: Promotion) -> PromotionView:
    terms = core.contracts[one.contract].promotion
    path = path_of(terms)
    running = one.status is PromotionStatus.RUNNING
    following = next((position for position in path if position.rank > one.position.rank), None) if running else None
    share = share_of(one)
    return PromotionView(
        contract=one.contract,
        kernel=one.version,
        status=one.status,
        position=str(one.position),
        stage=one.position.stage,
        share=1.0 if share is None else share,
        entered=one.entered,
        started=one.started,
        attempt=one.attempt,
        windows=min(one.tally.passed, terms.windows),
        windows_needed=terms.windows,
        failed_windows=one.tally.failed,
        failure_limit=terms.failure_limit,
        next=None if following is None else str(following),
        next_share=None if following is None else following.share,
        path=[str(position) for position in path],
        missing=list(one.missing),
        awaiting=one.awaiting or None,
        hooked=one.hooked,
        hold=one.hold,
        approved=list(one.approved),
        reason=one.reason,
    )
