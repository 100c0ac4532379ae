"""What a replay costs: `python tests/benchmarks/bench_replay.py` prints how much faster than life it is.

A recording of 50 cells (5 quantities x 10 slices, one pair of kernels, 80 buckets each) whose recorder reports at its
default interval of 20 s, written as `kc-otel serve --record` writes it, judged every 10 s. The same is said for a
recorder that reports every 10 s. Times are CPU time of this process, reading and parsing the file included.
"""

from __future__ import annotations

import os

# NumPy reads this when it is loaded, and `kc-otel` says it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.contract.model import Contract
from kc_otel.contract.registry import BY_SEQUENCE, QUANTITIES
from kc_otel.judge.escalation.message_groups import GroupTiming
from kc_otel.offline.replay.replay_run import replay
from kc_otel.offline.replay.traffic_entries import sealed_frame
from kc_otel.offline.replay.traffic_reading import read_recordings

METRICS = {
    "abs_log_ratio": ("mean", 0.05),
    "tv_token": ("mean", 0.02),
    "k3": ("mean", 0.01),
    "tv_seq": ("mean", 0.5),
    "ratio": ("p99.9", 2.0),
}
SENT = {  # means are judged by sequence where they can be
    key: BY_SEQUENCE.get(key, QUANTITIES[key]) if statistic == "mean" else QUANTITIES[key]
    for key, (statistic, _) in METRICS.items()
}
SLICES = 10
BUCKETS = 80
SCALE = 4
OFFSET = -int(8 * 2**SCALE) - BUCKETS
START = 1_800_000_000.0
TICK = 10.0


def contract() -> Contract:
    return Contract.model_validate(
        {
            "apiVersion": "kernel-contract/v1",
            "kind": "KernelContract",
            "metadata": {"name": "bench", "version": 1, "owner": "bench"},
            "kernels": {"train": {"engine": "torch"}, "inference": {"engine": "vllm"}},
            "slices": {f"s{i}": {"where": {"task": f"s{i}"}} for i in range(SLICES - 1)},
            "statistical": [
                {"id": key.replace("_", "-"), "metric": key, "statistic": statistic, "limit": limit}
                for key, (statistic, limit) in METRICS.items()
            ],
            "escalation": [{"on": "fail", "for": "2m", "do": ["notify"]}],
        }
    )


def requests(hours: float, every: float) -> Iterator[tuple[float, ExportMetricsServiceRequest]]:
    """Cumulative histograms that grow with every report."""
    rng = np.random.default_rng(0)
    keys = [(key, slice) for key in METRICS for slice in ("all", *(f"s{i}" for i in range(SLICES - 1)))]
    shape = np.exp(-((np.arange(BUCKETS) - 45.0) ** 2) / 200.0)
    step = rng.poisson(shape * 80.0, (len(keys), BUCKETS)).astype(np.int64) + 1
    step[:, -6:] = 0
    middles = np.exp2((np.arange(BUCKETS) + OFFSET + 0.5) / 2**SCALE)
    for number in range(1, round(hours * 3600 / every) + 1):
        at = START + number * every
        message = ExportMetricsServiceRequest()
        scope = message.resource_metrics.add().scope_metrics.add()
        metrics = {key: scope.metrics.add(name=of.name, unit=of.unit) for key, of in SENT.items()}
        for (key, slice), counts in zip(keys, step * number, strict=True):
            histogram = metrics[key].exponential_histogram
            histogram.aggregation_temporality = 2
            point = histogram.data_points.add(
                start_time_unix_nano=round(START * 1e9), time_unix_nano=round(at * 1e9), scale=SCALE
            )
            names = {"contract": "bench", "slice": slice, "kernel.train": "a" * 12, "kernel.inference": "b" * 12}
            for name, value in names.items():
                point.attributes.add(key=f"kc.{name}").value.string_value = value
            point.positive.offset = OFFSET
            point.positive.bucket_counts.extend(counts.tolist())
            point.count, point.sum = int(counts.sum()), float(counts @ middles)
            point.min, point.max = 1e-6, float(middles[-7])
        yield at, message


def run(hours: float, every: float, folder: Path) -> None:
    path = folder / f"every-{every:g}.otlp"
    with path.open("wb") as file:
        for at, request in requests(hours, every):
            file.write(sealed_frame(request.SerializeToString(), at))
    begin = time.process_time()
    damage: list[str] = []
    course = replay(contract(), read_recordings([path], damage), TICK, GroupTiming())
    spent = time.process_time() - begin
    assert course.cells == len(METRICS) * SLICES
    assert not damage
    assert not course.not_recorded
    print(
        f"  reports every {every:3g} s: {course.evaluations:,} evaluations in {spent:6.1f} s, "
        f"{hours * 3600 / spent:8,.0f} times as fast as life, a day in {spent / hours * 24:5.0f} s; "
        f"{path.stat().st_size / hours * 24 / 2**20:,.0f} MiB per day"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=24.0)
    hours = parser.parse_args().hours
    print(f"{len(METRICS) * SLICES} cells, judged every {TICK:g} s, {hours:g} h")
    with tempfile.TemporaryDirectory() as folder:
        for every in (20.0, 10.0):
            run(hours, every, Path(folder))


if __name__ == "__main__":
    main()
