"""What the page is made of: its files, its headers, the overview and the past that it shows."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

import kc_otel.serve.page as page_box
from kc_otel.contract.words import moment
from kc_otel.judge.escalation.alerts import PolicyState
from kc_otel.judge.escalation.webhook_body import encode
from kc_otel.judge.incidents.incident import IncidentState
from kc_otel.judge.verdict import Evaluation, Status
from kc_otel.serve import people_orders
from kc_otel.serve.core import Core
from tests.tools.api import client_of, route_kept

pytestmark = pytest.mark.slow

UPLOT = "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"


def test_the_decision_table_keeps_its_own_tag(client: TestClient, core: Core) -> None:
    """A router that names the tag it was given waits for the next table, and is answered that its own is in force."""
    tag = client.get("/api/v1/decisions").headers["etag"].strip('"')
    assert tag == core.decisions.tag
    version = core.decisions.version
    assert client.get("/api/v1/decisions", params={"after": version, "tag": tag}).status_code == 204
    assert client.get("/api/v1/decisions", params={"after": version, "tag": "of-another-run"}).status_code == 200


def test_decisions_and_verdicts_say_how_long_ago_anything_was_evaluated(client: TestClient, core: Core) -> None:
    """A router and a trainer's log tell from it whether anybody watches."""
    core.evaluated_at = time.time() - 40.0
    known = {"after": core.decisions.version, "tag": core.decisions.tag}
    for path, parameters in (("decisions", {}), ("decisions", known), ("verdicts", {})):
        assert 40 <= int(client.get(f"/api/v1/{path}", params=parameters).headers["age"]) < 100


def test_the_page_may_run_no_script_but_its_own(client: TestClient) -> None:
    """Its policy forbids inline scripts, eval and every other origin, and being framed."""
    answer = client.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["script-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert not [text for text in ("<script>", " onclick", "http://", "https://") if text in answer.text]
    assert policy["style-src"] == "'self'"


def test_every_file_of_the_page_is_served_and_nothing_else(client: TestClient) -> None:
    """Scripts and styles by name, of this version; no path leads out of the folder."""
    folder = Path(page_box.__file__).parent
    files = {path.name for path in folder.iterdir() if path.suffix in {".js", ".css", ".svg"}}
    assert {"main.js", "page.css", "icon.svg"} <= files
    for name in files:
        answer = client.get(f"/page/{name}")
        assert answer.status_code == 200
        assert answer.headers["cache-control"] == "no-cache"
    assert hashlib.sha256((folder / "uPlot.iife.min.js").read_bytes()).hexdigest() == UPLOT, "not release 1.6.32"
    assert client.get("/page/__init__.py").status_code == 404
    assert client.get("/page/..%2Fapi.py").status_code == 404


def test_the_overview_says_what_is_broken_since_when_for_whom_and_what_was_done(client: TestClient, core: Core) -> None:
    """In sentences and in numbers, with what is in force and what still waits."""
    answer = client.get("/api/v1/overview").json()
    (incident,) = answer["incidents"]
    assert incident["headline"] == "token-tv is above its limit on code and all traffic"
    assert incident["since"] == core.evaluated_at
    assert incident["slices"] == ["code", "all"]
    ((clause, text),) = incident["extents"]
    assert clause == "token-tv"
    assert "limit of 0.02" in text
    done = {action["kind"]: action for action in incident["actions"]}
    assert done["route"]["in_force"] is True
    assert done["halt"]["text"] == "trainers asked to halt"
    assert done["webhook"]["text"].startswith("1 message to pager waits since ")
    assert answer["counts"]["policy"] == {"FAIL": 2}
    assert answer["heard"] is True


def test_an_incident_has_an_address_and_a_list_has_those_that_are_over(client, core, monkeypatch):
    """By its id while it lasts and afterwards, with every cell; a list narrows by state, time and contract."""
    (listed,) = client.get("/api/v1/incidents").json()["incidents"]
    whole = client.get(f"/api/v1/incidents/{listed['id']}").json()
    assert [(cell["clause"], cell["slice"], cell["until"]) for cell in whole["cells"]] == [
        ("token-tv", "code", None), ("token-tv", "all", None),
    ]  # fmt: skip
    assert client.get("/api/v1/incidents", params={"contract": "another"}).status_code == 404
    now = time.time()
    people_orders.lift(core, "route", "policy", None, "ada", "patched", now)
    judged = core.evaluator.evaluate(now)["policy"].verdicts
    passing = tuple(replace(verdict, status=Status.PASS) for verdict in judged)
    monkeypatch.setattr(core.evaluator, "evaluate", lambda at, *_: {"policy": Evaluation(at, passing)})
    core.tick(now + 60)
    over = client.get(f"/api/v1/incidents/{listed['id']}").json()
    assert (over["state"], over["until"], over["headline"]) == (
        "resolved", now + 60, "token-tv was above its limit on code and all traffic",
    )  # fmt: skip
    assert "resumed" in {action["kind"] for action in over["actions"]}
    for query, expected in (({"state": "resolved"}, 1), ({"state": "contained"}, 0), ({"since": now + 9999}, 0)):
        found = client.get("/api/v1/incidents", params=query).json()["incidents"]
        assert len(found) == expected
    assert client.get("/api/v1/incidents/unknown").status_code == 404


@pytest.mark.parametrize(
    ("refused", "said"),
    [(False, "notified pager by webhook"), (True, "1 message to pager was given up: rejected or expired")],
)
def test_a_webhook_is_told_as_it_ended(client: TestClient, core: Core, refused: bool, said: str) -> None:
    """One that its receiver refused does not wait any more, and it did not arrive."""
    (message,) = core.outbox.due(time.time())
    if refused:
        core.outbox.answered(message.id, time.time(), 400, "HTTP 400")
    else:
        core.outbox.answered(message.id, 0.0, 204)
    core.tick(time.time())
    (incident,) = client.get("/api/v1/overview").json()["incidents"]
    assert [action["text"] for action in incident["actions"] if action["kind"] == "webhook"] == [said]


def test_later_messages_of_an_incident_are_told_beside_the_first(client: TestClient, core: Core) -> None:
    """The first was accepted; its line says how many wait, and so does the list of alerts."""
    (message,) = core.outbox.due(now := time.time())
    core.outbox.answered(message.id, 0.0, 204)
    (incident,) = core.escalation.incidents["policy"]
    for number, about in enumerate((incident.id, incident.id, "0" * 12)):
        core.outbox.enqueue("pager", "policy", encode({"incident": {"id": about}}), now + number + 1.0)
    core.outbox.answered(core.outbox.due(now + 2.0)[0].id, now + 2.0, 500, "HTTP 500")
    (seen,) = client.get("/api/v1/overview").json()["incidents"]
    wait = f"2 messages to pager wait since {moment(now + 1.0)[:16]} UTC"
    said = [action["text"] for action in seen["actions"] if action["kind"] == "webhook"]
    assert said == [f"notified pager by webhook; {wait}"]
    alerts = client.get("/api/v1/alerts").json()["alerts"]
    assert {tuple(alert["undelivered"]) for alert in alerts} == {(wait,)}


def test_before_any_data_nothing_is_broken(make_core: Callable[..., Core]) -> None:
    """A contract that nobody reports to yet is no incident, and the page is told that nobody was heard."""
    core = make_core()
    core.tick(time.time())
    answer = client_of(core).get("/api/v1/overview").json()
    assert answer["incidents"] == []
    assert answer["heard"] is False
    assert answer["counts"]["policy"] == {"NO_DATA": 2}


def test_a_breach_that_only_went_away_is_shown(core: Core) -> None:
    """With a metric of its own value, until a person closes all of it: an acknowledgement does not."""
    (before,) = core.incidents()
    unproven = replace(before.ended(before.since - 86400.0), state=IncidentState.UNPROVEN, gone=False)
    core.escalation = replace(
        core.escalation, incidents={"policy": (unproven,)}, policies={"policy": PolicyState("policy")}
    )
    client = client_of(core)
    (row,) = client.get("/api/v1/overview").json()["incidents"]
    assert (row["state"], row["state_text"]) == ("unproven", "Went away without proof of recovery")
    (line,) = [line for line in client.get("/metrics").text.splitlines() if line.startswith("kc_incident{")]
    assert line.endswith(" 0.0")
    wrong = {"contract": "policy", "by": "ada", "why": " "}
    assert client.post("/api/v1/alerts/acknowledge", json=wrong).status_code == 422
    said = wrong | {"why": "the run was killed"}
    refused = client.post("/api/v1/alerts/acknowledge", json=said)
    assert (refused.status_code, refused.json()["detail"]) == (
        404, f"no such alert fires; incident {before.id} went away without proof of recovery, and `--close` closes it"
    )  # fmt: skip
    assert core.incidents() == (unproven,)
    said["close"] = True
    assert client.post("/api/v1/alerts/acknowledge", json=said | {"slice": "code"}).status_code == 404, "not all of it"
    answer = client.post("/api/v1/alerts/acknowledge", json=said).json()
    assert answer == {"fingerprints": [], "closed": [before.id]}
    (event,) = [event for event in core.events.newest("policy", 1000) if event.kind == "closed"]
    assert event.data["message"] == f"ada closed incident {before.id}: the run was killed"


def test_an_acknowledgement_closes_nothing_and_closing_acknowledges_nothing(core: Core) -> None:
    """Also where one incident is broken and another went away: each order is about its own, or refused."""
    (before,) = core.incidents()
    gone = replace(before, id="0123456789ab", kernel_inference="c" * 12, state=IncidentState.UNPROVEN)
    core.escalation = replace(core.escalation, incidents={"policy": (before, gone)})
    client = client_of(core)
    order = {"contract": "policy", "by": "ada", "why": "it was killed"}
    closing = order | {"close": True}
    assert client.post("/api/v1/alerts/acknowledge", json=closing).json() == {"fingerprints": [], "closed": [gone.id]}
    assert core.people.acknowledgements == ()
    words = {incident.id: [word.kind for word in incident.words] for incident in core.incidents()}
    assert words == {before.id: [], gone.id: ["closed"]}
    first = client.post("/api/v1/alerts/acknowledge", json=order).json()
    assert (len(first["fingerprints"]), first["closed"]) == (len(core.policies["policy"].firing), [])
    assert [event.kind for event in core.events.newest("policy", 1000)][-2:] == ["closed", "acknowledged"]
    core.escalation = replace(core.escalation, incidents={"policy": (before,)})
    refused = client.post("/api/v1/alerts/acknowledge", json=closing)
    assert refused.status_code == 404
    assert refused.json()["detail"] == "no incident there went away without proof of recovery"


def test_points_that_are_not_judged_are_shown(make_core: Callable[..., Core], drift: Callable) -> None:
    """On the page, and as a metric, as of the last evaluation; health counts them without end."""
    core, now = make_core(), time.time()
    core.metrics(drift(0.3), now - 7200.0)
    core.tick(now - 7200.0)
    client = client_of(core)
    (row,) = client.get("/api/v1/overview").json()["missing"]
    assert (row["contract"], row["outcome"], row["senders"]) == ("policy", "future", 1)
    kernels = {kernel["version"] for kernel in client.get("/api/v1/contracts").json()["contracts"][0]["kernels"]}
    assert {row["kernel_train"], row["kernel_inference"]} <= kernels
    assert "(2h" in row["text"]
    (line,) = [line for line in client.get("/metrics").text.splitlines() if line.startswith("kc_evaluator_missing{")]
    assert 'kc_outcome="future"' in line
    assert line.endswith(" 1.0")


def test_a_route_that_outlives_its_cause_is_still_shown(make_core: Callable[..., Core], drift: Callable) -> None:
    """When the cells are gone with their kernel version, the route is in force all the same."""
    core, now = make_core(), time.time()
    core.metrics(drift(0.3))
    core.tick(now)
    route_kept(core, now + 60)
    core.tick(now + 3600)
    answer = client_of(core).get("/api/v1/overview").json()
    contained, *others = answer["incidents"]
    assert (contained["status"], contained["state"], contained["until"]) == ("FAIL", "contained", None)
    assert [incident["status"] for incident in others] in ([], ["NO_DATA"])
    held = {entry["slice"] for entry in answer["in_force"]} | {cell["slice"] for cell in contained["cells"]}
    assert {"all", "code"} <= held


def test_the_past_of_a_cell_is_told_with_limit_and_samples(client: TestClient, core: Core) -> None:
    """Every pair of kernels has its own points; a period narrows them; a wrong name is answered with the right ones."""
    parameters = {"contract": "policy", "clause": "token-tv", "slice": "code"}
    answer = client.get("/api/v1/history", params=parameters).json()
    (series,) = answer["series"]
    ((at, estimate, lower, upper, limit, samples, status, evidence, _),) = series["points"]
    assert at == core.evaluated_at
    assert limit == 0.02 < lower <= estimate <= upper
    assert (samples, status, evidence) == (64 * 64, 3, 1.0)
    assert client.get("/api/v1/history", params=parameters | {"to": at - 1}).json()["series"] == []
    wrong = client.get("/api/v1/history", params=parameters | {"slice": "prose"})
    assert wrong.status_code == 404
    assert "all, code" in wrong.json()["detail"]


def test_the_past_of_a_cell_over_the_trainers_steps(make_core: Callable[..., Core], drift: Callable) -> None:
    """Each evaluation has the step that the trainer had told by then: in the API and in /metrics."""
    core = make_core()
    for offset, step in ((-2.0, 10), (-1.0, 30)):
        core.metrics(drift(0.3, step))
        core.tick(time.time() + offset)
    (cell, *_) = [verdict.cell for verdict, _ in core.history.cells() if verdict.cell.slice == "code"]
    parameters = {
        "contract": "policy", "clause": "token-tv", "slice": "code",
        "kernel_train": cell.kernel_train, "kernel_inference": cell.kernel_inference,
    }  # fmt: skip
    client = client_of(core)
    (series, *_) = client.get("/api/v1/history", params=parameters).json()["series"]
    assert [point[-1] for point in series["points"]] == [10, 30]
    pair = f'kc_kernel_inference="{cell.kernel_inference}",kc_kernel_train="{cell.kernel_train}"'
    assert f'kc_train_step{{kc_contract="policy",{pair}}} 30.0' in client.get("/metrics").text.replace("} ", "} ")


def test_the_evaluator_tells_how_it_is_doing(client: TestClient) -> None:
    health = client.get("/api/v1/health").json()
    assert health["points"]["accepted"] > 0
    assert health["outbox"][0]["endpoint"] == "pager"
    assert health["outbox"][0]["waiting"] == 1
    assert health["invalid"] == {"policy": {}}


def test_what_was_done_is_told_however_many_verdicts_came_after_it(client: TestClient, core: Core) -> None:
    """Cells near their limits fill the log of events; the overview and the page's timeline see past them."""
    for index in range(2500):
        core.events.record("policy", "verdict", {"message": "flip", "status": "PASS"}, time.time() + index / 1e6)
    core.tick(time.time())
    (incident,) = client.get("/api/v1/overview").json()["incidents"]
    assert {"route", "halt", "webhook"} <= {action["kind"] for action in incident["actions"]}
    events = client.get("/api/v1/events", params={"newest": 50, "verdicts": False}).json()["events"]
    assert events
    assert {event["kind"] for event in events} == {"firing"}


def test_long_answers_are_compressed(client: TestClient) -> None:
    answer = client.get("/page/page.css", headers={"accept-encoding": "gzip"})
    assert answer.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in client.get("/page/page.css", headers={"accept-encoding": "identity"}).headers
