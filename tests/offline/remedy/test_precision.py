"""The cheapest set of components that passes, against every set of a small kernel; and on what it rests."""

from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kc_otel.judge.verdict import Cell, Status, Verdict
from kc_otel.offline.remedy.precision import Component, cheapest


def verdict(upper, *, limit=1.0, slice="tables"):
    status = Status.PASS if upper <= limit else Status.FAIL
    cell = Cell("contract", "tv", slice, "", "")
    return Verdict(cell, status, 0.0, limit, upper, upper, upper, 9, "short", "", "", 1, "", "population")


class Kernel:
    """Drift that components add up to, where some of it is only there while two of them are both in low precision."""

    def __init__(self, drift, together=()):
        self.drift, self.together, self.asked = drift, together, []

    def __call__(self, kept, new):
        self.asked.append((kept, new))
        left = sum(value for name, value in self.drift.items() if name not in kept)
        left += sum(value for pair, value in self.together if not set(pair) & kept)
        return (verdict(left), verdict(0.1, slice="prose"))


def every(names):
    return chain.from_iterable(combinations(names, size) for size in range(len(names) + 1))


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, 5)), min_size=1, max_size=5),
    st.floats(0.0, 1.5),
)
def test_with_runs_enough_nothing_that_passes_is_cheaper(parts, together):
    """Whatever each component adds, and however two of them interact."""
    components = [Component(f"c{at}", cost) for at, (_, cost) in enumerate(parts)]
    drift = {f"c{at}": value for at, (value, _) in enumerate(parts)}
    kernel = Kernel(drift, [(("c0", f"c{len(parts) - 1}"), together)])
    found = cheapest(components, kernel, most=200)
    cost = {each.name: each.bytes for each in components}
    passing = [kept for kept in every(cost) if kernel(frozenset(kept), False)[0].status == Status.PASS]
    assert found.found is not None
    assert found.found.bytes == min(sum(cost[name] for name in kept) for kept in passing)
    assert found.proven
    assert found.verified.kept == found.found.kept


def test_nothing_is_kept_where_the_gate_passes_without():
    """The plain kernel is the cheapest, once it has passed on new requests too."""
    found = cheapest([Component("a", 5)], Kernel({"a": 0.5}))
    assert found.found.kept == frozenset()
    assert found.proven


def test_what_passes_by_chance_is_refused_on_new_requests():
    """A set that passed in the search and not on new requests is no remedy; the next cheapest is tried."""

    class Lucky(Kernel):
        def __call__(self, kept, new):
            found = super().__call__(kept, new)
            return (verdict(1.2), found[1]) if new and kept == {"a"} else found

    kernel = Lucky({"a": 0.8, "b": 0.7, "c": 0.0})
    found = cheapest([Component("a", 1), Component("b", 2), Component("c", 9)], kernel)
    assert (frozenset({"a"}), True) in kernel.asked
    assert found.found.kept == {"b"}


def test_where_no_set_passes_it_says_so():
    """Not even with everything kept."""
    kernel = Kernel({"a": 0.5, "b": 0.5, "rest": 2.0})
    found = cheapest([Component("a", 1), Component("b", 2)], kernel)
    assert found.found is None
    assert found.verified is None
    assert not found.proven
    assert found.plain.excess == pytest.approx(3.0)
    assert [found.gives_back(trial) for trial in found.alone] == pytest.approx([0.5, 0.5])


def test_few_runs_find_something_that_is_not_called_the_cheapest_of_all():
    """The number of runs is kept, verification apart; what was not tried is not claimed."""
    drift = {f"c{at}": 0.3 for at in range(10)}
    kernel = Kernel(drift)
    found = cheapest([Component(name, 10 + at) for at, name in enumerate(drift)], kernel, most=25)
    assert sum(not new for _, new in kernel.asked) <= 25
    assert len(found.found.kept) == 7
    assert not found.proven


@pytest.mark.parametrize(
    ("components", "most", "why"),
    [
        ([], 9, "name at least one"),
        ([Component("a", 1), Component("a", 2)], 9, "each once"),
        ([Component("a", 0)], 9, "costs no bytes"),
        ([Component("a", 1)], 1, "allow 2 or more"),
    ],
)
def test_a_search_that_cannot_be_made_is_refused(components, most, why):
    """With what to write instead."""
    with pytest.raises(ValueError, match=why):
        cheapest(components, Kernel({}), most=most)
