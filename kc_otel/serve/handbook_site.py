"""The handbook under `/handbook`, without internet: that is where the on-call engineer is.

What MkDocs built into the package is served as it is. Where nothing was built, as in a checkout, the same pages are
rendered plainly from their Markdown; those that are made while building say which command has their content.
"""

from __future__ import annotations

import base64
import hashlib
import html
import mimetypes
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, Final

from kc_otel._extras import extra

with extra("serve", "the evaluator"):
    from fastapi import APIRouter, HTTPException, Request, Response
    from fastapi.responses import RedirectResponse

__all__ = ["handbook_routes"]

_HERE: Final = Path(str(files("kc_otel"))) / "handbook"
_POLICY: Final = (
    "default-src 'self'; script-src 'self'{}; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_INLINE_SCRIPT: Final = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def handbook_routes(folder: Path = _HERE) -> APIRouter:
    """`/handbook` and everything below it.

    Args:
        folder: Holds `site`, what MkDocs built, or else `pages` and `mkdocs.yml`.
    """
    router = APIRouter(include_in_schema=False)
    built = folder / "site" / "index.html"

    @router.get("/handbook")
    async def home() -> Response:
        return RedirectResponse("/handbook/")

    @router.get("/handbook/{path:path}")
    async def page(request: Request, path: str) -> Response:
        found = _site(folder / "site") if built.exists() else _plain(folder)
        if (name := path or "index.html") not in found:
            raise HTTPException(404, f"the handbook has no page {path!r}; /handbook/ has the list")
        body, kind, policy = found[name]
        tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
        headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "ETag": tag,
            "Cache-Control": "no-cache",
        }
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=kind)

    return router


_Served = dict[str, tuple[bytes, str, str]]
"""Path below /handbook/ -> body, media type, Content-Security-Policy."""


@cache
def _site(site: Path) -> _Served:
    """What MkDocs built. Its pages have a few inline scripts, which are allowed by their hashes and none besides."""
    served = {}
    for file in site.rglob("*"):
        if file.is_file():
            body = file.read_bytes()
            kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
            hashes = ""
            if kind == "text/html":
                scripts = {_hash(script) for script in _INLINE_SCRIPT.findall(body.decode())}
                hashes = "".join(f" 'sha256-{each}'" for each in sorted(scripts))
            served[file.relative_to(site).as_posix()] = (body, kind, _POLICY.format(hashes))
    return served


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@cache
def _plain(folder: Path) -> _Served:
    """The Markdown, rendered without MkDocs."""
    import yaml  # noqa: PLC0415 - only where the handbook is opened and was not built

    with extra("serve", "the handbook"):
        from markdown_it import MarkdownIt  # noqa: PLC0415

    markdown = MarkdownIt("commonmark").enable("table")
    contents = list(_entries(yaml.safe_load((folder / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    style = (folder / "plain.css").read_text(encoding="utf-8")
    served = {
        file.relative_to(folder / "pages").as_posix(): (file.read_bytes(), "image/png", _POLICY.format(""))
        for file in (folder / "pages").rglob("*.png")
    }
    for title, path, _ in contents:
        if not path:
            continue
        source = folder / "pages" / path
        text = source.read_text(encoding="utf-8") if source.exists() else _MADE_WHEN_BUILT.format(title)
        tokens = [one for token in markdown.parse(text) for one in _with_file_name(token)]
        for token, following in pairwise(tokens):
            if token.type == "heading_open":
                token.attrSet("id", re.sub(r"[^\w -]", "", following.content.lower()).strip().replace(" ", "-"))
            for child in token.children or ():
                if child.type == "link_open":
                    child.attrSet("href", re.sub(r"\.md(?=$|#)", ".html", str(child.attrGet("href"))))
        name = path.removesuffix(".md") + ".html"
        up = "../" * (len(PurePosixPath(path).parts) - 1)
        body = _PAGE.format(
            title=html.escape(title), style=style, contents=_contents(contents, path, up),
            text=markdown.renderer.render(tokens, markdown.options, {}),
        )  # fmt: skip
        served[name] = (body.encode(), "text/html; charset=utf-8", _POLICY.format(""))
    return served


def _with_file_name(token: Any) -> Iterator[Any]:
    """A block, and above it the name of the file that it is, where it says one as MkDocs reads it."""
    if token.type == "fence" and (found := re.search(r'title="([^"]+)"', token.info)):
        with extra("serve", "the handbook"):
            from markdown_it.token import Token  # noqa: PLC0415 - as above

        yield Token("html_block", "", 0, content=f"<p><code>{html.escape(found[1])}</code></p>\n")
    yield token


_MADE_WHEN_BUILT: Final = (
    "# {}\n\nThis page is made when the handbook is built (`make handbook`), and it was not. `kc-otel metrics`, "
    "`kc-otel checks`, `kc-otel schema`, `kc-otel --help` and [/openapi.json](/openapi.json) say what such pages do.\n"
)
_PAGE: Final = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="/page/icon.svg" type="image/svg+xml">
<title>{title} - kc-otel</title>
<style>{style}</style>
<nav aria-label="Handbook"><p><a href="/">What is broken now</a></p>{contents}</nav>
<main>{text}</main>
</html>
"""


def _entries(nav: list[Any], depth: int = 0) -> Iterator[tuple[str, str, int]]:
    """Title, path (empty for a heading) and depth of every line of the table of contents."""
    for entry in nav:
        if isinstance(entry, str):
            yield "Overview", entry, depth
            continue
        ((title, below),) = entry.items()
        if isinstance(below, str):
            yield title, below, depth
        else:
            yield title, "", depth
            yield from _entries(below, depth + 1)


def _contents(entries: list[tuple[str, str, int]], here: str, up: str) -> str:
    lines = []
    for title, path, depth in entries:
        mark = ' aria-current="page"' if path == here else ""
        text = html.escape(title)
        shown = f'<a href="{up}{path.removesuffix(".md")}.html"{mark}>{text}</a>' if path else f"<b>{text}</b>"
        lines.append(f'<li style="padding-left: {depth}rem">{shown}</li>')
    return f"<ul>{''.join(lines)}</ul>"
