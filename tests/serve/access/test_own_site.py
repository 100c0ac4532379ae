"""Names that the API answers to, and sites that may change something."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing

import pytest
from starlette.testclient import TestClient

from kc_otel.serve.access import site_guard as own_site
from kc_otel.serve.access.site_guard import HostNames, OwnSite
from tests.serve.conftest import core_of_policy
from tests.tools.api import api_of

PIN = {"contract": "policy", "kernel": "train-kernel", "by": "ada", "why": "because"}


def changed(client: TestClient, headers: dict[str, str]) -> bool:
    return client.post("/api/v1/decisions/pin", json=PIN, headers=headers).status_code == 200


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    core = core_of_policy()
    with closing(core._connection):
        yield TestClient(OwnSite(api_of(core), HostNames(["evaluator", "kc.example.com"]), "kc.example.com"))


@pytest.mark.parametrize("path", ["/", "/api/v1/verdicts", "/healthz", "/metrics", "/openapi.json"])
@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil.example:4320",
        "evilevaluator",
        "evil.evaluator",
        "",
        "a b",
        "[::1",
        "[x]:1",
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
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "http://evil.example:4320"},
        {"origin": "http://127.0.0.1:8080"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://[::1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_a_page_of_another_site_changes_nothing(client: TestClient, headers: dict[str, str]) -> None:
    """Whatever an operator has open in another tab; a page on another port of the same machine is another site."""
    headers = {"host": "127.0.0.1:4320", **headers}
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
    monkeypatch.setattr(own_site, "_MAX_BODY_SECONDS", 0.05)
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
