"""The process of `kc-otel aggregate`: takes OTLP from the recorders of a host, sends one stream to the evaluator."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.util.re import parse_env_headers

from kc_otel.judge.otlp.request_errors import BindError, ThrottledError
from kc_otel.judge.otlp.sink import ExportResult
from kc_otel.serve.aggregator.aggregator_store import AggregatorStore
from kc_otel.serve.aggregator.host_streams import Total, as_request
from kc_otel.serve.host_names import HostNames, reachable_from_elsewhere
from kc_otel.serve.listening import connections_per_port, listen
from kc_otel.serve.log_format import PlainFormatter
from kc_otel.serve.receivers.grpc_server import start_grpc
from kc_otel.serve.receivers.http_listener import serving_http
from kc_otel.serve.receivers.http_server import http_app
from kc_otel.serve.store.state_file import StateError, open_state

__all__ = ["AggregatorConfig", "AggregatorError", "AggregatorSink", "Forwarder", "run_aggregator"]

_log: Final = logging.getLogger(__name__)
_AT_ONCE: Final = 2000
"""Sums of one request: some megabytes."""
_BATCH_BYTES: Final = 4 * 1024 * 1024
_WAITING_BYTES: Final = 64 * 1024 * 1024
_LATER: Final = frozenset({429, 502, 503, 504})
_TIDY: Final = 3600.0
_GRACE: Final = 3.0


class AggregatorError(Exception):
    """The aggregator cannot start; the message says what to do."""


class _FullError(ThrottledError):
    outcome = "not_kept"


@dataclass(frozen=True, slots=True)
class AggregatorConfig:
    """Where an aggregator listens, and whom it tells.

    Attributes:
        to: URL of OTLP over HTTP of the evaluator, or of a Collector on the way to it, without /v1/metrics.
        state: SQLite file.
        host: Address to listen on. Nobody is asked who they are.
        grpc_port: OTLP over gRPC; 0 for any.
        http_port: OTLP over HTTP; 0 for any.
        interval: Seconds between two messages to the evaluator.
        allow_unauthenticated: Listen where other machines reach it: for a second one, that other hosts' send to.
    """

    to: str
    state: Path
    host: str = "127.0.0.1"
    grpc_port: int = 4317
    http_port: int = 4318
    interval: float = 10.0
    allow_unauthenticated: bool = False


@dataclass(slots=True)
class AggregatorSink:
    """Takes what arrives: on disk first, then acknowledged."""

    store: AggregatorStore
    requests: int = field(default=0, init=False)

    def metrics(self, request: Any) -> ExportResult:
        """Take an ExportMetricsServiceRequest.

        Raises:
            ThrottledError: If it cannot be kept at the moment; the sender tries again.
        """
        self._room()
        merged = self.store.host.merged(request, time.time_ns())
        try:
            self.store.keep(merged, merged.rest.SerializeToString())
        except StateError as error:
            raise _FullError(f"cannot be kept on disk at the moment: {error}") from None
        self.requests += 1
        return merged.result

    def traces(self, request: Any) -> ExportResult:
        """Take an ExportTraceServiceRequest, to be passed on as it is.

        Raises:
            ThrottledError: If it cannot be kept at the moment.
        """
        self._room()
        try:
            self.store.keep_as_it_is("/v1/traces", request.SerializeToString())
        except StateError as error:
            raise _FullError(f"cannot be kept on disk at the moment: {error}") from None
        return ExportResult()

    def logs(self, _request: Any) -> ExportResult:
        """Logs are not ours; they are accepted, so that nobody retries, and dropped."""
        return ExportResult()

    def _room(self) -> None:
        if self.store.waiting > _WAITING_BYTES:
            raise _FullError("what is to be passed on waits for the evaluator, and fills its place")


class Forwarder:
    """Sends what is due.

    Args:
        store: What is due.
        to: URL of OTLP over HTTP, without the paths.
        headers: Sent with every request.
        client: Sends.
    """

    def __init__(self, store: AggregatorStore, to: str, headers: Mapping[str, str], client: httpx.AsyncClient) -> None:
        self._store, self._to, self._client = store, to.rstrip("/"), client
        self._headers = {"content-type": "application/x-protobuf", "content-encoding": "gzip", **headers}
        self._resource = {
            "service.name": "kc-otel-aggregate",
            "service.instance.id": store.instance,
            "host.name": socket.gethostname(),
        }
        self._trouble = ""
        self.messages = 0

    async def forward(self) -> None:
        """One round: every sum that is due, then what is passed on. What is not taken stays due.

        Raises:
            StateError: If what was taken cannot be written down; it is sent again then, which changes nothing.
        """
        due = sorted(self._store.due)
        for at in range(0, len(due), _AT_ONCE):
            totals: dict[str, Total] = {key: self._store.host.totals[key] for key in due[at : at + _AT_ONCE]}
            body = as_request(totals, self._resource, time.time_ns()).SerializeToString()
            if not await self._taken("/v1/metrics", body):
                return
            self._store.sent(totals)
        waiting = list(self._store.to_pass_on())
        while waiting:
            path, size = waiting[0][1], 0
            batch: list[tuple[int, str, bytes]] = []
            while waiting and waiting[0][1] == path and (not batch or size + len(waiting[0][2]) <= _BATCH_BYTES):
                batch.append(waiting.pop(0))
                size += len(batch[-1][2])
            # Messages of protobuf one after the other are one message with all that is in them.
            if not await self._taken(path, b"".join(body for _, _, body in batch)):
                return
            self._store.passed((number, len(body)) for number, _, body in batch)

    async def _taken(self, path: str, body: bytes) -> bool:
        """Whether a request needs not be sent again: it was taken, or never will be, which is said."""
        try:
            content = await asyncio.to_thread(gzip.compress, body, 1)
            answer = await self._client.post(self._to + path, content=content, headers=self._headers)
        except httpx.HTTPError as error:
            return self._later(f"{type(error).__name__}: {error}")
        if answer.status_code in _LATER:
            return self._later(f"it answers {answer.status_code}")
        if answer.status_code != httpx.codes.OK:
            _log.error("%s%s refuses %d bytes with %d: they are lost", self._to, path, len(body), answer.status_code)
            return True
        if self._trouble:
            _log.warning("%s takes what is sent again", self._to)
            self._trouble = ""
        self.messages += 1
        if path == "/v1/metrics":
            partial = ExportMetricsServiceResponse.FromString(answer.content).partial_success
            if partial.rejected_data_points:
                _log.warning("%s rejects %d points: %s", self._to, partial.rejected_data_points, partial.error_message)
        return True

    def _later(self, why: str) -> bool:
        if why != self._trouble:
            self._trouble = why
            _log.warning("%s does not take what is sent (%s); it is kept, and sent again", self._to, why)
        return False


def run_aggregator(config: AggregatorConfig) -> None:
    """Aggregate until SIGINT or SIGTERM.

    Raises:
        AggregatorError: If it cannot start.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter("%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if reachable_from_elsewhere(config.host) and not config.allow_unauthenticated:
        raise AggregatorError(
            f"--host {config.host} lets other machines send here, and nothing asks who they are; leave --host out, or "
            "say --allow-unauthenticated where the network keeps everybody else away"
        )
    to = urlsplit(config.to)
    if to.scheme not in {"http", "https"} or not to.hostname:
        raise AggregatorError(f"--to {config.to}: is no URL of OTLP over HTTP, such as http://judge:4318")
    if to.port == config.http_port and to.hostname in {config.host, "localhost", "127.0.0.1", "::1"}:
        raise AggregatorError(f"--to {config.to}: is this aggregator itself; give one of the two another --http-port")
    try:
        asyncio.run(_aggregate(config))
    except (BindError, StateError) as error:
        raise AggregatorError(str(error)) from None


async def _aggregate(config: AggregatorConfig) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    headers = parse_env_headers(os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", ""), liberal=True)
    async with contextlib.AsyncExitStack() as stack:
        connection = open_state(config.state)
        stack.callback(connection.close)
        store = AggregatorStore(connection, time.time_ns())
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=httpx.Timeout(15.0, connect=5.0)))
        forwarder, sink = Forwarder(store, config.to, headers, client), AggregatorSink(store)
        most = connections_per_port()
        http = listen(config.host, config.http_port, "OTLP/HTTP", most)
        grpc = await start_grpc(sink, config.host, config.grpc_port, connections=most)
        stack.push_async_callback(grpc.stop, _GRACE)
        names = None if config.allow_unauthenticated else HostNames((config.host,))
        await stack.enter_async_context(serving_http(http_app(sink, names=names), http))
        _log.info("adding up for %s; OTLP/gRPC %s:%d, OTLP/HTTP http://%s:%d",
                  config.to, config.host, grpc.port, config.host, http.getsockname()[1])  # fmt: skip
        tidy_at = time.monotonic() + _TIDY
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(config.interval):
                    await stop.wait()
            try:
                await forwarder.forward()
                if time.monotonic() > tidy_at:
                    tidy_at += _TIDY
                    store.tidy(time.time_ns())
            except StateError as error:
                _log.error("%s", error)
        _log.info("stopping; %d requests were %d messages", sink.requests, forwarder.messages)
