"""A drift divides among components so that the shares add up, with intervals that hold what is true."""

from __future__ import annotations

import numpy as np
import pytest

from kc_otel.diagnose.above_noise import shares_of


def test_shares_add_up():
    def value(put_in):
        return np.array([1.0, 2.0, 3.0]) * ((0 in put_in) + (1 in put_in) + ({0, 1} <= put_in))

    found = shares_of(["a", "b", "idle"], value, alpha=0.05)
    shares = {part.name: part.share.estimate for part in found.components}
    assert shares == pytest.approx({"a": 0.5, "b": 0.5, "idle": 0.0})


@pytest.mark.slow
@pytest.mark.parametrize(("sequences", "alpha", "least"), [(8, 0.01, 0.94), (16, 0.01, 0.955), (40, 0.1, 0.86)])
def test_an_interval_holds_the_share_of_the_population(sequences, alpha, least):
    """Of heavy-tailed parts with few sequences too; never so wide that it says nothing."""
    rng = np.random.default_rng(0)
    held, widths = [], []
    for seed in range(400):
        parts = np.exp(rng.normal(0.0, 0.8, (sequences, 2))) * (3.0, 1.0)
        found = shares_of(["a", "b"], lambda put_in, p=parts: p[:, sorted(put_in)].sum(1), alpha=alpha, seed=seed)
        share = next(part.share for part in found.components if part.name == "a")
        held.append(share.lower <= 0.75 <= share.upper)
        widths.append(share.upper - share.lower)
    assert least < np.mean(held)
    assert np.mean(widths) < 0.45


@pytest.mark.slow
@pytest.mark.parametrize("saturating", [lambda x: np.minimum(x, 9.0), lambda x: 1.0 - np.exp(-x / 6.0), np.sqrt])
def test_drawing_orders_is_part_of_the_interval(saturating):
    rng = np.random.default_rng(1)
    sizes = np.array([8.0, 4.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0])

    def value_of(scale):
        return lambda put_in: scale * saturating(sum(sizes[index] for index in put_in))

    everything = range(len(sizes))
    orders = [rng.permutation(len(sizes)) for _ in range(20_000)]
    truth = np.zeros(len(sizes))
    for order in orders:
        truth[order] += np.diff(saturating(np.cumsum(sizes[order])), prepend=0.0) / len(orders)
    truth /= truth.sum()
    held = []
    for seed in range(100):
        scale = np.exp(rng.normal(0.0, 0.5, 16))
        found = shares_of([str(index) for index in everything], value_of(scale), alpha=0.1, seed=seed)
        held += [part.share.lower <= truth[int(part.name)] <= part.share.upper for part in found.components]
    assert np.mean(held) > 0.85


def test_shares_of_few_components_are_exact():
    value = {frozenset(): 0.0, frozenset({0}): 1.0, frozenset({1}): 0.0, frozenset({2}): 0.0}
    value |= {frozenset({0, 1}): 4.0, frozenset({0, 2}): 1.0, frozenset({1, 2}): 0.0, frozenset({0, 1, 2}): 6.0}
    runs = []
    found = shares_of(["a", "b", "c"], lambda put_in: runs.append(put_in) or np.full(4, value[put_in]), alpha=0.05)
    assert len(runs) == 8
    shares = {part.name: 6.0 * part.share.estimate for part in found.components}
    assert shares == pytest.approx({"a": 19 / 6, "b": 13 / 6, "c": 4 / 6})


def test_nothing_to_divide_has_no_shares():
    found = shares_of(["a"], lambda _: np.zeros(3), alpha=0.05)
    assert found.components[0].share.estimate == 0.0
