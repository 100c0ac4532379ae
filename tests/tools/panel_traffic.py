"""What recorders were given over five minutes and what they exported of it: OTLP requests, and the arrays in float64.

The minutes are played: recorders measure and export, and their points get the times of the minutes before `end`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.trace import TracerProvider

from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import QUANTITIES
from kc_otel.integrations.vllm.instrumentor import RECORDED, CaptureCounters
from kc_otel.record.guided_loop import quarantine
from kc_otel.record.kernel import Kernel
from kc_otel.record.recorder import Recorder

TOKENS, EXPORTS, STEP = 16, 7, 40
"""Tokens of a sequence, exports, and seconds between two of them."""
TRAINED = 5
"""The trainer's step."""
DROPPED = 2
"""Batches that a recorder cannot measure between two exports."""
ENGINE = "engine"
"""Who exports what is counted of captured requests."""
CAPTURED = {RECORDED: 40, "queue-full": 3}
"""Requests that the engine's instrumentation sees between two exports, by the reason for which it keeps none."""


@dataclass(frozen=True)
class Traffic:
    """What one recorder sees, and where it counts.

    Attributes:
        sequences: Sequences of each batch that can be compared; one that cannot comes with them.
        sigma: Deviation of their log ratios, nats.
        lag: Optimizer steps that the inference kernel's weights are behind.
        sampling: Share of the batches that the recorder says it measures; those here are sampled already.
        attributes: What decides the slices.
        slices: Names of its streams.
        limit: The smallest limit of clause token-tv on its slices, which quarantine holds single sequences to.
        train: dtype of the training kernel.
        refused: Whether the endpoint refuses its exports the first time.
        rows: Rows of operator outputs of each batch.
    """

    sequences: int
    sigma: float
    lag: int
    sampling: float
    attributes: Mapping[str, Any]
    slices: tuple[str, ...]
    limit: float
    train: str = "bfloat16"
    refused: bool = False
    rows: int = 0


TRAFFIC = {
    "fp8": Traffic(200, 0.05, 1, 0.5, {"task": "code"}, ("all", "code"), 0.004, refused=True, rows=470),
    "bf16": Traffic(150, 0.0005, 0, 0.25, {"prompt_tokens": 9000}, ("all", "long-context"), 0.008),
    "int4": Traffic(12, 0.02, 0, 0.75, {"task": "code"}, ("all", "other"), 0.004, train="float32"),
}
"""By the dtype of the inference kernel. The recorder of the last has no room for a stream of slice `code`."""


@dataclass(frozen=True)
class Batch:
    log_ratio: np.ndarray


@dataclass(frozen=True)
class Export:
    """An OTLP request of a recorder, a key of TRAFFIC or ENGINE, at a Unix time."""

    at: int
    recorder: str
    request: Any


@dataclass(frozen=True)
class Recorded:
    end: int
    batches: dict[str, list[Batch]]
    kernels: dict[str, tuple[Kernel, Kernel]]
    exports: list[Export]

    def time_of(self, place: int) -> int:
        """Time of an export by its place, Unix seconds."""
        return self.end - STEP * (EXPORTS - 1 - place)


class _Memory(MetricExporter):
    """Keeps what a recorder exports; refuses an export when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[MetricsData] = []
        self.refuses = False

    def export(self, data: MetricsData, *_: object, **__: object) -> MetricExportResult:
        if self.refuses:
            return MetricExportResult.FAILURE
        self.kept.append(data)
        return MetricExportResult.SUCCESS

    def force_flush(self, *_: object, **__: object) -> bool:
        return True

    def shutdown(self, *_: object, **__: object) -> None:
        """Nothing to close."""


def record(contract: Contract, end: int) -> Recorded:
    """Let every recorder measure and export; `end` is the time of the last export, Unix seconds."""
    found = Recorded(end, {}, {}, [])
    for seed, (name, traffic) in enumerate(TRAFFIC.items()):
        kernels = Kernel("torch", dtype=traffic.train), Kernel("vllm", version="0.32.0", dtype=name)
        found.kernels[name], found.batches[name] = kernels, []
        draw, memory, own = np.random.default_rng(seed), _Memory(), _capped(contract, traffic)
        with Recorder(
            own,
            train=kernels[0],
            inference=kernels[1],
            sampling=traffic.sampling,
            metric_exporter=memory,
            tracer_provider=TracerProvider(),
            export_interval=3600.0,
        ) as recorder:
            for place in range(EXPORTS):
                found.batches[name].append(_measure(recorder, own, traffic, draw))
                memory.refuses = traffic.refused
                assert recorder.force_flush() is not traffic.refused
                memory.refuses = False
                assert not traffic.refused or recorder.force_flush()
                request = encode_metrics(memory.kept.pop())
                _retime(request, found.time_of(place), found.time_of(-1))
                found.exports.append(Export(found.time_of(place), name, request))
    found.exports.extend(_captured(contract, found))
    found.exports.sort(key=lambda export: export.at)
    return found


def _capped(contract: Contract, traffic: Traffic) -> Contract:
    """The recorder's copy of the contract: its cap on series decides which slices it has streams for."""
    if "other" not in traffic.slices:
        return contract
    seen = contract.observability.model_copy(update={"max_series": 2 * len(QUANTITIES)})
    return contract.model_copy(update={"observability": seen})


def _measure(recorder: Recorder, contract: Contract, traffic: Traffic, draw: np.random.Generator) -> Batch:
    inference = -draw.gamma(2.0, 0.5, (traffic.sequences + 1, TOKENS))
    train = np.minimum(inference + draw.normal(0.0, traffic.sigma, inference.shape), -1e-6)
    train[-1] = math.nan  # a sequence that fails an input check
    advantages = draw.normal(size=traffic.sequences + 1)
    recorder.compare(
        train, inference, attributes=traffic.attributes, advantages=advantages, weights=(TRAINED, None), presampled=True
    )
    recorder.observe("weights_lag", float(traffic.lag), attributes=traffic.attributes)
    recorder.quarantined(quarantine(train, inference, contract, attributes=traffic.attributes, clauses=["token-tv"]))
    for _ in range(DROPPED):
        recorder.drop("no-logprobs", "the engine returned none")
    output = draw.normal(size=(traffic.rows, 8))
    other = output * (1.0 + draw.normal(0.0, 0.01, output.shape))
    if traffic.rows:
        recorder.compare_operator("attention", output, other, attributes=traffic.attributes, presampled=True)
        recorder.compare_operator("norm", output, output, attributes=traffic.attributes, presampled=True)
    return Batch((train - inference)[:-1].astype(np.float32).astype(float))


def _captured(contract: Contract, recorded: Recorded) -> Iterator[Export]:
    """What an engine's instrumentation counts through the program's own meter provider."""
    counts, seen, reader = CaptureCounters(), Counter[str](), InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    counts.start(contract.name, lambda: seen, provider)
    for place in range(EXPORTS):
        seen.update(CAPTURED)
        data = reader.get_metrics_data()
        assert data is not None
        request = encode_metrics(data)
        _retime(request, recorded.time_of(place), recorded.time_of(-1))
        yield Export(recorded.time_of(place), ENGINE, request)
    provider.shutdown()


def metrics(request: Any) -> Iterator[tuple[str, str, Any]]:
    """(name, kind of data, point) of every point of an OTLP request."""
    for resource in request.resource_metrics:
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                kind = metric.WhichOneof("data")
                for point in getattr(metric, kind).data_points:
                    yield metric.name, kind, point


def _retime(request: Any, at: int, start: int) -> None:
    for _, _, point in metrics(request):
        point.time_unix_nano, point.start_time_unix_nano = at * 10**9, start * 10**9
        for exemplar in getattr(point, "exemplars", ()):
            exemplar.time_unix_nano = at * 10**9
