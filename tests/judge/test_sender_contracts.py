"""A sender counts for the contracts that it may speak of, and learns of no other."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.otlp.sender_contracts import SENDER_CONTRACTS, addressees, restrict

METADATA = {"version": 1, "owner": "team"}


def two(contract: Any, **changes: Any) -> Evaluator:
    return Evaluator([contract(metadata={"name": name, **METADATA}, **changes) for name in ("alpha", "beta")])


@pytest.mark.parametrize("forged", [None, ["alpha", "beta"], []])
@pytest.mark.parametrize("flood", [0, 1000])
def test_points_of_another_contract_are_refused(contract, sender, now, forged, flood):
    """Whatever the sender says of itself, and however many attributes hide it; the answer names its own contracts."""
    evaluator = two(contract)
    request = sender(contract="beta").request(now, [0.5])
    attributes = request.resource_metrics[0].resource.attributes
    if forged is not None:
        pair = attributes.add(key=SENDER_CONTRACTS)
        pair.value.array_value.SetInParent()
        for name in forged:
            pair.value.array_value.values.add(string_value=name)
    for number in range(flood):
        attributes.add(key=f"flood-{number}").value.string_value = "x"
    restrict(request, {"alpha"})
    outcome = evaluator.ingest_metrics(request, now)
    assert outcome.rejected == 1
    assert "loaded: alpha" in outcome.message
    assert "beta'" in outcome.message  # what it said itself
    assert evaluator.series_count == 0


def test_points_of_its_own_contract_are_taken(contract, sender, now):
    """And the stream is the one that it was before its receiver knew senders."""
    evaluator = two(contract)
    source = sender(contract="alpha")
    evaluator.ingest_metrics(source.request(now, [0.5]), now)
    request = source.request(now + 1, [0.5])
    restrict(request, {"alpha"})
    assert evaluator.ingest_metrics(request, now + 1).rejected == 0
    assert evaluator.stream_count == 1


def test_latencies_count_for_its_own_contracts_only(contract, sender, now):
    """A histogram of an engine names no contract, and would count for everybody's."""
    clause = {"id": "ttft", "metric": "gen_ai.server.time_to_first_token", "statistic": "p90", "limit": "800ms"}
    evaluator = two(contract, statistical=[], runtime=[clause])
    source = sender(
        "gen_ai.server.time_to_first_token", edges=(0.1, 0.8), attributes={"gen_ai.request.model": "big"}, start=now - 9
    )
    request = source.request(now, [0.5])
    restrict(request, {"alpha"})
    evaluator.ingest_metrics(request, now)
    assert {series.contract for series in evaluator.series()} == {"alpha"}


@pytest.mark.parametrize(("contracts", "kept"), [({"alpha"}, 0), ({"beta"}, 1), (None, 1)])
def test_examples_are_kept_of_its_own_contracts_only(contract, now, contracts, kept):
    """A span links to a trace, and stands beside the verdicts."""
    evaluator = two(contract)
    request = ExportTraceServiceRequest()
    span = (
        request.resource_spans.add().scope_spans.add().spans.add(name="kc.compare", end_time_unix_nano=int(now * 1e9))
    )
    span.trace_id, span.span_id = bytes(16), bytes(8)
    span.attributes.add(key="kc.contract").value.string_value = "beta"
    span.attributes.add(key="kc.compare.worst.abs_log_ratio").value.double_value = 1.0
    restrict(request, contracts)
    evaluator.ingest_traces(request, now)
    assert len(evaluator.examples("beta", now)) == kept


def test_what_two_say_is_what_both_say(sender, now):
    """A name that is written twice allows what both allow: adding to it takes away."""
    request = sender().request(now)
    resource = request.resource_metrics[0].resource
    for names in (["alpha", "beta"], ["beta", "gamma"]):
        pair = resource.attributes.add(key=SENDER_CONTRACTS)
        for name in names:
            pair.value.array_value.values.add(string_value=name)
    assert addressees(resource) == {"beta"}
    resource.attributes.add(key=SENDER_CONTRACTS).value.string_value = "alpha"
    assert addressees(resource) == set()
