"""Sequences as the unit: their means, both estimands, and the design effect."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.stats import (
    Binned,
    betting_interval,
    design_effect,
    sequence_mean_interval,
    sequence_means,
    token_mean_interval,
)

LEVELS = {"alpha_lower": 0.02, "alpha_upper": 0.05}
UNIT = {"low": 0.0, "high": 1.0}
groups = st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=6), min_size=2, max_size=12)


def flat(parts):
    return np.concatenate(parts), np.array([len(part) for part in parts])


@given(groups)
def test_sequence_means_are_those_of_a_loop(parts):
    """Means and sums per sequence, whatever the lengths."""
    values, lengths = flat(parts)
    assert sequence_means(values, lengths) == pytest.approx([np.mean(part) for part in parts], abs=1e-15)
    assert sequence_means(values, lengths, per="sum") == pytest.approx([np.sum(part) for part in parts])


@given(groups)
def test_sequence_mean_interval_is_that_of_the_means(parts):
    """Every sequence counts alike, and the samples are the sequences."""
    values, lengths = flat(parts)
    got = sequence_mean_interval(values, lengths, **UNIT, **LEVELS)
    means = Binned.of_samples(np.array([np.mean(part) for part in parts]))
    want = betting_interval(means, **UNIT, **LEVELS)
    assert (got.lower, got.estimate, got.upper) == pytest.approx((want.lower, want.estimate, want.upper), abs=1e-9)
    assert got.samples == len(parts)


def by_filling(parts, length, mean):
    """Log wealth against a mean over tokens: fill every sequence up with tokens of that mean, then bet on its mean."""
    n = len(parts)
    filled = [(sum(part) + mean * (length - len(part))) / length for part in parts]
    powers = range(math.floor(2 * math.log2(4 / math.sqrt(n))), math.ceil(2 * math.log2(max(n, 16))) + 1)
    bets = [2.0 ** (power / 2) for power in powers]
    weights = np.array([max(bet, 1.0) ** -0.125 for bet in bets])
    won = [np.prod([1 + c / (1 + c * mean) * (value - mean) for value in filled]) for c in bets]
    return float(weights @ won / weights.sum())


@given(groups, st.integers(6, 20))
def test_token_mean_interval_ends_where_the_filled_sequences_refute(parts, length):
    """Either side, scaled to the range, is the mean against which the filled sequences have won 1/alpha."""
    values, lengths = flat(parts)
    got = token_mean_interval(3 * values - 1, lengths, max_length=length, low=-1, high=2, **LEVELS)
    mirrored = [[1 - value for value in part] for part in parts]
    for these, bound, alpha in ((parts, (got.lower + 1) / 3, 0.02), (mirrored, (2 - got.upper) / 3, 0.05)):
        if bound < 1e-9:
            assert by_filling(these, length, 0.0) * alpha <= 1 + 1e-6
        else:
            assert by_filling(these, length, bound) * alpha == pytest.approx(1, rel=1e-4)
    assert got.estimate == pytest.approx(3 * values.mean() - 1)
    assert got.lower <= got.estimate + 1e-9
    assert got.estimate <= got.upper + 1e-9
    assert (got.samples, got.method) == (len(parts), "mixture betting on sequences")


def test_with_equal_lengths_both_estimands_are_one():
    """Where every sequence has the largest length, weighting by tokens or by sequences is the same."""
    values = np.random.default_rng(0).random(600) ** 4
    a = sequence_mean_interval(values, [6] * 100, **UNIT, **LEVELS)
    b = token_mean_interval(values, [6] * 100, max_length=6, **UNIT, **LEVELS)
    assert (a.lower, a.upper) == pytest.approx((b.lower, b.upper), abs=1e-7)


def test_a_generous_length_limit_costs_little():
    """With a limit five times the usual length the width changes by less than 1.6 times, where sequences differ."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(80, 120, 2000)
    values = np.repeat(rng.beta(0.5, 2.0, lengths.size), lengths)
    near, far = (token_mean_interval(values, lengths, max_length=length, **UNIT, **LEVELS) for length in (120, 480))
    assert near.upper - near.lower < 1.6 * (far.upper - far.lower)
    assert far.upper - far.lower < 1.6 * (near.upper - near.lower)


def test_design_effect_by_hand():
    """All alike inside a sequence: the effect is its length; four sequences count as four observations."""
    values = np.repeat([0.0, 1.0, 0.0, 1.0], 5)
    got = design_effect(values, [5] * 4)
    # B = 1/3, V = 1/4, mean(1/T) = 1/5
    assert got.effect == pytest.approx((1 / 3) / (1 / 4 / 5))
    assert got.effective_samples == pytest.approx(4 * (1 / 4) / (1 / 3))
    assert (got.sequences, got.tokens) == (4, 20)
    assert design_effect([0.0, 1.0, 1.0, 0.0], [2, 2]).effective_samples == math.inf
    assert math.isnan(design_effect([0.5, 0.5], [1, 1]).effect)


def test_design_effect_of_independent_tokens_is_one():
    """Independent tokens in many sequences of any length have an effect near 1 and count as many as there are."""
    rng = np.random.default_rng(2)
    lengths = rng.integers(10, 30, 20_000)
    got = design_effect(rng.random(lengths.sum()), lengths)
    assert got.effect == pytest.approx(1.0, abs=0.03)
    assert got.effective_samples == pytest.approx(20_000 / np.mean(1 / lengths), rel=0.03)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: sequence_means([0.1, 0.2], [1, 0, 1]), r"lengths: 0\.0 is not a number of tokens"),
        (lambda: sequence_means([0.1, 0.2], [1, 2]), "lengths: add up to 3, but there are 2 values"),
        (lambda: sequence_means([0.1, 0.2], [0.5, 1.5]), r"lengths: 0\.5"),
        (lambda: sequence_means([0.1, 0.2], [1.5, 1.0]), r"lengths: 1\.5 is not a whole number"),
        (lambda: sequence_means([0.1, math.nan], [1, 1]), "values: nan"),
        (lambda: sequence_means([], []), "values: is empty"),
        (lambda: sequence_means([[0.1]], [1]), r"values, lengths: have shapes \(1, 1\) and \(1,\)"),
        (lambda: sequence_means([0.1], [1], per="max"), "per: 'max'"),
        (lambda: sequence_mean_interval([1.2], [1], **UNIT, **LEVELS), r"values: 1\.2"),
        (lambda: sequence_mean_interval([0.2], [1], low=0, high=0, **LEVELS), r"\[0, 0\] is empty"),
        (lambda: sequence_mean_interval([0.2], [1], **UNIT, alpha_lower=0.1, alpha_upper=1.0), r"alpha_upper: 1\.0"),
        (lambda: token_mean_interval([0.2] * 3, [3], max_length=2, **UNIT, **LEVELS), "max_length: 2 is less"),
        (lambda: token_mean_interval([0.2, -1.0], [2], max_length=2, **UNIT, **LEVELS), r"values: -1\.0"),
        (
            lambda: token_mean_interval([0.2], [1], max_length=2, **UNIT, alpha_lower=0.0, alpha_upper=0.1),
            r"alpha_lower: 0\.0",
        ),
        (lambda: design_effect([0.2], [1]), "lengths: has 1 sequence"),
    ],
)
def test_bad_cluster_input_is_refused_by_name(call, says):
    """A ValueError names the argument and shows its value."""
    with pytest.raises(ValueError, match=says):
        call()
