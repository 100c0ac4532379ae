"""Takes what recorders send to an aggregator: on disk first, then acknowledged."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from kc_otel.judge.otlp.request_errors import ThrottledError
from kc_otel.judge.otlp.sink import ExportResult
from kc_otel.serve.aggregator.aggregator_store import AggregatorStore
from kc_otel.serve.aggregator.host_streams import comes_from
from kc_otel.serve.store.state_file import StateError

__all__ = ["AggregatorSink"]

_WAITING_BYTES: Final = 64 * 1024 * 1024


class _FullError(ThrottledError):
    outcome = "not_kept"


@dataclass(slots=True)
class AggregatorSink:
    """Takes what arrives: on disk first, then acknowledged."""

    store: AggregatorStore
    points: Counter[str] = field(default_factory=Counter, init=False)
    """Data points that were answered, by what became of them."""
    requests: int = field(default=0, init=False)
    looped: bool = field(default=False, init=False)
    """What this aggregator sent has come back to it."""

    async def metrics(self, request: Any) -> ExportResult:
        """Take an ExportMetricsServiceRequest.

        Raises:
            ThrottledError: If it cannot be kept at the moment; the sender tries again.
        """
        if comes_from(request, self.store.instance):
            self.looped = True
        self._room()
        await self.store.disk.room()
        merged = self.store.host.merged(request, time.time_ns())
        try:
            await self._on_disk(self.store.keep(merged, merged.rest.SerializeToString()))
        except StateError as error:
            raise _FullError(f"cannot be kept on disk at the moment: {error}") from None
        self.requests += 1
        self.points.update(merged.counts)
        return merged.result

    async def traces(self, request: Any) -> ExportResult:
        """Take an ExportTraceServiceRequest, to be passed on as it is.

        Raises:
            ThrottledError: If it cannot be kept at the moment.
        """
        self._room()
        await self.store.disk.room()
        try:
            await self._on_disk(self.store.keep_as_it_is("/v1/traces", request.SerializeToString()))
        except StateError as error:
            raise _FullError(f"cannot be kept on disk at the moment: {error}") from None
        return ExportResult()

    def logs(self, _request: Any) -> ExportResult:
        """Logs are not ours; they are accepted, so that nobody retries, and dropped."""
        return ExportResult()

    async def _on_disk(self, row: tuple[int, int] | None) -> None:
        """Wait for the disk; what is passed on as it is, a row, goes where that fails: its sender sends it again."""
        try:
            await self.store.disk.synced()
        except StateError:
            if row is not None:
                self.store.passed([row])
            raise

    def _room(self) -> None:
        if self.looped:
            raise _FullError("what this aggregator sends comes back to it, so it takes nothing; see its log")
        if self.store.waiting > _WAITING_BYTES:
            raise _FullError("what is to be passed on waits for the evaluator, and fills its place")
