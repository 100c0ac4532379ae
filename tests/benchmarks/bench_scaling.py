"""What judging a fleet costs, to 100,000 GPUs: `python tests/benchmarks/bench_scaling.py` measures, then multiplies.

Measured here: what a real recorder exports of contracts/rl-rollouts-bf16-fp8.yaml, the CPU time in which an aggregator
takes such a message (decoded, merged, written to disk), judges a cell and adds up a cell's summaries. Given: points a
core of `kc-otel serve` takes end to end, which bench_ingest.py prints, and what a message costs the judge's process
before Ray shards, from bench_shards.py. Everything else is multiplication: one process a GPU records all slices and
exports once in an interval; CPU time is CPU time, at so much a core and month.

    python tests/benchmarks/bench_scaling.py --picture scaling.png
"""

from __future__ import annotations

import argparse
import gzip
import math
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

import kc_otel
from kc_otel.contract import load
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.histograms import union
from kc_otel.serve.aggregator.aggregator_store import AggregatorStore
from kc_otel.serve.aggregator.host_streams import as_request
from kc_otel.serve.store.state_file import open_state
from tests.serve.conftest import Capture

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = load(ROOT / "contracts" / "rl-rollouts-bf16-fp8.yaml")
GPUS = (1_000, 3_000, 10_000, 30_000, 100_000)
PER_HOST, HOSTS = 8, 64
"""GPUs of a host; hosts whose aggregators send to one more."""
FED = 1950.0
"""us of its process in which a judge before two Ray shards takes a message of 200 points; one of 28 costs less."""
BUSY = 0.6
"""Share of a core that may be used: the rest is for ticks, bursts and catching up."""
STREAMS = 32_000
"""Streams that one contract may have: STREAMS_PER_SERIES times the default of observability.max_series."""


@dataclass(frozen=True)
class Constants:
    """What was measured: of one message, and in seconds of CPU time.

    Attributes:
        points: Exponential histograms of a message that are merged.
        sent, zipped: Its bytes, plain and with gzip.
        interval: Seconds between two of them.
        point: A judge takes one.
        message: An aggregator takes a message.
        forwarded: An aggregator writes the sum of as many points as a message has.
        cell: A judge judges one.
        merge: A judge adds up two summaries of a cell.
        cells: Cells of the contract, of one pair of kernels.
        fed: A judge before Ray shards hands a message to one.
    """

    points: int
    sent: int
    zipped: int
    interval: float
    point: float
    message: float
    forwarded: float
    cell: float
    merge: float
    cells: int
    fed: float


@dataclass(frozen=True)
class Way:
    """One arrangement: `together` processes come to one stream before the judge."""

    name: str
    together: int


WAYS = (
    Way("each process by itself", 1),
    Way("one stream a host", PER_HOST),
    Way(f"and one for {HOSTS} hosts", PER_HOST * HOSTS),
)


def exports(processes: int, rounds: int) -> list[list[ExportMetricsServiceRequest]]:
    """What so many recorders export, round after round."""
    rng, tasks = np.random.default_rng(0), [*CONTRACT.slices]
    found: list[list[ExportMetricsServiceRequest]] = [[] for _ in range(rounds)]
    for number in range(processes):
        capture = Capture()
        recorder = kc_otel.Recorder(CONTRACT, metric_exporter=capture, export_interval=3600.0, sampling=1.0)
        for messages in found:
            for name in (None, *tasks):
                inference = np.log(rng.uniform(0.05, 0.9, (32, 128)))
                train = np.minimum(inference + 0.02 * rng.standard_normal(inference.shape), 0.0)
                where = {} if name is None else matching(name)
                recorder.compare(train, inference, attributes=where, advantages=rng.standard_normal(32))
            recorder.force_flush()
            assert capture.last is not None
            message = encode_metrics(capture.last)
            for owner in message.resource_metrics:
                owner.resource.attributes.add(key="process").value.int_value = number
            messages.append(message)
        recorder.shutdown()
    return found


def matching(slice: str) -> dict[str, Any]:
    """Attributes that put a batch on a slice."""
    where = CONTRACT.slices[slice].where
    return {key: 1_000_000 if str(value).startswith(">") else value for key, value in where.items()}


def measured(points_per_second: float, fed: float) -> Constants:
    rounds = exports(PER_HOST, 6)
    bodies = [[message.SerializeToString() for message in messages] for messages in rounds]
    taking, writing, judging = [], [], []
    evaluator = Evaluator([CONTRACT])
    with tempfile.TemporaryDirectory() as folder:
        connection = open_state(Path(folder) / "state")
        store = AggregatorStore(connection, time.time_ns() - 10**10)
        for number, messages in enumerate(bodies):
            for body in messages:
                begin = time.process_time()
                merged = store.host.merged(ExportMetricsServiceRequest.FromString(body), time.time_ns())
                store.keep(merged, merged.rest.SerializeToString())
                taking.append(time.process_time() - begin)
            begin = time.process_time()
            whole = as_request(store.host.totals, {"service.instance.id": "host"}, time.time_ns())
            gzip.compress(whole.SerializeToString(), 1)
            writing.append(time.process_time() - begin)
            now = time.time()
            evaluator.ingest_metrics(whole, now)
            begin = time.process_time()
            (evaluation,) = evaluator.evaluate(now + number).values()
            judging.append(time.process_time() - begin)
        totals = [total.histogram for total in store.host.totals.values() if total.histogram.count]
        connection.close()
    begin = time.process_time()
    for _ in range(20):
        for histogram in totals:
            union([histogram, histogram])
    merge = (time.process_time() - begin) / (20 * len(totals))
    mine, cells = len(totals), len(evaluation.verdicts)
    return Constants(
        points=mine,
        sent=len(bodies[-1][0]),
        zipped=len(gzip.compress(bodies[-1][0])),
        interval=min(CONTRACT.observability.heartbeat / 3.0, 60.0),
        point=1.0 / points_per_second,
        message=statistics.median(taking[PER_HOST:]),
        forwarded=statistics.median(writing[1:]),
        cell=statistics.median(judging[1:]) / cells,
        merge=merge,
        cells=cells,
        fed=fed,
    )


def judge(of: Constants, gpus: int, together: int) -> tuple[float, int]:
    """Cores that one judge needs, evaluating once a second, and the streams that it holds."""
    streams = math.ceil(gpus / together) * of.points
    return streams / of.interval * of.point + of.cells * of.cell, streams


def aggregators(of: Constants, gpus: int, together: int) -> float:
    """Cores that all aggregators need together."""
    if together == 1:
        return 0.0
    hosts = math.ceil(gpus / PER_HOST)
    first = (gpus * of.message + hosts * of.forwarded) / of.interval
    if together == PER_HOST:
        return first
    return first + (hosts * of.message + math.ceil(hosts / HOSTS) * of.forwarded) / of.interval


def most(of: Constants, together: int) -> tuple[int, int]:
    """GPUs at which one judge has all the streams that it may have, and at which its core is full."""
    cores = (BUSY - of.cells * of.cell) * of.interval / of.point / of.points * together
    return int(STREAMS / of.points * together), int(cores)


def shards(of: Constants, gpus: int) -> tuple[int, float]:
    """Ray shards that take each process by itself, and the cores of the process with the ports and the judge."""
    cores, streams = judge(of, gpus, 1)
    count = max(math.ceil(cores / BUSY), math.ceil(streams / STREAMS))
    return count, gpus / of.interval * of.fed + of.cells * (of.cell + count * of.merge)


def table(of: Constants, price: float) -> str:
    lines = [
        "| GPUs | "
        + " | ".join(f"{way.name}: judge's cores, streams, $/GPU/month" for way in WAYS)
        + " | Ray shards, judge's cores |",
        "| ---: |" + " ---: |" * (len(WAYS) + 1),
    ]
    for gpus in GPUS:
        row = []
        for way in WAYS:
            cores, streams = judge(of, gpus, way.together)
            cost = (cores + aggregators(of, gpus, way.together)) * price / gpus
            full = " (full)" if cores > BUSY or streams > STREAMS else ""
            row.append(f"{cores:.3f}, {streams:,}, {cost:.5f}{full}")
        count, share = shards(of, gpus)
        row.append(f"{count:,}, {share:.2f}")
        lines.append(f"| {gpus:,} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def picture(of: Constants, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    gpus = np.geomspace(100, 100_000, 200)
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    colours = ("#b3423a", "#b07d1f", "#2f7d5b")
    for way, colour in zip(WAYS, colours, strict=True):
        streams = gpus / way.together * of.points
        cores = streams / of.interval * of.point + of.cells * of.cell
        axes.plot(gpus, np.maximum(cores / BUSY, streams / STREAMS), color=colour, linewidth=2, label=way.name)
        full = min(most(of, way.together))
        if full <= gpus[-1]:
            axes.plot([full], [1.0], "o", color=colour)
            axes.annotate(
                f"full at {full:,}", (full, 1.0), (-8, 6), textcoords="offset points", ha="right", color=colour
            )
    axes.axhline(1.0, color="#555555", linewidth=1, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="GPUs, a recording process each", ylim=(1e-3, 300), xlim=(100, 1e5))
    axes.set_ylabel("share of one judge that is used")
    axes.set_title("One contract, one judge: how many processes come to one stream decides", loc="left", fontsize=11)
    axes.grid(visible=True, which="major", alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points-per-second", type=float, default=140_000.0, help="as bench_ingest.py prints it")
    parser.add_argument(
        "--fed",
        type=float,
        default=FED,
        help="us of the judge's process for a message with shards, as bench_shards.py prints it",
    )
    parser.add_argument("--price", type=float, default=30.0, help="dollars for a core and month")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    of = measured(given.points_per_second, given.fed * 1e-6)
    print(
        f"a message: {of.points} points, {of.sent:,} bytes, {of.zipped:,} with gzip, every {of.interval:g} s\n"
        f"a judge: {of.point * 1e6:.1f} us a point (given), {of.cell * 1e6:.0f} us a cell, "
        f"of which there are {of.cells}; {of.merge * 1e6:.0f} us to add up two summaries of a cell\n"
        f"an aggregator: {of.message * 1e3:.1f} ms a message of 1 process, {of.forwarded * 1e3:.1f} ms for its own; "
        f"{PER_HOST} processes: {PER_HOST * of.message / of.interval:.2%} of a core\n"
    )
    for way in WAYS:
        streams, cores = most(of, way.together)
        print(f"one judge, {way.name}: {STREAMS:,} streams at {streams:,} GPUs, a full core at {cores:,}")
    print(f"a judge before Ray shards: a full core at {int(BUSY * of.interval / of.fed):,} GPUs")
    print(f"\n{table(of, given.price)}")
    if given.picture is not None:
        picture(of, given.picture)


if __name__ == "__main__":
    main()
