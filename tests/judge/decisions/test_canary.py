"""Canary weights: a sticky share of requests goes to one version of the inference kernel."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from kc_otel.client.router import Router
from kc_otel.judge.decisions import Canary, DecisionTable, Pin, apply, changed, kept_since, pin

TRAIN, INFERENCE = "train-kernel", "inference-kernel"
WEIGHTS = st.floats(0.0, 1.0)


def canary(weight, version="inferB"):
    return Canary("policy-7b", version, weight, "canary, step 2 of 3", 1.0)


def table_of(*canaries):
    return changed(DecisionTable(), 1.0, canaries=canaries)


def chosen(router, key, where=(), version="inferB"):
    return router.choose("policy-7b", where, version, key=key)


@given(st.text(min_size=1) | st.binary(min_size=1), WEIGHTS, WEIGHTS)
def test_a_key_moves_only_into_the_share_as_the_weight_grows(key, first, other):
    """Same key, same weight, same kernel; a larger weight never sends a key back."""
    small, large = (Router.from_table(table_of(canary(weight))) for weight in sorted((first, other)))
    assert chosen(small, key) == chosen(small, key)
    if chosen(small, key) == INFERENCE:
        assert chosen(large, key) == INFERENCE


@pytest.mark.parametrize("weight", [0.001, 0.01, 0.05, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("keys", ["user-{}", "{:08d}", "{:x}-9b1e-4f6c"])
def test_the_share_is_the_weight(weight, keys):
    """Over 20,000 keys of the kinds that people use, within what chance allows once in a million."""
    router = Router.from_table(table_of(canary(weight)))
    inside = sum(chosen(router, keys.format(number)) == INFERENCE for number in range(20_000))
    least, most = binom.interval(1 - 1e-6, 20_000, weight)
    assert least <= inside <= most


def test_shares_of_two_versions_are_independent():
    """Whoever is in one version's share is not for that reason in another's: no user gets every experiment."""
    router = Router.from_table(table_of(canary(0.2), canary(0.2, version="inferC")))
    keys = [f"user-{number}" for number in range(20_000)]
    both = sum(chosen(router, key) == chosen(router, key, version="inferC") == INFERENCE for key in keys)
    least, most = binom.interval(1 - 1e-6, len(keys), 0.04)
    assert least <= both <= most


@pytest.mark.slow
def test_another_process_decides_alike():
    """The hash does not depend on the process, as Python's own does."""
    program = (
        "from tests.judge.decisions.test_canary import *\n"
        "router = Router.from_table(table_of(canary(0.5)))\n"
        "print(''.join(chosen(router, f'user-{n}')[0] for n in range(200)))"
    )
    found = {
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60).stdout
        for _ in range(2)
    }
    router = Router.from_table(table_of(canary(0.5)))
    assert found == {"".join(chosen(router, f"user-{n}")[0] for n in range(200)) + "\n"}


def test_without_a_key_chance_decides():
    router = Router.from_table(table_of(canary(0.3)))
    inside = sum(chosen(router, None) == INFERENCE for _ in range(5000))
    least, most = binom.interval(1 - 1e-6, 5000, 0.3)
    assert least <= inside <= most


@given(WEIGHTS, st.sampled_from([TRAIN, INFERENCE]), st.booleans(), st.booleans(), st.text(min_size=1))
def test_pins_and_routes_win_over_a_canary(contract, make_transition, weight, kernel, pinned, routed, key):
    """A pin to the training kernel always, a route where there is no pin; all else stays with the canary."""
    table = table_of(canary(weight))
    alone = chosen(Router.from_table(table), key, ["code"])
    if routed:
        table = apply(table, [make_transition(slice="code")], contract, 100.0)
    if pinned:
        table = pin(table, Pin("policy-7b", "code", kernel, "ada", "known false alarm", 1.0))
    router = Router.from_table(table, contracts=[contract])
    away = "pin" if pinned and kernel == TRAIN else "route" if routed and not pinned else ""
    expected = TRAIN if away else alone
    assert chosen(router, key, ["code"]) == chosen(router, key, {"task": "code"}) == expected
    assert chosen(router, key, {"task": "prose"}) == alone
    assert router.decide("policy-7b", ["code"], "inferB", key=key).cause == (away or "canary")


def test_a_pin_lets_no_version_serve_that_is_tried_or_was_rolled_back(contract, make_transition):
    """It lifts routes of the stable version; the candidate, asked first, stays where its promotion put it."""
    table = apply(table_of(canary(0.0)), [make_transition(slice="code", inference="stable")], contract, 100.0)
    versions = ["inferB", "stable"]
    assert Router.from_table(table).choose_version("policy-7b", ["code"], versions) is None
    table = pin(table, Pin("policy-7b", "code", INFERENCE, "ada", "false alarm", 200.0))
    assert Router.from_table(table).choose_version("policy-7b", ["code"], versions) == "stable"
    kept = kept_since(table, "policy-7b")
    assert (kept("code", "inferB"), kept("code", "stable")) == (table.canaries[0].since, None)


def test_a_later_route_of_all_traffic_does_not_move_the_time_of_a_rollback(contract, make_transition):
    """Routers that took the rollback took it before the route, which an evaluator that has restarted still knows."""
    table = apply(table_of(canary(0.0)), [make_transition(slice="all", inference="inferB")], contract, 100.0)
    assert table.routes[0].since == 100.0
    kept = kept_since(table, "policy-7b")
    assert {kept(slice, "inferB") for slice in ("all", "code", "")} == {table.canaries[0].since}


def test_only_its_version_is_limited():
    router = Router.from_table(table_of(canary(0.0)))
    assert chosen(router, "k") == TRAIN
    assert chosen(router, "k", version="inferA") == INFERENCE
    assert router.choose("other", ["code"], key="k") == INFERENCE


def test_without_a_version_the_smallest_weight_is_told():
    router = Router.from_table(table_of(canary(0.9), canary(0.5, version="inferC")))
    inside = next(key for key in map(str, range(1000)) if chosen(router, key, version=None) == INFERENCE)
    assert router.decide("policy-7b", [], key=inside).weight == 0.5


def test_without_a_version_every_canary_has_to_let_a_request_through():
    router = Router.from_table(table_of(canary(0.5), canary(0.5, version="inferC")))
    for key in map(str, range(200)):
        alone = [chosen(router, key, version=version) for version in ("inferB", "inferC")]
        assert chosen(router, key, version=None) == (TRAIN if TRAIN in alone else INFERENCE)


def test_an_old_version_serves_what_the_canary_does_not():
    router = Router.from_table(table_of(canary(0.3)))
    for number in range(200):
        key = f"user-{number}"
        expected = "inferB" if chosen(router, key) == INFERENCE else "inferA"
        assert router.choose_version("policy-7b", [], ["inferB", "inferA"], key=key) == expected
        assert router.choose_version("policy-7b", iter([]), ["inferB"], key=key) in {"inferB", None}
    closed = Router.from_table(table_of(canary(0.0), canary(0.0, version="inferA")))
    assert closed.choose_version("policy-7b", [], ["inferB", "inferA"], key="k") is None


def test_a_canary_serves_nothing_while_nobody_watches_it():
    """A stale table ends it; the evaluator's next answer gives its share back."""
    now = [0.0]
    router = Router.from_table(table_of(canary(0.5)), stale_after=10.0, clock=lambda: now[0])
    keys = list(map(str, range(100)))
    assert {chosen(router, key) for key in keys} == {TRAIN, INFERENCE}
    now[0] = 11.0
    assert {chosen(router, key) for key in keys} == {TRAIN}
    router._touch()
    assert {chosen(router, key) for key in keys} == {TRAIN, INFERENCE}
