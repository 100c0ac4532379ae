"""Is it up, is it working, and what does it say of itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from kc_otel.contract.words import duration
from kc_otel.serve.core import Core
from kc_otel.serve.otlp_out import SelfMetrics
from kc_otel.serve.self_metrics import exposition

__all__ = ["health_routes"]

_LATE: Final = 30.0


def health_routes(core: Core, self_metrics: Callable[[], SelfMetrics]) -> APIRouter:
    """`/healthz`, `/readyz` and `/metrics`."""
    router = APIRouter(tags=["health"])

    @router.get("/healthz", response_class=PlainTextResponse)
    async def healthz() -> str:
        """The process is up."""
        return "ok\n"

    @router.get(
        "/readyz",
        response_class=PlainTextResponse,
        responses={
            503: {
                "description": "Its last evaluation is too old.",
                "content": {"text/plain": {"schema": {"type": "string"}}},
            }
        },
    )
    async def readyz() -> Response:
        """It receives, and its last evaluation is not older than it should be; what it cannot judge is listed."""
        age = math.inf if core.evaluated_at is None else time.time() - core.evaluated_at
        late, said = age > _LATE, "ready\n"
        if late:
            said = "no evaluation yet\n" if core.evaluated_at is None else f"no evaluation for {duration(age)}\n"
        said += "".join(f"{name or 'all'}: {fault}\n" for name, fault in core.evaluator.faults.present.items())
        return PlainTextResponse(said, 503 if late else 200)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """The evaluator's own metrics and every verdict, for Prometheus."""
        return Response(exposition(self_metrics()), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
