"""What an evaluation costs: `python tests/benchmarks/bench_evaluate.py` prints the time of a tick and of ingestion.

10,000 series (10 quantities x 500 slices x 2 kernel pairs) of 80 buckets each. An evaluation judges 10,000 cells; what
it costs must not depend on how many tokens the windows hold, so it is run with a thousand times as many, too. Times are
CPU time of this process; ingestion includes parsing the protobuf message. Memory is that of another process, which has
taken twelve of the messages and evaluated after each.
"""

from __future__ import annotations

import os

# NumPy reads this when it is loaded, and `kc-otel` says it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.contract.model import Contract
from kc_otel.contract.registry import BY_SEQUENCE, QUANTITIES
from kc_otel.judge.evaluator import Evaluator
from kc_otel.serve.store.evaluator_store import EvaluatorStore
from kc_otel.serve.store.unit_of_work import unit_of_work

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
    return Contract.model_validate(
        {
            "apiVersion": "kernel-contract/v1",
            "kind": "KernelContract",
            "metadata": {"name": "bench", "version": 1, "owner": "bench"},
            "kernels": {"train": {"engine": "torch"}, "inference": {"engine": "vllm"}},
            "slices": {f"s{i}": {"where": {"task": f"s{i}"}} for i in range(slices - 1)},
            "statistical": [
                {"id": key.replace("_", "-"), "metric": key, "statistic": statistic, "limit": limit}
                for key, (statistic, limit) in METRICS.items()
            ],
            "observability": {"window": "5m", "long_window": "1h", "max_series": 10_000},
        }
    )


class Fleet:
    """Cumulative streams of every (quantity, slice, pair); `scale` multiplies the tokens and nothing else."""

    def __init__(self, slices: list[str], pairs: list[tuple[str, str]], scale: int) -> None:
        rng = np.random.default_rng(0)
        self.keys = [(key, slice, pair) for key in METRICS for slice in slices for pair in pairs]
        shape = np.exp(-((np.arange(BUCKETS) - 45.0) ** 2) / 200.0)
        self.step = rng.poisson(shape * 80.0, (len(self.keys), BUCKETS)).astype(np.int64) * scale + 1
        self.step[:, -6:] = 0
        offset = -int(8 * 2**SCALE) - BUCKETS
        self.offset = offset
        self.middles = np.exp2((np.arange(BUCKETS) + offset + 0.5) / 2**SCALE)
        self.total = np.zeros_like(self.step)

    def request(self, now: float) -> ExportMetricsServiceRequest:
        self.total += self.step
        message = ExportMetricsServiceRequest()
        scope = message.resource_metrics.add().scope_metrics.add()
        metrics = {}
        for (key, slice, (train, inference)), counts in zip(self.keys, self.total, strict=True):
            metric = metrics.get(key)
            if metric is None:  # means are judged by sequence where they can be
                of = BY_SEQUENCE.get(key, QUANTITIES[key]) if METRICS[key][0] == "mean" else QUANTITIES[key]
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
    """A request arrives, as it does at a server."""
    columns = evaluator.columns_of(wire, 60_000)
    evaluator.ingest_metrics(ExportMetricsServiceRequest.FromString(wire) if columns is None else columns, now)


def run(scale: int, rounds: int, slices: int) -> None:
    judged = contract(slices)
    fleet = Fleet(["all", *judged.slices], [("a" * 12, "b" * 12), ("a" * 12, "c" * 12)], scale)
    connection = sqlite3.connect(":memory:", isolation_level=None)
    evaluator, store = Evaluator([judged]), EvaluatorStore(connection)
    evaluator.use_columns()
    names = ("new pane", "same pane", "idle", "verdicts", "ingest", "save")
    spent: dict[str, list[float]] = {name: [] for name in names}
    now, cells = START, 0

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begin = time.process_time()
        result = call()
        spent[name].append(time.process_time() - begin)
        return result

    for _ in range(rounds):
        for kind, shift in (("new pane", 0.0), ("same pane", 10.0)):
            wire, at = fleet.request(now + shift).SerializeToString(), now + shift
            timed("ingest", lambda: take(evaluator, wire, at))  # noqa: B023
            (judged_at,) = timed(kind, lambda: evaluator.evaluate(at)).values()  # noqa: B023
            cells = len(judged_at.verdicts)
            timed("verdicts", lambda: tuple(judged_at.verdicts))  # noqa: B023
            with unit_of_work(connection) as unit:
                timed("save", lambda: store.save(evaluator, unit))
        timed("idle", lambda: evaluator.evaluate(now + 11.0))  # noqa: B023
        now += 30.0
    middle = {name: statistics.median(values) for name, values in spent.items()}
    print(f"{cells} cells, {int(fleet.total.sum()) / 1e6:,.0f}M observations")
    for name, what in (
        ("new pane", "evaluate(), every history turns"),
        ("same pane", "evaluate(), every series has news"),
        ("idle", "evaluate(), nothing new"),
        ("verdicts", "verdicts of all cells, made of columns"),
        ("save", "save, everything changed"),
    ):
        print(f"  {what:40s} {middle[name] * 1e3:8.1f} ms")
    print(f"  {'ingest':40s} {len(fleet.keys) / middle['ingest']:8,.0f} points/s")


def resident(slices: int, folder: str) -> tuple[float, float]:
    """MiB that this process has before and after it took and judged messages, in the order of their names."""

    def now() -> float:
        status = Path("/proc/self/status").read_text().partition("VmRSS:")[2]
        return int(status.split()[0]) / 1024

    evaluator, before = Evaluator([contract(slices)]), now()
    evaluator.use_columns()
    for path in sorted(Path(folder).iterdir()):
        take(evaluator, path.read_bytes(), float(path.name))
        tuple(*(one.verdicts for one in evaluator.evaluate(float(path.name)).values()))
    return before, now()


def memory(slices: int) -> None:
    """Print what ten thousand cells take."""
    judged = contract(slices)
    fleet = Fleet(["all", *judged.slices], [("a" * 12, "b" * 12), ("a" * 12, "c" * 12)], 1)
    with tempfile.TemporaryDirectory() as folder:
        for at in np.arange(12) * 30.0 + START:
            Path(folder, str(at)).write_bytes(fleet.request(float(at)).SerializeToString())
        with get_context("spawn").Pool(1) as pool:
            before, after = pool.apply(resident, (slices, folder))
    print(f"resident memory: {before:.0f} MiB before the first message, {after:.0f} after twelve")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=13)
    parser.add_argument("--slices", type=int, default=500)
    arguments = parser.parse_args()
    for scale in (1, 1000):
        run(scale, arguments.rounds, arguments.slices)
    memory(arguments.slices)


if __name__ == "__main__":
    main()
