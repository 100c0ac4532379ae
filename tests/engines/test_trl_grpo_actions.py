"""What a contract's policy does to a real GRPO run: quarantine of rollouts, and weights sent again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kc_otel.integrations.trl import FollowDirectives
from tests.engines.test_trl_grpo import after_step, checkpoint, engine, llm, recording, train, trainer  # noqa: F401 - fixtures

pytestmark = pytest.mark.slow

NEVER = [{"id": "token-tv", "metric": "tv_token", "unit": "token", "statistic": "mean", "limit": 1e-9}]


@pytest.mark.parametrize("slices", [["all"], []])
def test_rollouts_in_quarantine_are_not_learned_from(trainer, recording, slices):  # noqa: F811
    recorder, judge = recording(statistical=NEVER)
    running = trainer(max_steps=2)
    before = {name: value.clone() for name, value in running.model.state_dict().items()}
    train(running, recorder, quarantine=lambda: slices)
    moved = [name for name, value in running.model.state_dict().items() if not torch.equal(value, before[name])]
    stats = recorder.stats()
    assert stats.dropped == {}
    assert stats.sequences == 32
    assert judge.points("kc.drift.tv_token", kc_slice="all")[0].sum > 0
    if slices:
        assert moved == []
        assert stats.quarantined == 32
        (tv,) = judge.points("kc.quarantine.tv", kc_outcome="quarantined")
        assert tv.value == pytest.approx(judge.points("kc.drift.tv_token", kc_slice="all")[0].sum, rel=1e-6)
    else:
        assert moved
        assert stats.quarantined == 0


def test_weights_that_stopped_arriving_are_sent_again(trainer, engine, recording):  # noqa: F811
    recorder, judge = recording()
    running = trainer(max_steps=8)
    engine.skip_from = 4
    totals, sent = {0: (0.0, 0)}, []

    def look(step):
        assert recorder.force_flush()
        points = [
            point for slice in ("all", "stale") for point in judge.points("kc.drift.abs_log_ratio", kc_slice=slice)
        ]
        totals[step] = (sum(point.sum for point in points), sum(point.count for point in points))

    def stale(*_):
        verdict = judge.verdicts()["lag", "all"]
        return verdict.reason if verdict.status.value == "FAIL" else None

    def repair(model):
        assert model is not None
        sent.append(running.state.global_step)
        engine.skip_from = float("inf")
        engine.sync(running)

    asked = SimpleNamespace(sampling=lambda *_: 1.0, resync=stale, halted=lambda *_: None)
    follow = FollowDirectives(recorder, asked, repair)
    running.add_callback(after_step(look))
    running.add_callback(follow)
    train(running, recorder, weights=lambda: engine.step)

    def mean(last):  # |l| of the two steps that one rollout is trained on in
        (total, count), (before, counted) = totals[last], totals[last - 2]
        return (total - before) / (count - counted)

    assert sent == [5]
    assert ["limit" in reason for reason in follow.loop.sent] == [True]
    assert mean(6) > 3 * mean(4)
    assert mean(8) < 2 * mean(4)
    assert recorder.stats().dropped == {}


def test_the_example_sends_lost_weights_again():
    """As it is printed: rollouts of old weights are kept out, weights are sent again, and training ends as planned."""
    done = subprocess.run(
        [sys.executable, "-m", "examples.trl_grpo"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for said in (
        "rollouts count in no loss; token-tv was 0.",
        "weights sent again, because ",
        "nobody asked for a halt",
    ):
        assert said in done.stdout
