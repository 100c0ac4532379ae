"""Operator drift against its definitions, in NumPy and torch, over dtypes; and how far routers are apart."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kc_otel.record import operator_drift
from kc_otel.record.operator_drift import as_unrelated, compare_outputs, route_disagreement

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def pairs(dtype):
    return hnp.array_shapes(min_dims=2, max_dims=2, max_side=5).flatmap(
        lambda shape: st.tuples(*[hnp.arrays(dtype, shape, elements={"allow_nan": False, "allow_infinity": False})] * 2)
    )


@given(pairs(np.float32))
def test_every_number_is_what_its_definition_says(outputs):
    train, inference = outputs
    drift = compare_outputs(train, inference)
    for row, (a, b) in enumerate(zip(train.astype(float), inference.astype(float), strict=True)):
        left, right, apart = (math.sqrt(sum(x * x for x in v)) for v in (a, b, a - b))
        assert drift.max_abs[row] == max(abs(a - b))
        if left:
            assert drift.relative[row] == pytest.approx(apart / left, rel=1e-9)
        else:
            assert drift.relative[row] == (math.inf if apart else 0.0)
        if left and right:
            assert drift.cosine[row] == pytest.approx(1 - float(a @ b) / left / right, abs=1e-9)
        else:
            assert drift.cosine[row] == (0.0 if left == right else 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_and_numpy_agree(dtype):
    torch.manual_seed(0)
    train, inference = torch.randn(7, 3, 16), torch.randn(7, 3, 16)
    train, inference = (side.to(dtype) for side in (train, train + 1e-2 * inference))
    ours = compare_outputs(train, inference)
    if dtype is torch.bfloat16:
        assert ours.ulp.max() > 0
        wide = compare_outputs(train.double().numpy(), inference.double().numpy())
        assert np.array_equal(ours.max_abs, wide.max_abs)
    else:
        theirs = compare_outputs(train.numpy(), inference.numpy())
        for name in ("max_abs", "relative", "ulp", "cosine"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-12, abs=1e-15)
    assert ours.max_abs.shape == (21,)


def test_one_ulp_of_bfloat16_is_one():
    """Neighbours in bfloat16 are one apart where the inference output is bfloat16, and 65536 where it is float32."""
    one = torch.tensor([[1.0]], dtype=torch.bfloat16)
    next_one = (one.view(torch.int16) + 1).view(torch.bfloat16)

    def apart(a, b):
        return compare_outputs(a, b).ulp[0]

    assert apart(one, next_one) == apart(one.float(), next_one) == 1
    assert apart(one, next_one.float()) == 65536
    assert apart(torch.tensor([[1.0]]), torch.tensor([[1.125]]).to(torch.float8_e4m3fn)) == 1


def test_a_row_that_is_not_finite_on_one_side_is_counted_and_left_out():
    train = np.array([[1.0, 2.0], [np.nan, 1.0], [-np.inf, 1.0], [-np.inf, 1.0]])
    inference = np.array([[1.0, 2.0], [1.0, 1.0], [-np.inf, 1.5], [0.0, 1.0]])
    for kind in (np.asarray, torch.as_tensor):
        drift = compare_outputs(kind(train), kind(inference))
        assert drift.not_finite == 2
        assert drift.max_abs.tolist() == [0.0, 0.5]


def test_large_outputs_are_worked_on_in_blocks(monkeypatch):
    rng = np.random.default_rng(0)
    train, inference = rng.normal(size=(2, 50, 8))
    whole = compare_outputs(train, inference)
    monkeypatch.setattr("kc_otel.record.operator_drift._BLOCK", 40)
    assert np.array_equal(compare_outputs(train, inference).relative, whole.relative)


@pytest.mark.parametrize(
    ("train", "inference", "said"),
    [
        (np.zeros((2, 3)), np.zeros((3, 2)), r"inference: shape \(3, 2\)"),
        (np.zeros((0, 3)), np.zeros((0, 3)), "no rows"),
        (np.zeros((1, 3), dtype=int), np.zeros((1, 3)), "train: dtype int64"),
        (torch.zeros(1, 3), np.zeros((1, 3)), "one is a torch tensor"),
    ],
)
def test_what_cannot_be_compared_is_refused(train, inference, said):
    with pytest.raises(ValueError, match=said):
        compare_outputs(train, inference)


@given(pairs(np.float32))
def test_ulps_are_those_of_the_largest_element(outputs):
    """The largest difference, over the distance from the largest |a| to the next number away from zero."""
    train, inference = outputs
    ulp = compare_outputs(train, inference).ulp
    for row, (a, b) in enumerate(zip(train, inference, strict=True)):
        largest, apart = np.abs(a).max(), np.abs(a.astype(float) - b.astype(float)).max()
        if largest > 1e38:  # its next number is infinite
            continue
        if not largest:
            assert ulp[row] == (math.inf if apart else 0.0)
        else:
            assert ulp[row] == pytest.approx(apart / float(np.spacing(largest)), rel=1e-12)


def test_rounding_alone_costs_half_a_unit_and_cancellation_adds_no_more():
    """An output rounded to bfloat16 is at most 0.5 ulp off, also where single elements cancel."""
    torch.manual_seed(0)
    exact = torch.randn(200, 64, dtype=torch.float64)
    assert 0.4 < compare_outputs(exact, exact.bfloat16()).ulp.max() <= 0.5
    exact[:, 0] = 1e-9
    other = exact.clone()
    other[:, 0] = -1e-9
    assert compare_outputs(exact.bfloat16(), other.bfloat16()).ulp.max() < 1e-5


def test_masked_rows_do_not_count():
    """The mask covers the first axes; what is under it may be anything, and the rows say where numbers come from."""
    rng = np.random.default_rng(0)
    train = rng.normal(size=(3, 4, 2, 8))
    inference = train + 1e-3
    mask = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    inference[mask == 0] = np.nan
    for kind in (np.asarray, torch.as_tensor):
        drift = compare_outputs(kind(train), kind(inference), mask=kind(mask))
        assert drift.not_finite == 0
        assert drift.rows.tolist() == [0, 1, 2, 3, 4, 5, 8, 9]
        assert drift.max_abs == pytest.approx(np.full(8, 1e-3))
        assert compare_outputs(kind(train), kind(inference), mask=kind(mask * 0)).max_abs.size == 0
    inference[0, 0, 1, 3] = np.inf
    drift = compare_outputs(train, inference, mask=mask)
    assert (drift.not_finite, drift.rows.tolist()) == (1, [0, 2, 3, 4, 5, 8, 9])
    with pytest.raises(ValueError, match=r"mask: shape \(4, 3\) is not that of .* \(3, 4, 2\)"):
        compare_outputs(train, inference, mask=mask.T)


def test_it_is_the_share_of_experts_that_the_other_did_not_choose(monkeypatch):
    """Against sets, one token and layer at a time, whatever the order and however many blocks it takes."""
    monkeypatch.setattr(operator_drift, "_COMPARISONS_PER_BLOCK", 100)
    numbers = np.random.default_rng(0)
    ours, theirs = (np.argsort(numbers.random((50, 3, 16)), axis=-1)[..., :4].astype(np.uint8) for _ in range(2))
    expected = [
        [1 - len(set(a) & set(b)) / 4 for a, b in zip(left.tolist(), right.tolist(), strict=True)]
        for left, right in zip(ours, theirs, strict=True)
    ]
    np.testing.assert_allclose(route_disagreement(ours, theirs), expected)
    assert (route_disagreement(ours, ours[..., ::-1]) == 0).all()


@pytest.mark.parametrize(
    "wrong", [np.zeros((2, 3)), np.zeros((2, 3, 2)), np.zeros((2, 3, 4), int), np.zeros((2, 3, 0), int)]
)
def test_what_is_no_routes_is_refused(wrong):
    with pytest.raises(ValueError, match="no experts' ids"):
        route_disagreement(np.zeros((2, 3, 0) if wrong.shape[-1] == 0 else (2, 3, 2), int), wrong)


def test_what_says_of_each_expert_whether_it_was_chosen_is_refused():
    """Zeros and ones are experts' ids, too: two kernels would agree on nearly all of them."""
    ours = np.zeros((5, 2, 8), int)
    ours[..., :2] = 1
    with pytest.raises(ValueError, match="train: names an expert twice for one token; give the ids of the k"):
        route_disagreement(ours, ours[..., ::-1])
    assert np.isnan(route_disagreement([[[-1, -1]]], [[[-1, -1]]])).all()


@pytest.mark.parametrize("shift", ["token", "layer"])
def test_routes_of_another_token_or_layer_differ_as_chance_does(shift):
    """1 - k/E, also where some experts are busier; a tenth of the choices that differ is drift."""
    numbers = np.random.default_rng(1)
    scores = numbers.gumbel(size=(400, 3, 16)) + numbers.normal(size=(1, 3, 16))
    ours = np.argsort(-scores, axis=-1)[..., :2]
    theirs = np.argsort(-scores - 0.3 * numbers.normal(size=scores.shape), axis=-1)[..., :2]
    apart = route_disagreement(ours, theirs)
    assert 0.02 < apart.mean() < 0.3
    assert not as_unrelated(ours, theirs, apart).any()
    other = np.roll(theirs, 1, axis=0 if shift == "token" else 1)
    assert as_unrelated(ours, other, route_disagreement(ours, other)).all()
    few = slice(0, 20)
    assert not as_unrelated(ours[few], other[few], route_disagreement(ours[few], other[few])).any()
