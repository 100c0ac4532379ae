"""The evaluator's API: read what it knows, watch the decision table, say what people decide; and a page at `/`.

Without a file of tokens (`--access`) anybody who reaches it may read and act, so `serve` binds loopback alone unless it
is told otherwise. `/openapi.json` describes it; there is no page
of documentation, because the usual one loads its scripts from elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from http import HTTPStatus

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.gzip import GZipMiddleware
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kc_otel.serve.api.changes import Changes
from kc_otel.serve.api.documented import DocumentedApi, problem
from kc_otel.serve.api.overview import Overviews
from kc_otel.serve.api.own_site import BoundedBodies
from kc_otel.serve.api.people_input import refusals
from kc_otel.serve.api.routes_charts import chart_routes
from kc_otel.serve.api.routes_decisions import decision_routes
from kc_otel.serve.api.routes_health import health_routes, shard_routes
from kc_otel.serve.api.routes_incidents import incident_routes
from kc_otel.serve.api.routes_past import past_routes
from kc_otel.serve.api.routes_people import people_routes
from kc_otel.serve.api.routes_promotion import promotion_routes
from kc_otel.serve.api.routes_verdicts import verdict_routes
from kc_otel.serve.api.routes_worst import worst_routes
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
    async def refused(request: Request, error: HTTPException) -> Response:
        not_allowed = error.status_code == HTTPStatus.METHOD_NOT_ALLOWED
        headers = {"Allow": api.allowed(request.url.path)} if not_allowed else None
        return problem(error.status_code, str(error.detail), headers)

    @api.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        return problem(422, refusals(error.errors()))

    @api.exception_handler(StateError)
    async def unwritten(_: Request, error: StateError) -> Response:
        return problem(503, str(error), title="state cannot be written")

    @api.exception_handler(Exception)  # which is also logged, with its trace
    async def failed(_: Request, error: Exception) -> Response:
        return problem(500, f"{type(error).__name__}; its log says at what", title="the evaluator has failed")

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


class EntityTags:
    """Middleware: the answer to a GET has its content's hash as its tag, and is 304 for a reader that names that tag.

    Source: RFC 9110, 13.1.2.

    An answer that brings a tag of its own keeps it. Ours is weak, since the same content may be compressed on its way.
    Bodies in parts pass unchanged.

    Args:
        app: The application that answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http" or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        known = {tag.strip() for tag in Headers(scope=scope).get("if-none-match", "").split(",")}
        held: list[Message] = []

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                held.append(message)
                return
            if held:
                start = held.pop()
                if not message.get("more_body", False):
                    message = _tag(start, message, known)
                await send(start)
            await send(message)

        await self._app(scope, receive, tagged)


def _tag(start: Message, body: Message, known: set[str]) -> Message:
    """The body, or none where the reader knows it; the beginning of the answer is changed to say so."""
    headers = MutableHeaders(raw=start["headers"])
    tag = headers.setdefault("ETag", f'W/"{hashlib.sha256(body.get("body", b"")).hexdigest()[:16]}"')
    headers.setdefault("Cache-Control", "no-cache")
    if tag not in known:
        return body
    start["status"] = 304
    del headers["Content-Length"], headers["Content-Type"]
    return {**body, "body": b""}
