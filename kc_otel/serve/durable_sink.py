"""Between the receivers and the core: nothing is applied, and no sender is told so, that is not in the inbox on disk.

Spans and logs are accepted and dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.column_message import ColumnMessage
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.otlp.request_errors import ThrottledError
from kc_otel.judge.otlp.request_limits import Limits
from kc_otel.judge.otlp.sink import ColumnSink, ExportResult
from kc_otel.judge.otlp.traffic_entries import judged_metrics
from kc_otel.serve.store.inbox import Inbox
from kc_otel.serve.store.unit_of_work import StateError

_log: Final = logging.getLogger(__name__)
WRITING: Final = "writing the state"
"""Stage in which the evaluator fails while its disk is full: incoming data are rejected, and nothing is decided."""


class NotKeptError(ThrottledError):
    """The disk cannot store the request now; the sender retries."""

    outcome = "not_kept"


class Takes(Protocol):
    """Consumer behind the inbox: a core, or a shard of its streams."""

    evaluator: Evaluator
    inbox: Inbox

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
    """Takes what arrives for a core, metrics by way of its inbox.

    Args:
        core: Judges it, or a shard that prepares it for who does.
        record: Is told what is taken, in that order: the serialized request, and when it arrived, Unix seconds.
    """

    def __init__(self, core: Takes, record: Callable[[bytes, float], None] | None = None) -> None:
        self._core, self._record = core, record

    def columns(self, body: bytes, limits: Limits) -> ColumnMessage | None:
        """A serialized ExportMetricsServiceRequest as columns."""
        return self._core.evaluator.columns_of(body, limits.max_items)

    async def metrics(self, request: Any, at: float | None = None) -> ExportResult:
        """Take an ExportMetricsServiceRequest, or its columns, that arrived at `at`, Unix seconds; None for now.

        Raises:
            NotKeptError: If it cannot be kept at the moment.
        """
        now = time.time() if at is None else at
        # Whoever made columns of a request has seen that all of it is ours.
        kept = request.wire.body if isinstance(request, ColumnMessage) else judged_metrics(request).SerializeToString()
        if not kept:
            return self._core.metrics(request, now)
        try:
            result = await self._core.inbox.append(kept, now, partial(self._apply, request, kept, now))
        except StateError as error:
            self._core.evaluator.faults.report("", WRITING, {"all contracts": error})
            raise NotKeptError(f"cannot be kept on disk at the moment: {error}") from None
        self._core.evaluator.faults.report("", WRITING, {})
        return result

    def traces(self, request: Any) -> ExportResult:
        """Take an ExportTraceServiceRequest."""
        return self._core.traces(request)

    def logs(self, request: Any) -> ExportResult:
        """Take an ExportLogsServiceRequest."""
        return self._core.logs(request)

    def _apply(self, request: Any, kept: bytes, at: float) -> ExportResult:
        if self._record is not None:
            self._record(kept, at)
        began = time.perf_counter()
        return replace(self._core.metrics(request, at), seconds=time.perf_counter() - began)


def recover(core: Takes) -> int:
    """Apply what is in the inbox and not yet in the snapshot, and say how many requests that were."""
    core.evaluator.listen(time.time())  # while nobody listened, nobody was silent
    count, most = 0, Limits().max_items
    for at, body in core.inbox.left():
        try:
            columns = core.evaluator.columns_of(body, most)
            core.metrics(ExportMetricsServiceRequest.FromString(body) if columns is None else columns, at)
            count += 1
        except Exception:  # noqa: BLE001 - one request must not keep the evaluator from starting
            _log.exception("a request that arrived at %.3f cannot be applied", at)
    return count
