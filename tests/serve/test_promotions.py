"""Promotions in the evaluator: stepped with its ticks, told over its API, kept with its state."""

import json
import math
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from kc_otel.cli import promote_command
from kc_otel.contract.load import load_text
from kc_otel.contract.model import Contract
from kc_otel.judge.incidents.incident import IncidentState, actions_taken
from kc_otel.judge.point_streams import Missing
from kc_otel.judge.promotion.gate_evidence import of_other_contracts
from kc_otel.judge.promotion.stages import OrderError, PromotionStatus, Stage
from kc_otel.judge.recorders import KernelInfo
from kc_otel.offline.gate.evidence import verify_evidence
from kc_otel.serve import promotions
from kc_otel.serve.core import Core
from kc_otel.serve.webhooks.endpoints import pagerduty_event, slack_message
from tests.serve.conftest import CLAUSES
from tests.tools.api import client_of, route_kept
from tests.tools.scripted import script

TEXT = f"{CLAUSES}promotion: {{windows: 1, steps: [1%, 10%], approve: [full], skip: [offline-ci]}}\n"
MEASURED_LATER = "was measured after its rollback: it may still serve, or what it had answered before is measured late"


@pytest.fixture
def contract() -> Contract:
    return load_text(TEXT)


class Driven:
    """A core whose evaluations say what the test wants."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._statuses: dict[str, str] = {}
        self._reported: dict[str, None] = {}
        told = lambda: {version: {"all": "PASS", "code": said} for version, said in self._statuses.items()}  # noqa: E731
        script(core, told, lambda: self._reported)

    def tick(self, now: float, **statuses: str) -> None:
        """An evaluation; the versions' status on slice code, PASS on all traffic."""
        self._statuses = statuses
        self._reported |= dict.fromkeys(statuses)
        self.core.tick(now)

    def shares(self) -> dict[str, float]:
        return {canary.version: canary.weight for canary in self.core.decisions.canaries}

    def events(self) -> list[dict[str, Any]]:
        return [event.data for event in self.core.events.newest("policy", 1000) if event.kind == "promotion"]


@pytest.fixture
def driven(make_core: Callable[..., Core]) -> Driven:
    return Driven(make_core())


@pytest.fixture
def client(driven: Driven) -> Iterator[TestClient]:
    with client_of(driven.core) as client:
        yield client


def test_traffic_follows_the_place(driven):
    told = driven.core.promotions
    told.tell("policy", "v2", "start", "ada", "", 0.0)
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
    assert [(kernel.version, kernel.since) for kernel in driven.core.decisions.promoted] == [("v2", 185)]
    assert [(event["order"], event["to"]) for event in driven.events()] == [
        ("start", "shadow"), ("advance", "canary at 1%"), ("advance", "canary at 10%"), ("approve", "canary at 10%"),
        ("advance", "full"),
    ]  # fmt: skip


def test_a_failure_takes_the_traffic_away_in_the_same_tick(driven):
    told, said = driven.core.promotions, []
    driven.core.events.announce = said.append
    told.tell("policy", "v2", "start", "ada", "", 0.0)
    driven.tick(61, v2="PASS")
    version = driven.core.decisions.version
    driven.tick(62, v2="FAIL")
    assert driven.shares() == {"v2": 0.0}
    assert driven.core.decisions.version > version
    event = driven.events()[-1]
    assert (event["order"], event["from"], event["to"]) == ("rollback", "canary at 1%", "offline-ci")
    assert "token-tv on code: FAIL" in event["message"]
    assert [announcement[0] for announcement in said if "rolled back" in announcement[1]] == ["warning"]
    records = told.evidence("policy", "v2")
    assert [record.what for record in records] == [
        "advance from shadow to canary at 1%",
        "rollback from canary at 1% to offline-ci",
    ]
    for record in records:
        verify_evidence(record.record)
    assert event["evidence"] == records[-1].id


def test_what_is_decided_survives_a_restart(make_core, open_file, tmp_path):
    path = tmp_path / "state.sqlite"
    connection = open_file(path)
    first = Driven(make_core(connection))
    first.core.promotions.tell("policy", "v2", "start", "ada", "", 0.0)
    first.tick(61, v2="PASS")
    first.core.promotions.tell("policy", "v2", "hold", "bob", "lunch", 62.0)
    first.core.promotions.tell("policy", "v2", "approve", "bob", "", 62.0, stage=Stage.FULL)
    first.tick(63, v2="PASS")
    before, kept = first.core.promotions.of("policy", "v2"), first.core.promotions.evidence("policy", "v2")
    connection.close()
    second = Driven(make_core(open_file(path)))
    assert second.core.promotions.of("policy", "v2") == before
    assert second.core.promotions.evidence("policy", "v2") == kept
    assert second.shares() == {"v2": 0.01}
    second.tick(122, v2="PASS")
    assert second.core.promotions.of("policy", "v2").missing == ("held: by bob: lunch",)


@pytest.mark.parametrize(
    ("change", "goes_on"),
    [
        ("limit: 0.012", False),
        ("limit: 0.05", True),
        ("limit: 0.02, unit: sequence", False),
        ("limit: 0.02, statistic: p99", False),
        ("limit: 0.02, cap: 0.5", False),
    ],
)
def test_evidence_of_another_contract_is_told_and_has_to_meet_the_limits_in_force(driven, client, change, goes_on):
    """The gates that it has passed are not passed again: the page and the step say so, and a tighter limit holds it.

    So does a clause of the same name that measures something else, and evidence that does not say what it measured.
    """
    core, first = driven.core, driven.core.contracts["policy"]
    core.promotions.tell("policy", "v2", "start", "ada", "", 0.0)
    for now in (1, 61):
        driven.tick(now, v2="PASS")
    assert core.promotions.of("policy", "v2").elsewhere == ""
    text = TEXT.replace("unit: token, ", "") if "unit" in change else TEXT
    other = load_text(text.replace("limit: 0.02", change).replace("version: 1", "version: 2"))
    core.contracts["policy"] = other
    for now in (70, 131, 192):
        driven.tick(now, v2="PASS")
    found = client.get("/api/v1/promotions/policy/v2").json()
    said = f"its evidence of shadow was made under version 1 ({first.hash[:12]}) of the contract"
    assert found["elsewhere"] == f"{said}; version 2 ({other.hash[:12]}) is in force"
    assert found["position"] == ("canary at 10%" if goes_on else "canary at 1%")
    assert (found["elsewhere"] in found["reason"]) is goes_on
    lacks = "it does not show that this one's limit holds for token-tv on all traffic and token-tv on code"
    assert any(lacks in missing for missing in found["missing"]) is not goes_on
    assert any(found["elsewhere"] in line for line in promote_command._lines(found))
    record = core.promotions.evidence("policy", "v2")[0].record
    for row in record["verdicts"]:
        del row["quantity"]
    assert lacks in of_other_contracts(other, [record])[1]
    core.contracts["policy"] = first
    driven.tick(200, v2="PASS")
    assert core.promotions.of("policy", "v2").short == ""


def test_the_version_before_one_that_is_rolled_back_is_full_again(driven):
    """So routers send requests to it while the evaluator is away; a FAIL that lasts rolls it back, as any full one."""
    told, measured = driven.core.promotions, {"v1": 1.0}
    driven.core.evaluator.newest_of = lambda _, version: measured.get(version, -math.inf)
    for now, version in enumerate(("v1", "v2", "v3")):
        told.tell("policy", version, "force", "ada", "it serves", now, stage=Stage.FULL, start=True)
    told.tell("policy", "v4", "start", "ada", "", 3.0)
    driven.tick(4, v2="FAIL", v3="FAIL")
    assert [promoted.version for promoted in driven.core.decisions.promoted] == ["v2"]
    assert (driven.shares(), told.of("policy", "v2").full) == ({"v3": 0.0, "v4": 0.0}, True)
    again = "is full again: v3 was rolled back; by then nothing of it was measured"
    assert told.of("policy", "v2").reason == [event["message"] for event in driven.events()][-1] == f"v2 {again}"
    told.tell("policy", "v4", "rollback", "ada", "not now", 5.0)
    assert len([promotion for promotion in told.all() if promotion.full]) == 1, "v4 had replaced none"
    driven.tick(30, v2="FAIL")
    assert told.of("policy", "v2").full, "what failed already is known"
    driven.tick(400, v2="FAIL")
    assert [promoted.version for promoted in driven.core.decisions.promoted] == ["v1"]
    last = "v1 is full again: v2 was rolled back; by then it had been measured last at 1970-01-01 00:00:01 UTC"
    assert told.of("policy", "v1").reason == last


def test_the_end_of_a_hold_on_a_replaced_version_replaces_nothing(driven):
    told = driven.core.promotions
    told.tell("policy", "v1", "start", "ada", "", 0.0, start=True)
    told.tell("policy", "v1", "hold", "ada", "a look", 1.0)
    told.tell("policy", "v1", "force", "ada", "it is right", 2.0, stage=Stage.FULL)
    told.tell("policy", "v2", "force", "ada", "the next one", 3.0, stage=Stage.FULL, start=True)
    told.tell("policy", "v1", "resume", "ada", "tidy", 4.0)
    assert [(entry.version, entry.full) for entry in told.all("policy")] == [("v2", True), ("v1", False)]


def test_an_order_about_a_name_that_no_kernel_has_changes_nothing(driven):
    """Neither the serving version loses its place to a typo, nor does it count as rolled back or held."""
    told = driven.core.promotions
    driven.tick(1, bbbbbbbbbbbb="PASS")
    told.tell("policy", "bbbbbbbbbbbb", "force", "ada", "it serves", 2.0, stage=Stage.FULL, start=True)
    for order in ("start", "approve", "hold", "resume", "force", "rollback"):
        with pytest.raises(LookupError, match="did you mean 'bbbbbbbbbbbb'"):
            told.tell("policy", "bbbbbbbbbbbc", order, "ada", "typo", 3.0, stage=Stage.FULL, start=True)
    assert [(entry.version, entry.full) for entry in told.all()] == [("bbbbbbbbbbbb", True)]


@pytest.mark.parametrize(("old", "new"), [("v2", "v3"), ("v3", "v2")])
def test_a_version_that_its_gates_made_full_replaces_the_one_before(driven, old, new):
    told = driven.core.promotions
    told.tell("policy", old, "start", "ada", "", 0.0)
    told.tell("policy", old, "force", "ada", "first of all", 1.0, stage=Stage.FULL)
    told.tell("policy", new, "start", "ada", "", 2.0)
    told.tell("policy", new, "approve", "ada", "", 2.0, stage=Stage.FULL)
    for now in (63, 124, 185):
        driven.tick(now, v2="PASS", v3="PASS")
    assert [(promotion.version, str(promotion.position), promotion.status) for promotion in told.all()] == [
        (new, "full", "running"), (old, "full", "replaced"),
    ]  # fmt: skip
    assert [event["order"] for event in driven.events()][-2:] == ["advance", "replace"]


def test_old_versions_are_forgotten_one_day(driven, monkeypatch):
    monkeypatch.setattr(promotions, "_MAX_ENDED", 20)
    told = driven.core.promotions
    told.tell("policy", "full", "start", "ada", "", 0.0)
    told.tell("policy", "full", "force", "ada", "the first", 1.0, stage=Stage.FULL)
    for number in range(25):
        told.tell("policy", f"bad{number}", "start", "ada", "", 10.0 + number)
        told.tell("policy", f"bad{number}", "rollback", "ada", "bad", 10.5 + number)
        driven.tick(11.0 + number)
    assert driven.shares() == {f"bad{number}": 0.0 for number in range(5, 25)}
    assert [promotion.version for promotion in told.all()][:1] == ["bad24"]
    assert (told.all()[-1].version, len(told.all())) == ("full", 21)
    assert len(told.evidence("policy", "bad0")) == 1


def test_a_contract_that_runs_dry_promotes_nothing(contract, open_file):
    file = open_file()
    Core([contract], file, external_url="", now=0.0).promotions.tell("policy", "v2", "start", "ada", "", 0.0)
    dry = Driven(Core([contract], file, external_url="", now=1.0, dry_run=["policy"]))
    dry.tick(61, v2="PASS")
    dry.tick(62, v2="FAIL")
    for version, order in (("v2", "rollback"), ("v2", "force"), ("v3", "force"), ("v3", "start")):
        with pytest.raises(OrderError, match=r"policy runs dry, so no order about v[23] would be carried out; restart"):
            dry.core.promotions.tell("policy", version, order, "ada", "", 63.0, stage=Stage.CANARY, start=True)
    (promotion,) = dry.core.promotions.all()
    assert (promotion.position.stage, dry.shares()) == (Stage.SHADOW, {})
    with client_of(dry.core) as client:
        found = client.get("/api/v1/promotions/policy/v2").json()
    assert "  waits: policy runs dry: no gate opens, and no FAIL rolls it back" in promote_command._lines(found)


def test_a_hold_of_the_policy_holds(open_file):
    held = load_text(TEXT + "escalation: [{on: fail, do: [hold-promotion]}]\n")
    driven = Driven(Core([held], open_file(), external_url="", now=0.0))
    driven.tick(1, v2="FAIL")
    driven.core.promotions.tell("policy", "v2", "start", "ada", "", 2.0)
    driven.tick(62, v2="INCONCLUSIVE")
    promotion = driven.core.promotions.of("policy", "v2")
    assert promotion.position.stage is Stage.SHADOW
    assert "held: code: numbers" in promotion.missing


def test_a_hold_of_one_version_leaves_another_alone(open_file):
    """The serving version breaks: its fix is not accused, and passes."""
    held = load_text(TEXT + "escalation: [{on: fail, do: [hold-promotion]}]\n")
    driven = Driven(Core([held], open_file(), external_url="", now=0.0))
    driven.core.promotions.tell("policy", "v2", "start", "ada", "", 0.0)
    driven.tick(1, old="FAIL", v2="PASS")
    driven.tick(62, old="FAIL", v2="PASS")
    promotion = driven.core.promotions.of("policy", "v2")
    assert (promotion.position.stage, promotion.missing) == (Stage.CANARY, ())
    (incident,) = driven.core.incidents()
    done = [action.text for action in actions_taken(incident, driven.core.decisions)]
    assert done == ["promotion of this version held"], "and no other's"


def test_a_rollback_passes_while_another_version_is_in_promotion(driven):
    told = driven.core.promotions
    told.tell("policy", "v3", "start", "ada", "", 0.0)
    told.tell("policy", "v2", "rollback", "bob", "broken on prose", 1.0, start=True)
    found = {promotion.version: promotion.status for promotion in told.all("policy")}
    assert found == {"v2": PromotionStatus.ROLLED_BACK, "v3": PromotionStatus.RUNNING}
    with pytest.raises(OrderError, match="one version goes at a time"):
        told.tell("policy", "v4", "hold", "bob", "lunch", 2.0, start=True)


def test_a_version_with_an_unproven_breach_waits(driven):
    """Its alert has ended and what is measured now passes, but nothing has refuted the breach; nor while one lasts."""
    driven.tick(1, v2="FAIL")
    driven.core.promotions.tell("policy", "v2", "start", "ada", "", 2.0)
    driven.core.evaluator.unheard = lambda *_, **__: True  # type: ignore[method-assign]
    for now in (62, 123, 500):
        driven.tick(now, v2="PASS")
        (incident,) = driven.core.incidents()
        said = f"held: incident {incident.id} of it is not over: token-tv was above its limit on code; went"
        promotion = driven.core.promotions.of("policy", "v2")
        assert promotion.position.stage is Stage.SHADOW
        assert promotion.missing[0].startswith(said)
    driven.core.evaluator.unheard = lambda *_, **__: False  # type: ignore[method-assign]
    driven.tick(561, v2="PASS")
    driven.tick(622, v2="PASS")
    assert driven.core.promotions.of("policy", "v2").position.stage is Stage.CANARY


FLOAT16 = KernelInfo("inference", "v2", {"dtype": "float16"}, 0.0)
REFUSED = Missing("policy", "trainA", "v2", "future", 1, 0.0, "points are from the future")


@pytest.mark.parametrize(
    ("asked", "answer", "later", "said"),
    [
        ("kernels", (FLOAT16,), None, "dtype bfloat16 is declared, and"),
        ("kernels", (), None, "no inference kernel has reported by this name"),
        ("kernels", (replace(FLOAT16, version="v1"),), None, "no inference kernel has reported by this name; seen are"),
        ("missing", [REFUSED], [replace(REFUSED, kernel_inference="v1")], "points of it are not judged: points are"),
        ("silent_recorders", (1, "1 of 2 recorders is silent"), None, "1 of 2 recorders is silent"),
    ],
)
def test_a_version_waits_while_what_passes_may_not_be_all_of_it(driven, monkeypatch, asked, answer, later, said):
    evaluator = driven.core.evaluator
    driven.core.promotions.tell("policy", "v2", "start", "ada", "", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(evaluator, asked, lambda *_: answer)
        for now in (1, 61, 122):
            driven.tick(now, v2="PASS")
        waiting = driven.core.promotions.of("policy", "v2")
        assert waiting.position.stage is Stage.SHADOW
        assert waiting.missing[0].startswith(f"held: {said}")
    if later is not None:
        monkeypatch.setattr(evaluator, asked, lambda *_: later)
    driven.tick(123, v2="PASS")
    assert driven.core.promotions.of("policy", "v2").position.stage is Stage.CANARY


def test_api_starts_shows_and_takes_orders(driven, client):
    path = "/api/v1/promotions/policy/v2"
    assert client.get(path).status_code == 404
    assert client.get("/api/v1/promotions/other/v2").json()["detail"] == "no contract 'other'; there are policy"
    assert client.post(path, json={"order": "start", "by": "ada"}).json()["position"] == "shadow"
    driven.tick(1e9, v2="INCONCLUSIVE")
    found = client.get(path).json()
    assert (found["next"], found["windows_needed"]) == ("canary at 1%", 1)
    assert found["missing"][0].startswith("token-tv on code: INCONCLUSIVE, between 0.01 and 0.03")
    assert client.get("/api/v1/promotions").json()["promotions"] == [found]
    refused = client.post(path, json={"order": "force", "by": "ada", "stage": "full"})
    assert (refused.status_code, refused.json()["detail"]) == (409, "say why; the reason is recorded")
    assert client.post(path, json={"order": "force", "by": "ada", "why": "x"}).status_code == 409
    assert client.post(path, json={"order": "aprove", "by": "ada"}).status_code == 422
    assert client.post(path, json={"order": "hold", "by": "ada", "reason": "x"}).status_code == 422
    assert client.post(path, json={"order": "hold", "by": "ada", "why": "lunch"}).json()["hold"]["why"] == "lunch"
    assert client.post(path, json={"order": "resume", "by": "ada"}).json()["hold"] is None
    gone = client.post(path, json={"order": "rollback", "by": "ada", "why": "wrong weights"}).json()
    assert (gone["status"], gone["share"], gone["next"]) == ("rolled-back", 0.0, None)
    messages = [event["message"] for event in client.get("/api/v1/events").json()["events"]]
    assert "ada rolls v2 back from shadow: wrong weights" in messages


def test_an_order_that_is_refused_starts_nothing(driven, client):
    path = "/api/v1/promotions/policy/v2"
    for order in (
        {"order": "evidence", "evidence": {"decision": "wait"}},
        {"order": "evidence"},
        {"order": "approve", "stage": "canary"},
        {"order": "force", "stage": "canary"},
        {"order": "resume"},
    ):
        assert client.post(path, json={"by": "ada", "start": True, **order}).status_code == 409, order
        assert client.get("/api/v1/promotions").json()["promotions"] == [], order
    assert driven.events() == []
    assert client.post(path, json={"order": "hold", "by": "ada", "why": "lunch"}).status_code == 404
    held = client.post(path, json={"order": "hold", "by": "ada", "why": "lunch", "start": True}).json()
    assert (held["position"], held["hold"]["why"]) == ("shadow", "lunch")
    assert [event["order"] for event in driven.events()] == ["start", "hold"]
    other = {"order": "hold", "by": "ada", "why": "lunch", "start": True}
    assert client.post("/api/v1/promotions/policy/v3", json=other).status_code == 409
    forced = {"order": "force", "by": "ada", "why": "hurry", "stage": "full", "start": True}
    client.post(path, json={"order": "rollback", "by": "ada", "why": "wrong weights"})
    assert client.post("/api/v1/promotions/policy/v3", json=forced).json()["position"] == "full"
    assert [event["order"] for event in driven.events()][2:] == ["rollback", "start", "force"]


@pytest.mark.slow
def test_api_hands_the_evidence_out(client):
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


def test_metrics_say_stage_share_and_windows(driven, client):
    driven.core.promotions.tell("policy", "v2", "start", "ada", "", 0.0)
    driven.tick(61, v2="PASS")
    text = client.get("/metrics").text
    labels = '{kc_contract="policy",kc_kernel_inference="v2"}'
    for name, value in (("stage_ratio", 2.0), ("share_ratio", 0.01), ("windows", 0.0)):
        short = name.removesuffix("_ratio")
        assert f"kc_promotion_{short}{labels} {value}" in text or f"kc_promotion_{name}{labels} {value}" in text
    driven.tick(62, v2="FAIL")
    assert f"kc_promotion_stage{labels} -1.0" in client.get("/metrics").text
    driven.core.evaluator.newest_of = lambda *_: 200.0  # type: ignore[method-assign]
    driven.tick(201, v2="FAIL")
    assert f"kc_promotion_stage{labels} -2.0" in client.get("/metrics").text


def paged(core: Core) -> list[dict[str, Any]]:
    """The bodies that wait in the outbox, oldest first, taken from it."""
    found = []
    while waiting := core.outbox.due(10_000.0):
        for message in waiting:
            core.outbox.answered(message.id, 0.0, 204)
            found.append(json.loads(message.body))
    return found


@pytest.fixture
def slow(open_file: Callable[..., sqlite3.Connection]) -> Driven:
    """A contract whose ladder waits for an hour before it tells anybody."""
    contract = load_text(TEXT + "escalation: [{on: fail, for: 1h, severity: critical, do: [{webhook: pager}]}]\n")
    return Driven(Core([contract], open_file(), external_url="http://evaluator", now=0.0))  # type: ignore[arg-type]


def test_a_roll_back_is_told_at_once_and_first_in_each_message(slow):
    slow.core.promotions.tell("policy", "v2", "start", "ada", "", 0.0)
    slow.tick(1, v2="PASS")
    assert paged(slow.core) == []
    slow.tick(61, v2="FAIL")
    (body,) = paged(slow.core)
    contract = body["kernelContract"]
    assert (contract["reason"], body["status"]) == ("rolled-back", "firing")
    assert contract["incident"]["done"] == ["v2 is rolled back from shadow"]
    (alert,) = body["alerts"]
    assert alert["labels"]["alertname"] == "KernelContractRolledBack"
    assert (
        alert["annotations"]["summary"]
        == "policy: token-tv is broken on slice code for vllm bfloat16 (v2) against trainA, which was rolled back"
    )
    assert alert["annotations"]["description"].startswith(
        "A version was rolled back and should no longer serve requests. Since 1970-01-01 00:01:01 UTC. "
        "Done: v2 is rolled back from shadow. Now: "
    )
    event = pagerduty_event(body, "key")
    assert list(event["payload"]["custom_details"])[:2] == ["next", "done"]
    assert "v2 is rolled back from shadow" in event["payload"]["summary"]
    blocks = slack_message(body)["attachments"][0]["blocks"]
    assert blocks[2]["text"]["text"] == "*Done*: v2 is rolled back from shadow"
    (incident,) = slow.core.incidents("policy")
    done = actions_taken(incident, slow.core.decisions)
    assert [action.kind for action in done] == ["roll-back", "webhook"]
    assert incident.state_text.startswith(
        "Broken; its rollback was ordered at 1970-01-01 00:01 UTC, but no router that sent "
    )
    slow.tick(62, v2="FAIL")
    assert paged(slow.core) == [], "once"
    slow.tick(130)
    assert paged(slow.core) == [], "nobody is known to have carried it out"
    route_kept(slow.core, 131.0, versions=["v2"])
    slow.tick(132)
    (over,) = paged(slow.core)
    assert (over["status"], over["kernelContract"]["incident"]["state"]) == ("resolved", "resolved")
    assert pagerduty_event(over, "key")["event_action"] == "resolve"


def test_a_breach_of_a_rolled_back_version_is_told_as_over_though_its_route_remains(open_file):
    """As without the rollback: the last message says that it is over, and no red one is left behind."""
    ladder = "escalation: [{on: fail, severity: critical, do: [{route: train-kernel}, {webhook: pager}]}]\n"
    driven = Driven(Core([load_text(TEXT + ladder)], open_file(), external_url="http://evaluator", now=0.0))
    driven.core.promotions.tell("policy", "v2", "start", "ada", "", 0.0)
    for now in (61, 100):
        driven.tick(now, v2="FAIL")
    assert {body["kernelContract"]["reason"] for body in paged(driven.core)} >= {"rolled-back"}
    for now in (500, 900):
        driven.tick(now, v2="PASS")
    (incident,) = driven.core.incidents("policy")
    assert incident.only_route_left
    body = paged(driven.core)[-1]
    assert (body["status"], body["kernelContract"]["reason"]) == ("resolved", "resolved")
    driven.core.promotions.tell("policy", "v2", "start", "ada", "fixed", 901.0)
    driven.tick(960, v2="PASS")
    lift = "end it by kc-otel route resume policy --slice code --why '...'"
    waits = driven.core.promotions.of("policy", "v2").missing[0]
    assert waits == f"held: incident {incident.id} of it is over but for its route: {lift}"


def test_a_version_that_is_rolled_back_and_serves_is_said_at_once(slow):
    """Once what was under way is measured; on the promotion, in the log, to the pager. Silence ends nothing."""
    core, newest = slow.core, {"at": 61.0}
    core.evaluator.newest_of = lambda *_: newest["at"]  # type: ignore[method-assign]
    core.promotions.tell("policy", "v2", "start", "ada", "", 0.0)
    slow.tick(1, v2="PASS")
    slow.tick(61, v2="FAIL")
    paged(core)
    for at, newest["at"] in ((93.0, 93.0), (121.0, 121.0)):
        slow.tick(at, v2="FAIL")
        assert core.promotions.of("policy", "v2").seen_serving is None, "it was under way, or a backlog"
    newest["at"] = 122.0
    slow.tick(123.0, v2="FAIL")
    assert core.promotions.of("policy", "v2").seen_serving == 123.0
    (body,) = paged(core)
    assert body["alerts"][0]["labels"]["severity"] == "critical"
    assert body["alerts"][0]["annotations"]["summary"].endswith(f", which {MEASURED_LATER}")
    assert slow.events()[-1]["message"] == (
        "v2 was measured after its rollback (at 1970-01-01 00:02:03 UTC): it may still serve, or what it had answered "
        "before is measured late; check that every serving process asks a router"
    )
    newest["at"] = 129.0
    slow.tick(130.0, v2="FAIL")
    assert paged(core) == [], "once"
    slow.tick(2000.0)
    assert core.promotions.of("policy", "v2").seen_serving == 123.0
    assert paged(core) == [], "it may still serve"
    assert [incident.state for incident in core.incidents("policy")] == [IncidentState.UNPROVEN]
    core.promotions.tell("policy", "v2", "rollback", "ada", "every process asks the router now", 2010.0)
    for at in (2011.0, 2012.0):
        slow.tick(at)
        route_kept(core, at, versions=["v2"])
    assert "is over" in (last := paged(core)[-1]["alerts"][-1]["annotations"]["summary"])
    assert "whether the version that was rolled back still serves is not known" in last
    assert core.incidents("policy") == ()
    assert core.promotions.of("policy", "v2").seen_serving is None
    newest["at"] = 2071.0
    slow.tick(2072.0)
    assert core.promotions.of("policy", "v2").seen_serving == 2072.0
    core.promotions.tell("policy", "v2", "force", "ada", "it was the router", 2080.0, stage=Stage.CANARY)
    forced = core.promotions.of("policy", "v2")
    assert (forced.seen_serving, forced.proof_from) == (None, 2010.0), (
        "evidence from before the rollback proves nothing"
    )


def test_a_version_that_never_was_promoted_is_rolled_back_as_often_as_it_serves(slow):
    """No start is told, the message says when it was rolled back, and each rollback closes what only went away."""
    core, newest = slow.core, {"at": 0.0}
    core.evaluator.newest_of = lambda *_: newest["at"]  # type: ignore[method-assign]
    slow.tick(1, v2="FAIL")
    core.promotions.tell("policy", "v2", "rollback", "ada", "broken on code", 10.0, start=True)
    assert [event["message"] for event in slow.events()] == ["ada rolls v2 back: broken on code"]
    slow.tick(11, v2="FAIL")
    paged(core)
    for entered, served in ((10.0, 80.0), (130.0, 200.0), (250.0, 320.0)):
        newest["at"] = served
        slow.tick(served, v2="FAIL")
        (body,) = paged(core)
        description = body["alerts"][0]["annotations"]["description"]
        times = f"Rolled back at 1970-01-01 00:{entered // 60:02.0f}:{entered % 60:02.0f} UTC, measured after that at "
        times += f"1970-01-01 00:{served // 60:02.0f}:{served % 60:02.0f} UTC. "
        assert description.startswith(f"A version {MEASURED_LATER}. {times}")
        core.promotions.tell("policy", "v2", "rollback", "ada", "still there", served + 50.0)
        slow.tick(served + 51.0, v2="FAIL")
        paged(core)
    route_kept(core, 1990.0, versions=["v2"])
    slow.tick(2000.0)
    slow.tick(2001.0)
    assert core.incidents("policy") == ()
    assert paged(core)[-1]["kernelContract"]["incident"]["state_text"] == "Closed without proof of recovery"
    assert slow.events()[-1]["message"] == "ada rolls v2 back again: still there"
    for record in core.promotions.evidence("policy", "v2"):
        verify_evidence(record.record)


def test_a_version_that_serves_after_a_person_rolled_it_back_is_told_though_it_breaks_nothing(slow):
    core = slow.core
    core.promotions.tell("policy", "v2", "start", "ada", "", 0.0)
    slow.tick(1, v2="PASS")
    core.promotions.tell("policy", "v2", "rollback", "ada", "users report broken tables", 2.0)
    slow.tick(3, v2="PASS")
    assert paged(core) == []
    core.evaluator.newest_of = lambda *_: 70.0  # type: ignore[method-assign]
    slow.tick(71, v2="PASS")
    (body,) = paged(core)
    (alert,) = body["alerts"]
    assert alert["annotations"]["summary"] == f"policy: vllm bfloat16 (v2) {MEASURED_LATER}"
    assert (alert["labels"]["severity"], body["kernelContract"]["incident"]) == ("critical", None)
    assert body["kernelContract"]["impact"] == f"A version {MEASURED_LATER}."
    for at in (72, 5000):
        slow.tick(at, v2="PASS")
        assert paged(core) == [], "once, and silence ends nothing"
    core.promotions.tell("policy", "v2", "rollback", "ada", "every process asks the router now", 5001.0)
    slow.tick(5002, v2="PASS")
    (over,) = paged(core)
    assert (over["status"], over["alerts"][0]["fingerprint"]) == ("resolved", alert["fingerprint"])
    assert over["alerts"][0]["annotations"]["summary"] == (
        "policy: a person has acted on the rollback for vllm bfloat16 (v2) against trainA; whether the "
        "version that was rolled back still serves is not known"
    )
    assert core.escalation.groups["policy"] == ()


def test_a_rolled_back_version_that_serves_undecided_is_told_in_its_incident(slow):
    core, newest = slow.core, {"at": 61.0}
    core.evaluator.newest_of = lambda *_: newest["at"]  # type: ignore[method-assign]
    core.promotions.tell("policy", "v2", "start", "ada", "", 0.0)
    for at in range(1, 3700, 60):  # until the ladder's own step fires
        newest["at"] = float(at)
        slow.tick(at, v2="FAIL" if at > 1 else "PASS")
    core.promotions.tell("policy", "v2", "rollback", "ada", "every process asks the router now", 3662.0)
    slow.tick(3663, v2="INCONCLUSIVE")
    paged(core)
    newest["at"] = 3730.0
    slow.tick(3731, v2="INCONCLUSIVE")
    (body,) = paged(core)
    assert MEASURED_LATER in body["alerts"][0]["annotations"]["summary"]
    assert body["kernelContract"]["incident"] is not None


def test_an_approval_ends_with_the_contract_that_it_was_given_under(driven):
    told, first = driven.core.promotions, driven.core.contracts["policy"]
    told.tell("policy", "v2", "start", "ada", "", 0.0)
    told.tell("policy", "v2", "approve", "ada", "", 0.5, stage=Stage.FULL)
    driven.tick(1, v2="PASS")
    other = load_text(TEXT.replace("limit: 0.02", "limit: 0.05").replace("version: 1", "version: 2"))
    driven.core.contracts["policy"] = other
    for now in (10, 71, 132, 193, 254):
        driven.tick(now, v2="PASS")
    promotion = told.of("policy", "v2")
    assert (promotion.position.stage, promotion.approved) == (Stage.CANARY, ())
    assert promotion.missing[0].startswith("the gate is open; a person has to let it into full")
    said = [event["message"] for event in driven.events() if event["order"] == "lapsed"]
    assert said == [
        "the approval of v2 for full has ended: the contract has changed since; a person has to approve it again"
    ]
    told.tell("policy", "v2", "approve", "ada", "", 255.0, stage=Stage.FULL)
    driven.tick(260, v2="PASS")
    driven.core.contracts["policy"] = first
    driven.tick(270, v2="PASS")
    assert told.of("policy", "v2").position.stage is Stage.FULL
    assert len([event for event in driven.events() if event["order"] == "lapsed"]) == 1, "it was used"
