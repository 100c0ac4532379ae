"""The drift of a reward by the prompts' own baselines: its estimand, its limits, and what it gains."""

from __future__ import annotations

import numpy as np
import pytest

from kc_otel.stats import Binned, estimated_reward_drift, reward_sides
from kc_otel.stats.reward_intervals import reward_drift_bounds


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
