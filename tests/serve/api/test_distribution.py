"""Distributions on a logarithmic axis keep every observation and its size."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.serve.api.routes_history import distribution_of
from kc_otel.stats import Binned

VALUES = st.lists(st.one_of(st.just(0.0), st.floats(-1e6, 1e6).filter(lambda x: abs(x) > 1e-9)), max_size=40)


@given(VALUES)
def test_every_observation_is_counted_once(values: list[float]) -> None:
    """Positive, negative and zero add up to all of them."""
    seen = distribution_of(Binned.of_samples(np.array(values)))
    assert seen["total"] == len(values) == sum(seen["above"]) + sum(seen["below"]) + seen["zero"]
    assert sum(seen["above"]) == sum(value > 0 for value in values)
    assert sum(seen["below"]) == sum(value < 0 for value in values)
    assert len(seen["above"]) == len(seen["below"]) == max(len(seen["edges"]) - 1, 0)


@given(st.floats(1e-8, 1e8))
def test_an_observation_lies_between_the_edges_of_its_bin(value: float) -> None:
    """Within rounding."""
    seen = distribution_of(Binned.of_samples(np.array([value])))
    (index,) = np.flatnonzero(seen["above"])
    assert seen["edges"][index] * (1 - 1e-6) <= value <= seen["edges"][index + 1] * (1 + 1e-6)


def test_open_ends_and_bins_over_zero_have_a_place() -> None:
    """An explicit histogram's last bin counts where it begins, and its first, around zero, as zero."""
    bins = Binned.of_explicit([1.0, 10.0], [5, 3, 2], math.nan, math.nan, math.nan)
    seen = distribution_of(bins)
    assert (seen["zero"], sum(seen["above"]), seen["mean"], seen["maximum"]) == (5, 5, None, None)
    assert seen["above"][-1] == 2


def test_nothing_has_no_bins() -> None:
    """An empty window is not an error."""
    seen = distribution_of(Binned.of_samples(np.array([])))
    assert (seen["edges"], seen["total"]) == ([], 0)
