"""What a recorder makes of two outputs of an operator."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kc_otel.contract.registry.clause_metrics import OPERATORS, QUANTITIES, SAMPLING
from kc_otel.contract.slices import PLACES
from kc_otel.record.operator_drift import compare_outputs
from kc_otel.record.slice_table import SliceTable

ULP = {"id": "u", "metric": "operator_ulp", "operator": "attention", "limit": 4}


@pytest.fixture
def outputs():
    torch.manual_seed(0)
    train = torch.randn(3, 5, 16)
    return train, train.bfloat16()


def test_every_row_is_an_observation_on_its_sequences_slices(recorders, memory, outputs):
    train, inference = outputs
    recorder = recorders()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    recorder.compare_operator(
        "attention", train, inference, mask=mask, attributes=[{"task": "code"}, {"prompt_tokens": 200}, {}]
    )
    assert recorder.force_flush()
    expected = compare_outputs(train, inference, mask=mask)
    for key in ("max_abs", "relative", "ulp", "cosine"):
        values = getattr(expected, key)
        name = f"kc.drift.operator_{key}"
        (point,) = memory.points(name, kc_slice="all", kc_operator="attention")
        assert (point.count, point.sum) == (7, pytest.approx(values.sum()))
        assert (point.min, point.max) == (values.min(), values.max())
        (point,) = memory.points(name, kc_slice="code")
        assert (point.count, point.sum) == (5, pytest.approx(values[:5].sum()))
        (point,) = memory.points(name, kc_slice="long")
        assert (point.count, point.sum) == (2, pytest.approx(values[5:].sum()))
    assert not memory.points("kc.drift.operator_batch_dependence")
    assert not memory.points("kc.drift.tv_token")
    assert recorder.stats().batches == 1
    assert recorder.stats().tokens == 0


def test_one_kernel_alone_and_in_a_batch_is_another_metric(recorders, memory):
    recorder = recorders()
    alone = np.ones((4, 8), np.float32)
    recorder.compare_operator("norm", alone, alone * np.float32(1.5), of_batches=True)
    assert recorder.force_flush()
    (point,) = memory.points("kc.drift.operator_batch_dependence", kc_slice="all")
    assert (point.count, point.max, point.attributes["kc.operator"]) == (4, 0.5, "norm")
    assert not memory.points("kc.drift.operator_ulp")


def test_numpy_against_torch_and_single_rows_are_compared(recorders, memory):
    recorder = recorders()
    recorder.compare_operator("a", np.ones(8, np.float32), torch.ones(8, dtype=torch.bfloat16))
    assert recorder.force_flush()
    (point,) = memory.points("kc.drift.operator_max_abs", kc_slice="all")
    assert (point.count, point.max) == (1, 0.0)


def test_an_error_without_end_is_the_largest_float32(recorders, memory):
    """Of a row that is zero in the first output alone; a sum must stay a number, and a norm beyond float64 is none."""
    recorder = recorders()
    recorder.compare_operator("a", np.full(8, 1e300), np.full(8, -1e300))
    recorder.compare_operator("a", np.zeros(8, np.float32), np.ones(8, np.float32))
    assert recorder.force_flush()
    (point,) = memory.points("kc.drift.operator_relative", kc_slice="all")
    assert (point.count, point.sum) == (1, np.finfo(np.float32).max)
    assert recorder.stats().dropped == {"measure-failed": 1}


def test_nothing_is_raised_and_everything_is_counted(recorders, memory):
    recorder = recorders()
    good = np.ones((2, 4), np.float32)
    recorder.compare_operator("a", good, np.ones((2, 5), np.float32))
    recorder.compare_operator("a b", good, good)
    recorder.compare_operator(None, good, good)
    recorder.compare_operator("a", good.astype(int), good)
    recorder.compare_operator("a", good, good, mask=np.ones((3,)))
    recorder.compare_operator("a", good, good, attributes=[{}])
    recorder.compare_operator("a", good, object())
    broken = good.copy()
    broken[1, 2] = np.nan
    recorder.compare_operator("a", good, broken)
    assert recorder.force_flush()
    stats = recorder.stats()
    assert stats.invalid == {"shape_mismatch": 2, "operator_not_finite": 1}
    assert stats.dropped["operator-name"] == 2
    assert sum(stats.dropped.values()) == 5
    (point,) = memory.points("kc.drift.operator_ulp", kc_slice="all")
    assert point.count == 1


def test_operators_that_no_clause_names_are_recorded_while_there_is_room(recorders, contract, memory):
    plain = len(QUANTITIES) + len(SAMPLING) - len(OPERATORS)
    made = contract(numerical=[ULP], observability={"max_series": 8 * plain + 14 * len(OPERATORS) + len(PLACES)})
    assert SliceTable.of(made).more_operators == 2
    recorder = recorders(contract=made)
    ones = np.ones((2, 4))
    for name in ("a", "b", "c", "attention", "a"):
        recorder.compare_operator(name, ones, ones)
    assert recorder.force_flush()
    counts = {p.attributes["kc.operator"]: p.count for p in memory.points("kc.drift.operator_ulp", kc_slice="all")}
    assert counts == {"a": 4, "b": 2, "attention": 2}
    assert recorder.stats().dropped == {"too-many-operators": 1}
    assert SliceTable.of(contract()).more_operators == 64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_outputs_on_a_gpu_are_compared_there(recorders, memory, outputs):
    """The same numbers as on the host, without the caller waiting for the device."""
    train, inference = outputs
    recorder = recorders()
    mask = torch.ones(3, 5, device="cuda")
    recorder.compare_operator("a", train.cuda(), inference.cuda(), mask=mask)
    recorder.compare_operator("b", train, inference)
    assert recorder.force_flush()
    for name in ("ulp", "relative"):
        points = memory.points(f"kc.drift.operator_{name}", kc_slice="all")
        ours, theirs = sorted(points, key=lambda point: point.attributes["kc.operator"])
        assert (ours.count, ours.sum) == (theirs.count, pytest.approx(theirs.sum, rel=1e-9))
