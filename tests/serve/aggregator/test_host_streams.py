"""One stream a host: what many processes send comes to the same verdicts, whoever is killed in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.evaluator import Evaluator, SeriesId
from kc_otel.judge.otlp import ThrottledError
from kc_otel.judge.verdict import Verdict
from kc_otel.serve.aggregator.aggregator_sink import AggregatorSink
from kc_otel.serve.aggregator.aggregator_store import AggregatorStore
from kc_otel.serve.aggregator.host_streams import as_mark, as_request
from kc_otel.serve.store.state_connection import StateConnection
from kc_otel.serve.store.state_file import DamagedStateError, StateError, open_state
from tests.judge.conftest import NOW, Sender, make_contract, merge, ns
from tests.tools.verdicts import verdicts_of

SERIES = SeriesId("policy", "kc.drift.tv_token", "all", "aaaaaaaaaaaa", "bbbbbbbbbbbb")
RESOURCE = {"service.instance.id": "host"}


def opened(connection: StateConnection, at: float = NOW - 5) -> AggregatorStore:
    return AggregatorStore(connection, ns(at))


@pytest.fixture
def connection() -> Iterator[StateConnection]:
    with closing(open_state(None)) as connection:
        yield connection


another = connection


def take(store: AggregatorStore, request: ExportMetricsServiceRequest, at: float):
    merged = store.host.merged(request, ns(at))
    store.keep(merged, merged.rest.SerializeToString())
    return merged.result


def forwarded(store: AggregatorStore, evaluator: Evaluator, at: float) -> None:
    totals = {key: store.host.totals[key] for key in store.due}
    assert evaluator.ingest_metrics(as_request(totals, RESOURCE, ns(at)), at).rejected == 0
    store.sent(totals)


def told(verdicts: tuple[Verdict, ...]) -> list[tuple]:
    return [(each.cell, each.status, each.samples) for each in verdicts]


def numbers(verdicts: tuple[Verdict, ...]) -> list[float]:
    return [x for each in verdicts for x in (each.estimate, each.lower, each.upper)]


STEPS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 40), min_size=3, max_size=3),  # values of each process
        st.lists(st.booleans(), min_size=3, max_size=3),  # whose export gets lost
        st.sampled_from(["", "", "restart", "kill"]),
    ),
    min_size=2,
    max_size=12,
)


@pytest.mark.slow
@given(STEPS, st.integers(0, 10_000), st.sampled_from([0.002, 0.004, 0.03]))
def test_verdicts_are_those_of_every_process_by_itself(steps: list, seed: int, drift: float) -> None:
    """Every step, with processes that restart, exports that get lost, and an aggregator that is killed.

    Counts and statuses are equal, and numbers to the rounding of a sum: the sum of sums is taken in another order.
    """
    rng, connection = np.random.default_rng(seed), open_state(None)
    contract = make_contract(observability={"window": "5m", "long_window": "1h", "min_samples": 20})
    apart, together = Evaluator([contract]), Evaluator([contract])
    store = opened(connection)
    senders = [Sender(instance=str(number)) for number in range(3)]
    for number, (counts, lost, event) in enumerate(steps):
        at = NOW + 7 * (number + 1)
        for sender, count, gone in zip(senders, counts, lost, strict=True):
            request = sender.request(at, rng.exponential(drift, count).clip(1e-6, 1.0))
            if not gone:
                apart.ingest_metrics(request, at)
                take(store, request, at)
        if event == "kill":
            store = opened(connection)
        forwarded(store, together, at)
        if event == "restart":
            senders[0].restart(at + 1)
        alone, merged = verdicts_of(apart, at), verdicts_of(together, at)
        assert told(alone) == told(merged)
        assert numbers(merged) == pytest.approx(numbers(alone), rel=1e-9, abs=1e-12, nan_ok=True)
    connection.close()


@pytest.mark.slow
@given(STEPS, st.lists(st.booleans(), min_size=12, max_size=12), st.integers(0, 10_000))
def test_nothing_is_lost_or_counted_twice_while_the_evaluator_is_away(steps: list, away: list[bool], seed: int) -> None:
    """Buckets come to the same, also where the evaluator took a message and its answer got lost."""
    rng, connection = np.random.default_rng(seed), open_state(None)
    apart, together = Evaluator([make_contract()]), Evaluator([make_contract()])
    store = opened(connection)
    senders = [Sender(instance=str(number)) for number in range(3)]
    for number, (counts, _, event) in enumerate(steps):
        at = NOW + 7 * (number + 1)
        for sender, count in zip(senders, counts, strict=True):
            request = sender.request(at, rng.exponential(0.01, count).clip(1e-6, 1.0))
            apart.ingest_metrics(request, at)
            take(store, request, at)
        totals = {key: store.host.totals[key] for key in store.due}
        if not away[number]:
            together.ingest_metrics(as_request(totals, RESOURCE, ns(at)), at)
        if event == "kill":
            store = opened(connection)
        elif not away[number]:
            store.sent(totals)
    forwarded(store, together, NOW + 100)
    alone, merged = (each.distribution(SERIES, 3600.0, NOW + 100) for each in (apart, together))
    assert (merged.lower.tolist(), merged.count.tolist()) == (alone.lower.tolist(), alone.count.tolist())
    connection.close()
    assert merged.sum == pytest.approx(alone.sum, rel=1e-9, abs=1e-15)


def test_what_is_not_drift_is_passed_on_as_it_came(connection: StateConnection) -> None:
    """Counters, gauges, deltas and the metrics of others wait in the state, under their own resource."""
    store, drift = opened(connection), Sender()
    other, delta = Sender(metric="gen_ai.server.time_to_first_token"), Sender(cumulative=False, instance="delta")
    request = merge(drift.request(NOW, [0.1]), other.request(NOW, [0.2]), delta.request(NOW, [0.3]))
    take(store, request, NOW + 1)
    assert len(store.host.totals) == 1
    ((number, path, body),) = opened(connection).to_pass_on()
    assert path == "/v1/metrics"
    assert ExportMetricsServiceRequest.FromString(body) == merge(*parts(request)[1:])
    store.passed([(number, len(body))])
    assert store.waiting == 0
    assert not list(store.to_pass_on())


def parts(request: ExportMetricsServiceRequest) -> list[ExportMetricsServiceRequest]:
    return [ExportMetricsServiceRequest(resource_metrics=[each]) for each in request.resource_metrics]


def test_what_processes_sent_before_the_aggregator_began_is_not_counted_again(connection: StateConnection) -> None:
    """They sent it elsewhere; from then on they count. One that began with it counts in full."""
    store = opened(connection, NOW)
    old, new = Sender(instance="old", start=NOW - 600), Sender(instance="new", start=NOW - 5)
    for sender in (old, new):
        take(store, sender.request(NOW + 1, [0.1] * 10), NOW + 1)
    (total,) = store.host.totals.values()
    assert total.histogram.count == 10
    take(store, old.request(NOW + 2, [0.1] * 3), NOW + 2)
    (total,) = store.host.totals.values()
    assert total.histogram.count == 13


def test_what_is_long_gone_is_forgotten_and_what_was_not_taken_is_not(connection: StateConnection) -> None:
    """A day after its last word; a process that comes back and is as old begins anew, and nothing counts twice."""
    store, sender = opened(connection), Sender()
    take(store, sender.request(NOW, [0.1] * 10), NOW)
    day = NOW + 86_401
    store.tidy(ns(day))
    assert not store.host.streams
    assert len(store.host.totals) == 1, "it is still due"
    store.sent(dict(store.host.totals))
    store.tidy(ns(day))
    assert not store.host.totals
    take(store, sender.request(day, [0.1] * 5), day)
    (total,) = opened(connection).host.totals.values()
    assert total.histogram.count == 0


def test_a_sender_is_told_what_is_not_taken(connection: StateConnection) -> None:
    """Points of the future, points that cannot be, and more streams than there may be."""
    store = opened(connection)
    store.host._most = 1
    future = take(store, Sender().request(NOW + 600, [0.1]), NOW)
    assert (future.rejected, future.message) == (1, "points are from the future; check the sender's clock")
    broken = Sender().request(NOW, [0.1])
    broken.resource_metrics[0].scope_metrics[0].metrics[0].exponential_histogram.data_points[0].count = 7
    assert "cannot be" in take(store, broken, NOW).message
    assert take(store, Sender().request(NOW, [0.1]), NOW).rejected == 0
    assert "more streams" in take(store, Sender(instance="another").request(NOW, [0.1]), NOW).message


def test_what_cannot_be_written_is_not_acknowledged_and_not_remembered(
    connection: StateConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender is asked to come again, and then it counts, once."""
    store, sender = opened(connection, 0), Sender(start=NOW)
    take(store, sender.request(NOW, [0.1] * 3), NOW)
    sink, request = AggregatorSink(store), sender.request(NOW + 1, [0.1] * 4)
    monkeypatch.setattr("kc_otel.serve.aggregator.aggregate.time.time_ns", lambda: ns(NOW + 1))
    connection.execute("PRAGMA query_only=ON")
    with pytest.raises(Exception, match="cannot be kept on disk at the moment") as raised:
        asyncio.run(sink.metrics(request))
    assert isinstance(raised.value.__context__, StateError)
    connection.execute("PRAGMA query_only=OFF")
    take(store, request, NOW + 2)
    (total,) = store.host.totals.values()
    assert total.histogram.count == 7


def test_a_clock_that_went_back_after_the_aggregator_began_loses_nothing(connection: StateConnection) -> None:
    """It began an hour ahead; a process that begins at the right time is counted from its beginning."""
    store = opened(connection, NOW + 3600)
    take(store, Sender(start=NOW - 5).request(NOW, [0.1] * 10), NOW)
    (total,) = store.host.totals.values()
    assert total.histogram.count == 10


def test_its_own_words_that_come_back_are_not_taken(connection: StateConnection, another: StateConnection) -> None:
    """By way of another aggregator: that one adds sums up, and passes on the mark, which says whose words they are."""
    first, second = opened(connection), opened(another)
    sink = AggregatorSink(first)
    take(second, ExportMetricsServiceRequest.FromString(as_mark({"service.instance.id": first.instance}, ns(NOW))), NOW)
    ((_, path, body),) = second.to_pass_on()
    assert path == "/v1/metrics"
    with pytest.raises(ThrottledError, match="comes back to it"):
        asyncio.run(sink.metrics(ExportMetricsServiceRequest.FromString(body)))
    assert sink.looped
    evaluator = Evaluator([make_contract()])
    assert evaluator.ingest_metrics(ExportMetricsServiceRequest.FromString(body), NOW).rejected == 0


def test_a_state_file_of_something_else_is_left_alone(connection: StateConnection) -> None:
    """Such as an evaluator's, whose state it would write into."""
    connection.execute("CREATE TABLE routes (name TEXT)")
    with pytest.raises(DamagedStateError):
        opened(connection)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("routes",)]
