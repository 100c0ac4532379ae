"""Between the receivers and the core: nothing is applied, and no sender is told so, that is not in the log on disk.

    request -> write-ahead log -> evaluator, in the order of the log -> answer

The position of what was applied last is written with the state, in one transaction. What a crash leaves between that
position and the end of the log is applied at the next start, as if it arrived when it did. Spans are not in the log:
they are examples, of which the worst are kept.
"""

from __future__ import annotations

import errno
import logging
import time
from functools import partial
from typing import Any, Final

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.otlp.request_errors import ThrottledError, TooLargeError
from kc_otel.judge.otlp.sink import ExportResult
from kc_otel.offline.replay.traffic_entries import entry_of, ours
from kc_otel.serve.core import Core
from kc_otel.serve.store.write_ahead_log import LogError, WriteAheadLog

__all__ = ["DurableSink", "NotKeptError", "recover"]

_log: Final = logging.getLogger(__name__)


class NotKeptError(ThrottledError):
    """The disk does not take the request at the moment; the sender keeps it and tries again."""

    outcome = "not_kept"


class DurableSink:
    """Takes what arrives for the core, metrics by way of the log.

    Args:
        core: Judges it.
        log: Keeps it. Its owner closes it.
    """

    def __init__(self, core: Core, log: WriteAheadLog) -> None:
        self._core, self._log = core, log
        core.forget = log.forget

    async def metrics(self, request: Any) -> ExportResult:
        """Take an ExportMetricsServiceRequest.

        Raises:
            NotKeptError: If it cannot be kept at the moment.
            TooLargeError: If it never can be.
        """
        kept = ours(request)
        if not kept.resource_metrics:
            return self._core.metrics(request)
        now = time.time()
        try:
            return await self._log.append(kept.SerializeToString(), now, partial(self._apply, request, now))
        except LogError as error:
            if error.errno == errno.EFBIG:
                raise TooLargeError(f"cannot be kept: {error.strerror}") from None
            raise NotKeptError(f"cannot be kept on disk at the moment: {error.strerror or error}") from None

    def traces(self, request: Any) -> ExportResult:
        """Take an ExportTraceServiceRequest."""
        return self._core.traces(request)

    def logs(self, request: Any) -> ExportResult:
        """Take an ExportLogsServiceRequest."""
        return self._core.logs(request)

    def _apply(self, request: Any, at: float, position: int) -> ExportResult:
        self._core.position = position  # also where it fails: it would fail again
        return self._core.metrics(request, at)


def recover(core: Core, log: WriteAheadLog) -> int:
    """Apply what is in the log and not yet in the state, and say how many requests that were."""
    core.evaluator.listen(time.time())  # while nobody listened, nobody was silent
    count = 0
    for record in log.records(core.position):
        core.position = record.end
        try:
            entry = entry_of(ExportMetricsServiceRequest.FromString(record.message))
            if entry is not None:
                core.metrics(entry.request, entry.at)
                count += 1
        except Exception:  # noqa: BLE001 - one request must not keep the evaluator from starting
            _log.exception("%s: the request at position %d cannot be applied", log.folder, record.start)
    return count
