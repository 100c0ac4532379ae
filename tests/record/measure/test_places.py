"""Positions, turns and phases of tokens, against a loop over every token."""

from __future__ import annotations

import numpy as np

from kc_otel.contract.slices import PLACES, POSITION_EDGES, TURNS
from kc_otel.record.slice_table import BETWEEN, Places

WIDTH = 300


def masks(seed):
    """Responses of one turn and of several, padded on either side, with and without a tool's answers between."""
    rng = np.random.default_rng(seed)
    found = np.zeros((12, WIDTH), dtype=bool)
    for row in range(11):
        at = int(rng.integers(0, 40))
        for _ in range(int(rng.integers(1, 7))):
            long = int(rng.integers(1, 60))
            found[row, at : at + long] = True
            at += long + int(rng.integers(1, 30))
    return found


def by_hand(mask):
    found, first, turn = {}, None, 0
    for column, counts in enumerate(mask):
        if counts:
            first = column if first is None else first
            turn += column == 0 or not mask[column - 1]
            found[column] = (column - first, turn)
    return found


def places_of(position, turn):
    edge = max(edge for edge in POSITION_EDGES if edge <= position)
    return {f"position:{edge}", f"turn:{min(turn, TURNS)}"}


def test_every_token_is_where_a_loop_says():
    """Runs of ones are turns, positions count from the first token, and each token is in one bin of either."""
    for seed in range(5):
        counts = masks(seed)
        made = Places(counts)
        bounds = np.delete(np.stack([made.bounds[:, :-1], made.bounds[:, 1:]]), BETWEEN, axis=2)
        for row, mask in enumerate(counts):
            expected = by_hand(mask)
            for column, (position, turn) in expected.items():
                assert (made.positions[row, column], made.turns[row, column]) == (position, turn)
                assert made.begins[row, column] == (column == 0 or not mask[column - 1])
                low, high = bounds[:, row]
                inside = {PLACES[place] for place in np.flatnonzero((low <= column) & (column < high))}
                assert inside == places_of(position, turn)


def test_positions_stand_for_a_mask_that_is_gone():
    counts = masks(7)[:11]
    whole = Places(counts)
    lengths = counts.sum(1)
    inside = np.arange(lengths.max()) < lengths[:, None]
    given = np.zeros(inside.shape, dtype=np.int64)
    given[inside] = whole.positions[counts]
    packed = Places(inside, given)
    assert np.array_equal(packed.turns[inside], whole.turns[counts])
    assert np.array_equal(packed.begins[inside], whole.begins[counts])
    for found, mask in ((whole, counts), (packed, inside)):
        before = np.concatenate([np.zeros((11, 1), dtype=int), np.cumsum(mask, axis=1)], axis=1)
        found.__dict__["counted"] = np.diff(np.take_along_axis(before, found.bounds, axis=1), axis=1)
    assert np.array_equal(whole.counted, packed.counted)
