"""Who has a token reads, acts and logs in as its roles allow, and nobody else does."""

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
from kc_otel.serve.access.guarded_site import GuardedSite
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
    return GuardedSite(AccessFile(path), api_of(core), counts, secure=False)


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
        (None, "GET", "/", 303),
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
        assert answer.headers["www-authenticate"] == "Bearer"


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


@pytest.mark.slow
def test_a_browser_logs_in_and_out(site):
    """The cookie is out of reach of scripts and of other sites; it ends with the session."""
    client = TestClient(site, follow_redirects=False)
    assert client.get("/").headers["location"] == "/login"
    page = client.get("/login")
    assert page.status_code == 200
    assert "form-action 'self'" in page.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]  # no page of others lies over it
    answer = client.post("/login", data={"token": TOKENS["ada"]})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKENS["ada"] not in cookie
    assert client.get("/").status_code == 200
    assert [contract["name"] for contract in client.get("/api/v1/contracts").json()["contracts"]] == ["policy"]
    assert "You are ada." in client.get("/login").text
    stolen = dict(client.cookies)
    assert client.post("/logout").headers["location"] == "/login"
    assert TestClient(site, cookies=stolen).get("/api/v1/contracts").status_code == 401


@pytest.mark.slow
@pytest.mark.parametrize("token", ["", "kc_guess", TOKENS["sender"], "x" * 100_000, "\u00e9", "<script>"])
def test_a_login_without_a_token_that_reads_is_refused(site, counts, token):
    """Also with one that is for sending only; what was given is not repeated."""
    answer = TestClient(site, follow_redirects=False).post("/login", data={"token": token})
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    assert len(token) < 3 or token not in answer.text
    assert counts == {("api", "unauthenticated"): 1}


def test_a_session_ends_after_twelve_hours_and_with_its_token(core, tmp_path):
    """Whoever leaves the file is out at once, also in a browser that is open."""
    path, now = tmp_path / "access.yaml", [0.0]
    path.write_text(yaml.safe_dump(ACCESS))
    access = AccessFile(path)
    site = GuardedSite(access, api_of(core), Counter(), secure=True, clock=lambda: now[0])
    client = TestClient(site, base_url="https://kc")
    answer = client.post("/login", data={"token": TOKENS["ada"]}, follow_redirects=False)
    assert "Secure" in answer.headers["set-cookie"]
    assert client.get("/api/v1/contracts").status_code == 200
    path.write_text(yaml.safe_dump(ACCESS | {"tokens": ACCESS["tokens"][1:]}))
    access.renew()
    assert client.get("/api/v1/contracts").status_code == 401
    path.write_text(yaml.safe_dump(ACCESS))
    access.renew()
    assert client.get("/api/v1/contracts").status_code == 200
    now[0] = 12 * 3600.0 + 1
    assert client.get("/api/v1/contracts").status_code == 401


def _logged_in(site, **options):
    """A cookie as a browser sends it."""
    answer = TestClient(site, follow_redirects=False, **options).post("/login", data={"token": TOKENS["ada"]})
    return answer.headers["set-cookie"].partition(";")[0]


def _reads_with(site, cookie):
    client = TestClient(site, follow_redirects=False)
    return client.get("/api/v1/verdicts", headers={"cookie": cookie}).status_code


def test_a_cookie_is_one_of_this_host_by_tls(core, tmp_path):
    """Where there is TLS, its prefix keeps other hosts of the domain, and those in between, from setting it."""
    path = tmp_path / "access.yaml"
    path.write_text(yaml.safe_dump(ACCESS))
    site = GuardedSite(AccessFile(path), api_of(core), Counter(), secure=True)
    cookie = _logged_in(site)
    assert cookie.startswith("__Host-kc-otel-session=")
    assert _reads_with(site, cookie) == 200
    assert _reads_with(site, cookie.removeprefix("__Host-")) == 401


def test_of_two_cookies_neither_is_taken(site):
    """A page on another port of this host can set a second one, and would have one act in its session."""
    mine, theirs = _logged_in(site), _logged_in(site)
    assert _reads_with(site, f"a=b; {mine};c") == 200
    assert _reads_with(site, f"{mine}; {theirs}") == 401


def test_a_header_of_cookies_takes_no_time(site):
    """Python's own parser takes a minute for this one, in which nobody else is served."""
    began = time.monotonic()
    assert _reads_with(site, 'a="' + '\\"' * 50_000 + '"') == 401
    assert time.monotonic() - began < 5


@pytest.mark.slow
def test_one_token_ends_no_sessions_of_others(site):
    """However often it logs in; of its own the oldest end."""
    others = TestClient(site, follow_redirects=False).post("/login", data={"token": TOKENS["reader"]})
    first, second, *_, last = [_logged_in(site) for _ in range(101)]
    assert _reads_with(site, others.headers["set-cookie"].partition(";")[0]) == 200
    assert [_reads_with(site, cookie) for cookie in (first, second, last)] == [401, 200, 200]
