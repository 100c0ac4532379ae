"""Hours of telemetry in a moment: requests of one recorder whose drift is a function of time, and contracts."""

from __future__ import annotations

import math
import struct

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.contract.load import load_text
from kc_otel.judge.otlp.traffic_entries import TrafficEntry

START = 1_800_000_000.0
SAMPLES = 500
SCALE = 4

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


class Traffic:
    """One recorder: cumulative streams of the total variation on `all` and on `code`."""

    def __init__(self, contract="policy", inference="bbbbbbbbbbbb"):
        self._contract, self._inference = contract, inference
        self._counts: dict[str, dict[int, int]] = {"all": {}, "code": {}}

    def request(self, at, drift):
        """What the recorder says at a time, after SAMPLES more tokens of this drift on each slice."""
        message = ExportMetricsServiceRequest()
        resource = message.resource_metrics.add()
        resource.resource.attributes.add(key="service.name").value.string_value = "trainer"
        scope = resource.scope_metrics.add()
        scope.scope.name = "kc_otel"
        metric = scope.metrics.add(name="kc.drift.tv_token", unit="1")
        metric.exponential_histogram.aggregation_temporality = 2
        for slice, counts in self._counts.items():
            bucket = math.ceil(math.log2(drift) * 2**SCALE) - 1
            counts[bucket] = counts.get(bucket, 0) + SAMPLES
            point = metric.exponential_histogram.data_points.add(
                start_time_unix_nano=round(START * 1e9), time_unix_nano=round(at * 1e9), scale=SCALE
            )
            names = {
                "contract": self._contract, "slice": slice, "kernel.train": "aaaaaaaaaaaa",
                "kernel.inference": self._inference,
            }  # fmt: skip
            for name, value in names.items():
                point.attributes.add(key=f"kc.{name}").value.string_value = value
            point.positive.offset = min(counts)
            point.positive.bucket_counts.extend(counts.get(i, 0) for i in range(min(counts), max(counts) + 1))
            point.count = sum(counts.values())
            point.sum = sum(n * 2.0 ** ((i + 0.5) / 2**SCALE) for i, n in counts.items())
        return message


def ramp(minutes):
    """Drift that is small for five minutes, grows for five, and is small again after ten."""
    return 0.004 if minutes < 5 or minutes > 10 else 0.004 + 0.02 * (minutes - 5)


def arrivals(drift=ramp, minutes=20, every=10.0, contract="policy"):
    """(time, request) of a recorder that reports every few seconds."""
    traffic = Traffic(contract)
    for index in range(1, round(minutes * 60 / every) + 1):
        at = START + index * every
        yield at, traffic.request(at, drift(index * every / 60))


def as_written(requests):
    """Each behind its length, as the Collector's file exporter writes with `format: proto`."""
    messages = [request.SerializeToString() for request in requests]
    return b"".join(struct.pack(">I", len(message)) + message for message in messages)


@pytest.fixture
def make_contract():
    """Makes contracts."""
    return lambda **changes: load_text(contract_text(**changes), "policy.yaml")


@pytest.fixture
def traffic():
    """Requests with their times."""
    return arrivals


@pytest.fixture
def entries():
    """A recording in memory, without evaluations."""
    return lambda **options: [TrafficEntry(at, request) for at, request in arrivals(**options)]


@pytest.fixture
def collector_file(tmp_path):
    """Twenty minutes as the Collector's file exporter has them."""
    path = tmp_path / "metrics.proto"
    path.write_bytes(as_written([request for _, request in arrivals()]))
    return path
