"""Quarantine and weight synchronisation in a TRL trainer: what needs no TRL."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import pytest
import torch

from kc_otel.integrations.trl import ResyncWeights, instrument
from tests.integrations.test_trl_watch import PROMPTS, TASKS, Trainer, reward

CLAUSES = [{"id": "tv", "metric": "tv_token", "unit": "token", "statistic": "mean", "limit": 0.1}]


@pytest.fixture
def watched(recorders, contract):
    """A trainer whose losses keep what they were given, its watch and its recorder; `slices` are in quarantine."""

    def make(slices, clauses=CLAUSES):
        named = {name: {"where": {"task": name}} for name in ("code", "prose")}
        recorder = recorders(contract=contract(slices=named, statistical=clauses))
        trainer = Trainer(reward)
        trainer.given = []
        original = trainer.compute_loss
        trainer.compute_loss = lambda *args: (trainer.given.append(args[1]), original(*args))[1]
        return trainer, instrument(trainer, recorder, quarantine=slices), recorder

    return make


def batch_of(trainer, *drifts):
    """A batch of tasks prose, code, prose, code, each of whose tokens has drifted by so many nats."""
    batch = trainer.generated(PROMPTS, TASKS)
    moved = torch.tensor(drifts)[:, None] * batch["completion_mask"]
    batch["old_per_token_logps"] = batch["sampling_per_token_logps"] + moved
    batch["importance_sampling_ratio"] = moved.exp()
    return batch


def test_sequences_that_broke_are_in_no_loss_and_in_every_metric(watched, memory):
    trainer, watch, recorder = watched(lambda: {"prose": "tv is 0.3 where 0.1 is allowed"})
    batch = batch_of(trainer, -0.5, -0.5, 0.0, 0.0)
    trainer.compute_loss(trainer.model, batch)
    recorder.force_flush()

    (given,) = trainer.given
    assert watch.quarantine.reasons == ("tv", "", "", "")
    assert given["tool_mask"].sum(1).tolist() == [0, *batch["completion_mask"].sum(1).tolist()[1:]]
    assert given["completion_mask"] is batch["completion_mask"]
    assert "tool_mask" not in batch
    tokens = batch["completion_mask"].sum(1).tolist()
    assert memory.count() == sum(tokens)
    drifted = (tokens[0] + tokens[1]) * (1 - math.exp(-0.5))
    (point,) = memory.points("kc.drift.tv_token", kc_slice="all")
    assert point.sum == pytest.approx(drifted, rel=1e-6)
    counted = {
        outcome: [memory.points(f"kc.quarantine.{name}", kc_outcome=outcome)[0].value for name in NAMES]
        for outcome in ("kept", "quarantined")
    }
    tv = 1 - math.exp(-0.5)
    assert counted["quarantined"] == [1, tokens[0], pytest.approx(tokens[0] * tv, rel=1e-6)]
    assert counted["kept"] == [3, sum(tokens[1:]), pytest.approx(tokens[1] * tv, rel=1e-6)]
    assert recorder.stats().quarantined == 1
    assert recorder.stats().dropped == {}


NAMES = ("sequences", "tokens", "tv")


@pytest.mark.parametrize("slices", [None, dict, lambda: {"code": "why"}])
def test_without_a_breach_the_batch_is_the_trainers_own(watched, memory, slices):
    trainer, _, recorder = watched(slices)
    batch = batch_of(trainer, -0.5, 0.0, -0.5, 0.0)
    trainer.compute_loss(trainer.model, batch)
    assert trainer.given[0] is batch
    recorder.force_flush()
    assert recorder.stats().quarantined == 0
    asked = slices is not None and bool(slices())
    assert bool(memory.points("kc.quarantine.sequences")) is asked


def test_a_log_probability_that_is_no_number_does_not_reach_the_loss(watched):
    trainer, _, _ = watched(lambda: ["all"])
    batch = batch_of(trainer, 0.0, 0.0, 0.0, 0.0)
    batch["sampling_per_token_logps"][1, 0] = torch.nan
    batch["importance_sampling_ratio"][1, 0] = torch.nan
    trainer.compute_loss(trainer.model, batch)
    (given,) = trainer.given
    assert given["tool_mask"][1].sum() == 0
    assert not given["importance_sampling_ratio"].isnan().any()
    assert batch["importance_sampling_ratio"].isnan().any()


def test_tool_tokens_stay_out_of_the_loss(watched):
    trainer, _, _ = watched(lambda: ["all"])
    batch = batch_of(trainer, 0.0, -0.5, 0.0, 0.0)
    batch["tool_mask"] = torch.ones_like(batch["completion_mask"])
    batch["tool_mask"][:, 0] = 0
    trainer.compute_loss(trainer.model, batch)
    expected = batch["completion_mask"] * batch["tool_mask"]
    expected[1] = 0
    assert torch.equal(trainer.given[0]["tool_mask"], expected)


def test_evaluation_is_left_alone(watched):
    trainer, _, _ = watched(lambda: ["all"])
    trainer.model.eval()
    batch = batch_of(trainer, -0.5, -0.5, -0.5, -0.5)
    trainer.compute_loss(trainer.model, batch)
    assert trainer.given[0] is batch


def test_without_log_probabilities_before_the_loss_it_says_so(watched, caplog):
    trainer, _, recorder = watched(lambda: ["all"])
    batch = trainer.generated(PROMPTS, TASKS)
    trainer.compute_loss(trainer.model, batch)
    assert trainer.given[0] is batch
    assert recorder.stats().dropped == {"rollout-unusable": 1}
    assert "steps_per_generation above gradient_accumulation_steps" in caplog.text


def test_training_goes_on_when_nobody_can_say_what_is_in_quarantine(watched):
    def broken():
        raise RuntimeError("no idea")

    trainer, _, recorder = watched(broken)
    trainer.compute_loss(trainer.model, batch_of(trainer, -0.5, 0.0, 0.0, 0.0))
    assert trainer.losses == 1
    assert recorder.stats().dropped == {"rollout-unusable": 1}


def test_a_contract_that_cannot_judge_a_sequence_is_refused(watched):
    lag = {"id": "lag", "metric": "weights_lag", "limit": 0}
    with pytest.raises(ValueError, match="no clause that a single sequence can be judged by"):
        watched(lambda: ["all"], clauses=[lag])


def steps(callback, count, **state):
    """So many steps of a trainer."""
    for step in range(count):
        now = SimpleNamespace(global_step=step, is_world_process_zero=True, **state)
        callback.on_step_begin(SimpleNamespace(world_size=1), now, None, model="model")


def test_weights_are_sent_once_for_a_reason_and_again_when_it_lasts(caplog):
    """Not at every step of the window that still fails; at once when the clause breaks anew."""
    reasons = [None, "stale", "stale", "stale", "stale", None, "stale again", None]
    asked, sent = iter(reasons), []
    callback = ResyncWeights(lambda: next(asked), sent.append, pause=3)
    with caplog.at_level(logging.WARNING):
        steps(callback, len(reasons))
    assert callback.steps == [1, 4, 6]
    assert sent == ["model"] * 3
    assert callback.reason == "stale again"
    assert "step 1: weights sent again: stale" in caplog.text


def test_a_synchronisation_that_fails_is_logged_and_tried_again(caplog):
    """Training goes on, and so it does when nobody can say whether to send."""

    def broken(*_):
        raise RuntimeError("no route to the engine")

    callback = ResyncWeights(lambda: "stale", broken, pause=2)
    steps(callback, 4)
    assert (callback.reason, callback.steps) == (None, [])
    assert caplog.text.count("weights were to be sent again and were not") == 2
    steps(ResyncWeights(broken, broken), 3)
    assert caplog.text.count("cannot be told; training goes on") == 1
    with pytest.raises(ValueError, match="pause: 0 is not 1 or more"):
        ResyncWeights(broken, broken, pause=0)
