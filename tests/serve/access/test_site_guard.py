"""Who may call the API: by which names, from which pages, and with which tokens; in a browser a token is a password."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest
from starlette.testclient import TestClient

from kc_otel.record.kernel import Kernel
from kc_otel.recordings.request import SampledRequest
from kc_otel.recordings.worst_sequences import WorstSequences
from kc_otel.serve.access import site_guard
from kc_otel.serve.access.access_file import digest_of
from kc_otel.serve.access.site_guard import GuardedSite, HostNames, OwnSite
from tests.serve.conftest import core_of_policy
from tests.tools.access import access_of, bearer, token_of
from tests.tools.api import api_of


@contextmanager
def _served():
    made = core_of_policy()
    with closing(made.connection):
        made.tick(time.time())
        yield made


@pytest.fixture
def core():
    with _served() as made:
        yield made


@pytest.fixture
def counts():
    return Counter()


@pytest.fixture
def site(core, tmp_path, counts):
    return _site_of(core, tmp_path, counts)


def _site_of(core, folder, counts):
    access = access_of(folder, ada="read act", reader="read", reviewer="read prompts", sender="send")
    return GuardedSite(access, api_of(core), counts)


@pytest.fixture
def ask(site):
    return _asking(site)


def _asking(site):
    client = TestClient(site, follow_redirects=False)

    def asked(who, method, path, **options):
        headers = bearer(who) if who else {}
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
        ("stranger", "GET", "/api/v1/verdicts", 401),
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


def test_refusals_are_counted(ask, counts):
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
    client = _browser(site, token_of("ada"), sec_fetch_site="same-origin")
    assert client.get("/").status_code == 200
    assert [contract["name"] for contract in client.get("/api/v1/contracts").json()["contracts"]] == ["policy"]
    assert client.post("/api/v1/decisions/pin", json=PIN).status_code == 200


@pytest.mark.parametrize("password", ["", "kc_guess", token_of("sender"), "\u00e9", digest_of(token_of("ada"))])
def test_a_password_that_may_not_read_is_asked_for_again(site, counts, password):
    """Also one that is for sending only; what was given is not repeated."""
    answer = _browser(site, password).get("/")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic realm=")
    assert not password or password not in answer.text
    assert counts == {("api", "unauthenticated"): 1}


@pytest.mark.parametrize("header", ["Basic", "Basic %%%", "Basic " + "A" * 10_001, "Basic /////w=="])
def test_a_header_that_is_no_password_is_nobody(site, header):
    assert TestClient(site).get("/", headers={"authorization": header}).status_code == 401


@pytest.mark.parametrize("elsewhere", ["cross-site", "same-site"])
def test_a_page_of_another_site_asks_for_nothing_with_a_password(site, counts, elsewhere):
    """A browser sends it by itself, whoever asks: only a link to the page may come from elsewhere."""
    client = _browser(site, token_of("ada"), sec_fetch_site=elsewhere)
    navigating = {"sec-fetch-mode": "navigate"}
    assert client.get("/api/v1/decisions?obeys=policy/halt").status_code == 403
    assert client.get("/api/v1/decisions?obeys=policy/halt", headers=navigating).status_code == 403
    assert client.get("/").status_code == 403
    assert client.post("/api/v1/decisions/pin", json=PIN).status_code == 403
    assert counts == {("api", "forbidden"): 4}
    assert client.get("/", headers=navigating).status_code == 200
    assert (
        TestClient(site, headers={"sec-fetch-site": elsewhere} | bearer("ada")).get("/api/v1/verdicts").status_code
        == 200
    )


def changed(client: TestClient, headers: dict[str, str]) -> bool:
    return client.post("/api/v1/decisions/pin", json=PIN, headers=headers).status_code == 200


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    core = core_of_policy()
    with closing(core.connection):
        yield TestClient(OwnSite(api_of(core), HostNames(["evaluator", "kc.example.com"]), "kc.example.com"))


@pytest.mark.parametrize("path", ["/", "/api/v1/verdicts", "/healthz", "/metrics", "/openapi.json"])
@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:4320", "evilevaluator"),
        *("evil.evaluator", "", "a b", "[::1", "[x]:1"),
    ],
)
def test_a_name_that_is_not_ours_is_not_answered(client: TestClient, path: str, host: str) -> None:
    """By DNS rebinding, a page reads under its own name what is on loopback."""
    answer = client.get(path, headers={"host": host})
    assert answer.status_code == 421
    assert "--allowed-host" in answer.json()["detail"]


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:4320", "localhost:4320", "LOCALHOST", "localhost.", "[::1]:4320", "10.1.2.3:4320"),
        *("evaluator:4320", "kc.example.com", "kc.example.com:443"),
    ],
)
def test_addresses_and_configured_names_are_answered(client: TestClient, host: str) -> None:
    """No page can have an address of ours as its name; names are said with an option, or with the external URL."""
    assert client.get("/healthz", headers={"host": host}).status_code == 200
    assert changed(client, {"host": host})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("origin", f"http://{host}") for host in ("evil.example", "evil.example:4320", "127.0.0.1:8080", "[::1")),
        *(("origin", text) for text in ("https://evil.example", "null", "")),
        *(("sec-fetch-site", site) for site in ("cross-site", "same-site")),
    ],
)
def test_a_page_of_another_site_changes_nothing(client: TestClient, name: str, value: str) -> None:
    """Whatever an operator has open in another tab; a page on another port of the same machine is another site."""
    headers = {"host": "127.0.0.1:4320", name: value}
    answer = client.post("/api/v1/decisions/unpin", json=PIN, headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (403, "application/problem+json")


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("127.0.0.1:4320", "http://127.0.0.1:4320"),
        ("[::1]:4320", "http://[::1]:4320"),
        ("Localhost:4320", "http://localhost:4320"),
        ("kc.example.com", "https://kc.example.com"),
        ("evaluator:4320", "https://kc.example.com"),
    ],
)
def test_the_own_page_may_change_something(client: TestClient, host: str, origin: str) -> None:
    """By the name that the browser has, or by the external URL's where a proxy puts its own."""
    headers = {"host": host, "origin": origin, "sec-fetch-site": "same-origin"}
    assert changed(client, headers)


@pytest.mark.parametrize("origin", ["null", "", "http://", "file://"])
def test_a_page_without_an_origin_of_its_own_changes_nothing(origin: str) -> None:
    """One in a sandbox, or from a file; also where no address by which people reach it is configured."""

    async def app(_scope, _receive, _send):
        pytest.fail("it was let in")

    client = TestClient(OwnSite(app, HostNames()))
    answer = client.post("http://localhost/api/v1/decisions/pin", headers={"origin": origin})
    assert answer.status_code == 403


@pytest.mark.slow
def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch):
    """To the API its sender has hung up; who has said everything, and waits for an answer, may wait on."""
    monkeypatch.setattr(site_guard, "_MAX_BODY_SECONDS", 0.05)
    heard = []

    async def app(_scope, receive, _send):
        heard.append(await receive())
        heard.append(await asyncio.wait_for(receive(), 1))

    async def asked(*messages):
        left = list(messages)

        async def receive():
            return left.pop(0) if left else await asyncio.Event().wait()

        await OwnSite(app, HostNames())(
            {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", b"[::1]")]}, receive, None
        )

    part = {"type": "http.request", "body": b"t", "more_body": True}
    asyncio.run(asked(part))
    assert heard == [part, {"type": "http.disconnect"}]
    with pytest.raises(TimeoutError):
        asyncio.run(asked({**part, "more_body": False}))
