"""A tick: what is decided is written together or not at all, and nothing is announced that was not written."""

import asyncio
import itertools
import json
import logging
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.contract.model import Contract
from kc_otel.judge.contract_state import ContractState
from kc_otel.judge.decisions import LATE_SECONDS
from kc_otel.judge.escalation import escalate as escalate_module
from kc_otel.judge.escalation.alerts import People, Silence
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.verdict import Status
from kc_otel.serve import core as core_module
from kc_otel.serve import people_orders
from kc_otel.serve.api.routes_decisions import Changes
from kc_otel.serve.config import ServeConfig
from kc_otel.serve.core import Core
from kc_otel.serve.history import CellHistory, EventLog
from kc_otel.serve.promotions import Promotions
from kc_otel.serve.server import _tick_forever
from kc_otel.serve.store.escalation_store import EscalationStore
from kc_otel.serve.store.evaluator_store import EvaluatorStore
from kc_otel.serve.store.state_file import StateError, open_state
from kc_otel.serve.webhooks.endpoints import pagerduty_event, slack_message
from kc_otel.serve.webhooks.outbox import Outbox
from tests.judge.conftest import Sender
from tests.tools.api import api_of
from tests.tools.full_disk import fill_disk, refuse_commits, relieve
from tests.tools.verdicts import windows_of


def test_a_breach_pages_routes_and_halts_in_one_tick(make_core, drift, caplog):
    """A FAIL whose step has no `for` acts at once: one webhook, routes, a directive, events, and the log."""
    core = make_core()
    core.metrics(drift(0.3))
    with caplog.at_level(logging.INFO):
        core.tick(time.time())
    assert {verdict.status for verdict, _ in core.history.cells()} == {Status.FAIL}
    (message,) = core.outbox.due(time.time())
    body = json.loads(message.body)
    assert {alert["labels"]["slice"] for alert in body["alerts"]} == {"all", "code"}
    assert body["externalURL"] == "http://evaluator"
    assert {route.slice for route in core.decisions.routes} == {"all", "code"}
    assert "halt" in {directive.kind for directive in core.decisions.directives}
    assert [event.kind for event in core.events.newest(limit=4)] == ["verdict", "verdict", "firing", "firing"]
    about = [record.attributes for record in caplog.records if hasattr(record, "attributes")]
    assert {labels["kc.slice"] for labels in about if labels.get("kc.clause") == "token-tv"} == {"all", "code"}


def test_why_points_are_refused_is_in_the_log_once(make_core, caplog):
    """Recorders in Python do not read the answer, so that who runs the evaluator has to be told, and not flooded."""
    core, now = make_core(), time.time()
    stray = Sender(contract="other", start=now - 1)
    for _ in range(3):
        assert core.metrics(stray.request(now, [0.1]), now).rejected
    (said,) = [record.getMessage() for record in caplog.records if "not judged" in record.getMessage()]
    assert "contract 'other' is not loaded here; loaded: " in said
    for index in range(100):
        core.metrics(Sender(contract=f"other-{index}", start=now - 1).request(now, [0.1]), now)
    assert len([record for record in caplog.records if "not judged" in record.getMessage()]) <= 20


def test_kernels_that_are_all_but_equal_are_judged(make_core: Callable[..., Core], drift: Callable) -> None:
    """Differences below what the recorder's buckets tell apart add up to a sum that is believed."""
    core = make_core()
    for sigma in (0.0, 1e-12, 1e-9, 1e-6, 1e-4):
        outcome = core.metrics(drift(sigma))
        assert not outcome.rejected, (sigma, outcome.message)
    core.tick(time.time())
    assert {verdict.status for verdict, _ in core.history.cells()} == {Status.PASS}


@pytest.mark.parametrize("trouble", [refuse_commits, fill_disk])
def test_memory_and_disk_agree_where_a_commit_is_refused(make_core, open_file, drift, tmp_path, trouble):
    """Alerts, table, promotions and history are as they were; the next tick that can be written catches up."""
    connection = open_file(tmp_path / "state.sqlite")
    core, now, said = make_core(connection), time.time(), []
    core.tick(now)
    core.promotions.tell("policy", "inferB", "start", "ada", "", now)
    core.events.announce = said.append

    def memory() -> object:
        cells = [(verdict.cell, verdict.status, since) for verdict, since in core.history.cells()]
        latest = core.promotions.latest("policy")
        return core.escalation, core.promotions.all(), cells, latest, core.evaluated_at

    before, disk = memory(), list(connection.iterdump())
    core.metrics(drift(0.3))
    trouble(connection)
    with pytest.raises(StateError, match="nothing is decided"):
        core.tick(now + 1)
    assert (memory(), list(connection.iterdump()), said) == (before, disk, [])
    relieve(connection)
    core.tick(now + 2)
    assert said
    assert len(core.outbox.due(now + 2)) == 1
    assert {route.slice for route in core.decisions.routes} == {"all", "code"}
    again = make_core(connection, now + 2)
    assert (again.escalation, again.promotions.all()) == (core.escalation, core.promotions.all())


def test_what_was_decided_survives_a_restart(make_core, open_file, drift, tmp_path):
    """A second core on the same file has the verdicts' age, the alerts, the routes and the unsent webhook."""
    path = tmp_path / "state.sqlite"
    connection = open_file(path)
    core = make_core(connection)
    core.metrics(drift(0.3))
    began = time.time()
    core.tick(began)
    connection.execute("DELETE FROM events")
    connection.close()
    again = make_core(open_file(path))
    assert again.decisions == core.decisions
    assert again.firing() == core.firing()
    assert again.incidents() == core.incidents() != ()
    assert len(again.outbox.due(time.time())) == 1
    again.tick(began + 5)
    assert {since for _, since in again.history.cells()} == {began}
    assert len(again.outbox.messages()) == 1


def test_what_a_person_has_to_end_returns_with_its_contract(make_core, open_file, drift, tmp_path, contract, caplog):
    """Renamed and named again: while it is not served, nothing of it is published; both starts say so."""
    path, now = tmp_path / "state.sqlite", time.time()
    connection = open_file(path)
    core = make_core(connection)
    core.metrics(drift(0.3))
    core.tick(now)
    people_orders.pin(core, "policy", "code", "train-kernel", None, "ada", "it breaks", now)
    people_orders.silence(core, "policy", None, "code", now + 1e6, "ada", "known", now)
    ordered = core.decisions.routes, core.decisions.pins, core.people.silences
    people_orders.pin(core, "policy", "all", "train-kernel", now + 60.0, "ada", "it ends while it is away", now)
    people_orders.silence(core, "policy", None, "all", now + 60.0, "ada", "it ends while it is away", now)
    other = contract.model_copy(update={"metadata": contract.metadata.model_copy(update={"name": "other"})})
    for _ in range(2):
        connection.close()
        connection = open_file(path)
        core = Core([other], connection, external_url="", now=now)
        assert (core.decisions.routes, core.decisions.pins, core.people.silences) == ((), (), ())
        core.tick(now)
    connection.close()
    again = make_core(open_file(path), now + 90.0)
    assert (again.decisions.routes, again.decisions.pins, again.people.silences) == ordered
    routes, silence = "the route of all traffic, the route of code", "the silence of every clause on "
    orders = f"{routes}, the pin of code and {silence}slice code"
    more = f"{routes}, the pin of all traffic, the pin of code, {silence}slice code and {silence}slice all"
    said = [event.message for event in again.events.newest("policy", 100) if event.kind == "served"]
    assert said == [
        f"the contract is not served any more: until it is, {more} are out of force",
        f"the contract is served again: {orders} are in force again",
    ]
    assert [record.message for record in caplog.records if "served" in record.message] == [
        f"policy: {text}" for text in said
    ]


def test_a_contract_that_is_no_longer_served_leaves_nothing_firing(make_core, open_file, drift, tmp_path, contract):
    """Its alerts resolve and its routes go when the evaluator starts without it."""
    path = tmp_path / "state.sqlite"
    connection = open_file(path)
    core = make_core(connection)
    core.metrics(drift(0.3))
    core.tick(time.time())
    connection.close()
    other = contract.model_copy(update={"metadata": contract.metadata.model_copy(update={"name": "other"})})
    connection = open_file(path)
    again = Core([other], connection, external_url="", now=time.time())
    assert again.decisions.routes == ()
    assert [event.kind for event in again.events.newest("policy", 2)] == ["resolved", "resolved"]
    connection.close()
    once_more = Core([other], open_file(path), external_url="", now=time.time())
    ended, began = (json.loads(message.body) for message in once_more.outbox.messages())
    assert (ended["status"], ended["notification_reason"], ended["receiver"]) == ("resolved", "unfollowed", "pager")
    assert ended["groupKey"] == began["groupKey"]
    assert {alert["fingerprint"] for alert in ended["alerts"]} == {alert["fingerprint"] for alert in began["alerts"]}
    assert "no longer tracked" in ended["alerts"][0]["annotations"]["description"]
    event = pagerduty_event(ended, "key")
    assert (event["event_action"], event["dedup_key"]) == ("trigger", pagerduty_event(began, "key")["dedup_key"])
    why = "is no longer watched: the contract was removed, or a dry run of it began or ended"
    said = [event["payload"]["summary"], *(alert["annotations"]["summary"] for alert in ended["alerts"])]
    assert all(text.endswith(why) for text in said)
    assert slack_message(ended)["text"].startswith("No longer followed: Ended: policy")


def test_a_contract_that_is_gone_and_cannot_be_read_stops_no_start(make_core, open_file, drift, tmp_path, caplog):
    """Written by another version of the evaluator, it is named in the log, and the others are judged."""
    path = tmp_path / "state.sqlite"
    connection = open_file(path)
    core = make_core(connection)
    core.metrics(drift(0.3))
    core.tick(time.time())
    connection.execute("UPDATE state_values SET data = replace(data, 'KernelContract', 'Other')")
    connection.close()
    again = Core([], open_file(path), external_url="", now=time.time())
    assert len(again.outbox.messages()) == 1
    assert "policy: its contract cannot be read any more" in caplog.text


def tick_five_times(core: Core, told: Changes, ticked: Callable[[], None]) -> None:
    numbers = itertools.count(1)

    async def some() -> None:
        done = asyncio.Event()

        def after() -> None:
            if next(numbers) == 5:
                done.set()
            ticked()

        ticks = _tick_forever(core, ServeConfig(tick=0.01), core.evaluate, told, after)
        ticking = asyncio.create_task(ticks)
        await asyncio.wait([ticking, asyncio.create_task(done.wait())], return_when=asyncio.FIRST_COMPLETED)
        ticking.cancel()

    asyncio.run(some())


def test_an_evaluation_in_which_the_machine_slept_does_not_delay_the_next_one(make_core, monkeypatch):
    """As much time as an evaluation took is left to those who send and ask, but not the hour that a laptop slept."""
    core, rests = make_core(), list[float]()
    real = asyncio.sleep

    async def rest(seconds: float) -> None:
        rests.append(seconds)
        await real(0)

    def slept() -> None:
        core.tick_seconds = 3600.0

    monkeypatch.setattr(asyncio, "sleep", rest)
    tick_five_times(core, Changes(), slept)
    assert max(rests) <= LATE_SECONDS / 2


@pytest.mark.slow
def test_what_fails_is_in_metrics_and_health_and_does_not_end_the_ticks(make_core, drift, monkeypatch):
    """Ticks go on after an error that nobody foresaw; metrics, readiness and API say what fails until it ends."""
    core, told = make_core(), Changes()
    core.metrics(drift(0.3))
    real, calls = core.evaluator.evaluate, list[float]()

    def evaluate(now: float, *_: Any) -> Any:
        calls.append(now)
        if len(calls) < 4:
            raise OverflowError("intermediate overflow in fsum")
        return real(now)

    monkeypatch.setattr(core.evaluator, "evaluate", evaluate)
    client = TestClient(api_of(core, changes=told))
    seen: list[tuple[str, str, dict[str, str]]] = []

    def ticked() -> None:
        health = client.get("/api/v1/health").json()
        seen.append((client.get("/metrics").text, client.get("/readyz").text, health["failures"]))
        if len(seen) == 2:
            raise RuntimeError("no such endpoint")

    tick_five_times(core, told, ticked)
    sentence = "the evaluation fails for all contracts: OverflowError: intermediate overflow in fsum"
    assert 'kc_evaluator_failures_total{kc_contract=""} 1.0' in seen[0][0]
    assert 'kc_evaluator_failures_total{kc_contract="policy"} 0.0' in seen[0][0]
    assert seen[0][1] == f"no evaluation yet\nall: {sentence}\n"
    assert seen[0][2] == {"": sentence}
    assert seen[-1][1:] == ("ready\n", {})
    assert core.decisions.routes


def test_a_state_that_cannot_be_written_is_said_at_once(make_core, open_file):
    """The last evaluation is of now, and yet nothing is ready: incoming data are rejected."""
    connection, told, seen = open_file(), Changes(), []
    core = make_core(connection)
    client = TestClient(api_of(core, changes=told))

    def ticked() -> None:
        seen.append((client.get("/readyz"), client.get("/api/v1/health").json()["failures"]))
        {1: refuse_commits, 3: relieve}.get(len(seen), lambda _: None)(connection)

    tick_five_times(core, told, ticked)
    assert [answer.status_code for answer, _ in seen] == [200, 503, 503, 200, 200]
    assert seen[1][0].text.startswith("incoming data are rejected\nall: writing the state fails for all contracts: ")
    assert [len(failures) for _, failures in seen] == [0, 1, 1, 0, 0]


OTHER = {"name": "other", "version": 1, "owner": "tests"}
CALLS = [
    (escalate_module, "advance"),
    (escalate_module, "current"),
    (escalate_module, "apply"),
    (escalate_module, "_told_again"),
    (escalate_module, "with_word"),
    (escalate_module, "follow"),
    (escalate_module, "with_actions"),
    (escalate_module, "group_messages"),
    (escalate_module, "with_done"),
    (core_module, "alert_body"),
    (EventLog, "transition"),
    (EventLog, "changed"),
    (Promotions, "write"),
    (CellHistory, "write"),
    (Evaluator, "failing"),
    (EscalationStore, "save"),
    (Outbox, "enqueue"),
]


@pytest.mark.parametrize(("owner", "call"), CALLS, ids=[call for _, call in CALLS])
def test_a_fault_anywhere_in_one_contracts_step_is_its_own(contract, open_file, drift, monkeypatch, owner, call):
    """What held of it still holds, nothing of it is half written, the fault is shown; the others go on, and it too."""
    other = Contract.model_validate({**contract.model_dump(by_alias=True), "metadata": OTHER})
    now = time.time()
    core = Core([contract, other], open_file(), external_url="", now=now)
    silences = [Silence(f"s{name}", name, None, None, "ada", "deploy", now, now + 30) for name in core.contracts]
    core.amend("policy", {"silenced": {"message": "", "by": "ada", "why": ""}}, now, people=People(tuple(silences)))
    core.tick(now)
    before = core.escalation
    request = drift(0.3)
    for name in core.contracts:
        for metric in request.resource_metrics[0].scope_metrics[0].metrics:  # type: ignore[attr-defined]
            data = getattr(metric, metric.WhichOneof("data"))
            for point in data.data_points:
                for pair in point.attributes:
                    if pair.key == "kc.contract":
                        pair.value.string_value = name
        core.metrics(request, now + 40)
    real, alone, within = getattr(owner, call), Core._alone, [""]

    def named(self: Core, name: str, *args: Any) -> Any:
        within[0] = name
        return alone(self, name, *args)

    def faulty(*args: Any, **options: Any) -> Any:
        if within[0] == "policy":
            raise OverflowError("intermediate overflow in fsum")
        return real(*args, **options)

    monkeypatch.setattr(Core, "_alone", named)
    with monkeypatch.context() as patched:
        patched.setattr(owner, call, faulty)
        core.tick(now + 40)
    assert set(core.evaluator.faults.present) == {"policy"}
    assert core.evaluator.faults.counts["policy"] >= 1
    state = core.escalation
    judged = (owner, call) in {(CellHistory, "write"), (EventLog, "changed")}
    assert len(state.policies["other"].firing) == 2
    if not judged:
        assert state.policies["policy"] == before.policies["policy"]
        assert state.incidents.get("policy", ()) == ()
        assert {route.contract for route in core.decisions.routes} == {"other"}
        assert {message.contract for message in core.outbox.due(now + 40)} == {"other"}
        assert {silence.contract for silence in state.people.silences} == {"policy"}
    kinds = {event.kind for event in core.events.newest(limit=50) if event.contract == "policy"}
    assert kinds & {"firing", "unsilenced"} == ({"firing", "unsilenced"} if judged else set())
    assert ("verdict" in kinds) is not judged
    core.tick(now + 41)
    assert core.evaluator.faults.present == {}
    assert len(core.escalation.policies["policy"].firing) == 2
    assert {message.contract for message in core.outbox.due(now + 41)} == {"policy", "other"}
    assert core.escalation.people.silences == ()


def many(contract: str, slice: str, count: int, points: int, now: float) -> ExportMetricsServiceRequest:
    """Delta points of as many observations each, all of them small, one stream each."""
    message = ExportMetricsServiceRequest()
    metric = message.resource_metrics.add().scope_metrics.add().metrics.add(name="kc.drift.tv_token", unit="1")
    metric.exponential_histogram.aggregation_temporality = 1
    names = {"kc.contract": contract, "kc.slice": slice, "kc.kernel.train": "t" * 12, "kc.kernel.inference": "i" * 12}
    for number in range(points):
        point = metric.exponential_histogram.data_points.add(
            start_time_unix_nano=int((now - 1) * 1e9), time_unix_nano=int(now * 1e9), count=count, zero_count=count
        )
        point.sum = 0.0
        for name, value in {**names, "x": str(number)}.items():
            point.attributes.add(key=name).value.string_value = value
    return message


@pytest.mark.slow
def test_counts_that_cannot_be_are_refused_before_they_overflow(contract, open_file, drift):
    """Of one point, and of many together; what one contract's sender says never stops what is judged of the other."""
    evil = Contract.model_validate({**contract.model_dump(by_alias=True), "metadata": {**OTHER, "name": "evil"}})
    now = time.time()
    core = Core([contract, evil], open_file(), external_url="", now=now)
    core.tick(now)
    assert core.metrics(many("evil", "all", 2**44, 3, now), now).rejected == 3
    taken = 0
    for step in range(5):
        at = now + step / 1000
        answer = core.metrics(many("evil", "all", 2**44 - 1, 1000, at), at)
        taken += 1000 - answer.rejected
        core.metrics(drift(0.3), at)
        core.tick(at)
        assert core.evaluator.faults.present == {}
    assert taken == 2**56 // (2**44 - 1)
    assert "points count more observations than there can be" in answer.message
    assert {row.cell.contract for row, _ in core.history.cells() if row.status is Status.FAIL} == {"policy"}
    windows = windows_of(core.evaluator, at, 3600.0)
    assert [window.total for (name, _), window in windows.items() if name == "evil"] == [taken * (2**44 - 1)]


def test_what_cannot_be_saved_of_a_contract_is_its_own(contract, tmp_path, monkeypatch):
    """The others are judged, saved and there after a restart; it is shown, tried again, and saved when that works."""
    other = Contract.model_validate({**contract.model_dump(by_alias=True), "metadata": OTHER})
    now, real = time.time(), EvaluatorStore._save_streams
    connection = open_state(tmp_path / "state.sqlite")
    core = Core([contract, other], connection, external_url="", now=now)
    for name in ("policy", "other"):
        core.metrics(many(name, "all", 500, 1, now), now)

    def faulty(self: EvaluatorStore, name: str, state: ContractState) -> None:
        real(self, name, state)
        if name == "policy":
            raise struct.error("argument out of range")

    with monkeypatch.context() as patched:
        patched.setattr(EvaluatorStore, "_save_streams", faulty)
        core.tick(now)
        core.tick(now + 1)
        assert core.evaluator.faults.present == {"policy": "saving fails for its state: error: argument out of range"}
    assert {verdict.cell.contract for verdict, _ in core.history.cells()} == {"policy", "other"}

    def kept() -> set[str]:
        again = Evaluator([contract, other])
        EvaluatorStore(connection).restore(again)
        return {name for name, state in again.states.items() if state.series}

    assert kept() == {"other"}
    core.tick(now + 2)
    assert core.evaluator.faults.present == {}
    assert kept() == {"policy", "other"}
    connection.close()
