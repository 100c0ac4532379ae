"""What real Recorders send, and what becomes of it."""

from __future__ import annotations

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.contract.limits import MOST_BUCKETS
from kc_otel.contract.registry.clause_metrics import RECORDED, SAMPLING, TV_PLACE
from kc_otel.judge.columns.series_slots import SeriesSlots
from kc_otel.judge.evaluator import Evaluator
from tests.tools.real_messages import CASES, CONTRACTS, INTERVAL, Case, Sender, contract, exponential_points, messages

NOW = 1_790_000_000.0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_recorder_sends_what_clauses_are_computed_from_in_at_most_160_buckets_a_side(case: Case) -> None:
    """Whatever the program hands over: no quantity that the contract does not ask for, and no long tails."""
    body = messages(case)[-1]
    promised = contract(case.contract)
    names = {RECORDED[key].name for key in {*promised.recorded, *promised.averaged, *SAMPLING}} | {TV_PLACE.name}
    [resource] = ExportMetricsServiceRequest.FromString(body).resource_metrics
    sent = {metric.name for metric in resource.scope_metrics[0].metrics if metric.HasField("exponential_histogram")}
    assert sent <= names
    clauses = {clause.quantity.name for clause in promised.statistical if clause.quantity is not None}
    assert clauses <= sent
    for point in exponential_points(body):
        assert max(len(point.positive.bucket_counts), len(point.negative.bucket_counts)) <= MOST_BUCKETS


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTRACTS)
@pytest.mark.parametrize("tokens", [1_000, 100_000])
def test_points_of_streams_that_go_on_are_taken_as_columns_and_put_into_panes_once(
    name: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least 99 of 100; and what eight processes said settles together, not by message."""
    bodies = messages(Case(name, tokens, rewards=True, advantages=True), exports=6)
    evaluator = Evaluator([contract(name)])
    senders = [Sender(bodies, number, NOW) for number in range(8)]
    settled = []
    settle = SeriesSlots.take
    monkeypatch.setattr(SeriesSlots, "take", lambda self: (settled.append(self.used), settle(self))[1])
    for number in range(6):
        exported = [sender.export() for sender in senders]
        before, known = evaluator.taken_as_columns, len(senders) * len(exponential_points(bodies[number - 1]))
        settled.clear()
        for body in exported:
            message = evaluator.columns_of(body, 10**6)
            assert message is not None
            evaluator.ingest_metrics(message, NOW + number * INTERVAL)
        if number:
            assert evaluator.taken_as_columns - before >= 0.99 * known
        if number > 1:
            assert not any(settled)
        evaluator.evaluate(NOW + number * INTERVAL)
