"""Decoding: what is ours is read exactly, what contradicts itself is refused, the rest is ignored and counted."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.points import ImpossiblePoint, Point, walk
from tests.judge.conftest import NOW, Sender


def read(request: ExportMetricsServiceRequest, gen_ai: tuple[str, ...] = ()) -> tuple[list[Any], Counter[str]]:
    counts: Counter[str] = Counter()
    found = list(walk(request, gen_ai, counts))
    points = [point for point in found if isinstance(point, Point)]
    return points, counts + Counter({"malformed": len(found) - len(points)})


def only_point(request: ExportMetricsServiceRequest) -> Any:
    metric = request.resource_metrics[0].scope_metrics[0].metrics[0]
    return getattr(metric, metric.WhichOneof("data")).data_points[0]


def test_exponential_points_are_read_exactly(sender: Any, now: float) -> None:
    values = [0.0, 0.5, 0.5, 3.0, -0.25]
    points, counts = read(sender("kc.drift.log_ratio").request(now, values))
    (point,) = points
    bins = point.histogram.binned()
    assert not counts
    assert (bins.total, bins.sum, bins.minimum, bins.maximum) == (5, math.fsum(values), -0.25, 3.0)
    for lower, upper, count in zip(bins.lower, bins.upper, bins.count, strict=True):
        assert count == sum(lower <= value <= upper for value in values)


def test_streams_are_told_apart_as_the_data_model_says(sender: Any, now: float) -> None:
    """Resource, scope, name, temporality and attributes identify a stream; their order does not."""
    base = sender().request(now, [0.5])
    (same,) = read(base)[0]
    shuffled = ExportMetricsServiceRequest.FromString(base.SerializeToString())
    attributes = only_point(shuffled).attributes
    reordered = sorted(attributes, key=lambda pair: pair.key, reverse=True)
    del attributes[:]
    attributes.extend(reordered)
    assert read(shuffled)[0][0].stream == same.stream
    others = [
        sender(instance="1"), sender(slice="code"), sender("kc.drift.k3"), sender(cumulative=False),
        sender(edges=(1.0,)), sender(inference="cccccccccccc"),
    ]  # fmt: skip
    digests = {read(other.request(now, [0.5]))[0][0].stream for other in others}
    assert len(digests) == len(others)
    assert same.stream not in digests


def test_foreign_metrics_are_ignored_and_counted(sender: Any, now: float) -> None:
    request = sender("http.server.request.duration").request(now, [0.5])
    request.MergeFrom(sender("gen_ai.server.time_to_first_token").request(now, [0.5]))
    points, counts = read(request)
    assert (points, counts) == ([], {"ignored": 2})
    assert len(read(request, ("gen_ai.server.time_to_first_token",))[0]) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("count", 7), ("zero_count", 1), ("scale", 40), ("scale", -40), ("sum", math.nan), ("time_unix_nano", 0),
        ("start_time_unix_nano", 2**63), ("zero_threshold", -1.0), ("zero_threshold", math.inf), ("zero_count", 2**63),
        ("scale", -3), ("zero_threshold", 0.6),
    ],
)  # fmt: skip
def test_points_that_contradict_themselves_are_malformed(sender: Any, now: float, field: str, value: float) -> None:
    request = sender().request(now, [0.5, 0.25])
    setattr(only_point(request), field, value)
    request.MergeFrom(sender("kc.drift.k3").request(now, [0.5]))
    points, counts = read(request)
    assert counts == {"malformed": 1}
    assert [point.metric for point in points] == ["kc.drift.k3"]


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"kc.slice": "x" * 1100}, "attribute 'kc.slice' is longer than 1024 characters"),
        ({"x" * 1100: "1"}, f"attribute '{'x' * 80}' is longer than 1024 characters"),
        ({f"a{i}": "x" * 1000 for i in range(9)}, "with 'a8' its attributes are longer than 8192 characters"),
    ],
)
def test_attributes_have_lengths(sender: Any, now: float, attributes: dict[str, str], said: str) -> None:
    """A name or value that is too long, or all of them together, refuses the point, and says which field it was."""
    request = sender().request(now, [0.5])
    for name, value in attributes.items():
        only_point(request).attributes.add(key=name).value.string_value = value
    (refused,) = walk(request, (), Counter())
    assert isinstance(refused, ImpossiblePoint)
    assert said in refused.message


def _overflow(point: Any) -> None:
    """Two observations of 1.7e308 have no sum; drift is never that large."""
    point.positive.offset, point.sum, point.max = 1023 * 2**4 + 10, 1.7e308, 1.7e308


@pytest.mark.parametrize(
    "change",
    [
        lambda point: setattr(point.attributes.add(key="blob").value, "bytes_value", b"x" * 2000),
        lambda point: setattr(point.positive, "offset", 2**31 - 1),  # refused before anything is allocated for it
        _overflow,
    ],
    ids=["attributes that are no text and long", "buckets that no double reaches", "sums that overflow"],
)
def test_sizes_and_numbers_without_bounds_are_malformed(sender: Any, now: float, change: Any) -> None:
    request = sender().request(now, [0.5])
    change(only_point(request))
    assert read(request) == ([], {"malformed": 1})


def test_a_long_attribute_of_a_resource_leaves_the_others(sender: Any, now: float) -> None:
    """A process's command line may be long; what else its resource says still selects slices."""
    request = sender().request(now, [0.5])
    resource = request.resource_metrics[0].resource
    resource.attributes.add(key="process.command_line").value.string_value = "x" * 5000
    resource.attributes.add(key="deployment.environment.name").value.string_value = "prod"
    (found,) = read(request)[0]
    assert found.origin.resource == {"service.instance.id": "0", "deployment.environment.name": "prod"}


@pytest.mark.parametrize("edges", [None, (0.1, 0.2)])
def test_buckets_that_add_up_modulo_a_power_of_two_are_malformed(sender, now, edges):
    """Eight times 2^61 is nothing in 64 bits; so is 2^63 and 2^63."""
    for wrong in ([2**61] * 8, [2**63, 2**63]):
        request = sender(edges=edges).request(now, [0.05] * 7)
        point = only_point(request)
        counts = point.bucket_counts if edges else point.positive.bucket_counts
        kept = list(counts)
        del counts[:]
        if edges:
            point.explicit_bounds.extend([0.2 + at / 10 for at in range(1, len(wrong) + 1)])
        counts.extend([*kept, *wrong])
        _, outcomes = read(request)
        assert outcomes == {"malformed": 1}


def test_wide_and_fine_histograms_are_made_coarser(sender: Any, now: float) -> None:
    request = sender().request(now, [0.5])
    point = only_point(request)
    point.scale, point.positive.offset = 10, -9000
    del point.positive.bucket_counts[:]
    point.positive.bucket_counts.extend([1] * 9000)
    point.count, point.sum = 9000, sum(2.0 ** (-index / 1024) for index in range(9000))
    (found,) = read(request)[0]
    assert found.histogram.count == int(found.histogram.positive.counts.sum()) == 9000
    assert found.histogram.positive.counts.size <= 4096


@pytest.mark.parametrize("edges", [None, (0.25, 0.75)])
def test_a_sum_that_the_buckets_cannot_have_is_refused(sender, now, edges):
    for total, counted in ((0.9, 1), (1.2, 0), (0.7, 0), (4.0, 0), (-1.0, 0), (1.7e308, 0), (5e-324, 0)):
        request = sender(edges=edges).request(now, [0.4, 0.5])
        only_point(request).sum = total
        points, refused = read(request)
        assert (len(points), refused["malformed"]) == (counted, 1 - counted), total


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(
        st.one_of(st.floats(-50, 50), st.sampled_from([0.0, 1.0, -1.0, 2.0, 0.5, 1e-12])), min_size=1, max_size=40
    ),
    edges=st.sampled_from([None, (), (0.0,), (-1.0, 0.5, 1.0, 2.0)]),
)
def test_every_honest_sum_is_believed(values: list[float], edges: tuple[float, ...] | None) -> None:
    """Whatever was observed, its exact sum is one that its buckets can have, at the buckets' edges too."""
    points, refused = read(Sender("kc.drift.log_ratio", edges=edges).request(NOW, values))
    assert (len(points), refused) == (1, {})


def test_missing_temporality_and_wrong_types_are_malformed(sender: Any, now: float) -> None:
    request = sender().request(now, [0.5])
    metric = request.resource_metrics[0].scope_metrics[0].metrics[0]
    metric.exponential_histogram.aggregation_temporality = 0
    assert read(request) == ([], {"malformed": 1})
    metric.gauge.data_points.add(time_unix_nano=5)
    assert read(request) == ([], {"malformed": 1})


def test_staleness_markers_are_ignored(sender: Any, now: float) -> None:
    request = sender().request(now)
    only_point(request).flags = 1
    assert read(request) == ([], {"ignored": 1})


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    scale=st.integers(-12, 22),
    offset=st.integers(-(2**31), 2**31 - 1),
    counts=st.lists(st.one_of(st.integers(0, 5), st.integers(0, 2**64 - 1)), max_size=6),
    negative=st.lists(st.integers(0, 2**64 - 1), max_size=3),
    zero=st.integers(0, 2**64 - 1),
    threshold=st.floats(),
    total=st.floats(),
    honest=st.booleans(),
)
def test_no_point_can_break_the_reader(scale, offset, counts, negative, zero, threshold, total, honest):
    """Whatever the numbers, a point is read or refused; what is read has usable bins."""
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="kc.drift.log_ratio")
    metric.exponential_histogram.aggregation_temporality = 2
    point = metric.exponential_histogram.data_points.add(time_unix_nano=5, scale=scale, zero_count=zero, sum=total)
    point.positive.offset, point.negative.offset = offset, -offset // 2
    point.positive.bucket_counts.extend(counts)
    point.negative.bucket_counts.extend(negative)
    point.zero_threshold = threshold
    point.count = (sum(counts) + sum(negative) + zero) % 2**64 if honest else 3
    points, refused = read(request)
    assert len(points) + refused["malformed"] == 1
    for found in points:
        bins = found.histogram.binned()
        assert bins.total == found.histogram.count
        assert not np.isnan(bins.lower).any()
        assert (bins.lower <= bins.upper).all()
