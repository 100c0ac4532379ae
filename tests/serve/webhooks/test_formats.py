"""Webhooks in other receivers' formats, each as its own documentation describes it."""

import json
from dataclasses import replace

import pytest

from kc_otel.judge.escalation.webhook_body import encode
from kc_otel.judge.incidents.incident import IncidentState
from kc_otel.judge.incidents.incident_lifecycle import follow
from kc_otel.judge.recorders import KernelInfo
from kc_otel.serve.webhooks.endpoints import WebhookEndpoint
from tests.tools.bodies import body_of
from tests.tools.escalations import advanced, tick_of

AT = 1_700_000_000.0


@pytest.fixture
def contract(make_contract):
    return make_contract([{"on": "fail", "severity": "critical", "do": [{"webhook": "pager"}]}])


def begun_of(contract, verdicts):
    """The policy after these verdicts, what fires, and the incident that begins."""
    state, fired = advanced(contract, verdicts, AT)
    (begun,) = follow(tick_of(contract, verdicts, AT), (), state.firing)
    return state, fired, begun


@pytest.fixture
def stored(contract, make_verdict):
    """The bodies of a firing and of its resolve, as the outbox holds them."""
    slices = ("code", "prose")
    failing = [make_verdict("FAIL", slice=slice) for slice in slices]
    state, fired = advanced(contract, failing, AT)
    _, resolved = advanced(contract, [make_verdict("PASS", slice=slice) for slice in slices], AT + 60, state)
    return [
        encode(body_of(contract, transition, external_url="https://kc.example/")) for transition in (fired, resolved)
    ]


def sent(format, stored, **options):
    _, body = WebhookEndpoint("pager", "https://hooks.example/x", format=format, **options).request(stored, "msg_1", AT)
    return json.loads(body)


def test_pagerduty_gets_an_event_of_an_alert_with_one_key_for_start_and_end(stored):
    trigger, resolve = (sent("pagerduty", body, key="R" * 32) for body in stored)
    assert (trigger["event_action"], resolve["event_action"]) == ("trigger", "resolve")
    assert trigger["dedup_key"] == resolve["dedup_key"]
    assert trigger["routing_key"] == "R" * 32
    payload = trigger["payload"]
    assert payload["severity"] in {"critical", "error", "warning", "info"}
    of = f"for {'b' * 12} against {'a' * 12}"
    assert payload["summary"] == f"policy-7b: token-tv is broken on slice code {of}"
    assert payload["custom_details"]["lower"] == 0.0101
    assert {link["text"] for link in trigger["links"]} == {"cell", "runbook"}
    assert "payload" not in resolve


def test_slack_gets_a_message_whose_names_cannot_ping_anybody(stored):
    firing, resolved = (sent("slack", body) for body in stored)
    of = f"for {'b' * 12} against {'a' * 12}"
    assert firing["text"] == f"[firing] policy-7b: token-tv is broken on slice code {of}, and 1 more"
    assert firing["attachments"][0]["color"] != resolved["attachments"][0]["color"]
    hostile = json.loads(stored[0])
    hostile["alerts"][0]["annotations"]["summary"] = "<!channel> & all"
    assert "<!channel>" not in json.dumps(sent("slack", encode(hostile)))


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:4320", "http://[::1]:4320", "http://0.0.0.0:4320", "http://localhost"]
)
def test_links_that_open_nowhere_else_say_which_option_is_missing(contract, make_verdict, url):
    _, fired, begun = begun_of(contract, [make_verdict("FAIL")])
    for base, said in ((url, True), ("https://kc.example", False)):
        body = body_of(contract, fired, external_url=base, incident=begun, lasting=1)
        assert ("--external-url" in body["alerts"][0]["annotations"]["description"]) == said
        assert ("--external-url" in json.dumps(sent("slack", encode(body)))) == said
        assert ".;" not in json.dumps(sent("slack", encode(body)))


def test_an_update_in_which_nothing_new_fires_begins_with_its_state_and_headline(contract, make_verdict):
    verdicts = [make_verdict("FAIL", slice="a"), make_verdict("FAIL", slice="b")]
    state, _, begun = begun_of(contract, verdicts)
    later = [make_verdict("PASS", slice="a"), make_verdict("FAIL", slice="b")]
    _, ended = advanced(contract, later, AT + 60, state)
    body = body_of(contract, ended, reason="update", incident=begun, lasting=1)
    event = sent("pagerduty", encode(body), key="R" * 32)
    assert event["payload"]["summary"].startswith("policy-7b: Broken. token-tv is above its limit on ")


def test_an_alert_says_since_when_its_cell_is_broken_not_since_when_its_step_fires(make_contract, make_verdict):
    pager = {"on": "fail", "for": "5m", "severity": "critical", "do": [{"webhook": "pager"}]}
    contract = make_contract([{"on": "fail", "do": ["notify"]}, pager])
    verdicts = [make_verdict("FAIL")]
    state, _, begun = begun_of(contract, verdicts)
    _, fired = advanced(contract, verdicts, AT + 300, state)
    body = body_of(contract, fired, incident=begun, lasting=1)
    assert "Since 2023-11-14 22:13:20 UTC." in body["alerts"][0]["annotations"]["description"]


def test_a_message_about_what_is_contained_does_not_say_that_users_get_it(contract, make_verdict):
    """Its window still holds the breach; no request that anybody measures reaches the kernel."""
    _, fired, begun = begun_of(contract, [make_verdict("FAIL")])
    contained = replace(begun, state=IncidentState.CONTAINED)
    ended = replace(contained, cells=tuple(replace(cell, until=AT) for cell in contained.cells))
    told = body_of(contract, [fired[0].resolved(AT)], incident=ended, lasting=1, lifting=["kc-otel route resume"])
    lift = "Now: once the kernel is trusted again or serves nobody, run `kc-otel route resume`."
    assert told["kernelContract"]["next"] == lift
    update = encode(body_of(contract, [fired[0].resolved(AT)], reason="update", incident=contained, lasting=1))
    assert sent("slack", update)["text"].startswith("Update: Contained: policy-7b: token-tv is above its limit on code")
    assert sent("slack", update)["attachments"][0]["color"] == "#ff9f1c", "red is what users get"
    assert ": Contained. token-tv is" in sent("pagerduty", update, key="R" * 32)["payload"]["summary"]
    for incident, answered in ((begun, True), (contained, False)):
        body = body_of(contract, fired, incident=incident, lasting=1)
        for text in (body["kernelContract"]["impact"], body["alerts"][0]["annotations"]["description"]):
            assert text.startswith("Routers keep requests on slice code away from the kernel") is not answered


def test_a_message_names_the_slices_whose_last_verdict_shows_the_breach(contract, make_verdict):
    """Another slice of the incident is contained, say, and its alert still fires."""
    broken, held = make_verdict("FAIL"), make_verdict("FAIL", slice="all")
    _, fired, begun = begun_of(contract, [broken, held])
    begun = replace(begun, cells=tuple(replace(cell, held=cell.slice == "all") for cell in begun.cells))
    undecided = [replace(edge, verdict=make_verdict("INCONCLUSIVE")) for edge in fired if edge.cell.slice == "all"]
    shown = [edge for edge in fired if edge.cell.slice == "code"]
    for edges, said in ((shown + undecided, "the tokens on slice code would differ"), (undecided, "on all traffic")):
        assert said in body_of(contract, edges, incident=begun, lasting=2)["kernelContract"]["impact"]


def test_only_an_end_that_is_proven_is_green_in_slack(contract, make_verdict):
    state, _, begun = begun_of(contract, [make_verdict("FAIL")])
    passing = [make_verdict("PASS")]
    state, ended = advanced(contract, passing, AT + 60, state)
    (proven,) = follow(tick_of(contract, passing, AT + 60), [begun], state.firing)
    left = [replace(begun, state=IncidentState.RESOLVED, run_ended=run_ended) for run_ended in (False, True)]
    raised = [replace(cell, loosened_to=0.5) for cell in proven.cells]
    left.append(replace(proven, state=IncidentState.BROKEN, ordered_at=AT, cells=tuple(raised)))
    left.append(replace(begun, ordered_at=AT))
    bodies = [body_of(contract, ended, reason="resolved", incident=incident) for incident in (proven, *left)]
    green, *others = (sent("slack", encode(body))["attachments"][0]["color"] for body in bodies)
    for incident, said in ((proven, True), (begun, False)):  # begun is broken on another slice
        body = body_of(contract, ended, reason="resolved", incident=incident, lifting=["kc-otel route resume"])
        assert ("once the kernel is trusted again" in json.dumps(body)) is said
    at = "2023-11-14 22:13 UTC"
    assert [body["kernelContract"]["incident"]["state_text"] for body in bodies[1:]] == [
        "Closed without proof of recovery", "Ended",
        f"No longer measured as broken: it was closed by a changed limit, and the route ordered at {at} remains",
        f"Broken; routing to the training kernel was ordered at {at}",
    ]  # fmt: skip
    assert green not in others


def test_an_incident_is_one_event_and_one_message_from_its_first_to_its_last(contract, make_verdict):
    verdicts = [make_verdict("FAIL", slice=f"s{n}") for n in range(45)]
    state, fired, begun = begun_of(contract, verdicts)
    passing = [make_verdict("PASS", slice=f"s{n}") for n in range(45)]
    state, ended = advanced(contract, passing, AT + 60, state)
    (over,) = follow(tick_of(contract, passing, AT + 60), [begun], state.firing)
    kernels = [KernelInfo("inference", "b" * 12, {"engine": "vllm", "engine.version": "0.32", "dtype": "fp8"}, AT)]
    bodies = [
        encode(
            body_of(
                contract, edges, external_url="https://kc.example/", reason=reason,
                incident=incident, lasting=lasting, kernels=kernels,
            )
        )
        for edges, reason, incident, lasting in (
            (fired[:20], "firing", begun, 20), (fired[20:], "update", begun, 45), (ended, "resolved", over, 0),
        )
    ]  # fmt: skip
    events = [sent("pagerduty", body, key="R" * 32) for body in bodies]
    assert [event["event_action"] for event in events] == ["trigger", "trigger", "resolve"]
    assert {event["dedup_key"] for event in events} == {f"kc-otel/policy-7b/{begun.id}"}
    payload = events[1]["payload"]
    where = f"on s0, s1, s10 and 42 more for vllm 0.32 fp8 ({'b' * 12}) against {'a' * 12}"
    suffered = (
        "policy-7b: Requests on slices s0, s1, s10 and 42 more are answered by a kernel that has drifted too far from "
        "the trained one."
    )
    assert payload["summary"] == (
        f"{suffered} token-tv is above its limit {where}, since 2023-11-14 22:13 UTC. As of 2023-11-14 22:13 UTC."
    )
    assert (payload["source"], payload["severity"]) == (f"vllm 0.32 fp8 ({'b' * 12})", "critical")
    assert events[0]["links"][0] == {"href": f"https://kc.example/#/incident/{begun.id}", "text": "incident"}
    whole = [json.loads(body) for body in bodies]
    assert {body["groupKey"] for body in whole} == {f'{{}}:{{contract="policy-7b", incident="{begun.id}"}}'}
    assert [body["notification_reason"] for body in whole] == ["firing", "update", "resolved"]
    first, update, last = (sent("slack", body) for body in bodies)
    assert first["text"] == f"Broken: {suffered}"
    assert update["text"].startswith("Update: Broken: policy-7b: ")
    assert last["text"] == f"Resolved: policy-7b: token-tv was above its limit {where}"
    (attachment,) = first["attachments"]
    assert f"<https://kc.example/#/incident/{begun.id}|Incident>" in json.dumps(attachment["blocks"])
    said = json.dumps(attachment["blocks"])
    order = ["drifted too far", "is above its limit", "Since", "*Now*: ", "|Incident>", "confidence interval"]
    assert [said.index(part) for part in order] == sorted(said.index(part) for part in order)
    assert "vllm 0.32 fp8" in said
    evidence = whole[0]["kernelContract"]["evidence"]
    assert evidence
    assert evidence in json.dumps(attachment["blocks"])
    assert payload["custom_details"]["evidence"] == evidence


def test_a_message_says_when_it_was_written(contract, make_verdict):
    """It may be delivered an hour later, and what it says may have changed by then."""
    _, fired, begun = begun_of(contract, [make_verdict("FAIL", slice="code")])
    said = "As of 2023-11-14 23:30 UTC."
    for incident in (begun, None):
        body = body_of(contract, fired, incident=incident, lasting=1, at=AT + 4600)
        assert body["alerts"][0]["annotations"]["description"].endswith(said)
        for text in (sent("slack", encode(body)), sent("pagerduty", encode(body), key="R" * 32)):
            assert json.dumps(text).count(said) == 1
        earlier = {
            **body,
            "kernelContract": {name: of for name, of in body["kernelContract"].items() if name != "as_of"},
        }
        assert sent("slack", encode(earlier)), "a message that an earlier release has left in the outbox"
