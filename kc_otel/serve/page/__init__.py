"""The page at `/`, for people without Grafana, or without time to open it.

It is a handful of static files that read the API; nothing is built, and nothing is loaded from elsewhere. Charts come
drawn from the API.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final

from kc_otel._extras import extra
from kc_otel.charts.chart import chart_style

with extra("serve", "the evaluator"):
    from fastapi import APIRouter, HTTPException, Response

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
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
    async def page() -> Response:
        return _answer("index.html")

    @router.get("/page/{name}")
    async def file(name: str) -> Response:
        if name not in _files():
            raise HTTPException(404, f"the page has no file {name!r}")
        return _answer(name)

    return router


def _answer(name: str) -> Response:
    return Response(_files()[name], headers=_HEADERS, media_type=_TYPES[Path(name).suffix])


@cache
def _files() -> dict[str, bytes]:
    """Every file of this folder that a browser asks for, and the style sheet of charts."""
    found = {file.name: file.read_bytes() for file in files(__package__).iterdir() if Path(file.name).suffix in _TYPES}
    return found | {"charts.css": chart_style().encode()}
