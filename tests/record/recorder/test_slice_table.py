from __future__ import annotations

import numpy as np

from kc_otel.contract.registry.clause_metrics import OPERATORS, QUANTITIES, SAMPLING
from kc_otel.record.slice_table import SliceTable
from tests.tools.contracts import contract_of


def contract(slices, max_series=2000):
    return contract_of(slices=slices, observability={"max_series": max_series})


STALE = ("stale", "stale-1", "stale-2", "stale-4", "stale-8")
NOT_STALE = [False] * len(STALE)
CODE = {"where": {"task": "code"}}
LONG = {"where": {"prompt_tokens": ">= 100"}}


def test_sequences_count_in_every_slice_they_match():
    table = SliceTable.of(contract({"code": CODE, "long": LONG}))
    attributes = [{"task": "code", "prompt_tokens": 200}, {"task": "prose"}, {"task": "code"}]
    assert table.names == ("all", "code", "long", *STALE)
    membership = table.of_batch(attributes, [0, 1, 2], 3)
    assert membership.tolist() == [
        [*row, *NOT_STALE] for row in ([True, True, True], [True, False, False], [True, True, False])
    ]


def test_one_mapping_is_for_all():
    table = SliceTable.of(contract({"code": CODE}))
    assert table.of_batch({"task": "code"}, [0, 1], 2).tolist() == [[True, True, *NOT_STALE]] * 2
    assert table.of_batch(None, [0, 1], 2).tolist() == [[True, False, *NOT_STALE]] * 2


def test_lengths_come_from_the_mask():
    table = SliceTable.of(contract({"long": {"where": {"completion_tokens": ">= 100"}}}))
    assert table.by_length
    assert table.of_batch(None, [0, 2], 3, [200, 50])[:, 1].tolist() == [True, False]
    own = [{"completion_tokens": 20}, {"task": "code"}]
    assert table.of_batch(own, [0, 1], 2, [200, 200])[:, 1].tolist() == [False, True]


def test_what_older_weights_sampled_is_only_in_slices_that_select_by_lag():
    """And in `stale` and its part of that lag; what the trainer's own sampled is where it would be without."""
    slices = {"code": CODE, "old": {"where": {"lag": ">= 2"}}, "old-code": {"where": {"task": "code", "lag": ">= 1"}}}
    table = SliceTable.of(contract(slices))
    assert table.by_lag
    found = table.of_batch({"task": "code"}, range(6), 6, lags=[0, 1, 2, 3, 7, 100])
    names = [{name for name, member in zip(table.names, row, strict=True) if member} for row in found]
    old = {"stale", "old", "old-code"}
    assert names == [{"all", "code"}, {"stale", "stale-1", "old-code"}, old | {"stale-2"}, old | {"stale-2"},
                     old | {"stale-4"}, old | {"stale-8"}]  # fmt: skip
    assert table.of_batch({"task": "code"}, [0], 1).tolist() == [[True, True, False, False, *NOT_STALE]]


def test_slices_over_the_cap_are_counted_as_other():
    declared = {f"s{i}": {"where": {"task": f"t{i}"}} for i in range(5)}
    table = SliceTable.of(contract(declared, max_series=5 * (len(QUANTITIES) + len(SAMPLING) - len(OPERATORS)) + 3))
    assert table.names == ("all", "s0", "s1", "other", "stale")
    assert table.over == ("s2", "s3", "s4")
    membership = table.of_batch([{"task": "t1"}, {"task": "t3"}, {"task": "t4"}, {}], range(4), 4)
    assert membership[:, 3].tolist() == [False, True, True, False]


def test_attributes_that_cannot_be_hashed_match_what_they_can():
    table = SliceTable.of(contract({"code": CODE}))
    assert table.of_sequence({"task": "code", "tags": ["a"]}).tolist() == [True, True, *NOT_STALE]


def test_remembered_rows_are_bounded():
    table = SliceTable.of(contract({"long": LONG}))
    for i in range(10_000):
        table.of_sequence({"prompt_tokens": i})
    assert len(table._known) <= 4096
    assert np.array_equal(table.of_sequence({"prompt_tokens": 100}), [True, True, *NOT_STALE])
