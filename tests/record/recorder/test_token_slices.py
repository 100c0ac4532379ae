"""Slices of tokens and drift by place, as a recorder sends them."""

from __future__ import annotations

import numpy as np
import pytest

from kc_otel.record.slice_table import Places

SLICES = {
    "late": {"where": {"position": ">= 40"}},
    "second": {"where": {"turn": 2}},
    "code-late": {"where": {"task": "code", "position": ">= 40"}},
    "prefill": {"where": {"phase": "prefill"}},
}


@pytest.fixture
def mask():
    found = np.arange(60) < np.array([60, 50, 30, 60])[:, None]
    found[:2, 10:20] = False
    return found


def expected(mask):
    places = Places(mask)
    return {
        "all": mask,
        "late": mask & (places.positions >= 40),
        "second": mask & (places.turns == 2),
        "code-late": mask & (places.positions >= 40) & (np.arange(4) < 1)[:, None],
        "prefill": places.begins,
    }


def test_position_turn_and_phase_come_from_the_mask(recorders, contract, memory, logprobs, mask):
    """Nobody has to say them; other conditions of a slice are about the sequence."""
    recorder = recorders(contract=contract(slices=SLICES))
    recorder.compare(*logprobs(4, 60), mask=mask, attributes=[{"task": "code"}, {}, {}, {}])
    assert recorder.force_flush()
    assert {name: memory.count(name) for name in (*SLICES, "all")} == {
        name: int(of.sum()) for name, of in expected(mask).items()
    }


def test_sides_that_meet_later_keep_their_turns(recorders, contract, memory, logprobs, mask):
    """The tokens that a mask left out are gone by then, and their places are not."""
    recorder = recorders(contract=contract(slices=SLICES))
    train, inference = logprobs(4, 60)
    ids = np.arange(240).reshape(4, 60)
    attributes = [{"task": "code"}, {}, {}, {}]
    recorder.sampled(list("abcd"), token_ids=ids, logprobs=inference, mask=mask, attributes=attributes)
    recorder.scored(list("abcd"), token_ids=ids, logprobs=train, mask=mask)
    assert recorder.force_flush()
    assert {name: memory.count(name) for name in (*SLICES, "all")} == {
        name: int(of.sum()) for name, of in expected(mask).items()
    }
    (second,) = memory.points("kc.drift.tv_place", kc_slice="turn:2")
    assert second.count == 2


def test_a_sequence_may_say_its_turn_itself(recorders, contract, memory, logprobs):
    """Where each turn is a sequence, the mask cannot know; the position still counts within it."""
    slices = {"second": {"where": {"turn": 2}}, "second-late": {"where": {"turn": 2, "position": ">= 40"}}}
    recorder = recorders(contract=contract(slices=slices))
    recorder.compare(*logprobs(2, 60), attributes=[{"turn": 1}, {"turn": 2}])
    assert recorder.force_flush()
    assert (memory.count("second"), memory.count("second-late"), memory.count()) == (60, 20, 120)


def test_tokens_of_older_weights_are_in_no_slice_that_does_not_ask_for_them(recorders, contract, memory, logprobs):
    """A token's place is its place in the whole response, whichever weights sampled what came before it."""
    slices = {"late": SLICES["late"], "stale-late": {"where": {"position": ">= 40", "lag": ">= 1"}}}
    recorder = recorders(contract=contract(slices=slices))
    versions = np.where(np.arange(60) < 50, 6, 7)[None].repeat(3, 0)
    recorder.compare(*logprobs(3, 60), weights=(7, versions), groups=["a", "a", "b"])
    assert recorder.force_flush()
    counts = [memory.count(name) for name in ("all", "stale", "late", "stale-late")]
    assert counts == [30, 150, 30, 30]
    places = {point.attributes["kc.slice"]: point.count for point in memory.points("kc.drift.tv_place")}
    assert places == {"position:16": 2}


def test_clauses_that_are_about_no_token_have_no_cell_on_a_slice_of_tokens(contract):
    made = contract(
        slices=SLICES,
        statistical=[{"id": "tv", "metric": "tv_token", "limit": 0.01}],
        runtime=[{"id": "lag", "metric": "weights_lag", "limit": 1}],
    )
    tv, lag = made.clauses
    assert made.slices_for(tv) == ("all", *SLICES)
    assert made.slices_for(lag) == ("all",)
