"""A loop of one's own that follows the evaluator's directives."""

from __future__ import annotations

import numpy as np
import pytest

from kc_otel.client.router import Router
from kc_otel.judge.decisions import DecisionTable, Directive, DirectiveKind

CLAUSES = [{"id": "tv", "metric": "tv_token", "unit": "token", "statistic": "mean", "limit": 0.1}]


@pytest.fixture
def recorder(recorders, contract):
    named = {name: {"where": {"task": name}} for name in ("code", "prose")}
    return recorders(contract=contract(slices=named, statistical=CLAUSES), sampling=0.0)


@pytest.fixture
def asked(recorder):
    """A router whose evaluator asks for these kinds, of slice code."""
    router = Router.from_table(DecisionTable())

    def ask(*kinds):
        name = recorder.contract.name
        found = tuple(Directive(name, kind, "code", f"{kind} because", 0.0, "f") for kind in sorted(kinds))
        router._take(DecisionTable(version=1, directives=found))
        return router

    return ask


def test_everything_is_measured_while_more_is_asked_for(recorder, asked, logprobs):
    """The contract's share before and after, all of it in between; spans and exports say the share of the moment."""
    loop = recorder.follow(asked())
    loop.compare(*logprobs(2, 10))
    asked(DirectiveKind.SAMPLING)
    loop.compare(*logprobs(3, 10))
    asked()
    loop.compare(*logprobs(4, 10))
    recorder.force_flush()
    assert recorder.stats().sequences == 3


def test_a_mask_leaves_out_what_is_in_quarantine(recorder, asked, logprobs):
    """Only sequences of the failing slice that break the contract by themselves, and only while it is asked for."""
    train, inference = logprobs(4, 20)
    train = train.copy()
    train[:2] -= 0.5
    tasks = [{"task": task} for task in ("code", "prose", "code", "prose")]
    mask = np.ones((4, 20), dtype=bool)
    mask[:, 15:] = False
    loop = recorder.follow(asked())
    assert loop.compare(train, inference, mask=mask, attributes=tasks) is mask
    asked(DirectiveKind.QUARANTINE_ROLLOUTS)
    kept = loop.compare(train, inference, mask=mask, attributes=tasks)
    assert kept.any(1).tolist() == [False, True, True, True]
    assert np.array_equal(kept[1:], mask[1:])
    recorder.force_flush()
    assert recorder.stats().quarantined == 1


def test_what_truncation_kept_is_taken_into_account(recorder, asked):
    """The trainer's log-probabilities are from before top-p: sound sequences stay, one that drifts does not."""
    loop = recorder.follow(asked(DirectiveKind.QUARANTINE_ROLLOUTS))
    rng = np.random.default_rng(4)
    inference = np.log(rng.uniform(0.2, 0.9, (4, 60)))
    mass = np.full((4, 60), np.log(0.8))
    train = inference + mass
    train[1] += rng.uniform(-0.8, 0.2, 60)
    mask = loop.compare(train, inference, attributes={"task": "code"}, kept=(mass, None))
    assert mask.all(axis=1).tolist() == [True, False, True, True]


def test_what_cannot_be_looked_at_is_kept_and_counted(recorder, asked):
    """A fault of the loop's arrays is not raised into it."""
    loop = recorder.follow(asked(DirectiveKind.QUARANTINE_ROLLOUTS))
    assert loop.compare(np.zeros((2, 3)), np.zeros((3, 2)), mask=None) is None
    assert recorder.stats().dropped == {"quarantine-failed": 1}


def test_weights_are_sent_when_asked_and_not_at_every_step(recorder, asked):
    """At once, then after a pause while the reason lasts, and at once when it comes anew; a failure ends nothing."""
    calls = []

    def send():
        calls.append(step)
        if len(calls) == 1:
            raise OSError("the engine is busy")

    loop = recorder.follow(asked(), send_weights=send, pause=3)
    for step in range(12):
        if step in {1, 9}:
            asked(DirectiveKind.RESYNC_WEIGHTS)
        if step == 8:
            asked()
        assert loop.go_on()
    assert calls == [1, 4, 7, 9]
    assert loop.sent == 3


def test_a_loop_that_cannot_send_weights_says_so_once(recorder, asked, caplog):
    """Nobody is left to believe that somebody listens."""
    loop = recorder.follow(asked(DirectiveKind.RESYNC_WEIGHTS))
    assert loop.go_on()
    assert loop.go_on()
    assert caplog.text.count("follow was given no send_weights: resync-weights because") == 1


def test_a_halt_ends_the_loop_for_good(recorder, asked):
    """With the reason; that it resolves afterwards does not start training again."""
    loop = recorder.follow(asked())
    assert loop.go_on()
    asked(DirectiveKind.HALT)
    assert not loop.go_on()
    asked()
    assert not loop.go_on()
    assert loop.reason == "halt because"


def test_a_pause_is_a_number_of_steps(recorder, asked):
    """0 would send the weights before every step."""
    with pytest.raises(ValueError, match="pause: 0 is not 1 or more"):
        recorder.follow(asked(), pause=0)
