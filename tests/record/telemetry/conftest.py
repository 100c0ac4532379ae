"""A real OTLP receiver over gRPC and HTTP, and a clean environment."""

from __future__ import annotations

import gzip
from concurrent.futures import ThreadPoolExecutor

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

from tests.record.recorder.conftest import _clean_environment
from tests.tools.servers import sink

__all__ = ["_clean_environment"]


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

    def take(body, headers):
        named = {name.lower(): value for name, value in headers.items()}
        body = gzip.decompress(body) if named.get("content-encoding") == "gzip" else body
        requests.append(ExportMetricsServiceRequest.FromString(body))
        return 200

    with sink(take) as url:
        yield Receiver(url, requests)
