"""The evaluator's API: read what it knows, watch the decision table, say what people decide; and a page at `/`.

It is served without authentication and therefore on loopback by default. `/openapi.json` describes it; there is no page
of documentation, because the usual one loads its scripts from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kc_otel.serve.api.changes import Changes
from kc_otel.serve.api.documented import PROBLEM, DocumentedApi
from kc_otel.serve.api.entity_tags import EntityTags
from kc_otel.serve.api.orders_on_disk import OrdersOnDisk
from kc_otel.serve.api.overview import Overviews
from kc_otel.serve.api.own_site import BoundedBodies
from kc_otel.serve.api.people_input import refusals
from kc_otel.serve.api.routes_charts import chart_routes
from kc_otel.serve.api.routes_decisions import decision_routes
from kc_otel.serve.api.routes_health import health_routes
from kc_otel.serve.api.routes_incidents import incident_routes
from kc_otel.serve.api.routes_past import past_routes
from kc_otel.serve.api.routes_people import people_routes
from kc_otel.serve.api.routes_promotion import promotion_routes
from kc_otel.serve.api.routes_shards import shard_routes
from kc_otel.serve.api.routes_verdicts import verdict_routes
from kc_otel.serve.api.routes_worst import worst_routes
from kc_otel.serve.api.views import ProblemDetails
from kc_otel.serve.core import Core
from kc_otel.serve.handbook_site import handbook_routes
from kc_otel.serve.otlp_out import SelfMetrics
from kc_otel.serve.page import page_routes
from kc_otel.serve.store.state_file import StateError

__all__ = ["make_api"]


def make_api(core: Core, self_metrics: Callable[[], SelfMetrics], decided: Changes, version: str) -> DocumentedApi:
    """The application.

    Args:
        core: What is asked.
        self_metrics: The evaluator's own metrics.
        decided: Notified when the decision table may have changed.
        version: Version of kc-otel.
    """
    api = DocumentedApi(
        title="kc-otel evaluator",
        version=version,
        summary="Verdicts, events and decisions of kernel contracts.",
        docs_url=None,
        redoc_url=None,
    )

    @api.exception_handler(HTTPException)  # starlette's: unknown paths and methods are its own
    async def problem(request: Request, error: HTTPException) -> Response:
        refused = error.status_code == HTTPStatus.METHOD_NOT_ALLOWED
        headers = {"Allow": api.allowed(request.url.path)} if refused else None
        return _problem("request refused", str(error.detail), error.status_code, headers)

    @api.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        return _problem("request refused", refusals(error.errors()), 422)

    @api.exception_handler(StateError)
    async def unwritten(_: Request, error: StateError) -> Response:
        return _problem("state cannot be written", str(error), 503)

    @api.exception_handler(Exception)  # which is also logged, with its trace
    async def failed(_: Request, error: Exception) -> Response:
        return _problem("the evaluator has failed", f"{type(error).__name__}; its log says at what", 500)

    api.add_middleware(OrdersOnDisk, on_disk=core.on_disk)
    api.add_middleware(EntityTags)
    api.add_middleware(GZipMiddleware, minimum_size=2000, compresslevel=3)
    api.add_middleware(BoundedBodies)
    for router in (
        health_routes(core, self_metrics),
        verdict_routes(core),
        past_routes(core, Overviews(core, version), self_metrics),
        incident_routes(core),
        chart_routes(core),
        decision_routes(core, decided),
        people_routes(core, decided),
        promotion_routes(core),
        worst_routes(core),
        shard_routes(core),
        page_routes(),
        handbook_routes(),
    ):
        api.include_router(router)
    return api


def _problem(title: str, detail: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
    body = ProblemDetails(title=title, detail=detail, status=status)
    return JSONResponse(body.model_dump(), status, headers, media_type=PROBLEM)
