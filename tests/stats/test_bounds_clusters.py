"""Sequences as the unit: their means."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.stats import sequence_means

groups = st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=6), min_size=2, max_size=12)


def flat(parts):
    return np.concatenate(parts), np.array([len(part) for part in parts])


@given(groups)
def test_sequence_means_are_those_of_a_loop(parts):
    """Means and sums per sequence, whatever the lengths."""
    values, lengths = flat(parts)
    assert sequence_means(values, lengths) == pytest.approx([np.mean(part) for part in parts], abs=1e-15)
    assert sequence_means(values, lengths, per="sum") == pytest.approx([np.sum(part) for part in parts])


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
    ],
)
def test_bad_cluster_input_is_refused_by_name(call, says):
    """A ValueError names the argument and shows its value."""
    with pytest.raises(ValueError, match=says):
        call()
