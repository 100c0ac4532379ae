from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kc_otel.judge.escalation.alerts import PolicyState, What, advance
from kc_otel.judge.plain_json import read_json, to_json

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
        ]
    )


def replay(world, contract, ticks, *, state=None, now=1_000_000.0, restart=False):
    """All transitions, with the index of their tick; with `restart`, through JSON after every tick."""
    state = state or PolicyState(contract.name)
    edges = []
    for index, (step, statuses) in enumerate(ticks):
        now += step
        verdicts = [world.verdict_of(status, slice=name) for name, status in statuses.items() if status]
        state, transitions = advance(contract, state, verdicts, {}, now)
        if restart:
            state = read_json(PolicyState, to_json(state))
        edges += [(index, transition) for transition in transitions]
    return state, edges


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
            edges.append((index, What.FIRING if firing else What.RESOLVED))
            start = index + 1
    return edges


@settings(max_examples=300)
@given(ticks=st.lists(JUMPY, max_size=40), ladder=LADDERS)
def test_fires_and_resolves_exactly_when_the_history_says_so(world, ticks, ladder):
    """An alert fires after `for` of failure and resolves after `clear_for` without, never sooner and never later."""
    contract = contract_of(world, ladder)
    _, edges = replay(world, contract, ticks)
    for severity, (wait, clear) in zip(("warning", "critical"), ladder, strict=False):
        for slice in ("all", "code"):
            got = [(i, t.what) for i, t in edges if (t.severity, t.cell.slice) == (severity, slice)]
            assert got == expected(ticks, wait, clear, slice)


@given(ticks=st.lists(JUMPY, max_size=30), ladder=LADDERS)
def test_every_firing_is_resolved_exactly_once(world, ticks, ladder):
    """When everything passes for long enough, firings and resolves alternate and end with a resolve."""
    calm = [(200, {"all": "PASS", "code": "PASS"})] * 4
    state, edges = replay(world, contract_of(world, ladder), [*ticks, *calm])
    assert state.alerts == ()
    seen = {}
    for _, transition in edges:
        before = seen.get(transition.fingerprint)
        if transition.what is What.RESOLVED:
            assert before is not None
            assert before.what is What.FIRING
            assert transition.started_at == before.started_at <= transition.at
        else:
            assert before is None or before.what is What.RESOLVED
        seen[transition.fingerprint] = transition
    assert all(transition.what is What.RESOLVED for transition in seen.values())


@given(ticks=st.lists(JUMPY, max_size=30), ladder=LADDERS)
def test_restarting_after_every_tick_changes_nothing(world, ticks, ladder):
    """A state that went through JSON has the same future, and replaying gives the same past."""
    contract = contract_of(world, ladder)
    state, edges = replay(world, contract, ticks)
    again, repeated = replay(world, contract, ticks, restart=True)
    assert repr(repeated) == repr(edges)
    assert to_json(again) == to_json(state)
