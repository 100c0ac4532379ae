"""The page at `/`: for whoever has no Grafana, or no time to open it.

It is a handful of static files that read the API; nothing is built, and nothing is loaded from elsewhere. Charts come
drawn from the API.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final

from fastapi import APIRouter, HTTPException, Request, Response

from kc_otel.charts import chart_style

__all__ = ["CONTENT_SECURITY_POLICY", "page_routes"]

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def page_routes() -> APIRouter:
    """`/` and the files that it loads, below `/page/`."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def page(request: Request) -> Response:
        return _answer(request, "index.html")

    @router.get("/page/{name}")
    async def file(request: Request, name: str) -> Response:
        if name not in _files():
            raise HTTPException(404, f"the page has no file {name!r}")
        return _answer(request, name)

    return router


def _answer(request: Request, name: str) -> Response:
    body, tag = _files()[name]
    headers = {**_HEADERS, "ETag": tag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=_TYPES[Path(name).suffix])


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    """Content and entity tag of every file of this folder that a browser asks for."""
    found = {file.name: file.read_bytes() for file in files(__package__).iterdir() if Path(file.name).suffix in _TYPES}
    found["charts.css"] = chart_style().encode()
    return {name: (body, f'"{hashlib.sha256(body).hexdigest()[:16]}"') for name, body in found.items()}
