"""Routes for health, readiness, metrics and shards."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import PlainTextResponse

from kc_otel.contract.words import duration
from kc_otel.serve.api.views import ResizeRequest
from kc_otel.serve.core import Core
from kc_otel.serve.durable_sink import WRITING
from kc_otel.serve.otlp_out import SelfMetrics
from kc_otel.serve.self_metrics import exposition
from kc_otel.serve.shards.shard_health import ShardSeen
from kc_otel.serve.shards.sharded_sink import ShardError

_LATE_SECONDS: Final = 30.0


def health_routes(core: Core, self_metrics: Callable[[], SelfMetrics]) -> APIRouter:
    """`/healthz`, `/readyz` and `/metrics`."""
    router = APIRouter(tags=["health"])

    @router.get("/healthz", response_class=PlainTextResponse)
    async def healthz() -> str:
        """Answer while the process is up."""
        return "ok\n"

    @router.get(
        "/readyz",
        response_class=PlainTextResponse,
        responses={
            503: {
                "description": "The last evaluation is too old, or incoming data cannot be stored.",
                "content": {"text/plain": {"schema": {"type": "string"}}},
            }
        },
    )
    async def readyz() -> Response:
        """Report ready if incoming data can be stored and the last evaluation is recent; failures are listed."""
        age = math.inf if core.evaluated_at is None else time.time() - core.evaluated_at
        late, refusing, said = age > _LATE_SECONDS, core.evaluator.faults.fails("", WRITING), "ready\n"
        if late:
            said = "no evaluation yet\n" if core.evaluated_at is None else f"no evaluation for {duration(age)}\n"
        elif refusing:
            said = "incoming data are rejected\n"
        said += "".join(f"{name or 'all'}: {fault}\n" for name, fault in core.evaluator.faults.present.items())
        return PlainTextResponse(said, 503 if late or refusing else 200)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return the evaluator's own metrics and every verdict, for Prometheus."""
        return Response(exposition(self_metrics()), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


def shard_routes(core: Core) -> APIRouter:
    """`/api/v1/shards`."""
    router = APIRouter(prefix="/api/v1", tags=["health"])

    @router.get("/shards")
    async def shards() -> tuple[ShardSeen, ...]:
        """Return every shard as of the last evaluation; none if streams are in the evaluator's process."""
        return core.shards

    @router.post("/shards")
    async def resize(request: ResizeRequest) -> tuple[ShardSeen, ...]:
        """Change the number of shards. Senders are told to retry while streams move."""
        if core.resize is None:
            raise HTTPException(409, "streams are in the evaluator's process; kc-otel serve --engine ray has shards")
        try:
            await core.resize(request.shards)
        except ShardError as error:
            raise HTTPException(503, str(error)) from None
        return core.shards

    return router
