"""People and the evaluator: acknowledge, silence, pin over the API, each with who and why, and what each changes."""

import json
import time
from collections.abc import Callable

import pytest
from starlette.testclient import TestClient

from kc_otel.client.router import Router
from kc_otel.contract.words import moment
from kc_otel.serve import people_orders as people
from kc_otel.serve.api.shapes import refusals
from kc_otel.serve.core import Core
from tests.tools.api import client_of

SIGNED = {"by": "ada", "why": "known false alarm"}


@pytest.fixture
def failing(make_core: Callable[..., Core], drift: Callable) -> Core:
    """A core whose contract is broken, and which has not evaluated it yet."""
    core = make_core()
    core.metrics(drift(0.3, shuts_down=False))
    return core


@pytest.fixture
def client(failing: Core) -> TestClient:

    return client_of(failing)


def events(core: Core, kind: str) -> list:
    return [event for event in core.events.newest(limit=1000) if event.kind == kind]


def bodies(core: Core) -> list[dict]:
    return [json.loads(message.body) for message in reversed(core.outbox.messages())]


@pytest.mark.slow
def test_an_acknowledgement_is_shown_and_stops_reminders(client, failing):
    now = time.time()
    failing.tick(now)
    taken = client.post("/api/v1/alerts/acknowledge", json={"contract": "policy", "slice": "code", **SIGNED}).json()
    alerts = {alert["slice"]: alert for alert in client.get("/api/v1/alerts").json()["alerts"]}
    assert taken["fingerprints"] == [alerts["code"]["fingerprint"]]
    assert {alert["phase"] for alert in alerts.values()} == {"firing"}
    assert alerts["all"]["acknowledged"] is None
    again = client.post("/api/v1/alerts/acknowledge", json={"contract": "policy", "slice": "code", **SIGNED})
    assert (again.status_code, "acknowledged already, by ada" in again.text) == (404, True)
    acknowledged = alerts["code"]["acknowledged"]
    assert {name: acknowledged[name] for name in SIGNED} == SIGNED
    (event,) = events(failing, "acknowledged")
    assert event.data["message"] == "ada acknowledged token-tv on code: known false alarm"
    (held,) = client.get("/api/v1/overview").json()["in_force"]
    assert held["text"] == "ada is at work on token-tv on code (known false alarm)"

    for minutes in range(1, 251):  # the window is a minute, and the clock may count no more at once
        failing.tick(now + 60 * minutes)
        failing.metrics  # noqa: B018 - nothing more is received; the verdict turns NO_DATA, which holds the alert
    assert [body["kernelContract"]["reason"] for body in bodies(failing)] == ["firing", "reminder"]
    assert [alert["labels"]["slice"] for alert in bodies(failing)[1]["alerts"]] == ["all"]


@pytest.mark.slow
def test_a_silence_mutes_people_and_nothing_else(client, failing):
    said: list[str] = []
    now = time.time()
    made = client.post("/api/v1/silences", json={"contract": "policy", "until": now + 100, **SIGNED}).json()
    failing.events.announce = lambda announcement: said.append(announcement.message)
    failing.tick(now)
    assert failing.outbox.messages() == ()
    assert not [message for message in said if "broken" in message]
    assert {route.slice for route in failing.decisions.routes} == {"all", "code"}
    assert "halt" in {directive.kind for directive in failing.decisions.directives}
    assert {tuple(event.data["silenced"]) for event in events(failing, "firing")} == {(made["id"],)}
    due = [action for event in events(failing, "firing") for action in event.data["actions"]]
    assert "halt" in due
    assert not [action for action in due if "webhook" in action or action == "notify"]
    assert client.get("/api/v1/silences").json()["silences"] == [made]
    held = {entry["kind"]: entry for entry in client.get("/api/v1/overview").json()["in_force"]}["silence"]
    assert held["text"] == "every clause on every slice is silenced by ada (known false alarm)"
    assert (held["id"], held["until"]) == (made["id"], made["until"])
    assert {tuple(alert["silenced"]) for alert in client.get("/api/v1/alerts").json()["alerts"]} == {(made["id"],)}

    failing.tick(now + 101)
    (body,) = bodies(failing)
    assert body["kernelContract"]["reason"] == "silence-ended"
    assert len(body["alerts"]) == 2
    assert "has ended" in events(failing, "unsilenced")[0].data["message"]
    assert len([message for message in said if message.endswith("still: a silence has ended")]) == 2


def test_a_pin_wins_and_is_kept(client, failing):
    failing.tick(time.time())
    version = failing.decisions.version
    pin = {"contract": "policy", "slice": "all", "kernel": "inference-kernel", **SIGNED}
    assert client.post("/api/v1/decisions/pin", json=pin).json() == {"changed": 1, "version": version + 1}
    assert Router.from_table(failing.decisions).choose("policy", ["code"]) == "inference-kernel"
    (held,) = client.get("/api/v1/overview").json()["in_force"]
    assert held["text"] == "all traffic is pinned to the inference kernel by ada (known false alarm)"
    unpin = {"contract": "policy", **SIGNED}
    assert client.post("/api/v1/decisions/unpin", json=unpin).json() == {"changed": 1, "version": version + 2}
    assert Router.from_table(failing.decisions).choose("policy", ["code"]) == "train-kernel"
    assert [event.data["by"] for event in (*events(failing, "pinned"), *events(failing, "unpinned"))] == ["ada", "ada"]
    assert client.post("/api/v1/decisions/unpin", json=unpin).status_code == 404


def test_a_pin_that_ends_by_its_time_is_recorded(failing):
    now = time.time()
    people.pin(failing, "policy", "code", "train-kernel", now + 10, "ada", "a test", now)
    failing.tick(now + 9)
    assert len(failing.decisions.pins) == 1
    failing.tick(now + 10)
    assert failing.decisions.pins == ()
    assert events(failing, "unpinned")[0].data["message"] == ("the pin of code to train-kernel by ada has ended")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("alerts/acknowledge", {"contract": "nope"}, 404, "there are policy"),
        ("alerts/acknowledge", {"contract": "policy", "clause": "token-tw"}, 404, "there are token-tv, input"),
        ("alerts/acknowledge", {"contract": "policy", "slice": "prose"}, 404, "there are all, code"),
        ("alerts/acknowledge", {"contract": "policy"}, 404, "no such alert fires"),
        ("silences", {"contract": "policy", "until": 5.0}, 422, "not a time in the future"),
        ("silences", {"contract": "policy", "until": 9e9, "by": ""}, 422, "must not be blank"),
        ("silences", {"contract": "policy"}, 422, "until"),
        ("silences", {"contract": "policy", "until": 9e9, "slize": "code"}, 422, "slize"),
        ("silences/nine/end", {"why": None}, 422, "why"),
        ("decisions/pin", {"contract": "policy", "kernel": "fp8"}, 422, "train-kernel"),
        ("decisions/pin", {"contract": "policy", "slice": "prose", "kernel": "train-kernel"}, 404, "no slice"),
        ("decisions/pin", {"contract": "policy", "kernel": "train-kernel", "until": 5}, 422, "the past"),
        ("decisions/unpin", {"contract": "policy", "by": " "}, 422, "must not be blank"),
        ("decisions/pin", {"contract": "policy", "kernel": "train-kernel", "why": " "}, 422, "not be blank"),
    ],
)
def test_what_cannot_be_meant_is_refused(client, failing, path, body, status, said):
    before = failing.escalation
    signed = {name: value for name, value in (SIGNED | body).items() if value is not None}
    answer = client.post(f"/api/v1/{path}", json=signed)
    assert answer.status_code == status
    assert said in json.dumps(answer.json())
    assert failing.escalation == before


def test_an_endpoint_that_answered_410_is_sent_nothing_until_the_evaluator_restarts(failing, client, make_core):
    """The page and the metrics say since when; nothing is sent, whatever comes, and nothing is lost."""
    now = time.time()
    failing.tick(now)
    (message,) = failing.outbox.due(now)
    failing.outbox.answered(message.id, now, 410, "410 Gone")
    assert failing.outbox.due(now + 3600) == ()
    (incident,) = client.get("/api/v1/overview").json()["incidents"]
    said = f"; pager answered HTTP 410 at {moment(now)[:16]} UTC and is sent nothing more"
    assert any(action["text"].endswith(said) for action in incident["actions"])
    assert 'kc_outbox_disabled_seconds{kc_endpoint="pager"} ' in client.get("/metrics").text
    again = make_core(failing.connection)
    assert [due.id for due in again.outbox.due(now + 3600)] == [message.id]
    assert again.outbox.status()[0].disabled_at is None


def test_a_refused_field_is_said_in_plain_words():
    error = {"loc": ("body", "until"), "msg": "Input should be greater than 0"}
    assert refusals([error]) == "until: must be greater than 0"
