"""Tail index, from samples and from bins."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kc_otel.stats import Binned
from kc_otel.stats.binned_tails import hill_binned, magnitudes, pareto_k_binned, ratios
from kc_otel.stats.tails import _zhang_stephens, hill, pareto_k, tail_length, tail_reading

SHAPES = (-0.3, 0.0, 0.3, 0.7, 1.0, 1.5)


def quantiles(k: float, n: int) -> np.ndarray:
    """The generalised Pareto distribution's own quantiles at (i - 1/2) / n: a sample without noise."""
    u = (np.arange(1, n + 1) - 0.5) / n
    return -np.log1p(-u) if k == 0.0 else np.expm1(-k * np.log1p(-u)) / k


@pytest.mark.parametrize(
    ("k", "shape", "scale"),
    [
        (-0.3, -0.2467782543306191, 0.9835443893586929),
        (0.0, 0.03437334540487299, 0.9874132580566842),
        (0.5, 0.5021985369632885, 0.9951171179360764),
        (1.0, 0.9699833079685943, 1.0030525093899283),
        (1.5, 1.4375915383087945, 1.0112667136276794),
    ],
)
def test_fit_is_that_of_arviz(k, shape, scale):
    """Shape and scale of 200 excesses are those that arviz 0.23.4's `_gpdfit` gives, prior included."""
    fitted, sigma = _zhang_stephens(quantiles(k, 200))
    assert (200 * fitted + 5) / 210 == pytest.approx(shape, rel=1e-9)
    assert sigma == pytest.approx(scale, rel=1e-9)


@pytest.mark.parametrize(
    ("k", "expected"),
    [(-0.3, -0.22669330173316038), (0.3, 0.31712924231012946), (0.7, 0.6786439979721515), (1.2, 1.1305491440927526)],
)
def test_pareto_k_is_that_of_arviz(k, expected):
    """Threshold, tail length and k of 2000 weights are those of arviz 0.23.4's `psislw`."""
    weights = np.random.default_rng(0).permutation(quantiles(k, 2000))
    assert pareto_k(weights).k == pytest.approx(expected, rel=1e-9)
    assert pareto_k(np.log(weights), log=True).k == pytest.approx(expected, rel=1e-9)


@given(st.integers(0, 10**9))
def test_tail_length_is_the_papers(n):
    """M is n / 5 up to 225 observations and 3 sqrt(n) from there."""
    m = tail_length(n)
    exact = n / 5 if n <= 225 else 3 * math.sqrt(n)
    assert exact <= m < exact + 1


@pytest.mark.parametrize("k", SHAPES)
def test_every_estimator_recovers_the_shape_without_noise(k, histogram_of):
    """From 10 000 exact quantiles the raw and the binned fit find k to within the prior's pull; Hill does for k > 0."""
    x = quantiles(k, 10_000)
    pull = (300 * k + 5) / 310 - k
    for found in (pareto_k(x), pareto_k_binned(histogram_of(x).binned())):
        assert found.k == pytest.approx(k + pull, abs=0.035)
        assert found.error == pytest.approx((1 + found.k) / math.sqrt(found.tail))
    if k >= 0.7:
        power = (1 + k * x) ** 1.0  # of a pure power law, 1 + k x, Hill's estimator is the maximum likelihood
        assert hill(power).k == pytest.approx(k, rel=0.02)
        assert hill_binned(histogram_of(power).binned()).k == pytest.approx(k, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("k", SHAPES)
def test_estimators_recover_the_shape_of_samples(k, histogram_of):
    """Over 100 random samples of 10 000 the mean is within 0.06 of k, and the spread is what `error` says."""
    rng = np.random.default_rng(7)
    found: dict[str, list] = {"raw": [], "binned": []}
    for _ in range(100):
        u = rng.random(10_000)
        x = -np.log1p(-u) if k == 0.0 else np.expm1(-k * np.log1p(-u)) / k
        found["raw"].append(pareto_k(x))
        found["binned"].append(pareto_k_binned(histogram_of(x).binned()))
    for fits in found.values():
        ks = np.array([fit.k for fit in fits])
        assert ks.mean() == pytest.approx(k, abs=0.06)
        # The prior's share of the weight makes the spread a little smaller than the asymptotic one.
        assert ks.std() == pytest.approx(np.mean([fit.error for fit in fits]), rel=0.25)


@pytest.mark.parametrize("k", [0.3, 0.7, 1.2])
def test_binned_fit_agrees_with_scipys_likelihood(k):
    """From bins of no width the censored likelihood is the ordinary one, and its maximum is scipy's."""
    from scipy.stats import genpareto

    x = genpareto.rvs(k, size=3000, random_state=3)
    found = pareto_k_binned(Binned.of_samples(x))
    shape, _, scale = genpareto.fit(np.sort(x)[-found.tail :] - found.threshold, floc=0)
    assert found.k == pytest.approx((found.tail * shape + 5) / (found.tail + 10), abs=2e-3)
    assert found.scale == pytest.approx(scale, rel=5e-3)


@pytest.mark.parametrize("scale", [0, 2, 4])
def test_binned_fit_does_not_depend_on_the_resolution(scale, histogram_of):
    """Coarse buckets lose precision and not correctness: k of a Pareto tail stays where it was."""
    x = 1 + 0.7 * quantiles(0.7, 100_000)
    assert pareto_k_binned(histogram_of(x, scale).binned()).k == pytest.approx(0.7, abs=0.04)
    assert hill_binned(histogram_of(x, scale).binned()).k == pytest.approx(0.7, abs=0.02)


@given(st.floats(0.1, 1e3), st.integers(0, 2**32 - 1))
def test_k_does_not_depend_on_the_unit(unit, seed):
    """A tail index has no unit: multiplying all values changes scale and threshold only."""
    x = np.random.default_rng(seed).pareto(1.5, 500) + 1
    one, other = pareto_k(x), pareto_k(unit * x)
    assert other.k == pytest.approx(one.k, rel=1e-6)
    assert other.threshold == pytest.approx(unit * one.threshold)
    assert hill(unit * x).k == pytest.approx(hill(x).k, rel=1e-9)


def test_weights_of_long_sequences_do_not_overflow():
    """Logarithms of weights far beyond what a double holds have the k of the weights that they are."""
    log_w = np.log(quantiles(0.5, 1000))
    assert pareto_k(log_w + 5000.0, log=True).k == pytest.approx(pareto_k(log_w, log=True).k)


def test_equal_values_have_no_tail():
    """Where nothing exceeds the threshold the index is nan, and the reading says so."""
    found = pareto_k(np.full(1000, 2.0))
    assert math.isnan(found.k)
    assert math.isnan(pareto_k_binned(Binned.of_samples(np.full(1000, 2.0))).k)
    assert "unknown" in tail_reading(found.k)


@settings(max_examples=40)
@given(hnp.arrays(np.float64, st.integers(6, 60), elements=st.floats(-5, 5)), st.integers(1, 5))
def test_no_sample_is_too_strange(log_w, tail):
    """Ties, zeros and denormal differences give an index or nan, without a warning, raw and binned."""
    w = np.exp(log_w)
    bins = Binned.of_samples(log_w)
    for found in (
        pareto_k(np.abs(log_w), tail=tail),
        pareto_k(log_w, log=True, tail=tail),
        hill(w, tail=tail),
        pareto_k_binned(magnitudes(bins), tail=tail),
        pareto_k_binned(ratios(bins), tail=tail),
        hill_binned(ratios(bins), tail=tail),
    ):
        assert math.isnan(found.k) == math.isnan(found.error)
        assert math.isnan(found.k) or found.tail >= 5


@pytest.mark.parametrize(
    ("k", "word"),
    [(-0.1, "ends"), (0.49, "finite variance"), (0.5, "usable"), (0.7, "no practical number"), (1.0, "no finite mean")],
)
def test_reading_has_the_papers_thresholds(k, word):
    """The sentence changes at 0, 0.5, 0.7 and 1."""
    assert word in tail_reading(k)


def test_bins_of_log_ratios_become_those_of_magnitudes_and_weights(histogram_of):
    """The tail of |l| and of w can be had from the histogram of l, counts intact, edges around the values."""
    l = np.random.default_rng(1).standard_t(3, 5000) * 0.1  # noqa: E741
    bins = histogram_of(l).binned()
    for folded, value in ((magnitudes(bins), np.abs(l)), (ratios(bins), np.exp(l))):
        assert folded.total == folded.count.sum() == 5000
        assert folded.maximum == pytest.approx(value.max())
        assert pareto_k_binned(folded).k == pytest.approx(pareto_k(value).k, abs=0.1)
        # Within a bucket's factor of 2^(1/16), or of its exponential for w.
        mean = float(folded.count @ ((folded.lower + folded.upper) / 2)) / 5000
        assert mean == pytest.approx(value.mean(), rel=0.02)


def test_folded_edges_are_those_of_the_absolute_value():
    """A bin left of zero is mirrored, one across zero begins at zero, and the extremes follow."""
    edges = [-2.0, -1.0, -0.5, 0.25, 1.0, 1.5]
    bins = Binned.of_explicit(edges, [0, 3, 0, 2, 0, 4, 0], math.nan, -2.0, 1.5)
    folded = magnitudes(bins)
    assert list(zip(folded.lower, folded.upper, folded.count, strict=True)) == [
        (0.0, 0.5, 2),
        (1.0, 1.5, 4),
        (1.0, 2.0, 3),
    ]
    assert (folded.minimum, folded.maximum, folded.maximum_observed) == (0.0, 2.0, False)
    logs = ratios(bins)
    assert logs.lower.tolist() == pytest.approx([math.exp(-2), math.exp(-0.5), math.e])
    assert logs.upper.tolist() == pytest.approx([math.exp(-1), math.exp(0.25), math.exp(1.5)])


def test_training_kernels_own_samples_have_light_weights():
    """Weights of a proper pair of kernels have k of at most 1, because Q(w > t) <= 1 / t."""
    rng = np.random.default_rng(0)
    q = rng.dirichlet(np.full(5000, 0.05))
    p = rng.dirichlet(np.full(5000, 0.05))
    token = rng.choice(5000, 50_000, p=q)
    w = p[token] / q[token]
    for t in (1.0, 3.0, 10.0, 100.0):
        assert (w > t).mean() <= 1 / t
    assert pareto_k(w).k < 1.1


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: pareto_k([1.0, math.nan]), "values: nan"),
        (lambda: pareto_k([]), "values: is empty"),
        (lambda: pareto_k([[1.0]]), "values: shape"),
        (lambda: pareto_k([1.0, 2.0, 3.0], tail=3), "tail: 3"),
        (lambda: pareto_k([1.0, math.inf], log=True), "values: inf"),
        (lambda: hill(np.linspace(-9, -1, 100)), "threshold"),
        (lambda: tail_length(-1), "samples: -1"),
        (lambda: pareto_k_binned(Binned.of_samples(np.zeros(0))), "sample: is empty"),
    ],
)
def test_bad_input_is_named(call, says):
    """Each refusal names the argument and the value."""
    with pytest.raises(ValueError, match=says):
        call()
