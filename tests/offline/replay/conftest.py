"""Hours of telemetry in a moment: requests of one recorder whose drift is a function of time, and contracts."""

from __future__ import annotations

import struct

import pytest

from kc_otel.contract.load import load_text
from kc_otel.judge.otlp.traffic_entries import TrafficEntry
from tests.judge.conftest import Sender, merge

START = 1_800_000_000.0
SAMPLES = 500

CONTRACT = """\
apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {{name: {name}, version: {version}, owner: tests}}
kernels:
  train: {{engine: torch, dtype: float32}}
  inference: {{engine: vllm, dtype: bfloat16}}
slices:
  code: {{where: {{task: {task}}}}}
statistical:
  - {{id: token-tv, metric: tv_token, unit: token, limit: {limit}}}
observability: {{window: 1m, long_window: 5m, min_samples: 500, heartbeat: 30s}}
escalation:
  - {{on: fail, for: {after}, clear_for: 30s, severity: critical, do: {do}}}
  - {{on: no-data, for: 1m, severity: warning, do: [hold-promotion]}}
"""
ACTIONS = "[{route: train-kernel}, {webhook: pager}, halt]"


def contract_text(limit=0.02, after="20s", do=ACTIONS, name="policy", version=1, task="code"):
    """A contract with one clause on `all` and one slice."""
    return CONTRACT.format(limit=limit, after=after, do=do, name=name, version=version, task=task)


def ramp(minutes):
    """Drift that is small for five minutes, grows for five, and is small again after ten."""
    return 0.004 if minutes < 5 or minutes > 10 else 0.004 + 0.02 * (minutes - 5)


def arrivals(drift=ramp, minutes=20, every=10.0, contract="policy"):
    """(time, request) of a recorder that every few seconds reports SAMPLES more tokens of one drift on each slice."""
    senders = [Sender(contract=contract, slice=slice, start=START) for slice in ("all", "code")]
    for index in range(1, round(minutes * 60 / every) + 1):
        at, values = START + index * every, [drift(index * every / 60)] * SAMPLES
        yield at, merge(*(sender.request(at, values) for sender in senders))


def as_written(requests):
    """Each behind its length, as the Collector's file exporter writes with `format: proto`."""
    messages = [request.SerializeToString() for request in requests]
    return b"".join(struct.pack(">I", len(message)) + message for message in messages)


@pytest.fixture
def make_contract():
    return lambda **changes: load_text(contract_text(**changes), "policy.yaml")


@pytest.fixture
def traffic():
    return arrivals


@pytest.fixture
def entries():
    """A recording in memory, without evaluations."""
    return lambda **options: [TrafficEntry(at, request.SerializeToString()) for at, request in arrivals(**options)]


@pytest.fixture
def collector_file(tmp_path):
    """Twenty minutes as the Collector's file exporter has them."""
    path = tmp_path / "metrics.proto"
    path.write_bytes(as_written([request for _, request in arrivals()]))
    return path
