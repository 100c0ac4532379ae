"""What fewer buckets cost: bounds, and panes to FAIL, beside histograms of scale 4 whose zero is 2^-30."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest

from kc_otel.contract.clause import Clause
from kc_otel.contract.limits import MOST_BUCKETS, ZERO_THRESHOLD, bucket_layout, bucket_layouts, factors
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import DERIVED, Unit
from kc_otel.judge.statistics import clause_interval, mean_range, mean_test
from kc_otel.record.telemetry.buckets import slots
from kc_otel.stats import Histogram
from kc_otel.stats.interval_rows import HistogramRows
from tests.tools.real_messages import contract, drift

SEQUENCES = 4096
ROLLOUTS = 8
LIMITED = [
    (name, clause.id)
    for name in ("rl-rollouts", "serving-int8")
    for clause in contract(name).clauses
    if clause.quantity is not None and clause.metric not in {"weights_lag", "top1_disagreement", "kl_train_inference"}
]


@cache
def observed(name: str, id: str, share: float) -> tuple[Contract, Clause, np.ndarray]:
    """What two real kernels differ by, times what puts the clause's statistic at a share of its limit.

    Of a mean that is claimed of values up to a cap only, those count.
    """
    promised = contract(name)
    [clause] = [clause for clause in promised.clauses if clause.id == id]
    assert clause.quantity is not None
    log_ratios = drift(SEQUENCES)

    def values(scaled: np.ndarray) -> np.ndarray:
        change = np.expm1(scaled)
        of = {
            "abs_log_ratio": np.abs(scaled),
            "tv_token": np.maximum(-change, 0.0),
            "k3": change - scaled,
            "chi2_token": change**2,
        }[clause.quantity.base or clause.quantity.key]
        if clause.quantity.per is Unit.TOKEN:
            return of.ravel()
        return of.mean(1) if clause.quantity.per is Unit.SEQUENCE else of.mean(1).reshape(-1, ROLLOUTS).mean(1)

    def statistic(found: np.ndarray) -> float:
        if clause.parsed_statistic.kind == "fraction":
            return float((found > clause.parsed_statistic.argument).mean())
        factor = factors(clause.metric, promised.assumptions)[0] if clause.metric in DERIVED else 1.0
        return factor * float(np.minimum(found, mean_range(clause)[2]).mean())

    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        below = statistic(values(middle * log_ratios)) < share * clause.limit_for("all")
        low, high = (middle, high) if below else (low, middle)
    return promised, clause, values(high * log_ratios)


def counted(values: np.ndarray) -> Histogram:
    """A histogram of scale 4."""
    kind = slots()
    counts = np.bincount(kind.locate(values), minlength=kind.size).astype(np.int64)
    return kind.histogram(0, counts, float(values.sum()), float(values.min()), float(values.max()))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "id"), LIMITED)
def test_bounds_are_wider_by_less_than_a_tenth_of_the_limit(name: str, id: str) -> None:
    """At the limit, where it matters most; and no bound is narrower than before: fewer buckets say less."""
    promised, clause, values = observed(name, id, 1.0)
    fine = counted(values)
    sent = fine.sized(*bucket_layout(promised, clause.quantity), MOST_BUCKETS)
    before, after = (
        clause_interval(clause, promised.assumptions, histogram.binned(), alpha_lower=0.005, alpha_upper=0.005)
        for histogram in (fine, sent)
    )
    limit = clause.limit_for("all")
    assert before.upper - 1e-9 <= after.upper <= before.upper + 0.1 * limit
    assert -1e-9 <= before.lower - after.lower <= 0.1 * limit


@pytest.mark.slow
@pytest.mark.parametrize(("name", "id"), LIMITED)
def test_a_fail_at_twice_the_limit_takes_little_longer(name: str, id: str) -> None:
    """Evidence is the sum of what a pane's lower edges gain; panes to an alarm are as its inverse."""
    promised, clause, values = observed(name, id, 2.0)
    test = mean_test(clause, promised.assumptions)
    assert test is not None
    fine = counted(values)
    sent = fine.sized(*bucket_layout(promised, clause.quantity), MOST_BUCKETS)
    before, after = (float(test.gains(HistogramRows.of(histogram.binned())).max()) for histogram in (fine, sent))
    assert after <= before * (1 + 1e-9)
    assert before <= 1.15 * after


@pytest.mark.parametrize("value", [1e-12, 0.01, 1.0, 64.0, 1e15, 3e38])
@pytest.mark.parametrize("name", ["rl-rollouts", "serving-int8"])
def test_whatever_is_observed_it_is_sent_in_so_many_buckets_and_still_lies_in_them(name: str, value: float) -> None:
    """Larger values lower the scale; count, sum and both extremes stay."""
    fine = counted(np.array([0.0, -value / 2, value / 3, value]))
    for layout in bucket_layouts(contract(name)).values():
        sent = fine.sized(*layout, MOST_BUCKETS)
        first = round(math.log2(layout.zero_threshold) * 2.0**sent.scale) - 1
        assert max(sent.positive.end, sent.negative.end) - first <= MOST_BUCKETS
        assert (sent.count, sent.sum, sent.minimum, sent.maximum) == (4, fine.sum, -value / 2, value)
        bins = sent.binned()
        assert bins.lower[-1] <= value <= bins.upper[-1]
        assert layout.zero_threshold >= ZERO_THRESHOLD
