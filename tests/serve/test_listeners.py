"""Whether any program looks at what is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from starlette.testclient import TestClient

from kc_otel.judge.facts import KernelInfo
from kc_otel.serve.core import Core
from kc_otel.serve.listeners import Listeners
from tests.tools.api import client_of

pytestmark = pytest.mark.slow


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
    listeners.heard(asked, {}, 1.0)
    assert listeners.view([]) == {}


def test_what_a_router_keeps_counts_where_it_defines_the_slice_as_the_contract_does(
    make_core: Callable[..., Core],
) -> None:
    """By the contract's slices, of versions that report; where there is one, it need not be named."""
    core = make_core()
    core.tick(time.time())
    own = core.contracts["policy"].slices_hash
    core.evaluator.kernels = lambda _: (KernelInfo("inference", "b", {}, 0.0), KernelInfo("train", "a", {}, 0.0))  # type: ignore[method-assign]

    def heard(defined: str, kept: str, after: int = 0) -> tuple[bool, ...]:
        core.listeners = Listeners()
        asked = {"obeys": [f"policy/route{defined}"], "kept": [kept], "after": after}
        client_of(core).get("/api/v1/decisions", params=asked)  # type: ignore[arg-type]
        seen = core.traffic("policy", core.escalation, time.time())
        return seen.kept("code", "b") > 0, seen.kept("all", "b") > 0, seen.otherwise("code"), seen.otherwise("all")

    assert heard(f"/{own}", "policy/code/b") == heard(f"/{own}", "policy/code/") == (True, False, False, False)
    assert heard(f"/{own}", "policy/code/b", after=-1) == (False, False, False, False), "it has an older table"
    assert heard(f"/{own}", "policy/code/c") == heard(f"/{own}", "policy/prose/b") == (False, False, False, False)
    for other in ("/0123456789ab", ""):
        assert heard(other, "policy/code/b") == (False, False, True, False)
        assert heard(other, "policy/all/b") == (False, True, True, False), "everybody defines all traffic alike"
    assert heard(f"/{own}", "other/code/b") == heard(f"/{own}", "x") == (False, False, False, False)
    seen = core.traffic("policy", core.escalation, time.time() + 3600)
    assert (seen.otherwise("code"), seen.otherwise("gone")) == (False, True)
