"""Section 2: from tokens to a sequence, on kernels small enough to enumerate."""

from __future__ import annotations

import math

import pytest
from hypothesis import strategies as st

from examples.rl_bias import known_bounds
from kc_otel.stats import sequences

kernels = st.tuples(
    st.integers(0, 2**31), st.integers(2, 3), st.integers(1, 5), st.sampled_from([1e-3, 0.05, 0.5, 2.0, 6.0])
)


def test_kl_wins_on_long_sequences_and_worst_case_on_short_ones():
    """At horizon 4096 the square root of summed KL is far below the worst case; for one token it is not."""
    short, long = sequences.sequence_tv(1, half_range=0.01), sequences.sequence_tv(4096, half_range=0.01)
    assert short.name == "worst case over steps, half range"
    assert short.value == pytest.approx(math.tanh(0.005))
    assert long.name == "KL over steps, Pinsker, half range"
    assert long.value == pytest.approx(0.01 * math.sqrt(4096) / 2, rel=1e-4)
    assert sequences.tv_sequence_uniform(math.tanh(0.005), 4096) > 0.99
    assert sequences.sequence_tv(4096, half_range=0.01, token_tv_mean=1e-5).name == "on policy"
    assert sequences.sequence_tv(10, token_tv_worst=1.0).value == 1.0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: known_bounds.tv_sequence_worst_case([]), "token_tv: is empty"),
        (lambda: known_bounds.tv_sequence_worst_case([0.1, 1.1]), r"token_tv: 1\.1 is not a total variation"),
        (lambda: sequences.tv_sequence_uniform(0.1, 0), "horizon: 0"),
        (lambda: sequences.tv_sequence_uniform(0.1, 2.5), r"horizon: 2\.5"),
        (lambda: sequences.tv_sequence_uniform(0.1, True), "horizon: True"),
        (lambda: known_bounds.sequence_coupling([[0.1, math.nan]]), "log_ratio: nan"),
        (lambda: known_bounds.sequence_coupling([]), "log_ratio: is empty"),
        (lambda: known_bounds.ratio_deviation_sequence(3), "log_ratio, ratio_deviation: all are None"),
        (lambda: sequences.sequence_tv(3), "half_range, .*: all are None"),
        (lambda: sequences.sequence_tv(3, token_tv_mean=2.0), r"token_tv_mean: 2\.0"),
        (lambda: sequences.sequence_tv(3, token_kl_mean=-2.0), r"token_kl_mean: -2\.0"),
    ],
)
def test_bad_sequence_input_is_refused_by_name(call, says):
    """A ValueError names the argument and shows its value."""
    with pytest.raises(ValueError, match=says):
        call()


def test_huge_horizons_give_infinity_and_not_an_overflow():
    """A worst case beyond the range of a double is infinite."""
    assert known_bounds.ratio_deviation_sequence(10**6, log_ratio=1.0).value == math.inf


def test_a_ratio_beyond_every_float_is_infinite_and_no_error():
    """exp(T lam) overflows from 709.78 on; the bound is then inf."""
    assert known_bounds.ratio_deviation_sequence(1, log_ratio=709.9).value == math.inf
    assert math.isfinite(known_bounds.ratio_deviation_sequence(1, log_ratio=708.9).value)
