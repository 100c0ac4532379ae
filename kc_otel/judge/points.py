"""Decode an OTLP metrics request into a flat sequence of points.

Read are the drift quantities of the registry, `kc.input.invalid`, `kc.recorder.dropped`, `kc.kernel.info`,
`kc.train.step`, and the `gen_ai.*` histograms that a loaded contract names. Everything else is somebody else's: ignored
and counted. A point that contradicts itself (counts that do not add up, buckets no double can reach) is malformed:
counted, and told to the sender.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from kc_otel.contract.fields import operator_name
from kc_otel.contract.limits import WIDEST_ZERO
from kc_otel.contract.model import Contract
from kc_otel.contract.plain_text import is_plain
from kc_otel.contract.registry.clause_metrics import OPERATORS, RECORDED
from kc_otel.contract.slices import Scalar
from kc_otel.stats import Buckets
from kc_otel.stats.histogram import MAX_BUCKETS, Histogram, sum_fits

DRIFT_NAMES: Final = frozenset(quantity.name for quantity in RECORDED.values())
_OF_OPERATORS: Final = frozenset(quantity.name for quantity in OPERATORS.values())
INVALID: Final = "kc.input.invalid"
DROPPED: Final = "kc.recorder.dropped"
KERNEL_INFO: Final = "kc.kernel.info"
TRAIN_STEP: Final = "kc.train.step"
OTHER_NAMES: Final = frozenset({INVALID, DROPPED, KERNEL_INFO, TRAIN_STEP})

_DELTA, CUMULATIVE = 1, 2
_NO_RECORDED_VALUE = 1
_SCALAR_FIELDS: Final = frozenset({"string_value", "int_value", "double_value", "bool_value"})
MAX_COUNT: Final = 2**44
"""Counts beyond this are no counts: half a year of a million tokens a second. With it, the sum over the most streams of
a contract stays below 2^63."""
_ACCEPTED_SCALES: Final = range(-2, 21)
"""Buckets that are a factor of 16 wide suffice for all values; wider ones would make a whole window so."""
_EXPONENTS: Final = (-1080.0, 512.0)
"""Binary exponents of what is observed. No drift is larger, and sums of as many as there can be stay finite."""
_LARGEST_EDGE: Final = 2.0 ** _EXPONENTS[1]
_WIDEST_EXPONENT: Final = math.log2(WIDEST_ZERO)
_ADDRESS: Final = frozenset({"kc.contract", "kc.kernel.train", "kc.kernel.inference"})
_MAX_ATTRIBUTES: Final = 128
_MAX_SLICES: Final = 500
"""Slices that a contract may have."""
_MAX_CLAUSES: Final = 600
"""Clauses that a contract may have."""
_MAX_ATTRIBUTE_CHARACTERS: Final = 1024
"""Characters that a name or a value of an attribute may have."""
_MAX_CHARACTERS_TOGETHER: Final = 8192
"""Characters that all names and values of a point may have."""
_SENDER_ATTRIBUTES: Final = ("service.name", "host.name", "service.instance.id")
_INSTANCE_ATTRIBUTES: Final = ("service.namespace", "service.name", "service.instance.id")
"""They identify an instance of a service, by the semantic conventions of OpenTelemetry."""
_UUID: Final = re.compile("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}").fullmatch
_MAX_SENDER_CHARACTERS: Final = 120
"""Longest text of a sender's attributes that is kept whole."""
_SENDER_END_CHARACTERS: Final = 48
"""Characters at each end of a longer text that are shown before its digest."""


def series_name(metric: str, operator: str | None) -> str:
    """Return the key of a metric's observations: its name, and for an operator `metric[operator]`."""
    return metric if operator is None else f"{metric}[{operator}]"


def invalid_on(slice: str) -> str:
    """Return what the invalid sequences of a slice are kept under; those of slices that nobody knows are `INVALID`."""
    return series_name(INVALID, slice)


def metric_of(series: str) -> str:
    """The metric of a `series_name`."""
    return series.partition("[")[0]


@dataclass(frozen=True, slots=True)
class AppliedContract:
    """The contract that a recorder applies, as its instrumentation scope names it.

    `version` is 0, digests of slices by name and of what clauses measure are None, where they are not said.
    """

    version: int = 0
    slices: Mapping[str, str] | None = None
    quantities: frozenset[str] | None = None

    def differs(self, contract: Contract, slice: str) -> bool:
        """Return True if a slice of a contract is another one here, or none."""
        own = contract.slice_digests.get(slice)
        return own is not None and self.slices is not None and self.slices.get(slice) != own

    def otherwise(self, contract: Contract) -> tuple[str, ...]:
        """Names of a contract's slices that are other ones here, or none."""
        if self.slices == contract.slice_digests:
            return ()
        return tuple(name for name in contract.slices if self.differs(contract, name))

    def unmeasured(self, contract: Contract) -> tuple[str, ...]:
        """Ids of a contract's clauses for which something else is measured here, or nothing."""
        if self.quantities is None:
            return ()
        return tuple(id for id, digest in contract.recorded_digests.items() if digest not in self.quantities)


class PointOrigin(NamedTuple):
    """Resource and scope of points."""

    digest: bytes
    """Identity of both, 16 bytes: of the resource `resource_identity`, of the scope its name and version."""
    resource: dict[str, Scalar]
    applied: AppliedContract
    sender: str
    """Identity of the sender, for people: see `sender_of`."""


@dataclass(frozen=True, slots=True)
class Point:
    """One decoded data point; of attributes only those with a scalar value. Times are Unix ns."""

    metric: str
    origin: PointOrigin
    stream: bytes
    """Digest of the stream's identity as the OTel data model has it, 16 bytes."""
    tail: bytes
    """That identity besides the origin: metric name, unit, type, temporality and attributes."""
    attributes: dict[str, Scalar]
    start: int
    """0 when unknown."""
    time: int
    cumulative: bool
    """True if counts go back to `start`; else they are those since the stream's last point."""
    histogram: Histogram
    """Of an info and a step, their number as a count."""
    operator: str | None = None
    number: int = 0
    """Of the point among all exponential ones of its request, in their order; nothing for others."""

    @property
    def series(self) -> str:
        """Key of the point's observations."""
        if self.metric == INVALID:
            slice = self.attributes.get("kc.slice")
            return INVALID if slice is None else invalid_on(str(slice))
        return series_name(self.metric, self.operator)


class ImpossiblePoint(NamedTuple):
    """A malformed point: contract and kernels as far as they can be read, and what is wrong with it."""

    metric: str
    attributes: dict[str, Scalar]
    origin: PointOrigin
    message: str


class _MalformedError(ValueError):
    pass


def walk(request: Any, gen_ai: Collection[str], counts: Counter[str]) -> Iterator[Point | ImpossiblePoint]:
    """The points of an ExportMetricsServiceRequest that are ours, in order, as `points_of` has them."""
    for resource_metrics in request.resource_metrics:
        resource = resource_metrics.resource.SerializeToString()
        for scope_metrics in resource_metrics.scope_metrics:
            origin = origin_of(resource, scope_metrics.scope.SerializeToString())
            for metric in scope_metrics.metrics:
                yield from points_of(metric, origin, gen_ai, counts)


def points_of(
    metric: Any,
    origin: PointOrigin,
    gen_ai: Collection[str],
    counts: Counter[str],
    *,
    taken: bytes = b"",
    first: int = 0,
) -> Iterator[Point | ImpossiblePoint]:
    """A metric's points if they are ours, those of some `gen_ai.*` metrics included; others are counted as `ignored`.

    `taken` says of each whether it is to be left out; empty for none. The number of the first one is `first`.
    """
    name, field = metric.name, metric.WhichOneof("data")
    every = getattr(metric, field).data_points if field else ()
    if not (name in DRIFT_NAMES or name in OTHER_NAMES or name in gen_ai):
        counts["ignored"] += len(every)
        return
    points = [(number, point) for number, point in enumerate(every) if not (taken and taken[number])]

    def malformed(point: Any, message: str) -> ImpossiblePoint:
        return ImpossiblePoint(name, _address(point.attributes), origin, message)

    decode = _reader(name, field, metric)
    if decode is None:
        yield from (malformed(point, f"{name} cannot be a {field}") for _, point in points)
        return
    gauges = name in {KERNEL_INFO, TRAIN_STEP}
    temporality = 0 if gauges else getattr(metric, field).aggregation_temporality
    if not gauges and temporality not in {_DELTA, CUMULATIVE}:
        said = f"{name} has no aggregation temporality; send cumulative or delta"
        yield from (malformed(point, said) for _, point in points)
        return
    family = b"\0".join((b"", name.encode(), metric.unit.encode(), field.encode(), bytes((temporality,))))
    for number, point in points:
        try:
            if point.flags & _NO_RECORDED_VALUE:
                counts["ignored"] += 1
                continue
            pairs = tuple(pair.SerializeToString() for pair in point.attributes)
            attributes = _scalars_of(pairs)
            operator = _operator(attributes) if name in _OF_OPERATORS else None
            start, time = _times(point, temporality)
            histogram = decode(point)
        except (_MalformedError, OverflowError) as error:
            yield malformed(point, f"a point of {name} is impossible: {error}")
            continue
        # Attributes are a set: a sender may list them in another order next time.
        tail = b"\0".join((family, *sorted(pairs)))
        yield Point(
            metric=name,
            origin=origin,
            stream=digest_of(origin.digest, tail),
            tail=tail,
            attributes=attributes,
            start=start,
            time=time,
            cumulative=temporality == CUMULATIVE,
            histogram=histogram,
            operator=operator,
            number=first + number,
        )


def _operator(attributes: dict[str, Scalar]) -> str:
    name = attributes.get("kc.operator")
    if not isinstance(name, str):
        raise _MalformedError("it has no attribute kc.operator")
    try:
        return operator_name(name)
    except ValueError as error:
        raise _MalformedError(str(error)) from None


def _times(point: Any, temporality: int) -> tuple[int, int]:
    start, time = point.start_time_unix_nano, point.time_unix_nano
    if temporality == _DELTA:  # its start says nothing of what counts, and is later where the sender's clock went back
        start = min(start, time)
    if not time or start > time:
        raise _MalformedError("its time is missing or before its start time")
    return start, time


def _reader(name: str, field: str, metric: Any) -> Callable[[Any], Histogram] | None:
    if name == KERNEL_INFO:
        return _counter if field in {"gauge", "sum"} else None
    if name == TRAIN_STEP:
        return _counter if field == "gauge" else None
    if name in {INVALID, DROPPED}:
        return _counter if field == "sum" and metric.sum.is_monotonic else None
    if field == "exponential_histogram":
        return _exponential
    return _explicit if field == "histogram" else None


def _counter(point: Any) -> Histogram:
    value = point.as_double if point.WhichOneof("value") == "as_double" else point.as_int
    if not 0 <= value < MAX_COUNT:
        raise _MalformedError(f"a counter cannot be {value!r}")
    return Histogram.explicit((), np.array([round(value)]), 0.0)


def _exponential(point: Any) -> Histogram:
    scale = point.scale
    if scale not in _ACCEPTED_SCALES:
        wide = "; wider buckets than a factor of 16 would coarsen the whole window" if scale < 0 else ""
        raise _MalformedError(f"scale {scale} is outside {_ACCEPTED_SCALES.start}..{_ACCEPTED_SCALES.stop - 1}{wide}")
    positive, negative = _buckets(point.positive, scale), _buckets(point.negative, scale)
    counted = point.zero_count + int(positive.counts.sum()) + int(negative.counts.sum())
    _check(point, counted)
    threshold = point.zero_threshold or _threshold_of(point.positive, scale)
    if not 0.0 <= threshold <= WIDEST_ZERO:  # wider, it would hide what others sent: a window has one zero bucket
        raise _MalformedError(f"zero threshold {threshold!r} is not within 0..{WIDEST_ZERO:g}")
    histogram = Histogram(
        scale=scale,
        count=counted,
        sum=point.sum,
        zero_count=point.zero_count,
        positive=positive,
        negative=negative,
        minimum=_extreme(point, "min"),
        maximum=_extreme(point, "max"),
        zero_threshold=threshold,
    )
    _check_sum(histogram)
    by = 0
    while max(positive.counts.size, negative.counts.size) >> by > MAX_BUCKETS - 1:
        by += 1
    return histogram.downscaled(scale - by)


def _threshold_of(side: Any, scale: int) -> float:
    """The zero threshold that a first bucket says which is sent though it is empty: where it ends, a power of two."""
    counts = side.bucket_counts
    exponent: float = (side.offset + 1) * 2.0**-scale
    says = counts and not counts[0] and exponent.is_integer() and exponent <= _WIDEST_EXPONENT
    return 2.0**exponent if says else 0.0


def _buckets(side: Any, scale: int) -> Buckets:
    size = len(side.bucket_counts)
    if not size:
        return Buckets.empty()
    buckets = Buckets(side.offset, _counts(side.bucket_counts)).trimmed()
    base = 2.0**-scale
    if buckets.counts.size and not _EXPONENTS[0] <= buckets.offset * base <= buckets.end * base <= _EXPONENTS[1]:
        raise _MalformedError(f"bucket {buckets.offset} at scale {scale} is beyond what can be observed")
    return buckets


def _explicit(point: Any) -> Histogram:
    edges = tuple(point.explicit_bounds)
    counts = _counts(point.bucket_counts)
    if not counts.size and not edges:
        counts = np.array([point.count], dtype=np.int64)
    if counts.size != len(edges) + 1:
        raise _MalformedError(f"{counts.size} bucket counts for {len(edges)} bounds")
    if len(edges) >= MAX_BUCKETS:
        raise _MalformedError(f"{len(edges)} bounds are {MAX_BUCKETS} or more")
    ascending = all(a < b for a, b in pairwise(edges))
    if not (ascending and all(abs(edge) < _LARGEST_EDGE for edge in edges)):
        raise _MalformedError("bounds do not ascend")
    _check(point, int(counts.sum()))
    histogram = Histogram.explicit(edges, counts, point.sum, _extreme(point, "min"), _extreme(point, "max"))
    _check_sum(histogram)
    return histogram


def _counts(given: Any) -> NDArray[np.int64]:
    """Bucket counts, each of which is one; added up modulo 2^64, others could seem to be."""
    counts = np.fromiter(given, np.uint64, len(given))
    if counts.size and counts.max() >= MAX_COUNT:
        raise _MalformedError(f"a bucket cannot hold {counts.max()} observations")
    return counts.astype(np.int64)


def _check(point: Any, counted: int) -> None:
    if counted != point.count:
        raise _MalformedError(f"its buckets hold {counted} observations, its count is {point.count}")
    if counted >= MAX_COUNT:
        raise _MalformedError(f"{counted} observations are more than one stream can have")
    if not (point.HasField("sum") and math.isfinite(point.sum)):
        raise _MalformedError("its sum is missing or not finite")


def _check_sum(histogram: Histogram) -> None:
    if not (abs(histogram.sum) < MAX_COUNT * _LARGEST_EDGE and sum_fits(histogram)):
        raise _MalformedError(f"its sum {histogram.sum:g} does not fit its buckets")


def _extreme(point: Any, name: str) -> float:
    value: float = getattr(point, name)
    return value if point.HasField(name) and math.isfinite(value) and point.count else math.nan


@lru_cache(maxsize=1024)
def _scalars_of(pairs: tuple[bytes, ...]) -> dict[str, Scalar]:
    """`_scalars` of serialized attributes; the same come again."""
    return _scalars([KeyValue.FromString(pair) for pair in pairs])


def _scalars(attributes: Any) -> dict[str, Scalar]:
    """Attributes with a scalar value.

    Raises a _MalformedError if there are too many, one is too long to be a name, or one of ours could not stand on a
    line.
    """
    if len(attributes) > _MAX_ATTRIBUTES:
        raise _MalformedError(f"{len(attributes)} attributes are more than {_MAX_ATTRIBUTES}")
    found: dict[str, Scalar] = {}
    together = 0
    for pair in attributes:
        size = _length(pair)
        if size > _MAX_ATTRIBUTE_CHARACTERS:
            raise _MalformedError(f"attribute {pair.key[:80]!a} is longer than {_MAX_ATTRIBUTE_CHARACTERS} characters")
        together += size
        if together > _MAX_CHARACTERS_TOGETHER:
            raise _MalformedError(
                f"with {pair.key[:80]!a} its attributes are longer than {_MAX_CHARACTERS_TOGETHER} characters"
            )
        field = pair.value.WhichOneof("value")
        # Names of ours reach logs, terminals and messages; isprintable is quick, and says of most that they are plain.
        if field == "string_value" and pair.key.startswith("kc."):
            text = pair.key + pair.value.string_value
            if not (text.isprintable() or all(map(is_plain, text))):
                raise _MalformedError(f"attribute {pair.key[:80]!a} has control characters")
        if field in _SCALAR_FIELDS:
            found[pair.key] = getattr(pair.value, field)
    return found


def _address(attributes: Any) -> dict[str, Scalar]:
    """Contract and kernels of a point that is malformed, as far as they can be read."""
    found: dict[str, Scalar] = {}
    for pair in attributes[:_MAX_ATTRIBUTES]:
        if pair.key in _ADDRESS:
            with suppress(_MalformedError):
                found |= _scalars([pair])
    return found


def _length(pair: Any) -> int:
    """Characters of an attribute's name and value; bytes for a value that is no text."""
    value = pair.value
    field = value.WhichOneof("value")
    if field == "string_value":
        return len(pair.key) + len(value.string_value)
    return len(pair.key) if field in _SCALAR_FIELDS else len(pair.key) + int(value.ByteSize())


def _resource(attributes: Any) -> dict[str, Scalar]:
    """A resource's attributes; they describe the sender and name nothing of ours, so what is too long is left out."""
    short = [pair for pair in attributes if _length(pair) <= _MAX_ATTRIBUTE_CHARACTERS][:_MAX_ATTRIBUTES]
    return {
        pair.key: getattr(pair.value, field)
        for pair in short
        if (field := pair.value.WhichOneof("value")) in _SCALAR_FIELDS
    }


def _applied(scope: Any) -> AppliedContract:
    said = {pair.key: pair.value for pair in scope.attributes[:_MAX_ATTRIBUTES]}
    version, slices = said.get("kc.contract.version"), said.get("kc.contract.slices")
    quantities = said.get("kc.contract.quantities")
    return AppliedContract(
        version.int_value if version is not None else 0,
        dict(value.string_value.rpartition("=")[::2] for value in slices.array_value.values[:_MAX_SLICES])
        if slices is not None
        else None,
        frozenset(value.string_value for value in quantities.array_value.values[:_MAX_CLAUSES])
        if quantities is not None
        else None,
    )


@lru_cache(maxsize=4096)
def origin_of(resource: bytes, scope: bytes) -> PointOrigin:
    """The origin that a serialized Resource and InstrumentationScope say; the same senders come again."""
    attributes = Resource.FromString(resource).attributes
    known, of = _resource(attributes), InstrumentationScope.FromString(scope)
    parts = [resource_identity(attributes), b"\0", of.name.encode(), of.version.encode()]
    digest = blake2b(b"\0".join(parts), digest_size=16).digest()
    return PointOrigin(digest, known, _applied(of), sender_of(known))


def resource_identity(attributes: Iterable[KeyValue]) -> bytes:
    """Serialized identity of a resource: its service and instance where that is a UUID, or else all attributes.

    Collectors add attributes of their own, several of them different ones.
    """
    instance = [pair for pair in attributes if pair.key in _INSTANCE_ATTRIBUTES]
    unique = any(pair.key == "service.instance.id" and _UUID(pair.value.string_value) for pair in instance)
    return b"\0".join(sorted(pair.SerializeToString() for pair in (instance if unique else attributes)))


def digest_of(origin: bytes, tail: bytes) -> bytes:
    """Return the digest of a stream, from those of its origin and the rest of its identity."""
    return blake2b(origin + tail, digest_size=16).digest()


def sender_of(resource: Mapping[str, Scalar]) -> str:
    """Return the identity of a sender by its resource's attributes: their text, or its two ends and a digest of it.

    >>> sender_of({"service.name": "rollout", "service.instance.id": "gpu-3"})
    'rollout, gpu-3'
    """
    text = ", ".join(str(resource[name]) for name in _SENDER_ATTRIBUTES if name in resource)
    if len(text) <= _MAX_SENDER_CHARACTERS:
        return text
    digest = blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{text[:_SENDER_END_CHARACTERS]}...{text[-_SENDER_END_CHARACTERS:]} {digest}"
