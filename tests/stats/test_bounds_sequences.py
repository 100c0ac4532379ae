"""Section 2: from tokens to a sequence, on kernels small enough to enumerate."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.rl_bias import known_bounds
from kc_otel.stats import sequences, tokens

kernels = st.tuples(
    st.integers(0, 2**31), st.integers(2, 3), st.integers(1, 5), st.sampled_from([1e-3, 0.05, 0.5, 2.0, 6.0])
)


def per_step(train, inference, joint):
    """TV and KL(Q||P) of each step's rows, and the probability of each prefix under Q."""
    tv = [np.abs(p - q).sum(axis=1) / 2 for p, q in zip(train, inference, strict=True)]
    kl = [(q * np.log(q / p)).sum(axis=1) for p, q in zip(train, inference, strict=True)]
    prefixes = [joint(inference[:step]) for step in range(len(inference))]
    return tv, kl, prefixes


@settings(max_examples=60, deadline=None)
@given(kernels)
def test_every_sequence_bound_holds(random_kernels, joint, divergences, log_token_ratios, kernel):
    """No pair of enumerated kernels breaks a bound on sequence total variation, KL or ratio."""
    train, inference = random_kernels(*kernel)
    horizon = len(train)
    p, q = joint(train), joint(inference)
    d = divergences(p, q)
    tv, kl, prefixes = per_step(train, inference, joint)
    worst = np.array([rows.max() for rows in tv])
    on_policy = np.array([rows @ prefix for rows, prefix in zip(tv, prefixes, strict=True)])
    kl_steps = np.array([rows @ prefix for rows, prefix in zip(kl, prefixes, strict=True)])
    log_w = log_token_ratios(train, inference)
    lam, ratios = np.abs(log_w).max(), np.exp(log_w)
    eta = np.abs(ratios - 1).max()
    slack = 1e-9

    assert d["tv"] <= known_bounds.tv_sequence_worst_case(worst) + slack
    assert known_bounds.tv_sequence_worst_case(worst) <= worst.sum() + slack
    assert d["tv"] <= sequences.tv_sequence_uniform(worst.max(), horizon) + slack
    assert d["tv"] <= min(1.0, on_policy.sum()) + slack
    assert d["tv"] <= q @ known_bounds.sequence_coupling(log_w) + slack
    assert d["tv"] == pytest.approx(q @ np.maximum(1 - np.exp(log_w.sum(axis=1)), 0), abs=1e-9)
    assert d["kl_qp"] == pytest.approx(kl_steps.sum(), abs=1e-9)
    deviation = np.abs(np.exp(log_w.sum(axis=1)) - 1).max()
    for known in ({"log_ratio": lam}, {"ratio_deviation": eta}):
        assert deviation <= known_bounds.ratio_deviation_sequence(horizon, **known).value * (1 + 1e-9) + slack

    half_range = max(tokens.half_range(np.log(a), np.log(b)).max() for a, b in zip(train, inference, strict=True))
    facts = {
        "half_range": float(half_range),
        "log_ratio": float(lam),
        "ratio_range": (min(1.0, 1 - ratios.min()), ratios.max() - 1),
        "token_tv_worst": float(worst.max()),
        "token_tv_mean": float(on_policy.mean()),
        "token_kl_mean": float(max(kl_steps.mean(), 0)),
    }
    singles = [sequences.sequence_tv(horizon, **{name: fact}) for name, fact in facts.items()]
    for bound in singles:
        assert d["tv"] <= bound.value + slack
    assert sequences.sequence_tv(horizon, **facts).value == pytest.approx(min(bound.value for bound in singles))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_worst_case_is_attained(taus):
    """With tau_t on a token that the inference kernel never samples, the worst case is the total variation."""
    p, q = np.ones(1), np.ones(1)
    for tau in taus:
        p = (p[:, None] * np.array([1 - tau, tau])).ravel()
        q = (q[:, None] * np.array([1.0, 0.0])).ravel()
    assert np.abs(p - q).sum() / 2 == pytest.approx(known_bounds.tv_sequence_worst_case(taus), abs=1e-12)
    uniform = known_bounds.tv_sequence_worst_case([taus[0]] * len(taus))
    assert sequences.tv_sequence_uniform(taus[0], len(taus)) == pytest.approx(uniform, abs=1e-12)


def test_on_policy_bound_is_attained():
    """When the kernels can part only in one step of each rollout, the average over rollouts is the total variation."""
    p = np.array([0.5 * 0.8, 0.5 * 0.2, 0.5 * 0.7, 0.5 * 0.3])
    q = np.array([0.5 * 0.9, 0.5 * 0.1, 0.5 * 0.4, 0.5 * 0.6])
    steps = [0.0, 0.5 * 0.1 + 0.5 * 0.3]
    assert np.abs(p - q).sum() / 2 == pytest.approx(sequences.sequence_tv(2, token_tv_mean=np.mean(steps)).value)


@given(st.integers(1, 20), st.floats(0.0, 3.0))
def test_ratio_deviation_is_attained(horizon, lam):
    """A sequence whose every token has the largest ratio has exactly the largest deviation."""
    product = np.prod(np.full(horizon, math.exp(lam)))
    bound = known_bounds.ratio_deviation_sequence(horizon, log_ratio=lam)
    assert bound.value == pytest.approx(product - 1, rel=1e-9, abs=1e-12)
    assert bound.name == "log-ratio range"
    eta = math.expm1(lam)
    assert known_bounds.ratio_deviation_sequence(horizon, ratio_deviation=eta).value == pytest.approx(
        bound.value, rel=1e-9
    )
    both = known_bounds.ratio_deviation_sequence(horizon, log_ratio=lam, ratio_deviation=eta / 2)
    assert both.value == pytest.approx(math.expm1(horizon * math.log1p(eta / 2)), rel=1e-9, abs=1e-12)


def test_coupling_is_attained_where_a_sequence_only_loses():
    """Values are 1 - prod min(1, w), per sequence, and exactly (1 - W)+ where no ratio exceeds one."""
    log_w = np.log(np.array([[0.5, 1.0, 0.8], [2.0, 0.5, 1.0], [1.0, 1.0, 1.0]]))
    np.testing.assert_allclose(known_bounds.sequence_coupling(log_w), [0.6, 0.5, 0.0])
    assert known_bounds.sequence_coupling([-math.inf, 0.3]) == 1.0


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
