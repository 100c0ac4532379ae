"""A metrics request as columns: its points in arrays, and the rest of it as protobuf.

The consumer takes the plain points from the arrays, and marks them; `left` returns the others as requests of their own,
for the code that takes points one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.points import CUMULATIVE, DRIFT_NAMES


@dataclass(frozen=True, slots=True)
class WireColumns:
    """Offsets and values found by one walk along a request's bytes.

    Attributes:
        body: The request.
        items: Resources, scopes, metrics and exponential points in it.
        points: One record per exponential point, in their order: where it, its attributes and the counts of its buckets
            are in the body, and what it says. `plain` is 0 where it says something that has no column.
        metrics: One record per metric of any kind: where it, its resource and its scope are in the body, where its
            name, unit and description end, its temporality, and the range of its points.
    """

    body: bytes
    items: int
    points: NDArray[Any]
    metrics: NDArray[Any]

    def origin(self, metric: int) -> tuple[bytes, bytes, bytes, int]:
        """Return the fields shared by all points of a metric: resource, scope, names and unit, temporality."""
        of = self.metrics[metric]
        return (
            self.body[of["resource_begin"] : of["resource_end"]],
            self.body[of["scope_begin"] : of["scope_end"]],
            self.body[of["begin"] : of["head_end"]],
            int(of["temporality"]),
        )

    def name(self, metric: int) -> bytes:
        """Name of a metric; empty where the metric does not begin with it."""
        begin = int(self.metrics[metric]["begin"])
        head = self.body[begin : begin + 2]
        return self.body[begin + 2 : begin + 2 + head[1]] if head[0] == 0x0A and head[1] < 128 else b""

    def counts_of_drift(self) -> Iterator[tuple[bytes, bool, int]]:
        """Yield each exponential drift metric's resource, whether it is cumulative, and the sum of its counts."""
        for metric, of in enumerate(self.metrics):
            if of["exponential"] and self.name(metric).decode("utf-8", "replace") in DRIFT_NAMES:
                count = int(self.points["count"][int(of["first"]) : int(of["last"])].sum())
                yield self.body[of["resource_begin"] : of["resource_end"]], of["temporality"] == CUMULATIVE, count

    def without(self, taken: NDArray[np.bool_]) -> Iterator[tuple[int, list[int]]]:
        """Metrics that have points which are not `taken`, and those; and all metrics of other kinds."""
        if taken.all():
            yield from ((metric, []) for metric in np.flatnonzero(self.metrics["exponential"] == 0).tolist())
            return
        for metric, of in enumerate(self.metrics):
            first = int(of["first"])
            numbers = (np.flatnonzero(~taken[first : int(of["last"])]) + first).tolist()
            if numbers or not of["exponential"]:
                yield metric, numbers

    def request_of(self, metric: int, points: Sequence[int]) -> Any:
        """A request that has one metric; an exponential one with these of its points.

        Raises:
            DecodeError: If it is no such request.
        """
        resource, scope, head, temporality = self.origin(metric)
        of = self.metrics[metric]
        if of["exponential"]:
            parts = self.points[list(points)]
            data = b"".join(
                _part(1, self.body[begin:end])
                for begin, end in zip(parts["begin"].tolist(), parts["end"].tolist(), strict=True)
            )
            whole = head + _part(10, data + bytes((0x10, temporality)))
        else:
            whole = self.body[of["begin"] : of["end"]]
        return ExportMetricsServiceRequest.FromString(
            _part(1, _part(1, resource) + _part(2, _part(1, scope) + _part(2, whole)))
        )


@dataclass(slots=True)
class ColumnMessage:
    """A request that is to be taken.

    Attributes:
        wire: Its columns.
        rows: Row of each of its points in `StreamColumns`, -1 where there is none.
        known: Part of `StreamColumns` that the rows belong to.
        plain: Whether all of it is plain exponential points, whose rows are there.
        new: How many of its points have no row yet, and get one when it is taken.
        taken: Of each point whether it was taken from the columns.
        request: The whole request as protobuf read it, where most of it is not plain.
    """

    wire: WireColumns
    rows: NDArray[np.int64]
    known: int
    plain: bool = False
    new: int = 0
    taken: NDArray[np.int8] = field(init=False)
    request: Any = None

    def __post_init__(self) -> None:
        self.taken = np.zeros(self.rows.size, np.int8)

    def left(self) -> Iterator[tuple[Any, Sequence[int]]]:
        """Requests that together hold what was not taken, in its order, and the numbers that their points have here."""
        if self.request is not None:
            yield self.request, range(self.rows.size)
            return
        if self.plain and self.taken.all():
            return
        for metric, numbers in self.wire.without(self.taken != 0):
            yield self.wire.request_of(metric, numbers), numbers


def _part(field: int, content: bytes) -> bytes:
    """A field of protobuf that says its length."""
    length, said = len(content), bytearray((field << 3 | 2,))
    while length > 127:
        said.append(length & 127 | 128)
        length >>= 7
    said.append(length)
    return bytes(said) + content
