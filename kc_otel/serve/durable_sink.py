"""Between the receivers and the core: nothing is applied, and no sender is told so, that is not in the log on disk.

    request -> write-ahead log -> evaluator, in the order of the log -> answer

The position of what was applied last is written with the state, in one transaction. What a crash leaves between that
position and the end of the log is applied at the next start, as if it arrived when it did. Spans are not in the log:
they are examples, of which the worst are kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.column_message import ColumnMessage
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.otlp.request_errors import ThrottledError, TooLargeError
from kc_otel.judge.otlp.request_limits import Limits
from kc_otel.judge.otlp.sink import ColumnSink, ExportResult
from kc_otel.offline.replay.traffic_entries import EVALUATED, ours, unsealed
from kc_otel.serve.core import Core
from kc_otel.serve.store.write_ahead_log import LogError, MessageTooLongError, WriteAheadLog

__all__ = ["DurableSink", "NotKeptError", "recover", "tick_on_record"]

_log: Final = logging.getLogger(__name__)
_PATIENCE: Final = 1.0
"""Seconds that an evaluation waits for its place in the log."""


class NotKeptError(ThrottledError):
    """The disk does not take the request at the moment; the sender keeps it and tries again."""

    outcome = "not_kept"


class Takes(Protocol):
    """What the log is in front of: a core, or a shard of its streams."""

    evaluator: Evaluator
    position: int
    forget: Callable[[int], None]

    def metrics(self, request: Any, at: float | None = None) -> ExportResult:
        """Take an ExportMetricsServiceRequest, or its columns, that arrived at `at`, Unix seconds; None for now."""
        ...

    def traces(self, request: Any) -> ExportResult:
        """Take an ExportTraceServiceRequest."""
        ...

    def logs(self, request: Any) -> ExportResult:
        """Take an ExportLogsServiceRequest."""
        ...


class DurableSink(ColumnSink):
    """Takes what arrives for a core, metrics by way of the log.

    Args:
        core: Judges it, or a shard that prepares it for who does.
        log: Keeps it. Its owner closes it.
    """

    def __init__(self, core: Takes, log: WriteAheadLog) -> None:
        self._core, self._log = core, log
        core.forget = log.forget

    def columns(self, body: bytes, limits: Limits) -> ColumnMessage | None:
        """A serialized ExportMetricsServiceRequest as columns."""
        return self._core.evaluator.columns_of(body, limits.max_items)

    async def metrics(self, request: Any, at: float | None = None) -> ExportResult:
        """Take an ExportMetricsServiceRequest, or its columns, that arrived at `at`, Unix seconds; None for now.

        Raises:
            NotKeptError: If it cannot be kept at the moment.
            TooLargeError: If it never can be.
        """
        now = time.time() if at is None else at
        # Whoever made columns of a request has seen that all of it is ours.
        kept = request.wire.body if isinstance(request, ColumnMessage) else ours(request).SerializeToString()
        if not kept:
            return self._core.metrics(request, now)
        try:
            return await self._log.append(kept, now, partial(self._apply, request, now))
        except MessageTooLongError as error:
            raise TooLargeError(f"cannot be kept: {error.strerror}") from None
        except LogError as error:
            raise NotKeptError(f"cannot be kept on disk at the moment: {error.strerror or error}") from None

    def traces(self, request: Any) -> ExportResult:
        """Take an ExportTraceServiceRequest."""
        return self._core.traces(request)

    def logs(self, request: Any) -> ExportResult:
        """Take an ExportLogsServiceRequest."""
        return self._core.logs(request)

    def _apply(self, request: Any, at: float, position: int) -> ExportResult:
        self._core.position = position  # also where it fails: it would fail again
        began = time.perf_counter()
        return replace(self._core.metrics(request, at), seconds=time.perf_counter() - began)


async def tick_on_record(core: Core, log: WriteAheadLog) -> None:
    """Evaluate at a place in the log that says so: whoever replays the log judges the same at the same time.

    A disk that takes nothing, or not in time, holds no evaluation up: it is done without a place in the log.

    Raises:
        StateError: If the state cannot be written.
    """
    await core.disk.room()
    now, due = time.time(), True

    def tick(position: int) -> None:
        nonlocal due
        core.position = position
        if due:
            due = False
            core.tick(now)

    try:
        async with asyncio.timeout(_PATIENCE):
            await log.append(b"", now, tick, EVALUATED)
    except (LogError, TimeoutError):
        if due:
            due = False
            core.tick(time.time())
    await core.settle()


def recover(core: Takes, log: WriteAheadLog) -> int:
    """Apply what is in the log and not yet in the state, and say how many requests that were."""
    core.evaluator.listen(time.time())  # while nobody listened, nobody was silent
    count, most = 0, Limits().max_items
    for record in log.records(core.position):
        core.position = record.end
        try:
            sealed = unsealed(record.message)
            if sealed is None or sealed[0] == EVALUATED:
                continue
            _, at, body = sealed
            columns = core.evaluator.columns_of(body, most)
            core.metrics(ExportMetricsServiceRequest.FromString(body) if columns is None else columns, at)
            count += 1
        except Exception:  # noqa: BLE001 - one request must not keep the evaluator from starting
            _log.exception("%s: the request at position %d cannot be applied", log.folder, record.start)
    return count
