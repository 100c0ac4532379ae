"""The evaluator's API: read what it knows, watch the decision table, say what people decide; and a page at `/`.

Without a file of tokens (`--access`) anybody who reaches it may read and act, so `serve` binds loopback alone unless it
is told otherwise. `/openapi.json` describes it; there is no page
of documentation, because the usual one loads its scripts from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.gzip import GZipMiddleware
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kc_otel.serve.api.routes_decisions import Changes, decision_routes, people_routes, promotion_routes
from kc_otel.serve.api.routes_files import file_routes
from kc_otel.serve.api.routes_health import health_routes
from kc_otel.serve.api.routes_incidents import incident_routes, overview_routes
from kc_otel.serve.api.routes_verdicts import verdict_routes
from kc_otel.serve.api.shapes import PROBLEM, ProblemDetails, problem, refusals
from kc_otel.serve.core import Core
from kc_otel.serve.self_metrics import SelfMetrics
from kc_otel.serve.store.state_file import StateError

_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    "default": {
        "description": "An error: what is wrong, and what to do.",
        "content": {PROBLEM: {"schema": ProblemDetails.model_json_schema()}},
    }
}
_MAX_ORDER_BYTES: Final = 64 * 1024
"""Bytes of anything that people say."""
_MAX_EVIDENCE_BYTES: Final = 40 * 1024 * 1024
"""Bytes of an order with a gate's evidence in it; that of 100 clauses on 500 slices has some 17 million."""
_MAX_DIAGNOSIS_BYTES: Final = 4 * 1024 * 1024
"""Bytes of what locate or remedy found, every boundary of a model of a hundred layers among it."""
_MAX_BYTES_BY_PATH: Final = {"/api/v1/promotions/": _MAX_EVIDENCE_BYTES, "/api/v1/incidents/": _MAX_DIAGNOSIS_BYTES}


def make_api(core: Core, self_metrics: Callable[[], SelfMetrics], decided: Changes, version: str) -> FastAPI:
    """Return the application; `decided` is notified when the decision table may have changed."""
    api = FastAPI(
        responses=_ERRORS,
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
        overview_routes(core, version),
        incident_routes(core),
        decision_routes(core, decided),
        people_routes(core, decided),
        promotion_routes(core),
        file_routes(),
    ):
        api.include_router(router)
    return api


class BoundedBodies:
    """Refuses bodies that are larger than anything that is said to the API (413), before they are read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or hand it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = next(
            (size for path, size in _MAX_BYTES_BY_PATH.items() if scope["path"].startswith(path)), _MAX_ORDER_BYTES
        )
        said = f"the body is larger than {limit:,} bytes, which no request here needs"
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or len(declared) > 15 or int(declared) > limit:
            await problem(413, said)(scope, receive, send)
            return
        taken = 0

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > limit:
                raise HTTPException(413, said)
            return message

        await self._app(scope, counted, send)
