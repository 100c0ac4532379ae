"""Section 1: from logits to one token."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kc_otel.stats import Bound, sequences, tokens

logit_pairs = st.integers(2, 12).flatmap(
    lambda v: st.tuples(
        hnp.arrays(np.float64, v, elements=st.floats(-30, 30)),
        hnp.arrays(np.float64, v, elements=st.floats(-8, 8)),
    )
)


@pytest.mark.parametrize(
    ("kl", "name"), [(0.01, "Pinsker"), (1.59, "Pinsker"), (1.60, "Bretagnolle-Huber"), (9.0, "Bretagnolle-Huber")]
)
def test_smaller_kl_bound_wins(kl, name):
    """Pinsker is named where KL is small, Bretagnolle and Huber where it is large."""
    won = tokens.tv_from_kl(kl)
    assert won.name == name
    assert won.value == min(tokens.tv_pinsker(kl), tokens.tv_bretagnolle_huber(kl))


def test_token_tv_returns_the_smallest_and_its_name():
    """Each fact wins where it is the sharpest."""
    assert tokens.token_tv(half_range=0.1, log_ratio=0.15, kl=0.5) == Bound(
        tokens.tv_from_half_range(0.1), "half range"
    )
    assert tokens.token_tv(half_range=0.1, log_ratio=0.05, kl=0.5) == Bound(
        tokens.tv_from_log_ratio_range(0.05), "log-ratio range"
    )
    assert tokens.token_tv(half_range=0.1, ratio_range=(0.01, 0.5)).name == "ratio range"
    assert tokens.token_tv(half_range=9.0, kl=0.02) == Bound(0.1, "Pinsker")


@given(logit_pairs, st.floats(-50, 50))
def test_half_range_ignores_a_constant_shift(pair, shift):
    """Half range is the smallest sup-norm of the difference over constant shifts."""
    z, drift = pair
    rho = float(tokens.half_range(z + drift, z))
    assert float(tokens.half_range(z + drift + shift, z)) == pytest.approx(rho, abs=1e-9)
    assert rho <= np.abs(drift).max() + 1e-9
    center = ((z + drift - z).max() + (z + drift - z).min()) / 2
    assert np.abs(drift - center).max() == pytest.approx(rho, abs=1e-9)


def test_half_range_takes_batches_axes_and_excluded_tokens():
    """Leading axes are kept, the vocabulary's axis can be any, and tokens that both sides exclude are left out."""
    rng = np.random.default_rng(0)
    z, drift = rng.normal(size=(3, 4, 7)), rng.normal(size=(3, 4, 7))
    expected = (drift.max(axis=-1) - drift.min(axis=-1)) / 2
    np.testing.assert_allclose(tokens.half_range(z + drift, z), expected)
    np.testing.assert_allclose(
        tokens.half_range(np.moveaxis(z + drift, -1, 0), np.moveaxis(z, -1, 0), axis=0), expected
    )
    cut = z.copy()
    cut[..., 5:] = -np.inf
    moved = cut + drift
    np.testing.assert_allclose(tokens.half_range(moved, cut), np.ptp(drift[..., :5], axis=-1) / 2)


@given(hnp.arrays(np.float64, (3, 2), elements=st.floats(0, 5)))
def test_arrays_give_what_their_elements_give(values):
    """Every elementwise bound of an array is the array of bounds."""
    for function in (
        tokens.tv_from_half_range,
        tokens.kl_from_half_range,
        tokens.kl_from_log_ratio_range,
        tokens.chi2_from_half_range,
        tokens.tv_from_log_ratio_range,
        tokens.tv_pinsker,
        tokens.tv_bretagnolle_huber,
    ):
        result = function(values)
        assert result.shape == values.shape
        np.testing.assert_allclose(result, [[function(float(x)) for x in row] for row in values])
    pairs = [[(float(x) / 5, float(x)) for x in row] for row in values]
    for function in (tokens.tv_from_ratio_range, tokens.chi2_from_ratio_range):
        np.testing.assert_allclose(function(values / 5, values), [[function(*pair) for pair in row] for row in pairs])


@pytest.mark.parametrize("rho", [1e-12, 1e-5, 9.99e-4, 1.001e-3])
def test_kl_bound_of_a_small_half_range_is_its_square_halved(rho):
    """For small drift the exact form and Hoeffding's lemma agree, without a jump between the two ways to compute it."""
    assert tokens.kl_from_half_range(rho) == pytest.approx(rho**2 / 2, rel=1e-6)


@pytest.mark.parametrize("rho", [0.0, 1e-12, 9.99e-4, 1.001e-3, 30.0, 800.0, math.inf])
def test_extremes_give_no_warning_and_no_nan(rho):
    """From no drift to any drift the bounds are ordered numbers."""
    assert 0 <= tokens.tv_from_half_range(rho) <= 1
    assert 0 <= tokens.kl_from_half_range(rho) <= rho * rho / 2
    assert tokens.chi2_from_half_range(rho) >= 0
    assert tokens.tv_from_ratio_range(0.0, 0.0) == 0.0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: tokens.tv_from_half_range(-0.5), r"half_range: -0\.5"),
        (lambda: tokens.tv_from_half_range(math.nan), "half_range: nan"),
        (lambda: tokens.kl_from_half_range(np.array([1.0, -2.0])), r"half_range: -2\.0"),
        (lambda: tokens.tv_from_half_range(np.array([])), "half_range: is empty"),
        (lambda: tokens.tv_from_ratio_range(1.5, 1.0), r"below: 1\.5"),
        (lambda: tokens.tv_from_ratio_range(0.5, -1.0), r"above: -1\.0"),
        (lambda: tokens.chi2_from_ratio_range(0.5, math.inf), "above: inf"),
        (lambda: tokens.chi2_from_ratio_range(1.5, 1.0), r"below: 1\.5"),
        (lambda: tokens.tv_from_kl(-1.0), r"kl: -1\.0"),
        (tokens.token_tv, "half_range, log_ratio, ratio_range, kl, chi2: all are None"),
        (lambda: tokens.half_range([1.0, 2.0], [1.0]), r"inference_logits: shape \(1,\)"),
        (lambda: tokens.half_range([], []), r"train_logits: shape \(0,\)"),
        (lambda: tokens.half_range([1.0, math.nan], [1.0, 2.0]), r"nan.* at \(1,\)"),
        (lambda: tokens.half_range([1.0, -math.inf], [1.0, 2.0]), r"-inf.* at \(1,\)"),
        (lambda: tokens.half_range([-math.inf], [-math.inf]), "every token is excluded"),
        (lambda: tokens.half_range([[1.0], [-math.inf]], [[1.0], [-math.inf]]), "every token is excluded"),
    ],
)
def test_bad_input_is_refused_by_name(call, says):
    """A ValueError names the argument and shows its value."""
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("size", [1e-12, 1e-8, 1e-6, 1e-5, 0.99e-4, 1.01e-4, 1e-3, 0.01])
def test_small_ratio_ranges_keep_their_digits(sign, size):
    """The excesses that KL is made of agree with their power series in exact arithmetic."""
    x = Fraction(sign * size)
    series = {
        tokens._x_log_x_excess: sum((-x) ** k / (k * (k - 1)) for k in range(2, 30)),
        tokens._minus_log_excess: sum((-x) ** k / k for k in range(2, 30)),
    }
    for function, exact in series.items():
        assert float(function(np.array([float(x)]))[0]) == pytest.approx(float(exact), rel=3e-11)


def test_what_rounding_puts_beyond_the_end_of_a_range_is_that_end():
    """A KL of -1.7e-16 is a KL of 0, and a TV of 1.0000000000000002 one of 1; a real excess is refused."""
    assert tokens.tv_pinsker(-1.7e-16) == 0.0
    assert tokens.tv_pinsker(np.array([-1.7e-16, 0.02])).tolist() == pytest.approx([0.0, 0.1])
    assert tokens.tv_from_kl(-1e-15).value == 0.0
    assert sequences.tv_sequence_uniform(1.0000000000000002, 8) == 1.0
    for wrong in (-1e-9, math.nan):
        with pytest.raises(ValueError, match="kl: "):
            tokens.tv_pinsker(wrong)
    with pytest.raises(ValueError, match=r"token_tv: 1\.000001"):
        sequences.tv_sequence_uniform(1.000001, 8)
