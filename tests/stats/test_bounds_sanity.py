"""Rules between estimators."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kc_otel.stats.sanity import consistency, gaussian_chi2, gaussian_kl, gaussian_tv, identity_gap


@given(hnp.arrays(np.float64, st.integers(2, 50), elements=st.floats(-5, 5)))
def test_k1_less_k3_is_the_support_deficit(log_ratio):
    """The identity holds for any log ratios, so its gap is rounding."""
    found = consistency(log_ratio)
    assert found.k1 - found.k3 == pytest.approx(found.support_deficit, abs=1e-9)
    assert identity_gap(found.k1, found.k3, 1 - found.support_deficit) == pytest.approx(0.0, abs=1e-9)
    w = np.exp(log_ratio)
    assert found.tv == pytest.approx(np.maximum(1 - w, 0).mean())
    assert found.chi2 == pytest.approx(np.square(w - 1).mean(), rel=1e-6, abs=1e-12)


def test_gap_shows_a_clipped_or_masked_number():
    """k3 taken after clipping the ratio leaves a gap."""
    l = np.random.default_rng(0).normal(-0.125, 0.5, 10_000)  # noqa: E741
    clipped = np.clip(np.exp(l), 0, 1.2)
    assert abs(identity_gap(-l.mean(), (clipped - 1 - np.log(clipped)).mean(), np.exp(l).mean())) > 0.005


@pytest.mark.parametrize("s", [0.01, 0.1, 0.5, 1.0, 2.0])
def test_gaussian_values_are_exact(s):
    """TV, KL and chi2 are the integrals over l ~ N(-s^2/2, s^2), and about 0.4 s, s^2/2 and s^2 for small s."""
    at = np.linspace(-12, 12, 200_001)
    l = -s * s / 2 + s * at  # noqa: E741
    density = np.exp(-(at**2) / 2) / math.sqrt(2 * math.pi) * (at[1] - at[0])
    assert density.sum() == pytest.approx(1)
    w = np.exp(l)
    assert gaussian_tv(s) == pytest.approx(density @ np.maximum(1 - w, 0), rel=1e-6)
    assert gaussian_kl(s) == pytest.approx(density @ (w - 1 - l), rel=1e-6)
    assert gaussian_chi2(s) == pytest.approx(density @ (w - 1) ** 2, rel=1e-6)
    if s <= 0.1:
        assert gaussian_tv(s) == pytest.approx(0.4 * s, rel=0.01)
        assert gaussian_kl(s) == pytest.approx(s * s / 2)
        assert gaussian_chi2(s) == pytest.approx(s * s, rel=0.02)


@pytest.mark.parametrize("s", [0.01, 0.1, 0.5])
def test_gaussian_log_ratios_agree(s):
    """Samples of a Gaussian are found to agree, with ratios near one."""
    found = consistency(np.random.default_rng(1).normal(-s * s / 2, s, 50_000))
    assert found.agrees
    assert (found.tv_ratio, found.kl_ratio, found.chi2_ratio) == pytest.approx((1, 1, 1), abs=0.05)
    assert found.finding.startswith("TV, KL and chi2 agree")


def test_heavy_tails_are_found_and_named():
    """A few tokens that carry the drift make TV fall behind s, and the sentence gives both tail indices."""
    rng = np.random.default_rng(2)
    l = rng.normal(0, 0.003, 20_000)  # noqa: E741
    l[:40] = -rng.pareto(1.5, 40)
    found = consistency(l)
    assert not found.agrees
    assert found.tv_ratio < 0.5
    assert "a few tokens carry the drift" in found.finding
    assert found.tail.k > 0.5 > found.weight_tail.k
    assert f"k of |l| {found.tail.k:.2f}" in found.finding


def test_a_shift_is_told_apart_from_a_tail():
    """A constant added to every log ratio is called that, and not a tail."""
    found = consistency(np.random.default_rng(3).normal(-0.1, 0.02, 20_000))
    assert not found.agrees
    assert "off by -0.0997 nats" in found.finding


def test_equal_kernels_have_nothing_to_compare():
    """Log ratios that are all zero agree."""
    found = consistency(np.zeros(100))
    assert found.agrees
    assert math.isnan(found.tv_ratio)
    assert found.finding.startswith("every log ratio is 0")


def test_tolerance_decides():
    """The same sample agrees within a wide tolerance and not within a narrow one."""
    l = np.random.default_rng(5).laplace(0, 0.05, 50_000)  # noqa: E741
    # A Laplace of scale b has E[(1 - w)_+] = b / (1 + b) / 2.
    assert consistency(l).tv_ratio == pytest.approx(0.05 / 1.05 / 2 / gaussian_tv(0.05 * math.sqrt(2)), abs=0.02)
    assert consistency(l, tolerance=0.25).agrees
    assert not consistency(l, tolerance=0.05).agrees


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: consistency([0.0]), "log_ratio: 1 values"),
        (lambda: consistency([0.0, math.nan]), "log_ratio: nan"),
        (lambda: consistency([0.0, -math.inf]), "log_ratio: -inf"),
        (lambda: consistency([[0.0, 1.0]]), "log_ratio: shape"),
        (lambda: consistency([0.0, 1.0], tolerance=0.0), "tolerance: 0.0"),
    ],
)
def test_bad_input_is_named(call, says):
    """Each refusal names the argument and the value."""
    with pytest.raises(ValueError, match=says):
        call()
