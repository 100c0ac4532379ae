"""The decision table: routes, directives, and a person's pins, which decide whatever the evaluator says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.client.router import Router
from kc_otel.judge.decisions import (
    DecisionTable,
    DirectiveKind,
    Pin,
    apply,
    as_defined,
    lift,
    parted,
    pin,
    with_contract,
)
from kc_otel.judge.plain_json import read_json, to_json, to_plain
from tests.tools.contracts import contract_of

EVERYTHING = (
    "notify", "sample-more", "locate", "hold-promotion", "quarantine-rollouts", "resync-weights", "halt",
    {"route": "train-kernel"},
)  # fmt: skip


def test_firing_route_avoids_the_version_since_the_first_time_and_stays_after_the_resolve(contract, make_transition):
    table = apply(DecisionTable(), [make_transition()], contract, 100)
    (route,) = table.routes
    assert (route.contract, route.slice, route.avoid, route.train) == ("policy-7b", "code", "inferB", "trainA")
    assert (route.kernel, route.clause, route.since) == ("train-kernel", "token-tv", 100)
    assert route.reason == "0.008 is above 0.004"
    assert (table.version, table.at) == (1, 100)
    assert apply(table, [make_transition("resolved", at=200)], contract, 200) == table
    assert apply(table, [make_transition("resolved"), make_transition(at=300)], contract, 300) == table


@pytest.mark.parametrize(
    "changes", [{"train": "same", "inference": "same"}, {"train": "", "inference": ""}, {"do": ("notify",)}]
)
def test_nothing_is_routed_without_a_worse_version_to_avoid(contract, make_transition, changes):
    """A kernel paired with itself, a kernel that never reported, and steps that do not route add no route."""
    assert apply(DecisionTable(), [make_transition(**changes)], contract, 100) == DecisionTable()


names = st.sampled_from(["k1", "k2", "k3", ""])
EDGES = st.lists(st.tuples(st.sampled_from(["firing", "resolved"]), st.sampled_from(["all", "code"]), names, names))


@given(edges=EDGES)
def test_last_healthy_kernel_is_never_routed_away(contract, make_transition, edges):
    table = DecisionTable()
    for what, slice, train, inference in edges:
        before = table
        table = apply(table, [make_transition(what, slice=slice, train=train, inference=inference)], contract, 1)
        healthy = {route.train for route in before.routes}
        for route in set(table.routes) - set(before.routes):
            assert route.avoid not in healthy | {route.train, ""}


@given(edges=EDGES)
def test_version_counts_changes_of_content_and_json_keeps_everything(contract, make_transition, edges):
    table = DecisionTable()
    for now, (what, slice, train, inference) in enumerate(edges):
        transition = make_transition(what, slice=slice, train=train, inference=inference, do=EVERYTHING)
        after = apply(table, [transition], contract, now)
        same = (after.routes, after.directives) == (table.routes, table.directives)
        assert after.version == table.version + (not same)
        assert not same or after is table
        assert read_json(DecisionTable, to_json(after)) == after
        table = after


def test_directives_last_as_long_as_the_alert_that_asked(contract, make_transition):
    both = [make_transition(do=EVERYTHING), make_transition(do=EVERYTHING, slice="all")]
    table = apply(DecisionTable(), both, contract, 100)
    assert {directive.kind for directive in table.directives} == set(DirectiveKind)
    assert len(table.directives) == 12
    table = apply(table, [make_transition("resolved", do=EVERYTHING)], contract, 200)
    assert {directive.slice for directive in table.directives} == {"all"}
    table = apply(table, [make_transition("resolved", do=EVERYTHING, slice="all")], contract, 200)
    assert table.directives == ()
    assert len(table.routes) == 2


def test_person_resumes_one_slice_or_all(contract, make_transition):
    table = apply(DecisionTable(), [make_transition(), make_transition(slice="all")], contract, 100)
    table = lift(table, "route", "policy-7b", "code", 300)
    assert [route.slice for route in table.routes] == ["all"]
    table = lift(table, "route", "policy-7b", None, 400)
    assert (table.routes, table.version) == ((), 3)


def test_routes_and_pins_of_a_contract_wait_aside_while_it_is_not_served(contract, make_transition):
    table = apply(DecisionTable(), [make_transition(do=EVERYTHING)], contract, 100)
    assert parted(table, DecisionTable(), ["policy-7b"], 200)[0] is table
    empty, aside = parted(table, DecisionTable(), ["other"], 200)
    assert (empty.routes, empty.directives) == ((), ())
    assert (aside.routes, aside.directives) == (table.routes, ())
    again, nothing = parted(empty, aside, ["policy-7b", "other"], 300)
    assert (again.routes, nothing.routes, again.version) == (table.routes, (), table.version + 2)


def test_fields_of_a_later_version_are_ignored(contract, make_transition):
    plain = to_plain(apply(DecisionTable(), [make_transition(do=EVERYTHING)], contract, 100))
    expected = DecisionTable.from_plain(plain)
    plain["routes"] = [{**plain["routes"][0], "weight": 0.5}]
    plain["directives"] = [*plain["directives"], {**plain["directives"][0], "kind": "dance"}]
    assert DecisionTable.from_plain(plain) == expected


KERNELS = ("train-kernel", "inference-kernel")


def pinned(slice="code", kernel="inference-kernel", at=1.0, until=None, contract="policy-7b"):
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
    assert [route.since for route in lift(table, "pin", "policy-7b", "code", 150.0).routes] == [150.0]
    away = pin(table, pinned("code", "train-kernel", 120.0))
    assert [route.since for route in lift(away, "pin", "policy-7b", "code", 150.0).routes] == [120.0]


def test_pinning_again_replaces_and_unpinning_ends():
    table = pin(pin(DecisionTable(), pinned(kernel="train-kernel")), pinned(contract="other"))
    again = pin(table, pinned(kernel="inference-kernel", at=2.0))
    assert [(entry.contract, entry.kernel) for entry in again.pins] == [
        ("other", "inference-kernel"),
        ("policy-7b", "inference-kernel"),
    ]
    assert again.version == table.version + 1
    assert [entry.contract for entry in lift(again, "pin", "policy-7b", None, 3.0).pins] == ["other"]
    served, aside = parted(again, DecisionTable(), ["other"], 3.0)
    assert [entry.contract for entry in (*served.pins, *aside.pins)] == ["other", "policy-7b"]
    with pytest.raises(LookupError, match="no pin is in force for slice 'long-context'"):
        lift(again, "pin", "policy-7b", "long-context", 3.0)


def test_a_pin_says_what_a_changed_contract_does_to_it(contract, make_transition):
    """As a route does; it ends with neither, and it meets the slices that may share requests with its own."""
    wanted = as_defined(pinned("code"), contract)
    assert (wanted.slice_id, wanted.meets) == (contract.slice_ids["code"], ("long-context",))
    train = as_defined(pinned("long-context", "train-kernel"), contract)
    table = apply(DecisionTable(), [replace(make_transition(), started_at=0.5)], contract, 0.5)
    table = pin(pin(table, wanted), train)
    assert with_contract(table, contract, 2.0) is table
    other = {"code": {"where": {"task": "sql"}}, "long-context": {"where": {"task": "code"}}}
    after = with_contract(table, contract_of("policy-7b", slices=other), 2.0)
    said = "the slice was redefined since: "
    assert [(pin.outdated, pin.meets) for pin in after.pins] == [
        (f"{said}other requests may be in it now", ("long-context",)),
        (f"{said}what broke may be outside of it now", ("code",)),
    ]
    assert [route.since for route in after.routes] == [0.5], "no pin has ended"
    gone = with_contract(table, contract_of("policy-7b", slices={}), 2.0)
    assert {pin.outdated for pin in gone.pins} == {"it has no effect: the contract no longer has this slice"}
    assert with_contract(gone, contract, 3.0).pins == table.pins
