"""Whether any program looks at what is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from starlette.testclient import TestClient

from kc_otel.serve.core import Core
from kc_otel.serve.listeners import Listeners
from tests.tools.api import client_of


@pytest.fixture
def client(make_core: Callable[..., Core]) -> TestClient:

    core = make_core()
    core.tick(time.time())
    return client_of(core)


def test_what_a_client_says_it_obeys_stands_in_health(client: TestClient) -> None:
    """By contract and directive, with the time; a client that says nothing, as a browser, listens to nothing."""
    assert client.get("/api/v1/decisions").status_code == 200
    assert set(client.get("/api/v1/health").json()["listeners"]["policy"].values()) == {None}
    before = time.time()
    client.get("/api/v1/decisions", params={"obeys": ["policy/halt", "policy/sample-more"]})
    heard = client.get("/api/v1/health").json()["listeners"]["policy"]
    assert before <= heard["halt"] == heard["sample-more"] <= time.time()
    assert heard["quarantine-rollouts"] is heard["resync-weights"] is None
    assert "hold-promotion" not in heard


def test_a_route_is_taken_by_who_has_the_table_that_is_in_force(client: TestClient) -> None:
    """A router that asks with an older one, or with none, has not taken what is new."""

    def routes(after: int) -> float | None:
        client.get("/api/v1/decisions", params={"obeys": ["policy/route"], "after": after})
        found: float | None = client.get("/api/v1/health").json()["listeners"]["policy"]["route"]
        return found

    assert routes(-1) is None
    assert routes(7) is None
    assert routes(0) is not None


def test_what_names_no_contract_and_no_directive_is_not_kept(client: TestClient) -> None:
    """Whoever asks cannot fill the memory, nor be refused for asking about a contract of another evaluator."""
    asked = ["other/halt", "policy/hold-promotion", "policy/", "/", "", "policy", "policy/halt/x", "x" * 3000]
    answer = client.get("/api/v1/decisions", params={"obeys": asked})
    assert (answer.status_code, answer.headers["kc-unserved"]) == (200, f"other {'x' * 80}")
    assert "kc-unserved" not in client.get("/api/v1/decisions", params={"obeys": ["policy/route"]}).headers
    assert set(client.get("/api/v1/health").json()["listeners"]["policy"].values()) == {None}
    assert client.get("/api/v1/decisions", params={"obeys": ["a/b"] * 201}).status_code == 422
    listeners = Listeners()
    listeners.heard(asked, {"policy"}, 1.0)
    assert listeners.view([]) == {}
