"""Requests routed between two real vLLM engines by a real evaluator's verdict on real drift."""

from __future__ import annotations

import pytest

from examples.demo.terminal import Terminal
from examples.routing.__main__ import BATCH, BF16, FP8, SLICES, run
from tests.engines._cpu import needs_fp8_cache

pytestmark = [pytest.mark.slow, needs_fp8_cache]


@pytest.fixture(scope="module")
def served():
    """The example's own run: requests by (slice, kernel) before the route, with it, and without an evaluator."""
    return run(Terminal())


def test_one_slice_is_moved_and_the_rest_stays(served):
    before, after, _ = served
    assert set(before) == {(name, FP8) for name in SLICES}
    assert after == {("tables", BF16): 2 * BATCH, ("code", FP8): 2 * BATCH, ("prose", FP8): 2 * BATCH}


def test_the_route_outlives_the_evaluator(served):
    _, _, alone = served
    assert alone == {("tables", BF16): BATCH, ("code", FP8): BATCH, ("prose", FP8): BATCH}
