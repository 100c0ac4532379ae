"""Recorders in real processes, against real endpoints: what arrives, and what a dead endpoint or a fork does."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import add_MetricsServiceServicer_to_server

from tests.tools.servers import sink

CONTRACT = {
    "apiVersion": "kernel-contract/v1",
    "kind": "KernelContract",
    "metadata": {"name": "policy", "version": 1, "owner": "rl"},
    "kernels": {"train": {"engine": "torch"}, "inference": {"engine": "vllm"}},
}
PREAMBLE = f"""
import os, sys, time, warnings
import numpy as np
from kc_otel import Contract, Recorder

recorder = Recorder(Contract.model_validate({CONTRACT!r}), export_interval=1000.0)

rng = np.random.default_rng(0)

def compare(tokens):
    inference = -rng.exponential(size=(1, tokens)) - 0.5
    recorder.compare(inference + 0.02 * rng.standard_normal(inference.shape), inference)
"""


def run(code, receiver, **environment):
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("OTEL_")},
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": receiver.protocol,
        "OTEL_SERVICE_NAME": "trainer",
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@dataclass
class Receiver:
    """What an endpoint got, one parsed request per export."""

    endpoint: str
    protocol: str
    requests: list = field(default_factory=list)

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
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    found = Receiver(f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", "grpc")
    service = SimpleNamespace(
        Export=lambda request, _: found.requests.append(request) or ExportMetricsServiceResponse()
    )
    add_MetricsServiceServicer_to_server(service, server)
    server.start()
    yield found
    server.stop(None).wait()


@pytest.fixture
def http_receiver():
    found = Receiver("", "http/protobuf")

    def take(body, headers):
        named = {name.lower(): value for name, value in headers.items()}
        body = gzip.decompress(body) if named.get("content-encoding") == "gzip" else body
        found.requests.append(ExportMetricsServiceRequest.FromString(body))
        return 200

    with sink(take) as found.endpoint:
        yield found


@pytest.fixture(params=["grpc", "http"])
def receiver(request):
    return request.getfixturevalue(f"{request.param}_receiver")


def resource(request):
    return {a.key: a.value.string_value for a in request.resource_metrics[0].resource.attributes}


@pytest.mark.slow
def test_a_program_that_just_ends_loses_nothing(receiver):
    run("for _ in range(10): compare(100)", receiver)
    assert receiver.points("kc.drift.ratio")[0].count == 1000


@pytest.mark.slow
def test_a_forked_child_is_a_writer_of_its_own(receiver):
    """A child's streams start anew, later, under its own instance id; the parent's go on undisturbed."""
    out = run(
        """
        compare(10)
        assert recorder.force_flush()
        pid = os.fork()
        if pid == 0:
            compare(5)
            assert recorder.stats().batches <= 1
            ok = recorder.shutdown()
            os._exit(0 if ok else 1)
        _, status = os.waitpid(pid, 0)
        assert status == 0, status
        compare(10)
        assert recorder.force_flush()
        """,
        receiver,
        OTEL_RESOURCE_ATTRIBUTES="service.instance.id=worker-0",
    )
    assert "Traceback" not in out.stderr
    seen = [
        (resource(request)["service.instance.id"], *(receiver.points("kc.drift.ratio", number) or [None]))
        for number, request in enumerate(receiver.requests)
    ]
    parent = [point for instance, point in seen if instance == "worker-0"]
    (child,) = [point for instance, point in seen if instance != "worker-0"]
    assert [point.count for point in parent[:2]] == [10, 20]
    assert len({point.start_time_unix_nano for point in parent}) == 1
    assert child.count == 5
    assert child.start_time_unix_nano > parent[0].time_unix_nano


@pytest.mark.slow
def test_a_child_that_records_nothing_exports_nothing(http_receiver):
    run(
        """
        import threading
        pid = os.fork()
        if pid == 0:
            alone = threading.active_count() == 1
            recorder.force_flush()
            recorder.shutdown()
            os._exit(0 if alone and threading.active_count() == 1 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        recorder.shutdown()
        """,
        http_receiver,
    )
    assert len(http_receiver.requests) == 1


@pytest.mark.slow
def test_a_program_with_a_dead_endpoint_ends_in_time():
    began = time.perf_counter()
    run("compare(10)", Receiver("http://127.0.0.1:9", "grpc"), OTEL_EXPORTER_OTLP_TIMEOUT="1")
    assert time.perf_counter() - began < 20
