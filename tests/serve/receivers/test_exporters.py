"""Real servers and the SDK's real exporters."""

import asyncio
import gc
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.otlp.requests import BindError, ExportResult, Limits, MetricsSink, ThrottledError
from kc_otel.serve.receivers.http_server import BoundedProtocol
from tests.tools.receivers import http_app, start_grpc

ASK = b"POST /v1/metrics HTTP/1.1\r\nhost: x\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n"
EXPORT = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"


@contextmanager
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(10)
    made.close()


@contextmanager
def grpc_server(
    sink: Any, limits: Limits | None = None, counts: Counter[tuple[str, str]] | None = None
) -> Iterator[int]:
    with loop() as running:
        made = start_grpc(sink, port=0, limits=limits, counts=counts)
        server, port = asyncio.run_coroutine_threadsafe(made, running).result(10)
        yield port
        asyncio.run_coroutine_threadsafe(server.stop(0), running).result(10)


@contextmanager
def http_server(sink: Any, limits: Limits | None = None) -> Iterator[int]:
    import uvicorn

    app, http = http_app(sink, limits), partial(BoundedProtocol, answered=lambda _: None)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off", http=http))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(10)


def export(channel: Any, body: bytes, timeout: float = 10.0) -> Any:
    return channel.unary_unary(EXPORT)(body, timeout=timeout)


def metrics_data() -> Any:
    """What a program that records a histogram hands to an exporter."""
    from opentelemetry.sdk.metrics import Histogram, MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation

    reader = InMemoryMetricReader(preferred_aggregation={Histogram: ExponentialBucketHistogramAggregation()})
    provider = MeterProvider([reader], shutdown_on_exit=False)
    histogram = provider.get_meter("m").create_histogram("kc.drift.k3")
    for value in range(1, 200):
        histogram.record(value / 7, {"kc.contract": "policy"})
    data = reader.get_metrics_data()
    provider.shutdown()
    return data


@pytest.mark.slow
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_the_sdks_metric_exporters_are_served(sink: Any, protocol: str, compressed: bool) -> None:
    """The SDK's own exporter delivers its histogram, with and without gzip, over both transports."""
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as Grpc
    from opentelemetry.exporter.otlp.proto.http import Compression
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as Http
    from opentelemetry.sdk.metrics.export import MetricExportResult

    with grpc_server(sink) if protocol == "grpc" else http_server(sink) as port:
        if protocol == "grpc":
            gzip = grpc.Compression.Gzip if compressed else grpc.Compression.NoCompression
            exporter: Any = Grpc(endpoint=f"127.0.0.1:{port}", insecure=True, compression=gzip)
        else:
            how = Compression.Gzip if compressed else Compression.NoCompression
            exporter = Http(endpoint=f"http://127.0.0.1:{port}/v1/metrics", compression=how)
        assert exporter.export(metrics_data()) is MetricExportResult.SUCCESS
        exporter.shutdown()
    (request,) = sink.requests
    (metric,) = request.resource_metrics[0].scope_metrics[0].metrics
    assert (metric.name, metric.exponential_histogram.data_points[0].count) == ("kc.drift.k3", 199)


@pytest.mark.slow
def test_the_sdks_exporter_comes_back_after_throttling(sink: Any) -> None:
    """The SDK waits as long as RetryInfo says and delivers then."""
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import MetricExportResult

    sink.answer = ThrottledError("busy", 0.2)
    with grpc_server(sink) as port:
        exporter = OTLPMetricExporter(endpoint=f"127.0.0.1:{port}", insecure=True)
        threading.Timer(0.1, lambda: setattr(sink, "answer", ExportResult())).start()
        began = time.monotonic()
        assert exporter.export(metrics_data()) is MetricExportResult.SUCCESS
        assert 0.2 <= time.monotonic() - began < 5
        exporter.shutdown()
    assert len(sink.requests) == 2


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's own count of memory")
def test_a_message_that_is_refused_takes_no_memory_any_more() -> None:
    """Also before the collector has looked for cycles: it seldom does, and a hundred senders have a gigabyte."""

    class Busy(MetricsSink):
        async def metrics(self, _: Any) -> ExportResult:
            raise ThrottledError("busy", 0.1)

    request = ExportMetricsServiceRequest()
    request.resource_metrics.add().resource.attributes.add(key="text").value.string_value = "x" * 8 * 2**20
    body = request.SerializeToString()
    with grpc_server(Busy()) as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        before = 0
        gc.disable()
        try:
            for number in range(30):
                with pytest.raises(grpc.RpcError):
                    export(channel, body)
                if number == 4:
                    before = resident()
            after = resident()
        finally:
            gc.enable()
    assert after - before < 64 * 2**20


def test_a_call_without_a_message_is_a_bad_request(sink: Any) -> None:
    """A call that ends before it has said anything is answered, and nothing is delivered."""
    with (
        grpc_server(sink) as port,
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.stream_unary(EXPORT)(iter(()), timeout=10)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert sink.requests == []


@pytest.mark.slow
def test_a_connection_is_kept_between_the_exports_of_a_recorder(sink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is quiet after an answer is not who begins a request and does not end it."""
    monkeypatch.setattr(BoundedProtocol, "seconds", 0.1)
    with http_server(sink) as port, socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        for _ in range(3):
            connection.sendall(ASK)
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
            time.sleep(0.5)


@pytest.mark.slow
def test_headers_that_do_not_end_are_cut_off(sink: Any) -> None:
    """After 64 KiB, also after a request that was answered, or refused before its body was read."""
    refused = ASK.replace(b"/v1/metrics", b"/nowhere").replace(b"length: 0", b"length: 3") + b"abc"
    with http_server(sink) as port:
        for begin, said in ((b"", b""), (ASK, b"200"), (refused, b"404")):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as sent:
                sent.sendall(begin)
                if begin:
                    assert sent.recv(1000).startswith(b"HTTP/1.1 " + said)
                sent.sendall(b"POST /v1/metrics HTTP/1.1\r\n")
                with pytest.raises(ConnectionError):
                    sent.sendall(b"".join(b"x-%06d: %s\r\n" % (number, b"v" * 8000) for number in range(10_000)))


def test_a_taken_port_says_what_to_do(sink: Any) -> None:
    """A second evaluator on the same port is refused with a remedy; it does not share the port in silence."""
    said = "other process or choose another"
    with grpc_server(sink) as port, pytest.raises(BindError, match=f"127.0.0.1:{port}.*{said}"):
        asyncio.run(start_grpc(sink, port=port))
