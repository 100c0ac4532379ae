"""The page at `/`: for whoever has no Grafana, or no time to open it.

It is a handful of static files that read the API; nothing is built, and nothing is loaded from elsewhere. Charts are
drawn by the plotly.js that the Python package `plotly` carries, which is sent only when a cell is opened.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import importlib.util
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import Final

from fastapi import APIRouter, HTTPException, Request, Response

__all__ = ["CONTENT_SECURITY_POLICY", "page_routes"]

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""No script but ours and plotly.js, which needs no `unsafe-eval` for the charts here. It does place its charts by style
attributes and a style sheet of its own, so styles may be inline."""
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
_FOREVER: Final = "public, max-age=31536000, immutable"


def page_routes() -> APIRouter:
    """`/` and the files that it loads, below `/page/`."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def page(request: Request) -> Response:
        return _answer(request, "index.html")

    @router.get("/page/plotly/{version}")
    async def plotly(version: str) -> Response:
        if version != _plotly_version() or not version:
            raise HTTPException(404, "no such version of plotly is installed here")
        body = await asyncio.to_thread(_plotly)
        headers = {**_HEADERS, "Content-Encoding": "gzip", "Cache-Control": _FOREVER}
        return Response(body, headers=headers, media_type=_TYPES[".js"])

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
    found = {}
    for file in files(__package__).iterdir():
        if Path(file.name).suffix in _TYPES:
            body = file.read_bytes()
            if file.name == "index.html":
                body = body.replace(b"PLOTLY_VERSION", _plotly_version().encode())
            found[file.name] = (body, f'"{hashlib.sha256(body).hexdigest()[:16]}"')
    return found


@cache
def _plotly_version() -> str:
    """Version of the installed plotly; empty where there is none, and the page then shows numbers for charts."""
    try:
        return version("plotly")
    except PackageNotFoundError:
        return ""


@cache
def _plotly() -> bytes:
    """plotly.js, compressed. The file is read where it lies: importing plotly would take memory for nothing."""
    spec = importlib.util.find_spec("plotly")
    assert spec is not None
    assert spec.origin is not None
    return gzip.compress((Path(spec.origin).parent / "package_data" / "plotly.min.js").read_bytes(), 6, mtime=0)
