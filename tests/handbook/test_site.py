"""The handbook as MkDocs builds it, and as the evaluator shows it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from kc_otel.serve.api.routes_files import file_routes
from tests.handbook.snippets import ROOT

pytestmark = pytest.mark.slow
SOURCES = ROOT / "kc_otel" / "handbook"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build in which a link that leads nowhere, a missing anchor or a page outside of the contents is an error."""
    folder = tmp_path_factory.mktemp("handbook") / "site"
    command = [
        *(sys.executable, "-m", "mkdocs", "build", "--strict"),
        *("--config-file", str(SOURCES / "mkdocs.yml"), "--site-dir", str(folder)),
    ]
    built = subprocess.run(
        command, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def client(site: Path) -> TestClient:
    app = FastAPI()
    app.include_router(file_routes(site))
    return TestClient(app)


def test_a_page_that_was_not_built_is_shown_as_it_is_written(tmp_path: Path) -> None:
    """An install from a checkout has no built site, and the link to the runbook in a message opens all the same."""
    answer = client(tmp_path).get("/handbook/on-call.html")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert "## KernelContractBroken" in answer.text
    assert client(tmp_path).get("/handbook/").text.startswith("# kc-otel")
    assert client(tmp_path).get("/handbook/no-such-page.html").status_code == 404


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r'<(?:script|img|iframe|source)[^>]* src="([^"]+)"|<link[^>]* href="([^"]+)"', text)
        assert not [address for pair in loaded for address in pair if re.match(r"(?:https?:)?//", address)], page
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style.read_text()), style


def test_the_evaluator_shows_what_was_built(site: Path) -> None:
    with client(site) as browser:
        home = browser.get("/handbook")
        assert str(home.url).endswith("/handbook/")
        policy = home.headers["content-security-policy"]
        assert "script-src 'self' 'sha256-" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe-inline" not in policy.split("script-src", 1)[1].split(";", 1)[0]
        assert browser.get("/handbook/on-call.html").status_code == 200
        assert browser.get("/handbook/search/search_index.json").headers["content-type"] == "application/json"
        style = re.search(r'href="(assets/stylesheets/main[^"]+)"', home.text)
        assert style
        assert browser.get(f"/handbook/{style[1]}").headers["content-type"].startswith("text/css")
        tag = home.headers["etag"]
        assert browser.get("/handbook/", headers={"if-none-match": tag}).status_code == 304


@pytest.mark.parametrize("path", ["../mkdocs.yml", "%2e%2e/mkdocs.yml", "nothing.html", "/etc/passwd"])
def test_no_path_leads_out_of_the_handbook(site: Path, path: str) -> None:
    with client(site) as browser:
        assert browser.get(f"/handbook/{path}").status_code == 404
