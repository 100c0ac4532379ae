"""Columns and the code that takes points one by one say the same of whatever arrives."""

from __future__ import annotations

import math
import random
import re
import sqlite3
from typing import Any

import numpy as np
import pytest
from google.protobuf.internal.encoder import _VarintBytes
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel import machine_code
from kc_otel.contract.model import Contract
from kc_otel.judge.columns import message_streams
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.otlp.wire_columns import read_columns
from kc_otel.judge.series import LONG, SHORT
from kc_otel.serve.store.evaluator_store import EvaluatorStore
from kc_otel.serve.store.state_file import unit_of_work
from tests.judge.conftest import NOW, ZERO, Sender, info_request, make_contract, merge, ns
from tests.tools.verdicts import streams_of

pytestmark = pytest.mark.skipif(not machine_code.is_available(), reason="needs a C compiler")

MOST = 60_000
MUTATIONS: dict[str, Any] = {
    "sum": lambda point: setattr(point, "sum", point.sum * 3.0 + 1.0),
    "sum a little": lambda point: setattr(point, "sum", point.sum * (1.0 + 1e-10)),
    "no sum": lambda point: point.ClearField("sum"),
    "endless sum": lambda point: setattr(point, "sum", math.inf),
    "count": lambda point: setattr(point, "count", point.count + 1),
    "scale": lambda point: setattr(point, "scale", point.scale - 1),
    "zero": lambda point: setattr(point, "zero_threshold", 2.0**-25),
    "extremes": lambda point: (point.ClearField("min"), setattr(point, "max", math.nan)),
    "flag": lambda point: setattr(point, "flags", 1),
    "exemplar": lambda point: point.exemplars.add(as_double=0.5, span_id=b"12345678", trace_id=b"1" * 16),
    "exemplar of somebody": lambda point: point.exemplars.add(as_int=3).filtered_attributes.add(key="user"),
    "order": lambda point: point.attributes.reverse(),
    "slice": lambda point: setattr(point.attributes[1].value, "string_value", "nowhere"),
    "contract": lambda point: setattr(point.attributes[0].value, "string_value", "nobody's"),
    "time": lambda point: setattr(point, "time_unix_nano", point.time_unix_nano - ns(30)),
    "future": lambda point: setattr(point, "time_unix_nano", point.time_unix_nano + ns(1000)),
    "start": lambda point: setattr(point, "start_time_unix_nano", point.start_time_unix_nano + 1),
    "huge": lambda point: point.positive.bucket_counts.extend([0] * 300),
    "a long name": lambda point: setattr(point.attributes.add(key="x" * 2000).value, "int_value", 1),
}
BYTES: dict[str, Any] = {
    "cut": lambda body: body[: len(body) // 2],
    "unknown field": lambda body: body + b"\x7a\x01x",
    "twice": lambda body: body + body,
    "noise": lambda body: body[:40] + b"\xff" + body[41:],
}


def senders() -> list[Sender]:
    instances = [Sender(instance=str(number)) for number in range(3)]
    return [
        *instances,
        Sender(slice="code"),
        Sender("kc.drift.log_ratio"),
        Sender("kc.drift.log_ratio", instance="1"),
        Sender("kc.drift.ratio", inference="cccccccccccc"),
        Sender(instance="9", start=0.0),
        Sender(instance="9", start=0.0),
        Sender(cumulative=False),
        Sender(edges=(0.001, 0.01, 0.1)),
        Sender("kc.drift.abs_log_ratio", edges=(0.001, 0.01)),
    ]


def point_of(request: Any) -> Any:
    metric = request.resource_metrics[0].scope_metrics[0].metrics[0]
    return getattr(metric, metric.WhichOneof("data")).data_points[0]


def take(evaluator: Evaluator, body: bytes, now: float, *, columns: bool) -> Any:
    message = evaluator.columns_of(body, MOST) if columns else None
    if message is None:
        try:
            message = ExportMetricsServiceRequest.FromString(body)
        except DecodeError:
            return None
    return evaluator.ingest_metrics(message, now)


def rounded(number: float) -> str:
    """A number that was added up in another order says the same."""
    return f"{round(number, 12) + 0.0:.8g}"


def said(histogram: Any) -> Any:
    """Everything that a histogram says, sums to what rounding leaves of them."""
    if histogram is None:
        return None
    sides = [
        (side.trimmed().offset, side.trimmed().counts.tolist()) for side in (histogram.positive, histogram.negative)
    ]
    return (
        histogram.scale,
        histogram.count,
        rounded(histogram.sum),
        histogram.zero_count,
        sides,
        repr(float(histogram.minimum) + 0.0),
        repr(float(histogram.maximum) + 0.0),
        histogram.zero_threshold,
        histogram.maximum_observed,
        histogram.layout,
    )


def panes_of(state: Any, series: Any, grid: int) -> list[Any]:
    """Number and content of each pane that holds anything of a series."""
    state.panes.settle()
    held = ((pane, state.panes.whole(grid, pane).of(series.number)) for pane in sorted(state.panes._panes[grid]))
    return [(pane, said(content)) for pane, content in held if content is not None]


def said_of_streams(evaluator: Evaluator) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, stream in streams_of(evaluator).items():
        writers = [(last.start, last.time, said(last.histogram), said(last.doubted)) for last in stream.writers]
        found[key] = (stream.heard, writers, stream.times, stream.forgotten)
    return found


def remembered(evaluator: Evaluator) -> Any:
    found: dict[Any, Any] = {
        "events": dict(evaluator.events),
        "counters": {k: v for k, v in evaluator.counters.items() if v},
    }
    found |= said_of_streams(evaluator)
    for name, state in evaluator.states.items():
        for key, series in state.series.items():
            found[name, key] = (series.newest, [panes_of(state, series, grid) for grid in (SHORT, LONG)])
        found[name] = ({k: (h.last, h.gaps) for k, h in state.heard.items()}, state.newest)
    return found


def kept(evaluator: Evaluator) -> Any:
    """What of it lasts: the windows, and what is held."""
    found: dict[Any, Any] = {}
    for name, state in evaluator.states.items():
        for key, series in state.series.items():
            oldest = [grid.oldest(state.clock) for grid in state.grids]
            found[name, key] = [
                [(pane, content) for pane, content in panes_of(state, series, grid) if pane >= oldest[grid]]
                for grid in (SHORT, LONG)
            ]
        for cell, held in state.evidence.cells.items():
            found[cell] = (rounded(held.log_evidence), held.failing, held.peak, said(held.after))
    return found


def judged(evaluator: Evaluator, now: float) -> list[Any]:
    return [
        ((row.cell, row.status, row.samples, row.window), (row.estimate, row.lower, row.upper, row.evidence))
        for row in evaluator.evaluate(now)["policy"].verdicts
    ]


class Twins:
    """An evaluator that takes messages as columns, and one that takes their points one by one."""

    def __init__(self, contract: Contract) -> None:
        self.fast, self.slow = Evaluator([contract]), Evaluator([contract])

    def take(self, body: bytes, now: float) -> None:
        assert take(self.fast, body, now, columns=True) == take(self.slow, body, now, columns=False)

    def agree(self) -> None:
        self.fast.settle()
        assert remembered(self.fast) == remembered(self.slow)


STEP = st.tuples(
    st.lists(
        st.tuples(
            st.integers(0, 11),
            st.integers(0, 12),
            st.sampled_from([*[None] * 2 * len(MUTATIONS), "again", "restart", *MUTATIONS]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([*[10.0] * 12, 0.0, 1.0, 5.0, 35.0, 200.0, 400.0, 5000.0, -20.0, -100.0]),
    st.sampled_from([*[None] * 20, *BYTES]),
    st.booleans(),
)


def values_of(sender: Sender, size: int, rng: random.Random) -> list[float]:
    signs = (1, -1) if sender.metric == "kc.drift.log_ratio" else (1,)
    return [rng.choice([0.0, 1e-3, 0.02, 0.3, 0.5]) * rng.choice(signs) for _ in range(size)]


def changed(request: Any, mutation: str) -> Any:
    copy = ExportMetricsServiceRequest()
    copy.CopyFrom(request)
    point = point_of(copy)
    if hasattr(point, "positive") or mutation not in {"scale", "zero", "huge"}:
        MUTATIONS[mutation](point)
    return copy


def run(steps: list[Any], seed: int) -> Twins:
    rng = random.Random(seed)
    contract = make_contract(
        statistical=[
            {"id": "token-tv", "metric": "tv_token", "unit": "token", "limit": 0.004},
            {"id": "ratio", "metric": "ratio", "unit": "token", "statistic": "p99", "limit": 2.0},
        ],
        observability={"window": "5m", "long_window": "1h", "min_samples": 10, "max_series": 5},
    )
    twins = Twins(contract)
    files = [sqlite3.connect(":memory:", isolation_level=None) for _ in range(2)]
    stores = [EvaluatorStore(file) for file in files]
    everyone, before, now, newest = senders(), {}, NOW, NOW
    for parts, shift, harm, evaluate in steps:
        now += shift
        newest = max(newest, now)
        requests = []
        for number, size, mutation in parts:
            sender = everyone[number]
            if mutation == "restart":
                sender.restart(now)
            if mutation == "again" and number in before:
                requests.append(before[number])
                continue
            before[number] = sender.request(now, values_of(sender, size, rng))
            requests.append(changed(before[number], mutation) if mutation in MUTATIONS else before[number])
        body = merge(*requests).SerializeToString()
        body = BYTES[harm](body) if harm else body
        twins.take(body, now)
        if evaluate:
            for row, other in zip(judged(twins.fast, now), judged(twins.slow, now), strict=True):
                assert row[0] == other[0]
                assert row[1] == pytest.approx(other[1], rel=1e-7, nan_ok=True)
            for evaluator, store, file in zip((twins.fast, twins.slow), stores, files, strict=True):
                with unit_of_work(file) as unit:
                    store.save(evaluator, unit)
            again = Evaluator([contract])
            EvaluatorStore(files[0]).restore(again)
            saved, held = (
                {key: of[1:] for key, of in said_of_streams(evaluator).items() if any(of[1:3])}
                for evaluator in (again, twins.fast)
            )
            assert saved == held
            if now >= newest:  # of what had aged out, clocks that go back find what nobody had looked for yet
                assert kept(again) == kept(twins.slow)
    for file in files:
        file.close()
    return twins


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(STEP, min_size=1, max_size=25), st.integers(0, 2**32))
def test_columns_say_what_single_points_say(steps, seed):
    """Streams, panes, counts, answers and verdicts are the same, whatever hostile or mistaken senders send."""
    run(steps, seed).agree()


@pytest.mark.parametrize("said_first", [False, True])
def test_a_pause_between_runs_is_no_interval_of_reports(said_first):
    """Of the same recorder that shut down, or of another; in whatever order a message tells what."""
    twins, now = Twins(make_contract()), NOW
    for instance in ("same", "same", "other", "another"):
        for said in (1, 1, 1, 0 if instance == "same" else 1):
            parts = [Sender(instance=instance, start=now - 1.0).request(now, [1e-3]), info_request(now, said, instance)]
            twins.take(merge(*(parts[::-1] if said_first else parts)).SerializeToString(), now)
            now += 10.0
        now += 1500.0
    twins.agree()
    for evaluator in (twins.fast, twins.slow):
        (heard,) = evaluator.states["policy"].heard.values()
        assert [gap > 0 for gap in heard.gaps] == [abs(gap) == 10.0 for gap in heard.gaps]
        assert heard.patience(60.0) == 70.0


SHAPES = [(4, ZERO, 1.0), (4, ZERO, 1e-6), (3, ZERO, 1.0), (4, 2.0**-25, 1.0), (4, 0.0, -1.0), (5, ZERO, 1e-2)]
"""Scale, zero threshold and size of what senders of one series report."""


def less(counts: Any, by: int) -> None:
    """Take observations out of the first bucket that has as many."""
    for bucket, count in enumerate(counts):
        if count >= by:
            counts[bucket] = count - by
            return


def moved(point: Any) -> None:
    """A zero that was counted becomes another observation."""
    if point.zero_count and point.positive.bucket_counts:
        point.zero_count -= 1
        point.positive.bucket_counts[0] += 1


def shifted(point: Any, by: int) -> None:
    point.positive.offset += by


TAMPERED: dict[str, Any] = {
    "moved": moved,
    "fewer": lambda point: less(point.positive.bucket_counts, 1),
    "fewer, counted": lambda point: (
        less(point.positive.bucket_counts, 1),
        setattr(point, "count", max(point.count - 1, 0)),
    ),
    "more": lambda point: setattr(point, "count", point.count + 1),
    "zeros": lambda point: (
        setattr(point, "zero_count", point.zero_count + 2),
        setattr(point, "count", point.count + 2),
    ),
    "low": lambda point: setattr(point, "sum", point.sum * 0.9),
    "high": lambda point: setattr(point, "sum", point.sum * 1.1 + 1e-12),
    "huge": lambda point: setattr(point, "sum", 2.0**566),
    "shifted": lambda point: shifted(point, 7),
    "far": lambda point: shifted(point, 2**31 - 1 - point.positive.offset),
    "near": lambda point: shifted(point, -20_000),
    "padded": lambda point: point.positive.bucket_counts.extend([0] * 30),
    "long": lambda point: point.positive.bucket_counts.extend([0] * 160),
    "many": lambda point: (point.positive.bucket_counts.append(2**44), setattr(point, "count", point.count + 2**44)),
    "too many": lambda point: (
        point.positive.bucket_counts.append(2**63),
        setattr(point, "count", point.count + 2**63),
    ),
    "minimum": lambda point: setattr(point, "min", point.min + 0.01),
    "maximum": lambda point: setattr(point, "max", point.max * 0.99),
    "no extremes": lambda point: (point.ClearField("min"), point.ClearField("max")),
    "late": lambda point: setattr(point, "time_unix_nano", point.time_unix_nano - ns(61)),
}


@pytest.mark.slow
@settings(deadline=None, max_examples=3 * settings().max_examples)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, len(SHAPES) - 1), min_size=1, max_size=6, unique=True),
            st.sampled_from([5.0, 5.0, 10.0, 31.0, 61.0]),
            st.sampled_from([None, None, *TAMPERED]),
            st.booleans(),
        ),
        min_size=4,
        max_size=14,
    ),
    st.integers(0, 2**32),
)
def test_histograms_of_any_shape_are_added_up_as_one_by_one(steps, seed):
    """Of one series, in scales, zero buckets and places of their own; tampered with by who knows the rules."""
    rng = np.random.default_rng(seed)
    contract = make_contract(observability={"window": "1m", "long_window": "5m", "min_samples": 10})
    twins = Twins(contract)
    everyone = [
        Sender("kc.drift.log_ratio", instance=str(number), scale=scale, zero=zero)
        for number, (scale, zero, _) in enumerate(SHAPES)
    ]
    now = NOW
    for who, pause, tampered, settled in steps:
        now += pause
        if pause > 10.0:  # evaluations come at least as often: nothing waits until its pane has left the window
            twins.fast.settle()
        requests = []
        for number in who:
            size = SHAPES[number][2]
            values = rng.lognormal(0.0, 0.3, rng.integers(0, 30)) * size * rng.choice([1.0, 0.0, 1.0, -1e-3])
            requests.append(everyone[number].request(now, values))
        for request in requests[: 1 if tampered else 0]:
            TAMPERED[tampered](point_of(request))
        body = merge(*requests).SerializeToString()
        twins.take(body, now)
        if settled:
            twins.agree()
    twins.agree()


@pytest.mark.slow
def test_senders_on_both_sides_of_a_panes_end_share_no_slot():
    """Where a pane ends, reports of before and after alternate: each keeps its slot, and nothing is settled early."""
    twins = Twins(make_contract())
    begin, both = NOW - NOW % 30.0 + 20.0, ((Sender(instance="0"), 0.0), (Sender(instance="1"), 12.0))
    for step in range(8):
        for sender, behind in both:
            now = begin + 2.0 * step
            body = sender.request(now - behind, [0.02, 0.3]).SerializeToString()
            twins.take(body, now)
    assert twins.fast.states["policy"]._slots.used <= 3
    twins.agree()
    assert twins.fast.taken_as_columns == 15


def both(contract: Contract, bodies: list[tuple[float, bytes]]) -> Twins:
    twins = Twins(contract)
    for now, body in bodies:
        twins.take(body, now)
    twins.agree()
    return twins


def test_processes_that_record_the_same_share_all_but_their_rows():
    """Of a new process the first point is taken from columns too, and there are no objects for its streams."""
    bodies = []
    for step in range(3):
        for instance in range(40):
            now = NOW + 10.0 * step + 0.1 * instance
            parts = [Sender(slice=name, instance=str(instance)) for name in ("all", "code")]
            body = merge(*(part.request(now, [0.02, 0.3] * (step + 1)) for part in parts))
            bodies.append((now, body.SerializeToString()))
    fast = both(make_contract(), bodies).fast
    assert fast.taken_as_columns == 3 * 40 * 2 - 2
    assert fast.stream_count == 40 * 2
    assert not fast.states["policy"].streams.alone


def test_a_series_takes_nothing_in_other_buckets_than_it_holds():
    """What came as columns is held against explicit bounds, though no pane has it yet, and they against it."""
    exponential, explicit = Sender(instance="exponential"), Sender(instance="explicit", edges=(0.001, 0.1))
    sent = (
        *((0.0, exponential), (10.0, exponential), (400.0, exponential), (401.0, explicit)),
        *((900.0, explicit), (901.0, exponential), (902.0, exponential)),
    )
    bodies = [(NOW + at, sender.request(NOW + at, [0.02] * 5).SerializeToString()) for at, sender in sent]
    assert both(make_contract(), bodies).fast.counters["other_buckets"] == 3


def test_counts_of_any_size_are_exact():
    """Counts of 2^32 and more take two words each."""
    sender, bodies = Sender(slice="all"), []
    for step in range(8):
        request = sender.request(NOW + 10.0 * step, [0.02, 0.3])
        point = point_of(request)
        point.count, point.sum = point.count << 30, point.sum * 2.0**30
        point.positive.bucket_counts[:] = [count << 30 for count in point.positive.bucket_counts]
        bodies.append((NOW + 10.0 * step, request.SerializeToString()))
    fast = both(make_contract(), bodies).fast
    assert fast.taken_as_columns == len(bodies) - 2  # the first, and the one that needs more room
    assert fast.states["policy"].streams.rows["wide"][0] == 1


@pytest.mark.slow
def test_a_row_of_a_forgotten_stream_is_for_another_and_its_message_is_known_no_more():
    """Who comes back after it was forgotten counts for nobody else's stream."""
    everyone = [Sender(instance=str(number)) for number in range(34)]
    contract = make_contract(observability={"window": "1m", "long_window": "5m"})
    twins = Twins(contract)
    for step, senders in enumerate([everyone[:33]] * 3 + [everyone[:1]] * 50 + [everyone[33:]] * 3 + [everyone] * 3):
        now = NOW + 10.0 * step
        for sender in senders:
            body = sender.request(now, [0.02, 0.3]).SerializeToString()
            twins.take(body, now)
        for evaluator in (twins.fast, twins.slow):
            evaluator.evaluate(now)
    assert twins.fast.events["streams_evicted"] == 32
    assert twins.fast.stream_count == 34
    assert len(twins.fast.states["policy"].streams.names) == 34
    twins.agree()


@pytest.mark.parametrize("memory", [2**27, 1])
def test_what_a_sender_sent_before_is_no_word_on_what_it_sends_now(monkeypatch, memory):
    """Points of the same attributes are of other metrics now, or in another order; also where nothing is remembered."""
    monkeypatch.setattr(message_streams, "_MAX_LAYOUT_BYTES", memory)
    names = ["kc.drift.tv_token", "kc.drift.k3", "kc.drift.abs_log_ratio"]
    everyone, bodies = [[Sender(name), Sender(name, slice="code")] for name in names], []
    for step, order in enumerate([(0, 1), (0, 1), (1, 0), (0, 2), (0, 2), (1, 2), (2, 1), (0, 1)]):
        now = NOW + 10.0 * step
        request = ExportMetricsServiceRequest()
        scope = request.resource_metrics.add().scope_metrics.add()
        for place in order:
            one, other = (sender.request(now, [0.02, 0.3] * (place + 1)) for sender in everyone[place])
            request.resource_metrics[0].resource.CopyFrom(one.resource_metrics[0].resource)
            scope.scope.CopyFrom(one.resource_metrics[0].scope_metrics[0].scope)
            metric = one.resource_metrics[0].scope_metrics[0].metrics[0]
            metric.exponential_histogram.data_points.append(point_of(other))
            scope.metrics.append(metric)
        bodies.append((now, request.SerializeToString()))
    assert (
        both(make_contract(), bodies).fast.taken_as_columns == 6 * 4
    )  # of all but the first, and the first with another metric


def test_metrics_that_protobuf_does_not_read_are_those_of_the_columns():
    """A message is refused as a whole for one of a name that is no text, and has as many points as it may."""
    sender, evaluator = Sender(), Evaluator([make_contract()])
    for step in range(3):
        request = sender.request(NOW + 10.0 * step, [0.02])
        gauge = request.resource_metrics[0].scope_metrics[0].metrics.add(name="kc.recorder.tokens").gauge
        gauge.data_points.add(as_int=step)
        body = request.SerializeToString()
        assert evaluator.columns_of(body.replace(b"kc.recorder.tokens", b"kc.recorder.token\xff"), MOST) is None
        assert evaluator.columns_of(body, 5) is None
        only = ExportMetricsServiceRequest.FromString(body)
        del only.resource_metrics[0].scope_metrics[0].metrics[0]
        assert evaluator.columns_of(only.SerializeToString().replace(b"kc_otel", b"kc\xffotel"), MOST) is None
        message = evaluator.columns_of(body, 6)
        evaluator.ingest_metrics(message, NOW + 10.0 * step)
    assert evaluator.counters["ignored"] == 3
    assert evaluator.taken_as_columns == 2


@pytest.mark.slow
@settings(deadline=None)
@given(st.binary(max_size=60), st.integers(0, 400), st.integers(0, 20))
def test_bytes_that_are_no_message_are_for_protobuf_to_refuse(noise, at, cut):
    """Wherever a message is damaged, what columns say of it is what protobuf says, or nothing."""
    sender = Sender()
    bodies = [sender.request(NOW + 10.0 * step, [0.02, 0.3]).SerializeToString() for step in range(3)]
    at %= len(bodies[2])
    bodies.append(bodies[2][:at] + noise + bodies[2][at + cut :])
    twins = Twins(make_contract())
    for step, body in enumerate(bodies):
        now = NOW + 10.0 * step
        twins.take(body, now)
    twins.agree()


NUMBER = st.sampled_from([0, 1, 127, 128, 300, 2**21, 2**28, 2**35, 2**56 - 1, 2**63 - 1, 2**63, 2**64 - 1])


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(NUMBER, max_size=80), st.binary(max_size=3), st.integers(0, 3))
@example([1] * 5 + [2**63], b"", 0)
@example([1] * 13 + [2**64 - 1], b"", 0)
def test_packed_numbers_are_counted_as_they_are_read(numbers, noise, cut):
    """One that has more than nine bytes, or does not end, is for protobuf to read, wherever it is."""
    packed = b"".join(map(_VarintBytes, numbers))
    packed = packed[: len(packed) - cut] + noise
    lengths = [len(part) for part in re.split(rb"(?<=[\x00-\x7f])", packed) if part]
    odd = bool(packed) and (packed[-1] > 127 or max(lengths) > 9)
    body = packed
    for field in (2, 8, 1, 10, 2, 2, 1):  # counts, side, point, histogram, metric, scope, resource
        body = bytes((field << 3 | 2,)) + _VarintBytes(len(body)) + body
    wire = read_columns(body)
    assert (-1 if wire is None else wire.points["positive_size"].item()) == (-1 if odd else len(lengths))


def test_long_messages_are_read_as_columns():
    """Also where a message has as many bytes as a request may have; not where it has more points than it may."""
    request = merge(*[Sender(instance="x" * 100_000, slice=str(n)).request(NOW, [0.02, 0.3]) for n in range(60)])
    body = request.SerializeToString()
    assert len(body) > 5_000_000
    wire = read_columns(body, 60)
    assert wire is not None
    assert wire.points.size == 60
    assert read_columns(body, 59) is None


@pytest.mark.parametrize("temporality", [128, 300, 2**31 - 1])
def test_a_temporality_that_nobody_knows_is_for_protobuf_to_read(temporality):
    """It takes more than a byte; beside streams that are known and one that is not."""
    twins = Twins(make_contract())
    known = [Sender(instance=str(number)) for number in range(8)]
    for step in range(3):
        requests = [sender.request(NOW + 10.0 * step, [0.02]) for sender in known]
        if step == 2:
            requests.append(Sender(instance="new").request(NOW + 20.0, [0.3]))
            metric = requests[-1].resource_metrics[0].scope_metrics[0].metrics[0]
            metric.exponential_histogram.aggregation_temporality = temporality
        body = merge(*requests).SerializeToString()
        twins.take(body, NOW + 10.0 * step)
    twins.agree()
