"""What nobody has proven is over stays open, and is told: late points, silence, invalid input, and changed clauses."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.contract.load import load_text
from kc_otel.contract.words import moment
from kc_otel.judge.escalation.webhook_body import rfc3339
from kc_otel.judge.incidents.incident import IncidentState
from kc_otel.judge.statistics import metric_name
from kc_otel.judge.verdict import Status
from kc_otel.serve.core import Core
from kc_otel.serve.people_orders import acknowledge, close, lift, pin, silence
from kc_otel.serve.self_metrics import read
from kc_otel.serve.store.state_file import open_state
from kc_otel.serve.webhooks.endpoints import pagerduty_event, slack_message
from tests.judge.conftest import NOW, Sender, counted
from tests.tools.api import client_of, route_kept
from tests.tools.fleet import SLICED, STEP, TEXT, Fleet, MakeFleet, closed_by_a_person, shut_down

pytestmark = pytest.mark.slow

VERSION = "b" * 12
CLAUSE = "metric: tv_token, unit: token, limit: 0.02"


class Delayed(Fleet):
    """Recorders whose points are some seconds old when they arrive, and a window of half a minute."""

    def __init__(self, path: Path) -> None:
        text = TEXT.replace("window: 1m", "window: 30s").replace("heartbeat: 30s", "heartbeat: 15s")
        super().__init__(path, text=text)
        self.senders = {name: Sender(instance=name, start=NOW - 1.0, cumulative=False) for name in self.senders}

    def late(self, seconds: float, age: float, **means: float) -> None:
        """`run`, where what `broken` sends is as old as that."""
        ages = {"broken": age}
        self.feed(
            seconds,
            lambda: [self.report(self.senders[name], mean, ages.get(name, 0.0)) for name, mean in means.items()],
        )

    @property
    def status(self) -> Status:
        ((verdict, _),) = self.core.history.cells()
        return verdict.status


@pytest.fixture
def delayed(make_fleet: MakeFleet) -> Delayed:
    made = make_fleet(kind=Delayed)
    assert isinstance(made, Delayed)
    made.late(60, 0.0, broken=0.001, healthy=0.001)
    made.late(30, 0.0, broken=0.4, healthy=0.001)
    assert made.status is Status.FAIL
    return made


def test_a_breach_does_not_end_while_a_recorder_of_it_sends_points_that_no_window_has(delayed):
    """They are older than the window and younger than a minute: named with the remedy, and proof of nothing."""
    delayed.late(600, 45.0, broken=0.001, healthy=0.001)
    assert delayed.states() == [IncidentState.UNPROVEN]
    (row,) = delayed.core.evaluator.missing("policy", delayed.now)
    assert (row.outcome, row.senders) == ("behind", 1)
    assert "make observability.window longer" in row.text
    assert delayed.reasons() == ["firing", "unproven"]
    delayed.late(200, 0.0, broken=0.001, healthy=0.001)
    assert delayed.core.incidents() == ()
    assert delayed.reasons() == ["firing", "unproven", "resolved"]


def test_late_points_alone_clear_no_fail(delayed):
    """What was measured before the breach and comes after it is no recovery."""
    delayed.late(40, 45.0, broken=0.001)
    assert delayed.status is Status.FAIL
    (incident,) = delayed.core.incidents()
    assert incident.state is IncidentState.BROKEN
    delayed.late(120, 0.0, broken=0.001, healthy=0.001)
    assert delayed.status is Status.PASS


def test_a_version_of_which_many_sequences_fail_the_input_checks_is_not_proven(make_fleet):
    """What is measured passes: the breach is not refuted, the version waits, and status and page say it."""
    fleet = make_fleet()
    lengths = Sender("kc.sampling.tokens", instance="broken", start=NOW - 1.0)

    def run(seconds: float, mean: float, failing: int) -> None:
        for _ in range(round(seconds / STEP)):
            fleet.core.metrics(lengths.request(fleet.now + STEP, np.full(100, 20.0)), fleet.now + STEP)
            failed.append(failed[-1] + failing)
            message = counted("nan_logprob", failed[-1], NOW - 1.0, fleet.now + STEP, ("a" * 12, VERSION))
            fleet.core.metrics(message, fleet.now + STEP)
            fleet.run(STEP, broken=mean)

    failed = [0]
    run(60, 0.001, 1)
    assert fleet.core.evaluator.missing("policy", fleet.now) == [], "no more than one in a hundred"
    run(30, 0.4, 0)
    run(300, 0.001, 150)
    ((verdict, _),) = fleet.core.history.cells()
    assert verdict.status is Status.PASS
    assert fleet.states() == [IncidentState.UNPROVEN]
    (row,) = client_of(fleet.core).get("/api/v1/overview").json()["missing"]
    assert (row["outcome"], row["kernel_inference"]) == ("invalid", VERSION)
    assert row["text"].startswith("60 % of the sequences failed the input checks in the window, most of them nan_")
    fleet.core.promotions.tell("policy", VERSION, "start", "ada", "", fleet.now)
    run(10, 0.001, 150)
    held = fleet.core.promotions.of("policy", VERSION).missing
    assert any(reason.startswith("held: sequences of it are not judged: 60 %") for reason in held)
    run(90, 0.001, 0)
    assert fleet.core.evaluator.missing("policy", fleet.now) == []
    assert fleet.core.incidents() == ()


def test_whoever_was_told_of_a_breach_is_told_that_it_went_away_without_proof(fleet):
    """Once, in every format, with what was not proven and what to do; the incident stays open at the receiver."""
    fleet.run(600, healthy=0.001)
    assert fleet.reasons() == ["firing", "unproven"]
    body = fleet.told()[-1]
    impact = (
        "Nothing proves that token-tv keeps its limit again on all traffic: its kernel, or a recorder of it, measures "
        "nothing more, or its points arrive and are not judged. The kernel may still serve."
    )
    contract, (alert,) = body["kernelContract"], body["alerts"]
    assert (body["status"], contract["impact"], contract["evidence"]) == ("firing", impact, "")
    assert "or close the incident with `kc-otel alerts ack policy --close --why '...'`" in contract["next"]
    first = "policy: a breach of token-tv on all traffic went away without proof of recovery for"
    assert alert["annotations"]["summary"].startswith(first)
    assert alert["annotations"]["description"].startswith(impact)
    assert contract["next"] in alert["annotations"]["description"]
    slack, event = slack_message(body), pagerduty_event(body, "R" * 32)
    assert slack["text"] == f"Went away without proof of recovery: policy: {impact}"
    assert "kc-otel alerts ack policy" in json.dumps(slack)
    assert (event["event_action"], event["dedup_key"]) == ("trigger", pagerduty_event(fleet.told()[0], "")["dedup_key"])
    assert event["payload"]["summary"].startswith(f"policy: {impact}")
    assert event["payload"]["custom_details"]["next"] == contract["next"]
    with pytest.raises(LookupError, match="`--close` closes it"):
        acknowledge(fleet.core, "policy", None, None, "ada", "looking", fleet.now)
    assert fleet.run(10, healthy=0.001) == [IncidentState.UNPROVEN]
    closed_by_a_person(fleet)
    fleet.run(10, healthy=0.001)
    assert fleet.reasons() == ["firing", "unproven", "resolved"]


def route_resumed(fleet: Fleet) -> None:
    lift(fleet.core, "route", "policy", None, "ada", "mended in c", fleet.now)


def router_joined(fleet: Fleet) -> None:
    core = fleet.core
    core.listeners.heard(
        ["policy/route"], core.contracts, fleet.now, instance="second", table_at=NOW, kept=[],
        versions=core.inference_versions,
    )  # fmt: skip


def pinned_to_the_inference_kernel(fleet: Fleet) -> None:
    pin(fleet.core, "policy", "all", "inference-kernel", None, "ada", "c is sound", fleet.now)


def recorder_killed(fleet: Fleet) -> None:
    del fleet.senders["broken"]


def rolled_out(fleet: Fleet, seconds: float, mean: float | None = None) -> None:
    """Another version is rolled out in place of the broken one; a router obeys every order."""
    other = fleet.senders.setdefault("other", Sender(inference="c" * 12, instance="other", start=NOW - 1.0))
    for _ in range(round(seconds / STEP)):
        if fleet.core.decisions.routes or fleet.core.decisions.pins:
            route_kept(fleet.core, fleet.now)
        reports = [fleet.report(other, 0.001, version="c" * 12)]
        if "broken" in fleet.senders:
            reports.append(fleet.report(fleet.senders["broken"], mean))
        fleet.feed(STEP, lambda sent=tuple(reports): sent)


@pytest.mark.parametrize("ends", [route_resumed, router_joined, pinned_to_the_inference_kernel, recorder_killed])
def test_an_endpoint_that_was_told_of_containment_is_told_that_it_ended_without_proof(make_fleet, ends):
    fleet = make_fleet("do: [{route: train-kernel}, {webhook: pager}]")
    rolled_out(fleet, 60, 0.001)
    rolled_out(fleet, 40, 0.4)
    rolled_out(fleet, 600)
    assert fleet.states() == [IncidentState.CONTAINED]
    assert fleet.reasons() == ["firing", "resolved"]
    ends(fleet)
    rolled_out(fleet, 180)
    assert fleet.states() != [IncidentState.CONTAINED]
    assert fleet.reasons() == ["firing", "resolved", "unproven"]
    close(fleet.core, "policy", None, None, "ada", "it is gone", fleet.now)
    rolled_out(fleet, 20)
    assert fleet.reasons() == ["firing", "resolved", "unproven", "resolved"]


def test_a_rollback_is_not_told_again_once_its_version_is_started_again(make_fleet: MakeFleet) -> None:
    """It was contained, and its requests are mirrored for the next attempt."""
    fleet = make_fleet("do: [{route: train-kernel}, {webhook: pager}]")
    rolled_out(fleet, 60, 0.001)
    rolled_out(fleet, 40, 0.4)
    fleet.core.promotions.tell("policy", VERSION, "rollback", "ada", "it is bad", fleet.now, start=True)
    rolled_out(fleet, 120)
    assert fleet.states() == [IncidentState.CONTAINED]
    assert "rolled-back" in fleet.reasons()
    told = len(fleet.reasons())
    fleet.core.promotions.tell("policy", VERSION, "start", "ada", "it is fixed", fleet.now)
    rolled_out(fleet, 60, 0.001)
    assert fleet.states() != [IncidentState.CONTAINED]
    assert "rolled-back" not in fleet.reasons()[told:]


def test_a_breach_that_a_pin_contains_stays_contained_after_its_kernel_is_gone(make_fleet: MakeFleet) -> None:
    """As one that a route contains does, until the pin ends."""
    fleet = make_fleet()
    rolled_out(fleet, 60, 0.001)
    rolled_out(fleet, 40, 0.4)
    until = fleet.now + 900.0
    pin(fleet.core, "policy", "all", "train-kernel", until, "ada", "b is broken", fleet.now)
    rolled_out(fleet, 800)
    assert not fleet.core.firing()
    assert fleet.states() == [IncidentState.CONTAINED]
    assert fleet.reasons() == ["firing", "resolved"]
    rolled_out(fleet, 200)
    assert fleet.states() == [IncidentState.UNPROVEN]
    assert fleet.reasons() == ["firing", "resolved", "unproven"]


def away(fleet: Fleet, seconds: float) -> None:
    """A router keeps all requests from the only kernel; its recorder reports and measures nothing."""
    for _ in range(round(seconds / STEP)):
        route_kept(fleet.core, fleet.now)
        fleet.run(STEP, broken=None)


@pytest.mark.parametrize("contained", [False, True])
def test_nobody_is_paged_for_what_was_over_before_anything_of_it_was_delivered(
    make_fleet: MakeFleet, contained: bool
) -> None:
    """The endpoint was away, or not yet configured; of what is only contained it gets both messages."""
    fleet = make_fleet()
    rolled_out(fleet, 60, 0.001)
    rolled_out(fleet, 40, 0.4)
    if contained:
        pin(fleet.core, "policy", "all", "train-kernel", None, "ada", "b is broken", fleet.now)
    rolled_out(fleet, 600, None if contained else 0.001)
    assert fleet.reasons() == ["firing", "resolved"]
    assert fleet.states() == [IncidentState.CONTAINED] * contained
    (status,) = fleet.core.outbox.status()
    assert (status.waiting, status.parked) == (2 * contained, 0)


def test_a_breach_that_a_run_left_unrefuted_is_delivered_though_its_endpoint_was_away(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    fleet.run(60, broken=0.001)
    fleet.run(40, broken=0.4)
    shut_down(fleet)
    fleet.run(600)
    assert fleet.states("fail") == []
    assert fleet.reasons() == ["firing", "resolved"]
    (status,) = fleet.core.outbox.status()
    assert status.waiting == 2


@pytest.mark.parametrize("by_pin", [False, True])
@pytest.mark.parametrize("seconds", [150, 600])
def test_a_contained_breach_that_breaks_again_is_routed_and_told_again(
    make_fleet: MakeFleet, by_pin: bool, seconds: float
) -> None:
    """Once, and acknowledged anew: a person ended the route or the pin, with a repair that did not work."""
    fleet = make_fleet("do: [{webhook: pager}]" if by_pin else "do: [{route: train-kernel}, {webhook: pager}]")
    fleet.run(60, broken=0.001)
    fleet.run(40, broken=0.4)
    acknowledge(fleet.core, "policy", None, None, "ada", "looking", fleet.now)
    if by_pin:
        pin(fleet.core, "policy", "all", "train-kernel", fleet.now + seconds + 1.0, "ada", "broken", fleet.now)
    away(fleet, seconds)
    assert fleet.states("fail") == [IncidentState.CONTAINED]
    ended = fleet.now
    if not by_pin:
        route_resumed(fleet)
    fleet.run(400, broken=0.4)
    assert fleet.states("fail") == [IncidentState.BROKEN]
    assert fleet.reasons() == ["firing", "update"]
    (alert,) = fleet.told()[-1]["alerts"]
    assert alert["annotations"]["summary"].startswith("policy: token-tv is broken again on all traffic for ")
    assert "Again since 2027-01-15 08:" in alert["annotations"]["description"]
    assert ", for the first time 2027-01-15 08:01" in alert["annotations"]["description"]
    assert fleet.core.people.acknowledgements == ()
    assert [route.since > ended for route in fleet.core.decisions.routes] == [True] * (not by_pin)
    fleet.run(200, broken=0.001)
    assert fleet.reasons() == ["firing", "update", "resolved"]


LONG_WINDOWS = TEXT.replace("window: 1m, long_window: 5m", "window: 5m, long_window: 60m")


@pytest.mark.parametrize("seconds", [150, 280])
def test_a_repair_that_failed_is_told_though_the_window_holds_the_breach_still(
    make_fleet: MakeFleet, seconds: float
) -> None:
    """Once the short window is of what came after the order alone."""
    fleet = make_fleet("do: [{route: train-kernel}, {webhook: pager}]", text=LONG_WINDOWS)
    fleet.run(60, broken=0.001)
    fleet.run(40, broken=0.4)
    acknowledge(fleet.core, "policy", None, None, "ada", "looking", fleet.now)
    away(fleet, seconds)
    assert fleet.states("fail") == [IncidentState.CONTAINED]
    route_resumed(fleet)
    fleet.run(600, broken=0.4)
    assert fleet.reasons() == ["firing", "update"]
    assert (len(fleet.core.decisions.routes), fleet.core.people.acknowledgements) == (1, ())


def test_nothing_is_broken_again_while_nothing_is_measured(make_fleet: MakeFleet) -> None:
    """A recorder that was not heard of for a minute reports again, and has observed nothing."""
    fleet = make_fleet("do: [{route: train-kernel}, {webhook: pager}]", text=LONG_WINDOWS)
    fleet.run(60, broken=0.001)
    fleet.run(40, broken=0.4)
    away(fleet, 400)
    fleet.feed(60, list)
    route_resumed(fleet)
    fleet.run(60, broken=None)
    assert fleet.reasons() == ["firing"]
    assert fleet.core.decisions.routes == ()


@pytest.mark.parametrize(("silent", "told"), [(200, ["firing"]), (400, ["firing", "update"])])
def test_a_breach_whose_recorder_died_and_is_back_is_told_again(
    make_fleet: MakeFleet, silent: float, told: list[str]
) -> None:
    """An acknowledgement ends, too, unless the silence was shorter than the long window."""
    fleet = make_fleet()
    fleet.run(60, broken=0.4)
    acknowledge(fleet.core, "policy", None, None, "ada", "looking", fleet.now)
    fleet.feed(silent, list)
    fleet.senders["broken"].restart(fleet.now)
    fleet.run(60, broken=0.4)
    assert fleet.reasons() == told
    assert bool(fleet.core.people.acknowledgements) is (told == ["firing"])


def test_an_endpoint_that_was_told_of_containment_is_told_that_it_ended(make_fleet: MakeFleet) -> None:
    """A reminder had told it; no later one does while nothing changes."""
    fleet = make_fleet("repeat: 3m, do: [{route: train-kernel}, {webhook: pager}]")
    fleet.run(60, broken=0.001)
    fleet.run(40, broken=0.4)
    away(fleet, 200)
    assert fleet.reasons() == ["firing", "reminder"]
    assert fleet.told()[-1]["kernelContract"]["incident"]["state_text"] == "Contained"
    route_resumed(fleet)
    fleet.run(100, broken=None)
    assert fleet.reasons() == ["firing", "reminder", "update"]
    assert fleet.told()[-1]["kernelContract"]["incident"]["state_text"] == "Broken"


@pytest.mark.parametrize("clean", [True, False])
def test_the_breach_of_the_only_run_ends_with_it_if_its_recorder_shuts_down(make_fleet: MakeFleet, clean: bool) -> None:
    """So do a halt and a quarantine; a recorder that was killed may have died beside a kernel that serves."""
    fleet = make_fleet("do: [halt, quarantine-rollouts, {webhook: pager}]")
    fleet.run(60, broken=0.001)
    fleet.run(40, broken=0.4)
    if clean:
        shut_down(fleet)
    fleet.feed(3600, list)
    assert fleet.states("fail") == [IncidentState.BROKEN] * (not clean)
    assert len(fleet.core.decisions.directives) == 2 * (not clean)
    assert fleet.reasons() == ["firing", "resolved"][: 1 + clean]
    if clean:
        (alert,) = fleet.told()[-1]["alerts"]
        assert "without proof of recovery: the run ended: its last recorder shut " in alert["annotations"]["summary"]
        assert fleet.told()[-1]["kernelContract"]["incident"]["state_text"] == "Ended"


def test_an_endpoint_that_was_renamed_is_told_of_the_end_once_the_breach_is_over(make_fleet: MakeFleet) -> None:
    """Not as soon as it passes, while the alert to the new endpoint fires on."""
    text = TEXT.replace("clear_for: 1s", "clear_for: 5m")
    fleet = make_fleet(text=text)
    fleet.run(60, broken=0.001)
    fleet.run(40, broken=0.4)
    fleet.contract = load_text(text.replace("DO", "do: [{webhook: oncall}]"), "policy.yaml")
    fleet.restart()
    fleet.run(30, broken=0.4)
    fleet.run(200, broken=0.001)
    assert [(body["receiver"], body["status"]) for body in fleet.told()] == [("pager", "firing"), ("oncall", "firing")]
    fleet.run(300, broken=0.001)
    assert [(body["receiver"], body["status"]) for body in fleet.told()[2:]] == [
        ("oncall", "resolved"), ("pager", "resolved"),
    ]  # fmt: skip
    assert all("is resolved" in end for end in fleet.ends())


def test_a_breach_that_was_too_short_to_be_told_is_told_once_it_is_unproven(make_fleet: MakeFleet) -> None:
    """Its server crashes before the step with a webhook is due, and what others measure drops that step's alert."""
    fleet = make_fleet(
        "do: [notify]}\n  - {on: fail, for: 5m, clear_for: 1s, severity: critical, do: [{webhook: pager}]"
    )
    fleet.breach(120)
    fleet.run(600, healthy=0.001)
    fleet.restart()
    assert fleet.run(60, healthy=0.001) == [IncidentState.UNPROVEN]
    (body,) = fleet.told()
    assert (body["status"], body["notification_reason"]) == ("firing", "unproven")
    assert body["alerts"][0]["annotations"]["summary"].startswith(
        "policy: a breach of token-tv on all traffic went away"
    )
    closed_by_a_person(fleet)
    fleet.run(10, healthy=0.001)
    assert fleet.reasons() == ["unproven", "resolved"]


LATE_PAGE = """do: [notify]}
  - {on: fail, do: [{webhook: chat}]}
  - {on: fail, for: 2m, severity: critical, do: [{webhook: pager}]"""


@pytest.mark.parametrize("broken", [20, 50])
@pytest.mark.parametrize("clean", [False, True])
def test_a_breach_is_told_though_it_was_shorter_than_a_step_and_its_only_recorder_is_gone(
    make_fleet: MakeFleet, broken: float, clean: bool
) -> None:
    """It was killed, which leaves the alert of the later step pending, or shut down, which closes the incident."""
    fleet = make_fleet(LATE_PAGE)
    fleet.run(60, broken=0.001)
    fleet.run(broken, broken=0.4)
    if clean:
        shut_down(fleet)
    fleet.run(300)
    fleet.restart()
    fleet.run(3600)
    pages = [body for body in fleet.told() if body["receiver"] == "pager"]
    assert [(page["status"], page["notification_reason"]) for page in pages] == [("firing", "unproven")]
    (said,) = [alert["annotations"] for alert in pages[0]["alerts"]]
    assert said["summary"].startswith("policy: a breach of token-tv on all traffic went away without proof of recovery")
    assert said["summary"].endswith(": the run ended") is clean
    assert ("no message about its end follows" in said["description"]) is clean
    assert ("restart a recorder" in said["description"]) is not clean
    assert fleet.states("fail") == [IncidentState.BROKEN] * (not clean)
    assert [body["status"] for body in fleet.told() if body["receiver"] == "chat"] == ["firing", "resolved"][
        : 1 + clean
    ]


@pytest.mark.parametrize("routes", [False, True])
def test_no_step_begins_because_of_a_run_that_has_ended(make_fleet: MakeFleet, routes: bool) -> None:
    """Its last verdict is 100 s old when it shuts down, and outlasts it by more than the 20 s to the page.

    What only measures a kernel may end while that serves on: a step that orders a route begins.
    """
    fleet = make_fleet(LATE_PAGE.replace("{webhook: pager}", "{route: train-kernel}, {webhook: pager}", routes))
    fleet.run(60, broken=0.001)
    fleet.run(110, broken=0.4)
    shut_down(fleet)
    fleet.run(300)
    pages = [body for body in fleet.told() if body["receiver"] == "pager"]
    assert (pages[0]["status"], pages[0]["notification_reason"]) == ("firing", "firing" if routes else "unproven")
    assert len(pages) == 1 or routes
    assert len(fleet.core.decisions.routes) == routes


@pytest.mark.parametrize("away", [120.0, 3600.0])
def test_an_evaluator_that_was_away_hears_recorders_out_before_it_tells_that_nothing_was_proven(
    make_fleet: MakeFleet, away: float
) -> None:
    """What reports again shows within a heartbeat and a window that the breach is over."""
    held, later = "for: 40s, clear_for: 5m, do: [notify]", "for: 4m, do: [{webhook: pager}]"
    fleet = make_fleet(f"do: [{{webhook: chat}}]}}\n  - {{on: fail, {held}}}\n  - {{on: fail, {later}")
    fleet.run(60, broken=0.001)
    fleet.run(60, broken=0.4)
    fleet.close()
    fleet.now += away
    fleet.begin()
    fleet.run(600, broken=0.001)
    assert fleet.core.incidents() == ()
    assert [(body["receiver"], body["notification_reason"]) for body in fleet.told()] == [
        ("chat", "firing"), ("chat", "resolved"),
    ]  # fmt: skip


@pytest.mark.parametrize("back", [0.4, 0.001])
def test_a_breach_that_a_dead_recorder_left_is_told_as_it_goes_on_once_it_is_back(
    make_fleet: MakeFleet, back: float
) -> None:
    fleet = make_fleet(LATE_PAGE)
    fleet.run(60, broken=0.001)
    fleet.run(30, broken=0.4)
    fleet.run(60)
    assert "pager" not in {body["receiver"] for body in fleet.told()}, "what it measures next may refute it"
    fleet.run(200)
    fleet.run(300, broken=back)
    pages = [body["notification_reason"] for body in fleet.told() if body["receiver"] == "pager"]
    assert pages == ["unproven", "update" if back > 0.02 else "resolved"]


def test_a_silence_keeps_the_end_of_a_run_from_being_told(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(LATE_PAGE)
    fleet.run(20, broken=0.4)
    silence(fleet.core, "policy", None, None, fleet.now + 3600, "ada", "known", fleet.now)
    shut_down(fleet)
    fleet.run(300)
    assert [body for body in fleet.told() if body["receiver"] == "pager"] == []


def test_a_breach_of_a_dry_run_is_told_after_it_while_it_is_unproven(make_fleet: MakeFleet) -> None:
    class DryRun(Fleet):
        def begin(self) -> None:
            self.connection, dry_run = open_state(self.path), () if hasattr(self, "core") else ("policy",)
            self.core = Core([self.contract], self.connection, external_url="", now=self.now, dry_run=dry_run)

    fleet = make_fleet(kind=DryRun)
    fleet.breach(60)
    fleet.run(200, healthy=0.001)
    assert fleet.reasons() == []
    fleet.restart()
    fleet.run(200, healthy=0.001)
    assert fleet.reasons() == ["unproven"]


def test_training_is_kept_from_a_breach_while_it_is_unproven(make_fleet: MakeFleet) -> None:
    """A quarantine and a halt last until it is over; what holds every promotion lasts as long as the alert."""
    fleet = make_fleet("do: [halt, quarantine-rollouts, hold-promotion, {webhook: pager}]")

    def directives() -> list[str]:
        return sorted(directive.kind.value for directive in fleet.core.decisions.directives)

    fleet.breach()
    assert directives() == ["halt", "hold-promotion", "quarantine-rollouts"]
    fleet.run(300, healthy=0.001)
    fleet.restart()
    fleet.run(60, healthy=0.001)
    assert not fleet.core.firing()
    assert directives() == ["halt", "quarantine-rollouts"]
    closed_by_a_person(fleet)
    fleet.run(10, healthy=0.001)
    assert directives() == []


def test_a_person_closes_a_breach_whose_traffic_has_ended(make_fleet: MakeFleet) -> None:
    """Every slice broke and was mended, and the prompts of one are finished: its alert would fire for ever."""
    fleet = make_fleet(text=SLICED)

    def closes(why: str) -> bool:
        try:
            return bool(close(fleet.core, "policy", None, None, "ada", why, fleet.now))
        except LookupError:
            return False

    fleet.run(60, broken={"code": 0.001, "prose": 0.001})
    fleet.run(60, broken={"code": 0.4, "prose": 0.4})
    assert not closes("it is measured as broken")
    fleet.run(60, broken={"code": 0.001})
    assert not closes("the window still has what it measured")
    fleet.run(600, broken={"code": 0.001})
    (incident,) = [incident for incident in fleet.core.incidents() if incident.on == "fail"]
    assert incident.state_text == "Was broken; nothing has refuted it since"
    assert closes("its prompts are finished")
    fleet.run(10, broken={"code": 0.001})
    assert [incident.on for incident in fleet.core.incidents()] == ["no-data"]
    assert [alert.on for alert in fleet.core.policies["policy"].firing] == []
    assert fleet.reasons()[-1] == "resolved"
    assert fleet.told()[-1]["kernelContract"]["impact"] == ""
    fleet.run(60, broken={"code": 0.001, "prose": 0.4})
    assert [incident.on for incident in fleet.core.incidents()] == ["fail"], "it is broken once more"


@pytest.mark.parametrize("pair", [None, ("a" * 12, VERSION)])
def test_nobody_closes_invalid_input_that_still_arrives(make_fleet, pair):
    """No verdict is of sequences whose kernels nobody knows, and none where everything fails its checks."""
    fleet = make_fleet(text=TEXT + "  - {on: invalid-input, do: [notify]}\n")
    failed = [0]

    def invalid() -> list[ExportMetricsServiceRequest]:
        failed.append(failed[-1] + 150)
        return [counted("nan_logprob", failed[-1], NOW - 1.0, fleet.now, pair)]

    fleet.run(60, broken=0.001)
    fleet.feed(600, invalid)
    assert "invalid-input" in {incident.on for incident in fleet.core.incidents()}
    with pytest.raises(LookupError, match="no incident there went away"):
        close(fleet.core, "policy", None, None, "ada", "enough", fleet.now)


def test_a_word_about_one_slice_closes_no_breach_of_another(make_fleet):
    fleet = make_fleet(text=SLICED)
    sound = {"code": 0.001, "prose": 0.001}
    fleet.run(60, broken=sound, healthy=sound)
    fleet.run(30, broken={"code": 0.4, "prose": 0.4}, healthy=sound)
    fleet.run(300, healthy=sound)
    with pytest.raises(LookupError, match="elsewhere, too"):
        close(fleet.core, "policy", None, "code", "ada", "it was killed", fleet.now)
    assert fleet.states() == [IncidentState.UNPROVEN]
    closed_by_a_person(fleet)
    assert fleet.run(10, healthy=sound) == []


def other_version(fleet: Fleet, seconds: float) -> None:
    """Another kernel version is measured instead, whose sequences are valid."""
    sender = Sender(inference="c" * 12, instance="other", start=fleet.now)
    fleet.feed(seconds, lambda: [fleet.report(sender, 0.001, version="c" * 12)])


def rolled_back(fleet: Fleet) -> None:
    core = fleet.core
    core.promotions.tell("policy", VERSION, "rollback", "ada", "it is bad", fleet.now, start=True)
    other_version(fleet, 10)
    route_kept(core, fleet.now, versions=[VERSION])


@pytest.mark.parametrize("ends", [shut_down, closed_by_a_person, rolled_back])
def test_invalid_input_that_only_went_away_stays_until_proof_a_rollback_or_a_person(make_fleet, ends):
    """As a FAIL does: another version's valid sequences prove nothing of it."""
    fleet = make_fleet("do: [{webhook: pager}]}\n  - {on: invalid-input, do: [{webhook: pager}]")
    fleet.run(60, broken=0.001)
    invalid = counted("nan_logprob", 3, NOW, fleet.now + STEP, ("a" * 12, VERSION))
    fleet.core.metrics(invalid, fleet.now + STEP)
    fleet.run(10, broken=0.001)
    (incident,) = fleet.core.incidents()
    assert (incident.on, incident.state) == ("invalid-input", IncidentState.BROKEN)
    other_version(fleet, 900)
    (incident,) = fleet.core.incidents()
    assert (incident.on, incident.state) == ("invalid-input", IncidentState.UNPROVEN)
    assert fleet.reasons() == ["firing", "unproven"]
    summary = fleet.told()[-1]["alerts"][0]["annotations"]["summary"]
    assert summary.startswith("policy: invalid input went away without proof of recovery for ")
    ends(fleet)
    other_version(fleet, 20)
    assert fleet.core.incidents() == ()
    (last,) = [body for body in fleet.told() if body["notification_reason"] == "resolved"]
    said = "Ended" if ends is shut_down else "Closed without proof of recovery"
    assert last["kernelContract"]["incident"]["state_text"] == said


@pytest.mark.parametrize("reason", ["no_tokens", "greedy"])
def test_sequences_that_are_not_to_be_measured_are_no_fault_while_others_are_valid(make_fleet, reason):
    """A trainer masks answers that were cut off, and a server decodes greedily; that nothing else comes is one."""
    fleet = make_fleet("do: [notify]}\n  - {on: invalid-input, do: [quarantine-rollouts]", text=SLICED)
    sender, pair = Sender(slice="code", instance="broken", start=NOW - 1.0), ("a" * 12, VERSION)

    def run(seconds: float, mean: float | None) -> None:
        for _ in range(round(seconds / STEP)):
            failed.append(failed[-1] + 60)
            for slice in ("", "code"):
                message = counted(reason, failed[-1], NOW - 1.0, fleet.now + STEP, pair, slice)
                fleet.core.metrics(message, fleet.now + STEP)
            fleet.feed(STEP, lambda: [fleet.report(sender, mean), fleet.report(fleet.senders["broken"], mean)])

    failed = [0]
    run(300, 0.001)
    assert fleet.core.incidents() == ()
    assert fleet.core.decisions.directives == ()
    run(600, None)
    assert "invalid-input" in [incident.on for incident in fleet.core.incidents()]
    assert fleet.core.decisions.directives


def test_a_fault_among_sequences_that_are_not_to_be_measured_makes_no_data_missing(make_fleet: MakeFleet) -> None:
    """Once they come again the slice is one of which nothing is to be measured, as before it."""
    text = SLICED.replace("long_window: 5m", "long_window: 30m")
    fleet = make_fleet("do: [{webhook: pager}]}\n  - {on: no-data, for: 1m, do: [{webhook: pager}]", text=text)
    pair, failed = ("a" * 12, VERSION), {"greedy": 0, "nan_logprob": 0}
    fleet.run(60, broken={"all": 0.001, "prose": 0.001})
    for step in range(60):
        failed = {"greedy": failed["greedy"] + 60, "nan_logprob": int(step >= 20)}
        for slice in ("", "code"):
            for reason, count in failed.items():
                fleet.core.metrics(counted(reason, count, NOW, fleet.now, pair, slice, instance="broken"), fleet.now)
        fleet.run(STEP, broken={"all": 0.001, "code": None, "prose": 0.001})
    found = {verdict.cell.slice: verdict for verdict, _ in fleet.core.history.cells()}
    assert found["code"].reason.startswith("nothing to measure on slice code: greedy")
    assert fleet.told() == []


@pytest.mark.parametrize("reason", ["no_tokens", "greedy"])
def test_a_slice_of_which_no_sequence_is_to_be_measured_wakes_nobody(make_fleet: MakeFleet, reason: str) -> None:
    """It was measured before, and other slices are: no data and a reason, but no incident, webhook or directive."""
    page = "do: [{webhook: pager}]"
    steps = [f"{page}}}", f"{{on: invalid-input, {page}}}", f"{{on: no-data, {page}}}"]
    fleet = make_fleet("\n  - ".join(steps).removesuffix("}"), text=SLICED)
    pair, failed = ("a" * 12, VERSION), 0
    fleet.run(60, broken={"all": 0.001, "code": 0.001, "prose": 0.001})
    for _ in range(120):
        failed += 60
        for slice in ("", "code"):
            message = counted(reason, failed, NOW, fleet.now, pair, slice, instance="broken")
            fleet.core.metrics(message, fleet.now)
        fleet.run(STEP, broken={"all": 0.001, "code": None, "prose": 0.001})
        assert fleet.core.incidents() == ()
    found = {verdict.cell.slice: verdict for verdict, _ in fleet.core.history.cells()}
    assert found["code"].status is Status.NO_DATA
    assert found["code"].reason.startswith(f"nothing to measure on slice code: {reason}")
    assert {found["all"].status, found["prose"].status} == {Status.PASS}
    assert fleet.told() == []
    exported = read(fleet.core, Counter(), Counter())["kc.verdict.no_traffic"]
    assert "code" in str(exported)
    assert "prose" not in str(exported)


@pytest.mark.parametrize(
    ("clause", "said"),
    [
        ("metric: tv_token, unit: token, limit: 0.02, description: again", "Resolved"),
        ("metric: tv_token, unit: token, limit: 0.9", "Closed by a changed limit"),
        ("metric: k3, unit: token, limit: 0.02", ""),
        ("metric: tv_token, unit: sequence, limit: 0.02", ""),
        ("metric: tv_token, unit: token, statistic: fraction > 0.9, limit: 0.02", ""),
        ("metric: tv_token, unit: token, cap: 0.025, limit: 0.02", ""),
    ],
)
def test_a_clause_of_the_same_name_that_measures_something_else_ends_no_breach(make_fleet, clause, said):
    """It passes, which proves nothing of what was broken; nor does it once the new clause broke and passes again."""
    fleet = make_fleet()
    fleet.run(60, healthy=0.001)
    fleet.run(30, healthy=0.4)
    (begun,) = fleet.core.incidents()
    fleet.connection.close()
    text = TEXT.replace("DO", "do: [{webhook: pager}]").replace("version: 1,", "version: 2,")
    fleet.contract = load_text(text.replace(CLAUSE, clause), "policy.yaml")
    fleet.begin()
    sender = fleet.senders["healthy"]
    if (name := metric_name(fleet.contract.clauses[0])) != sender.metric:
        sender = Sender(name, instance="healthy", start=fleet.now)
    drift = 0.4 if said == "Closed by a changed limit" else 0.001

    def report(seconds: float, value: float) -> None:
        fleet.feed(seconds, lambda: [fleet.report(sender, value)])

    report(400, drift)
    ((verdict, _),) = fleet.core.history.cells()
    assert verdict.status is Status.PASS
    if said:
        assert fleet.core.incidents() == ()
        assert fleet.told()[-1]["kernelContract"]["incident"]["state_text"] == said
        return
    (incident,) = fleet.core.incidents()
    assert (incident.id, incident.state) == (begun.id, IncidentState.UNPROVEN)
    assert fleet.ends() == []
    gone = "the contract no longer has this clause as it was"
    assert gone in fleet.told()[-1]["kernelContract"]["impact"]
    report(60, 0.95)
    report(400, 0.001)
    (incident,) = fleet.core.incidents()
    assert (incident.id, incident.state) == (begun.id, IncidentState.UNPROVEN), "the new clause has recovered alone"
    close(fleet.core, "policy", None, None, "ada", "measured by hand", fleet.now)
    report(10, 0.001)
    (end,) = fleet.ends()
    assert fleet.core.incidents() == ()
    assert "without proof of recovery: ada closed incident" in end


def test_a_breach_that_comes_again_after_a_pause_lasts_since_then(fleet):
    """An unproven incident that is broken again was quiet in between, and a message says when it broke first."""
    fleet.run(600, healthy=0.001)
    quiet_until = fleet.now
    assert fleet.run(30, broken=0.4, healthy=0.001) == [IncidentState.BROKEN]
    (incident,) = client_of(fleet.core).get("/api/v1/incidents").json()["incidents"]
    assert quiet_until < incident["since"] <= fleet.now
    assert incident["cells"][0]["since"] < quiet_until - 600
    body = fleet.told()[-1]
    assert body["kernelContract"]["incident"]["since"] == rfc3339(incident["since"])
    again = f"Again since {moment(incident['since'])}, for the first time {moment(incident['cells'][0]['since'])}."
    assert again in body["alerts"][0]["annotations"]["description"]
