"""Whether any program looks at what is asked for."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from kc_otel.contract.model import Contract
from kc_otel.judge.recorders import KernelInfo
from kc_otel.serve.core import Core
from kc_otel.serve.listeners import Listeners
from kc_otel.serve.traffic import traffic_seen
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
        client.get("/api/v1/decisions", params={"obeys": ["policy/route"], "after": after, "instance": "a"})
        found: float | None = client.get("/api/v1/health").json()["listeners"]["policy"]["route"]
        return found

    assert routes(-1) is None
    assert routes(7) is None
    assert routes(0) is not None


def test_a_contract_whose_policy_fails_is_named(make_core, monkeypatch):
    """A FAIL of it takes no version back: routers serve none that is not proven."""
    core = make_core()
    client, now = client_of(core), time.time()

    def unserved() -> bool:
        return "kc-unserved" in client.get("/api/v1/decisions", params={"obeys": ["policy/route"]}).headers

    core.tick(now)
    assert not unserved()
    with monkeypatch.context() as broken:
        broken.setattr(Core, "_escalated", lambda *_, **__: 1 / 0)
        core.tick(now + 1.0)
    assert unserved()
    core.tick(now + 2.0)
    assert not unserved()


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


def test_what_a_router_keeps_counts_where_it_defines_the_slice_as_the_contract_does(make_core):
    """By the slice of the contract, of versions that report; where there is one, it need not be named."""
    core = make_core()
    core.tick(time.time())
    own = core.contracts["policy"].slice_ids["code"]
    core.evaluator.kernels = lambda _: (KernelInfo("inference", "b", {}, 0.0), KernelInfo("train", "a", {}, 0.0))  # type: ignore[method-assign]

    def heard(defined: str, kept: str, after: int = 0) -> tuple[bool, ...]:
        core.listeners = Listeners()
        asked = {"obeys": [f"policy/route{defined}"], "kept": [kept], "after": after, "instance": "a"}
        client_of(core).get("/api/v1/decisions", params=asked)  # type: ignore[arg-type]
        seen = traffic_seen(core, "policy", core.escalation, time.time() + 20.0)
        applied = (not seen.behind(slice, 0.0, None) for slice in ("code", "all"))
        return seen.kept("code", "b") > 0, seen.kept("all", "b") > 0, *applied

    assert heard(f"/{own}", "policy/code/b") == heard(f"/{own}", "policy/code/") == (True, False, True, True)
    assert heard(f"/12345678{own}", "policy/code/b") == (True, False, True, True), "the table names another slice, too"
    assert heard(f"/{own}", "policy/code/b", after=-1) == (False, False, False, False), "it has an older table"
    assert heard(f"/{own}", "policy/code/c") == heard(f"/{own}", "policy/prose/b") == (False, False, True, True)
    for other in ("/01234567", ""):
        assert heard(other, "policy/code/b") == (False, False, False, True)
        assert heard(other, "policy/all/b") == (False, True, False, True), "everybody defines all traffic alike"
    assert heard(f"/{own}", "other/code/b") == heard(f"/{own}", "x") == (False, False, True, True)


ORDER = 5000.0


@pytest.fixture
def said(contract: Contract) -> Callable[..., str]:
    """What is said of an order for slice code by routers, each last heard at a time with a table of a time."""
    ids = "".join(contract.slice_ids.values())

    def behind(reports: dict[str, tuple[float, float | None]], now: float = ORDER + 30.0, **more: Any) -> str:
        listeners = Listeners()
        for instance, (at, table_at) in reports.items():
            report = [f"policy/route/{more.get('ids', ids)}"]
            listeners.heard(report, {"policy": contract}, at, instance=instance, table_at=table_at)
        return listeners.behind(contract, "code", ORDER, more.get("all_since"), now)

    return behind


def test_an_order_is_applied_once_each_router_that_counts_has_it(said: Callable[..., str]) -> None:
    """One that fell silent with it keeps it; one without an id may be several; one of long before may be gone."""
    has, lacks = (ORDER + 1.0, ORDER), (ORDER + 1.0, ORDER - 1.0)
    assert said({}) == said({"a": has}) == said({"a": has}, now=ORDER + 9e5) == ""
    assert said({"a": has, "b": (ORDER - 3601.0, ORDER - 4000.0)}) == ""
    assert said({"a": has, "b": lacks}) == "1 of 2 routers has not applied it: b"
    assert said({"": has}) == "1 of 1 router has not applied it: one without an id"
    assert said({"a": has, "b": lacks}, now=ORDER + 200.0) == (
        "1 of 2 routers has not polled: b since 1970-01-01 01:23 UTC; it may still serve this kernel"
    )
    assert said(dict.fromkeys("abcde", lacks), now=ORDER + 9e5) == (
        "5 of 5 routers have not polled: a since 1970-01-01 01:23 UTC, b since 1970-01-01 01:23 UTC, "
        "c since 1970-01-01 01:23 UTC, 2 more; "
        "they may still serve this kernel"
    )
    new = {"a": has, "b": (ORDER + 1.0, None)}
    assert said(new, now=ORDER + 5.0) == "", "it has just begun, and has not confirmed its first table"
    assert said(new, now=ORDER + 30.0) == "1 of 2 routers has not applied it: b"


def test_a_router_with_another_definition_of_the_slice_applies_what_is_ordered_for_all(said):
    router = {"a": (ORDER + 1.0, ORDER)}
    other = "1 of 1 router defines the slice otherwise than this contract, or not at all: a"
    assert said(router, ids="01234567") == said(router, ids="01234567", all_since=ORDER + 1.0) == other
    assert said(router, ids="01234567", all_since=ORDER) == ""


def test_routers_beyond_those_that_are_told_apart_have_taken_what_all_of_them_have(contract: Contract) -> None:
    """The memory is bounded; an id for each request does not make anything contained."""
    listeners = Listeners()
    ids = "".join(contract.slice_ids.values())
    for number in range(3000):
        table_at = ORDER - 1.0 if number == 7 else ORDER
        listeners.heard(
            [f"policy/route/{ids}"], {"policy": contract}, ORDER + number, instance=str(number), table_at=table_at
        )
    assert len(listeners.routers["policy"]) == 1025
    said = listeners.behind(contract, "code", ORDER, None, ORDER + 3030.0)
    assert said == "1 of 1025 routers has not polled: others since 1970-01-01 01:56 UTC; it may still serve this kernel"
