"""What FAIL and its end are worth over time: `make soak`, or `python tests/benchmarks/soak.py [panes]`, some minutes.

The evaluator itself runs on a simulated clock, a tick per pane of 30 s, on 20 slices; long counts of false alarms are
of the e-detectors that its FAILs rest on, which is a hundred times as quick. Sequences come in prompts of G rollouts:
the drift of a prompt is drawn by a gamma law with a coefficient of variation (CV), those of its rollouts by one around
it, and all of a step may have a factor in common. What a recorder would send is sent over OTLP, in histograms of scale
4: one observation per prompt, or per step of four panes. The contract limits the mean to 0.004, and allows one false
alarm in as many panes as there are.

First table: alarms of the e-detectors, which are false, in that many panes at 80, 90 and 100 % of the limit. Second
table, of the evaluator: from 70 % of
the limit all slices go to 120, 150 or 200 % of it until all have FAILed once, and from there to 80 or 50 % until the
fault has ended in each; median and slowest of the slices. Third table: a fault of 1.5 limits that lasts: ends, which
are false.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from kc_otel.contract.units import format_duration
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.verdict import Status, Verdict
from kc_otel.stats import EDetector
from kc_otel.stats.e_detector import BETS, alarm_level
from tests.tools.contracts import contract_of

__all__ = ["SMALL", "TRAFFIC", "Soak", "Traffic"]

LIMIT = 0.004
PANE = 30
START = 1_800_000_000.0
_STEP = 4
"""Panes of a step."""
_FIRST, _LAST = -400, 0
"""Indices of the buckets of scale 4 that are sent; what is smaller is in the first."""


class Traffic(NamedTuple):
    """What a slice gets in a pane: CVs are of prompts, of the rollouts of one, and of a factor common to a step."""

    prompts: int
    rollouts: int = 1
    among: float = 0.5
    within: float = 0.5
    steps: float = 0.0
    unit: str = "prompt"

    def __str__(self) -> str:
        common = f", steps {self.steps:g}" if self.steps else ""
        return f"{self.prompts} x {self.rollouts}, CV {self.among:g} and {self.within:g}{common}, by {self.unit}"


TRAFFIC = (
    Traffic(20, 1, 0.45, 0.0),
    Traffic(20, 1, 1.0, 0.0),
    Traffic(32, 8),
    Traffic(16, 16),
    Traffic(4, 64),
    Traffic(16, 16, 1.0),
)
SMALL = Traffic(10, 1, 1.0, 0.0)
"""1,200 sequences an hour."""
STEPS = tuple(Traffic(16, 16, steps=0.3, unit=unit) for unit in ("prompt", "step"))


@dataclass
class Soak:
    """An evaluator, its traffic and its clock; one false alarm is allowed in so many panes."""

    slices: int
    traffic: Traffic
    panes: int
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    now: float = START

    def __post_init__(self) -> None:
        self.names = [f"s{number}" for number in range(self.slices)]
        durations = {"window": 10.0 * PANE, "heartbeat": 2.0 * PANE, "false_alarms": float(PANE * self.panes)}
        contract = contract_of(
            "soak",
            slices={name: {"where": {"task": name}} for name in self.names},
            statistical=[{"id": "tv", "metric": "tv_token", "unit": self.traffic.unit, "limit": LIMIT}],
            observability={name: format_duration(seconds) for name, seconds in durations.items()},
        )
        (clause,) = contract.clauses
        assert clause.quantity is not None
        self._metric = clause.quantity.name
        self._factor, self._step, self._count = 1.0, np.zeros(self.slices), 0
        self.evaluator = Evaluator([contract])

    def tick(self, ratio: float) -> dict[str, Verdict]:
        """One more pane with a mean of `ratio` limits, and the verdict on each slice."""
        self.now += PANE
        means = self._means(ratio)
        if means.size:
            self.evaluator.ingest_metrics(self._request(means), self.now)
        found = self.evaluator.evaluate(self.now)["soak"].verdicts
        return {verdict.cell.slice: verdict for verdict in found if verdict.cell.slice != "all"}

    def detector_alarms(self, ratio: float, panes: int) -> int:
        """`alarms` of the e-detectors alone: of a bucket counts the lower edge, and an alarm ends when M is below 1."""
        detector, failing, count = EDetector.fresh(self.slices), np.zeros(self.slices, bool), 0
        level = alarm_level(self.panes, self.slices + 1)
        for _ in range(panes):
            means = self._means(ratio)
            edges = np.exp2(np.floor(np.log2(np.maximum(means, 1e-12)) * 16) / 16) / LIMIT
            detector = detector.opened().gained(np.log1p(BETS * (edges[..., None] - 1.0)).sum(axis=1))
            reached = detector.log_evidence >= level
            count += int((reached & ~failing).sum())
            failing = reached | (failing & (detector.log_evidence >= 0.0))
            detector = detector.clipped(level)
        return count

    def alarms(self, ratio: float, panes: int) -> int:
        """How often a slice begins to FAIL."""
        failing: set[str] = set()
        count = 0
        for _ in range(panes):
            now = {name for name, verdict in self.tick(ratio).items() if verdict.status is Status.FAIL}
            count += len(now - failing)
            failing = now
        return count

    def ends(self, ratio: float, panes: int) -> int:
        """In how many slices a fault is said to have ended."""
        return len({name for _ in range(panes) for name, verdict in self.tick(ratio).items() if verdict.ended})

    def until(self, ratio: float, there: Callable[[Verdict], bool], most: int) -> dict[str, int]:
        """Panes until each slice first has a verdict of a kind; slices that never have are left out."""
        found: dict[str, int] = {}
        for count in range(1, most + 1):
            for name, verdict in self.tick(ratio).items():
                if there(verdict):
                    found.setdefault(name, count)
            if len(found) == self.slices:
                break
        return found

    def _means(self, ratio: float) -> NDArray[np.float64]:
        """What counts once in this pane [slices, observations]."""
        of = self.traffic
        if of.steps and self._count % _STEP == 0:
            self._factor = float(self._gamma(of.steps, ()))
        self._count += 1
        drift = self._gamma(of.among, (self.slices, of.prompts, 1))
        drift = drift * self._gamma(of.within, (self.slices, of.prompts, of.rollouts))
        if of.unit == "sequence":
            return ratio * LIMIT * self._factor * drift.reshape(self.slices, -1)
        means = ratio * LIMIT * self._factor * drift.mean(2)
        if of.unit != "step":
            return means
        self._step += means.mean(1) / _STEP
        if self._count % _STEP:
            return np.zeros((self.slices, 0))
        whole, self._step = self._step[:, None], np.zeros(self.slices)
        return whole

    def _gamma(self, cv: float, shape: tuple[int, ...]) -> NDArray[np.float64]:
        """Numbers with mean 1 and a coefficient of variation."""
        return self.rng.gamma(cv**-2, cv**2, shape) if cv else np.ones(shape)

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


def main(panes: int = 10_000, slices: int = 20) -> None:
    print(f"{slices} slices, {panes:,} panes; false alarms promised: 1 on average at most\n")
    print(f"{'prompts x rollouts a pane':52} {'at 0.8':>7} {'0.9':>7} {'1.0':>7}")
    for traffic in (*TRAFFIC, SMALL, Traffic(16, 16, unit="sequence")):
        found = [Soak(slices, traffic, panes).detector_alarms(ratio, panes) for ratio in (0.8, 0.9, 1.0)]
        print(f"{traffic!s:52} {found[0]:7} {found[1]:7} {found[2]:7}", flush=True)
    for traffic in STEPS:
        print(f"{traffic!s:52} {Soak(slices, traffic, panes).detector_alarms(0.8, panes):7}", flush=True)
    print(f"\n{'':52} {'panes to FAIL at 1.2':>22} {'1.5':>12} {'2':>12} {'to the end at 0.5':>22} {'0.8':>12}")
    for traffic in (*TRAFFIC, SMALL, STEPS[1]):
        began, ended = [], []
        for fault, after in ((1.2, None), (1.5, 0.8), (2.0, 0.5)):
            soak = Soak(slices, traffic, panes)
            for _ in range(100):
                soak.tick(0.7)
            began.append(_said(soak.until(fault, lambda verdict: verdict.status is Status.FAIL, panes), slices))
            if after is not None:
                ended.append(_said(soak.until(after, _over, panes), slices))
        print(f"{traffic!s:52} {began[0]:>22} {began[1]:>12} {began[2]:>12} {ended[1]:>22} {ended[0]:>12}", flush=True)
    print(f"\n{'a fault of 1.5 limits that lasts':52} {'ended in':>12} of {slices} slices")
    for traffic in (*TRAFFIC, SMALL):
        print(f"{traffic!s:52} {Soak(slices, traffic, panes).ends(1.5, panes // 50):12}", flush=True)


def _over(verdict: Verdict) -> bool:
    return verdict.ended or verdict.status is Status.PASS


def _said(counts: dict[str, int], of: int) -> str:
    if not counts:
        return "none"
    missing = f" ({of - len(counts)} never)" if len(counts) < of else ""
    return f"{np.median([*counts.values()]):.0f}, {max(counts.values())}{missing}"


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
