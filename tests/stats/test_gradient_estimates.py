"""The bias of a policy gradient itself, from pairs of scores: beside the truth of small softmax policies."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from examples.rl_bias.long_horizons import LongPair, estimate
from kc_otel.stats.gradient_estimates import estimated_gradient_bias


@pytest.mark.parametrize(
    ("horizon", "sequences"), [(64, 4000), (1024, 4000), pytest.param(4096, 16_000, marks=pytest.mark.slow)]
)
def test_the_bias_is_within_three_times_the_truth(horizon, sequences):
    pair = LongPair.at(horizon)
    truth = np.linalg.norm(pair.bias)
    for seed in range(2):
        found = estimate(pair, *pair.drawn(sequences, seed))
        assert found.lower <= truth <= found.upper <= 3.0 * truth
        assert found.norm >= truth / 3.0


@pytest.mark.slow
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_limits_hold_the_truth_as_often_as_they_say(confidence):
    """Of 150 samples of 500 sequences, but for what chance leaves."""
    pair, runs, missed = LongPair.at(256), 150, 0
    truth = np.linalg.norm(pair.bias)
    for seed in range(runs):
        log_ratio, rewards, scores = pair.drawn(500, seed)
        advantage = rewards - pair.reward(pair.p)
        found = estimated_gradient_bias(log_ratio, advantage, scores, confidence=confidence)
        missed += not found.lower <= truth <= found.upper
    assert missed <= runs * (1.0 - confidence) + 3.0 * np.sqrt(runs * confidence * (1.0 - confidence))


def test_identical_kernels_have_no_bias():
    """Whatever the scores are."""
    found = estimated_gradient_bias(np.zeros(50), np.ones(50), np.random.default_rng(0).normal(size=(50, 4)))
    assert (found.norm, found.lower, found.upper) == (0.0, 0.0, 0.0)


def test_both_gram_matrices_say_the_same():
    """Fewer sequences than numbers, or more: zeros behind the scores change nothing."""
    rng = np.random.default_rng(0)
    scores, log_ratio = rng.normal(size=(30, 5)), rng.normal(-0.02, 0.2, 30)
    wide = np.concatenate([scores, np.zeros((30, 100))], axis=1)
    first, second = (estimated_gradient_bias(log_ratio, np.ones(30), matrix) for matrix in (scores, wide))
    assert (first.norm, first.lower, first.upper) == pytest.approx((second.norm, second.lower, second.upper))


def grouped(seed, prompts=40, rollouts=16):
    """Sequences whose g has a mean of its own for each prompt, and 0.05 e_1 overall: log ratios, advantages, scores."""
    rng = np.random.default_rng(seed)
    prompt = np.repeat(np.arange(prompts), rollouts)
    g = rng.normal(0.0, 0.6, (prompts, 6))[prompt] + rng.normal(0.0, 1.0, (prompt.size, 6))
    g[:, 0] += 0.05
    return np.full(prompt.size, -math.log(2.0)), np.full(prompt.size, 2.0), g, prompt  # (1 - W) A = 1


def test_only_pairs_of_different_prompts_count():
    """As if independent, rollouts put the lower limit above the truth in over half of the runs; by prompt in none."""
    wrong = {True: 0, False: 0}
    for seed in range(40):
        log_ratio, advantage, scores, prompt = grouped(seed)
        for known in wrong:
            found = estimated_gradient_bias(log_ratio, advantage, scores, prompts=prompt if known else None)
            wrong[known] += found.lower > 0.05
            assert (found.sequences, found.prompts) == (640, 40 if known else 640)
    assert wrong[True] <= 2
    assert wrong[False] > 20


def test_prompts_of_one_rollout_are_sequences():
    """And those with equal rollouts are one of each."""
    log_ratio, advantage, scores, prompt = grouped(0)
    plain = estimated_gradient_bias(log_ratio, advantage, scores)
    apart = estimated_gradient_bias(log_ratio, advantage, scores, prompts=np.arange(prompt.size))
    assert (apart.norm, apart.lower, apart.upper) == pytest.approx((plain.norm, plain.lower, plain.upper))
    means = scores.reshape(40, 16, -1).mean(axis=1)
    whole = estimated_gradient_bias(log_ratio, advantage, scores, prompts=prompt)
    once = estimated_gradient_bias(log_ratio[:40], advantage[:40], means)
    assert (whole.norm, whole.lower, whole.upper) == pytest.approx((once.norm, once.lower, once.upper))


def test_the_lower_limit_counts_that_the_mean_of_pairs_leans_upwards():
    """Where g has one dimension U is a chi-square of one degree of freedom less its mean, and its quantile is used."""
    rng = np.random.default_rng(4)
    g = rng.normal(0.2, 1.0, 4000)
    found = estimated_gradient_bias(np.full(g.size, -math.log(2.0)), np.full(g.size, 2.0), g[:, None], confidence=0.99)
    n, mean, variance = g.size, g.mean(), g.var(ddof=1)
    pairs = (n * n * mean * mean - (g * g).sum()) / (n * (n - 1.0))
    squared = max(variance**2 - variance**2 / n, 0.0)
    alone, toward = 2.0 * squared / (n * (n - 1.0)), 4.0 * variance / n
    away = (pairs - found.lower**2) / math.sqrt(alone + toward * found.lower**2)
    freedom = variance**2 / squared
    assert away == pytest.approx((stats.chi2.ppf(0.995, freedom) - freedom) / math.sqrt(2.0 * freedom), rel=0.02)
    assert away > 1.3 * stats.norm.ppf(0.995)
