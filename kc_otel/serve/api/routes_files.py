"""Files that the evaluator serves: the page at `/`, and the handbook, where the on-call engineer is.

Nothing is loaded from elsewhere. Where MkDocs built no handbook (`make handbook`), each page is served as Markdown, so
that a message's link to the runbook opens.
"""

from __future__ import annotations

import base64
import hashlib
import mimetypes
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import RedirectResponse

from kc_otel.serve import page

_PAGE_CSP: Final = (
    "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _PAGE_CSP,
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
    @router.get("/page/{name}")
    async def file(name: str = "index.html") -> Response:
        if name not in _files():
            raise HTTPException(404, f"the page has no file {name!r}")
        return Response(_files()[name], headers=_HEADERS, media_type=_TYPES[Path(name).suffix])

    return router


@cache
def _files() -> dict[str, bytes]:
    """Every file of this folder that a browser asks for."""
    return {file.name: file.read_bytes() for file in files(page).iterdir() if Path(file.name).suffix in _TYPES}


_SITE_FOLDER: Final = Path(str(files("kc_otel"))) / "handbook" / "site"
_PAGES: Final = _SITE_FOLDER.parent / "pages"
_CSP: Final = (
    "default-src 'self'; script-src 'self'{}; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_INLINE_SCRIPT: Final = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def handbook_routes(site: Path = _SITE_FOLDER) -> APIRouter:
    """`/handbook` and everything below it."""
    router = APIRouter(include_in_schema=False)

    @router.get("/handbook")
    async def home() -> Response:
        return RedirectResponse("/handbook/")

    @router.get("/handbook/{path:path}")
    async def page(request: Request, path: str) -> Response:
        found = _site(site) if (site / "index.html").exists() else _unbuilt()
        if (name := path or "index.html") not in found:
            raise HTTPException(404, f"the handbook has no page {path!r}; /handbook/ has the list")
        body, kind, policy = found[name]
        tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        headers = _HEADERS | {"Content-Security-Policy": policy, "ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=kind)

    return router


_Served = dict[str, tuple[bytes, str, str]]
"""Path below /handbook/ -> body, media type, Content-Security-Policy."""


@cache
def _unbuilt() -> _Served:
    """Return the pages as Markdown, under the names that they have in the built site."""
    return {
        page.relative_to(_PAGES).with_suffix(".html").as_posix(): (page.read_bytes(), "text/plain", _CSP.format(""))
        for page in _PAGES.rglob("*.md")
    }


@cache
def _site(site: Path) -> _Served:
    """Return the site that MkDocs built; only its own inline scripts are allowed, by their hashes."""
    served = {}
    for file in site.rglob("*"):
        if file.is_file():
            body = file.read_bytes()
            kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
            hashes = ""
            if kind == "text/html":
                scripts = {hashlib.sha256(script.encode()).digest() for script in _INLINE_SCRIPT.findall(body.decode())}
                hashes = "".join(f" 'sha256-{base64.b64encode(digest).decode()}'" for digest in sorted(scripts))
            served[file.relative_to(site).as_posix()] = (body, kind, _CSP.format(hashes))
    return served
