"""The handbook as MkDocs builds it, and as the evaluator shows it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urljoin

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from kc_otel.contract.registry import ATTRIBUTES, METRICS, known_metrics
from kc_otel.record.measure.reasons import REASONS
from kc_otel.serve.handbook_site import handbook_routes
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


def client(folder: Path) -> TestClient:
    app = FastAPI()
    app.include_router(handbook_routes(folder))
    return TestClient(app)


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    """No page asks another host for a script, a style, a font or a picture."""
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r'<(?:script|img|iframe|source)[^>]* src="([^"]+)"|<link[^>]* href="([^"]+)"', text)
        assert not [each for pair in loaded for each in pair if re.match(r"(?:https?:)?//", each)], page
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style.read_text()), style


def test_what_is_made_while_building_is_whole(site: Path) -> None:
    """Every metric, attribute, input check, field of a contract and command has its place."""
    metrics = (site / "contract" / "metrics.html").read_text()
    assert not [key for key in known_metrics() if f'id="{key}"' not in metrics]
    telemetry = (site / "reference" / "telemetry.html").read_text()
    assert not [name for name in (*METRICS, *ATTRIBUTES) if f"<code>{name}</code>" not in telemetry]
    checks = (site / "measure" / "input-checks.html").read_text()
    assert not [name for name in REASONS if f'id="{name}"' not in checks]
    fields = (site / "contract" / "fields.html").read_text()
    assert {"min_sequences", "clear_for", "failure_limit"} <= set(re.findall(r"<td><code>(\w+)</code></td>", fields))
    commands = (site / "reference" / "commands.html").read_text()
    assert {"kc-otel-check", "kc-otel-gate-run", "kc-otel-generate-grafana"} <= set(
        re.findall(r'<h2 id="([\w-]+)"', commands)
    )
    python = (site / "reference" / "python.html").read_text()
    assert "Recorder" in python
    assert "verify" in python


def test_the_evaluator_shows_what_was_built(site: Path) -> None:
    """Pages, styles and search are there, and a page may run no inline script but those that it was built with."""
    with client(site.parent) as browser:
        home = browser.get("/handbook")
        assert str(home.url).endswith("/handbook/")
        policy = home.headers["content-security-policy"]
        assert "script-src 'self' 'sha256-" in policy
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
    """Only files of the site are served."""
    with client(site.parent) as browser:
        assert browser.get(f"/handbook/{path}").status_code == 404


def test_without_a_build_the_pages_are_rendered_plainly(tmp_path: Path) -> None:
    """Every page of the contents answers, links and pictures are there, and made pages say where their content is."""
    for name in ("mkdocs.yml", "pages", "plain.css"):
        (tmp_path / name).symlink_to(SOURCES / name)
    with client(tmp_path) as browser:
        home = browser.get("/handbook/")
        assert '<h1 id="kc-otel">kc-otel</h1>' in home.text
        pages = set(re.findall(r'<a href="([\w/-]+\.html)"', home.text))
        assert len(pages) > 25
        for page in pages:
            answer = browser.get(f"/handbook/{page}")
            assert answer.status_code == 200, page
            assert "<script" not in answer.text
            links = {urljoin(page, link) for link in re.findall(r'<a href="([^"#:]+\.html)', answer.text)}
            assert links <= pages | {"index.html"}, page
            for picture in re.findall(r'<img src="([^"]+)"', answer.text):
                shown = browser.get("/handbook/" + urljoin(page, picture))
                assert (shown.status_code, shown.headers["content-type"]) == (200, "image/png"), picture
        assert '<h2 id="kernelcontractbroken">' in browser.get("/handbook/on-call.html").text
        assert browser.get("/handbook/on-call.html").text.count("<img ") == 4
        assert "kc-otel metrics" in browser.get("/handbook/contract/metrics.html").text
        assert "<p><code>loop.py</code></p>\n<pre>" in browser.get("/handbook/measure/own-loop.html").text
