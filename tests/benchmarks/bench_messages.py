"""What a real Recorder's message costs: `python tests/benchmarks/bench_messages.py` prints a line for each kind.

Messages are those of `tests.tools.real_messages`, of three contracts and several sizes. Of each kind: bytes, points,
the most buckets of a sign, microseconds of CPU in which protobuf (upb) parses one and in which the evaluator takes one
(decoded, folded, settled into panes before each evaluation), and the share of histograms that took the usual way.
"""

from __future__ import annotations

import time

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.judge.evaluator import Evaluator
from tests.tools.real_messages import CASES, INTERVAL, Case, Sender, contract, exponential_points, messages

PROCESSES, ROUNDS, WARM = 32, 6, 2


def line(case: Case) -> str:
    bodies = messages(case, exports=ROUNDS)
    points = exponential_points(bodies[-1])
    buckets = max(max(len(point.positive.bucket_counts), len(point.negative.bucket_counts)) for point in points)
    parsing, taking, taken, all_points = measured(case, bodies)
    return (
        f"{case!s:60s} {len(bodies[-1]):8,d} bytes {len(points):4d} points {buckets:4d} buckets  "
        f"upb {parsing * 1e6:6.0f} us  evaluator {taking * 1e6:7.0f} us = {taking / parsing:5.1f}x, "
        f"{taking / len(points) * 1e6:6.1f} us/point; {taken / all_points:6.1%} the usual way"
    )


def measured(case: Case, bodies: list[bytes]) -> tuple[float, float, int, int]:
    """Seconds of parsing and of taking a message; histograms that came, and those that took the usual way."""
    evaluator = Evaluator([contract(case.contract)])
    now = time.time()
    senders = [Sender(bodies, number, now) for number in range(PROCESSES)]
    parsing = taking = 0.0
    points, before = 0, 0
    for number in range(ROUNDS):
        exported = [sender.export() for sender in senders]
        began = time.process_time()
        for body in exported:
            ExportMetricsServiceRequest.FromString(body)
        parsed = time.process_time()
        for body in exported:
            request = evaluator.columns_of(body, 10**6) or ExportMetricsServiceRequest.FromString(body)
            evaluator.ingest_metrics(request, now)
        evaluator.settle()
        done = time.process_time()
        if number >= WARM:
            parsing, taking = parsing + parsed - began, taking + done - parsed
            points += sum(len(exponential_points(body)) for body in exported)
        else:
            before = evaluator.taken_as_columns
        evaluator.evaluate(now)
        now += INTERVAL
    count = PROCESSES * (ROUNDS - WARM)
    return parsing / count, taking / count, evaluator.taken_as_columns - before, points


def main() -> None:
    for case in CASES:
        print(line(case), flush=True)


if __name__ == "__main__":
    main()
