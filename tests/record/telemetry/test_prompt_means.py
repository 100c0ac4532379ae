"""Prompts and steps that count once: means over rollouts, groups that come in parts, the design effect."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kc_otel.record.telemetry.accumulate import Accumulator
from kc_otel.record.telemetry.prompt_means import PromptMeans, Rollouts

SLICES = ("all", "code")


def batch(drift, tokens=4):
    inference = np.full((len(drift), tokens), -1.0)
    return inference + np.log1p(-np.asarray(drift, dtype=float))[:, None], inference


def counted(accumulator, key, slice="all"):
    histogram = accumulator.snapshot().get((key, slice))
    return (0, 0.0) if histogram is None else (histogram.count, pytest.approx(histogram.sum, rel=1e-5))


def made(*keys, **more):
    return Accumulator(SLICES, averaged=keys or ("tv_token_by_prompt", "tv_token_by_step"), **more)


def test_a_prompt_counts_once_with_the_mean_over_its_rollouts() -> None:
    """In each slice over those of its rollouts that are in it; a step with the mean over its prompts."""
    accumulator = made()
    member = np.array([[1, 1], [1, 0], [1, 0], [1, 1]], dtype=bool)
    accumulator.add_sampled(
        *batch([0.1, 0.3, 0.5, 0.1]), membership=member, rollouts=Rollouts(["a", "a", "b", "b"], step=1)
    )
    assert counted(accumulator, "tv_token_by_prompt") == (2, 0.2 + 0.3)
    assert counted(accumulator, "tv_token_by_prompt", "code") == (2, 0.1 + 0.1)
    assert counted(accumulator, "tv_token_by_step") == (0, 0.0)
    accumulator.add_sampled(*batch([0.4]), rollouts=Rollouts(["c"], step=2))
    assert counted(accumulator, "tv_token_by_step") == (1, 0.25)
    accumulator.expire(math.inf)
    assert counted(accumulator, "tv_token_by_step") == (2, 0.65)
    assert counted(accumulator, "prompt_rollouts") == (3, 5)
    assert dict(accumulator.take_outcomes()) == {"whole": 3}


def test_a_rollout_that_never_comes_is_waited_for_until_the_step_after_the_next() -> None:
    """Not for the whole patience: a breach would be told when it is over."""
    accumulator = made("tv_seq_by_prompt")
    for step in (1, 2):
        accumulator.add_sampled(*batch([0.1 * step], 1), rollouts=Rollouts(["a"], 2, step))
    assert counted(accumulator, "tv_seq_by_prompt") == (0, 0.0)
    accumulator.add_sampled(*batch([0.3], 1), rollouts=Rollouts(["a"], 2, 3))
    assert counted(accumulator, "tv_seq_by_prompt") == (1, 0.1)
    assert dict(accumulator.take_outcomes()) == {"part": 1}


def test_rollouts_in_several_batches_are_waited_for() -> None:
    """Where the size is known: in any order, with sequences that fail a check counted as arrived."""
    accumulator = made("tv_seq_by_prompt")
    of = {"size": 4, "step": 7}
    accumulator.add_sampled(*batch([0.1, 0.2, 0.3], 1), rollouts=Rollouts(["a", "b", "a"], **of))
    train, inference = batch([0.5, 0.3], 1)
    train[0] = np.nan
    accumulator.add_sampled(train, inference, rollouts=Rollouts(["a", "a"], **of))
    assert counted(accumulator, "tv_seq_by_prompt") == (1, (0.1 + 0.3 + 0.3) / 3)
    assert accumulator.waiting == 2  # the prompt b, and the step
    accumulator.add_sampled(*batch([0.2, 0.2, 0.6], 1), rollouts=Rollouts(["b"] * 3, **of))
    assert counted(accumulator, "tv_seq_by_prompt") == (2, 0.7 / 3 + 0.3)
    assert dict(accumulator.take_outcomes()) == {"whole": 2}


def test_a_prompt_that_stays_incomplete_counts_in_time_with_what_came() -> None:
    """And what comes after that is a part of it, which is said."""
    accumulator = made("tv_token_by_prompt", patience=10.0)
    accumulator.add_sampled(*batch([0.2]), rollouts=Rollouts(["a"], 2, 1, at=100.0))
    accumulator.expire(109.0)
    assert counted(accumulator, "tv_token_by_prompt") == (0, 0.0)
    accumulator.expire(111.0)
    assert counted(accumulator, "tv_token_by_prompt") == (1, 0.2)
    accumulator.add_sampled(*batch([0.4]), rollouts=Rollouts(["a"], 2, 1, at=112.0))
    assert counted(accumulator, "tv_token_by_prompt") == (2, 0.6)
    assert dict(accumulator.take_outcomes()) == {"part": 2}


def test_a_prompt_of_another_step_is_another_observation() -> None:
    accumulator = made("tv_token_by_prompt")
    for step in (1, 2, 2):
        accumulator.add_sampled(*batch([0.2, 0.2]), rollouts=Rollouts(["a", "a"], step=step))
    assert dict(accumulator.take_outcomes()) == {"whole": 2, "part": 1}


def test_sequences_count_by_themselves_where_nobody_knows_prompts() -> None:
    """As `assumed`, and a batch whose step nobody knows is one."""
    accumulator = made()
    accumulator.add_sampled(*batch([0.1, 0.3]))
    assert counted(accumulator, "tv_token_by_prompt") == (2, 0.4)
    assert counted(accumulator, "tv_token_by_step") == (1, 0.2)
    assert counted(accumulator, "prompt_rollouts") == (0, 0.0)
    assert dict(accumulator.take_outcomes()) == {"assumed": 2}


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kc_otel.record.telemetry.prompt_means._MAX_OPEN_PROMPTS", 2)
    accumulator = made("tv_token_by_prompt")
    accumulator.add_sampled(*batch([0.1, 0.2, 0.3]), rollouts=Rollouts(["a", "b", "c"], 2, 1))
    assert counted(accumulator, "tv_token_by_prompt") == (1, 0.1)
    assert dict(accumulator.take_outcomes()) == {"part": 1}


@pytest.mark.parametrize(("among", "within"), [(0.0, 1.0), (1.0, 1.0), (1.0, 0.0)])
def test_the_design_effect_is_what_the_variances_say(among: float, within: float) -> None:
    rng = np.random.default_rng(3)
    prompts, rollouts = 2000, 8
    values = np.repeat(rng.normal(5.0, among, prompts), rollouts) + rng.normal(0.0, within, prompts * rollouts)
    means = PromptMeans(("tv_token",), 1)
    names = [row // rollouts for row in range(values.size)]
    for half in (slice(None, values.size // 2), slice(values.size // 2, None)):
        means.add(values[None, half], np.ones((values[half].size, 1), bool), Rollouts(names[half]))
    rho = among**2 / (among**2 + within**2)
    assert means.design_effect == pytest.approx(1 + (rollouts - 1) * rho, rel=0.1)


def test_what_is_assumed_of_sequences_is_recorded() -> None:
    accumulator = Accumulator(SLICES, sampling=("sequence_tokens", "advantage_abs"))
    mask = np.arange(4) < np.array([[4], [2]])
    advantages = np.array([[1.0, -3.0, 0.0, 0.0], [0.5, 0.5, 9.0, 9.0]])
    accumulator.add_sampled(*batch([0.1, 0.3]), mask=mask, advantages=advantages)
    accumulator.add_sampled(*batch([0.1]), advantages=np.array([-4.0]))
    assert counted(accumulator, "sequence_tokens") == (3, 10)
    assert counted(accumulator, "advantage_abs") == (3, 7.5)
