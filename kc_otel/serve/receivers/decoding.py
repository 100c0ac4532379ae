"""A request's bytes as its message, without holding anybody up for long: what is long is decoded on a thread."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from kc_otel.judge.otlp.decode import from_protobuf
from kc_otel.judge.otlp.request_limits import Limits
from kc_otel.judge.otlp.signals import METRICS, Signal
from kc_otel.judge.otlp.sink import ColumnSink, TelemetrySink

__all__ = ["decoded"]

_LONG: Final = 256 * 1024
"""Bytes that may be made of so many messages that counting them takes a tenth of a second."""


async def decoded(sink: TelemetrySink | None, body: bytes, signal: Signal, limits: Limits) -> Any:
    """The request message in `body`, in the form that the sink reads by itself where it can, else as protobuf.

    Args:
        sink: Who reads it; None where it has to be a message of protobuf.
        body: The message.
        signal: What it is.
        limits: What it may hold.

    Raises:
        BadRequestError: If `body` is not such a message.
        TooLargeError: If it holds too many things.
    """
    columns = sink.columns(body, limits) if signal is METRICS and isinstance(sink, ColumnSink) else None
    if columns is not None:
        return columns
    if len(body) <= _LONG:
        return from_protobuf(body, signal, limits)
    return await asyncio.to_thread(from_protobuf, body, signal, limits)
