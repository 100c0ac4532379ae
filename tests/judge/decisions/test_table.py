from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.judge.decisions.entries import DecisionTable, DirectiveKind
from kc_otel.judge.decisions.table import apply, forget, resume
from kc_otel.judge.plain_json import read_json, to_json, to_plain

EVERYTHING = (
    "notify", "sample-more", "locate", "hold-promotion", "quarantine-rollouts", "resync-weights", "halt",
    {"route": "train-kernel"},
)  # fmt: skip


def test_firing_route_avoids_the_version_and_stays_after_the_resolve(contract, make_transition):
    """A route names the version, the slice, the clause and the reason, and outlives its alert."""
    table = apply(DecisionTable(), [make_transition()], contract, 100)
    (route,) = table.routes
    assert (route.contract, route.slice, route.avoid, route.train) == ("policy-7b", "code", "inferB", "trainA")
    assert (route.kernel, route.clause, route.since) == ("train-kernel", "token-tv", 100)
    assert route.reason == "0.008 is above 0.004"
    assert (table.version, table.at) == (1, 100)
    assert apply(table, [make_transition("resolved", at=200)], contract, 200) == table


def test_firing_again_keeps_the_first_time(contract, make_transition):
    """A version that is avoided already is not avoided twice, and nothing changes."""
    table = apply(DecisionTable(), [make_transition()], contract, 100)
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
    """Whatever fires, no route is added that avoids a version which traffic is already sent to, or its own."""
    table = DecisionTable()
    for what, slice, train, inference in edges:
        before = table
        table = apply(table, [make_transition(what, slice=slice, train=train, inference=inference)], contract, 1)
        healthy = {route.train for route in before.routes}
        for route in set(table.routes) - set(before.routes):
            assert route.avoid not in healthy | {route.train, ""}


@given(edges=EDGES)
def test_version_counts_changes_of_content_and_json_keeps_everything(contract, make_transition, edges):
    """The version goes up by one exactly when the content differs; a table survives JSON."""
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
    """Each firing alert asks for itself; a directive ends with its own alert only."""
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
    """Only the named slice is given back."""
    table = apply(DecisionTable(), [make_transition(), make_transition(slice="all")], contract, 100)
    table = resume(table, "policy-7b", "code", 300)
    assert [route.slice for route in table.routes] == ["all"]
    table = resume(table, "policy-7b", None, 400)
    assert (table.routes, table.version) == ((), 3)


def test_contract_that_is_no_longer_served_leaves_nothing(contract, make_transition):
    """Routes and directives go with their contract."""
    table = apply(DecisionTable(), [make_transition(do=EVERYTHING)], contract, 100)
    assert forget(table, "other", 200) is table
    empty = forget(table, "policy-7b", 200)
    assert (empty.routes, empty.directives) == ((), ())


def test_fields_of_a_later_version_are_ignored(contract, make_transition):
    """An old client reads a newer evaluator's table."""
    plain = to_plain(apply(DecisionTable(), [make_transition(do=EVERYTHING)], contract, 100))
    expected = DecisionTable.from_plain(plain)
    plain["routes"] = [{**plain["routes"][0], "weight": 0.5}]
    plain["directives"] = [*plain["directives"], {**plain["directives"][0], "kind": "dance"}]
    assert DecisionTable.from_plain(plain) == expected
