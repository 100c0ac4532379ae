"""Convert accumulated values to the OpenTelemetry SDK's data classes, with the registry's names and descriptions.

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

from kc_otel.contract.bucket_layouts import ZERO_THRESHOLD
from kc_otel.contract.registry.clause_metrics import RECORDED
from kc_otel.contract.registry.own_metrics import METRICS
from kc_otel.contract.slices import Scalar
from kc_otel.stats.histogram import Buckets, ExponentialHistogram

_CUMULATIVE: Final = sdk.AggregationTemporality.CUMULATIVE


def histogram_point(
    value: ExponentialHistogram, attributes: Mapping[str, str], start: int, now: int, exemplars: Sequence[Exemplar] = ()
) -> sdk.ExponentialHistogramDataPoint:
    """One cumulative point, observed from `start` to `now` (unix nanoseconds); `value` must not be empty.

    The SDK's point and encoder have no zero threshold. Where it is one that matters, an empty bucket that ends there is
    the first one, and says it.
    """
    return sdk.ExponentialHistogramDataPoint(
        attributes=attributes,
        start_time_unix_nano=start,
        time_unix_nano=now,
        count=int(value.count),
        sum=float(value.sum),
        scale=value.scale,
        zero_count=int(value.zero_count),
        positive=_from_threshold(value) if value.zero_threshold > ZERO_THRESHOLD else _buckets(value.positive),
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


def _from_threshold(value: ExponentialHistogram) -> sdk.Buckets:
    """Positive buckets from the one below the zero threshold on."""
    used = value.positive.trimmed()
    first = round(math.log2(value.zero_threshold) * 2.0**value.scale) - 1
    empty = used.offset - first if used.counts.size else 1
    return sdk.Buckets(offset=first, bucket_counts=[0] * empty + used.counts.tolist())


def _buckets(buckets: Buckets) -> sdk.Buckets:
    used = buckets.trimmed()
    return sdk.Buckets(offset=int(used.offset), bucket_counts=used.counts.tolist())
