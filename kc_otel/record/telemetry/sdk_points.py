"""From accumulated values to the OpenTelemetry SDK's own data classes, named and described by the registry.

Everything is cumulative, whatever OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE says: a lost delta would be lost
evidence, and a verdict rests on counts being complete; a lost cumulative point costs nothing, because the next one
contains it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics import export as sdk

from kc_otel.contract.registry import METRICS, RECORDED
from kc_otel.contract.slices import Scalar
from kc_otel.stats.histogram import Buckets, ExponentialHistogram

__all__ = ["counter", "gauge", "histogram", "histogram_point"]

_CUMULATIVE: Final = sdk.AggregationTemporality.CUMULATIVE


def histogram_point(
    value: ExponentialHistogram, attributes: Mapping[str, str], start: int, now: int, exemplars: Sequence[Exemplar] = ()
) -> sdk.ExponentialHistogramDataPoint:
    """One cumulative point, observed from `start` to `now` (unix nanoseconds); `value` must not be empty."""
    return sdk.ExponentialHistogramDataPoint(
        attributes=attributes,
        start_time_unix_nano=start,
        time_unix_nano=now,
        count=int(value.count),
        sum=float(value.sum),
        scale=value.scale,
        zero_count=int(value.zero_count),
        positive=_buckets(value.positive),
        negative=_buckets(value.negative),
        flags=0,
        min=float(value.minimum),
        max=float(value.maximum),
        exemplars=list(exemplars),
    )


def histogram(quantity: str, points: Sequence[sdk.ExponentialHistogramDataPoint]) -> sdk.Metric:
    """The metric of a drift quantity of the registry."""
    known = RECORDED[quantity]
    return sdk.Metric(known.name, known.meaning, known.unit, sdk.ExponentialHistogram(points, _CUMULATIVE))


def counter(name: str, values: Iterable[tuple[Mapping[str, Scalar], float]], start: int, now: int) -> sdk.Metric:
    """A monotonic sum of the registry, by attributes."""
    points = [sdk.NumberDataPoint(attributes, start, now, value) for attributes, value in values]
    return _described(name, sdk.Sum(points, _CUMULATIVE, is_monotonic=True))


def gauge(name: str, values: Iterable[tuple[Mapping[str, Scalar], float]], start: int, now: int) -> sdk.Metric:
    """A gauge of the registry, by attributes; values that are not finite are left out."""
    points = [
        sdk.NumberDataPoint(attributes, start, now, value) for attributes, value in values if math.isfinite(value)
    ]
    return _described(name, sdk.Gauge(points))


def _described(name: str, data: sdk.DataT) -> sdk.Metric:
    known = METRICS[name]
    return sdk.Metric(known.name, known.meaning, known.unit, data)


def _buckets(buckets: Buckets) -> sdk.Buckets:
    used = buckets.trimmed()
    return sdk.Buckets(offset=int(used.offset), bucket_counts=used.counts.tolist())
