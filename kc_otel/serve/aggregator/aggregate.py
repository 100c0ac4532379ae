"""The process of `kc-otel aggregate`: takes OTLP from the recorders of a host, sends one stream to the evaluator."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx
from opentelemetry.util.re import parse_env_headers

from kc_otel.judge.otlp.request_errors import BindError
from kc_otel.judge.otlp.request_limits import Limits
from kc_otel.judge.otlp.sink import RequestCounts
from kc_otel.serve.aggregator.aggregator_metrics import make_site, read
from kc_otel.serve.aggregator.aggregator_sink import AggregatorSink
from kc_otel.serve.aggregator.aggregator_store import AggregatorStore
from kc_otel.serve.aggregator.forwarder import Forwarder
from kc_otel.serve.api.own_site import OwnSite
from kc_otel.serve.config import LogFormat
from kc_otel.serve.host_names import HostNames, reachable_from_elsewhere
from kc_otel.serve.listening import check_ports, connections_per_port, listen
from kc_otel.serve.log_format import JsonFormatter, PlainFormatter
from kc_otel.serve.otlp_out import SelfMetrics, TelemetryExporter
from kc_otel.serve.receivers.fair_turns import FairTurns
from kc_otel.serve.receivers.grpc_server import start_grpc
from kc_otel.serve.receivers.http_listener import serving_http
from kc_otel.serve.receivers.http_server import http_app
from kc_otel.serve.receivers.reading import Room
from kc_otel.serve.store.state_file import DamagedStateError, StateError, StateHeldError, open_state

__all__ = ["AggregatorConfig", "AggregatorError", "run_aggregator"]

_log: Final = logging.getLogger(__name__)
_TIDY: Final = 3600.0
_GRACE: Final = 3.0
_LEAST: Final = 0.1
"""Seconds between two messages."""


class AggregatorError(Exception):
    """The aggregator cannot start; the message says what to do."""


@dataclass(frozen=True, slots=True)
class AggregatorConfig:
    """Where an aggregator listens, and whom it tells.

    Attributes:
        to: URL of OTLP over HTTP of the evaluator, or of a Collector on the way to it, without /v1/metrics.
        state: SQLite file.
        host: Address to listen on. Nobody is asked who they are.
        grpc_port: OTLP over gRPC; 0 for any.
        http_port: OTLP over HTTP; 0 for any.
        metrics_port: `/metrics` and `/healthz`; 0 for any.
        interval: Seconds between two messages to the evaluator.
        allow_unauthenticated: Listen where other machines reach it: for a second one, that other hosts' send to.
        log_format: Whether a line of the log is a sentence, or a JSON object.
    """

    to: str
    state: Path
    host: str = "127.0.0.1"
    grpc_port: int = 4317
    http_port: int = 4318
    metrics_port: int = 4321
    interval: float = 10.0
    allow_unauthenticated: bool = False
    log_format: LogFormat = LogFormat.TEXT


def run_aggregator(config: AggregatorConfig) -> None:
    """Aggregate until SIGINT or SIGTERM.

    Raises:
        AggregatorError: If it cannot start.
    """
    handler = logging.StreamHandler()
    sentences = PlainFormatter("%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(JsonFormatter() if config.log_format is LogFormat.JSON else sentences)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if reachable_from_elsewhere(config.host) and not config.allow_unauthenticated:
        raise AggregatorError(
            f"--host {config.host} lets other machines send here, and nothing asks who they are; leave --host out, or "
            "say --allow-unauthenticated where the network keeps everybody else away"
        )
    _check(config)
    try:
        check_ports(
            {
                "--http-port": config.http_port,
                "--grpc-port": config.grpc_port,
                "--metrics-port": config.metrics_port,
            }
        )
        asyncio.run(_aggregate(config))
    except StateHeldError:
        raise AggregatorError(
            f"{config.state}: another aggregator is using this state file; stop it, or give --state another file"
        ) from None
    except DamagedStateError:
        raise AggregatorError(
            f"{config.state}: no aggregator has written this, or it is damaged; give --state another file, or move it "
            "away: what it has of sums that were not sent is lost then"
        ) from None
    except (BindError, StateError) as error:
        raise AggregatorError(str(error)) from None


def _check(config: AggregatorConfig) -> None:
    try:
        to = urlsplit(config.to)
        port = to.port
    except ValueError as error:
        raise AggregatorError(f"--to {config.to}: {error}; name an evaluator such as http://judge:4318") from None
    if to.scheme not in {"http", "https"} or not to.hostname:
        raise AggregatorError(f"--to {config.to}: is no URL of OTLP over HTTP, such as http://judge:4318")
    if to.path.rstrip("/").endswith(("/v1/metrics", "/v1/traces")) or to.query or to.fragment:
        raise AggregatorError(f"--to {config.to}: leave out what comes after the address; /v1/metrics is added to it")
    if port == config.http_port and to.hostname in {config.host, "localhost", "127.0.0.1", "::1"}:
        raise AggregatorError(f"--to {config.to}: is this aggregator itself; give one of the two another --http-port")
    if config.interval < _LEAST:
        raise AggregatorError(f"--interval is shorter than {_LEAST:g} s; messages take that long to answer")


def _headers() -> Mapping[str, str]:
    """Headers for the evaluator, from the environment.

    Raises:
        AggregatorError: If one of them cannot be read: without its token, everything would be refused.
    """
    text = os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")
    headers = parse_env_headers(text, liberal=True)
    if len(headers) < sum(bool(part.strip()) for part in text.split(",")):
        raise AggregatorError(
            "OTEL_EXPORTER_OTLP_HEADERS cannot be read; write name=value, with commas between and everything but "
            "ASCII letters and digits as %XX, such as Authorization=Bearer%20TOKEN"
        )
    return headers


async def _aggregate(config: AggregatorConfig) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    headers = _headers()
    async with contextlib.AsyncExitStack() as stack:
        connection = open_state(config.state)
        stack.callback(connection.close)
        store = AggregatorStore(connection, time.time_ns())
        stack.push_async_callback(store.disk.close)
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=httpx.Timeout(15.0, connect=5.0)))
        forwarder, sink = Forwarder(store, config.to, headers, client), AggregatorSink(store)
        most = connections_per_port()
        http = listen(config.host, config.http_port, "OTLP/HTTP", most)
        watched = listen(config.host, config.metrics_port, "/metrics", most)
        limits, requests, turns, room = Limits(), RequestCounts(), FairTurns(), Room()
        requests.waiting = lambda: turns.waiting

        def own_metrics() -> SelfMetrics:
            return read(sink, forwarder, requests, config.state)

        speaker = TelemetryExporter(own_metrics())
        stack.callback(speaker.shutdown)
        requests.tell = speaker.took
        grpc = await start_grpc(
            sink, config.host, config.grpc_port, limits, requests, connections=most, turns=turns, room=room
        )
        stack.push_async_callback(grpc.stop, _GRACE)
        names = None if config.allow_unauthenticated else HostNames((config.host,))
        receiver = http_app(sink, limits, requests, names, turns=turns, room=room)
        await stack.enter_async_context(serving_http(receiver, http))
        site = make_site(own_metrics)
        await stack.enter_async_context(serving_http(site if names is None else OwnSite(site, (config.host,)), watched))
        _log.info("adding up for %s; OTLP/gRPC %s:%d, OTLP/HTTP http://%s:%d, /metrics http://%s:%d",
                  config.to, config.host, grpc.port, config.host, http.getsockname()[1],
                  config.host, watched.getsockname()[1])  # fmt: skip
        tidy_at = time.monotonic() + _TIDY
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(config.interval):
                    await stop.wait()
            if sink.looped:
                raise AggregatorError(
                    f"--to {config.to}: what is sent there comes back to this aggregator, and would count again and "
                    "again; name the evaluator, and look where the aggregator there sends to"
                )
            try:
                await forwarder.forward()
                if time.monotonic() > tidy_at:
                    tidy_at += _TIDY
                    store.tidy(time.time_ns())
            except StateError as error:
                _log.error("%s", error)
            except Exception:  # noqa: BLE001 - what was taken stays due, and senders are still served
                _log.exception("what is due could not be sent; it is tried again")
            if speaker.speaks:
                speaker.publish(own_metrics())
        _log.info("stopping; %d requests were %d messages", sink.requests, forwarder.outcomes["taken"])
