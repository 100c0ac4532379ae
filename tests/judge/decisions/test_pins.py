"""A person's pin decides which kernel serves a slice, whatever the evaluator says or fails to say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.client.router import Router
from kc_otel.judge.decisions.entries import DecisionTable, Pin
from kc_otel.judge.decisions.table import apply, forget, pin, unpin

KERNELS = ("train-kernel", "inference-kernel")


def pinned(slice="code", kernel="inference-kernel", at=1.0, until=None, contract="policy-7b"):
    """A pin by somebody for a reason."""
    return Pin(contract, slice, kernel, "ada", "known false alarm", at, until)


@given(
    st.lists(st.sampled_from(["all", "code", "long-context"]), unique=True),
    st.sampled_from(["all", "code"]),
    st.sampled_from(KERNELS),
    st.booleans(),
)
def test_a_pin_wins_over_every_route_and_over_staleness(contract, make_transition, routed, slice, kernel, stale):
    """For requests of its slice; by attributes and by names alike."""
    table = apply(DecisionTable(), [make_transition(slice=routed_slice) for routed_slice in routed], contract, 100.0)
    clock = [0.0]
    router = Router.from_table(
        pin(table, pinned(slice, kernel)), contracts=[contract], stale_after=10.0, clock=lambda: clock[0]
    )
    clock[0] = 100.0 if stale else 1.0
    assert router.choose("policy-7b", {"task": "code", "prompt_tokens": 9000}) == kernel
    assert router.choose("policy-7b", ["code", "long-context"]) == kernel
    if slice == "code":
        expected = "train-kernel" if stale else "inference-kernel"
        expected = "train-kernel" if {"all"} & set(routed) else expected
        assert router.choose("policy-7b", {"task": "prose"}) == expected


def test_the_newest_of_two_pins_that_match_wins():
    """Slices overlap; whoever decided last had seen what was decided before."""
    table = pin(pin(DecisionTable(), pinned("all", "train-kernel", 1.0)), pinned("code", "inference-kernel", 2.0))
    router = Router.from_table(table)
    assert router.choose("policy-7b", ["code"]) == "inference-kernel"
    assert router.choose("policy-7b", []) == "train-kernel"
    table = pin(table, pinned("all", "train-kernel", 3.0))
    assert Router.from_table(table).choose("policy-7b", ["code"]) == "train-kernel"


def test_a_pin_ends_when_its_time_has_passed(contract, make_transition, monkeypatch):
    """In the router at once, in the table with the next evaluation."""
    now = [100.0]
    monkeypatch.setattr("kc_otel.client.router.time.time", lambda: now[0])
    table = pin(apply(DecisionTable(), [make_transition()], contract, 100.0), pinned(at=100.0, until=200.0))
    router = Router.from_table(table, contracts=[contract])
    assert router.choose("policy-7b", {"task": "code"}) == "inference-kernel"
    now[0] = 200.0
    assert router.choose("policy-7b", {"task": "code"}) == "train-kernel"
    assert apply(table, [], contract, 199.0).pins == table.pins
    assert apply(table, [], contract, 200.0).pins == ()


def test_a_pin_to_the_training_kernel_ends_by_the_evaluators_clock_alone(monkeypatch):
    """A serving process whose clock is ahead lets nobody meet the kernel before the pin has ended."""
    monkeypatch.setattr("kc_otel.client.snapshot.time.time", lambda: 1e9)
    router = Router.from_table(pin(DecisionTable(), pinned("code", "train-kernel", at=100.0, until=200.0)))
    assert router.choose("policy-7b", ["code"]) == "train-kernel"


def test_a_route_is_in_force_since_the_pin_above_it_has_ended(contract, make_transition):
    """Whether it ends by itself or by a person: what was served under the pin disobeyed no order."""
    table = pin(apply(DecisionTable(), [make_transition()], contract, 100.0), pinned(at=110.0, until=200.0))
    assert [route.since for route in table.routes] == [100.0]
    assert [route.since for route in apply(table, [], contract, 201.0).routes] == [201.0]
    assert [route.since for route in unpin(table, "policy-7b", "code", 150.0).routes] == [150.0]
    away = pin(table, pinned("code", "train-kernel", 120.0))
    assert [route.since for route in unpin(away, "policy-7b", "code", 150.0).routes] == [120.0]


def test_pinning_again_replaces_and_unpinning_ends():
    """One pin for each slice; versions count up; other contracts are left alone."""
    table = pin(pin(DecisionTable(), pinned(kernel="train-kernel")), pinned(contract="other"))
    again = pin(table, pinned(kernel="inference-kernel", at=2.0))
    assert [(entry.contract, entry.kernel) for entry in again.pins] == [
        ("other", "inference-kernel"),
        ("policy-7b", "inference-kernel"),
    ]
    assert again.version == table.version + 1
    assert [entry.contract for entry in unpin(again, "policy-7b", None, 3.0).pins] == ["other"]
    assert [entry.contract for entry in forget(again, "policy-7b", 3.0).pins] == ["other"]
    with pytest.raises(LookupError, match="no pin is in force for slice 'long-context'"):
        unpin(again, "policy-7b", "long-context", 3.0)
