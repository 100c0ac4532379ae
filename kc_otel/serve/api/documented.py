"""The API with the errors that any path may answer, so that clients expect only what `/openapi.json` lists.

FastAPI documents what a route returns. The layers before the routes answer too, about tokens, host names and the size
of a body. Errors are in RFC 9457's words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from kc_otel.serve.api.people_input import View

_PROBLEM: Final = "application/problem+json"
PUBLIC: Final = frozenset({"/healthz", "/readyz", "/openapi.json"})
"""Paths that need no token where others do."""
_ERRORS: Final = {
    400: "The body cannot be read.",
    401: "A token is required, and the request has no valid one.",
    403: "The token lacks the role for this, or the request comes from another site's page.",
    404: "There is no such thing.",
    409: "The current state does not allow it.",
    413: "The body is larger than any request here needs.",
    421: "The evaluator does not accept this host name.",
    422: "The request is well formed, but its values are invalid.",
    500: "The evaluator has failed; its log has the cause.",
    503: "The state cannot be written now.",
}


class ProblemDetails(View):
    """An error, as RFC 9457 has it."""

    title: str
    detail: str
    status: int


class DocumentedApi(FastAPI):
    """FastAPI whose document has all errors, as they are answered."""

    def __init__(self, **options: Any) -> None:
        schema = {"schema": {"$ref": f"#/components/schemas/{ProblemDetails.__name__}"}}
        errors: dict[int | str, dict[str, Any]] = {
            status: {"description": said, "content": {_PROBLEM: schema}} for status, said in _ERRORS.items()
        }
        super().__init__(responses=errors, **options)

    def openapi(self) -> dict[str, Any]:
        """The document."""
        document = super().openapi()
        document["components"]["schemas"][ProblemDetails.__name__] = ProblemDetails.model_json_schema()
        return document


def problem(
    status: int, detail: str, headers: Mapping[str, str] | None = None, *, title: str = "request refused"
) -> JSONResponse:
    """Return an error in RFC 9457's words."""
    body = ProblemDetails(title=title, detail=detail, status=status)
    return JSONResponse(body.model_dump(), status, headers, media_type=_PROBLEM)
