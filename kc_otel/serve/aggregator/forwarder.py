"""What an aggregator tells the evaluator. Nothing is given up but what the evaluator itself says it will never take."""

from __future__ import annotations

import asyncio
import gzip
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

import httpx
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

from kc_otel.serve.aggregator.aggregator_store import AggregatorStore
from kc_otel.serve.aggregator.host_streams import as_mark, as_request

__all__ = ["Forwarder"]

_log: Final = logging.getLogger(__name__)
_AT_ONCE: Final = 2000
"""Sums of one request: some megabytes."""
_BATCH_BYTES: Final = 4 * 1024 * 1024
_PROTOBUF: Final = "application/x-protobuf"
_REMEDIES: Final = {
    401: ": give a token that it takes in OTEL_EXPORTER_OTLP_HEADERS, such as Authorization=Bearer%20TOKEN",
    403: ": the token in OTEL_EXPORTER_OTLP_HEADERS has to be one for recording",
    404: ": --to has to be the URL of OTLP over HTTP of an evaluator or a Collector",
    413: ": raise the limit of what is on the way to it",
}
_Item = TypeVar("_Item")


class Forwarder:
    """Sends what is due.

    Args:
        store: What is due.
        to: URL of OTLP over HTTP, without the paths.
        headers: Sent with every request.
        client: Sends.

    Attributes:
        outcomes: Messages by what became of them: `taken`, `refused` for good, `failed` and sent again later.
        taken_at: Unix time at which one was taken last.
    """

    def __init__(self, store: AggregatorStore, to: str, headers: Mapping[str, str], client: httpx.AsyncClient) -> None:
        self._store, self._to, self._client = store, to.rstrip("/"), client
        self._headers = {"content-type": _PROTOBUF, "content-encoding": "gzip", **headers}
        self._resource = {
            "service.name": "kc-otel-aggregate",
            "service.instance.id": store.instance,
            "host.name": socket.gethostname(),
        }
        self._trouble = ""
        self._marked = False
        self.outcomes: Counter[str] = Counter()
        self.taken_at: float | None = None

    async def forward(self) -> None:
        """One round: what is passed on, then every sum that is due. What is not taken stays due.

        A mark goes first, by which this aggregator knows its own words where they come back to it.

        Raises:
            StateError: If what was taken cannot be written down; it is sent again then, which changes nothing.
        """
        if not self._marked:
            mark = as_mark(self._resource, time.time_ns())
            self._marked = await self._settled("/v1/metrics", [mark], b"".join, lambda _: None)
            if not self._marked:
                return
        await self._pass_on()
        due = sorted(self._store.due)
        for at in range(0, len(due), _AT_ONCE):
            totals = [(key, self._store.host.totals[key]) for key in due[at : at + _AT_ONCE]]
            if not await self._settled(
                "/v1/metrics",
                totals,
                lambda some: as_request(dict(some), self._resource, time.time_ns()).SerializeToString(),
                lambda some: self._store.sent(dict(some)),
            ):
                return

    async def _pass_on(self) -> None:
        waiting = list(self._store.to_pass_on())
        while waiting:
            path, size = waiting[0][1], 0
            batch: list[tuple[int, str, bytes]] = []
            while waiting and waiting[0][1] == path and (not batch or size + len(waiting[0][2]) <= _BATCH_BYTES):
                batch.append(waiting.pop(0))
                size += len(batch[-1][2])
            # Messages of protobuf one after the other are one message with all that is in them.
            if not await self._settled(
                path,
                batch,
                lambda some: b"".join(body for _, _, body in some),
                lambda some: self._store.passed((number, len(body)) for number, _, body in some),
            ):
                return

    async def _settled(
        self,
        path: str,
        items: Sequence[_Item],
        body_of: Callable[[Sequence[_Item]], bytes],
        settle: Callable[[Sequence[_Item]], None],
    ) -> bool:
        """Whether these need not be sent again: all were taken, or are refused by themselves and for good."""
        body = body_of(items)
        try:
            content = await asyncio.to_thread(gzip.compress, body, 1)
            await self._store.disk.synced()  # a sum that a crash takes back would grow again to what it was
            answer = await self._client.post(self._to + path, content=content, headers=self._headers)
        except httpx.HTTPError as error:
            return self._later(f"{type(error).__name__}: {error}")
        of_otlp = answer.headers.get("content-type", "").startswith(_PROTOBUF)
        status = answer.status_code
        if status == 413 or (status == 400 and of_otlp):
            if len(items) > 1:
                half = len(items) // 2
                return await self._settled(path, items[:half], body_of, settle) and await self._settled(
                    path, items[half:], body_of, settle
                )
            if of_otlp:
                _log.error("%s%s refuses %d bytes with %d: they are lost", self._to, path, len(body), status)
                self.outcomes["refused"] += 1
                settle(items)
                return True
        if status != httpx.codes.OK:
            return self._later(f"it answers {status}{_REMEDIES.get(status, '')}")
        try:
            partial = ExportMetricsServiceResponse.FromString(answer.content).partial_success
        except DecodeError:
            return self._later(f"its answer is not one of OTLP{_REMEDIES[404]}")
        if self._trouble:
            _log.warning("%s takes what is sent again", self._to)
            self._trouble = ""
        self.outcomes["taken"] += 1
        self.taken_at = time.time()
        if path == "/v1/metrics" and partial.rejected_data_points:
            _log.warning("%s rejects %d points: %s", self._to, partial.rejected_data_points, partial.error_message)
        settle(items)
        return True

    def _later(self, why: str) -> bool:
        self.outcomes["failed"] += 1
        if why != self._trouble:
            self._trouble = why
            _log.warning("%s does not take what is sent (%s); it is kept, and sent again", self._to, why)
        return False
