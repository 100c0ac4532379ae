"""Cumulative streams of any number of cells, each with its own counts: for tests of how many cells are judged."""

import numpy as np
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import AVERAGED, QUANTITIES, Unit
from kc_otel.judge.evaluator import Evaluator
from tests.tools.contracts import contract_of

__all__ = ["START", "Fleet", "contract", "take"]

METRICS = {
    "abs_log_ratio": ("mean", 0.05),
    "tv_token": ("mean", 0.02),
    "k3": ("mean", 0.01),
    "chi2_token": ("mean", 0.05),
    "tv_seq": ("mean", 0.5),
    "ratio": ("p99.9", 2.0),
    "logit_half_range": ("p99.9", 1.0),
    "tv_exact": ("p99", 0.3),
    "js": ("fraction > 0.1", 0.05),
    "weights_lag": ("max", 5.0),
}
BUCKETS = 80
SCALE = 4
START = 1_800_000_000.0


def contract(slices: int) -> Contract:
    return contract_of(
        "bench",
        slices={f"s{i}": {"where": {"task": f"s{i}"}} for i in range(slices - 1)},
        statistical=[
            {"id": key.replace("_", "-"), "metric": key, "statistic": statistic, "limit": limit}
            for key, (statistic, limit) in METRICS.items()
        ],
        observability={"window": "5m", "long_window": "1h", "max_series": 10_000},
    )


class Fleet:
    """Cumulative streams of every (quantity, slice, pair); `scale` multiplies the tokens and nothing else."""

    def __init__(self, slices: list[str], pairs: list[tuple[str, str]], scale: int) -> None:
        rng = np.random.default_rng(0)
        self.keys = [(key, slice, pair) for key in METRICS for slice in slices for pair in pairs]
        shape = np.exp(-((np.arange(BUCKETS) - 45.0) ** 2) / 200.0)
        self.step = rng.poisson(shape * 80.0, (len(self.keys), BUCKETS)).astype(np.int64) * scale + 1
        self.step[:, -6:] = 0
        self.offset = -int(8 * 2**SCALE) - BUCKETS
        self.middles = np.exp2((np.arange(BUCKETS) + self.offset + 0.5) / 2**SCALE)
        self.total = np.zeros_like(self.step)

    def request(self, now: float) -> ExportMetricsServiceRequest:
        self.total += self.step
        message = ExportMetricsServiceRequest()
        scope = message.resource_metrics.add().scope_metrics.add()
        metrics = {}
        for (key, slice, (train, inference)), counts in zip(self.keys, self.total, strict=True):
            metric = metrics.get(key)
            if metric is None:  # means are judged by sequence where they can be
                of = AVERAGED.get((key, Unit.PROMPT), QUANTITIES[key]) if METRICS[key][0] == "mean" else QUANTITIES[key]
                metric = metrics[key] = scope.metrics.add(name=of.name, unit=of.unit)
                metric.exponential_histogram.aggregation_temporality = 2
            point = metric.exponential_histogram.data_points.add(
                start_time_unix_nano=round(START * 1e9), time_unix_nano=round(now * 1e9), scale=SCALE
            )
            names = {"contract": "bench", "slice": slice, "kernel.train": train, "kernel.inference": inference}
            for name, value in names.items():
                point.attributes.add(key=f"kc.{name}").value.string_value = value
            point.positive.offset = self.offset
            point.positive.bucket_counts.extend(counts.tolist())
            point.count, point.sum = int(counts.sum()), float(counts @ self.middles)
            point.min, point.max = 1e-6, float(self.middles[-6])
        return message


def take(evaluator: Evaluator, wire: bytes, now: float) -> None:
    columns = evaluator.columns_of(wire, 60_000)
    evaluator.ingest_metrics(ExportMetricsServiceRequest.FromString(wire) if columns is None else columns, now)
