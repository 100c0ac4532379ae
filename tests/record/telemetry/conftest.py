"""A real OTLP receiver over gRPC and HTTP, and a clean environment."""

from __future__ import annotations

import gzip
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)


class _Grpc(MetricsServiceServicer):
    def __init__(self, requests):
        self._requests = requests

    def Export(self, request, _context):  # noqa: N802 - the generated service's name
        self._requests.append(request)
        return ExportMetricsServiceResponse()


class Receiver:
    """What an endpoint got, one parsed request per export."""

    def __init__(self, endpoint, requests):
        self.endpoint = endpoint
        self.requests = requests

    def points(self, name, request=-1):
        """Data points of a metric in one request."""
        return [
            point
            for resource in self.requests[request].resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in getattr(metric, metric.WhichOneof("data")).data_points
        ]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def grpc_receiver():
    requests = []
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    add_MetricsServiceServicer_to_server(_Grpc(requests), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield Receiver(f"http://127.0.0.1:{port}", requests)
    server.stop(None).wait()


@pytest.fixture
def http_receiver():
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            assert self.path == "/v1/metrics"
            requests.append(ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield Receiver(f"http://127.0.0.1:{server.server_port}", requests)
    server.shutdown()
    server.server_close()
    thread.join()
