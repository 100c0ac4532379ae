"""What the evaluator decides: the decision table, its resumption by a person, and promotion gates."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Response
from fastapi.responses import JSONResponse

from kc_otel.judge.decisions.table import DirectiveKind
from kc_otel.judge.plain_json import to_json, to_plain
from kc_otel.judge.promotion.stages import GateOutcome, GateSpec, Stage, decide
from kc_otel.offline.gate.evidence import make_evidence
from kc_otel.serve.api.changes import Changes
from kc_otel.serve.api.served_names import served
from kc_otel.serve.api.views import Resumed, ResumeRequest
from kc_otel.serve.core import Core

__all__ = ["decision_routes"]


def decision_routes(core: Core, decided: Changes) -> APIRouter:
    """`/api/v1/decisions`, `decisions/resume` and `gates/{contract}`."""
    router = APIRouter(prefix="/api/v1")

    @router.get(
        "/decisions",
        tags=["decisions"],
        response_model=None,
        responses={204: {"description": "What the caller has is in force."}},
    )
    async def decisions(
        after: Annotated[int, Query(description="Version that the caller has; -1 for none.")] = -1,
        tag: Annotated[str, Query(description="ETag of what the caller has; empty to compare the version only.")] = "",
        wait: Annotated[float, Query(ge=0.0, le=60.0, description="Seconds to wait for a newer one.")] = 0.0,
        obeys: Annotated[
            list[str],
            Query(max_length=200, description="Directives that the caller looks at, CONTRACT/DIRECTIVE each."),
        ] = [],  # noqa: B006 - FastAPI copies it
    ) -> Response:
        """The decision table; 204 when what the caller has is still in force after the wait."""
        core.listeners.heard(obeys, core.contracts, time.time())
        known = not tag or core.decisions.tag == tag
        if known and not await decided.wait_for(lambda: core.decisions.version != after, wait):
            return Response(status_code=204)
        table = core.decisions
        await core.on_disk()  # a version that a crash takes back would be given to another table
        return Response(
            to_json(table),
            media_type="application/json",
            headers={"ETag": f'"{table.tag}"', "Cache-Control": "no-cache"},
        )

    @router.post("/decisions/resume", tags=["decisions"])
    async def resume(request: ResumeRequest) -> Resumed:
        """A person sends a slice's traffic back to the kernel versions it was routed away from."""
        try:
            lifted = core.resume(request.contract, request.slice, request.by, request.why, time.time())
        except LookupError as error:
            raise HTTPException(404, str(error.args[0])) from None
        except ValueError as error:
            raise HTTPException(422, str(error)) from None
        await decided.notify()
        return Resumed(lifted=lifted, version=core.decisions.version)

    @router.get("/gates/{contract}", tags=["promotion"], response_model=None)
    async def gate(
        contract: str,
        kernel: Annotated[str, Query(description="Short fingerprint of the inference kernel version.")],
        stage: Stage,
        windows: Annotated[int, Query(ge=1, le=100, description="Consecutive windows that must PASS.")] = 3,
        since: Annotated[float, Query(description="Unix time at which the version entered the stage.")] = 0.0,
    ) -> Response:
        """Whether a kernel version may leave its stage, what is missing, and the evidence."""
        found = served(core, contract)
        now = time.time()
        holds = [
            one.reason
            for one in core.decisions.directives
            if one.contract == contract and one.kind is DirectiveKind.HOLD_PROMOTION
        ]
        history = core.gate_history.since(contract, since)
        decision = decide(GateSpec.of(found, stage, windows), kernel, history, holds, now)
        # A rollback stands on the evaluation that failed, also when a later one does not.
        failed = (one for one in reversed(history) if one.fails(kernel))
        shown = next(failed, None) if decision.outcome is GateOutcome.ROLLBACK else None
        shown = shown or (history[-1] if history else None)
        verdicts = [v for v in shown.verdicts if v.cell.kernel_inference == kernel] if shown else []
        evidence = make_evidence(found, stage, kernel, decision, verdicts, now) if verdicts else None
        return JSONResponse({"decision": to_plain(decision), "evidence": evidence})

    return router
