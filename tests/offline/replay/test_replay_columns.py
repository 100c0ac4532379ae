"""A replay of much traffic reads the evaluator's own log as columns, and says the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from kc_otel import machine_code
from kc_otel.judge.escalation.message_groups import GroupTiming
from kc_otel.judge.evaluator import Evaluator
from kc_otel.offline.replay.replay_run import replay
from kc_otel.offline.replay.traffic_entries import sealed_frame
from kc_otel.offline.replay.traffic_reading import read_recordings
from tests.benchmarks.bench_replay import contract, requests


@pytest.mark.slow
@pytest.mark.skipif(not machine_code.is_available(), reason="needs a C compiler")
def test_columns_change_nothing_of_a_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten minutes of it."""
    path = tmp_path / "day.otlp"
    path.write_bytes(b"".join(sealed_frame(one.SerializeToString(), at) for at, one in requests(1 / 6, 20.0)))
    used: list[bool] = []
    columns_of = Evaluator.columns_of

    def noted(self: Evaluator, body: bytes, most: int) -> object:
        used.append((found := columns_of(self, body, most)) is not None)
        return found

    monkeypatch.setattr(Evaluator, "columns_of", noted)
    said = []
    for columns in (True, False):
        monkeypatch.setattr(machine_code, "is_available", lambda there=columns: there)
        said.append(replay(contract(), read_recordings([path], []), 20.0, GroupTiming()))
    assert said[0] == said[1]
    assert said[0].points == {"accepted": 1500}
    assert used == [True] * 30 + [False] * 30
