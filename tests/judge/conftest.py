"""Senders of OTLP histograms made from plain samples, and contracts to judge them by."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from opentelemetry.exporter.otlp.proto.common._internal import _encode_instrumentation_scope
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel import machine_code
from kc_otel.contract.model import Contract
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.otlp.requests import ExportResult
from kc_otel.record.export_loop import scope_of
from tests.tools.contracts import contract_of

NOW = 1_800_000_000.0
SCALE = 4
ZERO = 2.0**-30


def index(value: float, scale: int = SCALE) -> int:
    """Bucket of a positive value, by the data model's definition."""
    guess = math.ceil(math.log2(value) * 2**scale) - 1
    while 2.0 ** (guess * 2.0**-scale) >= value:
        guess -= 1
    while 2.0 ** ((guess + 1) * 2.0**-scale) < value:
        guess += 1
    return guess


class Sender:
    """One stream of one process: remembers its samples, and says them as OTLP."""

    def __init__(
        self,
        metric: str = "kc.drift.tv_token",
        *,
        slice: str = "all",
        contract: str = "policy",
        train: str = "aaaaaaaaaaaa",
        inference: str = "bbbbbbbbbbbb",
        instance: str = "0",
        start: float = NOW,
        cumulative: bool = True,
        edges: tuple[float, ...] | None = None,
        attributes: dict[str, str] | None = None,
        scale: int = SCALE,
        zero: float = ZERO,
    ) -> None:
        self.scale, self.zero = scale, zero
        self.metric, self.start, self.cumulative, self.edges, self.instance = metric, start, cumulative, edges, instance
        self.attributes = attributes or {
            "kc.contract": contract,
            "kc.slice": slice,
            "kc.kernel.train": train,
            "kc.kernel.inference": inference,
        }
        self.samples: list[float] = []
        self._sides: dict[int, Counter[int]] = {1: Counter(), 0: Counter(), -1: Counter()}

    def restart(self, start: float) -> None:
        """Forget everything, as a process that starts again does."""
        self.samples, self.start = [], start
        self._sides = {1: Counter(), 0: Counter(), -1: Counter()}

    def request(self, time: float, values: Any = ()) -> ExportMetricsServiceRequest:
        """The request that reports `values` at `time`, and with cumulative temporality all before them."""
        new = [float(value) for value in values]
        if not self.cumulative:
            self.restart(self.start)
        self.samples += new
        for value in new:
            sign = 0 if abs(value) <= self.zero else 1 if value > 0 else -1
            self._sides[sign][index(abs(value), self.scale) if sign else 0] += 1
        message = ExportMetricsServiceRequest()
        resource = message.resource_metrics.add()
        pair = resource.resource.attributes.add(key="service.instance.id")
        pair.value.string_value = self.instance
        scope = resource.scope_metrics.add()
        scope.scope.name = "kc_otel"
        metric = scope.metrics.add(name=self.metric, unit="1")
        data = metric.exponential_histogram if self.edges is None else metric.histogram
        data.aggregation_temporality = 2 if self.cumulative else 1
        point = data.data_points.add(start_time_unix_nano=ns(self.start), time_unix_nano=ns(time))
        for name, value in self.attributes.items():
            point.attributes.add(key=name).value.string_value = value
        point.count, point.sum = len(self.samples), math.fsum(self.samples)
        if self.samples:
            point.min, point.max = min(self.samples), max(self.samples)
        if self.edges is None:
            self._exponential(point)
        else:
            point.explicit_bounds.extend(self.edges)
            counts = np.bincount(np.searchsorted(self.edges, self.samples), minlength=len(self.edges) + 1)
            point.bucket_counts.extend(int(count) for count in counts)
        if not self.cumulative:
            self.start = time
        return message

    def _exponential(self, point: Any) -> None:
        point.scale, point.zero_threshold, point.zero_count = self.scale, self.zero, self._sides[0][0]
        for sign, side in ((1, point.positive), (-1, point.negative)):
            counts = self._sides[sign]
            if counts:
                side.offset = min(counts)
                side.bucket_counts.extend(counts[i] for i in range(min(counts), max(counts) + 1))


def info_request(
    now: float, value: int, instance: str = "0", version: str = "b" * 12, role: str = "inference", attention: str = ""
) -> ExportMetricsServiceRequest:
    """A request with one point of kc.kernel.info; the value is 0 once a recorder is done with the version."""
    attributes = {
        "kc.contract": "policy", "kc.kernel.role": role, "kc.kernel.version": version, "kc.kernel.engine": "vllm",
        "kc.kernel.dtype": "bfloat16" if attention else "fp8",
    } | ({"kc.kernel.attention": attention} if attention else {})  # fmt: skip
    request = Sender("kc.kernel.info", instance=instance, attributes=attributes).request(now)
    metric = request.resource_metrics[0].scope_metrics[0].metrics[0]
    said = list(metric.exponential_histogram.data_points[0].attributes)
    metric.gauge.data_points.add(time_unix_nano=ns(now), as_int=value).attributes.extend(said)
    return request


def counted(
    reason: str,
    count: int,
    start: float,
    now: float,
    pair: tuple[str, str] | None = None,
    slice: str = "",
    *,
    metric: str = "kc.input.invalid",
    instance: str = "",
) -> ExportMetricsServiceRequest:
    """An export of what failed an input check, or was dropped, since `start`."""
    message = ExportMetricsServiceRequest()
    resource = message.resource_metrics.add()
    if instance:
        resource.resource.attributes.add(key="service.instance.id").value.string_value = instance
    data = resource.scope_metrics.add().metrics.add(name=metric).sum
    data.aggregation_temporality, data.is_monotonic = 2, True
    point = data.data_points.add(start_time_unix_nano=ns(start), time_unix_nano=ns(now), as_int=count)
    attributes = {"kc.contract": "policy", "kc.reason": reason, **({"kc.slice": slice} if slice else {})}
    attributes |= zip(("kc.kernel.train", "kc.kernel.inference"), pair or (), strict=False)
    for name, value in attributes.items():
        point.attributes.add(key=name).value.string_value = value
    return message


def evaluator_of(*contracts: Contract, columns: bool) -> Evaluator:
    """An evaluator of contracts, which takes messages as columns where it is asked to and there is machine code."""
    with pytest.MonkeyPatch.context() as patch:
        if not columns:
            patch.setattr(machine_code, "is_available", lambda: False)
        return Evaluator(contracts)


def take(evaluator: Evaluator, at: float, *requests: ExportMetricsServiceRequest) -> ExportResult:
    """Give an evaluator requests, as columns where it uses them; return its answer to the last one."""
    for request in requests:
        message = evaluator.columns_of(request.SerializeToString(), 1000)
        answer = evaluator.ingest_metrics(request if message is None else message, at)
    return answer


def applying(contract: Contract, request: ExportMetricsServiceRequest) -> ExportMetricsServiceRequest:
    """The same request of a recorder that applies a contract."""
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            scope.scope.CopyFrom(_encode_instrumentation_scope(scope_of(contract)))
    return request


def ns(seconds: float) -> int:
    """Unix time in ns."""
    return round(seconds * 1e9)


def merge(*requests: ExportMetricsServiceRequest) -> ExportMetricsServiceRequest:
    """One request with everything in it."""
    whole = ExportMetricsServiceRequest()
    for request in requests:
        whole.MergeFrom(request)
    return whole


def make_contract(**changes: Any) -> Contract:
    """A small contract; keyword arguments replace its parts."""
    parts: dict[str, Any] = {
        "slices": {"code": {"where": {"task": "code"}}},
        "statistical": [{"id": "token-tv", "metric": "tv_token", "unit": "token", "limit": 0.004}],
        "observability": {"window": "5m", "long_window": "1h", "min_samples": 100, "heartbeat": "60s"},
    }
    return contract_of(**{"version": 3, **parts, **changes})


@pytest.fixture
def now() -> float:
    """Unix time at which the tests happen; the start of a pane of both grids."""
    return NOW


@pytest.fixture
def sender() -> type[Sender]:
    return Sender


@pytest.fixture
def contract() -> Any:
    return make_contract


@pytest.fixture
def merged() -> Any:
    """Puts requests into one."""
    return merge
