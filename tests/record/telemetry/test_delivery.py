"""Recorders in real processes and against real endpoints: what arrives, and what an answer or a fork does to it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import add_MetricsServiceServicer_to_server

import kc_otel
from kc_otel.record.telemetry import environment
from kc_otel.record.telemetry.environment import checking_answers, try_export
from tests.tools import servers
from tests.tools.contracts import contract_of

pytestmark = pytest.mark.slow

PROTOBUF, JSON, HTML = "application/x-protobuf", "application/json", "text/html"
PARTIAL = ExportMetricsServiceResponse()
PARTIAL.partial_success.rejected_data_points = 3
PROTOCOLS = pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
PREAMBLE = f"""
import os, sys, time, warnings
import numpy as np
from kc_otel import Contract, Recorder

recorder = Recorder(Contract.model_validate_json({contract_of().model_dump_json(by_alias=True)!r}), export_interval=1e3)

rng = np.random.default_rng(0)

def compare(tokens):
    inference = -rng.exponential(size=(1, tokens)) - 0.5
    recorder.compare(inference + 0.02 * rng.standard_normal(inference.shape), inference)
"""


@dataclass
class Receiver:
    """What an endpoint got, one parsed request per export, and at which paths."""

    endpoint: str
    protocol: str = "http/protobuf"
    requests: list = field(default_factory=list)
    asked: set = field(default_factory=set)

    def points(self, name, request=-1):
        return [
            point
            for resource in self.requests[request].resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in getattr(metric, metric.WhichOneof("data")).data_points
        ]


@contextmanager
def answering(status, media, body):
    """A server that answers every request so; `body` is bytes, or makes them."""
    found = Receiver("")

    def respond(path, _, content):
        found.asked.add(path)
        found.requests.append(ExportMetricsServiceRequest.FromString(content))
        return status, {"content-type": media, "location": "/login"}, body() if callable(body) else body

    with servers.answering(respond) as found.endpoint:
        yield found


@contextmanager
def receiving(protocol, answer):
    """A receiver that gives an answer, as it is at that moment."""
    if protocol != "grpc":
        with answering(200, PROTOBUF, answer.SerializeToString) as found:
            yield found
        return
    server = grpc.server(ThreadPoolExecutor(2))
    found = Receiver(f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", protocol)
    service = SimpleNamespace(Export=lambda request, _: found.requests.append(request) or answer)
    add_MetricsServiceServicer_to_server(service, server)
    server.start()
    yield found
    server.stop(None).wait()


@pytest.fixture
def receiver(protocol):
    with receiving(protocol, ExportMetricsServiceResponse()) as found:
        yield found


def run(code, receiver, **environment):
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("OTEL_")},
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": receiver.protocol,
        **environment,
    }
    command = [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@PROTOCOLS
def test_a_program_that_just_ends_loses_nothing(receiver):
    run("for _ in range(10): compare(100)", receiver)
    assert receiver.points("kc.drift.ratio")[0].count == 1000


@PROTOCOLS
def test_a_forked_child_is_a_writer_of_its_own(receiver):
    """A child's streams start anew, later, under its own instance id; the parent's go on undisturbed."""
    run(
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
    parent, children = [], []
    for number, request in enumerate(receiver.requests):
        resource = {a.key: a.value.string_value for a in request.resource_metrics[0].resource.attributes}
        found = receiver.points("kc.drift.ratio", number)
        (parent if resource["service.instance.id"] == "worker-0" else children).extend(found)
    (child,) = children
    assert [point.count for point in parent[:2]] == [10, 20]
    assert len({point.start_time_unix_nano for point in parent}) == 1
    assert child.count == 5
    assert child.start_time_unix_nano > parent[0].time_unix_nano


@pytest.mark.parametrize("protocol", ["http/protobuf"])
def test_a_child_that_records_nothing_exports_nothing(receiver):
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
        receiver,
    )
    assert len(receiver.requests) == 1


def test_a_program_with_a_dead_endpoint_ends_in_time():
    began = time.perf_counter()
    run("compare(10)", Receiver("http://127.0.0.1:9", "grpc"), OTEL_EXPORTER_OTLP_TIMEOUT="1")
    assert time.perf_counter() - began < 20


@pytest.fixture
def recorder_to(monkeypatch):
    """A recorder that has measured a batch and exports to a receiver when it is asked to."""

    def make(receiver):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", receiver.protocol)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        recorder = kc_otel.Recorder(contract_of(), export_interval=3600.0)
        recorder.compare(np.full((2, 4), -1.0), np.full((2, 4), -1.1))
        return recorder

    return make


@pytest.mark.parametrize(
    ("status", "media", "body", "taken"),
    [
        (302, HTML, b"", False),
        (200, HTML, b"<html><form>Log in</form></html>", False),
        (200, PROTOBUF, b"\xff\xff", False),
        (200, JSON, b"[1]", False),
        (200, JSON, b"{", False),
        (200, PROTOBUF, b"", True),
        (200, HTML, b"", True),
        (200, PROTOBUF, PARTIAL.SerializeToString(), True),
        (200, JSON, b'{"partialSuccess": {}}', True),
    ],
)
def test_only_the_answers_of_a_receiver_are_a_success(recorder_to, status, media, body, taken):
    """A recorder that gets a redirect, a login page or noise says that nothing gets through, and follows nothing."""
    with answering(status, media, body) as found, recorder_to(found) as recorder:
        assert recorder.force_flush(20.0) is taken
    assert found.asked == {"/v1/metrics"}


@PROTOCOLS
def test_points_that_the_receiver_rejects_are_counted_and_logged_once_an_outage(recorder_to, protocol, caplog):
    answer = ExportMetricsServiceResponse()
    answer.partial_success.error_message = "contract 'polcy' is not loaded here"
    counted = []
    with receiving(protocol, answer) as found, recorder_to(found) as recorder:
        for rejected in (9, 9, 0, 9):
            answer.partial_success.rejected_data_points = rejected
            assert recorder.force_flush(20.0)
            counted.append((recorder.stats().exports, recorder.stats().exports_in_part))
    assert counted == [(0, 1), (0, 2), (1, 2), (1, 3)]
    said = "the endpoint rejected 9 data points: \"contract 'polcy' is not loaded here\""
    assert sum(said in record.getMessage() for record in caplog.records) == 2


@pytest.mark.parametrize(
    ("served", "protocol", "status", "said"),
    [
        ("grpc", "grpc", 200, ""),
        ("http/protobuf", "http/protobuf", 200, ""),
        ("http/protobuf", "grpc", 200, "UNAVAILABLE"),
        ("grpc", "http/protobuf", 200, "Connection aborted"),
        ("http/protobuf", "http/protobuf", 401, "401"),
        ("http/protobuf", "http/protobuf", 302, "redirects to '/login'"),
        ("", "grpc", 0, "Connection refused"),
        ("", "http/protobuf", 0, "Connection refused"),
    ],
)
def test_an_export_without_metrics_says_what_came_back(monkeypatch, caplog, served, protocol, status, said):
    """At once, of the first attempt: the port of another protocol answers a connection and takes no export."""
    if not served:
        receiver = nullcontext(Receiver("http://127.0.0.1:9"))
    else:
        plain = status == 200
        receiver = receiving(served, ExportMetricsServiceResponse()) if plain else answering(status, HTML, b"")
    with receiver as found:
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console,otlp")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.endpoint)
        answer = try_export()
    assert (said in answer) if said else (answer == "" and len(found.requests) == 1)
    assert sum("export" in record.getMessage() for record in caplog.records) <= 1


def test_what_an_exporter_has_said_before_is_said_again(monkeypatch):
    """An exporter logs the same failure once a minute; whoever asks is told it each time."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    exporters_log = logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter")
    monkeypatch.setattr(exporters_log, "filters", [lambda _: False])
    assert all("Connection refused" in try_export() for _ in range(2))


def test_an_endpoint_that_never_answers_an_export_is_not_waited_for(monkeypatch):
    answered = threading.Event()
    monkeypatch.setattr(environment, "_TRY_SECONDS", 0.01)
    monkeypatch.setattr(environment, "_refusal", lambda: str(answered.wait(60)))
    assert try_export() == "no answer in 0.01 s"
    answered.set()


def test_logs_are_looked_at_too():
    """The evaluator's own log records go the same way."""
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    from opentelemetry.sdk._logs.export import LogRecordExportResult

    for status, body, found in ((302, b"", "FAILURE"), (200, b"<html>", "FAILURE"), (200, b"", "SUCCESS")):
        with answering(status, HTML, body) as receiver:
            exporter = checking_answers(OTLPLogExporter(endpoint=f"{receiver.endpoint}/v1/logs"))
            assert exporter.export([]) is LogRecordExportResult[found]
            exporter.shutdown()
