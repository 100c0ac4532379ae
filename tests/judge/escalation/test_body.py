from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kc_otel.judge.escalation.alerts import ROLLED_BACK, People, PolicyState
from kc_otel.judge.escalation.escalate import AT_ONCE, MessageGroup, News, ToldAlert, group_messages
from kc_otel.judge.escalation.webhook_body import ROLLED_BACK_ALERT, encode, rfc3339, summary
from kc_otel.judge.incidents.incident import NOT_PROVEN, BrokenCell, Incident, IncidentAction, IncidentState
from kc_otel.judge.incidents.incident_lifecycle import follow
from kc_otel.judge.recorders import KernelInfo, kernel_names
from kc_otel.judge.verdict import FAULTS, Status
from tests.tools.bodies import body_of
from tests.tools.escalations import advanced, tick_of

AT = 1_700_000_000.0


@pytest.fixture(scope="module")
def contract(make_contract):
    return make_contract([{"on": "fail", "severity": "critical", "do": [{"webhook": "pager"}, "notify"]}])


@pytest.fixture(scope="module")
def edges(contract, make_verdict):
    fail = [make_verdict("FAIL", at=AT, evidence=1.0), make_verdict("FAIL", slice="all", at=AT, evidence=1.0)]
    state, firing = advanced(contract, fail, AT)
    _, resolved = advanced(contract, [make_verdict("PASS", at=AT + 90)], AT + 90, state)
    return firing, resolved


def test_body_is_alertmanager_version_4(contract, edges):
    body = body_of(contract, edges[0][1:], external_url="https://kc.example/")
    assert {name: type(value) for name, value in body.items()} == {
        "version": str, "groupKey": str, "truncatedAlerts": int, "status": str, "receiver": str, "groupLabels": dict,
        "commonLabels": dict, "commonAnnotations": dict, "externalURL": str, "alerts": list, "kernelContract": dict,
        "notification_reason": str,
    }  # fmt: skip
    assert (body["version"], body["status"], body["receiver"]) == ("4", "firing", "pager")
    (alert,) = body["alerts"]
    assert alert["labels"] == {
        "alertname": "KernelContractBroken", "contract": "policy-7b", "clause": "token-tv", "slice": "code",
        "kernel_train": "aaaaaaaaaaaa", "kernel_inference": "bbbbbbbbbbbb", "severity": "critical",
    }  # fmt: skip
    assert (alert["startsAt"], alert["endsAt"]) == ("2023-11-14T22:13:20.000Z", "0001-01-01T00:00:00Z")
    assert alert["annotations"]["runbook_url"] == "https://runbooks/kc"
    assert alert["generatorURL"] == "https://kc.example/#/cell/policy-7b/token-tv/code/aaaaaaaaaaaa/bbbbbbbbbbbb"
    assert body["commonLabels"] == alert["labels"]
    assert body["commonAnnotations"] == alert["annotations"]


def test_without_a_runbook_of_its_own_the_handbook_s_is_linked(contract, edges):
    without = contract.model_copy(update={"metadata": contract.metadata.model_copy(update={"runbook": ""})})
    for base, expected in (
        ("https://kc.example", "https://kc.example/handbook/on-call.html#kernelcontractbroken"),
        ("", None),
    ):
        (alert,) = body_of(without, edges[0][1:], external_url=base)["alerts"]
        assert alert["annotations"].get("runbook_url") == expected
    pages = Path(__file__).parents[3] / "kc_otel" / "handbook" / "pages" / "on-call.md"
    headings = {line.removeprefix("## ") for line in pages.read_text().splitlines()}
    assert {ROLLED_BACK_ALERT, *(fault.alert for fault in FAULTS.values())} <= headings


def test_description_says_the_numbers_in_plain_words(contract, edges):
    (alert,) = body_of(contract, edges[0][1:], done=["notified pager by webhook"])["alerts"]
    assert alert["annotations"]["summary"] == (
        "policy-7b: token-tv is broken on slice code for bbbbbbbbbbbb against aaaaaaaaaaaa"
    )
    assert alert["annotations"]["description"] == (
        "About 1.23% of the tokens on slice code would differ under the training kernel. Since 2023-11-14 22:13:20 "
        "UTC. Done: notified pager by webhook. Now: check for invalid input and stale weights, then roll the kernel "
        "version back or pin the slice to the training kernel. "
        "Mean of tv_token is 0.0123, between 0.0101 and 0.014 at 99% confidence, from 3,482 observations in the last "
        "5m; the limit is 0.004. On average, chance alone raises such an alert at most once in 30d in the whole "
        "contract. As of 2023-11-14 22:13 UTC."
    )


@pytest.mark.parametrize(
    ("begins", "said"),
    [
        ("recent observations are above", "recent observations are above it; the window still holds earlier ones"),
        ("earlier observations were above", "earlier observations were above it, and the breach is not cleared yet"),
    ],
)
def test_a_breach_that_the_window_averages_below_the_limit_is_told_as_such(contract, make_verdict, begins, said):
    """The numbers of the window alone would say that the alarm is false, and that fewer tokens differ than do."""
    numbers = {"estimate": 0.003, "lower": 0.0029, "upper": 0.0031, "reason": f"{begins} limit 0.004; estimate 0.003"}
    verdicts = [make_verdict("FAIL", at=AT, evidence=1.0, **numbers)]
    state, fired = advanced(contract, verdicts, AT)
    (begun,) = follow(tick_of(contract, verdicts, AT), (), state.firing)
    body = body_of(contract, fired, incident=begun, lasting=1)
    ((_, extent),) = begun.extents
    assert extent == f"0.003 on code against a limit of 0.004 (confidence interval 0.0029 to 0.0031); {said}"
    assert f"the limit is 0.004: {said}. " in body["alerts"][0]["annotations"]["description"]
    assert body["kernelContract"]["impact"].startswith("Requests on slice code are answered by a kernel that has")
    above = body_of(contract, advanced(contract, [make_verdict("FAIL", at=AT)], AT)[1])
    assert above["kernelContract"]["impact"].startswith("About 1.23% of the tokens on slice code")
    ((_, held),) = replace(begun, cells=(replace(begun.cells[0], held=True),)).extents
    assert f"0.003 on code at {rfc3339(AT)[:16].replace('T', ' ')} UTC against" in held
    assert held.endswith(said.replace(" are ", " were ").replace(" is ", " was ").replace("holds", "held"))


def test_a_body_says_what_its_fails_rest_on(contract, edges, make_verdict):
    said = [body_of(contract, transitions)["kernelContract"]["evidence"] for transitions in edges]
    assert said == ["On average, chance alone raises such an alert at most once in 30d in the whole contract.", ""]
    _, seen = advanced(contract, [make_verdict("FAIL", at=AT)], AT)
    body = body_of(contract, seen)
    assert body["kernelContract"]["evidence"].startswith("The observed value itself exceeds the limit")
    assert body["kernelContract"]["evidence"] in body["alerts"][0]["annotations"]["description"]


def test_contract_fields_follow_the_alerts(contract, edges):
    body = body_of(contract, edges[0])
    assert body["commonLabels"] == {
        name: value for name, value in body["alerts"][0]["labels"].items() if name != "slice"
    }
    assert body_of(contract, [*edges[1], edges[0][0]])["status"] == "firing", "while any alert does"
    extra = body["kernelContract"]
    assert (extra["name"], extra["version"], extra["hash"]) == ("policy-7b", 3, contract.hash)
    assert [cell["fingerprint"] for cell in extra["cells"]] == [alert["fingerprint"] for alert in body["alerts"]]
    cell = extra["cells"][1]
    assert cell["kernels"] == {"train": "aaaaaaaaaaaa", "inference": "bbbbbbbbbbbb"}
    assert (cell["limit"], cell["estimate"], cell["lower"], cell["upper"]) == (0.004, 0.0123, 0.0101, 0.014)
    assert cell["margin"] == pytest.approx(-0.0061)
    assert (cell["samples"], cell["actions"]) == (3482, [{"webhook": "pager"}, "notify"])


def test_resolved_alert_has_its_end(contract, edges):
    firing, resolved = edges
    body = body_of(contract, resolved)
    by_slice = {alert["labels"]["slice"]: alert for alert in body["alerts"]}
    assert body["status"] == "resolved"
    assert by_slice["code"]["endsAt"] == rfc3339(AT + 90)
    assert by_slice["code"]["fingerprint"] == firing[1].fingerprint
    assert "The alert lasted 1m30s." in by_slice["code"]["annotations"]["description"]


def test_encoding_is_strict_json_and_deterministic(make_contract, make_verdict):
    contract = make_contract([{"on": "no-data", "do": ["notify"]}])
    _, edges = advanced(contract, [make_verdict("NO_DATA")], AT)
    first = encode(body_of(contract, edges))
    assert first == encode(body_of(contract, edges))
    body = json.loads(first, parse_constant=pytest.fail)
    assert body["kernelContract"]["cells"][0]["estimate"] is None
    assert body["alerts"][0]["annotations"]["description"].startswith("Nothing monitors slice code: ")
    assert " NO_DATA because of the numbers." in body["alerts"][0]["annotations"]["description"]


def test_unbounded_interval_is_said_in_words(contract, make_verdict):
    verdict = make_verdict("FAIL", upper=float("inf"))
    _, edges = advanced(contract, [verdict], AT)
    description = body_of(contract, edges)["alerts"][0]["annotations"]["description"]
    assert "is 0.0123, at least 0.0101 at 99% confidence" in description


def test_a_resolved_alert_says_of_which_kernel_and_whether_anything_refuted_it(edges):
    """A cell that is gone with its kernel is another thing than one that passes; data that are back are no PASS."""
    gone, passes = edges[1]
    of = f"for {passes.cell.kernel_inference} against {passes.cell.kernel_train}"
    assert summary(passes, {}).endswith(f"is resolved {of}")
    assert f"is closed {of} without proof of recovery: the pair, or a recorder of it, fell silent" in summary(gone, {})
    assert "resolved" not in summary(gone, {})
    assert summary(replace(passes, on="no-data"), {}).endswith(f"{of} are arriving")
    silent = replace(passes.verdict, status=Status.NO_DATA)
    assert summary(replace(passes, on="no-data", verdict=silent), {}).endswith("are no longer watched")
    gone = replace(passes, on="no-data", verdict=silent, end="are no longer expected: its run ended cleanly")
    assert summary(gone, {}).endswith(f"{of} are no longer expected: its run ended cleanly")


def test_the_end_of_what_is_only_contained_is_no_repair(edges):
    """A router keeps the slice away from the kernel: nothing has refuted the breach, and the message says so."""
    gone, _ = edges[1]
    cell = gone.cell
    broken = BrokenCell(cell.clause, cell.slice, since=AT, until=AT + 90)
    of = ("1", cell.contract, "fail", cell.kernel_train, cell.kernel_inference)
    said = {state: summary(gone, {}, Incident(*of, state, (broken,))) for state in IncidentState}
    assert "is contained" in said[IncidentState.CONTAINED]
    assert said[IncidentState.CONTAINED].endswith("routers avoid the kernel, which is not repaired")
    assert said[IncidentState.UNPROVEN].endswith(f"; {NOT_PROVEN}")
    ended = replace(Incident(*of, IncidentState.RESOLVED, (broken,)), run_ended=True)
    assert summary(gone, {}, ended).endswith("without proof of recovery: the run ended: its last recorder shut down")


def test_the_alert_of_what_is_contained_may_end_and_of_what_is_not_waits(contract, edges):
    """An endpoint is told the end of a breach that nothing refuted once users are kept from it, and before that so."""
    gone, _ = edges[1]
    cell, at = gone.cell, AT + 90
    broken = BrokenCell(cell.clause, cell.slice, since=AT, until=at)
    told = MessageGroup("1", "pager", (ToldAlert(gone, "firing"),), (gone.step,))
    before, tick = PolicyState(contract.name, at=at), tick_of(contract, [], at + contract.observability.window)
    reasons = {}
    for state in (IncidentState.BROKEN, IncidentState.CONTAINED):
        incident = Incident("1", cell.contract, "fail", *cell.pair, state, (broken,))
        news = News(tick, before, before, [incident], People(), {}, (), AT_ONCE)
        _, messages = group_messages(news, [told], [])
        reasons[state] = [str(message.reason) for message in messages]
    assert reasons == {IncidentState.BROKEN: ["unproven"], IncidentState.CONTAINED: ["resolved"]}


def test_the_first_line_names_both_kernels_by_the_fields_in_which_they_differ(contract, edges):
    cell, fields = edges[0][1].cell, {"engine": "vllm", "dtype": "bfloat16"}
    kernels = [
        KernelInfo("train", cell.kernel_train, fields | {"kv_cache_dtype": "auto"}, AT),
        KernelInfo("inference", cell.kernel_inference, fields | {"kv_cache_dtype": "fp8"}, AT),
    ]
    of = (
        " for vllm bfloat16, kv_cache_dtype fp8 (bbbbbbbbbbbb) "
        "against vllm bfloat16, kv_cache_dtype auto (aaaaaaaaaaaa)"
    )
    body = body_of(contract, edges[0][1:], kernels=kernels)
    assert body["alerts"][0]["annotations"]["summary"] == f"policy-7b: token-tv is broken on slice code{of}"
    rolled_back = summary(replace(edges[0][1], step=ROLLED_BACK, severity="warning"), kernel_names(kernels))
    assert rolled_back == f"policy-7b: token-tv is broken on slice code{of}, which was rolled back"


def test_no_message_asks_to_roll_back_what_is_rolled_back(contract, edges):
    """The evaluator would refuse that; what is left to do is to keep requests from the version."""
    fired = edges[0]
    verdicts = [edge.verdict for edge in fired]
    (begun,) = follow(tick_of(contract, verdicts, AT), (), fired)
    done = replace(begun, actions=(IncidentAction("roll-back", "it is rolled back", AT, ("all",)),))
    rolled = replace(fired[1], step=ROLLED_BACK, severity="warning", fingerprint="r")
    remedy = "Now: check that no router, pin or mirror sends it traffic."
    for told, incident, expected in (
        (fired, begun, False),
        ((*fired, rolled), begun, True),  # the first message: the order is younger than the incident's state
        (fired, replace(done, ordered_at=AT), True),
        (fired, done, False),  # it has been started again
    ):
        body = body_of(contract, told, incident=incident, lasting=1)
        descriptions = [alert["annotations"]["description"] for alert in body["alerts"]]
        assert (body["kernelContract"]["next"] == remedy) is expected
        assert {remedy in text for text in descriptions} == {expected}
        assert {"roll the kernel version back" in text for text in descriptions} == {not expected}


@pytest.mark.parametrize(
    ("actions", "trains"),
    [(["notify", "resync-weights"], True), (["halt", {"route": "train-kernel"}], False), (["notify"], False)],
)
def test_a_trainer_is_asked_to_do_what_it_can(make_contract, edges, actions, trains):
    """No router asks under a contract that has directives for trainers and no route: nothing can be pinned."""
    contract = make_contract([{"on": "fail", "severity": "critical", "do": actions}])
    remedy = body_of(contract, edges[0])["kernelContract"]["next"]
    assert ("stop the run or correct its rollouts" in remedy) is trains
    assert ("pin the slice" in remedy) is not trains


def test_an_alert_that_fires_over_a_recovery_does_not_say_that_it_is_broken(contract, edges, make_verdict):
    recovered = replace(edges[0][1], verdict=make_verdict("PASS"))
    body = body_of(contract, [recovered])
    (alert,) = body["alerts"]
    assert alert["annotations"]["summary"].startswith("policy-7b: token-tv was broken on slice code")
    assert body["kernelContract"]["impact"].startswith("The last verdict on slice code no longer shows a breach")
    silent = body_of(contract, [replace(recovered, verdict=make_verdict("NO_DATA"))])
    assert "neither shows nor refutes the breach" in silent["kernelContract"]["impact"]
    both = body_of(contract, [recovered, edges[0][1]])
    assert "no breach" not in both["kernelContract"]["impact"]


def test_the_description_says_that_sequences_were_judged(make_contract, make_verdict):
    contract = make_contract(
        [{"on": "fail", "severity": "critical", "do": [{"webhook": "pager"}]}],
        statistical=[{"id": "token-tv", "metric": "tv_token", "unit": "sequence", "limit": 0.004}],
    )
    _, firing = advanced(contract, [make_verdict("FAIL", at=AT)], AT)
    (alert,) = body_of(contract, firing)["alerts"]
    assert "Mean of tv_token by sequence is 0.0123, between " in alert["annotations"]["description"]
