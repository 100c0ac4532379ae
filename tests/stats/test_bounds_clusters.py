"""Sequences as the unit: their means, and the design effect."""

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
        (lambda: design_effect([0.2], [1]), "lengths: has 1 sequence"),
    ],
)
def test_bad_cluster_input_is_refused_by_name(call, says):
    """A ValueError names the argument and shows its value."""
    with pytest.raises(ValueError, match=says):
        call()
