"""A drift divides among components so that the shares add up, with intervals that hold what is true."""

from __future__ import annotations

import numpy as np
import pytest

from kc_otel.diagnose.shares import shares_of


def test_shares_add_up_and_interaction_is_said():
    """Two components that make a third of the drift only together share it."""

    def value(put_in):
        return np.array([1.0, 2.0, 3.0]) * ((0 in put_in) + (1 in put_in) + ({0, 1} <= put_in))

    found = shares_of(["a", "b", "idle"], value, alpha=0.05)
    shares = {each.name: each.share.estimate for each in found.components}
    assert shares == pytest.approx({"a": 0.5, "b": 0.5, "idle": 0.0})
    assert found.interaction == pytest.approx(1 / 3)
    assert found.components[0].without == pytest.approx(2 / 3)


def test_an_interval_holds_the_share_of_the_population():
    """At 90 %, about nine of ten bootstrap intervals over 40 sequences do."""
    rng = np.random.default_rng(0)
    held = 0
    for seed in range(100):
        parts = rng.gamma(2.0, (3.0, 1.0), (40, 2))
        found = shares_of(["a", "b"], lambda put_in, p=parts: p[:, sorted(put_in)].sum(1), alpha=0.1, seed=seed)
        share = next(each.share for each in found.components if each.name == "a")
        held += share.lower <= 0.75 <= share.upper
    assert 80 <= held <= 98


def test_nothing_to_divide_has_no_shares():
    """A drift of zero is divided into zeros, not into NaN."""
    found = shares_of(["a"], lambda _: np.zeros(3), alpha=0.05)
    assert (found.components[0].share.estimate, found.interaction) == (0.0, 0.0)
