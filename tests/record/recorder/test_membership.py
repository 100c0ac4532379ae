from __future__ import annotations

import numpy as np
import pytest

from kc_otel.contract.model import Contract
from kc_otel.contract.registry import OPERATORS, QUANTITIES
from kc_otel.record.slice_table import SliceTable


def contract(slices, max_series=2000):
    return Contract.model_validate(
        {
            "apiVersion": "kernel-contract/v1",
            "kind": "KernelContract",
            "metadata": {"name": "policy", "version": 1, "owner": "rl"},
            "kernels": {"train": {"engine": "torch"}, "inference": {"engine": "vllm"}},
            "slices": slices,
            "observability": {"max_series": max_series},
        }
    )


CODE = {"where": {"task": "code"}}
LONG = {"where": {"prompt_tokens": ">= 100"}}


def test_sequences_count_in_every_slice_they_match():
    """Slices may overlap, and `all` has every sequence."""
    table = SliceTable.of(contract({"code": CODE, "long": LONG}))
    attributes = [{"task": "code", "prompt_tokens": 200}, {"task": "prose"}, {"task": "code"}]
    assert table.names == ("all", "code", "long")
    membership = table.of_batch(attributes, [0, 1, 2], 3)
    assert membership.tolist() == [[True, True, True], [True, False, False], [True, True, False]]


def test_rows_that_were_left_out_do_not_shift_the_others():
    """Attributes belong to the sequences that were given, not to the rows that are left."""
    table = SliceTable.of(contract({"code": CODE}))
    assert table.of_batch([{}, {"task": "code"}], [1], 2).tolist() == [[True, True]]


def test_one_mapping_is_for_all():
    """A single mapping applies to every sequence, none to no slice but all."""
    table = SliceTable.of(contract({"code": CODE}))
    assert table.of_batch({"task": "code"}, [0, 1], 2).all()
    assert table.of_batch(None, [0, 1], 2).tolist() == [[True, False]] * 2


def test_attributes_for_another_number_of_sequences_are_refused():
    """Attributes that do not line up are an error, not a guess."""
    with pytest.raises(ValueError, match="attributes: 1 for 2"):
        SliceTable.of(contract({})).of_batch([{}], [0, 1], 2)


def test_slices_over_the_cap_are_counted_as_other():
    """With room for four slices, two of five keep their name and the rest is one slice that says so."""
    declared = {f"s{i}": {"where": {"task": f"t{i}"}} for i in range(5)}
    table = SliceTable.of(contract(declared, max_series=4 * (len(QUANTITIES) - len(OPERATORS)) + 3))
    assert table.names == ("all", "s0", "s1", "other")
    assert table.over == ("s2", "s3", "s4")
    membership = table.of_batch([{"task": "t1"}, {"task": "t3"}, {"task": "t4"}, {}], range(4), 4)
    assert membership[:, 3].tolist() == [False, True, True, False]


def test_all_slices_fit_exactly():
    """As many slices as there is room for all keep their name."""
    declared = {f"s{i}": {"where": {"task": f"t{i}"}} for i in range(3)}
    table = SliceTable.of(contract(declared, max_series=4 * (len(QUANTITIES) - len(OPERATORS))))
    assert table.over == ()
    assert len(table.names) == 4


def test_attributes_that_cannot_be_hashed_match_what_they_can():
    """A list among the attributes does not keep the others from matching."""
    table = SliceTable.of(contract({"code": CODE}))
    assert table.of_sequence({"task": "code", "tags": ["a"]}).tolist() == [True, True]


def test_remembered_rows_are_bounded():
    """Attributes that never repeat do not grow memory without bound."""
    table = SliceTable.of(contract({"long": LONG}))
    for i in range(10_000):
        table.of_sequence({"prompt_tokens": i})
    assert len(table._known) <= 4096
    assert np.array_equal(table.of_sequence({"prompt_tokens": 100}), [True, True])
