"""Which bucket a number falls into: the one that the OpenTelemetry SDK puts it in; and points as they arrive."""

from __future__ import annotations

import numpy as np
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics._internal.exponential_histogram.mapping.logarithm_mapping import LogarithmMapping
from opentelemetry.sdk.metrics.export import AggregationTemporality, MetricsData, ResourceMetrics, ScopeMetrics
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from kc_otel.contract.limits import ZERO_THRESHOLD
from kc_otel.contract.registry.clause_metrics import QUANTITIES
from kc_otel.contract.registry.own_metrics import METRICS
from kc_otel.record.measure.sampled import TOKEN
from kc_otel.record.telemetry import recorder_points as points
from kc_otel.record.telemetry.buckets import LogRatioCells, Slots, cells, slots
from kc_otel.stats.histogram import Buckets, Histogram

SCALE = 4


def sdk_slot(value: float) -> int:
    of = slots()
    if abs(value) <= ZERO_THRESHOLD:
        return of.center
    outward = LogarithmMapping(SCALE).map_to_index(abs(value)) - of.lowest_index + 1
    return of.center + outward if value > 0 else of.center - outward


def neighbours(values):
    values = np.asarray(values, dtype=np.float32)
    return np.concatenate([values, np.nextafter(values, np.float32(np.inf)), np.nextafter(values, np.float32(0))])


def test_every_boundary_is_where_the_sdk_has_it() -> None:
    of = Slots()
    values = neighbours(of.bounds)
    values = np.concatenate([values, -values])
    expected = [sdk_slot(float(value)) for value in values]
    assert of.locate(values).tolist() == expected


def test_what_is_close_to_zero_is_zero() -> None:
    tiny = np.float32([0.0, -0.0, 1e-45, -1e-45, 1e-20, -1e-20, ZERO_THRESHOLD, -ZERO_THRESHOLD])
    of = Slots()
    assert set(of.locate(tiny).tolist()) == {of.center}
    beyond = np.nextafter(np.float32(ZERO_THRESHOLD), np.float32(1))
    assert of.locate(np.array([beyond, -beyond])).tolist() == [of.center + 1, of.center - 1]


def test_what_is_too_large_is_in_the_outermost_bucket() -> None:
    of = Slots()
    values = np.array([1e300, -1e300, np.inf, -np.inf])
    assert of.locate(values).tolist() == [of.size - 1, 0, of.size - 1, 0]


def test_cells_change_exactly_where_a_quantity_changes_bucket() -> None:
    """At the two float32 numbers around every cut, both cells' buckets are those of the quantities in float64."""
    of, with_table = cells(), LogRatioCells()
    with_table._located = 1 << 30
    inner = of.edges
    outer = np.nextafter(inner, np.float32(-np.inf))
    for values in (inner, outer):
        located = of.locate(values)
        assert with_table.locate(values).tolist() == located.tolist()
        for key, quantity in TOKEN.items():
            expected = of.slots.locate(quantity(values.astype(np.float64)))
            assert of._slot[key][located].tolist() == expected.tolist()


POSITIVE, NEGATIVE = Buckets(-8, np.array([0, 3, 0, 1, 0])), Buckets(-4, np.array([3]))
VALUE = Histogram(
    scale=4, count=9, sum=1.25, zero_count=2, positive=POSITIVE, negative=NEGATIVE, minimum=-0.9, maximum=0.8,
    zero_threshold=2.0**-30,
)  # fmt: skip


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
    total = points.counter("kc.recorder.tokens", [({}, 3, 5)], 7)
    assert total.data.aggregation_temporality is AggregationTemporality.CUMULATIVE
    assert total.data.is_monotonic


def test_gauges_leave_out_what_is_not_a_number():
    values = [({"kc.contract": "a"}, 0.5), ({"kc.contract": "b"}, float("nan"))]
    metric = points.gauge("kc.recorder.sampling", values, 5, 7)
    assert [point.value for point in metric.data.data_points] == [0.5]
    assert metric.unit == METRICS["kc.recorder.sampling"].unit
