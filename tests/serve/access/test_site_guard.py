"""Who has a token reads and acts as its roles allow, and nobody else does; in a browser it is a password."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing, contextmanager

import numpy as np
import pytest
import yaml
from starlette.testclient import TestClient

from kc_otel.record.kernel import Kernel
from kc_otel.recordings.request import SampledRequest
from kc_otel.recordings.worst_sequences import WorstSequences
from kc_otel.serve.access.access_file import AccessFile, digest_of
from kc_otel.serve.access.site_guard import GuardedSite
from tests.serve.conftest import core_of_policy
from tests.tools.api import api_of

TOKENS = {name: f"kc_{name}_" + "r4nd0m" * 7 for name in ("ada", "reader", "sender", "reviewer")}
ACCESS = {
    "tokens": [
        {"name": name, "may": may, "sha256": digest_of(TOKENS[name])}
        for name, may in (
            ("ada", ["read", "act"]),
            ("reader", ["read"]),
            ("reviewer", ["read", "prompts"]),
            ("sender", ["send"]),
        )
    ]
}


@contextmanager
def _served():
    made = core_of_policy()
    with closing(made._connection):
        made.tick(time.time())
        yield made


@pytest.fixture
def core():
    """One contract."""
    with _served() as made:
        yield made


@pytest.fixture
def counts():
    return Counter()


@pytest.fixture
def site(core, tmp_path, counts):
    """What is served at the API's port."""
    return _site_of(core, tmp_path, counts)


def _site_of(core, folder, counts):
    path = folder / "access.yaml"
    path.write_text(yaml.safe_dump(ACCESS))
    return GuardedSite(AccessFile(path), api_of(core), counts)


@pytest.fixture
def ask(site):
    """Asks as somebody."""
    return _asking(site)


def _asking(site):
    client = TestClient(site, follow_redirects=False)

    def asked(who, method, path, **options):
        headers = {"authorization": f"Bearer {TOKENS.get(who, who)}"} if who else {}
        return client.request(method, path, headers=headers | options.pop("headers", {}), **options)

    return asked


@pytest.fixture(scope="module")
def look(tmp_path_factory):
    """Asks as somebody, for what changes nothing: of one site for all tests."""
    with _served() as core:
        yield _asking(_site_of(core, tmp_path_factory.mktemp("look"), Counter()))


@pytest.mark.slow
def test_prompts_are_for_those_who_may_read_them(core, ask, tmp_path, caplog):
    """With a role of its own, in no cache, and the log says who."""
    caplog.set_level("INFO")
    logprobs = np.full(3, -3.0, dtype=np.float32)
    asked = SampledRequest("a-request", np.arange(2), np.arange(3), logprobs, Kernel("vllm"))
    kept = WorstSequences(tmp_path / "worst.sqlite", core.contracts["policy"], text=lambda _: "a-prompt")
    kept.add([asked], [logprobs - 1], time.time())
    kept.close()
    cell = {"contract": "policy", "clause": "token-tv"}
    core.worst = (tmp_path / "worst.sqlite",)
    answer = ask("reviewer", "GET", "/api/v1/worst", params=cell)
    assert [sequence["request_id"] for sequence in answer.json()["sequences"]] == ["a-request"]
    assert answer.headers["cache-control"] == "no-store"
    assert "reviewer reads the worst sequences of token-tv on all of policy" in caplog.text
    for who in ("ada", "reader"):
        refused = ask(who, "GET", "/api/v1/worst", params=cell)
        assert (refused.status_code, "a-prompt" in refused.text) == (403, False)
        assert "may: [read, prompts]" in refused.json()["detail"]
    assert ask(None, "GET", "/api/v1/worst", params=cell).status_code == 401


@pytest.mark.slow
@pytest.mark.parametrize(
    ("who", "method", "path", "status"),
    [
        (None, "GET", "/api/v1/verdicts", 401),
        (None, "GET", "/metrics", 401),
        (None, "POST", "/api/v1/decisions/pin", 401),
        (None, "GET", "/no-such-path", 401),
        ("kc_guess", "GET", "/api/v1/verdicts", 401),
        ("sender", "GET", "/api/v1/verdicts", 403),
        ("sender", "POST", "/api/v1/decisions/pin", 403),
        ("reader", "POST", "/api/v1/decisions/pin", 403),
        ("reader", "DELETE", "/api/v1/decisions", 403),
        (None, "GET", "/", 401),
        (None, "GET", "/healthz", 200),
        (None, "GET", "/page/main.js", 200),
        (None, "GET", "/handbook/no-such-page", 404),
        (None, "GET", "/openapi.json", 200),
        (None, "GET", "/handbook/../metrics", 401),
        (None, "GET", "/page/..%2f..%2fmetrics", 404),
    ],
)
def test_each_role_has_what_is_its_own(look, who, method, path, status):
    """Without a token there are health, handbook and the page's files; reading does not act, sending does neither."""
    answer = look(who, method, path, json={} if method == "POST" else None)
    assert answer.status_code == status
    if status == 401:
        assert answer.headers["www-authenticate"].startswith("Basic realm=")


def test_whoever_asks_is_told_whether_it_is_ready(ask):
    """Without a token, as health checks have none."""
    assert ask(None, "GET", "/readyz").status_code == 200


def test_refusals_are_counted(ask, counts):
    """By what was wrong; who is known is in the log."""
    ask(None, "GET", "/metrics")
    ask("reader", "POST", "/api/v1/decisions/pin", json={})
    assert counts == {("api", "unauthenticated"): 1, ("api", "forbidden"): 1}


def test_events_say_whose_token_it_was(core, ask):
    """Who somebody says to be stands behind the name of their token, and alone only where it is the same."""
    for by in ("ada", "eve"):
        body = {"contract": "policy", "slice": "code", "kernel": "inference-kernel", "by": by, "why": "because"}
        assert ask("ada", "POST", "/api/v1/decisions/pin", json=body).status_code == 200
    pinned = [event for event in core.events.newest("policy", 10) if event.kind == "pinned"][-2:]
    assert [event.data["by"] for event in pinned] == ["ada", "ada (as eve)"]
    assert pinned[1].message.startswith("ada (as eve) pinned")


PIN = {"contract": "policy", "slice": "code", "kernel": "inference-kernel", "by": "ada", "why": "because"}


def _browser(site, password, **headers):
    client = TestClient(site, headers={name.replace("_", "-"): value for name, value in headers.items()})
    client.auth = ("whoever", password)
    return client


def test_in_a_browser_the_token_is_a_password(site):
    """Of any user name; on the page that asks for it, it reads and acts."""
    client = _browser(site, TOKENS["ada"], sec_fetch_site="same-origin")
    assert client.get("/").status_code == 200
    assert [contract["name"] for contract in client.get("/api/v1/contracts").json()["contracts"]] == ["policy"]
    assert client.post("/api/v1/decisions/pin", json=PIN).status_code == 200


@pytest.mark.parametrize("password", ["", "kc_guess", TOKENS["sender"], "\u00e9", digest_of(TOKENS["ada"])])
def test_a_password_that_may_not_read_is_asked_for_again(site, counts, password):
    """Also one that is for sending only; what was given is not repeated."""
    answer = _browser(site, password).get("/")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic realm=")
    assert not password or password not in answer.text
    assert counts == {("api", "unauthenticated"): 1}


@pytest.mark.parametrize("header", ["Basic", "Basic %%%", "Basic " + "A" * 10_001, "Basic /////w=="])
def test_a_header_that_is_no_password_is_nobody(site, header):
    """Nothing, what is no base64, and what is no text."""
    assert TestClient(site).get("/", headers={"authorization": header}).status_code == 401


@pytest.mark.parametrize("elsewhere", ["cross-site", "same-site"])
def test_a_page_of_another_site_asks_for_nothing_with_a_password(site, counts, elsewhere):
    """A browser sends it by itself, whoever asks: only a link to the page may come from elsewhere."""
    client = _browser(site, TOKENS["ada"], sec_fetch_site=elsewhere)
    navigating = {"sec-fetch-mode": "navigate"}
    assert client.get("/api/v1/decisions?obeys=policy/halt").status_code == 403
    assert client.get("/api/v1/decisions?obeys=policy/halt", headers=navigating).status_code == 403
    assert client.get("/").status_code == 403
    assert client.post("/api/v1/decisions/pin", json=PIN).status_code == 403
    assert counts == {("api", "forbidden"): 4}
    assert client.get("/", headers=navigating).status_code == 200
    bearer = {"authorization": f"Bearer {TOKENS['ada']}"}
    assert TestClient(site, headers={"sec-fetch-site": elsewhere} | bearer).get("/api/v1/verdicts").status_code == 200
