"""Evaluations that are judged together say what each says by itself, with every cell judged anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kc_otel.contract.model import Contract
from kc_otel.judge.cells import evidence
from kc_otel.judge.contract_state import ContractState
from kc_otel.judge.escalation.message_groups import GroupTiming
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.verdict import Status, Verdict
from kc_otel.judge.verdicts import decide
from kc_otel.offline.replay import replay_run
from kc_otel.offline.replay.replay_run import replay
from kc_otel.offline.replay.timeline import ReplayTimeline
from kc_otel.offline.replay.traffic_entries import TrafficEntry
from tests.judge.conftest import Sender, make_contract, merge

START = 1_800_000_000.0
EDGES = (0.001, 0.01, 0.1, 1.0)
STREAMS = [
    ("kc.drift.tv_token", "all", "bbbbbbbbbbbb", None),
    ("kc.drift.tv_token", "code", "bbbbbbbbbbbb", None),
    ("kc.drift.tv_token", "all", "cccccccccccc", None),
    ("kc.drift.tv_token", "code", "cccccccccccc", EDGES),
    ("kc.drift.log_ratio", "all", "bbbbbbbbbbbb", None),
    ("kc.drift.log_ratio", "code", "cccccccccccc", None),
]


def judged_by() -> Contract:
    """Means, shares, quantiles, a maximum and something that is never judged in columns, with every kind of step."""
    return make_contract(
        statistical=[
            {"id": "mean", "metric": "tv_token", "unit": "token", "limit": 0.05, "slices": {"code": 0.02}},
            {"id": "share", "metric": "tv_token", "statistic": "fraction > 0.5", "unit": "token", "limit": 0.1},
            {"id": "max", "metric": "tv_token", "statistic": "max", "limit": 0.9},
            {"id": "p99", "metric": "log_ratio", "statistic": "p99", "limit": 0.5},
            {"id": "k1", "metric": "k1", "unit": "token", "limit": 0.1},
        ],
        observability={"window": "1m", "long_window": "5m", "min_samples": 30, "heartbeat": "20s"},
        escalation=[
            {"on": "fail", "severity": "warning", "do": ["notify"]},
            {"on": "fail", "for": "20s", "clear_for": "30s", "do": [{"route": "train-kernel"}, {"webhook": "pager"}]},
            {"on": "no-data", "for": "30s", "do": ["hold-promotion"]},
            {"on": "inconclusive", "for": "30s", "clear_for": "10s", "do": [{"webhook": "pager"}]},
        ],
    )


class EachAnew(Evaluator):
    """An evaluator that judges every cell by itself, at every evaluation."""

    def _judged(self, state: ContractState, now: float, *, later: bool) -> Sequence[Verdict]:
        del later
        self.forget_silent(state, now)
        state.weigh(now)
        made = decide(state.contract, [*evidence(state, now, self._listen(now))], now)
        for verdict in made:
            if verdict.status is Status.PASS and state.evidence.failing(verdict.cell):
                state.evidence.clear(verdict.cell)
        return made


class Recording:
    """What some senders said, in the order in which it arrived."""

    def __init__(self, seed: int) -> None:
        self._rng, self._now = np.random.default_rng(seed), START
        self._senders = [
            Sender(metric, slice=slice, inference=kernel, edges=edges) for metric, slice, kernel, edges in STREAMS
        ]
        self.entries: list[TrafficEntry] = []

    def step(self, what: str, drift: float, pause: float) -> None:
        """Some time passes, and what happens in it is reported."""
        self._now += pause
        late = 45.0 if what == "late" else 0.0
        for sender in self._senders:
            if what == "restart" and self._rng.random() < 0.5:
                sender.restart(self._now - 1.0)
            if what != "silence" and self._rng.random() < (0.4 if what == "gap" else 0.9):
                values = self._rng.beta(1.0, 1.0 / drift, 40)
                values = values if sender.metric == "kc.drift.tv_token" else self._rng.normal(0.0, drift, 40)
                self.entries.append(TrafficEntry(self._now, merge(sender.request(self._now - late, values))))


steps = st.lists(
    st.tuples(
        st.sampled_from(["usual"] * 6 + ["gap", "restart", "late", "silence"]),
        st.sampled_from([0.005, 0.005, 0.03, 0.3]),
        st.sampled_from([5.0, 10.0, 10.0, 10.0, 40.0, 400.0, -8.0, -70.0]),
        st.integers(1, 12),
    ),
    min_size=1,
    max_size=8,
)


def timelines(taken: Any, seed: int, together: int, monkeypatch: pytest.MonkeyPatch) -> list[ReplayTimeline]:
    """The recording, judged together, and each cell at each evaluation anew."""
    recording = Recording(seed)
    for what, drift, pause, times in taken:
        for _ in range(times):
            recording.step(what, drift, pause)
    found = []
    for evaluator, size in ((Evaluator, together), (EachAnew, 1)):
        with monkeypatch.context() as patch:
            patch.setattr(replay_run, "Evaluator", evaluator)
            patch.setattr(replay_run, "_TOGETHER", size)
            found.append(replay(judged_by(), recording.entries, 10.0, GroupTiming()))
    return found


@pytest.mark.slow
@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps, st.integers(0, 2**32), st.sampled_from([1, 60, 6400]))
def test_what_is_judged_together_is_what_each_says_by_itself(
    monkeypatch: pytest.MonkeyPatch, taken: Any, seed: int, together: int
) -> None:
    """Two pairs of kernels, through restarts, gaps, late points, silence, drift, bounds, and a clock that goes back."""
    one, other = timelines(taken, seed, together, monkeypatch)
    assert one == other


@pytest.mark.slow
def test_a_day_in_short_has_every_kind_of_alert(monkeypatch: pytest.MonkeyPatch) -> None:
    """What such recordings are compared by: alerts that fire and resolve, routes, webhooks."""
    day = [("usual", 0.005, 10.0, 20), ("silence", 0.1, 10.0, 12), ("usual", 0.005, 10.0, 20)]
    one, other = timelines([*day, ("usual", 0.3, 10.0, 12), ("usual", 0.005, 10.0, 60)], 1, 6400, monkeypatch)
    assert one == other
    assert {alert.on for alert in one.alerts} == {"fail", "no-data", "inconclusive"}
    assert any(alert.end is not None for alert in one.alerts if alert.on == "fail")
    assert one.messages
    assert one.decisions
