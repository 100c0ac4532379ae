"""Promotions in the evaluator: stepped with its ticks, told over its API, kept with its state."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from kc_otel.contract import load_text
from kc_otel.contract.model import Contract
from kc_otel.judge.otlp.sink import RequestCounts
from kc_otel.judge.promotion.promotion_state import OrderError
from kc_otel.judge.promotion.stages import Stage
from kc_otel.judge.verdict import Cell, Evaluation, Status, Verdict
from kc_otel.offline.gate.evidence import verify_evidence
from kc_otel.serve.api.app import make_api
from kc_otel.serve.api.changes import Changes
from kc_otel.serve.core import Core
from kc_otel.serve.self_metrics import read
from kc_otel.serve.store.state_file import StateError

TEXT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: policy, version: 1, owner: tests}
kernels: {train: {engine: torch, dtype: float32}, inference: {engine: vllm, dtype: bfloat16}}
slices: {code: {where: {task: code}}}
statistical: [{id: token-tv, metric: tv_token, unit: token, limit: 0.02}]
observability: {window: 1m, long_window: 5m, min_samples: 500, heartbeat: 30s}
promotion: {windows: 1, steps: [1%, 10%], approve: [full], skip: [offline-ci]}
"""
NUMBERS = {"PASS": (0.01, 0.005, 0.015), "INCONCLUSIVE": (0.02, 0.01, 0.03), "FAIL": (0.05, 0.04, 0.06)}


@pytest.fixture
def contract() -> Contract:
    return load_text(TEXT)


class Driven:
    """A core whose evaluations say what the test wants."""

    def __init__(self, make_core: Callable[..., Core], contract: Contract, connection: Any = None) -> None:
        self.core = make_core(connection)
        self._contract = contract
        self._statuses: dict[str, str] = {}
        self.core.evaluator.evaluate = self._evaluate  # type: ignore[method-assign]

    def tick(self, now: float, **statuses: str) -> None:
        """An evaluation; the versions' status on slice code, PASS on all traffic."""
        self._statuses = statuses
        self.core.tick(now)

    def shares(self) -> dict[str, float]:
        """Share by version in the decision table that is published."""
        return {one.version: one.weight for one in self.core.decisions.canaries}

    def events(self) -> list[dict[str, Any]]:
        return [one.data for one in self.core.events.events("policy", 0, 1000) if one.kind == "promotion"]

    def _evaluate(self, now: float) -> dict[str, Evaluation]:
        verdicts = tuple(
            Verdict(
                Cell("policy", "token-tv", slice, "trainA", version), Status(said), now, 0.02, *NUMBERS[said], 3000,
                "short", "betting", "numbers", 1, self._contract.hash, "population",
            )
            for version, status in self._statuses.items()
            for slice, said in (("all", "PASS"), ("code", status))
        )  # fmt: skip
        return {"policy": Evaluation(now, verdicts)}


@pytest.fixture
def driven(make_core: Callable[..., Core], contract: Contract) -> Driven:
    return Driven(make_core, contract)


@pytest.fixture
def client(driven: Driven) -> Iterator[TestClient]:
    self_metrics = lambda: read(driven.core, RequestCounts(), Counter())  # noqa: E731 - one use
    with TestClient(make_api(driven.core, self_metrics, Changes(), "0")) as client:
        yield client


def test_traffic_follows_the_place(driven: Driven) -> None:
    """Nothing in shadow, a growing share in the canary, no limit once full; each step with its event."""
    told = driven.core.promotions
    told.start("policy", "v2", "ada", 0.0)
    driven.tick(1, v2="PASS")
    assert driven.shares() == {"v2": 0.0}
    driven.tick(61, v2="PASS")
    assert driven.shares() == {"v2": 0.01}
    driven.tick(122, v2="PASS")
    assert driven.shares() == {"v2": 0.1}
    driven.tick(183, v2="PASS")
    assert told.of("policy", "v2").missing[0].startswith("the gate is open; a person has to let it into full")
    told.tell("policy", "v2", "approve", "ada", "", 184.0, stage=Stage.FULL)
    driven.tick(185, v2="PASS")
    assert driven.shares() == {}
    assert [(one["order"], one.get("to")) for one in driven.events()] == [
        ("start", "shadow"), ("advance", "canary at 1%"), ("advance", "canary at 10%"), ("approve", None),
        ("advance", "full"),
    ]  # fmt: skip


def test_a_failure_takes_the_traffic_away_in_the_same_tick(driven: Driven) -> None:
    """The table, the event with its reason, and evidence that verifies are there before the tick has ended."""
    told, said = driven.core.promotions, []
    driven.core.announce = said.append
    told.start("policy", "v2", "ada", 0.0)
    driven.tick(61, v2="PASS")
    version = driven.core.decisions.version
    driven.tick(62, v2="FAIL")
    assert driven.shares() == {"v2": 0.0}
    assert driven.core.decisions.version > version
    event = driven.events()[-1]
    assert (event["order"], event["from"], event["to"]) == ("rollback", "canary at 1%", "offline-ci")
    assert "token-tv on code: FAIL" in event["message"]
    assert [one[0] for one in said if "rolled back" in one[1]] == ["warning"]
    records = told.evidence("policy", "v2")
    assert [one.what for one in records] == [
        "advance from shadow to canary at 1%",
        "rollback from canary at 1% to offline-ci",
    ]
    for one in records:
        verify_evidence(one.record)
    assert event["evidence"] == records[-1].id


def test_a_tick_that_cannot_be_written_moves_nothing(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one that can be makes up for it."""
    driven.core.promotions.start("policy", "v2", "ada", 0.0)

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(driven.core._evaluator_store, "save", full)
        with pytest.raises(StateError):
            driven.tick(61, v2="PASS")
    assert driven.core.promotions.of("policy", "v2").position.stage is Stage.SHADOW
    assert driven.core.promotions.evidence("policy", "v2") == []
    driven.tick(62, v2="PASS")
    assert driven.core.promotions.of("policy", "v2").position.stage is Stage.CANARY


def test_what_is_decided_survives_a_restart(
    make_core: Callable[..., Core], contract: Contract, open_file: Callable[..., Any], tmp_path: Path
) -> None:
    """Place, windows, hold, approval and evidence are those of before."""
    path = tmp_path / "state.sqlite"
    connection = open_file(path)
    first = Driven(make_core, contract, connection)
    first.core.promotions.start("policy", "v2", "ada", 0.0)
    first.tick(61, v2="PASS")
    first.core.promotions.tell("policy", "v2", "hold", "bob", "lunch", 62.0)
    first.core.promotions.tell("policy", "v2", "approve", "bob", "", 62.0, stage=Stage.FULL)
    first.tick(63, v2="PASS")
    before, kept = first.core.promotions.of("policy", "v2"), first.core.promotions.evidence("policy", "v2")
    connection.close()
    second = Driven(make_core, contract, open_file(path))
    assert second.core.promotions.of("policy", "v2") == before
    assert second.core.promotions.evidence("policy", "v2") == kept
    assert second.shares() == {"v2": 0.01}
    second.tick(122, v2="PASS")
    assert second.core.promotions.of("policy", "v2").missing == ("held: by bob: lunch",)


def test_one_version_at_a_time_and_the_one_before_is_replaced(driven: Driven) -> None:
    """A second version has to wait; when it becomes full, the first one's promotion has come to its end."""
    told = driven.core.promotions
    told.start("policy", "v2", "ada", 0.0)
    with pytest.raises(OrderError, match="v2 is on its way, in shadow; one version goes at a time"):
        told.start("policy", "v3", "ada", 1.0)
    told.tell("policy", "v2", "force", "ada", "first of all", 2.0, stage=Stage.FULL)
    told.start("policy", "v3", "ada", 3.0)
    told.tell("policy", "v3", "force", "ada", "hurry", 4.0, stage=Stage.FULL)
    assert [(one.version, one.status) for one in told.all("policy")] == [("v3", "running"), ("v2", "replaced")]
    driven.tick(5, v2="FAIL", v3="PASS")
    assert driven.shares() == {}


def test_a_version_that_its_gates_made_full_replaces_the_one_before(driven: Driven) -> None:
    """In the same tick, with an event of its own."""
    told = driven.core.promotions
    told.start("policy", "v2", "ada", 0.0)
    told.tell("policy", "v2", "force", "ada", "first of all", 1.0, stage=Stage.FULL)
    told.start("policy", "v3", "ada", 2.0)
    told.tell("policy", "v3", "approve", "ada", "", 2.0, stage=Stage.FULL)
    for now in (63, 124, 185):
        driven.tick(now, v2="PASS", v3="PASS")
    assert [(one.version, str(one.position), one.status) for one in told.all()] == [
        ("v3", "full", "running"), ("v2", "full", "replaced"),
    ]  # fmt: skip
    assert [one["order"] for one in driven.events()][-2:] == ["advance", "replace"]


def test_old_versions_are_forgotten_one_day(driven: Driven) -> None:
    """Only so many rolled back versions limit requests; the newest stay out, and what runs is never forgotten."""
    told = driven.core.promotions
    told.start("policy", "full", "ada", 0.0)
    told.tell("policy", "full", "force", "ada", "the first", 1.0, stage=Stage.FULL)
    for number in range(25):
        told.start("policy", f"bad{number}", "ada", 10.0 + number)
        told.tell("policy", f"bad{number}", "rollback", "ada", "bad", 10.5 + number)
        driven.tick(11.0 + number)
    assert driven.shares() == {f"bad{number}": 0.0 for number in range(5, 25)}
    assert [one.version for one in told.all()][:1] == ["bad24"]
    assert (told.all()[-1].version, len(told.all())) == ("full", 21)
    assert len(told.evidence("policy", "bad0")) == 1


def test_a_contract_that_runs_dry_promotes_nothing(contract: Contract, open_file: Callable[..., Any]) -> None:
    """Its versions stay where they are, and the table that is published says nothing of them."""
    dry = Driven(
        lambda connection: Core([contract], connection or open_file(), external_url="", now=0.0, dry_run=["policy"]),
        contract,
    )
    dry.core.promotions.start("policy", "v2", "ada", 0.0)
    dry.tick(61, v2="PASS")
    dry.tick(62, v2="FAIL")
    assert (dry.core.promotions.of("policy", "v2").position.stage, dry.shares()) == (Stage.SHADOW, {})


def test_a_hold_of_the_policy_holds(open_file: Callable[..., Any]) -> None:
    """`hold-promotion` of a step that fires on another version is a reason to wait, said once with its slices."""
    held = load_text(TEXT + "escalation: [{on: fail, do: [hold-promotion]}]\n")
    driven = Driven(lambda c: Core([held], c or open_file(), external_url="", now=0.0), held)
    driven.core.promotions.start("policy", "v2", "ada", 0.0)
    driven.tick(1, old="FAIL", v2="PASS")
    driven.tick(62, old="FAIL", v2="PASS")
    promotion = driven.core.promotions.of("policy", "v2")
    assert (promotion.position.stage, promotion.missing) == (Stage.SHADOW, ("held: code: numbers",))


def test_api_starts_shows_and_takes_orders(driven: Driven, client: TestClient) -> None:
    """What a person reads: where, how many windows, what is missing, what comes next."""
    path = "/api/v1/promotions/policy/v2"
    assert client.get(path).status_code == 404
    assert client.get("/api/v1/promotions/other/v2").json()["detail"] == "no contract 'other'; there are policy"
    assert client.post(path, json={"order": "start", "by": "ada"}).json()["position"] == "shadow"
    driven.tick(1e9, v2="INCONCLUSIVE")
    found = client.get(path).json()
    assert (found["next"], found["next_share"], found["windows_needed"]) == ("canary at 1%", 0.01, 1)
    assert found["missing"][0].startswith("token-tv on code: INCONCLUSIVE, between 0.01 and 0.03")
    assert client.get("/api/v1/promotions").json()["promotions"] == [found]
    refused = client.post(path, json={"order": "force", "by": "ada", "stage": "full"})
    assert (refused.status_code, refused.json()["detail"]) == (409, "say who and why; both are kept")
    assert client.post(path, json={"order": "force", "by": "ada", "why": "x"}).status_code == 409
    assert client.post(path, json={"order": "aprove", "by": "ada"}).status_code == 422
    assert client.post(path, json={"order": "hold", "by": "ada", "reason": "x"}).status_code == 422
    assert client.post(path, json={"order": "hold", "by": "ada", "why": "lunch"}).json()["hold"]["why"] == "lunch"
    assert client.post(path, json={"order": "resume", "by": "ada"}).json()["hold"] is None
    gone = client.post(path, json={"order": "rollback", "by": "ada", "why": "wrong weights"}).json()
    assert (gone["status"], gone["share"], gone["next"]) == ("rolled-back", 0.0, None)
    messages = [one["message"] for one in client.get("/api/v1/events").json()["events"]]
    assert "ada rolls v2 back from shadow: wrong weights" in messages


@pytest.mark.slow
def test_api_hands_the_evidence_out(client: TestClient) -> None:
    """As it is verified; and what is not evidence of the offline stage is not taken in."""
    path = "/api/v1/promotions/policy/v2"
    client.post(path, json={"order": "start", "by": "ada"})
    client.post(path, json={"order": "force", "by": "ada", "why": "hurry", "stage": "canary"})
    (listed,) = client.get(f"{path}/evidence").json()["evidence"]
    record = client.get(f"{path}/evidence/{listed['id']}").json()
    verify_evidence(record)
    assert (record["step"]["by"], record["step"]["why"], record["checksum"]) == ("ada", "hurry", listed["checksum"])
    assert client.get(f"{path}/evidence/99").status_code == 404
    other = client.post(path, json={"order": "evidence", "by": "ada", "evidence": record})
    assert (other.status_code, other.json()["detail"]) == (409, "v2 is not in offline-ci but in canary at 1%")


@pytest.mark.slow
def test_api_plans_from_the_traffic_that_it_sees(driven: Driven, client: TestClient) -> None:
    """3,000 tokens a minute: a small share of them needs the long window, or never decides."""
    driven.tick(1e9, v1="PASS")
    plan = client.get("/api/v1/promotions/policy/plan").json()
    assert plan["tokens_per_second"] == pytest.approx(50)
    steps = {one["position"]: one for one in plan["steps"]}
    assert (steps["shadow"]["seconds"], steps["shadow"]["slowest"]) == (60.0, "token-tv on all")
    assert steps["canary at 10%"]["seconds"] == 300.0
    assert steps["canary at 1%"]["never"]
    told = client.get("/api/v1/promotions/policy/plan", params={"tokens_per_second": 1e5, "share": "code=0.5"}).json()
    assert [one["seconds"] for one in told["steps"]] == [60.0, 60.0, 60.0]
    wrong = client.get("/api/v1/promotions/policy/plan", params={"share": "prose=0.5"})
    assert (wrong.status_code, "no slice 'prose'" in wrong.json()["detail"]) == (422, True)
    assert client.get("/api/v1/promotions/other/plan").status_code == 404


def test_metrics_say_stage_share_and_windows(driven: Driven, client: TestClient) -> None:
    """A dashboard can show each version's way."""
    driven.core.promotions.start("policy", "v2", "ada", 0.0)
    driven.tick(61, v2="PASS")
    text = client.get("/metrics").text
    labels = '{kc_contract="policy",kc_kernel_inference="v2"}'
    for name, value in (("stage_ratio", 2.0), ("share_ratio", 0.01), ("windows", 0.0)):
        short = name.removesuffix("_ratio")
        assert f"kc_promotion_{short}{labels} {value}" in text or f"kc_promotion_{name}{labels} {value}" in text
    driven.tick(62, v2="FAIL")
    assert f"kc_promotion_stage{labels} -1.0" in client.get("/metrics").text


def test_evidence_of_any_size_is_not_kept(driven: Driven) -> None:
    """A client cannot fill the state file with one request."""
    driven.core.promotions.start("policy", "v2", "ada", 0.0)
    with pytest.raises(OrderError, match=r"the evidence has .* characters; at most 33,554,432 are kept"):
        driven.core.promotions.admit("policy", "v2", {"format": "x" * 34_000_000}, "ada", 1.0)
