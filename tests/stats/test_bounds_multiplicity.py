"""Holm's procedure against its textbook form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.stats import holm

p_values = st.lists(
    st.one_of(st.floats(0, 1), st.floats(0, 0.02), st.sampled_from([0.0, 0.05, 0.025, 0.05 / 3, 1.0])), max_size=40
)


def textbook(p, alpha):
    """Sort; reject while the j-th smallest of m is at most alpha / (m - j + 1)."""
    failed = [False] * len(p)
    for j, index in enumerate(np.argsort(p, kind="stable")):
        if p[index] > alpha / (len(p) - j):
            break
        failed[index] = True
    return tuple(failed)


@given(p_values, st.sampled_from([0.05, 0.01, 0.5]))
def test_holm_is_the_textbook_procedure_and_one_level_describes_every_cell(p, alpha):
    result = holm(p, alpha)
    assert result.failed == textbook(p, alpha) == tuple(x <= result.level for x in p)
    assert result.level <= alpha
    if p:
        assert result.level == pytest.approx(alpha / max(len(p) - sum(result.failed), 1))
