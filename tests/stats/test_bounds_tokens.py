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
drifts = st.sampled_from([1e-3, 0.05, 0.5, 1.0, 3.0, 8.0])


def softmax(z):
    weight = np.exp(z - z.max())
    return weight / weight.sum()


def two_point(high_probability, low, high):
    """Q on two tokens and P = w Q with ratios low and high."""
    q = np.array([high_probability, 1 - high_probability])
    return q * np.array([high, low]), q


@given(logit_pairs)
def test_every_half_range_bound_holds(divergences, pair):
    """No pair of softmaxes breaks a bound that its half range gives."""
    z, drift = pair
    p, q = softmax(z + drift), softmax(z)
    rho = float(tokens.half_range(z + drift, z))
    d = divergences(p, q)
    slack = 1 + 1e-9
    assert d["tv"] <= tokens.tv_from_half_range(rho) * slack + 1e-12
    assert max(d["kl_pq"], d["kl_qp"]) <= tokens.kl_from_half_range(rho) * slack + 1e-12
    assert d["chi2"] <= tokens.chi2_from_half_range(rho) * slack + 1e-12
    assert 1 / (1 + d["chi2"]) >= tokens.ess_share_from_half_range(rho) / slack
    assert tokens.tv_from_half_range(rho) <= rho / 2
    assert tokens.kl_from_half_range(rho) <= rho**2 / 2


@given(logit_pairs)
def test_every_ratio_bound_holds(divergences, pair):
    """No pair of distributions breaks a bound that its own ratio range gives."""
    z, drift = pair
    p, q = softmax(z + drift), softmax(z)
    w = p / q
    a, b = max(0.0, 1 - w.min()), max(0.0, w.max() - 1)
    lam = float(np.abs(np.log(w)).max())
    d = divergences(p, q)
    slack = 1 + 1e-9
    assert d["tv"] <= tokens.tv_from_ratio_range(a, b) * slack + 1e-12
    # 1 - w.min() keeps an error of one unit in the last place of 1, which the product multiplies by b.
    assert d["chi2"] <= tokens.chi2_from_ratio_range(a, b) * slack + 1e-12 + 1e-15 * b
    assert d["tv"] <= tokens.tv_from_log_ratio_range(lam) * slack + 1e-12
    assert max(d["kl_pq"], d["kl_qp"]) <= tokens.kl_from_log_ratio_range(lam) * slack + 1e-12
    for kl in (d["kl_pq"], d["kl_qp"]):
        assert d["tv"] <= tokens.tv_pinsker(max(kl, 0.0)) * slack + 1e-7
        assert d["tv"] <= tokens.tv_bretagnolle_huber(max(kl, 0.0)) * slack + 1e-7


@given(drifts)
def test_total_variation_bound_is_attained(divergences, rho):
    """Two tokens whose probabilities swap have exactly tanh(rho/2)."""
    z = np.array([0.0, rho])
    p, q = softmax(z[::-1]), softmax(z)
    assert float(tokens.half_range(np.log(p), np.log(q))) == pytest.approx(rho)
    assert divergences(p, q)["tv"] == pytest.approx(tokens.tv_from_half_range(rho), rel=1e-9)
    assert tokens.tv_from_log_ratio_range(rho) == tokens.tv_from_half_range(rho)


@given(drifts)
def test_kl_bounds_are_attained(divergences, rho):
    """Two tokens at the extremal probability have exactly the KL that the (log-)ratio range allows."""
    d = 2 * rho
    high = 1 / d - 1 / math.expm1(d)
    q = np.array([high, 1 - high])
    p = q * np.exp([d, 0.0])
    p /= p.sum()
    assert divergences(p, q)["kl_qp"] == pytest.approx(tokens.kl_from_half_range(rho), rel=1e-6)
    assert divergences(q, p)["kl_pq"] == pytest.approx(tokens.kl_from_half_range(rho), rel=1e-6)
    p, q = two_point((1 - math.exp(-rho)) / (math.exp(rho) - math.exp(-rho)), math.exp(-rho), math.exp(rho))
    assert divergences(p, q)["kl_pq"] == pytest.approx(tokens.kl_from_log_ratio_range(rho), rel=1e-6)
    assert divergences(q, p)["kl_qp"] == pytest.approx(tokens.kl_from_log_ratio_range(rho), rel=1e-6)


@given(drifts)
def test_chi_square_bound_is_attained(divergences, rho):
    """Two tokens at the extremal probability have exactly sinh(rho)^2, and so the smallest effective sample size."""
    top = math.exp(2 * rho)
    low = (top + 1) / (2 * top)
    p, q = two_point((1 - low) / (low * (top - 1)), low, low * top)
    chi2 = divergences(p, q)["chi2"]
    assert chi2 == pytest.approx(tokens.chi2_from_half_range(rho), rel=1e-6)
    assert 1 / (1 + chi2) == pytest.approx(tokens.ess_share_from_half_range(rho), rel=1e-6)


@given(st.floats(1e-3, 0.999), st.floats(1e-3, 50))
def test_ratio_range_bounds_are_attained(divergences, a, b):
    """The two-point ratio with mean one on the ends of its range has exactly ab/(a+b) and ab."""
    p, q = two_point(a / (a + b), 1 - a, 1 + b)
    d = divergences(p, q)
    assert p.sum() == pytest.approx(1)
    assert d["tv"] == pytest.approx(tokens.tv_from_ratio_range(a, b), rel=1e-9)
    assert d["chi2"] == pytest.approx(tokens.chi2_from_ratio_range(a, b), rel=1e-9)
    assert tokens.tv_from_ratio_range(a, a) == pytest.approx(a / 2)
    assert tokens.chi2_from_ratio_range(a, a) == pytest.approx(a * a)


def test_pinsker_constant_is_attained_in_the_limit(divergences):
    """Two nearly equal coins come as near to sqrt(KL/2) as one likes."""
    p, q = np.array([0.501, 0.499]), np.array([0.499, 0.501])
    d = divergences(p, q)
    assert d["tv"] == pytest.approx(tokens.tv_pinsker(d["kl_pq"]), rel=1e-4)


def test_bretagnolle_huber_has_its_published_constant(divergences):
    """At KL = log 2 the bound is sqrt(1/2), and far out the case that comes closest stays inside it."""
    assert tokens.tv_bretagnolle_huber(math.log(2.0)) == pytest.approx(math.sqrt(0.5))
    p, q = np.array([1.0, 0.0]), np.array([math.exp(-3.0), 1 - math.exp(-3.0)])
    d = divergences(p, q)
    assert 0.97 * tokens.tv_bretagnolle_huber(d["kl_pq"]) < d["tv"] <= tokens.tv_bretagnolle_huber(d["kl_pq"])


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


@given(st.floats(0, 0.999999))
def test_half_range_for_tv_inverts(tau):
    """The half range that is enough for a total variation gives back that total variation."""
    assert tokens.tv_from_half_range(tokens.half_range_for_tv(tau)) == pytest.approx(tau, abs=1e-12)


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
        tokens.ess_share_from_half_range,
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
    assert 0 <= tokens.ess_share_from_half_range(rho) <= 1
    assert tokens.tv_from_ratio_range(0.0, 0.0) == 0.0
    assert tokens.half_range_for_tv(1.0) == math.inf


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
        (lambda: tokens.half_range_for_tv(1.2), r"tv: 1\.2 is not a total variation in \[0, 1\]"),
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
    assert tokens.half_range_for_tv(1.0 + 1e-15) == math.inf
    for wrong in (-1e-9, math.nan):
        with pytest.raises(ValueError, match="kl: "):
            tokens.tv_pinsker(wrong)
    with pytest.raises(ValueError, match=r"token_tv: 1\.000001"):
        sequences.tv_sequence_uniform(1.000001, 8)
