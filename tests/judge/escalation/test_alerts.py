"""The escalation policy: when alerts fire and resolve."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kc_otel.judge.decisions import DecisionTable, Pin, pin
from kc_otel.judge.escalation.alerts import Phase, PolicyState, advance, step_keys
from kc_otel.judge.escalation.tick import TrafficSeen
from kc_otel.judge.verdict import Status
from tests.tools.escalations import advanced, tick_of


def run(contract, ticks, state=None):
    """Feed (time, verdicts[, invalid]) ticks; returns the state and (time, severity, what, slice) of every edge."""
    state = state or PolicyState(contract.name)
    edges = []
    for at, verdicts, *invalid in ticks:
        state, transitions = advanced(contract, verdicts, at, state, invalid[0] if invalid else {})
        edges += [(at, t.severity, t.phase.value, t.cell.slice) for t in transitions]
    return state, edges


PAIR = ("aaaaaaaaaaaa", "bbbbbbbbbbbb")
ONE = [{"on": "fail", "for": "60s", "clear_for": "120s", "severity": "critical", "do": ["notify"]}]


def test_firing_alert_clears_when_its_fault_has_ended(make_contract, make_verdict):
    """Doubt after the end of a fault counts towards `clear_for`; silence still holds, and what waited is dropped."""
    fail, ended, silent = make_verdict("FAIL"), make_verdict("INCONCLUSIVE", ended=True), make_verdict("NO_DATA")
    ticks = [(0, [fail]), (60, [fail]), (70, [ended]), (130, [ended]), (140, [silent]), (200, [ended]), (260, [ended])]
    state, edges = run(make_contract(ONE), ticks)
    assert edges == [(60, "critical", "firing", "code"), (260, "critical", "resolved", "code")]
    state, edges = run(make_contract(ONE), [(300, [fail]), (310, [ended]), (320, [fail]), (379, [fail])], state)
    assert edges == []


@pytest.mark.parametrize(("silence", "edges"), [(1200, 1), (4000, 6)])
def test_what_matches_after_a_long_silence_fires_again(make_contract, make_verdict, silence, edges):
    """Traffic that comes and goes within the long window, an hour, is one firing."""
    fail, silent, doubt = make_verdict("FAIL"), make_verdict("NO_DATA"), make_verdict("INCONCLUSIVE")
    ticks, now = [(0, [fail]), (60, [fail])], 60
    for _ in range(5):
        ticks += [(now + after, [silent]) for after in range(100, silence, 100)]
        now += silence
        ticks += [(now, [doubt]), (now + 10, [fail]), (now + 20, [fail])]
    state, found = run(make_contract(ONE), ticks)
    assert [what for _, _, what, _ in found] == ["firing"] * edges
    assert state.firing[0].since == 0


def test_what_has_held_since_before_a_silence_is_no_new_breach(make_contract, make_verdict):
    """The evidence of a FAIL outlives it: what was repaired meanwhile measures below the limit."""
    fail, silent = make_verdict("FAIL"), make_verdict("NO_DATA")
    held = replace(fail, estimate=fail.limit / 2)
    ticks = [(0, [fail]), (60, [fail]), *((at, [silent]) for at in range(100, 4000, 100)), (4010, [held])]
    _, found = run(make_contract(ONE), ticks)
    assert [what for _, _, what, _ in found] == ["firing"]


def test_the_end_of_missing_data_says_which_end_it_is(make_contract, make_verdict):
    step = [{"on": "no-data", "do": ["notify"]}]
    contract, silent, ok = make_contract(step), make_verdict("NO_DATA"), make_verdict("PASS")
    unheard = replace(silent, cell=silent.cell._replace(kernel_train="", kernel_inference=""))
    over = replace(silent, reason="the run ended: its last recorder shut down 3 min ago")
    other, elsewhere = make_verdict("PASS", inference="c" * 12), make_verdict("PASS", slice="all")
    renamed = make_contract(step, slices={"coding": {"where": {"task": "code"}}})
    unwatched = "have not arrived again, and this kernel is no longer watched: other kernels report in its place"
    changed = "are no longer asked for: the contract has changed"
    for before, after, under, said in (
        (unheard, ok, contract, "have arrived for the first time"),
        (unheard, elsewhere, contract, "have not arrived yet, but a kernel reports and is watched"),
        (unheard, replace(ok, status=Status.INVALID_INPUT), contract, "arrive, but are invalid"),
        (over, other, contract, "are no longer expected: its run ended cleanly"),
        (silent, other, contract, unwatched),
        (silent, make_verdict("PASS", slice="coding"), renamed, changed),
        (silent, silent, make_contract([]), changed),
        (silent, ok, contract, ""),
    ):
        state, _ = advanced(contract, [before], 0)
        _, (edge,) = advanced(under, [after], 60, state)
        assert (edge.phase, edge.end) == (Phase.RESOLVED, said)
    state, _ = advanced(contract, [silent], 0)
    table = pin(DecisionTable(), Pin(contract.name, "code", "train-kernel", "ada", "slow", 50.0))
    tick = replace(tick_of(contract, [silent], 60), table=table, traffic=TrafficSeen(kept=lambda *_: 60.0))
    _, (edge,) = advance(tick, state)
    assert edge.end == "are no longer expected: requests are kept from this kernel, as ordered"


SILENT = {"on": "no-data", "for": "30s", "do": ["notify"]}


@pytest.mark.parametrize(
    ("step", "statuses", "edges"),
    [
        *((SILENT, ["NO_DATA", "NO_DATA", seen], [(30, "firing"), (60, "resolved")]) for seen in ("PASS", "FAIL")),
        (
            {"on": "inconclusive", "do": ["notify"]},
            ["INCONCLUSIVE", "NO_DATA", "FAIL"],
            [(0, "firing"), (60, "resolved")],
        ),
        ({"on": "fail", "do": ["notify"], "clauses": ["reward"]}, ["FAIL"] * 3, []),
    ],
)
def test_a_step_fires_and_clears_by_what_it_watches(make_contract, make_verdict, step, statuses, edges):
    ticks = [(30 * index, [make_verdict(status)]) for index, status in enumerate(statuses)]
    _, found = run(make_contract([step]), ticks)
    assert [(at, what) for at, _, what, _ in found] == edges


def test_invalid_input_is_an_alert_of_its_own_for_each_pair_of_kernels(make_contract, make_verdict):
    contract = make_contract([{"on": "invalid-input", "for": "10s", "do": ["notify"]}, *ONE])
    found = {PAIR: {"nan": 2, "shift": 5, "x": 0}, (PAIR[0], "c" * 12): {"shift": 1}}
    state, _ = advanced(contract, [make_verdict("PASS")], 0, invalid=found)
    state, (firing, other) = advanced(contract, [make_verdict("PASS")], 10, state, found)
    assert (firing.cell[-2:], other.cell.kernel_inference) == (PAIR, "c" * 12)
    assert (firing.cell.clause, firing.cell.slice, firing.verdict.samples) == ("input", "all", 7)
    assert "2 nan, 5 shift" in firing.verdict.reason
    verdicts = [make_verdict("PASS"), make_verdict("NO_DATA", inference="c" * 12)]
    _, (resolved,) = advanced(contract, verdicts, 20, state, {PAIR: {"nan": 0}})
    assert (resolved.phase, resolved.cell[-2:]) == (Phase.RESOLVED, PAIR)


def test_changed_contract_keeps_what_still_exists(make_contract, make_verdict):
    before = make_contract([*ONE, {"on": "fail", "severity": "info", "do": ["notify"]}])
    after = make_contract([{**ONE[0], "for": "10m", "clear_for": "0s"}])
    assert before.hash != after.hash
    fail = make_verdict("FAIL")
    state, _ = run(before, [(0, [fail]), (60, [fail])])
    assert len(state.firing) == 2
    state, edges = run(after, [(70, [fail])], state)
    assert edges == [(70, "info", "resolved", "code")]
    assert [alert.started_at for alert in state.firing] == [60]


def test_step_keys_tell_alike_steps_apart(make_contract):
    contract = make_contract([ONE[0], {**ONE[0], "for": "1h"}])
    assert len(set(step_keys(contract))) == 2


def test_invalid_input_does_not_end_by_silence(make_contract, make_verdict):
    """That no sequence fails where none comes says nothing; one that is measured and valid does."""
    contract = make_contract([{"on": "invalid-input", "do": ["notify"]}])
    state, _ = advanced(contract, [make_verdict("PASS")], 0, invalid={PAIR: {"nan": 2}})
    for verdicts in ([], [make_verdict("NO_DATA")]):
        state, edges = advanced(contract, verdicts, 100, state)
        assert (edges, len(state.firing)) == ((), 1)
    others = make_verdict("PASS", inference="another")
    state, edges = advanced(contract, [make_verdict("NO_DATA"), others], 150, state)
    assert (edges, len(state.firing)) == ((), 1)
    for verdict in (make_verdict("INCONCLUSIVE"), others):  # the pair itself, or others after it has gone
        _, (resolved,) = advanced(contract, [verdict], 200, state)
        assert resolved.phase is Phase.RESOLVED


STATUSES = st.sampled_from(["PASS", "FAIL", "FAIL", "INCONCLUSIVE", "NO_DATA", None])
JUMPY = st.tuples(st.integers(-500, 500), st.fixed_dictionaries({"all": STATUSES, "code": STATUSES}))
DURATIONS = st.sampled_from([0, 1, 30, 100, 400])
LADDERS = st.lists(st.tuples(DURATIONS, DURATIONS), min_size=1, max_size=2)
WINDOW = 300


@pytest.fixture(scope="session")
def world(make_contract, make_verdict):
    return SimpleNamespace(contract_with=make_contract, verdict_of=make_verdict)


def contract_of(world, ladder):
    severities = ("warning", "critical")
    return world.contract_with(
        [
            {"on": "fail", "for": f"{wait}s", "clear_for": f"{clear}s", "severity": severity, "do": ["notify"]}
            for severity, (wait, clear) in zip(severities, ladder, strict=False)
        ],
        observability={"window": "5m", "long_window": "1d"},
    )


def replay(world, contract, ticks):
    """All edges, with the index of their tick."""
    state, edges, now = PolicyState(contract.name), [], 1_000_000.0
    for index, (step, statuses) in enumerate(ticks):
        now += step
        verdicts = [world.verdict_of(status, slice=name) for name, status in statuses.items() if status]
        state, transitions = advanced(contract, verdicts, now, state)
        edges += [(index, transition) for transition in transitions]
    return edges


def said(statuses, slice):
    """A cell that is gone while its kernels are measured nowhere else says as little as one without data."""
    others = {status for name, status in statuses.items() if name != slice}
    return "NO_DATA" if statuses[slice] is None and others <= {"NO_DATA", None} else statuses[slice]


def expected(ticks, wait, clear, slice):
    """Edges of one `on: fail` step on one slice, worked out from the whole history again at every tick."""
    edges, firing, start = [], False, 0
    for index in range(len(ticks)):
        served, broken = 0, False
        statuses = [said(statuses, slice) for _, statuses in ticks[: index + 1]]
        towards = {"FAIL"} if not firing else {"PASS", None}
        if statuses[index] not in towards:
            continue
        for at in range(index, start - 1, -1):
            if statuses[at] not in towards | {"INCONCLUSIVE", "NO_DATA"}:
                broken = True
            if broken:
                break
            if at > start and statuses[at] in towards and statuses[at - 1] in towards:
                served += min(max(0, ticks[at][0]), WINDOW)
        if served >= (clear if firing else wait):
            firing = not firing
            edges.append((index, Phase.FIRING if firing else Phase.RESOLVED))
            start = index + 1
    return edges


@pytest.mark.slow
@settings(max_examples=300)
@given(ticks=st.lists(JUMPY, max_size=40), ladder=LADDERS)
def test_fires_and_resolves_exactly_when_the_history_says_so(world, ticks, ladder):
    contract = contract_of(world, ladder)
    edges = replay(world, contract, ticks)
    for severity, (wait, clear) in zip(("warning", "critical"), ladder, strict=False):
        for slice in ("all", "code"):
            got = [(i, t.phase) for i, t in edges if (t.severity, t.cell.slice) == (severity, slice)]
            assert got == expected(ticks, wait, clear, slice)
