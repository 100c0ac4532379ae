"""Quantities of sampled tokens, against the straight formulas in float64 and high precision."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.contract.registry.clause_metrics import QUANTITIES, Origin, Unit
from kc_otel.record.measure.sampled import HIGHEST, LOWEST, SEQUENCE, TOKEN, log_ratio

LOG_RATIOS = st.floats(-60, 15, width=32)


def test_every_quantity_of_log_probabilities_is_defined_once() -> None:
    by_unit = {
        unit: {key for key, q in QUANTITIES.items() if q.source is Origin.LOGPROBS and q.per is unit} for unit in Unit
    }
    assert set(TOKEN) == by_unit[Unit.TOKEN]
    assert set(SEQUENCE) == by_unit[Unit.SEQUENCE]


@given(LOG_RATIOS)
def test_token_quantities_are_the_straight_formulas(log_w: float) -> None:
    w = math.exp(log_w)
    expected = {
        "log_ratio": log_w,
        "abs_log_ratio": abs(log_w),
        "ratio": w,
        "tv_token": max(0.0, 1 - w),
        "k3": w - 1 - log_w,
        "chi2_token": (w - 1) ** 2,
    }
    assert expected.keys() == TOKEN.keys()
    for key, value in expected.items():
        assert TOKEN[key](np.float64(log_w)) == pytest.approx(value, rel=1e-9, abs=1e-15)


@given(st.floats(2**-24, 2**-4, width=32), st.booleans())
def test_k3_keeps_its_digits_where_the_ratio_is_nearly_one(size: float, negative: bool) -> None:
    x = Fraction(-size if negative else size)
    series = sum(x**n / math.factorial(n) for n in range(2, 12))
    relative = abs(Fraction(float(TOKEN["k3"](np.float64(x)))) / series - 1)
    assert relative < 1e-8


@given(st.lists(LOG_RATIOS, min_size=1, max_size=40))
def test_sequence_quantities_are_functions_of_the_sum(log_ws: list[float]) -> None:
    total, length = math.fsum(log_ws), len(log_ws)
    w = math.exp(min(max(total, LOWEST), HIGHEST))
    expected = {
        "tv_seq": max(0.0, 1 - w),
        "log_ratio_seq": total,
        "geometric_ratio": math.exp(total / length),
        "chi2_seq": (w - 1) ** 2,
    }
    assert expected.keys() == SEQUENCE.keys()
    for key, value in expected.items():
        assert SEQUENCE[key](np.float64(total), length) == pytest.approx(value, rel=1e-9, abs=1e-15)


@given(st.integers(2, 6), st.integers(0, 2**32 - 1))
def test_means_over_the_inference_kernel_are_the_divergences(vocab: int, seed: int) -> None:
    """Weighted with Q, (1-w)+ gives the total variation, w-1-l gives KL(Q||P) and (w-1)^2 gives chi-square."""
    p, q = np.random.default_rng(seed).dirichlet(np.ones(vocab), size=2) * 0.9 + 0.1 / vocab
    log_w = np.log(p) - np.log(q)
    assert (q * TOKEN["tv_token"](log_w)).sum() == pytest.approx(np.abs(p - q).sum() / 2)
    assert (q * TOKEN["k3"](log_w)).sum() == pytest.approx((q * np.log(q / p)).sum())
    assert (q * TOKEN["chi2_token"](log_w)).sum() == pytest.approx(((p - q) ** 2 / q).sum())


def test_log_ratios_are_float32_differences() -> None:
    """The difference is taken in float32, also of half precision; float64 is rounded once, at the end."""
    train, inference = np.float16([-1.5, -2.25]), np.float16([-1.25, -3.5])
    assert log_ratio(train, inference).tolist() == [-0.25, 1.25]
    close = np.array([-1.0]), np.array([-1.0 - 1e-9])
    assert log_ratio(*close)[0] == pytest.approx(1e-9, rel=1e-6)
    assert log_ratio(*(side.astype(np.float32) for side in close))[0] == 0


def test_log_ratios_stay_finite() -> None:
    train, inference = np.array([-np.inf, -1e30, 0.0, np.nan]), np.array([-1.0, -1.0, -1e30, -1.0])
    out = log_ratio(train, inference)
    assert out[:3].tolist() == [LOWEST, LOWEST, HIGHEST]
    assert math.isnan(out[3])
    assert all(np.isfinite(quantity(out[:3])).all() for quantity in TOKEN.values())
