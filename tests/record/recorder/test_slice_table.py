"""Which slices get streams under the cap on series, and which of them a sequence is in."""

from __future__ import annotations

import numpy as np
import pytest

from kc_otel.contract.registry.clause_metrics import OPERATORS, QUANTITIES, SAMPLING
from kc_otel.contract.slices import OLDER, PLACES
from kc_otel.record.slice_table import SliceTable
from tests.tools.contracts import contract_of

PLAIN = len(QUANTITIES) + len(SAMPLING) - len(OPERATORS)
"""Streams of a slice, where no clause needs more."""
STALE = ("stale", "stale-1", "stale-2", "stale-4", "stale-8")
NOT_STALE = [False] * len(STALE)
CODE = {"where": {"task": "code"}}
LONG = {"where": {"prompt_tokens": ">= 100"}}


ULP = {"numerical": [{"id": "u", "metric": "operator_ulp", "operator": "attention", "limit": 4}]}
BY_SEQUENCE = {
    "statistical": [
        {"id": "tv", "metric": "tv_token", "unit": "sequence", "limit": 0.01},
        {"id": "share", "metric": "clip_budget_share", "limit": 0.5},
    ],
    "assumptions": {"clip": 0.2},
}
ALL_LAGS = (3 + len(OLDER)) * PLAIN


def contract(slices, max_series=2000, **parts):
    return contract_of(slices=slices, observability={"max_series": max_series}, **parts)


@pytest.mark.parametrize(
    ("parts", "max_series", "names", "places"),
    [
        (ULP, 4 * (PLAIN + len(OPERATORS)), ("all", "code", "long", "stale"), False),
        (ULP, 4 * PLAIN, ("all", "other", "stale"), False),
        (BY_SEQUENCE, 4 * (PLAIN + 2), ("all", "code", "long", "stale"), False),
        (BY_SEQUENCE, 4 * (PLAIN + 2) - 1, ("all", "other", "stale"), False),
        ({}, ALL_LAGS - 1, ("all", "code", "long", "stale"), True),
        ({}, ALL_LAGS + len(PLACES) - 1, ("all", "code", "long", *OLDER), False),
        ({}, ALL_LAGS + len(PLACES), ("all", "code", "long", *OLDER), True),
    ],
)
def test_the_cap_leaves_room_for_so_many_streams(parts, max_series, names, places):
    """What clauses need takes room from slices; lags of their own, then places, are given up before a slice is."""
    table = SliceTable.of(contract({"code": CODE, "long": LONG}, max_series, **parts))
    assert (table.names, table.places) == (names, places)


def test_lengths_come_from_the_mask():
    table = SliceTable.of(contract({"long": {"where": {"completion_tokens": ">= 100"}}}))
    assert "completion_tokens" in table.asked
    assert table.of_batch(None, [0, 2], 3, [200, 50])[:, 1].tolist() == [True, False]
    own = [{"completion_tokens": 20}, {"task": "code"}]
    assert table.of_batch(own, [0, 1], 2, [200, 200])[:, 1].tolist() == [False, True]


def test_what_older_weights_sampled_is_only_in_slices_that_select_by_lag():
    """And in `stale` and its part of that lag; what the trainer's own sampled is where it would be without."""
    slices = {"code": CODE, "old": {"where": {"lag": ">= 2"}}, "old-code": {"where": {"task": "code", "lag": ">= 1"}}}
    table = SliceTable.of(contract(slices))
    assert "lag" in table.asked
    found = table.of_batch({"task": "code"}, range(6), 6, lags=[0, 1, 2, 3, 7, 100])
    names = [{name for name, member in zip(table.names, row, strict=True) if member} for row in found]
    old = {"stale", "old", "old-code"}
    assert names == [{"all", "code"}, {"stale", "stale-1", "old-code"}, old | {"stale-2"}, old | {"stale-2"},
                     old | {"stale-4"}, old | {"stale-8"}]  # fmt: skip
    assert table.of_batch({"task": "code"}, [0], 1).tolist() == [[True, True, False, False, *NOT_STALE]]


def test_attributes_that_cannot_be_hashed_match_what_they_can():
    table = SliceTable.of(contract({"code": CODE}))
    assert table.of_sequence({"task": "code", "tags": ["a"]}).tolist() == [True, True, *NOT_STALE]


def test_remembered_rows_are_bounded():
    table = SliceTable.of(contract({"long": LONG}))
    for i in range(10_000):
        table.of_sequence({"prompt_tokens": i})
    assert len(table._known) <= 4096
    assert np.array_equal(table.of_sequence({"prompt_tokens": 100}), [True, True, *NOT_STALE])
