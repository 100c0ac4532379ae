"""A recorder that falls silent without a word: what it measured is not over because others measure something else."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.cli.status_command import _exit_code
from kc_otel.contract.load import load_text
from kc_otel.contract.words import NEXT_DUE, moment
from kc_otel.judge.incidents.incident import NOT_PROVEN, IncidentState
from kc_otel.judge.promotion.stages import Stage
from kc_otel.judge.verdict import Status
from kc_otel.serve.core import Core
from kc_otel.serve.history import Announcement
from kc_otel.serve.people_orders import pin, silence
from kc_otel.serve.webhooks.outbox import DeliveryState
from tests.judge.conftest import NOW, Sender, counted, info_request, merge
from tests.tools.api import client_of, route_kept
from tests.tools.fleet import SLICED, STEP, TEXT, Fleet, closed_by_a_person, rolled_back_by_a_person, shut_down

pytestmark = pytest.mark.slow


def test_a_breach_whose_recorder_died_is_not_resolved_by_what_others_measure(fleet):
    """All of the window is the healthy one's, and passes: the incident stays, and nobody is told of an end."""
    fleet.run(20, healthy=0.001)
    for _ in range(3):
        fleet.run(600, healthy=0.001)
        (verdict, _), *_ = fleet.core.history.cells()
        (incident,) = fleet.core.incidents()
        assert (verdict.status, incident.state) == (Status.PASS, IncidentState.UNPROVEN)
        assert fleet.ends() == []
        fleet.restart()
    assert any(event.message.endswith(NOT_PROVEN) for event in fleet.core.events.newest(limit=50))
    assert not any("is resolved" in event.message for event in fleet.core.events.newest(limit=50))


def test_a_breach_whose_recorder_died_or_was_started_again_is_not_told_as_refuted_while_its_alert_fires(make_fleet):
    fleet = make_fleet("do: [{webhook: pager}]", text=TEXT.replace("clear_for: 1s", "clear_for: 10m"))
    fleet.breach()
    for alive in ({"healthy": 0.001}, {"healthy": 0.001, "third": 0.001}):
        fleet.run(120, **alive)
        ((verdict, _),) = fleet.core.history.cells()
        (incident,) = fleet.core.incidents()
        assert (verdict.status, incident.state_text) == (Status.PASS, "Was broken; nothing has refuted it since")


@pytest.mark.parametrize(
    ("happens", "seconds", "said"),
    [
        (shut_down, 10, "is resolved"),
        (closed_by_a_person, 10, "without proof of recovery: ada closed incident"),
        (rolled_back_by_a_person, 20, "without proof of recovery: ada rolls bbbbbbbbbbbb back"),
    ],
)
@pytest.mark.parametrize("left", [{}, {"broken": None}], ids=["dead", "drained"])
def test_what_a_recorder_left_ends_in_order_or_by_a_person(fleet, happens, seconds, said, left):
    """A clean shutdown proves what the others measure; a person's word proves nothing, and the message says so."""
    assert fleet.run(200, healthy=0.001, **left) == [IncidentState.UNPROVEN]
    happens(fleet)
    fleet.run(seconds, healthy=0.001)
    (end,) = fleet.ends()
    assert fleet.core.incidents() == ()
    assert said in end
    last = json.loads(fleet.core.outbox.messages()[0].body)["kernelContract"]["incident"]
    assert last["state_text"] == ("Resolved" if happens is shut_down else "Closed without proof of recovery")


@pytest.mark.parametrize("left", ["dead", "drained", "started again"])
def test_a_recorder_proves_nothing_until_it_has_measured_for_a_window_again(fleet, left):
    """It may serve again, also after the evaluator's restart. Counts that begin anew at nothing are no observation."""
    for _ in range(2):
        if left == "started again":
            fleet.run(100, healthy=0.001)
            fleet.senders["broken"].restart(fleet.now)
        fleet.run(300, healthy=0.001, **{} if left == "dead" else {"broken": None})
        assert (fleet.states(), fleet.ends()) == ([IncidentState.UNPROVEN], [])
        fleet.restart()
    assert fleet.run(50, healthy=0.001, broken=0.001) == [IncidentState.UNPROVEN], "a window is not full of it"
    assert fleet.run(30, healthy=0.001, broken=0.001) == []
    assert "is resolved" in fleet.ends()[0]


@pytest.mark.parametrize("shuts_down", [False, True])
def test_a_recorder_that_moved_to_another_version_has_refuted_nothing_of_its_breach(fleet, shuts_down):
    """Others of the version pass, also once it is back and measures nothing, and after a restart of the evaluator."""
    other = Sender(instance="broken", inference="c" * 12, start=fleet.now)

    def moved() -> list[ExportMetricsServiceRequest]:
        return [
            merge(info_request(fleet.now, 0, "broken"), fleet.report(other, 0.001, version="c" * 12)),
            fleet.report(fleet.senders["healthy"], 0.001),
        ]

    fleet.feed(600, moved)
    assert (fleet.states("fail"), fleet.ends()) == ([IncidentState.UNPROVEN], [])
    if shuts_down:
        infos = info_request(fleet.now, 0, "broken"), info_request(fleet.now, 0, "broken", "c" * 12)
        fleet.core.metrics(merge(*infos), fleet.now)
        fleet.run(10, healthy=0.001)
    else:
        fleet.restart()
        fleet.run(300, broken=None, healthy=0.001)
        assert (fleet.states("fail"), fleet.ends()) == ([IncidentState.UNPROVEN], [])
        fleet.run(80, broken=0.001, healthy=0.001)
    assert fleet.states("fail") == []
    assert "is resolved" in fleet.ends()[0]


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("elsewhere", ["prose", "stale"])
def test_a_recorder_that_measures_other_slices_than_it_broke_proves_nothing(make_fleet, elsewhere, columns):
    """A balancer gives the slice to a healthy one, or only older weights sample: the slice may come back to it."""
    fleet = make_fleet(text=SLICED)
    made: dict[tuple[str, str], Sender] = {}

    def run(seconds: float, **measured: tuple[str, float]) -> None:
        for _ in range(round(seconds / STEP)):
            fleet.now += STEP
            for name, (slice, mean) in measured.items():
                sent = []
                for of in {slice} if slice == "stale" else {"all", slice}:
                    sender = made.setdefault((name, of), Sender(instance=name, slice=of, start=NOW - 1.0))
                    sent.append(sender.request(fleet.now, np.full(2000, mean)))
                still = [
                    s.request(fleet.now) for (who, of), s in made.items() if who == name and of not in {"all", slice}
                ]
                message = merge(*sent, *still, info_request(fleet.now, 1, name))
                taken = fleet.core.evaluator.columns_of(message.SerializeToString(), 1000) if columns else None
                fleet.core.metrics(message if taken is None else taken, fleet.now)
            fleet.core.tick(fleet.now)

    run(60, broken=("code", 0.001), healthy=("prose", 0.001))
    run(60, broken=("code", 0.4), healthy=("prose", 0.001))
    run(300, broken=(elsewhere, 0.4 if elsewhere == "stale" else 0.001), healthy=("code", 0.001))
    assert fleet.states("fail") == [IncidentState.UNPROVEN]
    fleet.restart()
    run(100, broken=(elsewhere, 0.4 if elsewhere == "stale" else 0.001), healthy=("code", 0.001))
    assert fleet.states("fail") == [IncidentState.UNPROVEN]
    run(100, broken=("code", 0.001), healthy=("code", 0.001))
    assert fleet.states("fail") == []


def test_a_breach_of_the_last_that_a_recorder_measured_is_not_refuted_by_others(make_fleet):
    """It reports and measures other slices; one that has never broken the slice has nothing to refute."""
    text = TEXT.replace("statistical:", "slices: {code: {where: {task: code}}}\nstatistical:")
    fleet = make_fleet(text=text)
    fleet.judged_after = 0.5

    def run(seconds: float, *code: float | None) -> list[IncidentState]:
        measured = ({"code": mean, "all": 0.001} for mean in code)
        return fleet.run(seconds, **dict(zip(("broken", "healthy", "third"), measured, strict=True)))

    run(60, 0.001, 0.001, 0.001)
    run(120, 0.001, 0.001, None)
    assert run(10, 0.9, 0.001, None) == [IncidentState.BROKEN]
    assert run(300, None, 0.001, None) == [IncidentState.UNPROVEN]
    assert fleet.ends() == []
    assert run(80, 0.001, 0.001, None) == []
    assert run(10, None, 0.9, None) == [IncidentState.BROKEN]
    assert run(300, None, 0.001, None) == [IncidentState.UNPROVEN], "it measured the slice within a window before, too"


def test_a_restart_knows_who_measured_a_slice_just_before_it_broke(fleet):
    """Both measured it; after the restart one observes nothing more, and only the other's breach is over."""
    assert fleet.run(200, broken=0.001, healthy=0.001) == []
    gone = fleet.senders["gone"] = Sender(instance="gone", inference="c" * 12, start=fleet.now)
    fleet.feed(10, lambda: [fleet.report(gone, 0.001, version="c" * 12)])
    fleet.core.metrics(info_request(fleet.now, 0, "gone", "c" * 12), fleet.now)
    fleet.run(10, healthy=0.001, broken=0.001)
    fleet.restart()
    measured = fleet.connection.execute("SELECT key FROM state_values WHERE kind = 'measured'").fetchall()
    assert not [sender for (sender,) in measured if "gone" in sender], "who shut down is forgotten"
    assert measured
    assert fleet.run(10, broken=None, healthy=0.9) == [IncidentState.BROKEN]
    assert fleet.run(300, broken=None, healthy=0.001) == [IncidentState.UNPROVEN]
    assert fleet.run(80, broken=0.001, healthy=0.001) == []


@pytest.mark.parametrize(("sliced", "state"), [(False, IncidentState.BROKEN), (True, IncidentState.CONTAINED)])
def test_a_slice_that_is_kept_away_contains_no_breach_by_requests_of_no_slice(make_fleet, sliced, state):
    """Who broke all traffic is drained; that its requests were of the slice which a person pins is not known."""
    fleet = make_fleet(text=TEXT.replace("statistical:", "slices: {code: {where: {task: code}}}\nstatistical:"))

    def run(seconds: float, broken: float | None, healthy: float, of_code: float | None) -> None:
        of_broken = {"all": broken, "code": broken if sliced else None}
        fleet.run(seconds, broken=of_broken, healthy={"all": healthy, "code": of_code})

    run(60, 0.001, 0.001, 0.001)
    run(40, 0.4, 0.02, 0.4)
    run(150, None, 0.001, 0.4)
    pin(fleet.core, "policy", "code", "train-kernel", None, "ada", "keep users away", fleet.now)
    for _ in range(15):
        route_kept(fleet.core, fleet.now, "code")
        run(20, None, 0.001, None)
    assert fleet.states("fail") == [state]


def test_a_recorder_that_died_while_nothing_was_evaluated_has_refuted_nothing(make_fleet):
    """The FAIL begins at the first evaluation after the pause."""
    fleet = make_fleet()
    fleet.run(60, broken=0.001, healthy=0.001)
    for number in range(23):
        fleet.now += STEP
        for sender, mean in (("broken", 0.4), ("healthy", 0.001)):
            if sender == "healthy" or number < 3:
                fleet.core.metrics(fleet.report(fleet.senders[sender], mean), fleet.now)
    fleet.core.tick(fleet.now + 0.5)
    assert fleet.states() == [IncidentState.BROKEN]
    assert fleet.run(300, healthy=0.001) == [IncidentState.UNPROVEN]


@pytest.mark.parametrize("meanwhile", ["another metric", "another contract", "an export late"])
def test_a_recorder_shows_by_new_observations_of_what_it_broke(make_fleet, meanwhile):
    """What it measures of another metric, or for another contract, and two exports in one message, show nothing."""
    text = TEXT.replace("  - {id: token-tv", "  - {id: k3, metric: k3, unit: token, limit: 0.9}\n  - {id: token-tv")
    fleet = make_fleet(text=text)
    tools = load_text(TEXT.replace("DO", "do: [notify]").replace("name: policy", "name: tools"), "tools.yaml")
    fleet.core = Core([fleet.contract, tools], fleet.connection, external_url="", now=fleet.now)
    metric = "kc.drift.tv_token" if meanwhile == "another contract" else "kc.drift.k3"
    other = Sender(metric, instance="broken", start=NOW - 1.0)

    def drained() -> Iterator[ExportMetricsServiceRequest]:
        idle = fleet.report(fleet.senders["broken"], None)
        if meanwhile == "an export late":
            yield merge(idle, fleet.report(fleet.senders["broken"], None, age=-5.0))
        else:
            more = other.request(fleet.now, np.full(2000, 0.001))
            if meanwhile == "another contract":
                for point in more.resource_metrics[0].scope_metrics[0].metrics[0].exponential_histogram.data_points:
                    point.attributes[0].value.string_value = "tools"
            yield merge(idle, more)
        yield fleet.report(fleet.senders["healthy"], 0.001)

    fleet.breach()
    fleet.feed(400, drained)
    states = fleet.states("fail")
    assert states == [IncidentState.UNPROVEN]


@pytest.mark.parametrize(("step", "apart"), [(90.0, 20.0), (120.0, 60.0)])
def test_trainers_whose_steps_are_longer_than_a_window_show_that_a_breach_is_over(make_fleet, step, apart):
    """Each by its own next step; they need not be there within one window."""
    fleet = make_fleet()
    fleet.senders["healthy"].restart(NOW - 1.0)

    def reports(broken: float) -> Iterator[ExportMetricsServiceRequest]:
        since = fleet.now - NOW
        yield fleet.report(fleet.senders["broken"], broken if since % step == 0.0 else None)
        yield fleet.report(fleet.senders["healthy"], 0.001 if since % step == apart else None)

    fleet.feed(2 * step, lambda: reports(0.001))
    fleet.feed(2 * step, lambda: reports(0.4))
    assert fleet.states() == [IncidentState.BROKEN]
    fleet.feed(5 * step, lambda: reports(0.001))
    assert fleet.states("fail") == []
    assert "is resolved" in fleet.ends()[-1]


def test_a_restart_has_nobody_owe_what_it_never_measured(make_fleet):
    """Of two recorders one measures another metric; it reports before the evaluator, which has begun, evaluates."""
    text = TEXT.replace("  - {id: token-tv", "  - {id: k3, metric: k3, unit: token, limit: 0.9}\n  - {id: token-tv")
    fleet = make_fleet(text=text)
    fleet.senders["healthy"] = Sender("kc.drift.k3", instance="healthy", start=NOW - 1.0)
    fleet.breach()
    fleet.restart()
    fleet.run(20, broken=0.4, healthy=0.001)
    assert fleet.run(200, broken=0.001, healthy=0.001) == []


def test_a_message_that_a_collector_has_split_is_no_shutdown(fleet):
    """What a recorder is done with comes before the version that it has moved to: it still reports its trainer."""
    other = Sender(instance="broken", inference="c" * 12, start=fleet.now)
    train = info_request(fleet.now, 1, "broken", "a" * 12)

    def moved() -> list[ExportMetricsServiceRequest]:
        return [
            info_request(fleet.now, 0, "broken"),
            merge(train, fleet.report(other, 0.001, version="c" * 12)),
            fleet.report(fleet.senders["healthy"], 0.001),
        ]

    fleet.core.metrics(train, fleet.now)
    fleet.feed(300, moved)
    assert fleet.states("fail") == [IncidentState.UNPROVEN]


def test_batches_that_are_dropped_keep_no_breach_from_its_end(fleet):
    """In a large fleet there is always one; they are told as missing, and whoever broke something shows the rest."""
    dropped = 0

    def reports() -> Iterator[ExportMetricsServiceRequest]:
        nonlocal dropped
        dropped += 1
        lost = counted("queue_full", dropped, NOW, fleet.now, metric="kc.recorder.dropped", instance="healthy")
        yield merge(fleet.report(fleet.senders["healthy"], 0.001), lost)
        yield fleet.report(fleet.senders["broken"], 0.001)

    fleet.feed(300, reports)
    assert fleet.core.incidents() == ()
    assert fleet.core.evaluator.missing("policy", fleet.now) != []


def test_a_breach_of_a_trainer_that_was_mended_is_over_once_all_who_measured_it_have_shut_down(fleet):
    """The inference kernel serves on, measured against the mended one."""
    for name in ("broken", "healthy"):
        fleet.core.metrics(info_request(fleet.now, 0, name), fleet.now)
    mended = Sender(instance="new", train="d" * 12, start=fleet.now)
    fleet.feed(500, lambda: [fleet.report(mended, 0.001)])
    assert fleet.states("fail") == []
    assert "without proof of recovery" in fleet.ends()[-1]


def test_such_a_breach_is_over_though_another_recorder_had_died_a_long_window_before(make_fleet):
    fleet = make_fleet()
    fleet.run(60, third=0.001, broken=0.001, healthy=0.001)
    fleet.run(700, broken=0.001, healthy=0.001)
    assert fleet.run(120, broken=0.4, healthy=0.001) == [IncidentState.BROKEN]
    for name in ("broken", "healthy"):
        fleet.core.metrics(info_request(fleet.now, 0, name), fleet.now)
    mended = Sender(instance="new", train="d" * 12, start=fleet.now)
    fleet.feed(500, lambda: [fleet.report(mended, 0.001)])
    assert fleet.states("fail") == []


def test_a_breach_has_not_ended_with_those_who_broke_it_where_others_were_started_in_their_place(fleet):
    """They report and get no requests, as where a route keeps these away: their kernel serves once it is lifted."""
    for name in ("broken", "healthy"):
        fleet.core.metrics(info_request(fleet.now, 0, name), fleet.now)
    fleet.feed(600, lambda: [info_request(fleet.now, 1, "third")])
    assert "Ended" not in [incident.state_text for incident in fleet.core.incidents()]
    assert fleet.states("fail") == [IncidentState.BROKEN]


def test_a_breach_is_not_contained_while_one_of_its_slices_is_neither_over_nor_kept_away(make_fleet):
    """Code went away without proof; prose, which still breaks, is pinned, and a router takes that; then code, too."""
    fleet = make_fleet(text=SLICED)
    idle, code = {"code": None, "all": None}, {"code": 0.001, "all": 0.001}
    broken = {"prose": 0.4, "all": 0.4}
    fleet.run(60, broken=code, third={"prose": 0.001, "all": 0.001})
    fleet.run(60, broken={"code": 0.4, "all": 0.4}, third=broken)
    fleet.run(120, broken=idle, healthy=code, third=broken)
    assert fleet.states("fail") == [IncidentState.BROKEN]
    pin(fleet.core, "policy", "prose", "train-kernel", None, "ada", "prose is broken", fleet.now)
    pinned, seen = ["prose"], set[IncidentState]()
    for number in range(40):
        route_kept(fleet.core, fleet.now, *pinned, versions=["b" * 12])
        fleet.run(10, broken=idle, healthy=idle if "code" in pinned else code, third=idle)
        states = fleet.states("fail")
        if number == 29:
            assert IncidentState.CONTAINED not in seen | {*states}
            pin(fleet.core, "policy", "code", "train-kernel", None, "ada", "code was broken", fleet.now)
            pinned.append("code")
        seen |= {*states}
    assert IncidentState.CONTAINED in seen


@pytest.mark.parametrize("replaced", [False, True])
def test_invalid_input_of_a_slice_is_refuted_by_what_its_recorder_measures_of_that_slice(make_fleet, replaced):
    """Neither by its other slices, nor by those to whom the slice went; nobody is told of an end before."""
    steps = "do: [{webhook: pager}]}\n  - {on: invalid-input, do: [{webhook: pager}]"
    text = TEXT.replace("statistical:", "slices: {code: {where: {task: code}}}\nstatistical:")
    fleet = make_fleet(steps, text)
    made = {(name, of): Sender(instance=name, slice=of) for name in ("broken", "healthy") for of in ("all", "code")}
    failed = 0

    def run(seconds: float, *measure_code: str, failing: int = 0) -> list[IncidentState]:
        def reports() -> Iterator[ExportMetricsServiceRequest]:
            nonlocal failed
            failed += failing
            invalid = [
                counted("nan_logprob", failed, NOW, fleet.now, ("a" * 12, "b" * 12), of, instance="broken")
                for of in ("all", "code")
                if failed
            ]
            for name in ("broken", "healthy"):
                code = np.full(2000 * (name in measure_code), 0.001)
                sent = made[name, "code"].request(fleet.now, code), made[name, "all"].request(fleet.now, [0.001] * 2000)
                yield merge(*sent, *invalid * (name == "broken"), info_request(fleet.now, 1, name))

        fleet.feed(seconds, reports)
        return fleet.states("invalid-input")

    run(60, "broken")
    assert run(120, failing=10) == [IncidentState.BROKEN]
    (incident,) = fleet.core.incidents()
    assert incident.slices == ("code", "all")
    for _ in range(2):
        assert run(300, *["healthy"] * replaced) == [IncidentState.UNPROVEN]
        fleet.restart()
    assert fleet.ends() == []
    assert run(80, "broken") == []
    assert "no sequences fail the input checks any more" in fleet.ends()[0]


@pytest.mark.parametrize("idle", [{}, {"broken": None, "third": None}], ids=["dead", "idle"])
def test_a_recorder_that_measured_nothing_of_a_breach_keeps_no_incident(make_fleet, idle):
    """One that died or is idle since before it, and one that has never measured anything, have nothing to refute."""
    fleet = make_fleet()
    fleet.run(60, broken=0.001, healthy=0.001, third=None)
    for seconds, mean in ((120, 0.001), (30, 0.4)):
        fleet.run(seconds, healthy=mean, **idle)
    assert fleet.core.incidents()
    assert fleet.run(600, healthy=0.001, **idle) == []
    assert "is resolved" in fleet.ends()[0]


def test_a_route_contains_nothing_while_a_recorder_of_the_breach_is_lost(make_fleet):
    """Its server may have no router that asks, and serve on; what a router keeps away elsewhere says nothing of it."""
    fleet = make_fleet("do: [{route: train-kernel}, {webhook: pager}]")
    states: list[str] = []

    def run(seconds: float, **reported: float | None) -> None:
        for _ in range(round(seconds / STEP)):
            if fleet.core.inference_versions("policy"):
                route_kept(fleet.core, fleet.now)
            fleet.run(STEP, **reported)
            states.extend(str(incident.state) for incident in fleet.core.incidents() if incident.on == "fail")

    run(60, broken=0.4, healthy=0.4)
    run(600, healthy=None)
    assert set(states) == {"broken"}
    fleet.restart()
    run(600, healthy=None)
    assert set(states) == {"broken"}
    shut_down(fleet)
    run(20, healthy=None)
    assert states[-1] == "contained"
    run(60)
    assert states[-1] == "contained", "one export may be late"
    run(10)
    assert states[-1] == "broken"
    run(10, healthy=None)
    assert states[-1] == "contained"


def test_a_recorder_that_dies_after_runs_with_pauses_is_told_as_soon_as_any(make_fleet):
    """Three short runs, 25 minutes apart, each shut down; the fourth is killed."""
    fleet = make_fleet("do: [notify]}\n  - {on: no-data, do: [notify]")
    for run in range(4):
        fleet.senders["broken"] = Sender(instance=f"run-{run}", start=fleet.now - 1.0)
        fleet.run(30, broken=0.001)
        if run < 3:
            fleet.core.metrics(info_request(fleet.now, 0, f"run-{run}"), fleet.now)
            fleet.run(25 * 60)
    fleet.run(40)
    assert fleet.states("no-data") == []
    fleet.run(10)
    (verdict, _), *_ = fleet.core.history.cells()
    assert (verdict.status, len(fleet.states("no-data"))) == (Status.NO_DATA, 1)


@pytest.mark.parametrize(("lasts", "silent"), [("", 0), ("for: 30s, ", 60)])
def test_no_data_are_alarmed_of_what_an_evaluator_that_was_away_has_not_heard_yet(make_fleet, lasts, silent):
    """Its outage was longer than the long window, so that nothing is left, and what waits for `for` goes on there."""
    fleet = make_fleet(f"do: [notify]}}\n  - {{on: no-data, {lasts}do: [notify]")
    fleet.run(60, healthy=0.001)
    fleet.run(silent)
    fleet.close()
    fleet.now += 400.0
    fleet.begin()
    fleet.run(3 * STEP)
    assert not fleet.core.firing(), "it has not listened for a heartbeat"
    fleet.run(60)
    assert len(fleet.core.firing()) == 1


@pytest.mark.parametrize(("seconds", "workers"), [(20, 1), (200, 1), (200, 9)])
def test_jobs_on_a_schedule_are_no_silence_once_their_interval_is_known(make_fleet, seconds, workers):
    """An import every four or seven minutes, each of processes that shut down, however often they report."""
    fleet = make_fleet("do: [notify]}\n  - {on: no-data, for: 1m, do: [notify]")
    silences = []
    for job in range(6):
        names = [f"import-{job}-{worker}" for worker in range(workers)]
        fleet.senders = {name: Sender(instance=name, start=fleet.now - 1.0) for name in names}
        for step in range(seconds // 10):
            fleet.run(10, **dict.fromkeys(names[: step + 1], 0.001))
        for name in names:
            fleet.core.metrics(info_request(fleet.now, 0, name), fleet.now)
        fleet.run(220)
        silences += [len(fleet.states("no-data"))]
    assert silences == [1, 1, 0, 0, 0, 0]


def test_what_ran_for_longer_than_its_pauses_has_no_schedule(make_fleet):
    """A server that was down for four minutes a few times is missed as soon as any."""
    fleet = make_fleet("do: [notify]}\n  - {on: no-data, for: 1m, do: [notify]")
    for run, seconds in enumerate([20, 20, 20, 400]):
        fleet.run(220)
        fleet.senders["broken"] = Sender(instance=f"run-{run}", start=fleet.now - 1.0)
        fleet.run(seconds, broken=0.001)
        fleet.core.metrics(info_request(fleet.now, 0, f"run-{run}"), fleet.now)
    assert fleet.states("no-data") == []
    fleet.run(110)
    assert fleet.states("no-data") == [IncidentState.BROKEN]


@pytest.mark.parametrize("statistic", ["mean", "max"])
def test_the_breach_of_a_job_ends_with_it_though_the_next_one_is_not_due(make_fleet, statistic):
    """The next one is waited for as after any other job, without an alert."""
    text = TEXT.replace("unit: token,", f"unit: token, statistic: {statistic},")
    fleet = make_fleet("do: [notify]}\n  - {on: no-data, for: 30s, do: [notify]", text=text)
    for job, mean in enumerate([0.001, 0.001, 0.001, 0.4]):
        fleet.run(220)
        fleet.senders["broken"] = Sender(instance=f"import-{job}", start=fleet.now - 1.0)
        fleet.run(20, broken=mean)
        fleet.core.metrics(info_request(fleet.now, 0, f"import-{job}"), fleet.now)
    assert fleet.states("fail") == [IncidentState.BROKEN]
    fleet.run(120)
    ((verdict, _),) = fleet.core.history.cells()
    assert (verdict.reason.startswith(NEXT_DUE), fleet.states("fail"), fleet.states("no-data")) == (True, [], [])
    fleet.run(220)
    assert fleet.states("no-data") == [IncidentState.BROKEN]


def test_a_run_ends_in_order_though_another_was_killed_a_long_window_before(make_fleet):
    """It is told as ended for good; within a long window, the one that was killed may still serve."""
    fleet = make_fleet("do: [notify]}\n  - {on: no-data, for: 1m, do: [notify]")
    fleet.run(60, third=0.001)
    for seconds, said in [(200, "no report for"), (400, "the run ended")]:
        fleet.senders["broken"] = Sender(instance=f"run-{seconds}", start=fleet.now - 1.0)
        fleet.run(seconds, broken=0.001)
        fleet.core.metrics(info_request(fleet.now, 0, f"run-{seconds}"), fleet.now)
        for later in (120, 600):
            fleet.run(later)
            ((verdict, _),) = fleet.core.history.cells()
            assert verdict.reason.startswith(said)


def test_jobs_that_are_further_apart_than_the_long_window_are_no_silence_until_one_is_overdue(make_fleet):
    """An import every hour, and a restart of the evaluator between two; the last one lacks a slice."""
    fleet = make_fleet("do: [notify]}\n  - {on: no-data, for: 1m, do: [notify]", text=SLICED)
    silences: list[int] = []

    def missing() -> set[str]:
        return {cell.slice for incident in fleet.core.incidents() for cell in incident.cells}

    def job(number: int, pause: float = 3580.0, **observed: float) -> None:
        fleet.restart()
        fleet.senders = {"broken": Sender(instance=f"import-{number}", start=fleet.now - 1.0)}
        for slice in observed:
            fleet.senders[f"broken/{slice}"] = Sender(instance=f"import-{number}", slice=slice, start=fleet.now - 1.0)
        fleet.run(20, broken={"all": 0.001, **observed})
        fleet.core.metrics(info_request(fleet.now, 0, f"import-{number}"), fleet.now)
        fleet.run(pause)
        silences.append(len(fleet.states("no-data")))

    for number in range(5):
        job(number, code=0.001, prose=0.001)
    assert silences == [1, 1, 0, 0, 0]
    cells = [verdict for verdict, _ in fleet.core.history.cells()]
    assert {verdict.status for verdict in cells} == {Status.NO_DATA}
    assert all(verdict.reason.startswith("next report due by") for verdict in cells)
    with client_of(fleet.core) as client:
        assert _exit_code(client.get("/api/v1/verdicts").json()["verdicts"], [], [], unknown=False) == 0
    job(5, 200.0, code=0.001)
    assert missing() == {"prose"}
    fleet.run(3400)
    assert missing() == set()
    fleet.run(200)
    assert missing() == {"all", "code", "prose"}


def test_a_silent_member_of_a_healthy_fleet_is_told_while_it_is_silent(make_fleet):
    """By status, the page and a metric, with its name; not once it reports again, and not where all are silent."""
    fleet = make_fleet()

    def told() -> tuple[str, float]:
        about = 'kc_evaluator_silent{kc_contract="policy",kc_kernel_inference="bbbbbbbbbbbb"} '
        client = client_of(fleet.core)
        (contract,) = client.get("/api/v1/contracts").json()["contracts"]
        (line,) = [line for line in client.get("/metrics").text.splitlines() if line.startswith(about)]
        (kernel,) = contract["kernels"]
        assert kernel["otherwise"] == ["dtype bfloat16 is declared, and fp8 reported"]
        return kernel["silent"], float(line.removeprefix(about))

    fleet.run(60, broken=0.001, healthy=0.001, third=0.001)
    assert told() == ("", 0.0)
    fleet.run(60, broken=0.001, healthy=0.001)
    assert told() == ("", 0.0), "one export may be late"
    fleet.run(10, broken=0.001, healthy=0.001)
    assert told() == ("1 of 3 recorders is silent without having shut down: third for 1m10s", 1.0)
    assert {verdict.status for verdict, _ in fleet.core.history.cells()} == {Status.PASS}
    assert (fleet.core.incidents(), fleet.core.firing()) == ((), [])
    fleet.run(10, broken=0.001, healthy=0.001, third=0.001)
    assert told() == ("", 0.0)
    fleet.run(70, broken=0.001)
    assert told()[1] == 2.0
    fleet.run(240, broken=0.001)
    assert told() == ("", 0.0), "the long window is over"
    fleet.run(10, broken=0.001, healthy=0.001)
    fleet.run(70, broken=0.001)
    assert told() == ("1 of 2 recorders is silent without having shut down: healthy for 1m10s", 1.0)
    fleet.run(70)
    assert told() == ("", 0.0), "all are silent, which is another matter"


def test_a_breach_of_latency_ends_where_what_arrives_passes(make_fleet):
    """Servers say of no kernel whose latency it is, and come and go without a word."""
    clause = "runtime:\n  - {id: ttft, metric: gen_ai.server.time_to_first_token, statistic: p99, limit: 2s}\n"
    text = TEXT.replace("observability:", f"{clause}observability:")
    fleet = make_fleet(text=text)
    edges, attributes = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0), {"gen_ai.request.model": "m"}
    fleet.senders |= {
        name: Sender("gen_ai.server.time_to_first_token", instance=name, edges=edges, attributes=attributes)
        for name in ("slow", "quick")
    }
    assert fleet.run(40, healthy=0.001, slow=8.0, quick=0.2) == [IncidentState.BROKEN]
    assert fleet.run(200, healthy=0.001, quick=0.2) == []
    assert "is resolved" in fleet.ends()[0]


def test_a_version_whose_recorders_are_all_silent_is_told_while_another_reports(make_fleet):
    """It may serve on: that its cells are gone says nothing of it."""
    fleet, other = make_fleet(), Sender(instance="other", inference="c" * 12, start=NOW - 1.0)
    for _ in range(12):
        fleet.run(STEP, healthy=0.001)
        fleet.core.metrics(fleet.report(other, 0.001, version="c" * 12), fleet.now)
    assert fleet.core.evaluator.silent_recorders("policy", "c" * 12, fleet.now) == (0, "")
    fleet.run(100, healthy=0.001)
    assert fleet.core.evaluator.silent_recorders("policy", "c" * 12, fleet.now) == (
        1, "1 of 1 recorders is silent without having shut down: other for 1m40s",
    )  # fmt: skip


def test_a_routed_breach_that_loses_its_recorder_is_unproven_in_the_metrics(make_fleet):
    """The route stays, and the incident with it: rules on the metric fire as the webhook does, a window later."""
    fleet = make_fleet("do: [{route: train-kernel}, {webhook: pager}]")

    def state() -> float:
        metrics = client_of(fleet.core).get("/metrics").text.splitlines()
        (value,) = [line.rpartition(" ")[2] for line in metrics if line.startswith('kc_incident{kc_contract="policy"')]
        return float(value)

    fleet.breach()
    assert state() == 2.0
    said = []
    while fleet.core.firing():
        assert state() == 2.0
        said.append(fleet.core.incidents()[0].state_text.partition(" ordered at ")[0])
        fleet.run(10, healthy=0.001)
    fleet.run(60, healthy=0.001)
    assert state() == 0.0
    words = ("Broken", "Was broken; nothing has refuted it since")
    was = [f"{word}; routing to the training kernel was" for word in words]
    assert list(dict.fromkeys(said)) == was, "an alert alone holds it at last"


def test_an_outage_of_the_evaluator_clears_no_alert(make_fleet):
    """Nobody saw a verdict meanwhile: `clear_for` goes on where it was."""
    fleet = make_fleet("do: [{webhook: pager}]", text=TEXT.replace("clear_for: 1s", "clear_for: 60s"))
    fleet.breach()
    while not fleet.core.policies["policy"].alerts[0].counting:
        fleet.run(STEP, broken=0.001, healthy=0.001)
    fleet.close()
    fleet.now += 50.0
    fleet.begin()
    fleet.run(STEP, broken=0.001, healthy=0.001)
    assert fleet.core.firing()
    fleet.run(60.0, broken=0.001, healthy=0.001)
    assert not fleet.core.firing()


def test_a_trainer_with_long_steps_fails_at_its_first_bad_step_also_after_a_breach(make_fleet):
    """What waits for other recorders' round waits only while the cell fails."""
    fleet = make_fleet(text=TEXT.replace("window: 1m, long_window: 5m", "window: 15m, long_window: 1h"))

    def step(drift: float) -> set[Status]:
        fleet.run(110, broken=None, healthy=None)
        fleet.run(STEP, broken=drift, healthy=0.001)
        return {verdict.status for verdict, _ in fleet.core.history.cells()}

    for drift in [0.001] * 4 + [0.4] * 2 + [0.001] * 30:
        last = step(drift)
    assert last == {Status.PASS}
    assert step(0.4) == {Status.FAIL}


def test_a_repaired_fleet_is_not_told_as_unproven_while_its_recorders_report_one_after_another(make_fleet):
    """Its alert ends before each has shown its end: the metric, the API and the events wait, as webhooks do."""
    fleet = make_fleet()
    fleet.run(60, broken=0.001, healthy=0.001)
    fleet.run(30, broken=0.4, healthy=0.4)
    while fleet.core.firing():
        fleet.run(10, broken=0.001)

    def shown() -> tuple[str, bool, str]:
        client = client_of(fleet.core)
        (row,) = client.get("/api/v1/overview").json()["incidents"]
        (line,) = [line for line in client.get("/metrics").text.splitlines() if line.startswith("kc_incident{")]
        return row["state_text"], row["went_away"], line.rpartition(" ")[2]

    assert fleet.states() == [IncidentState.UNPROVEN]
    assert shown() == (f"No longer measured as broken; {NOT_PROVEN}", False, "2.0")
    assert fleet.core.events.newest()[-1].message.endswith(f"; {NOT_PROVEN}")
    fleet.run(60, broken=0.001)
    assert shown() == ("Went away without proof of recovery", True, "0.0")
    assert fleet.run(80, broken=0.001, healthy=0.001) == []
    last = fleet.core.events.newest()[-1]
    assert (last.kind, last.message.split(" for ")[0]) == (
        "over", "policy: Resolved: token-tv was above its limit on all traffic",
    )  # fmt: skip


def test_what_is_over_but_for_its_route_is_broken_on_no_surface(make_fleet):
    """Nor in a log record, and each of those has the contract that it is about."""
    fleet = make_fleet("do: [{route: train-kernel}, {webhook: pager}]")
    said: list[Announcement] = []
    fleet.core.events.announce = said.append
    fleet.run(60, healthy=0.001)
    fleet.run(30, healthy=0.4)
    fleet.run(200, healthy=0.001)
    client = client_of(fleet.core)
    (row,) = client.get("/api/v1/overview").json()["incidents"]
    assert (row["only_route_left"], row["went_away"]) == (True, False)
    assert not [line for line in client.get("/metrics").text.splitlines() if line.startswith("kc_incident{")]
    (over,) = [event for event in fleet.core.events.newest() if event.kind == "over"]
    assert "No longer measured as broken: the breach is over, and the route ordered at 20" in over.message
    assert over.message == said[-1].message
    assert {announcement.attributes.get("kc.contract") for announcement in said} == {"policy"}


def test_the_last_message_says_what_keeps_requests_away_and_how_to_end_it(make_fleet):
    """The breach is over at its time, and not broken; a route and a pin stay until a person ends them."""
    fleet = make_fleet("do: [{route: train-kernel}, {webhook: pager}]")
    fleet.run(60, healthy=0.001)
    fleet.run(30, healthy=0.4)
    pin(fleet.core, "policy", "all", "inference-kernel", None, "ada", "to measure", fleet.now)
    fleet.run(200, healthy=0.001)
    bodies = [json.loads(message.body) for message in fleet.core.outbox.messages()]
    body = next(body for body in bodies if body["status"] == "resolved")
    contract, (alert,) = body["kernelContract"], body["alerts"]
    commands = [
        "kc-otel route resume policy --slice all --why '...'",
        "kc-otel route unpin policy --slice all --why '...'",
    ]
    run = f"run `{commands[0]}` and `{commands[1]}`."
    assert contract["next"] == f"Now: once the kernel is trusted again or serves nobody, {run}"
    assert contract["next"] in alert["annotations"]["description"]
    assert (contract["incident"]["state"], contract["incident"]["until"]) == ("recovered", alert["endsAt"])
    text = "No longer measured as broken: the breach is over, and the route ordered at "
    assert contract["incident"]["state_text"].startswith(text)


def test_the_first_of_two_alerts_that_ends_does_not_say_that_the_breach_is_resolved(make_fleet):
    """Its recorder is silent, and returns before the second ends: neither event contradicts the other."""
    steps = "do: [{webhook: pager}]}\n  - {on: fail, clear_for: 45s, severity: warning, do: [notify]"
    fleet = make_fleet(steps)
    fleet.breach()
    while not (ends := [event for event in fleet.core.events.newest(limit=50) if event.kind == "resolved"]):
        fleet.run(10, healthy=0.001)
    (first,) = ends
    assert "all traffic is no longer measured as broken for " in first.message
    assert first.message.endswith("; another alert of it still fires")
    fleet.run(50, healthy=0.001, broken=0.001)
    _, last = [event for event in fleet.core.events.newest(limit=50) if event.kind == "resolved"]
    assert last.message.endswith(f"; {NOT_PROVEN}")


def test_an_unproven_breach_is_told_once_the_silence_that_it_began_in_has_ended(make_fleet):
    """Its alert began and ended during the silence, and its recorder died."""
    fleet = make_fleet()
    fleet.run(60, broken=0.001, healthy=0.001)
    silence(fleet.core, "policy", None, None, fleet.now + 600.0, "ada", "planned work", fleet.now)
    fleet.run(60, broken=0.4, healthy=0.001)
    fleet.run(300, healthy=0.001)
    fleet.restart()
    assert fleet.run(200, healthy=0.001) == [IncidentState.UNPROVEN]
    assert not fleet.core.outbox.messages(DeliveryState.WAITING)
    fleet.run(100, healthy=0.001)
    (message,) = fleet.core.outbox.messages(DeliveryState.WAITING)
    body = json.loads(message.body)
    assert (body["status"], body["notification_reason"]) == ("firing", "unproven")
    closed_by_a_person(fleet)
    fleet.run(10, healthy=0.001)
    assert len(fleet.ends()) == 1


def test_what_is_measured_within_a_window_of_a_rollback_is_taken_for_a_backlog(fleet):
    """A breach of a version that serves nobody is over, though its requests are scored for longer than a heartbeat."""
    rolled_back_by_a_person(fleet)
    fleet.run(45, broken=0.4, healthy=0.001)
    assert fleet.core.promotions.of("policy", "b" * 12).seen_serving is None
    assert [incident.gone for incident in fleet.core.incidents()] == [True]
    fleet.run(30, broken=0.4, healthy=0.001)
    assert fleet.core.promotions.of("policy", "b" * 12).seen_serving is not None
    assert [incident.gone for incident in fleet.core.incidents()] == [False]


def test_a_version_that_is_started_again_after_its_rollback_is_not_taken_for_one_that_serves_nobody(make_fleet):
    """Its breach is not over once its recorder dies, and its promotion waits."""
    text = TEXT.replace("observability:", "promotion: {failure_limit: 3}\nobservability:")
    fleet = make_fleet(text=text)
    fleet.breach()
    rolled_back_by_a_person(fleet)
    fleet.run(10, broken=0.4, healthy=0.001)
    assert [incident.gone for incident in fleet.core.incidents()] == [True]
    promotions, version = fleet.core.promotions, "b" * 12
    promotions.tell("policy", version, "start", "ada", "", fleet.now)
    promotions.tell("policy", version, "force", "ada", "it is mended", fleet.now, stage=Stage.CANARY, start=True)
    fleet.run(20, broken=0.4, healthy=0.001)
    fleet.run(900, healthy=0.001)
    (incident,) = fleet.core.incidents()
    assert (incident.state, incident.gone) == (IncidentState.UNPROVEN, False)
    assert promotions.of("policy", version).position.stage is Stage.CANARY


TRIED = "c" * 12


@pytest.fixture
def fleet_with_canary(make_fleet):
    """A version that was promoted and one in canary, each measured by a recorder of its own."""
    fleet = make_fleet("do: [notify]}\n  - {on: no-data, for: 30s, do: [{webhook: pager}]")
    fleet.senders["canary"] = Sender(instance="canary", inference=TRIED, start=fleet.now)
    fleet.feed(60, lambda: both(fleet))
    for version, stage in (("b" * 12, Stage.FULL), (TRIED, Stage.CANARY)):
        fleet.core.promotions.tell("policy", version, "force", "ada", "hurry", fleet.now, stage=stage, start=True)
    fleet.feed(60, lambda: both(fleet))
    return fleet


def both(fleet: Fleet, **other: Sender) -> list[ExportMetricsServiceRequest]:
    canary, promoted = other.get("canary", fleet.senders["canary"]), other.get("healthy", fleet.senders["healthy"])
    return [fleet.report(canary, 0.001, version=TRIED), fleet.report(promoted, 0.001)]


def statuses(fleet: Fleet) -> dict[tuple[str, str], Status]:
    return {verdict.cell.pair: verdict.status for verdict, _ in fleet.core.history.cells()}


@pytest.mark.parametrize("dead", [0, 1], ids=["canary", "promoted"])
def test_a_recorder_that_died_is_missed_while_a_canary_runs(fleet_with_canary, dead):
    """Its version may go on serving its share: no other has replaced it, and the promoted one has all after a rollback.

    A promoted one that shuts down cleanly was replaced without a promotion.
    """
    fleet, pairs = fleet_with_canary, [("a" * 12, TRIED), ("a" * 12, "b" * 12)]
    fleet.feed(600, lambda: [both(fleet)[1 - dead]])
    fleet.restart()
    fleet.feed(60, lambda: [both(fleet)[1 - dead]])
    assert statuses(fleet) == {pairs[dead]: Status.NO_DATA, pairs[1 - dead]: Status.PASS}
    reasons = [verdict.reason for verdict, _ in fleet.core.history.cells()]
    assert any(reason.endswith("; others report, and its promotion gives it requests") for reason in reasons)
    fleet.feed(100, list)  # nobody reports
    assert [incident.kernel_inference for incident in fleet.core.incidents()].count(pairs[dead][1]) == 1
    assert fleet.ends() == []
    fleet.core.promotions.tell("policy", TRIED, "rollback", "ada", "it died", fleet.now)
    fleet.feed(60, lambda: [both(fleet)[1 - dead]])
    assert statuses(fleet).get(pairs[dead]) is (Status.NO_DATA if dead else None)
    fleet.core.metrics(info_request(fleet.now, 0, "healthy"), fleet.now)
    fleet.feed(60, lambda: [both(fleet)[1 - dead]])
    assert pairs[dead] not in statuses(fleet)


def test_a_canary_is_not_missed_beside_the_training_kernel_that_was_replaced(fleet_with_canary):
    """It reports beside the new one, and is missed there once it falls silent."""
    fleet, new = fleet_with_canary, "d" * 12
    canary = Sender(instance="canary", train=new, inference=TRIED, start=fleet.now)
    healthy = Sender(instance="healthy", train=new, start=fleet.now)
    fleet.feed(600, lambda: both(fleet, canary=canary, healthy=healthy))
    assert statuses(fleet) == {(new, TRIED): Status.PASS, (new, "b" * 12): Status.PASS}
    assert {key.kernel_train for key in fleet.core.evaluator.states["policy"].series} == {new}
    fleet.feed(600, lambda: both(fleet, canary=canary, healthy=healthy)[1:])
    assert statuses(fleet) == {(new, TRIED): Status.NO_DATA, (new, "b" * 12): Status.PASS}


@pytest.mark.parametrize("gap", [65.0, 400.0])
def test_an_outage_of_the_evaluator_is_no_silence_of_what_it_did_not_hear(make_fleet, gap):
    """No incident begins and ends with it, also of a contained slice; a cell that lacks data says that it was away."""
    fleet = make_fleet("do: [{route: train-kernel}, {webhook: pager}]", text=SLICED)

    def run(seconds: float, code: float | None, *, routed: bool = True) -> None:
        for _ in range(round(seconds / STEP)):
            if routed:
                route_kept(fleet.core, fleet.now, "code", versions=["b" * 12])
            fleet.run(STEP, broken={"code": code, "prose": 0.001, "all": 0.001})

    run(60, 0.001, routed=False)
    run(40, 0.4, routed=False)
    run(270, None)
    assert fleet.states() == [IncidentState.CONTAINED]
    fleet.close()
    before = fleet.now
    fleet.now += gap
    fleet.begin()
    fleet.core.tick(fleet.now + 1.0)
    reasons = {verdict.cell.slice: verdict.reason for verdict, _ in fleet.core.history.cells()}
    away = f"; the evaluator did not listen from {moment(before)} to {moment(fleet.now + 1.0)}"
    absent = ["code"] if gap < 300 else ["all", "code", "prose"]
    assert [slice for slice in sorted(reasons) if reasons[slice].endswith(f" in 5m{away}")] == absent
    assert fleet.states() == [IncidentState.CONTAINED]
    run(50, None)
    assert fleet.states() == [IncidentState.CONTAINED]
    assert [
        event.message for event in fleet.core.events.newest(limit=1000, verdicts=False) if event.kind == "over"
    ] == []


@pytest.mark.parametrize("passing", ["at once", "later", "itself, later"])
def test_drift_against_a_new_training_kernel_rolls_no_version_back_that_passes_against_the_old_one(make_fleet, passing):
    """The message names both by the fields in which they differ; any version that passes clears it."""
    new, version = "d" * 12, "b" * 12
    fleet = make_fleet("do: [{route: train-kernel}, {webhook: pager}]")
    told = fleet.core.promotions
    fleet.run(60, healthy=0.001)
    told.tell("policy", version, "force", "ada", "it serves", fleet.now, stage=Stage.FULL, start=True)
    fleet.run(60, healthy=0.001)
    senders = [Sender(instance="new", train=new, start=fleet.now)]
    sound = Sender(instance="sound", train=new, inference="e" * 12, start=fleet.now)
    tried = passing == "at once"
    senders += [sound] * tried
    kernels = [("a" * 12, "eager"), (new, "sdpa")]

    def trained(drift: float) -> list[ExportMetricsServiceRequest]:
        infos = [info_request(fleet.now, 1, "new", kernel, "train", of) for kernel, of in kernels]
        passed = [fleet.report(sender, 0.001, version="e" * 12) for sender in senders[1:]]
        return [*infos, *passed, fleet.report(senders[0], drift)]

    for seconds in (60, 600):
        fleet.feed(seconds, lambda: trained(0.4))
        assert told.of("policy", version).full is not tried
    (incident,) = [of for of in fleet.core.incidents() if of.pair == (new, version)]
    against = f"the same version passed against vllm bfloat16, attention eager ({'a' * 12})"
    assert incident.extents[0][1].endswith(against) is not tried
    blamed = "Now: compare the training kernels, and roll back the one that changed"
    assert {body["kernelContract"]["next"].startswith(blamed) for body in fleet.told()} == {not tried}
    if passing == "itself, later":
        fleet.feed(400, lambda: trained(0.001))
    senders += [sound] * (passing == "later")
    fleet.feed(120, lambda: trained(0.4))
    assert not told.of("policy", version).full
    (incident,) = [of for of in fleet.core.incidents() if of.pair == (new, version)]
    assert not incident.extents[0][1].endswith(against)
