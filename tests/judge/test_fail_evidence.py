"""What is held against limits: its recursion observation by observation, what can be held, when it fails and clears."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.contract.limits import ZERO_THRESHOLD
from kc_otel.judge.fail_evidence import FailEvidence
from kc_otel.judge.series import SeriesKey
from kc_otel.judge.statistics import MeanTest, mean_test
from kc_otel.judge.verdict import Cell
from kc_otel.stats import Buckets, Histogram
from kc_otel.stats.histogram_columns import HistogramColumns
from kc_otel.stats.interval_rows import HistogramRows, rows_of
from tests.judge.conftest import NOW, make_contract

WIDTH = 30.0
EDGES = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0)
BETS = np.geomspace(1e-4, 0.9, 16)
CLAUSES = {
    "mean": {"metric": "tv_token", "unit": "token", "limit": 0.15},
    "quantile": {"metric": "tv_token", "statistic": "p90", "limit": 0.2},
    "share": {"metric": "tv_token", "statistic": "fraction > 0.1", "limit": 0.3},
    "deficit": {"metric": "support_deficit", "unit": "token", "cap": 2, "limit": 0.2},
}


def histogram(values: Any) -> Histogram:
    """Observations in buckets, extremes unknown."""
    counts = np.bincount(np.searchsorted(EDGES, values), minlength=len(EDGES) + 1)
    return Histogram.explicit(EDGES, counts.astype(np.int64), float(np.sum(values)))


def take(evidence: FailEvidence, arrived: Any, now: float, **more: Any) -> None:
    """Hold histograms of some series against limits."""
    evidence.take(now, [*arrived], HistogramColumns.of([*arrived.values()]), **more)


def counted(kind: str, x: float) -> float:
    """What one observation counts for, in limits: what its bucket leaves no doubt of."""
    place = int(np.searchsorted(EDGES, x))
    lower, upper = (0.0 if place == 0 else EDGES[place - 1]), EDGES[place]
    match kind:
        case "mean":
            return lower / 0.15
        case "quantile":
            return (lower >= 0.2) / 0.1
        case "share":
            return (lower >= 0.1) / 0.3
    return (2.0 - upper) / (2.0 - 0.8)


def evidence_of(kind: str, **observability: Any) -> tuple[FailEvidence, SeriesKey, Cell]:
    """Evidence of a contract with one clause, a series, and its cell."""
    made = make_contract(statistical=[{"id": "c", **CLAUSES[kind]}], observability=observability)
    metric = "kc.drift.ratio" if kind == "deficit" else "kc.drift.tv_token"
    return FailEvidence(made, WIDTH), SeriesKey(metric, "all", "a", "b"), Cell(made.name, "c", "all", "a", "b")


arrivals = st.lists(
    st.tuples(st.floats(0.0, 40.0), st.lists(st.floats(0.0, 2.0), min_size=1, max_size=12)), min_size=1, max_size=8
)


@given(st.sampled_from(sorted(CLAUSES)), arrivals)
def test_evidence_is_its_recursion_observation_by_observation(kind: str, steps: Any) -> None:
    """M <- max(M, 1) at a pane's first observation, times 1 + lam (x/m - 1) at each, clipped where it was looked at."""
    evidence, key, cell = evidence_of(kind, false_alarms="15m")
    sums, pane, now, failing = np.ones(16), -1, NOW, False
    for pause, values in steps:
        now += pause
        take(evidence, {key: histogram(values)}, now)
        if math.floor(now / WIDTH) > pane:
            pane, sums = math.floor(now / WIDTH), np.maximum(sums, 1.0)
        for x in values:
            sums = sums * (1.0 + BETS * (counted(kind, x) - 1.0))
        level = 30.0
        reached = sums.mean() >= level
        failing = reached or (failing and sums.mean() >= 1.0)
        sums = sums * min(1.0, level / sums.mean())
        held = evidence.cells[cell]
        assert held.log_evidence == pytest.approx(math.log(sums.mean()), abs=1e-9)
        assert held.failing == failing
        assert evidence.share(cell) == pytest.approx(
            min(max(math.log(sums.mean()), 0.0) / math.log(level), 1.0), abs=1e-6
        )


@pytest.mark.parametrize(
    ("clause", "expected"),
    [
        ({"metric": "tv_token", "limit": 0.004}, MeanTest(0.004, low=0.0, cap=1.0)),
        ({"metric": "k3", "limit": 0.004, "cap": 2}, MeanTest(0.004, low=0.0, cap=2.0)),
        ({"metric": "abs_log_ratio", "limit": 0.1}, MeanTest(0.1, low=0.0, cap=5.0)),
        ({"metric": "reward_drift_bound", "limit": 0.1}, MeanTest(0.025, low=0.0, cap=1.0)),
        ({"metric": "top1_disagreement", "unit": "token", "limit": 0.02}, MeanTest(0.02, above=0.5)),
        ({"metric": "top1_disagreement", "limit": 0.02}, MeanTest(0.02, low=0.0, cap=1.0)),
        ({"metric": "log_ratio", "statistic": "p99", "limit": 0.3}, MeanTest(1.0 - 0.99, above=0.3)),
        ({"metric": "tv_token", "statistic": "fraction > 0", "limit": 0.1}, MeanTest(0.1, above=ZERO_THRESHOLD)),
        ({"metric": "support_deficit", "cap": 10, "limit": 0.05}, MeanTest(10 - 0.95, top=10.0)),
        ({"metric": "reward_drift", "limit": 0.1}, MeanTest(1.0 + 0.1 / 4.0, top=1.0)),
        ({"metric": "gen_ai.client.operation.duration", "statistic": "mean", "limit": "1s"}, MeanTest(1, cap=100)),
        ({"metric": "log_ratio", "statistic": "mean", "limit": 0.1}, None),
        ({"metric": "k1", "limit": 0.1}, None),
        ({"metric": "support_deficit", "limit": 0.05}, None),
        ({"metric": "abs_log_ratio", "statistic": "max", "limit": 1}, None),
        ({"metric": "abs_log_ratio", "statistic": "fraction > 0", "limit": 0}, None),
        ({"metric": "tv_token", "statistic": "fraction > 0.1", "limit": 1}, None),
        ({"metric": "tv_token", "limit": 0}, None),
    ],
)
def test_what_can_be_held_against_a_clause(clause: Any, expected: MeanTest | None) -> None:
    """Means from a smallest value on, shares, and limits from below where there is a largest value; nothing else."""
    made = make_contract(statistical=[{"id": "c", **clause}], assumptions={"reward_range": [-1, 3]})
    found = mean_test(made.clauses[0], made.assumptions)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.limit == pytest.approx(expected.limit)
        assert (found.above, found.low, found.cap, found.top) == (
            expected.above, expected.low, expected.cap, expected.top,
        )  # fmt: skip


def test_an_alarm_takes_more_the_more_cells_there_are_and_never_less_again() -> None:
    """The level is log(A K), A the panes in `false_alarms`, K the most cells that were ever held at once."""
    evidence, key, _ = evidence_of("mean", false_alarms="30d")
    few = histogram([0.05])
    assert evidence.level == pytest.approx(math.log(86_400))
    take(evidence, {key: few, key._replace(slice="code"): few, key._replace(kernel_inference="c"): few}, NOW)
    assert evidence.level == pytest.approx(math.log(3 * 86_400))
    evidence.forget(key)
    take(evidence, {key._replace(slice="other"): few, key._replace(slice="code"): few}, NOW)
    assert len(evidence.cells) == 2
    assert evidence.level == pytest.approx(math.log(3 * 86_400))


def test_what_came_after_an_older_peak_is_not_after_a_newer_one() -> None:
    evidence, key, cell = evidence_of("mean")
    for values, counted_apart in (([0.9] * 20, None), ([0.05] * 3, 3), ([0.9] * 20, None), ([0.05] * 2, 2)):
        take(evidence, {key: histogram(np.array(values))}, NOW)
        after = evidence.cells[cell].after
        assert (after and after.count) == counted_apart


def test_a_healthy_recorders_exports_do_not_end_the_fault_of_another() -> None:
    """Three recorders of one version export in turn; only rounds of all of them say that a fault is over."""
    evidence, key, cell = evidence_of("mean", heartbeat="20s", confidence=0.99)
    alone, _, _ = evidence_of("mean", heartbeat="20s", confidence=0.99)
    lasting: list[bool] = []
    for step in range(120):
        export = {key: histogram(np.full(200, 0.9 if step % 3 == 0 else 0.05))}
        take(evidence, export, NOW + 2.5 * step, shared={"b"})
        take(alone, export, NOW + 2.5 * step)
        lasting.append(alone.cells[cell].fault is not None)
        assert evidence.cells[cell].fault is not None
    assert not all(lasting), "two healthy exports in a row are a recovery"
    for step in range(24):
        take(evidence, {key: histogram(np.full(200, 0.05))}, NOW + 300 + 2.5 * step, shared={"b"})
    assert evidence.cells[cell].fault is None
    assert not evidence.cells[cell].failing


def test_what_waits_for_all_recorders_counts_in_the_share() -> None:
    evidence, key, cell = evidence_of("mean", heartbeat="20s", confidence=0.99)
    take(evidence, {key: histogram(np.full(200, 0.9))}, NOW, shared={"b"})
    assert evidence.share(cell) == 1.0
    take(evidence, {key: histogram(np.full(200, 0.05))}, NOW + 2.5, shared={"b"})
    assert evidence.failing(cell)
    assert evidence.share(cell) < 1.0


def test_what_waited_before_a_pause_is_no_part_of_what_comes_after_it() -> None:
    evidence, key, cell = evidence_of("mean", heartbeat="20s", confidence=0.99)
    for now, value in ((NOW, 0.9), (NOW + 2.5, 0.9), (NOW + 100.0, 0.05)):
        take(evidence, {key: histogram(np.full(200, value))}, now, shared={"b"})
    assert evidence.share(cell) < 1.0, "what came after the pause keeps the limit"


@pytest.mark.parametrize("test", [MeanTest(0.1, cap=1.0), MeanTest(0.3, above=0.2), MeanTest(0.5, top=2.0)])
@pytest.mark.parametrize("counts", [[7], [1, 3], [2, 0, 0, 5]])
def test_many_samples_gain_what_each_does(test: MeanTest, counts: list[int]) -> None:
    """Also where the extremes draw in a single bucket from both ends, or none."""
    side, none = Buckets(-12, np.array(counts)), Buckets.empty()
    first, end = 2.0 ** (-12 / 16), 2.0 ** ((-12 + len(counts)) / 16)
    samples = [
        Histogram(4, sum(counts), 0.7 * sum(counts), 0, side, none, minimum, maximum, 2.0**-30)
        for minimum, maximum in ((first * 1.01, end / 1.01), (first * 1.01, end), (first, end / 1.01), (first, end))
    ]
    (rows,) = rows_of(HistogramColumns.of(samples))
    expected = [test.gains(HistogramRows.of(sample.binned()))[0] for sample in samples]
    assert test.gains(rows) == pytest.approx(np.array(expected), rel=1e-12)
