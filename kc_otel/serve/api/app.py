"""The evaluator's API: read what it knows, watch the decision table, say what people decide; and a page at `/`.

Without a file of tokens (`--access`) anybody who reaches it may read and act, so `serve` binds loopback alone unless it
is told otherwise. `/openapi.json` describes it; there is no page
of documentation, because the usual one loads its scripts from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.gzip import GZipMiddleware
from starlette.exceptions import HTTPException

from kc_otel.serve.api.changes import Changes
from kc_otel.serve.api.documented import DocumentedApi, problem
from kc_otel.serve.api.own_site import BoundedBodies
from kc_otel.serve.api.people_input import refusals
from kc_otel.serve.api.routes_charts import chart_routes, history_routes
from kc_otel.serve.api.routes_decisions import decision_routes
from kc_otel.serve.api.routes_health import health_routes, shard_routes
from kc_otel.serve.api.routes_incidents import incident_routes
from kc_otel.serve.api.routes_overview import overview_routes
from kc_otel.serve.api.routes_people import people_routes
from kc_otel.serve.api.routes_promotion import promotion_routes
from kc_otel.serve.api.routes_verdicts import verdict_routes
from kc_otel.serve.core import Core
from kc_otel.serve.handbook_site import handbook_routes
from kc_otel.serve.otlp_out import SelfMetrics
from kc_otel.serve.page import page_routes
from kc_otel.serve.store.unit_of_work import StateError


def make_api(core: Core, self_metrics: Callable[[], SelfMetrics], decided: Changes, version: str) -> DocumentedApi:
    """The application.

    Args:
        core: The evaluator behind the API.
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
    async def refused(_: Request, error: HTTPException) -> Response:
        return problem(error.status_code, str(error.detail), error.headers)

    @api.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        return problem(422, refusals(error.errors()))

    @api.exception_handler(StateError)
    async def unwritten(_: Request, error: StateError) -> Response:
        return problem(503, str(error), title="state cannot be written")

    @api.exception_handler(Exception)  # which is also logged, with its trace
    async def failed(_: Request, error: Exception) -> Response:
        return problem(500, f"{type(error).__name__}; its log says at what", title="the evaluator has failed")

    api.add_middleware(GZipMiddleware, minimum_size=2000, compresslevel=3)
    api.add_middleware(BoundedBodies)
    for router in (
        health_routes(core, self_metrics),
        verdict_routes(core),
        history_routes(core),
        overview_routes(core, version),
        incident_routes(core),
        chart_routes(core),
        decision_routes(core, decided),
        people_routes(core, decided),
        promotion_routes(core),
        shard_routes(core),
        page_routes(),
        handbook_routes(),
    ):
        api.include_router(router)
    return api
