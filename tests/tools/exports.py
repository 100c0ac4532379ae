"""What a recorder exports of two kernels that differ a little, and what it measured, in float64."""

from __future__ import annotations

import numpy as np
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.trace import TracerProvider

from kc_otel.contract import Contract
from kc_otel.instrument.recorder import Recorder
from kc_otel.telemetry.kernel import Kernel

SEQUENCES, TOKENS, EXPORTS = 200, 16, 7


class Memory(MetricExporter):
    """Keeps what a recorder exports."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[MetricsData] = []

    def export(self, data: MetricsData, *_: object, **__: object) -> MetricExportResult:
        self.kept.append(data)
        return MetricExportResult.SUCCESS

    def force_flush(self, *_: object, **__: object) -> bool:
        return True

    def shutdown(self, *_: object, **__: object) -> None:
        """Nothing to close."""


def record(policy: Contract) -> tuple[list[MetricsData], dict[str, np.ndarray]]:
    """The exports of a slice `code`, and the log ratios and advantages that are in all but the first of them."""
    draw, memory = np.random.default_rng(7), Memory()
    recorder = Recorder(
        policy,
        train=Kernel("torch", dtype="bfloat16"),
        inference=Kernel("vllm", dtype="fp8"),
        sampling=1.0,
        metric_exporter=memory,
        tracer_provider=TracerProvider(),
        export_interval=3600.0,
    )
    kept: dict[str, list[np.ndarray]] = {"log_ratio": [], "advantages": []}
    for _ in range(EXPORTS):
        inference = -draw.gamma(2.0, 0.5, (SEQUENCES, TOKENS))
        train = np.minimum(inference + draw.normal(0.0, 0.05, inference.shape), -1e-6)
        advantages = draw.normal(size=SEQUENCES)
        attributes = [{"task": "code"}] * SEQUENCES
        recorder.compare(train, inference, attributes=attributes, advantages=advantages, weights=(5, 4))
        assert recorder.force_flush()
        kept["log_ratio"].append((train - inference).astype(np.float32).astype(float))
        kept["advantages"].append(advantages)
    recorder.shutdown()
    # A rate begins with the first export: what that one holds is not part of it.
    return memory.kept[:EXPORTS], {name: np.concatenate(values[1:]) for name, values in kept.items()}
