"""The drift of the expected reward: sides hold for every pair of kernels, intervals and limits cover, budgets too."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.record.telemetry.buckets import slots
from kc_otel.stats import Binned, estimated_reward_drift, rewards
from kc_otel.stats.rewards import reward_drift_bounds, reward_drift_interval, reward_sides


def policies(rng, spread, size=50):
    """Two softmax policies over a few sequences, as (P, Q)."""
    logits = rng.normal(0.0, 1.5, size)
    p, q = np.exp(logits + rng.normal(0.0, spread, size)), np.exp(logits)
    return p / p.sum(), q / q.sum()


def histogram(values):
    """The values after a histogram of the recorder's scale."""
    of = slots()
    counts = np.bincount(of.locate(values), minlength=of.size)
    return of.histogram(0, counts, float(values.sum()), float(values.min()), float(values.max())).binned()


@given(st.integers(0, 10**6), st.floats(0.0, 3.0), st.sets(st.integers(0, 49), max_size=30))
def test_the_sides_bound_the_drift_whatever_the_supports(seed, spread, lost):
    """E_Q[above] >= E_P[u] - E_Q[u] >= -E_Q[below]; with common support both are equalities."""
    rng = np.random.default_rng(seed)
    p, q = policies(rng, spread)
    q[sorted(lost)] = 0.0
    q /= q.sum()
    reward = rng.uniform(-2.0, 3.0, q.size)
    there = q > 0.0
    above, below = reward_sides(np.log(p[there] / q[there]), reward[there], (-2.0, 3.0)) @ q[there]
    drift = float((p - q) @ reward) / 5.0
    assert above >= drift - 1e-12
    assert below >= -drift - 1e-12
    if not lost:
        assert above == pytest.approx(drift, abs=1e-12)
        assert below == pytest.approx(-drift, abs=1e-12)


@pytest.mark.parametrize("spread", [0.6, *(pytest.param(spread, marks=pytest.mark.slow) for spread in (0.1, 1.5))])
@pytest.mark.parametrize("lost", [0, 20])
@pytest.mark.parametrize("anytime", [False, True])
def test_intervals_miss_no_more_often_than_they_say(spread, lost, anytime):
    """Of 150 samples per pair of kernels at most 10 % and what chance adds miss on either side, from histograms."""
    rng = np.random.default_rng(round(100 * spread) + lost)
    p, q = policies(rng, spread)
    q[:lost] = 0.0
    q /= q.sum()
    u = rng.integers(0, 2, q.size).astype(np.float64)
    with np.errstate(divide="ignore"):
        sides = reward_sides(np.log(p / np.where(q > 0.0, q, 1.0)), u, (0.0, 1.0))
    drift, runs, missed = float((p - q) @ u), 150, np.zeros(2)
    for _ in range(runs):
        drawn = sides[:, rng.choice(q.size, 200, p=q)]
        low, high = reward_drift_bounds(*map(histogram, drawn), alpha_lower=0.1, alpha_upper=0.1, anytime=anytime)
        missed += (low > drift, high < drift)
    assert (missed <= runs * (0.1 + 3.0 * math.sqrt(0.1 * 0.9 / runs))).all()


@given(st.lists(st.tuples(st.floats(-5, 3), st.floats(0, 1)), min_size=1, max_size=40))
def test_a_histogram_is_never_bolder_than_its_values(sequences):
    sides = reward_sides(*map(np.array, zip(*sequences, strict=True)), (0.0, 1.0))
    exact = reward_drift_bounds(*map(Binned.of_samples, sides), alpha_lower=0.05, alpha_upper=0.05)
    binned = reward_drift_bounds(*map(histogram, sides), alpha_lower=0.05, alpha_upper=0.05)
    assert binned[0] <= exact[0] + 1e-9
    assert binned[1] >= exact[1] - 1e-9


@given(st.floats(-8, 8), st.floats(0, 1))
def test_an_unknown_reward_counts_for_the_worst(log_ratio, reward):
    """A reward that is not known, or outside of its range, widens both sides at least as far as any reward would."""
    known = reward_sides([log_ratio], [reward], (0.0, 1.0))
    for unknown in (math.nan, 1.5, -0.1, math.inf):
        assert (reward_sides([log_ratio], [unknown], (0.0, 1.0)) >= known).all()


@pytest.mark.parametrize(("horizon", "times"), [(256, 7), (1024, 5), (4096, 3.5)])
def test_it_is_sharper_than_the_bound_from_total_variation(horizon, times):
    """At 4,000 sequences with 0.026 nat a token, as the handbook's table has it."""
    deviation = 0.026 * math.sqrt(horizon)
    rng = np.random.default_rng(horizon)
    drawn = rng.normal(-deviation * deviation / 2.0, deviation, 4000)
    sides = map(histogram, reward_sides(drawn, rng.integers(0, 2, 4000), (0.0, 1.0)))
    low, high = reward_drift_bounds(*sides, alpha_lower=0.00135, alpha_upper=0.00135)
    assert low < 0.0 < high
    assert np.maximum(-np.expm1(drawn), 0.0).mean() > times * (high - low) / 2.0


def test_the_interval_is_of_the_size_and_the_note_has_the_sign():
    """In the unit of the rewards; above 0 from below only where one sign is excluded."""
    p, q = policies(np.random.default_rng(1), 1.5)
    u = (p > q).astype(np.float64)
    rng = np.random.default_rng(2)
    drawn = rng.choice(q.size, 4000, p=q)
    sides = reward_sides(np.log(p / q)[drawn], 4.0 * u[drawn] - 1.0, (-1.0, 3.0))
    found = reward_drift_interval(*map(Binned.of_samples, sides), (-1.0, 3.0), alpha_lower=0.005, alpha_upper=0.005)
    truth = 4.0 * float((p - q) @ u)
    assert 0.0 < found.lower < truth < found.upper
    assert "E_P[r] - E_Q[r] is" in found.note
    worse = reward_drift_interval(
        *map(Binned.of_samples, sides[::-1]), (-1.0, 3.0), alpha_lower=0.005, alpha_upper=0.005
    )
    assert worse.lower == found.lower
    assert "is -" in worse.note


def test_from_below_each_sign_has_half_of_the_error_probability():
    """Either may be wrong: the lower side is the larger of the two at half of alpha, not at alpha."""
    rng = np.random.default_rng(3)
    log_ratio = rng.normal(-0.08, 0.4, 2000)
    reward = (rng.random(2000) < 0.5 + 0.3 * np.tanh(log_ratio)).astype(float)
    above, below = map(Binned.of_samples, reward_sides(log_ratio, reward, (0.0, 1.0)))
    found = reward_drift_interval(above, below, (0.0, 1.0), alpha_lower=0.02, alpha_upper=0.02)
    half = reward_drift_bounds(above, below, alpha_lower=0.01, alpha_upper=0.01)
    whole = reward_drift_bounds(above, below, alpha_lower=0.02, alpha_upper=0.02)
    assert found.lower == pytest.approx(max(half[0], -half[1]))
    assert 0.0 < found.lower < max(whole[0], -whole[1])
    assert found.upper == pytest.approx(max(whole[1], -whole[0]))


def drawn(seed, prompts=200, rollouts=8):
    """Prompts that are easier or harder, answers good or bad of which the good ones became a tenth likelier.

    Of a prompt with chance p of a good answer the training kernel has p (1 + 0.1 (1 - p)); the truth follows.
    """
    rng = np.random.default_rng(seed)
    easy = rng.random(prompts)
    prompt = np.repeat(np.arange(prompts), rollouts)
    good = rng.random(prompt.size) < easy[prompt]
    up, down = 1.0 + 0.1 * (1.0 - easy), 1.0 - 0.1 * easy
    ratio = np.where(good, up[prompt], down[prompt])
    return np.log(ratio), good.astype(float), prompt, 0.1 / 6.0  # E[p (1 - p)] = 1 / 6


def test_its_limits_hold_the_truth_as_often_as_they_say():
    """At 90 %, in 60 runs; and the mean of the estimates is the truth."""
    held, found = 0, []
    for seed in range(60):
        log_ratio, reward, prompt, truth = drawn(seed)
        estimate = estimated_reward_drift(log_ratio, reward, prompt, confidence=0.9)
        held += estimate.lower <= truth <= estimate.upper
        found.append(estimate.drift)
    assert held >= 47
    assert np.mean(found) == pytest.approx(truth, rel=0.05)


def test_it_is_narrower_than_what_assumes_nothing():
    """On the same sequences, at the same confidence."""
    log_ratio, reward, prompt, _ = drawn(1)
    estimate = estimated_reward_drift(log_ratio, reward, prompt)
    sides = map(Binned.of_samples, reward_sides(log_ratio, reward, (0.0, 1.0)))
    low, high = reward_drift_bounds(*sides, alpha_lower=0.005, alpha_upper=0.005)
    assert estimate.upper - estimate.lower < (high - low) / 1.5
    assert "large sample" in str(estimate)


def test_a_baseline_does_not_depend_on_its_own_sequence():
    """The mean of the others, in numbers; a prompt with one rollout, and a reward that is missing, are left out."""
    log_ratio = np.log([1.5, 0.5, 1.0, 1.2, 1.0, 1.1, 0.9])
    reward = np.array([1.0, 0.0, 0.0, 1.0, 5.0, 1.0, np.nan])
    found = estimated_reward_drift(log_ratio, reward, ["a", "a", "b", "b", "c", "b", "b"])
    first = (0.5 * (1.0 - 0.0) + -0.5 * (0.0 - 1.0)) / 2
    second = (0.0 * (0.0 - 1.0) + 0.2 * (1.0 - 0.5) + 0.1 * (1.0 - 0.5)) / 3
    assert (found.drift, found.prompts) == (pytest.approx((first + second) / 2), 2)


@given(st.floats(0.0, 0.99))
def test_a_budget_inverts_the_chain_and_one_as_wide_as_the_range_allows_everything(budget):
    assert rewards.tv_for_reward_budget(2 * budget, (-1.0, 1.0)) == pytest.approx(budget)
    assert rewards.tv_for_reward_budget(2.0 + budget, (-1.0, 1.0)) == 1.0
