"""Slices of tokens, and drift by position and turn: exact, and no further sequences, prompts or evidence."""

from __future__ import annotations

import numpy as np
import pytest

from kc_otel.contract.slices import PLACES, POSITION_EDGES, TURNS
from kc_otel.record.measure.sampled import SEQUENCE, TOKEN
from kc_otel.record.slice_table import Places, TokenSlice
from kc_otel.record.telemetry.accumulate import Accumulator
from kc_otel.record.telemetry.prompt_means import Rollouts
from kc_otel.stats.surplus import Surplus

SLICES = ("all", "late", "second", "stale")
AVERAGED = ("tv_token_by_prompt", "tv_token_by_sequence", "tv_seq_by_prompt", "advantage_drift_positive_by_prompt")


def batch(seed=0, sequences=12, tokens=120):
    rng = np.random.default_rng(seed)
    inference = -rng.exponential(size=(sequences, tokens)).astype(np.float32) - 0.2
    train = inference + rng.normal(0, 0.05, size=inference.shape).astype(np.float32)
    mask = np.arange(tokens) < rng.integers(30, tokens, sequences)[:, None]
    mask[::2, 10:25] = False
    advantages = rng.normal(size=inference.shape).astype(np.float32)
    return train, inference, mask, advantages, [f"p{row // 3}" for row in range(sequences)]


def parts_of(places):
    late = places.counts & (places.positions >= 40)
    return [TokenSlice(1, late), TokenSlice(2, places.counts & (places.turns == 2))]


def recorded(given, prompts, *, parts=True, size=None):
    train, inference, mask, advantages = given
    places = Places(mask)
    accumulator = Accumulator(SLICES, averaged=AVERAGED)
    more = {"rollouts": Rollouts(prompts, size, 1, 0.0), "places": places, "parts": parts_of(places) if parts else ()}
    result = accumulator.add_sampled(train, inference, mask=mask, advantages=advantages, **more)
    return accumulator, result, places


def test_slices_of_tokens_hold_these_tokens_and_no_others():
    *given, prompts = batch()
    accumulator, _, places = recorded(given, prompts)
    alone, _, _ = recorded(given, prompts, parts=False)
    found, without = accumulator.snapshot(), alone.snapshot()
    for key, histogram in without.items():
        assert (found[key].count, found[key].sum) == (histogram.count, pytest.approx(histogram.sum)), key
    log_w = (given[0] - given[1]).astype(np.float64)
    tv = TOKEN["tv_token"](log_w)
    for name, part in zip(SLICES[1:3], parts_of(places), strict=True):
        rows = np.flatnonzero(part.mask.any(1))
        assert found["tv_token", name].count == part.mask.sum()
        assert found["tv_token", name].sum == pytest.approx(tv[part.mask].sum(), rel=1e-5)
        means = {row: tv[row][part.mask[row]].mean() for row in rows}
        whole = {row: SEQUENCE["tv_seq"](log_w[row][part.mask[row]].sum(), 1) for row in rows}
        for key, values in (("tv_token", means), ("tv_seq", whole)):
            by = {prompt: [values[row] for row in rows if prompts[row] == prompt] for prompt in prompts}
            expected = [np.mean(members) for members in by.values() if members]
            histogram = found[f"{key}_by_prompt", name]
            assert (histogram.count, histogram.sum) == (len(expected), pytest.approx(sum(expected), rel=1e-5))
        assert found["tv_token_by_sequence", name].count == rows.size


@pytest.mark.parametrize("size", [None, 3])
def test_parts_are_no_further_prompts(size):
    *given, prompts = batch()
    accumulator, result, _ = recorded(given, prompts, size=size)
    assert result.sequences == 12
    assert accumulator.take_outcomes() == {"whole": 4}
    alone, _, _ = recorded(given, prompts, parts=False, size=size)
    assert accumulator.waiting == alone.waiting
    rollouts = accumulator.snapshot()["prompt_rollouts", "all"]
    assert (rollouts.count, rollouts.sum) == (4, 12.0)


def test_parts_are_no_evidence_of_how_tokens_were_sampled(monkeypatch):
    """A batch that is sound stays so, though a slice picks tokens by what they are; what fails has no parts."""
    *given, _ = batch()
    train, inference, mask, _ = given
    picked = TokenSlice(1, mask & (train > inference + 0.08))  # E_Q[P/Q] over these is far above 1
    accumulator, seen, add = Accumulator(SLICES), [], Surplus.add
    monkeypatch.setattr(Surplus, "add", lambda held, bets, ratio: seen.append(ratio) or add(held, bets, ratio))
    for _ in range(30):
        result = accumulator.add_sampled(train, inference, mask=mask, parts=[picked])
        assert result.sequences == 12
    assert accumulator.snapshot()["tv_token", "late"].count == 30 * picked.mask.sum()
    assert len(seen) == 30
    assert max(seen) < 1.02
    broken = train.copy()
    broken[3, 0] = np.nan
    before = accumulator.snapshot()["tv_token", "late"].count
    accumulator.add_sampled(broken, inference, mask=mask, parts=[TokenSlice(1, mask)])
    assert accumulator.snapshot()["tv_token", "late"].count - before == mask.sum() - mask[3].sum()


def test_what_is_checked_as_a_whole_is_not_checked_in_parts():
    """Differences that end at one value in every row are a fault of a program; in a slice of tokens they are not."""
    rng = np.random.default_rng(0)
    inference = -rng.exponential(size=(40, 80)) - 2.0
    noise = rng.normal(0, 0.2, size=inference.shape)
    noise[:, :40] = noise[:, :40].clip(-0.3, 0.3)
    picked = TokenSlice(1, np.broadcast_to(np.arange(80) < 40, noise.shape))
    assert Accumulator(SLICES).add_sampled((inference + noise)[:, :40], inference[:, :40]).sequences == 0
    accumulator = Accumulator(SLICES)
    assert accumulator.add_sampled(inference + noise, inference, parts=[picked]).sequences == 40
    assert accumulator.snapshot()["tv_token", "late"].count == 40 * 40


def test_drift_by_place_is_one_mean_for_each_prompt():
    *given, prompts = batch(tokens=400)
    accumulator, _, places = recorded(given, prompts, parts=False)
    found = {slice: histogram for (key, slice), histogram in accumulator.snapshot().items() if key == "tv_place"}
    tv = TOKEN["tv_token"]((given[0] - given[1]).astype(np.float64))
    bins = np.searchsorted(POSITION_EDGES, places.positions, side="right") - 1
    masks = {f"position:{edge}": places.counts & (bins == number) for number, edge in enumerate(POSITION_EDGES)}
    masks |= {f"turn:{turn}": places.counts & (places.turns == turn) for turn in range(1, TURNS + 1)}
    there = [place for place in PLACES if masks[place].any()]
    assert sorted(found) == sorted(there)
    for place in there:
        rows = [(prompts[row], tv[row][masks[place][row]].mean()) for row in range(12) if masks[place][row].any()]
        means = [np.mean([value for name, value in rows if name == prompt]) for prompt in {name for name, _ in rows}]
        assert (found[place].count, found[place].sum) == (len(means), pytest.approx(sum(means), rel=1e-5))


def test_turns_are_told_only_where_there_are_several():
    """Where every response is one run, its only turn would say again what is known of all traffic."""
    train, inference, _, _, _ = batch()
    accumulator = Accumulator(SLICES)
    accumulator.add_sampled(train, inference, places=Places(np.ones(train.shape, dtype=bool)))
    places = {slice for key, slice in accumulator.snapshot() if key == "tv_place"}
    assert places == {"position:0", "position:16", "position:64"}


def test_logits_are_sliced_by_token_too():
    """Exact quantities are of the tokens that a slice selects, without a second look at the logits."""
    rng = np.random.default_rng(0)
    train = rng.normal(size=(4, 30, 16)).astype(np.float32)
    inference = train + rng.normal(0, 0.05, size=train.shape).astype(np.float32)
    mask = np.arange(30) < np.array([[30], [20], [12], [5]])
    targets = inference.argmax(2)
    part = TokenSlice(1, mask & (np.arange(30) >= 8))
    places = Places(mask)
    accumulator = Accumulator(SLICES, averaged=("tv_exact_by_prompt",))
    accumulator.add_logits(train, inference, mask=mask, targets=targets, places=places, parts=[part])
    alone = Accumulator(SLICES, averaged=("tv_exact_by_prompt",))
    alone.add_logits(train, inference, mask=part.mask, targets=targets)
    found, expected = accumulator.snapshot(), alone.snapshot()
    for key in ("tv_exact", "tv_token", "tv_exact_by_prompt", "logit_half_range"):
        here, there = found[key, "late"], expected[key, "all"]
        assert (here.count, here.sum) == (there.count, pytest.approx(there.sum)), key
    assert found["tv_exact", "all"].count == mask.sum()
    assert found["tv_place", "position:0"].count == 4
