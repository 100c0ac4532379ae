"""Decode a request and hand it to the sink, for both transports, without blocking the event loop.

Most requests are a few kilobytes that become columns, and are taken at once. The others go through a slow lane, one at
a time. JSON and long bodies are inflated and decoded on a thread. Points that are taken one by one reach the sink in
chunks; the loop is left free after each. If a chunk is refused, the sender repeats the whole request.

The bytes of requests in memory are bounded, over all ports. A short request is counted as it comes, a long one as a
whole before it is read, and part of the budget is left to short ones: a sender that announces much and sends nothing
delays only long ones. A request without room is rejected with a retry delay: the exporter keeps its data.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.otlp.requests import (
    ExportResult,
    Limits,
    MetricsSink,
    ThrottledError,
    TooLargeError,
    answer,
    from_json,
    from_protobuf,
    inflate,
    points_in,
)
from kc_otel.judge.otlp.wire_columns import ColumnMessage
from kc_otel.serve.access.access_file import AccessFile

Hold = Callable[..., None]
"""Holds bytes in a budget."""
_QUICK_BYTES: Final = 256 * 1024
"""Longest protobuf that is read on the event loop, which takes a tenth of a second at most; JSON never is."""
_QUICK_POINTS: Final = 50
"""Points that are taken one by one at once, and in the smallest chunk: some ten milliseconds."""
_CHUNK_SECONDS: Final = 0.02
_REPEATED_BYTES: Final = 32 * 1024 * 1024
"""Bytes of resources, scopes and descriptions that chunks may repeat."""
_SLOW_WAIT_SECONDS: Final = 5.0
"""Time a request waits for the slow lane; exporters time out after ten seconds."""
_LONGEST_PAUSE_SECONDS: Final = 0.05
_MAX_IN_FLIGHT_BYTES: Final = 64 * 1024 * 1024
_LARGEST_REQUESTS: Final = 4
"""Requests of the largest allowed size that the budget holds at least; one of them is left to short ones."""


class BusyError(ThrottledError):
    """The process holds as much as it may; gRPC's RESOURCE_EXHAUSTED is retried because RetryInfo is beside it."""

    rpc_code = 8


class ByteBudget:
    """Counts bytes of requests from their arrival to their answer. Use it from one event loop, for all of its ports.

    `most` are 64 MiB, or four of the largest requests if that is more; `most_with_long` may be held once a long request
    is among them.
    """

    def __init__(self, limits: Limits, most: int | None = None) -> None:
        self.in_flight = 0
        self.most = max(_MAX_IN_FLIGHT_BYTES, _LARGEST_REQUESTS * limits.max_bytes) if most is None else most
        self.most_with_long = self.most - limits.max_bytes
        self._retry_after = limits.retry_after

    @contextmanager
    def held(self) -> Iterator[Hold]:
        """Yield a function that counts bytes of one request, of a `long` one before they arrive; a negative size frees.

        It raises a BusyError if there is no room. The end of the context frees all of them.
        """
        held = 0

        def hold(size: int, *, long: bool = False) -> None:
            nonlocal held
            if size > 0 and self.in_flight + size > (self.most_with_long if long else self.most):
                raise self.busy("the evaluator's limit on bytes in flight is reached; send again")
            held += size
            self.in_flight += size

        try:
            yield hold
        finally:
            self.in_flight -= held

    def busy(self, message: str) -> BusyError:
        """Return the error that asks a sender to retry."""
        return BusyError(message, self._retry_after)


class RequestTaker:
    """Takes requests for all ports of an event loop; `budget` bounds the bytes that they hold together."""

    def __init__(self, sink: MetricsSink, limits: Limits, budget: ByteBudget, access: AccessFile | None = None) -> None:
        self.limits, self.budget, self.access = limits, budget, access
        self._sink = sink
        self._slow = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "decoding")

    async def take(
        self, signal: str, body: bytes, encoding: str, transport: str, *, json: bool = False
    ) -> tuple[Any, str]:
        """Decode a request and hand it to the sink; return the response and the outcome, or raise a ReceiveError."""
        if signal != "metrics":
            return _answered([])
        request = None if json else self._read_if_quick(body, encoding)
        if request is None:  # while it waits there are only its bytes
            try:
                async with asyncio.timeout(_SLOW_WAIT_SECONDS):
                    await self._slow.acquire()
            except TimeoutError:
                raise self.budget.busy("other long requests are still being processed; send again") from None
            try:
                request = None if json else self._read_if_quick(body, encoding)  # its streams may be known now
                if request is None:
                    return await self._take_slowly(body, encoding, transport, json=json)
            finally:
                self._slow.release()
        return _answered([await self._sink.deliver(request, transport)])

    def _read_if_quick(self, body: bytes, encoding: str) -> Any | None:
        """Decode a protobuf request here if it is short, also inflated, and quick to take; return None for others."""
        if len(body) > _QUICK_BYTES:
            return None
        try:
            plain = inflate(body, encoding, replace(self.limits, max_bytes=min(_QUICK_BYTES, self.limits.max_bytes)))
        except TooLargeError:
            return None
        request = self._sink.read(plain, self.limits)
        return request if _single_points(request) <= _QUICK_POINTS else None

    async def _take_slowly(self, body: bytes, encoding: str, transport: str, *, json: bool) -> tuple[Any, str]:
        def read() -> Any:
            return (from_json if json else from_protobuf)(inflate(body, encoding, self.limits), self.limits)

        request = None if json or encoding else self._sink.columns(body, self.limits)
        if request is None or _single_points(request) > _QUICK_POINTS:
            request = await asyncio.get_running_loop().run_in_executor(self._thread, read)
        results, sizes = list[ExportResult](), [_QUICK_POINTS]
        for part in parts_of(request, lambda: sizes[-1]):
            decoded = isinstance(part, ExportMetricsServiceRequest)
            columns = self._sink.columns(part.SerializeToString(), self.limits) if decoded else None
            result = await self._sink.deliver(part if columns is None else columns, transport)
            results.append(result)
            # Once streams are known their points are taken as columns, a hundred times as many in the same time.
            fitting = sizes[-1] * _CHUNK_SECONDS / max(result.seconds, 1e-6)
            sizes.append(int(min(max(fitting, _QUICK_POINTS), 4 * sizes[-1])))
            await asyncio.sleep(min(result.seconds, _LONGEST_PAUSE_SECONDS))
        return _answered(results)


def _answered(results: list[ExportResult]) -> tuple[Any, str]:
    whole = ExportResult.joined(results)
    return answer(whole), "partial" if whole.rejected else "accepted"


def _single_points(request: Any) -> int:
    """Return the number of points of a request that the sink takes one by one."""
    if isinstance(request, ColumnMessage):
        if request.whole:
            return int(request.rows.size)
        return int(np.count_nonzero((request.rows < 0) | (request.points["plain"] == 0))) - request.new
    if not isinstance(request, ExportMetricsServiceRequest):  # shards take the points
        return 0
    return sum(
        len(points_in(metric))
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    )


def parts_of(request: Any, most: Callable[[], int]) -> Iterator[Any]:
    """Yield a request in parts of at most `most()` points that are taken one by one, in order."""
    if _single_points(request) <= most():
        yield request
        return
    points, copied = 0, 0
    for resource in request.resource_metrics:
        copied += resource.resource.ByteSize()
        for scope in resource.scope_metrics:
            copied += scope.scope.ByteSize()
            for metric in scope.metrics:
                points += len(points_in(metric))
                copied += len(metric.name) + len(metric.description) + len(metric.unit)
    least = points * copied // _REPEATED_BYTES
    yield from _cut(request, lambda: max(most(), least))


def _cut(whole: Any, most: Callable[[], int]) -> Iterator[Any]:
    part, room = ExportMetricsServiceRequest(), most()
    for resource in whole.resource_metrics:
        of_resource = None
        for scope in resource.scope_metrics:
            of_scope = None
            for metric in scope.metrics:
                points, at = points_in(metric), 0
                while at < len(points):
                    if of_resource is None:
                        of_resource = part.resource_metrics.add(resource=resource.resource)
                    if of_scope is None:
                        of_scope = of_resource.scope_metrics.add(scope=scope.scope)
                    _add(of_scope, metric, points[at : at + room])
                    taken = min(room, len(points) - at)
                    at, room = at + taken, room - taken
                    if not room:
                        yield part
                        part, room, of_resource, of_scope = ExportMetricsServiceRequest(), most(), None, None
    if part.resource_metrics:
        yield part


def _add(scope: Any, metric: Any, points: Any) -> None:
    kind = metric.WhichOneof("data")
    made = scope.metrics.add(name=metric.name, description=metric.description, unit=metric.unit)
    data, own = getattr(made, kind), getattr(metric, kind)
    for said in ("aggregation_temporality", "is_monotonic"):
        if said in own.DESCRIPTOR.fields_by_name:
            setattr(data, said, getattr(own, said))
    data.data_points.extend(points)
