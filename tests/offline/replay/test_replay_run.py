"""A recording under a contract: the same as it was live, earlier with a tighter limit, later with a longer `for`."""

from __future__ import annotations

import struct
import time
from itertools import pairwise

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kc_otel.judge.otlp.traffic_entries import EVALUATED, TrafficEntry, marked_frame
from kc_otel.offline.replay import TrafficFileError, read_recordings, replay, replay_recordings
from kc_otel.serve.core import Core
from kc_otel.serve.store.state_file import open_state

pytestmark = pytest.mark.slow

START = 1_800_000_000.0
ROUTE = "route:train-kernel"


def live(contract, path, monkeypatch, traffic, silence=(0.0, 0.0)):
    """The evaluator's core at a clock that is told to it, and what `kc-otel serve --record` keeps of it."""
    core = Core([contract], open_state(None), external_url="http://evaluator", now=START)
    frames, tick = [], START + 0.3

    def judge():
        core.tick(tick)
        frames.append(marked_frame(b"", tick, EVALUATED))

    for at, request in traffic():
        while tick < at:
            judge()
            tick += 3.7
        if not silence[0] <= at - START < silence[1]:
            monkeypatch.setattr(time, "time", lambda at=at: at + 0.0123)
            core.metrics(request)
            frames.append(marked_frame(request.SerializeToString(), at + 0.0123))
    judge()
    path.write_bytes(b"".join(frames))
    return core


def test_the_same_contract_does_what_the_live_evaluator_did(make_contract, traffic, tmp_path, monkeypatch):
    contract, path = make_contract(), tmp_path / "recording"
    core = live(contract, path, monkeypatch, traffic, silence=(80.0, 300.0))
    damage: list[str] = []
    timeline = replay(contract, read_recordings([path], damage), None)
    edges = [
        (alert.start, "firing", alert.clause, alert.slice, alert.kernel_inference, alert.what, alert.reason)
        for alert in timeline.alerts
    ] + [
        (alert.end, "resolved", alert.clause, alert.slice, alert.kernel_inference, alert.what, "")
        for alert in timeline.alerts
        if alert.end is not None
    ]
    happened = [
        (
            event.at, event.kind, *(event.data[name] for name in ("clause", "slice", "kernel_inference", "on")),
            event.data["verdict"]["reason"] if event.kind == "firing" else "",
        )
        for event in core.events.newest(limit=10_000)
        if event.kind in {"firing", "resolved"}
    ]  # fmt: skip
    assert len(happened) == 8
    assert {edge[5] for edge in edges} == {"fail", "no-data"}
    assert sorted(edges) == sorted(happened)
    assert {
        (span.slice, span.kernel_inference, span.start) for span in timeline.decisions if span.what.startswith("route")
    } == {(route.slice, route.avoid, route.since) for route in core.decisions.routes}
    halts = [(span.slice, span.start, span.end) for span in timeline.decisions if span.what == "halt"]
    assert halts == [(alert.slice, alert.start, alert.end) for alert in timeline.alerts if alert.what == "fail"]
    assert None not in {end for _, _, end in halts}
    assert len(timeline.messages) == len(core.outbox.messages()) == 2
    assert timeline.evaluations > 300
    assert damage == []
    core.connection.close()


def test_a_tighter_limit_fires_earlier_and_a_longer_for_later(make_contract, collector_file):
    old = make_contract()
    tighter = replay_recordings([collector_file], make_contract(limit=0.01, version=2), old)
    later = replay_recordings([collector_file], make_contract(after="1m", version=2), old)
    assert [(pair.new.what, pair.later) for pair in later.changed.moved[:2]] == [("fail", 40.0)] * 2
    assert all(-120 < pair.later < 0 for pair in tighter.changed.moved)
    for found in (tighter, later):
        assert sorted(pair.new.what for pair in found.changed.moved) == ["fail", "fail", "halt", "halt", *2 * [ROUTE]]
        assert found.changed.added == found.changed.dropped == ()
        assert found.not_recorded == ()


def test_an_action_that_changes_is_the_same_alert(make_contract, collector_file):
    found = replay_recordings(
        [collector_file], make_contract(do="[{webhook: pager}, sample-more]", version=2), make_contract()
    )
    assert {span.what for span in found.changed.dropped} == {ROUTE, "halt"}
    (first, _) = found.changed.moved
    assert (first.later, first.ends_later) == (0, 0)
    assert set(first.new.actions) == {"webhook:pager", "sample-more"}
    assert {span.what for span in found.changed.added} == {"sample-more"}


def test_silence_is_judged_without_anything_arriving(make_contract, traffic):
    entries = [
        TrafficEntry(at, request.SerializeToString())
        for at, request in traffic(lambda _: 0.004)
        if not 300 <= at - START < 900
    ]
    timeline = replay(make_contract(), entries, 10.0)
    assert {(alert.what, alert.slice) for alert in timeline.alerts} == {("no-data", "all"), ("no-data", "code")}
    for alert in timeline.alerts:
        assert START + 390 <= alert.start <= START + 460
        assert alert.end is not None
        assert START + 900 <= alert.end <= START + 920
    assert timeline.end == START + 1210
    assert timeline.evaluations == 120


def test_evaluations_fall_on_multiples_of_their_interval(make_contract, entries):
    timeline = replay(make_contract(), entries(minutes=2), 7.0)
    assert timeline.evaluations == 17
    assert timeline.end == START + 125
    assert timeline.end % 7.0 == 0


def test_sequences_that_failed_input_checks_are_escalated(make_contract, traffic):
    """As the evaluator would: their count within the window is what the step waits for."""
    contract = make_contract()
    step = contract.escalation[0].model_copy(update={"on": "invalid-input", "after": 0.0})
    entries = []
    for number, (at, request) in enumerate(traffic(lambda _: 0.004, minutes=3)):
        metric = request.resource_metrics[0].scope_metrics[0].metrics.add(name="kc.input.invalid")
        metric.sum.is_monotonic, metric.sum.aggregation_temporality = True, 2
        point = metric.sum.data_points.add(start_time_unix_nano=round(START * 1e9), time_unix_nano=round(at * 1e9))
        point.as_int = 5 if number >= 6 else 0
        of = {"kc.kernel.train": "aa", "kc.kernel.inference": "bb"}
        for name, value in {"kc.contract": "policy", "kc.reason": "shifted", **of}.items():
            point.attributes.add(key=name).value.string_value = value
        entries.append(TrafficEntry(at, request.SerializeToString()))
    timeline = replay(contract.model_copy(update={"escalation": (step,)}), entries, 10.0)
    (alert,) = timeline.alerts
    assert (alert.what, alert.clause, alert.kernel_inference, alert.start) == (
        "invalid-input",
        "input",
        "bb",
        START + 80,
    )
    assert alert.reason.startswith("5 sequences failed an input check")


def test_what_the_recording_cannot_tell_is_named(make_contract, collector_file):
    old = make_contract()
    new = old.model_copy(
        update={
            "slices": {
                **make_contract(task="prose").slices,
                "long": old.slices["code"].model_copy(update={"where": {"prompt_tokens": ">= 8192"}}),
            },
            "statistical": (*old.statistical, old.statistical[0].model_copy(update={"id": "kl", "metric": "k3"})),
            "observability": old.observability.model_copy(update={"sampling": 0.5}),
        }
    )
    found = replay_recordings([collector_file], new, old)
    assert found.not_recorded == (
        "kl: nothing of kc.drift.k3 was recorded, so the clause is NO_DATA throughout",
        "slice long: nothing was recorded of it; recorders slice by their own copy of the contract",
        "slice code: is defined anew, and the recording has what the contract of the time put into it",
        "sampling: 0.5 instead of 1 acts on recorders; the recording has the samples of the time",
    )
    assert {span.clause for span in found.changed.added if span.clause} == {"kl", "token-tv"}


def test_a_recording_without_metrics_is_refused(make_contract, tmp_path):
    path = tmp_path / "metrics.proto"
    spans = ExportTraceServiceRequest()
    spans.resource_spans.add().scope_spans.add().spans.add(trace_id=bytes(16), name="kc.compare")
    message = spans.SerializeToString()
    for content in (b"", struct.pack(">I", len(message)) + message):
        path.write_bytes(content)
        with pytest.raises(
            TrafficFileError, match=r"metrics\.proto: holds no metrics.*; give the recording of a pipeline"
        ):
            replay_recordings([path], make_contract())


def test_a_clock_that_steps_back_is_followed(make_contract, traffic):
    entries: list[TrafficEntry] = []
    for at, request in traffic():
        shift = -400.0 if at - START > 600 else 0.0
        entries += [TrafficEntry(at + shift, request.SerializeToString()), TrafficEntry(at + shift)]
    timeline = replay(make_contract(), entries, None)
    assert timeline.evaluations == 120
    assert all(alert.end is None or alert.end >= alert.start for alert in timeline.alerts)
    assert [entry.at for entry, other in pairwise(entries) if other.at < entry.at] == [START + 600]
