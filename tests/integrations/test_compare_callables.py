"""Callables side by side: functions, modules and custom torch operators, over shapes, dtypes and batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from kc_otel.integrations.operators import Case, OperatorPair, cases_over, compare_callables
from kc_otel.record.operator_drift import compare_outputs


@torch.library.custom_op("kc_otel_tests::scale", mutates_args=())
def scale(given: torch.Tensor, by: float) -> torch.Tensor:
    return given * by


def normal(shape, dtype, seed):
    return [torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)]


def attention_of_definition(query, key, value):
    """softmax(Q K^T / sqrt(d)) V in float32."""
    query, key, value = (tensor.float() for tensor in (query, key, value))
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    return scores.softmax(-1) @ value


def compared(train, inference, cases, recorder=None, *, operator="a", batch_sizes=()):
    return compare_callables(OperatorPair(operator, train, inference, cases, batch_sizes), recorder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_is_within_rounding_of_its_definition(dtype):
    cases = cases_over(lambda *case: normal(*case) * 3, [(2, 4, 32, 16), (1, 2, 8, 64)], [dtype], seeds=(0, 1))
    reports = compared(attention_of_definition, functional.scaled_dot_product_attention, cases, operator="attention")
    assert [report.case for report in reports] == [case.name for case in cases]
    for report in reports:
        found = report.summary()
        assert report.dtype == str(dtype).removeprefix("torch.")
        assert found["rows"] == (256 if "2x4" in report.case else 16)
        assert found["ulp_max"] < (2 if dtype is not torch.float32 else 64)
        assert found["relative_p50"] <= found["relative_p99.9"] <= found["relative_max"]
        assert math.isnan(found["batch_dependence_max"])


def test_modules_are_callables():
    torch.manual_seed(0)
    cases = cases_over(normal, [(6, 32)], [torch.float32])
    (apart,) = compared(nn.LayerNorm(32), nn.RMSNorm(32), cases, operator="norm")
    (equal,) = compared(nn.LayerNorm(32), nn.LayerNorm(32), cases, operator="norm", batch_sizes=(2, 6))
    assert apart.summary()["relative_p50"] > 1e-3
    assert equal.summary()["relative_max"] == 0.0
    assert set(equal.batches) == {2, 6}


@pytest.mark.slow
def test_custom_operators_of_torch_library_are_callables():
    case = Case("ones", lambda: [torch.ones(3, 4), 1.25], batched=(0,))
    right = torch.ops.kc_otel_tests.scale
    (report,) = compared(
        right, lambda given, by: right(given, by * 1.5), [case], operator="kc_otel_tests::scale", batch_sizes=(3,)
    )
    assert report.summary()["relative_max"] == pytest.approx(0.5)
    assert report.summary()["batch_dependence_max"] == 0.0


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 6), st.sampled_from(["float32", "float16", "float64"]), st.integers(0, 9))
def test_a_report_is_what_compare_outputs_says(batch, features, dtype, seed):
    def make(shape, dtype, seed):
        return [np.random.default_rng(seed).normal(size=shape).astype(dtype)]

    def other(given):
        return given * given.dtype.type(1.01)

    (report,) = compared(
        lambda given: given, other, cases_over(make, [(batch, features)], [dtype], seeds=(seed,)), operator="copy"
    )
    (given,) = make((batch, features), dtype, seed)
    expected = compare_outputs(given, other(given))
    values = report.values()
    assert np.array_equal(values["operator_ulp"], expected.ulp)
    assert np.array_equal(values["operator_relative"], expected.relative)
    assert report.summary()["ulp_max"] == expected.ulp.max()
    assert report.summary()["max_abs"] == expected.max_abs.max()


def test_each_operator_gets_a_copy_of_the_inputs():
    cases = cases_over(normal, [(4, 8)], [torch.float32])
    (report,) = compared(lambda given: given.add_(1), lambda given: given + 1, cases)
    assert report.summary()["max_abs"] == 0.0


@pytest.mark.parametrize("make", [normal, lambda *given: [array.numpy() for array in normal(*given)]])
def test_dependence_on_the_batch_is_by_size(make):
    def sensitive(given):
        return given * (1 + 1e-3 * (len(given) - 1))

    cases = cases_over(make, [(8, 16)], [torch.float32])
    (report,) = compared(sensitive, sensitive, cases, batch_sizes=(1, 2, 8))
    largest = {size: drift.relative.max() for size, drift in report.batches.items()}
    assert largest == pytest.approx({1: 0.0, 2: 1e-3, 8: 7e-3}, rel=1e-3)
    assert report.summary()["batch_dependence_max"] == pytest.approx(7e-3, rel=1e-3)
    assert report.drift.relative.max() == 0.0


def test_weights_belong_to_every_member_of_the_batch():
    weight = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    inputs = [*normal((8, 16), torch.float32, 0), weight]

    def linear(size, **options):
        case = Case("x", lambda: inputs, **options)
        (report,) = compared(functional.linear, functional.linear, [case], batch_sizes=(size,))
        return report

    assert linear(4, batched=(0,)).batches[4].relative.max() < 1e-5
    with pytest.raises(ValueError, match=r"batched: arguments \[0, 1\] have first axes of \[5, 8\]"):
        linear(2)
    with pytest.raises(ValueError, match=r"batch_sizes: 9 is not within 1\.\.8"):
        linear(9, batched=(0,))


def test_masked_rows_do_not_count():
    case = Case("x", lambda: normal((2, 3, 4), torch.float32, 0), mask=lambda: torch.tensor([[1, 1, 0], [0, 0, 0]]))
    (report,) = compared(lambda x: x, lambda x: x, [case])
    assert report.summary()["rows"] == 2


def test_everything_is_recorded_under_the_cases_attributes(recorders, memory):
    recorder = recorders(sampling=0.001)
    cases = cases_over(normal, [(4, 8)], [torch.float32], attributes={"task": "code"})
    (report,) = compared(lambda x: x, lambda x: x.bfloat16(), cases, recorder, operator="round", batch_sizes=(4,))
    assert recorder.force_flush()
    for slice in ("all", "code"):
        (point,) = memory.points("kc.drift.operator_relative", kc_slice=slice, kc_operator="round")
        assert (point.count, point.max) == (4, report.summary()["relative_max"])
        (point,) = memory.points("kc.drift.operator_batch_dependence", kc_slice=slice)
        assert point.count == 4
    assert cases[0].name == "4x8 float32 seed 0 task=code"


def test_errors_say_which_case():
    def broken(_):
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel") as caught:
        compared(broken, broken, cases_over(normal, [(2, 2)], [torch.float32]))
    assert caught.value.__notes__ == ["while comparing a on case '2x2 float32 seed 0'"]
    with pytest.raises(ValueError, match="returned str, not an array"):
        compared(str, str, cases_over(normal, [(2, 2)], [torch.float32]))
    with pytest.raises(ValueError, match="'a b' cannot name an operator"):
        OperatorPair("a b", str, str, [Case("x", list)])
    with pytest.raises(ValueError, match="cases: there is none for a"):
        OperatorPair("a", str, str, [])
