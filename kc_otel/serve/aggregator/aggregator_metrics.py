"""An aggregator's own metrics, read from it when somebody asks: for `/metrics` and for OTLP alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.responses import PlainTextResponse

from kc_otel.judge.otlp.sink import RequestCounts
from kc_otel.serve.aggregator.aggregator_sink import AggregatorSink
from kc_otel.serve.aggregator.forwarder import Forwarder
from kc_otel.serve.otlp_out import SelfMetrics
from kc_otel.serve.self_metrics import exposition, free_space, of_requests

__all__ = ["make_site", "read"]


def read(sink: AggregatorSink, forwarder: Forwarder, requests: RequestCounts, state: Path) -> SelfMetrics:
    """Every metric of the registry that an aggregator emits, with its series."""
    store = sink.store
    return {
        "kc.aggregator.points": [({"kc.outcome": outcome}, count) for outcome, count in sorted(sink.points.items())],
        **of_requests("kc.aggregator", requests),
        "kc.aggregator.streams": [({}, len(store.host.streams))],
        "kc.aggregator.sums": [({}, len(store.host.totals))],
        "kc.aggregator.due": [({}, len(store.due))],
        "kc.aggregator.held": [({}, store.waiting)],
        "kc.aggregator.messages": [
            ({"kc.outcome": outcome}, count) for outcome, count in sorted(forwarder.outcomes.items())
        ],
        "kc.aggregator.last_message": [] if forwarder.taken_at is None else [({}, forwarder.taken_at)],
        "kc.aggregator.disk.free": free_space(state.absolute().parent),
    }


def make_site(own_metrics: Callable[[], SelfMetrics]) -> FastAPI:
    """`/metrics`, and `/healthz`, which says that the process is up."""
    site = FastAPI(title="kc-otel aggregator", docs_url=None, redoc_url=None, openapi_url=None)

    @site.get("/healthz", response_class=PlainTextResponse)
    async def healthz() -> str:
        return "ok\n"

    @site.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(exposition(own_metrics()), media_type="text/plain; version=0.0.4; charset=utf-8")

    return site
