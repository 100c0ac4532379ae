"""A core on a state in memory, fed with what a real recorder exports."""

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from starlette.testclient import TestClient

import kc_otel
from kc_otel.contract.load import load_text
from kc_otel.contract.model import Contract
from kc_otel.judge.incidents.incident import IncidentState
from kc_otel.serve.core import Core
from kc_otel.serve.store.state_file import StateConnection, open_state
from tests.tools.api import client_of
from tests.tools.fleet import Fleet, MakeFleet
from tests.tools.memory import Memory

CLAUSES = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: policy, version: 1, owner: tests}
kernels:
  train: {engine: torch, dtype: float32}
  inference: {engine: vllm, dtype: bfloat16}
slices:
  code: {where: {task: code}}
statistical:
  - {id: token-tv, metric: tv_token, unit: token, limit: 0.02, description: share of mass that the kernels place apart}
observability: {window: 1m, long_window: 5m, min_samples: 500, heartbeat: 30s}
"""
"""A contract that asks for nothing."""
ESCALATION = "escalation: [{on: fail, severity: critical, do: [{route: train-kernel}, {webhook: pager}, halt]}]\n"
POLICY = CLAUSES + ESCALATION


def core_of_policy(connection: StateConnection | None = None) -> Core:
    """A core of that contract; on a state in memory where none is given."""
    contract = load_text(POLICY, "policy.yaml")
    return Core([contract], connection or open_state(None), external_url="http://evaluator", now=0.0)


@pytest.fixture
def anyio_backend() -> str:
    """What runs tests that are coroutines."""
    return "asyncio"


@pytest.fixture
def contract() -> Contract:
    return load_text(POLICY, "policy.yaml")


@pytest.fixture
def open_file() -> Iterator[Callable[..., sqlite3.Connection]]:
    with ExitStack() as stack:
        yield lambda path=None: stack.enter_context(closing(open_state(path)))


@pytest.fixture
def make_core(contract: Contract, open_file: Callable[..., sqlite3.Connection]) -> Callable[..., Core]:
    def make(connection: sqlite3.Connection | None = None, now: float = 0.0) -> Core:
        return Core([contract], connection or open_file(), external_url="http://evaluator", now=now)

    return make


@pytest.fixture(scope="session")
def drift() -> Callable[..., ExportMetricsServiceRequest]:
    """An OTLP request of sequences of slice `code` whose log ratios have a given standard deviation."""
    contract = load_text(POLICY, "policy.yaml")

    def make(sigma: float, step: int | None = None, *, shuts_down: bool = True) -> ExportMetricsServiceRequest:
        rng, exporter = np.random.default_rng(0), Memory()
        inference = np.log(rng.uniform(0.05, 1.0, (64, 64)))
        train = -np.abs(inference + rng.normal(-sigma * sigma / 2, sigma, inference.shape))
        with kc_otel.Recorder(contract, metric_exporter=exporter, sampling=1.0) as recorder:
            weights = None if step is None else (step, step)
            recorder.compare(train, inference, attributes={"task": "code"}, weights=weights)
            if not shuts_down:
                assert recorder.force_flush()
                return encode_metrics(exporter.exports[-1])
        return encode_metrics(exporter.exports[-1])

    return make


def grown(request: ExportMetricsServiceRequest, times: int) -> ExportMetricsServiceRequest:
    """What a sender of cumulative histograms says later, when it has observed all of it so many times."""
    later = ExportMetricsServiceRequest()
    later.CopyFrom(request)
    for metric in later.resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.exponential_histogram.data_points:
            point.time_unix_nano += times * 10**6
            point.count, point.sum, point.zero_count = point.count * times, point.sum * times, point.zero_count * times
            for side in (point.positive, point.negative):
                side.bucket_counts[:] = [count * times for count in side.bucket_counts]
    return later


@pytest.fixture
def core(make_core: Callable[..., Core], drift: Callable[..., ExportMetricsServiceRequest]) -> Core:
    """A core that has just said that its contract is broken, on both slices."""
    made = make_core()
    made.metrics(drift(0.3))
    made.tick(time.time())
    return made


@pytest.fixture
def client(core: Core) -> TestClient:
    return client_of(core)


@pytest.fixture
def make_fleet(tmp_path: Path) -> Iterator[MakeFleet]:
    """Makes a fleet on a state file, and closes that after the test."""
    with ExitStack() as stack:

        def make(*arguments: str, kind: type[Fleet] = Fleet, **options: str) -> Fleet:
            made = kind(tmp_path / "state.sqlite", *arguments, **options)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def fleet(make_fleet: MakeFleet) -> Fleet:
    """One of which a recorder has just broken the limit."""
    made = make_fleet()
    assert made.breach() == [IncidentState.BROKEN]
    return made
