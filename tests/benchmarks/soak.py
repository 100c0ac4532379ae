"""What FAIL is worth over time: `make soak`, or `python tests/benchmarks/soak.py [ticks]`, some ten minutes.

The evaluator itself runs on a simulated clock, a tick per pane of 30 s. In each, every one of 20 slices gets 20
sequences of 400 tokens. Tokens of a sequence depend on each other: its drift is drawn once, by a gamma law with a
coefficient of variation (CV), and its tokens are exponential around it. What is sent is each sequence's mean, over
OTLP, in histograms of scale 4. The contract limits it to 0.004, and allows one false alarm in as many panes as there
are ticks.

First table: alarms, which are false, in that many ticks at 90 and 100 % of the limit. Second table: from 80 % of the
limit all slices go to 110, 150 or 200 % of it until all have FAILed once, and from there to 50 % until none does; panes
to FAIL and to its end, median and slowest of the slices, and how it ended.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.contract.model import Contract
from kc_otel.contract.units import format_duration
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.verdict import Status

__all__ = ["Soak"]

LIMIT = 0.004
SEQUENCES, TOKENS = 20, 400
PANE = 30
START = 1_800_000_000.0
_FIRST, _LAST = -400, 0
"""Indices of the buckets of scale 4 that are sent; what is smaller is in the first."""


@dataclass
class Soak:
    """An evaluator, its traffic and its clock.

    Attributes:
        slices: How many slices there are.
        cv: Coefficient of variation of a sequence's drift.
        panes: Panes in which one false alarm is allowed.
        rng: Where sequences come from.
        now: Unix time in seconds.
    """

    slices: int
    cv: float
    panes: int
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    now: float = START

    def __post_init__(self) -> None:
        self.names = [f"s{number}" for number in range(self.slices)]
        contract = Contract.model_validate(
            {
                "apiVersion": "kernel-contract/v1",
                "kind": "KernelContract",
                "metadata": {"name": "soak", "version": 1, "owner": "team"},
                "kernels": {"train": {"engine": "torch"}, "inference": {"engine": "vllm"}},
                "slices": {name: {"where": {"task": name}} for name in self.names},
                "statistical": [{"id": "tv", "metric": "tv_token", "unit": "sequence", "limit": LIMIT}],
                "observability": {
                    "window": format_duration(10.0 * PANE), "heartbeat": format_duration(2.0 * PANE),
                    "false_alarms": format_duration(float(PANE * self.panes)),
                },
            }
        )  # fmt: skip
        (clause,) = contract.clauses
        assert clause.quantity is not None
        self._metric = clause.quantity.name
        self.evaluator = Evaluator([contract])

    def tick(self, ratio: float) -> dict[str, Status]:
        """One more pane with a mean of `ratio` limits, and the verdict on each slice."""
        self.now += PANE
        shape = (self.slices, SEQUENCES)
        drift = self.rng.gamma(self.cv**-2, ratio * LIMIT * self.cv**2, shape)
        self.evaluator.ingest_metrics(self._request(drift * self.rng.gamma(TOKENS, 1.0 / TOKENS, shape)), self.now)
        found = self.evaluator.evaluate(self.now)["soak"].verdicts
        return {one.cell.slice: one.status for one in found if one.cell.slice != "all"}

    def alarms(self, ratio: float, ticks: int) -> int:
        """How often a slice begins to FAIL."""
        failing: set[str] = set()
        count = 0
        for _ in range(ticks):
            now = {name for name, status in self.tick(ratio).items() if status is Status.FAIL}
            count += len(now - failing)
            failing = now
        return count

    def until(self, ratio: float, there: Callable[[Status], bool], most: int) -> dict[str, tuple[int, Status]]:
        """Panes until each slice first has a status of a kind, and that status; slices that never have are left out."""
        found: dict[str, tuple[int, Status]] = {}
        for count in range(1, most + 1):
            for name, status in self.tick(ratio).items():
                if there(status):
                    found.setdefault(name, (count, status))
            if len(found) == self.slices:
                break
        return found

    def _request(self, means: NDArray[np.float64]) -> ExportMetricsServiceRequest:
        message = ExportMetricsServiceRequest()
        metric = message.resource_metrics.add().scope_metrics.add().metrics.add(name=self._metric, unit="1")
        metric.exponential_histogram.aggregation_temporality = 1
        index = np.clip(np.ceil(np.log2(np.minimum(means, 1.0)) * 16).astype(np.int64) - 1, _FIRST, _LAST)
        for name, values, places in zip(self.names, means, index, strict=True):
            point = metric.exponential_histogram.data_points.add(
                start_time_unix_nano=round((self.now - PANE) * 1e9), time_unix_nano=round(self.now * 1e9), scale=4,
                count=values.size, sum=float(values.sum()), min=float(values.min()), max=float(values.max()),
            )  # fmt: skip
            for key, text in (("contract", "soak"), ("slice", name), ("kernel.train", "a"), ("kernel.inference", "b")):
                point.attributes.add(key=f"kc.{key}").value.string_value = text
            point.positive.offset = int(places.min())
            point.positive.bucket_counts.extend(np.bincount(places - places.min()).tolist())
        return message


def main(ticks: int = 10_000, slices: int = 20) -> None:
    print(
        f"{slices} slices, {SEQUENCES} sequences a pane, {ticks:,} panes; false alarms promised: 1 on average at most"
    )
    print(f"{'CV':>5} {'truth / limit':>14} {'alarms':>8}")
    for cv in (0.45, 1.0):
        for ratio in (0.9, 1.0):
            print(f"{cv:5} {ratio:14} {Soak(slices, cv, ticks).alarms(ratio, ticks):8}", flush=True)
    print(f"\n{'CV':>5} {'truth / limit':>14} {'panes to FAIL':>20} {'panes to its end':>20}  ended as")
    for cv in (0.45, 1.0):
        for ratio in (1.1, 1.5, 2.0):
            soak = Soak(slices, cv, ticks)
            for _ in range(100):
                soak.tick(0.8)
            began = soak.until(ratio, lambda status: status is Status.FAIL, ticks)
            ended = soak.until(0.5, lambda status: status is not Status.FAIL, ticks)
            times = [_said([count for count, _ in found.values()], slices) for found in (began, ended)]
            how = ", ".join(
                f"{many} {status}" for status, many in Counter(status for _, status in ended.values()).items()
            )
            print(f"{cv:5} {ratio:14} {times[0]:>20} {times[1]:>20}  {how}", flush=True)


def _said(counts: list[int], of: int) -> str:
    if not counts:
        return "none"
    missing = f" ({of - len(counts)} never)" if len(counts) < of else ""
    return f"{np.median(counts):.0f}, {max(counts)}{missing}"


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
