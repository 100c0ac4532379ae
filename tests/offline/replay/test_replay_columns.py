"""A replay of much traffic reads the evaluator's own log as columns, and says the same."""

from __future__ import annotations

import pytest

from kc_otel import machine_code
from kc_otel.judge.escalation.notices import GroupTiming
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.otlp.traffic_entries import marked_frame
from kc_otel.offline.replay.replay_files import replay
from kc_otel.offline.replay.traffic_reading import read_recordings
from tests.tools.real_messages import INTERVAL, Case, Sender, contract, messages

START = 1_800_000_000.0


@pytest.mark.slow
@pytest.mark.skipif(not machine_code.is_available(), reason="needs a C compiler")
def test_columns_change_nothing_of_a_replay(tmp_path, monkeypatch):
    """Five minutes of what a real recorder exports."""
    path, judged = tmp_path / "day.otlp", contract("rl-rollouts")
    sender = Sender(messages(Case("rl-rollouts", 1_000), exports=30), 0, START)
    path.write_bytes(b"".join(marked_frame(sender.export(), START + number * INTERVAL) for number in range(30)))
    used: list[bool] = []
    columns_of = Evaluator.columns_of

    def noted(self, body, most):
        used.append((found := columns_of(self, body, most)) is not None)
        return found

    monkeypatch.setattr(Evaluator, "columns_of", noted)
    said = []
    for columns in (True, False):
        monkeypatch.setattr(machine_code, "is_available", lambda there=columns: there)
        said.append(replay(judged, read_recordings([path], []), INTERVAL, GroupTiming()))
    assert said[0] == said[1]
    assert said[0].points["accepted"] > 500
    assert used == [True] * 30 + [False] * 30
