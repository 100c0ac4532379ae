"""Metrics of a recorder, the SDK's with the registry's names: streams of a kernel pair, and its counts of itself.

Failures are never raised, so all of them are counted here.

Everything is cumulative, whatever OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE says: a lost delta would be lost
evidence, and a verdict rests on counts being complete; a lost cumulative point costs nothing, because the next one
contains it.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics import export as sdk
from opentelemetry.sdk.metrics.export import ExponentialHistogramDataPoint, Metric
from opentelemetry.trace import SpanContext

from kc_otel.contract.input_reasons import remedy
from kc_otel.contract.limits import MOST_BUCKETS, ZERO_THRESHOLD, BucketLayout
from kc_otel.contract.registry.clause_metrics import RECORDED
from kc_otel.contract.registry.own_metrics import METRICS
from kc_otel.contract.slices import ALL, Scalar
from kc_otel.record.kernel import KernelPair
from kc_otel.record.measure.sampled import TOKEN
from kc_otel.record.telemetry.accumulate import Accumulator, WorstToken
from kc_otel.record.worker import ReasonCounts
from kc_otel.stats.histogram import Buckets, Histogram

_CUMULATIVE: Final = sdk.AggregationTemporality.CUMULATIVE
_PROMPTS_UNKNOWN_WARNING: Final = (
    "prompts are unknown, so each sequence counts as independent; if a prompt has several rollouts, pass groups= or "
    "prompt_ids= to compare, or intervals are too narrow"
)
_SPLIT_PROMPT_WARNING: Final = (
    "some rollouts of a prompt arrived after it had counted, or too late, so it counts in parts; pass compare "
    "group_size= and all rollouts of a prompt to one process"
)
_ROLLOUTS: Final = ("kc.quarantine.sequences", "kc.quarantine.tokens", "kc.quarantine.tv")
_ATTRIBUTES: Final = {
    "kc.recorder.dropped": ("kc.reason",),
    "kc.input.invalid": ("kc.reason", "kc.slice", "kc.kernel.train", "kc.kernel.inference"),
    "kc.recorder.prompts": ("kc.outcome",),
    **dict.fromkeys(_ROLLOUTS, ("kc.outcome",)),
}
"""Metric -> attributes by which it counts."""


@dataclass(frozen=True, slots=True)
class TokenExemplar:
    """A batch's worst token, its span, when it was measured, unix nanoseconds, and both weight versions by name."""

    token: WorstToken
    span: SpanContext
    at: int
    weights: Mapping[str, Scalar]


class PairStreams:
    """Observations of one kernel pair from `start` on, unix nanoseconds. Not thread-safe.

    A stream that appears later begins at the export before: a start that is long past says that values may be missing.
    It is exported in the buckets of `layouts`, and quantities in `of_all` of all traffic alone.
    """

    def __init__(
        self,
        contract: str,
        pair: KernelPair,
        start: int,
        accumulator: Accumulator,
        *,
        layouts: Mapping[str, BucketLayout] = MappingProxyType({}),
        of_all: Collection[str] = (),
    ) -> None:
        self.pair: Final = pair
        self.accumulator: Final = accumulator
        self.retired = False
        self.batches = 0
        self.step: int | None = None
        """Trainer's step of the newest batch."""
        self._contract = contract
        self._layouts = layouts
        self._of_all = of_all
        self._collected = start
        self._starts: dict[tuple[str, str, str], int] = {}
        self._worst: dict[str, TokenExemplar] = {}

    def explain(self, example: TokenExemplar) -> None:
        """Keep an example for the slices where none since the last export was worse: one per slice and interval.

        Its value is in the histograms of its own sequence's slices and of no others.
        """
        for name in example.token.slices:
            known = self._worst.get(name)
            if known is None or abs(example.token.log_ratio) > abs(known.token.log_ratio):
                self._worst[name] = example

    def points(self, now: int) -> Iterable[tuple[str, ExponentialHistogramDataPoint]]:
        """Every stream's (quantity, cumulative point); exemplars are handed out once."""
        worst, self._worst = self._worst, {}
        before, self._collected = self._collected, now
        for quantity, operator, slice, value in self.accumulator.histograms():
            if not value.count or (quantity in self._of_all and slice != ALL):
                continue
            attributes = {**self.identity, "kc.slice": slice} | ({"kc.operator": operator} if operator else {})
            exemplars = _exemplars(quantity, worst[slice]) if slice in worst else ()
            sized = value.sized(*self._layouts[quantity], MOST_BUCKETS) if quantity in self._layouts else value
            start = self._starts.setdefault((quantity, operator, slice), before)
            yield quantity, histogram_point(sized, attributes, start, now, exemplars)

    @property
    def identity(self) -> dict[str, str]:
        """Attributes that all slices of the pair share."""
        return {
            "kc.contract": self._contract,
            "kc.kernel.train": self.pair.train.fingerprint,
            "kc.kernel.inference": self.pair.inference.fingerprint,
        }


def drift_metrics(streams: Iterable[PairStreams], now: int) -> list[Metric]:
    """One metric per quantity, with the points of every slice and pair."""
    points: dict[str, list[ExponentialHistogramDataPoint]] = {quantity: [] for quantity in RECORDED}
    for stream in streams:
        for quantity, point in stream.points(now):
            points[quantity].append(point)
    return [histogram(quantity, found) for quantity, found in points.items() if found]


def kernel_info(contract: str, pairs: Iterable[KernelPair], current: KernelPair | None, start: int, now: int) -> Metric:
    """`kc.kernel.info`: the meaning of each fingerprint, and whether its kernel is in use; none is at a shutdown."""
    in_use = set() if current is None else {("train", current.train), ("inference", current.inference)}
    roles = {
        (role, kernel) for pair in pairs for role, kernel in (("train", pair.train), ("inference", pair.inference))
    }
    values: list[tuple[Mapping[str, Scalar], float]] = []
    for role, kernel in sorted(roles, key=lambda item: (item[0], item[1].fingerprint)):
        identity: dict[str, Scalar] = {
            "kc.contract": contract,
            "kc.kernel.role": role,
            "kc.kernel.version": kernel.fingerprint,
        }
        values.append(({**identity, **kernel.attributes()}, 1 if (role, kernel) in in_use else 0))
    return gauge("kc.kernel.info", values, start, now)


def train_step(streams: Iterable[PairStreams], start: int, now: int) -> Metric:
    """`kc.train.step`: of each pair whose weights say it, a point."""
    return gauge(
        "kc.train.step", [(stream.identity, stream.step) for stream in streams if stream.step is not None], start, now
    )


def _exemplars(quantity: str, example: TokenExemplar) -> tuple[Exemplar, ...]:
    if quantity not in {"abs_log_ratio", "tv_token"}:
        return ()
    value = float(TOKEN[quantity](np.float64(example.token.log_ratio)))
    return (Exemplar(dict(example.weights), value, example.at, example.span.span_id, example.span.trace_id),)


def histogram_point(
    value: Histogram, attributes: Mapping[str, str], start: int, now: int, exemplars: Sequence[Exemplar] = ()
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


def counter(name: str, values: Iterable[tuple[Mapping[str, Scalar], float, int]], now: int) -> sdk.Metric:
    """A monotonic sum of the registry, by attributes; each value with the time from which it counts."""
    points = [sdk.NumberDataPoint(attributes, start, now, value) for attributes, value, start in values]
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


def _from_threshold(value: Histogram) -> sdk.Buckets:
    """Positive buckets from the one below the zero threshold on."""
    used = value.positive.trimmed()
    first = round(math.log2(value.zero_threshold) * 2.0**value.scale) - 1
    empty = used.offset - first if used.counts.size else 1
    return sdk.Buckets(offset=first, bucket_counts=[0] * empty + used.counts.tolist())


def _buckets(buckets: Buckets) -> sdk.Buckets:
    used = buckets.trimmed()
    return sdk.Buckets(offset=int(used.offset), bucket_counts=used.counts.tolist())


@dataclass(frozen=True, slots=True)
class RecorderStats:
    """Counts of a recorder's work and failures in this process, and its current backlog."""

    batches: int = 0
    sequences: int = 0
    tokens: int = 0  # after masks
    untraced: int = 0  # batches measured whose span could not be made
    unsampled: int = 0  # batches, or sequences waiting for their other side, left out by sampling
    dropped: dict[str, int] = field(default_factory=dict)  # batches by reason; sequences for `pair-...`
    invalid: dict[str, int] = field(default_factory=dict)  # sequences that failed an input check, by reason
    quarantined: int = 0  # sequences that were kept out of training
    exports: int = 0  # that every endpoint accepted
    exports_in_part: int = 0  # accepted, but for points that an endpoint rejected
    exports_taken: int = 0  # of both, those of which points of drift were accepted
    export_failures: int = 0  # that an endpoint did not accept
    rejected: str = ""  # what an endpoint said of the last export that it accepted in part
    queued_batches: int = 0  # that wait to be measured
    queued_bytes: int = 0
    unpaired: int = 0  # sequences that wait for their other side
    unpaired_tokens: int = 0
    slices_as_other: tuple[str, ...] = ()  # that `max_series` leaves no room for; they are counted as `other`


class Counters:
    """Thread-safe counts; the first trouble of each kind is logged, the rest is only counted."""

    def __init__(self, contract: str) -> None:
        self._contract = contract
        self._lock = threading.Lock()
        self._plain: Counter[str] = Counter()
        self._dropped = ReasonCounts(f"contract {contract}: dropped (%s)")
        self.dropped: Final = self._dropped.add
        """Count batches (sequences, for pairs) that were not measured: the reason, why, and how many."""
        self._invalid = ReasonCounts(f"contract {contract}: input invalid (%s)")
        self.noted: Final = ReasonCounts(f"contract {contract}: input doubtful (%s)").add
        """Note a peculiarity of a measured batch: its kind, and what it is, which is logged the first time."""
        self._failures = ReasonCounts(f"contract {contract}: %s failed")
        self._rejected = self._last_rejected = ""
        self._points_rejected = self.points = 0  # of the export under way: all that are rejected, and those of drift
        self._by: defaultdict[tuple[str, ...], float] = defaultdict(int)
        """Counts of a metric by its attributes' values; an empty one is left out."""
        self._starts: dict[tuple[str, ...], int] = {}
        self._collected = 0

    def count(self, **counts: int) -> None:
        """Add to counts of `RecorderStats`."""
        with self._lock:
            self._plain.update(counts)

    def untraced(self, why: object) -> None:
        """Count a measured batch whose span could not be made."""
        self.count(untraced=1)
        self._failures.add("span", why)

    def invalid(
        self,
        reason: str,
        count: int,
        pair: KernelPair,
        why: object | None = None,
        slices: Mapping[str, int] | None = None,
    ) -> None:
        """Count sequences of a pair that failed an input check; the first is logged with `why` or the reason's words.

        `slices` says how many of them are on each slice; None where nobody knows their slices.
        """
        with self._lock:
            for slice, some in ({"": count} if slices is None else slices).items():
                if some:
                    of = reason, slice, pair.train.fingerprint, pair.inference.fingerprint
                    self._by["kc.input.invalid", *of] += some
        self._invalid.add(reason, remedy(reason) if why is None else why, count)

    def rollouts(self, outcome: Literal["kept", "quarantined"], sequences: int, tokens: int, tv_sum: float) -> None:
        """Count sequences by their outcome in quarantine: how many, their tokens, and the sum of (1-w)+ over these."""
        with self._lock:
            for name, value in zip(_ROLLOUTS, (sequences, tokens, tv_sum), strict=True):
                self._by[name, outcome] += value
            if outcome == "quarantined":
                self._plain["quarantined"] += sequences

    def prompts(self, outcomes: Mapping[str, int]) -> None:
        """Prompts counted, by how."""
        with self._lock:
            for outcome, count in outcomes.items():
                self._by["kc.recorder.prompts", outcome] += count
        if outcomes.get("part"):
            self.noted("prompt-parts", _SPLIT_PROMPT_WARNING)
        if outcomes.get("assumed"):
            self.noted("prompts", _PROMPTS_UNKNOWN_WARNING)

    def exported(self) -> None:
        """Every endpoint accepted an export, up to the points that `export_rejected` was told of."""
        with self._lock:
            rejected, self._rejected = self._rejected, ""
            self._plain["exports_taken"] += self.points > (self._points_rejected if rejected else 0)
            self._plain["exports_in_part" if rejected else "exports"] += 1
            self._last_rejected = rejected or self._last_rejected
        if rejected:
            self._failures.add("export", rejected)
        else:
            self._failures.clear("export")  # the next outage is news again

    def export_rejected(self, why: str, points: int) -> None:
        """The endpoint rejected points of the export that is under way; it must not be repeated."""
        with self._lock:
            self._rejected, self._points_rejected = why, points

    def export_failed(self, why: object) -> None:
        """An endpoint did not accept an export."""
        self.count(export_failures=1)
        self._rejected = ""
        self._failures.add("export", why)

    def values(self) -> RecorderStats:
        """Return the current counts, without the backlog."""
        with self._lock:
            plain: dict[str, Any] = {**self._plain, "rejected": self._last_rejected}
        return RecorderStats(dropped=self._dropped.values(), invalid=self._invalid.values(), **plain)

    def metrics(self, start: int, now: int) -> list[Metric]:
        """The counts as cumulative sums to `now` from `start`, or the call before their first; unix nanoseconds."""
        values = self.values()
        with self._lock:
            by = dict(self._by)
        by |= {("kc.recorder.dropped", reason): count for reason, count in values.dropped.items()}
        contract: dict[str, Scalar] = {"kc.contract": self._contract}
        points: dict[str, list[tuple[Mapping[str, Scalar], float, int]]] = {
            "kc.recorder.tokens": [(contract, values.tokens, start)],
            "kc.recorder.export.failures": [(contract, values.export_failures + values.exports_in_part, start)],
        }
        before, self._collected = self._collected or start, now
        for (name, *said), count in sorted(by.items()):
            of = {attribute: text for attribute, text in zip(_ATTRIBUTES[name], said, strict=True) if text}
            points.setdefault(name, []).append(
                ({**contract, **of}, count, self._starts.setdefault((name, *said), before))
            )
        return [counter(name, found, now) for name, found in points.items()]
