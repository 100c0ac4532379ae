"""Streams of many processes become one stream each metric and its attributes: increments are taken, and added up.

Cumulative exponential histograms of drift are merged; counts, sums and buckets of one scale add up exactly. What is
lost: which process it was, exemplars, and of extremes what lies below the largest and above the smallest since the sum
began, which is then known to a bucket, as it is within one stream. Everything else in a request is left as it came.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE

from kc_otel.contract.registry import RECORDED
from kc_otel.judge.histograms import union
from kc_otel.judge.otlp.sink import ExportResult
from kc_otel.judge.point_streams import Horizon, PointStream
from kc_otel.judge.points import DRIFT_NAMES, walk
from kc_otel.stats import Buckets, ExponentialHistogram

__all__ = ["HostStreams", "Merged", "Total", "as_mark", "as_request", "comes_from"]

_UNITS: Final = {quantity.name: quantity.unit for quantity in RECORDED.values()}
_AHEAD: Final = 30 * 10**9
_DAY: Final = 86_400 * 10**9
_BEFORE: Final = 60 * 10**9
"""Processes that began so much earlier than the aggregator first did count from their beginning."""
_MARK: Final = "kc.aggregator.mark"
_FUTURE: Final = "points are from the future; check the sender's clock"
_REJECTED: Final = ("future", "over_cap", "malformed")
_TOO_MANY: Final = "more streams than the aggregator keeps; give the senders fewer identities"


@dataclass(frozen=True, slots=True)
class Total:
    """What all processes together have observed of one metric with one set of attributes.

    Attributes:
        start: When the sum began, Unix time in ns.
        heard: When a process last spoke of it, Unix time in ns.
        histogram: What was observed since.
    """

    start: int
    heard: int
    histogram: ExponentialHistogram


@dataclass(frozen=True, slots=True)
class Merged:
    """What a request comes to, before any of it is remembered.

    Attributes:
        streams: New states of the senders' streams, by identity.
        totals: New sums, by key; also those to which nothing was added, for their senders live.
        rest: What is not merged, to be passed on as it is.
        result: What the sender is told.
        counts: Data points by what becomes of them.
    """

    streams: Mapping[bytes, PointStream]
    totals: Mapping[str, Total]
    rest: ExportMetricsServiceRequest
    result: ExportResult
    counts: Mapping[str, int]


class HostStreams:
    """The senders' streams and their sums. It does no input or output, and is told the time.

    Args:
        began: When this aggregator first began, Unix time in ns: what processes observed well before that has gone
            elsewhere, or nobody knows whether it has.
        most: Streams and sums that are kept, each.

    Attributes:
        streams: By the identity of the OTel data model.
        totals: By key, see `as_request`.
    """

    def __init__(self, began: int, most: int = 32_768) -> None:
        self.began, self._most = began, most
        self.streams: dict[bytes, PointStream] = {}
        self.totals: dict[str, Total] = {}

    def merged(self, request: ExportMetricsServiceRequest, now: int) -> Merged:
        """What a request that arrives at `now`, Unix ns, comes to; nothing is remembered until `adopt`."""
        mine, rest, passed = _parted(request)
        horizon = Horizon(now + _AHEAD, max(min(self.began, now) - _BEFORE, now - _DAY), now - _DAY, _DAY)
        streams: dict[bytes, PointStream] = {}
        totals: dict[str, Total] = {}
        counts: Counter[str] = Counter()
        said: dict[str, None] = {}

        def count(outcome: str, points: int, message: str) -> None:
            counts[outcome] += points
            if message:
                said[message] = None

        for point in walk(mine, (), count):
            key = json.dumps([point.metric, sorted(point.attributes.items())])
            stream, total = streams.get(point.stream), totals.get(key, self.totals.get(key))
            if stream is None:
                known = self.streams.get(point.stream)
                if known is None and max(len(self.streams) + len(streams), len(self.totals)) >= self._most:
                    count("over_cap", 1, _TOO_MANY)
                    continue
                stream = _copy(known) if known else PointStream()
            found = stream.accept(point, horizon)
            count(found.outcome, 1, _FUTURE if found.outcome == "future" else "")
            if found.outcome == "future":
                continue
            stream.heard, streams[point.stream] = now / 1e9, stream
            total = replace(total, heard=now) if total else Total(now, now, ExponentialHistogram.empty(20))
            if isinstance(found.increment, ExponentialHistogram):
                whole = union([total.histogram, found.increment])
                assert isinstance(whole, ExponentialHistogram)
                total = replace(total, histogram=whole)
            totals[key] = total
        counts["passed_on"] = passed
        rejected = sum(counts[outcome] for outcome in _REJECTED)
        result = ExportResult(rejected, "; ".join(list(said)[:3]) if rejected else "")
        return Merged(streams, totals, rest, result, +counts)

    def adopt(self, merged: Merged) -> None:
        """Remember what a request came to."""
        self.streams.update(merged.streams)
        self.totals.update(merged.totals)

    def silent(self, now: int) -> tuple[tuple[bytes, ...], tuple[str, ...]]:
        """Streams and sums of which nothing was heard for a day: what is as old and speaks again begins anew."""
        streams = tuple(id for id, stream in self.streams.items() if stream.heard * 1e9 < now - _DAY)
        return streams, tuple(key for key, total in self.totals.items() if total.heard < now - _DAY)

    def forget(self, streams: Iterable[bytes], totals: Iterable[str]) -> None:
        """Forget streams and sums."""
        for stream in streams:
            del self.streams[stream]
        for total in totals:
            del self.totals[total]


def as_request(totals: Mapping[str, Total], resource: Mapping[str, str], now: int) -> ExportMetricsServiceRequest:
    """Sums as a request of cumulative points.

    Args:
        totals: Sums by key: JSON of the metric's name and its attributes.
        resource: Attributes that say who adds up.
        now: Unix time in ns.
    """
    request, owner = _owned(resource)
    scope = owner.scope_metrics.add()
    scope.scope.name = "kc_otel"
    metrics: dict[str, Any] = {}
    for key, total in totals.items():
        if not total.histogram.count:
            continue
        name, attributes = json.loads(key)
        if name not in metrics:
            metrics[name] = scope.metrics.add(name=name, unit=_UNITS[name]).exponential_histogram
            metrics[name].aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
        point = metrics[name].data_points.add(start_time_unix_nano=total.start, time_unix_nano=now)
        for label, text in attributes:
            _put(point.attributes.add(key=label).value, text)
        _fill(point, total.histogram)
    return request


def as_mark(resource: Mapping[str, str], now: int) -> bytes:
    """A gauge that says who adds up, and which every aggregator passes on as it is; evaluators take no notice of it."""
    request, owner = _owned(resource)
    gauge = owner.scope_metrics.add().metrics.add(name=_MARK).gauge
    gauge.data_points.add(time_unix_nano=now).as_int = 1
    return request.SerializeToString()


def comes_from(request: ExportMetricsServiceRequest, instance: str) -> bool:
    """Whether the aggregator with this `service.instance.id` has said any of a request."""
    return any(
        pair.key == "service.instance.id" and pair.value.string_value == instance
        for owner in request.resource_metrics
        for pair in owner.resource.attributes
    )


def _owned(resource: Mapping[str, str]) -> tuple[ExportMetricsServiceRequest, Any]:
    request = ExportMetricsServiceRequest()
    owner = request.resource_metrics.add()
    for name, value in resource.items():
        owner.resource.attributes.add(key=name).value.string_value = value
    return request, owner


def _parted(
    request: ExportMetricsServiceRequest,
) -> tuple[ExportMetricsServiceRequest, ExportMetricsServiceRequest, int]:
    """Cumulative exponential histograms of drift, everything else, and how many points that has."""
    mine, rest, points = ExportMetricsServiceRequest(), ExportMetricsServiceRequest(), 0
    for owner in request.resource_metrics:
        for scope in owner.scope_metrics:
            parts: dict[bool, list[Any]] = {True: [], False: []}
            for metric in scope.metrics:
                histogram = metric.exponential_histogram
                whole = histogram.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
                ours = metric.name in DRIFT_NAMES and whole
                parts[ours].append(metric)
                kind = metric.WhichOneof("data")
                if kind and not ours:
                    points += len(getattr(metric, kind).data_points)
            for into, metrics in ((mine, parts[True]), (rest, parts[False])):
                if metrics:
                    other = into.resource_metrics.add(schema_url=owner.schema_url)
                    other.resource.CopyFrom(owner.resource)
                    there = other.scope_metrics.add(schema_url=scope.schema_url)
                    there.scope.CopyFrom(scope.scope)
                    there.metrics.extend(metrics)
    return mine, rest, points


def _copy(stream: PointStream) -> PointStream:
    return replace(stream, writers=[replace(writer) for writer in stream.writers], times=list(stream.times))


def _put(value: Any, attribute: str | bool | float) -> None:
    if isinstance(attribute, bool):
        value.bool_value = attribute
    elif isinstance(attribute, int):
        value.int_value = attribute
    elif isinstance(attribute, float):
        value.double_value = attribute
    else:
        value.string_value = attribute


def _fill(point: Any, histogram: ExponentialHistogram) -> None:
    point.scale, point.count, point.sum = histogram.scale, int(histogram.count), histogram.sum
    point.zero_count, point.zero_threshold = int(histogram.zero_count), histogram.zero_threshold
    for side, buckets in ((point.positive, histogram.positive), (point.negative, histogram.negative)):
        used: Buckets = buckets.trimmed()
        side.offset = int(used.offset)
        side.bucket_counts.extend(used.counts.tolist())
    if math.isfinite(histogram.minimum):
        point.min = histogram.minimum
    if math.isfinite(histogram.maximum) and histogram.maximum_observed:
        point.max = histogram.maximum
