"""Routes of a mixture of experts: how far apart two routers are, by token and layer."""

from __future__ import annotations

import numpy as np
import pytest

from kc_otel.record import operator_drift as operator_rows
from kc_otel.record.operator_drift import as_unrelated, route_disagreement


def test_it_is_the_share_of_experts_that_the_other_did_not_choose(monkeypatch):
    """Against sets, one token and layer at a time, whatever the order and however many blocks it takes."""
    monkeypatch.setattr(operator_rows, "_COMPARISONS_PER_BLOCK", 100)
    numbers = np.random.default_rng(0)
    ours, theirs = (np.argsort(numbers.random((50, 3, 16)), axis=-1)[..., :4].astype(np.uint8) for _ in range(2))
    expected = [
        [1 - len(set(a) & set(b)) / 4 for a, b in zip(left.tolist(), right.tolist(), strict=True)]
        for left, right in zip(ours, theirs, strict=True)
    ]
    np.testing.assert_allclose(route_disagreement(ours, theirs), expected)
    assert (route_disagreement(ours, ours[..., ::-1]) == 0).all()


def test_places_without_a_choice_are_not_known():
    """A negative id on either side: the layer has no experts, or the token was not computed."""
    found = route_disagreement([[[0, 1], [2, 3]]], [[[0, 1], [-1, -1]]])
    np.testing.assert_array_equal(found, [[0.0, np.nan]])


@pytest.mark.parametrize(
    "wrong", [np.zeros((2, 3)), np.zeros((2, 3, 2)), np.zeros((2, 3, 4), int), np.zeros((2, 3, 0), int)]
)
def test_what_is_no_routes_is_refused(wrong):
    """Shapes that differ, numbers that are no ids, and no experts at all."""
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
