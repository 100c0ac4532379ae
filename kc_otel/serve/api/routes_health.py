"""Routes for health, readiness and metrics."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from kc_otel.contract.words import duration
from kc_otel.judge.decisions import LATE_SECONDS
from kc_otel.serve.api.shapes import View
from kc_otel.serve.core import Core
from kc_otel.serve.durable_sink import WRITING
from kc_otel.serve.self_metrics import SelfMetrics, exposition
from kc_otel.serve.shards import ShardSeen
from kc_otel.serve.webhooks.outbox import EndpointStatus


class HealthView(View):
    """Health of the evaluator."""

    evaluated_at: float | None
    tick_seconds: float
    series: int
    streams: int
    points: dict[str, int]
    """Data points received, by what became of them."""
    requests: dict[str, int]
    """OTLP requests, by `transport outcome`."""
    failures: dict[str, str]
    """Current failures of the evaluator, by contract; an empty name stands for all contracts."""
    streams_events: dict[str, int]
    """Resets, gaps, evictions and the like."""
    invalid: dict[str, dict[str, int]]
    """Sequences that failed an input check within the short window, by contract and reason."""
    listeners: dict[str, dict[str, float | None]]
    """Unix time when a program last looked at a contract's directives, by contract and directive; null where none has
    since the evaluator started."""
    outbox: list[EndpointStatus]
    shards: tuple[ShardSeen, ...]
    """Shards that hold the streams as of the last evaluation, if those are not in the evaluator's process."""


def health_routes(core: Core, self_metrics: Callable[[], SelfMetrics]) -> APIRouter:
    """`/healthz`, `/readyz`, `/metrics` and `/api/v1/health`."""
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
        late, refusing, said = age > LATE_SECONDS, core.evaluator.faults.fails("", WRITING), "ready\n"
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

    @router.get("/api/v1/health")
    async def health() -> HealthView:
        """Return counts of received, dropped and rejected data, evaluation times, and the state of webhooks."""
        now = time.time()
        metrics = self_metrics()
        return HealthView(
            evaluated_at=core.evaluated_at,
            tick_seconds=core.tick_seconds,
            series=core.evaluator.series_count,
            streams=core.evaluator.stream_count + sum(shard.streams for shard in core.shards),
            points={outcome: int(count) for outcome, count in metrics["kc.evaluator.points"]},
            requests={f"{by} {outcome}": int(count) for by, outcome, count in metrics["kc.evaluator.requests"]},
            failures=dict(core.evaluator.faults.present),
            streams_events=dict(core.evaluator.events),
            invalid={
                name: dict(sorted(sum(map(Counter, found.values()), Counter[str]()).items()))
                for name in core.contracts
                for found in [core.evaluator.invalid_input(name, now)]
            },
            listeners=core.listeners.view(core.contracts),
            outbox=list(core.outbox.status()),
            shards=core.shards,
        )

    return router
