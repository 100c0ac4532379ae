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
from typing import Final, NamedTuple

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import RedirectResponse

from kc_otel.serve import page

_POLICY: Final = (
    "default-src 'self'; script-src 'self'{scripts}; style-src 'self'{styles}; img-src 'self' data:; "
    "connect-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
_TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_SITE_FOLDER: Final = Path(str(files("kc_otel"))) / "handbook" / "site"
_PAGES: Final = _SITE_FOLDER.parent / "pages"
_INLINE_SCRIPT: Final = re.compile(r"<script>(.*?)</script>", re.DOTALL)


class ServedFile(NamedTuple):
    """A file that answers a path, and its Content-Security-Policy."""

    body: bytes
    kind: str
    policy: str


def file_routes(site: Path = _SITE_FOLDER) -> APIRouter:
    """`/` and the files that it loads, below `/page/`; `/handbook` and everything below it."""
    router = APIRouter(include_in_schema=False)

    @router.get("/handbook")
    async def home() -> Response:
        return RedirectResponse("/handbook/")

    @router.get("/")
    @router.get("/page/{name}")
    @router.get("/handbook/{path:path}")
    async def file(request: Request) -> Response:
        path = request.scope["path"]
        if (found := _page().get(path) or _handbook(site).get(path)) is None:
            raise HTTPException(404, f"no file {path!r}; /handbook/ lists the handbook's pages")
        tag = f'"{hashlib.sha256(found.body).hexdigest()[:16]}"'
        headers = _HEADERS | {"Content-Security-Policy": found.policy, "ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(found.body, headers=headers, media_type=found.kind)

    return router


@cache
def _page() -> dict[str, ServedFile]:
    """Every file of the page that a browser asks for; nothing inline."""
    kinds = {file: _TYPES.get(Path(file.name).suffix) for file in files(page).iterdir()}
    policy = _POLICY.format(scripts="", styles="")
    served = {f"/page/{file.name}": ServedFile(file.read_bytes(), kind, policy) for file, kind in kinds.items() if kind}
    return served | {"/": served["/page/index.html"]}


@cache
def _handbook(site: Path) -> dict[str, ServedFile]:
    """The site that MkDocs built, with its own inline scripts by their hashes; or its sources, by the same names."""
    if not (site / "index.html").exists():
        policy = _POLICY.format(scripts="", styles="")
        pages = {path.relative_to(_PAGES).with_suffix(".html").as_posix(): path for path in _PAGES.rglob("*.md")}
        served = {name: ServedFile(path.read_bytes(), "text/plain", policy) for name, path in pages.items()}
    else:
        served = {path.relative_to(site).as_posix(): _of_site(path) for path in site.rglob("*") if path.is_file()}
    return {f"/handbook/{name}": file for name, file in served.items()} | {"/handbook/": served["index.html"]}


def _of_site(path: Path) -> ServedFile:
    body = path.read_bytes()
    kind = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    scripts = _INLINE_SCRIPT.findall(body.decode()) if kind == "text/html" else []
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()) for script in dict.fromkeys(scripts))
    hashes = "".join(f" 'sha256-{digest.decode()}'" for digest in digests)
    return ServedFile(body, kind, _POLICY.format(scripts=hashes, styles=" 'unsafe-inline'"))
