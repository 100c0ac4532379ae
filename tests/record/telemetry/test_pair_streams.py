"""Points as they arrive, and histograms of single operators."""

from __future__ import annotations

import numpy as np
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import AggregationTemporality, MetricsData, ResourceMetrics, ScopeMetrics
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from kc_otel.contract.registry.clause_metrics import QUANTITIES
from kc_otel.contract.registry.own_metrics import METRICS
from kc_otel.record.telemetry import pair_streams as points
from kc_otel.stats.histogram import Buckets, ExponentialHistogram

VALUE = ExponentialHistogram(
    scale=4,
    count=9,
    sum=1.25,
    zero_count=2,
    positive=Buckets(-8, np.array([0, 3, 0, 1, 0], dtype=np.int64)),
    negative=Buckets(-4, np.array([3], dtype=np.int64)),
    minimum=-0.9,
    maximum=0.8,
    zero_threshold=2.0**-30,
)


def encoded(metric):
    data = MetricsData([ResourceMetrics(Resource({}), [ScopeMetrics(InstrumentationScope("t"), [metric], "")], "")])
    return encode_metrics(data).resource_metrics[0].scope_metrics[0].metrics[0]


def test_a_histogram_arrives_as_it_was():
    metric = encoded(points.histogram("tv_token", [points.histogram_point(VALUE, {"kc.slice": "all"}, 5, 7)]))
    (point,) = metric.exponential_histogram.data_points
    assert (metric.name, metric.unit) == (QUANTITIES["tv_token"].name, QUANTITIES["tv_token"].unit)
    assert metric.exponential_histogram.aggregation_temporality == 2
    assert (point.start_time_unix_nano, point.time_unix_nano) == (5, 7)
    assert (point.scale, point.count, point.sum, point.zero_count) == (4, 9, 1.25, 2)
    assert (point.min, point.max) == (-0.9, 0.8)
    assert (point.positive.offset, list(point.positive.bucket_counts)) == (-7, [3, 0, 1])
    assert (point.negative.offset, list(point.negative.bucket_counts)) == (-4, [3])


def test_everything_is_cumulative_whatever_the_preference(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    metric = points.histogram("tv_token", [points.histogram_point(VALUE, {}, 5, 7)])
    assert metric.data.aggregation_temporality is AggregationTemporality.CUMULATIVE
    total = points.counter("kc.recorder.tokens", [({}, 3)], 5, 7)
    assert total.data.aggregation_temporality is AggregationTemporality.CUMULATIVE
    assert total.data.is_monotonic


def test_gauges_leave_out_what_is_not_a_number():
    values = [({"kc.contract": "a"}, 0.5), ({"kc.contract": "b"}, float("nan"))]
    metric = points.gauge("kc.recorder.sampling", values, 5, 7)
    assert [point.value for point in metric.data.data_points] == [0.5]
    assert metric.unit == METRICS["kc.recorder.sampling"].unit
