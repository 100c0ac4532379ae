"""What an export over HTTP is answered with decides whether it counts as delivered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import add_MetricsServiceServicer_to_server

import kc_otel
from kc_otel.contract.load import load
from kc_otel.record.telemetry.environment import checking_answers

pytestmark = pytest.mark.slow

CONTRACT = load(Path(__file__).resolve().parents[3] / "contracts" / "serving-int8.yaml")
PROTOBUF, JSON, HTML = "application/x-protobuf", "application/json", "text/html"
PARTIAL = ExportMetricsServiceResponse()
PARTIAL.partial_success.rejected_data_points = 3


@contextmanager
def answering(status: int, media: str, body: bytes | Callable[[], bytes]) -> Iterator[tuple[str, list[str]]]:
    """A server that answers everything so: its address, and the methods that it was asked with."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            asked.append("POST")
            content = body() if callable(body) else body
            self.send_response(status)
            self.send_header("content-type", media)
            self.send_header("content-length", str(len(content)))
            if status == 302:
                self.send_header("location", "/login")
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            asked.append("GET")
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


ANSWERS = [
    (302, HTML, b"", False),
    (200, HTML, b"<html><form>Log in</form></html>", False),
    (200, PROTOBUF, b"\xff\xff", False),
    (200, JSON, b"[1]", False),
    (200, JSON, b"{", False),
    (200, PROTOBUF, b"", True),
    (200, HTML, b"", True),
    (200, PROTOBUF, PARTIAL.SerializeToString(), True),
    (200, JSON, b'{"partialSuccess": {}}', True),
]


@pytest.mark.parametrize(("status", "media", "body", "taken"), ANSWERS)
def test_only_the_answers_of_a_receiver_are_a_success(
    status: int, media: str, body: bytes, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorder that gets a redirect, a login page or noise says that nothing gets through, and follows nothing."""
    with answering(status, media, body) as (address, asked):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        recorder = kc_otel.Recorder(CONTRACT, export_interval=3600.0, sampling=1.0)
        recorder.compare(np.full((2, 4), -1.0), np.full((2, 4), -1.1))
        assert recorder.force_flush(20.0) is taken
        recorder.shutdown()
    assert set(asked) == {"POST"}


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_points_that_the_receiver_rejects_are_counted_and_logged_once_an_outage(
    protocol: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answer = ExportMetricsServiceResponse()
    answer.partial_success.error_message = "contract 'polcy' is not loaded here"
    with rejecting(protocol, answer) as address:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        recorder = kc_otel.Recorder(CONTRACT, export_interval=3600.0, sampling=1.0)
        recorder.compare(np.full((2, 4), -1.0), np.full((2, 4), -1.1))
        counted = []
        for rejected in (9, 9, 0, 9):
            answer.partial_success.rejected_data_points = rejected
            assert recorder.force_flush(20.0)
            counted.append((recorder.stats().exports, recorder.stats().exports_in_part))
        recorder.shutdown()
    assert counted == [(0, 1), (0, 2), (1, 2), (1, 3)]
    said = "the endpoint rejected 9 data points: \"contract 'polcy' is not loaded here\""
    assert sum(said in record.getMessage() for record in caplog.records) == 2


@contextmanager
def rejecting(protocol: str, answer: ExportMetricsServiceResponse) -> Iterator[str]:
    """The address of a receiver that gives an answer, as it is at that moment."""
    if protocol != "grpc":
        with answering(200, PROTOBUF, answer.SerializeToString) as (address, _):
            yield address
        return
    server = grpc.server(ThreadPoolExecutor(1))
    add_MetricsServiceServicer_to_server(SimpleNamespace(Export=lambda *_: answer), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}"
    server.stop(None)


def test_logs_are_looked_at_too() -> None:
    """The evaluator's own log records go the same way."""
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    from opentelemetry.sdk._logs.export import LogRecordExportResult

    for status, body, found in ((302, b"", "FAILURE"), (200, b"<html>", "FAILURE"), (200, b"", "SUCCESS")):
        with answering(status, HTML, body) as (address, _):
            exporter = checking_answers(OTLPLogExporter(endpoint=f"{address}/v1/logs"))
            assert exporter.export([]) is LogRecordExportResult[found]
            exporter.shutdown()
