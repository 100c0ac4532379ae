"""Partial success: a part is taken, and the answer counts the rest."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from tests.conformance.clients import HttpClient, call
from tests.conformance.payloads import ENCODINGS, METRICS, encoded, to_protobuf


def points(tree: dict[str, Any]) -> int:
    """Data points of a request."""
    message = METRICS.request.FromString(to_protobuf(METRICS, tree))
    metrics = [m for r in message.resource_metrics for s in r.scope_metrics for m in s.metrics]
    return sum(len(getattr(metric, metric.WhichOneof("data")).data_points) for metric in metrics)


@pytest.fixture(params=[*ENCODINGS, "grpc"], ids=["protobuf", "json", "grpc"])
def answered(request: pytest.FixtureRequest, partly_wrong: dict[str, Any]) -> Any:
    """The response message to metrics of which only a part is taken."""
    if request.param == "grpc":
        channel: grpc.Channel = request.getfixturevalue("channel")
        return METRICS.response.FromString(call(channel, METRICS.method, to_protobuf(METRICS, partly_wrong)))
    http: HttpClient = request.getfixturevalue("http")
    answer = http.post(METRICS.path, encoded(METRICS, partly_wrong, request.param), request.param)
    assert answer.status == 200, answer
    return answer.message(METRICS.response)


@pytest.mark.must("Partial Success")
def test_a_part_is_counted(answered: Any, partly_wrong: dict[str, Any]) -> None:
    """Where a part is taken the answer is a success that counts the data points which were not."""
    assert answered.HasField("partial_success")
    assert 0 < answered.partial_success.rejected_data_points < points(partly_wrong)


@pytest.mark.should("Partial Success")
def test_a_part_is_explained(answered: Any) -> None:
    """It says to a person why they were not taken."""
    assert answered.partial_success.error_message
