"""Recorders in real processes, against real endpoints: what arrives, and what a dead endpoint or a fork does."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import pytest

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


def run(code, endpoint, protocol, **environment):
    """Run a program with a recorder called `recorder` that exports to an endpoint."""
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("OTEL_")},
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
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


@pytest.fixture
def receiver(request, grpc_receiver, http_receiver):
    return grpc_receiver if request.param == "grpc" else http_receiver


both = pytest.mark.parametrize(
    ("receiver", "protocol"), [("grpc", "grpc"), ("http", "http/protobuf")], indirect=["receiver"]
)


def resource(request):
    return {a.key: a.value.string_value for a in request.resource_metrics[0].resource.attributes}


@pytest.mark.slow
@both
def test_a_program_that_just_ends_loses_nothing(receiver, protocol):
    """At the exit of the interpreter what was handed over is measured and exported, without a call to shutdown."""
    run("for _ in range(10): compare(100)", receiver.endpoint, protocol)
    assert receiver.points("kc.drift.ratio")[0].count == 1000


@pytest.mark.slow
@both
def test_a_forked_child_is_a_writer_of_its_own(receiver, protocol):
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
        receiver.endpoint,
        protocol,
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
    """A forked data loader that never compares starts no thread and sends nothing."""
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
        http_receiver.endpoint,
        "http/protobuf",
    )
    assert len(http_receiver.requests) == 1


@pytest.mark.slow
def test_a_program_with_a_dead_endpoint_ends_in_time():
    """A dead endpoint delays the end of a program by the exporter's timeout at most, and is no error of the program."""
    began = time.perf_counter()
    run("compare(10)", "http://127.0.0.1:9", "grpc", OTEL_EXPORTER_OTLP_TIMEOUT="1")
    assert time.perf_counter() - began < 20
