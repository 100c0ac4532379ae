"""Description of the API with every error that it returns: clients expect only what `/openapi.json` lists.

FastAPI documents what a route returns. The layers before the routes answer too, about tokens, host names and the size
of a body. Those answers are the same for all, in RFC 9457's words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.routing import compile_path

from kc_otel.serve.api.views import ProblemDetails

_PROBLEM: Final = "application/problem+json"
PUBLIC: Final = frozenset({"/healthz", "/readyz", "/openapi.json"})
"""Paths that need no token where others do."""

_RESPONSES_OF_EVERY_PATH: Final = {
    413: "The body is larger than any request here needs.",
    421: "The evaluator does not accept this host name.",
    500: "The evaluator has failed; its log has the cause.",
}
_GUARDED: Final = {
    401: "A token is required, and the request has no valid one.",
    403: "The token lacks the role for this, or the request comes from another site's page.",
}
_QUERY_ERRORS: Final = {404: "There is no such thing.", 422: "The request is well formed, but its values are invalid."}
_ORDER_ERRORS: Final = {
    400: "The body cannot be read.",
    409: "The current state does not allow it.",
    503: "The state cannot be written now.",
}


class DocumentedApi(FastAPI):
    """FastAPI whose document has all errors, as they are answered."""

    def openapi(self) -> dict[str, Any]:
        """The document; made once."""
        if self.openapi_schema is None:
            document = super().openapi()
            document["components"]["schemas"]["ProblemDetails"] = ProblemDetails.model_json_schema()
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    for status, said in _answers(path, method, operation):
                        operation["responses"][str(status)] = {"description": said} | _content(status)
        found: dict[str, Any] = self.openapi_schema or {}
        return found

    def allowed(self, path: str) -> str:
        """Methods that a path takes, as in the header Allow; an undocumented path can only be read."""
        paths = self.openapi()["paths"].items()
        found = {
            method.upper() for template, methods in paths if compile_path(template)[0].match(path) for method in methods
        }
        return ", ".join(sorted(found)) or "GET"


def problem(
    status: int, detail: str, headers: Mapping[str, str] | None = None, *, title: str = "request refused"
) -> JSONResponse:
    """Return an error in RFC 9457's words."""
    body = ProblemDetails(title=title, detail=detail, status=status)
    return JSONResponse(body.model_dump(), status, headers, media_type=_PROBLEM)


def _answers(path: str, method: str, operation: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    ordered = method == "post"
    yield from _RESPONSES_OF_EVERY_PATH.items()
    if path not in PUBLIC:
        yield from _GUARDED.items()
    if ordered or operation.get("parameters"):
        yield from _QUERY_ERRORS.items()
    if ordered:
        yield from _ORDER_ERRORS.items()
    else:
        yield 304, "The client already has it: If-None-Match names its tag."


def _content(status: int) -> dict[str, Any]:
    if status < 400:
        return {}
    return {"content": {_PROBLEM: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}}
