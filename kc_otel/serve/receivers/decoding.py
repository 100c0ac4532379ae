"""A request's bytes as its message, without holding anybody up for long: what is long is decoded on a thread."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from kc_otel.judge.otlp.decode import from_protobuf
from kc_otel.judge.otlp.request_limits import Limits
from kc_otel.judge.otlp.signals import METRICS, Signal
from kc_otel.judge.otlp.sink import ColumnSink, TelemetrySink

__all__ = ["decoded"]

_LONG: Final = 256 * 1024
"""Bytes that may be made of so many messages that counting them takes a tenth of a second."""
_THREADS: Final = ThreadPoolExecutor(4, "decoding")


async def decoded(
    sink: TelemetrySink | None, body: bytes, signal: Signal, limits: Limits, elsewhere: Callable[[float], None]
) -> Any:
    """The request message in `body`, in the form that the sink reads by itself where it can, else as protobuf.

    A thread does not end because nobody waits for it any more: who is cancelled stays until it has.

    Args:
        sink: Who reads it; None where it has to be a message of protobuf.
        body: The message.
        signal: What it is.
        limits: What it may hold.
        elsewhere: Is told how many seconds another thread worked for it.

    Raises:
        BadRequestError: If `body` is not such a message.
        TooLargeError: If it holds too many things.
    """
    columns = sink.columns(body, limits) if signal is METRICS and isinstance(sink, ColumnSink) else None
    if columns is not None:
        return columns
    if len(body) <= _LONG:
        return from_protobuf(body, signal, limits)
    worked: list[float] = []
    work = _THREADS.submit(_timed, worked, body, signal, limits)
    try:
        return await asyncio.wrap_future(work)
    except asyncio.CancelledError:
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([asyncio.wrap_future(work)])
        raise
    finally:
        elsewhere(sum(worked))


def _timed(worked: list[float], body: bytes, signal: Signal, limits: Limits) -> Any:
    began = time.thread_time()
    try:
        return from_protobuf(body, signal, limits)
    finally:
        worked.append(time.thread_time() - began)
