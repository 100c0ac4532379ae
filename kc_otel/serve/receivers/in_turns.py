"""A request is decoded, kept and applied in turns: what takes long holds up nobody who asks for little.

What cannot be taken as columns is taken one point at a time, about a tenth of a millisecond each, so that a request of
sixty thousand would be seconds in which nobody else is answered. It is cut into parts, each of which is kept by itself
and has a turn of its own. Who sends it is told once all of them are kept; where one is refused, they send it again, and
what was counted is known by then.

What a turn has cost is measured in time, for points of one kind take a hundred times what others do. What is compressed
has a turn in which it is seen how much it is, and then one by that: a few kilobytes may be seconds of work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.column_message import ColumnMessage
from kc_otel.judge.otlp.request_limits import Limits, inflate
from kc_otel.judge.otlp.signals import METRICS, Signal, deliver
from kc_otel.judge.otlp.sink import ColumnSink, ExportResult, TelemetrySink
from kc_otel.serve.receivers.fair_turns import FairTurns

__all__ = ["in_turns", "parts_of"]

_POINTS: Final = 250
"""Points that are taken one by one in a turn."""
_PAUSE: Final = 0.005
"""Seconds between two parts that are left to whoever else is there: to get as far as asking for a turn, too."""
_COPIED: Final = 32 * 1024 * 1024
"""Bytes of resources and scopes that parts may repeat."""
_SAID: Final = 3
_KEPT: Final = 256 * 1024
"""Bytes that are not inflated twice: they may wait for their turn as they are."""


async def in_turns(
    turns: FairTurns,
    sender: Hashable,
    body: bytes,
    encoding: str,
    decode: Callable[[bytes], Awaitable[Any]],
    sink: TelemetrySink,
    signal: Signal,
    limits: Limits,
    transport: str,
) -> tuple[Any, str]:
    """Take a request.

    Args:
        turns: Of all ports together.
        sender: Whose turn it is.
        body: The request, as it was received.
        encoding: How it is compressed.
        decode: Makes the message of what it is when it is inflated.
        sink: Takes it.
        signal: What it is.
        limits: What a request may hold.
        transport: For the log.

    Returns:
        The response message, and the outcome that is counted.

    Raises:
        ReceiveError: If it is refused.
    """
    size, plain = len(body), None if encoding else body
    if encoding:
        async with turns.turn(sender, size):
            with _counted(turns, sender, size):
                plain = inflate(body, encoding, limits)
        size = len(plain)
        if size > _KEPT:
            plain = None

    async def decoded() -> Any:
        return await decode(inflate(body, encoding, limits) if plain is None else plain)

    async with turns.turn(sender, size):
        with _counted(turns, sender, size) as spent:
            began = time.perf_counter()
            request = await decoded()
            long = _points_one_by_one(request, signal) > _POINTS
            spent.append(time.perf_counter() - began)
            results = [] if long else [await deliver(sink, signal, request, transport)]
            spent += [one.seconds for one in results]
    if long:
        del request  # while it waits there are only its bytes
        async with turns.place(len(body)):
            results = [one async for one in _in_parts(turns, sender, size, decoded, sink, signal, limits, transport)]
    rejected = sum(one.rejected for one in results)
    messages = list(dict.fromkeys(one.message for one in results if one.message))
    answer = signal.answer(ExportResult(rejected, "; ".join(messages[:_SAID])))
    return answer, "partial" if rejected else "accepted"


@contextmanager
def _counted(turns: FairTurns, sender: Hashable, size: int) -> Iterator[list[float]]:
    """What is done counts for who asked for it, however it ends: as the seconds that are said, or all that it took."""
    began, spent = time.perf_counter(), list[float]()
    try:
        yield spent
    except BaseException:
        spent = [time.perf_counter() - began]
        raise
    finally:
        turns.cost(sender, size, sum(spent) if spent else time.perf_counter() - began)


async def _in_parts(
    turns: FairTurns,
    sender: Hashable,
    size: int,
    decode: Callable[[], Awaitable[Any]],
    sink: TelemetrySink,
    signal: Signal,
    limits: Limits,
    transport: str,
) -> AsyncIterator[ExportResult]:
    async with turns.turn(sender, size):
        with _counted(turns, sender, size):
            request = await decode()
        reader = sink if isinstance(sink, ColumnSink) and isinstance(request, ColumnMessage) else None
        parts = parts_of(request, signal)
    for part in parts:
        await asyncio.sleep(_PAUSE)
        body = part.SerializeToString()
        async with turns.turn(sender, len(body)):
            columns = None if reader is None else reader.columns(body, limits)
            result = await deliver(sink, signal, part if columns is None else columns, transport)
            turns.cost(sender, len(body), result.seconds)
        yield result


def parts_of(request: Any, signal: Signal, most: int = _POINTS) -> Iterator[Any]:
    """A request as it is, or as requests of at most so many points where it has more to be taken one by one.

    Together they hold the same streams, and their points in the same order.
    """
    if _points_one_by_one(request, signal) <= most:
        yield request
        return
    whole = request
    if isinstance(request, ColumnMessage):
        whole = request.request or ExportMetricsServiceRequest.FromString(request.wire.body)
    points, copied = 0, 0
    for resource in whole.resource_metrics:
        copied += resource.resource.ByteSize()
        for scope in resource.scope_metrics:
            copied += scope.scope.ByteSize()
            points += sum(len(_points(metric)) for metric in scope.metrics)
    yield from _cut(whole, max(most, points * copied // _COPIED))


def _points_one_by_one(request: Any, signal: Signal) -> int:
    if isinstance(request, ColumnMessage):
        if request.plain:
            return 0
        if request.request is not None:
            return int(request.rows.size)
        return int(np.count_nonzero((request.rows < 0) | (request.wire.points["plain"] == 0)))
    if signal is not METRICS or not isinstance(request, ExportMetricsServiceRequest):  # or shards take the points
        return 0
    return sum(
        len(_points(metric))
        for resource in request.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    )


def _cut(whole: Any, most: int) -> Iterator[Any]:
    part, room = ExportMetricsServiceRequest(), most
    for resource in whole.resource_metrics:
        of_resource = None
        for scope in resource.scope_metrics:
            of_scope = None
            for metric in scope.metrics:
                points, at = _points(metric), 0
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
                        part, room, of_resource, of_scope = ExportMetricsServiceRequest(), most, None, None
    if room < most:
        yield part


def _add(scope: Any, metric: Any, points: Any) -> None:
    kind = metric.WhichOneof("data")
    made = scope.metrics.add(name=metric.name, unit=metric.unit)
    data, own = getattr(made, kind), getattr(metric, kind)
    for said in ("aggregation_temporality", "is_monotonic"):
        if said in own.DESCRIPTOR.fields_by_name:
            setattr(data, said, getattr(own, said))
    data.data_points.extend(points)


def _points(metric: Any) -> Any:
    kind = metric.WhichOneof("data")
    return getattr(metric, kind).data_points if kind else ()
