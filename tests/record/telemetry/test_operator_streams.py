"""Histograms of single operators: exact counts per operator and slice, a bounded number of operators."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.contract.registry.clause_metrics import OPERATORS
from kc_otel.record.kernel import Kernel, KernelPair
from kc_otel.record.telemetry.moments import OperatorAccumulator
from kc_otel.record.telemetry.pair_streams import PairStreams, drift_metrics
from kc_otel.stats.histogram import ExponentialHistogram

SLICES = ("all", "code", "long")
ROWS = st.lists(
    st.tuples(
        st.sampled_from(["attention", "mlp", "norm"]),
        st.sampled_from(sorted(OPERATORS)),
        st.floats(0, 1e30, allow_nan=False),
        st.lists(st.booleans(), min_size=2, max_size=2),
    ),
    max_size=40,
)


@given(ROWS)
def test_each_operator_and_slice_counts_its_own_rows(rows):
    """Whatever the order: counts, sums and extremes are those of the rows that belong there."""
    made = OperatorAccumulator(SLICES)
    for operator, quantity, value, inside in rows:
        made.add(operator, {quantity: np.array([value])}, np.array([[True, *inside]]))
    expected: dict[tuple[str, str, str], list[float]] = {}
    for operator, quantity, value, inside in rows:
        for name, belongs in zip(SLICES, (True, *inside), strict=True):
            if belongs:
                expected.setdefault((quantity, operator, name), []).append(value)
    found = made.snapshot()
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        histogram = found[key]
        assert isinstance(histogram, ExponentialHistogram)
        assert histogram.count == len(values)
        assert histogram.sum == pytest.approx(sum(values))
        assert (histogram.minimum, histogram.maximum) == (min(values), max(values))


def test_there_is_room_for_named_operators_and_a_few_more():
    """An operator that was recorded goes on being recorded; one more is refused, the contract's never."""
    made = OperatorAccumulator(SLICES, named=["attention"], more=2)
    batch = {"operator_ulp": np.ones(1)}, np.ones((1, 3), bool)
    for name in ("mlp", "norm", "attention"):
        assert made.has_room(name)
        made.add(name, *batch)
    assert [made.has_room(name) for name in ("mlp", "norm", "attention", "head")] == [True, True, True, False]
    assert {operator for _, operator, _ in made.snapshot()} == {"attention", "mlp", "norm"}


def test_points_name_their_operator_and_no_other_points_do():
    """One metric per quantity with a point per operator; metrics of tokens have the attributes that they had."""
    pair = KernelPair(Kernel("torch"), Kernel("vllm"))
    streams = PairStreams("policy", pair, SLICES, 1, operators=["attention"])
    streams.accumulator.add_sampled(np.full((1, 4), -1.0), np.full((1, 4), -1.1))
    for name in ("attention", "mlp"):
        streams.operators.add(name, {"operator_ulp": np.ones(2)}, np.array([[True, False, True]] * 2))
    metrics = {metric.name: metric for metric in drift_metrics([streams], 2)}
    points = metrics["kc.drift.operator_ulp"].data.data_points
    assert {(p.attributes["kc.operator"], p.attributes["kc.slice"], p.count) for p in points} == {
        (operator, slice, 2) for operator in ("attention", "mlp") for slice in ("all", "long")
    }
    assert metrics["kc.drift.operator_ulp"].unit == "{ulp}"
    plain = metrics["kc.drift.tv_token"].data.data_points
    assert [set(p.attributes) for p in plain] == [{"kc.contract", "kc.slice", "kc.kernel.train", "kc.kernel.inference"}]
