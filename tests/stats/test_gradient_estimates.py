"""The bias of a policy gradient itself, from pairs of scores: beside the truth of small softmax policies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.rl_bias.long_horizons import LongPair, estimate
from kc_otel.stats.gradient_estimates import estimated_gradient_bias, score_sketch


@pytest.mark.slow
@pytest.mark.parametrize("horizon", [64, 1024])
def test_the_truth_is_what_many_sequences_show(horizon):
    """The example's closed forms: reward and gradient under both kernels are what sampling converges to."""
    pair = LongPair.at(horizon)
    log_ratio, rewards, scores = pair.drawn(30_000, 0)
    assert rewards.mean() == pytest.approx(pair.reward(pair.q), abs=0.01)
    assert np.exp(log_ratio).mean() == pytest.approx(1.0, abs=0.03)
    drift = ((np.exp(log_ratio) - 1.0) * rewards).mean()
    assert drift == pytest.approx(pair.reward_drift, abs=0.02)
    pushed = ((rewards - pair.reward(pair.p))[:, None] * scores).mean(axis=0)
    error = np.linalg.norm(pushed - pair.gradient(pair.q)) / np.linalg.norm(pair.gradient(pair.q))
    assert error < 0.1


@pytest.mark.parametrize(
    ("horizon", "sequences"), [(64, 4000), (1024, 4000), pytest.param(4096, 16_000, marks=pytest.mark.slow)]
)
def test_the_bias_is_within_three_times_the_truth(horizon, sequences):
    """The upper limit is, and it holds the truth."""
    pair = LongPair.at(horizon)
    truth = np.linalg.norm(pair.bias)
    for seed in range(2):
        found = estimate(pair, *pair.drawn(sequences, seed))
        assert found.lower <= truth <= found.upper <= 3.0 * truth
        assert found.norm >= truth / 3.0


@pytest.mark.slow
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_limits_hold_the_truth_as_often_as_they_say(confidence):
    """Of 150 samples of 500 sequences, but for what chance leaves; along a direction too."""
    pair, runs, missed, beside = LongPair.at(256), 150, 0, 0
    truth = np.linalg.norm(pair.bias)
    toward = pair.gradient(pair.p)
    along = pair.bias @ toward / np.linalg.norm(toward)
    for seed in range(runs):
        log_ratio, rewards, scores = pair.drawn(500, seed)
        found = estimated_gradient_bias(
            log_ratio, rewards - pair.reward(pair.p), scores, directions=toward, confidence=confidence
        )
        missed += not found.lower <= truth <= found.upper
        beside += not found.along_lower[0] <= along <= found.along_upper[0]
    room = 3.0 * np.sqrt(runs * confidence * (1.0 - confidence))
    assert missed <= runs * (1.0 - confidence) + room
    assert beside <= runs * (1.0 - confidence) + room


def test_identical_kernels_have_no_bias():
    """Whatever the scores are."""
    found = estimated_gradient_bias(np.zeros(50), np.ones(50), np.random.default_rng(0).normal(size=(50, 4)))
    assert (found.norm, found.lower, found.upper) == (0.0, 0.0, 0.0)


def test_both_gram_matrices_say_the_same():
    """Fewer sequences than numbers, or more: zeros behind the scores change nothing."""
    rng = np.random.default_rng(0)
    scores, log_ratio = rng.normal(size=(30, 5)), rng.normal(-0.02, 0.2, 30)
    wide = np.concatenate([scores, np.zeros((30, 100))], axis=1)
    first, second = (estimated_gradient_bias(log_ratio, np.ones(30), each) for each in (scores, wide))
    assert (first.norm, first.lower, first.upper) == pytest.approx((second.norm, second.lower, second.upper))


@given(st.integers(1, 40), st.integers(1, 60), st.integers(0, 10**6))
@settings(max_examples=40)
def test_a_sketch_is_linear(size, parameters, seed):
    """The sketch of a sum is the sum of the sketches, so that a sequence's tokens may be sketched one by one."""
    scores = np.random.default_rng(seed).normal(size=(3, parameters))
    sketches = score_sketch(scores, size, seed=seed)
    assert sketches.shape == (3, min(size, parameters))
    np.testing.assert_allclose(score_sketch(scores.sum(axis=0), size, seed=seed)[0], sketches.sum(axis=0), atol=1e-9)


def test_sketches_keep_inner_products_on_average():
    """Over the seeds, and each squared norm to about sqrt(2 / size)."""
    scores = np.random.default_rng(0).normal(size=(2, 2000)) + 0.5
    exact = scores @ scores.T
    found = np.array(
        [score_sketch(scores, 256, seed=seed) @ score_sketch(scores, 256, seed=seed).T for seed in range(60)]
    )
    np.testing.assert_allclose(found.mean(axis=0), exact, rtol=0.1)
    assert (found[:, 0, 0] / exact[0, 0]).std() == pytest.approx(np.sqrt(2.0 / 256), rel=0.35)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": np.ones((4, 2))}, "scores: shape"),
        ({"log_ratio": np.full(5, np.nan)}, "5 of 5 sequences have numbers that are not finite"),
        ({"directions": np.zeros((1, 2))}, "directions: shape"),
        ({"directions": np.ones((1, 3))}, "directions: shape"),
        ({"confidence": 1.5}, "confidence"),
        ({"log_ratio": [0, 0], "advantage": [1, 1], "scores": np.ones((2, 2))}, "2 sequences say nothing"),
    ],
)
def test_what_says_nothing_is_refused(change, message):
    """With the name of the argument and what to give."""
    given_all = {"log_ratio": np.zeros(5), "advantage": np.ones(5), "scores": np.ones((5, 2)), **change}
    with pytest.raises(ValueError, match=message):
        estimated_gradient_bias(**given_all)
    with pytest.raises(ValueError, match="size: 0"):
        score_sketch(np.ones(3), 0)
