"""Assumptions of the gradient bounds, held against samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.stats import Binned, ExponentialHistogram
from kc_otel.stats.assumptions import check_assumption, linear_head_score_norm


@given(st.integers(1, 5000), st.sampled_from([0.01, 0.05]))
def test_an_assumption_that_held_is_claimed_up_to_the_exact_share(n, alpha):
    """With none of n beyond the limit, the share beyond is at most 1 - alpha^(1/n), and 0 may be."""
    found = check_assumption(Binned.of_samples(np.linspace(0.0, 1.0, n)), 1.0, name="norm", alpha=alpha)
    assert found.held
    assert found.beyond.upper == pytest.approx(1 - alpha ** (1 / n), rel=1e-6)
    assert found.beyond.lower == 0.0
    assert f"held in all {n}" in found.claim


def test_an_assumption_that_broke_says_how_often():
    """Observations beyond the limit are counted, bounded on both sides, and named."""
    values = np.concatenate([np.full(990, 1.0), np.full(10, 7.0)])
    found = check_assumption(Binned.of_samples(values), 5.0, name="|A|", alpha=0.01, ranks=(0.5, 0.995))
    assert not found.held
    assert found.maximum == 7.0
    assert found.quantiles == ((0.5, 1.0), (0.995, 7.0))
    assert found.beyond.lower < 0.01 < found.beyond.upper
    from scipy.stats import binom

    assert binom.cdf(10, 1000, found.beyond.upper) == pytest.approx(0.01, rel=1e-6)
    assert binom.sf(9, 1000, found.beyond.lower) == pytest.approx(0.01, rel=1e-6)
    assert found.claim.startswith("|A| <= 5 was broken, by 1% of 1000 observations; at 99% confidence")


def test_bins_are_conservative(histogram_of):
    """A limit inside the last bucket holds if the maximum is known to be below it, and not on the bucket's word."""
    values = np.array([1.0] * 50 + [1.01])
    bins = histogram_of(values, 0).binned()
    assert check_assumption(bins, 1.5, name="norm", alpha=0.1).held
    unknown = Binned.of_explicit([1.0, 2.0], [50, 1, 0], math.nan, math.nan, math.nan, maximum_observed=False)
    found = check_assumption(unknown, 1.5, name="norm", alpha=0.1)
    assert not found.held
    assert found.maximum == 2.0


def test_nothing_observed_is_nothing_claimed():
    """An empty sample has neither held nor broken anything."""
    found = check_assumption(ExponentialHistogram.empty(4).binned(), 1.0, name="norm", alpha=0.1)
    assert not found.held
    assert found.claim == "norm <= 1 was not checked: no observations"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_score_norm_is_that_of_the_gradient(bias, temperature):
    """The norm is that of the numerical gradient of log p(y) by the head's weights, and bias where it has one."""
    rng = np.random.default_rng(0)
    h, weight, offset = rng.normal(size=4), rng.normal(size=(5, 4)), rng.normal(size=5)

    def log_p(parameters: np.ndarray, y: int) -> float:
        w, b = parameters[:20].reshape(5, 4), parameters[20:]
        z = (w @ h + b) / temperature
        return float(z[y] - np.log(np.exp(z).sum()))

    at = np.concatenate([weight.ravel(), offset])
    for y in range(5):
        steps = 1e-6 * np.eye(25)
        gradient = np.array([(log_p(at + s, y) - log_p(at - s, y)) / 2e-6 for s in steps])
        expected = np.linalg.norm(gradient if bias else gradient[:20])
        found = linear_head_score_norm(weight @ h + offset, np.array(y), h, temperature=temperature, bias=bias)
        assert float(found) == pytest.approx(expected, rel=1e-6)


@given(st.integers(0, 2**32 - 1))
def test_score_norm_is_at_most_sqrt_two_times_the_input(seed):
    """||e_y - p|| is at most sqrt(2), for every row of a batch; excluded tokens take no part."""
    rng = np.random.default_rng(seed)
    z = rng.normal(0, 5, (3, 2, 7))
    z[..., 6] = -np.inf
    h, y = rng.normal(size=(3, 2, 4)), rng.integers(0, 6, (3, 2))
    found = linear_head_score_norm(z, y, h)
    assert found.shape == (3, 2)
    assert (found <= math.sqrt(2) * np.linalg.norm(h, axis=-1) + 1e-12).all()
    assert found == pytest.approx(linear_head_score_norm(z[..., :6], y, h))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: check_assumption(Binned.of_samples(np.array([-1.0])), 1.0, name="|A|", alpha=0.1), "sample: -1.0"),
        (lambda: check_assumption(Binned.of_samples(np.ones(2)), -1.0, name="|A|", alpha=0.1), "limit: -1.0"),
        (lambda: check_assumption(Binned.of_samples(np.ones(2)), 1.0, name="|A|", alpha=0.0), "alpha: 0.0"),
        (lambda: check_assumption(Binned.of_samples(np.ones(2)), 1.0, name="|A|", alpha=0.1, ranks=[1.0]), "rank"),
        (lambda: linear_head_score_norm([0.0, 1.0], np.array(2), [1.0]), "tokens"),
        (lambda: linear_head_score_norm([[0.0, 1.0]], np.array(1), [1.0]), "tokens: shape"),
        (lambda: linear_head_score_norm([0.0, 1.0], np.array(1), [math.nan]), "hidden: nan"),
        (lambda: linear_head_score_norm([0.0, math.nan], np.array(1), [1.0]), "logits"),
        (lambda: linear_head_score_norm([0.0, 1.0], np.array(1), [1.0], temperature=0.0), "temperature: 0.0"),
    ],
)
def test_bad_input_is_named(call, says):
    """Each refusal names the argument and the value."""
    with pytest.raises(ValueError, match=says):
        call()
