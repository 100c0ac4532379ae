"""What locate and remedy found stands on the incident: in the API, in events, in the next message, after a restart."""

import hashlib
import json
import time
from collections import Counter

import pytest
from starlette.testclient import TestClient

from kc_otel.serve.access.site_guard import GuardedSite
from kc_otel.serve.webhooks.endpoints import pagerduty_event, slack_message
from tests.tools.access import access_of, bearer
from tests.tools.api import api_of, client_of

FOUND = {
    "kind": "locate",
    "slice": "code",
    "text": "first divergence: layer 3, qkv_proj, module layers.3.qkv <!channel>",
    "by": "ada",
    "evidence": {"findings": [1, 2], "floor": "inf"},
}


def attached(core, **changed):
    (incident,) = core.incidents()
    return client_of(core).post(f"/api/v1/incidents/{incident.id}/diagnoses", json=FOUND | changed)


def last_body(core):
    return json.loads(core.outbox.messages()[0].body)


def test_what_was_found_is_on_the_incident_with_its_evidence(core):
    """The evidence is what its digest says; the list of incidents and the overview have the sentence too."""
    answer = attached(core)
    assert answer.status_code == 200
    client, (incident,) = client_of(core), core.incidents()
    for path in (f"/api/v1/incidents/{incident.id}", "/api/v1/incidents", "/api/v1/overview"):
        got = client.get(path).json()
        (found,) = got.get("incidents", [got])[0]["diagnoses"]
        assert (found["text"], found["by"], found["slice"]) == (FOUND["text"], "ada", "code")
    evidence = client.get(f"/api/v1/incidents/{incident.id}/diagnoses/{found['evidence']}")
    assert evidence.json() == FOUND["evidence"]
    assert hashlib.sha256(evidence.content).hexdigest() == found["evidence"]
    (event,) = [candidate for candidate in core.events.newest(limit=100) if candidate.kind == "locate"]
    assert event.message == f"ada on incident {incident.id}: {FOUND['text']}"


@pytest.mark.slow
def test_it_survives_a_restart_and_the_end_of_the_incident(make_core, drift, open_file, tmp_path):
    """While it lasts, and when it is over; it can be attached then, too."""
    first = make_core(open_file(tmp_path / "state.db"))
    first.metrics(drift(0.3))
    now = time.time()
    first.tick(now)
    (incident,) = first.incidents()
    digest = attached(first).json()["evidence"]
    first.connection.close()
    second = make_core(open_file(tmp_path / "state.db"))
    assert [diagnosis.text for diagnosis in second.incident(incident.id).diagnoses] == [FOUND["text"]]
    assert json.loads(second.past.evidence(incident.id, digest)) == FOUND["evidence"]
    second.past.end_others((), now + 1)
    second.escalation = second._store.begin({}, frozenset(), now + 1)
    assert second.incidents() == ()
    client = client_of(second)
    path = f"/api/v1/incidents/{incident.id}/diagnoses"
    assert client.post(path, json=FOUND | {"kind": "remedy"}).status_code == 200
    assert [diagnosis["kind"] for diagnosis in client.get(f"/api/v1/incidents/{incident.id}").json()["diagnoses"]] == [
        "locate",
        "remedy",
    ]
    assert second.incidents() == ()


@pytest.mark.slow
def test_the_next_message_says_it(make_core, drift):
    """In our own body with a link, in Slack's with its control characters escaped, in all that others read."""
    core = make_core()
    core.metrics(drift(0.3, shuts_down=False))
    core.tick(time.time())
    digest = attached(core).json()["evidence"]
    (incident,) = core.incidents()
    before = len(core.outbox.messages())
    for minutes in range(1, 251):
        core.tick(time.time() + 60 * minutes)
    assert len(core.outbox.messages()) == before + 1
    body = last_body(core)
    (found,) = body["kernelContract"]["incident"]["diagnoses"]
    assert found["url"] == f"http://evaluator/api/v1/incidents/{incident.id}/diagnoses/{digest}"
    assert "&lt;!channel&gt;" in json.dumps(slack_message(body))
    assert "<!channel>" not in json.dumps(slack_message(body))
    assert pagerduty_event(body, "key")["payload"]["custom_details"]["diagnoses"][0]["text"] == FOUND["text"]


@pytest.mark.slow
def test_what_cannot_be_kept_is_refused(core):
    """Of an unknown slice or kind, with numbers that JSON has not, without words; nothing is written."""
    for changed, status in (
        ({"slice": "elsewhere"}, 404),
        ({"kind": "guess"}, 422),
        ({"text": " "}, 422),
        ({"by": ""}, 422),
    ):
        assert attached(core, **changed).status_code == status, changed
    (incident,) = core.incidents()
    body = json.dumps(FOUND).replace('"inf"', "Infinity")
    client = client_of(core)
    said = client.post(
        f"/api/v1/incidents/{incident.id}/diagnoses", content=body, headers={"content-type": "application/json"}
    )
    assert said.status_code == 422
    assert incident.diagnoses == core.incidents()[0].diagnoses == ()


@pytest.mark.slow
def test_only_the_newest_are_kept_and_the_same_is_kept_once(core):
    """A worker that repeats itself fills neither the page nor the disk; evidence goes with what it was of."""
    for number in range(12):
        attached(core, evidence={"number": number})
        attached(core, evidence={"number": number})
    (incident,) = core.incidents()
    assert len(incident.diagnoses) == 10
    kept = core.connection.execute("SELECT evidence FROM diagnoses").fetchall()
    assert sorted(json.loads(text)["number"] for (text,) in kept) == list(range(2, 12))


def test_a_token_for_diagnoses_is_good_for_nothing_else(core, tmp_path):
    """May attach to incidents, and pins nothing."""
    access = access_of(tmp_path, worker="read diagnose", reader="read")
    site = GuardedSite(access, api_of(core), Counter())
    client, (incident,) = TestClient(site), core.incidents()

    def ask(who, where, body):
        return client.post(where, json=body, headers=bearer(who)).status_code

    attach, pin = f"/api/v1/incidents/{incident.id}/diagnoses", "/api/v1/decisions/pin"
    pinned = {"contract": "policy", "slice": "code", "kernel": "train-kernel", "by": "ada", "why": "why"}
    assert [ask(who, attach, FOUND) for who in ("worker", "reader")] == [200, 403]
    assert ask("worker", pin, pinned) == 403
    (found,) = core.incidents()[0].diagnoses
    assert found.by == "worker (as ada)"
    assert client.get(f"{attach}/{found.evidence}", headers=bearer("reader")).status_code == 200
