"""Slices under the cap on series, which of them a sequence or a token is in, and drift by place."""

from __future__ import annotations

import numpy as np
import pytest

from kc_otel.contract.registry.clause_metrics import OPERATORS, QUANTITIES, SAMPLING
from kc_otel.contract.slices import OLDER, PLACES, POSITION_EDGES, TURNS
from kc_otel.record.slice_table import BETWEEN, Places, SliceTable
from tests.tools.contracts import contract_of

PLAIN = len(QUANTITIES) + len(SAMPLING) - len(OPERATORS)
"""Streams of a slice, where no clause needs more."""
STALE = ("stale", "stale-1", "stale-2", "stale-4", "stale-8")
NOT_STALE = [False] * len(STALE)
CODE = {"where": {"task": "code"}}
LONG = {"where": {"prompt_tokens": ">= 100"}}


ULP = {"numerical": [{"id": "u", "metric": "operator_ulp", "operator": "attention", "limit": 4}]}
BY_SEQUENCE = {
    "statistical": [
        {"id": "tv", "metric": "tv_token", "unit": "sequence", "limit": 0.01},
        {"id": "share", "metric": "clip_budget_share", "limit": 0.5},
    ],
    "assumptions": {"clip": 0.2},
}
ALL_LAGS = (3 + len(OLDER)) * PLAIN


def contract(slices, max_series=2000, **parts):
    return contract_of(slices=slices, observability={"max_series": max_series}, **parts)


@pytest.mark.parametrize(
    ("parts", "max_series", "names", "places"),
    [
        (ULP, 4 * (PLAIN + len(OPERATORS)), ("all", "code", "long", "stale"), False),
        (ULP, 4 * PLAIN, ("all", "other", "stale"), False),
        (BY_SEQUENCE, 4 * (PLAIN + 2), ("all", "code", "long", "stale"), False),
        (BY_SEQUENCE, 4 * (PLAIN + 2) - 1, ("all", "other", "stale"), False),
        ({}, ALL_LAGS - 1, ("all", "code", "long", "stale"), True),
        ({}, ALL_LAGS + len(PLACES) - 1, ("all", "code", "long", *OLDER), False),
        ({}, ALL_LAGS + len(PLACES), ("all", "code", "long", *OLDER), True),
    ],
)
def test_the_cap_leaves_room_for_so_many_streams(parts, max_series, names, places):
    """What clauses need takes room from slices; lags of their own, then places, are given up before a slice is."""
    table = SliceTable.of(contract({"code": CODE, "long": LONG}, max_series, **parts))
    assert (table.names, table.places) == (names, places)


def test_lengths_come_from_the_mask():
    table = SliceTable.of(contract({"long": {"where": {"completion_tokens": ">= 100"}}}))
    assert "completion_tokens" in table.asked
    assert table.of_batch(None, [0, 2], 3, [200, 50])[:, 1].tolist() == [True, False]
    own = [{"completion_tokens": 20}, {"task": "code"}]
    assert table.of_batch(own, [0, 1], 2, [200, 200])[:, 1].tolist() == [False, True]


def test_what_older_weights_sampled_is_only_in_slices_that_select_by_lag():
    """And in `stale` and its part of that lag; what the trainer's own sampled is where it would be without."""
    slices = {"code": CODE, "old": {"where": {"lag": ">= 2"}}, "old-code": {"where": {"task": "code", "lag": ">= 1"}}}
    table = SliceTable.of(contract(slices))
    assert "lag" in table.asked
    found = table.of_batch({"task": "code"}, range(6), 6, lags=[0, 1, 2, 3, 7, 100])
    names = [{name for name, member in zip(table.names, row, strict=True) if member} for row in found]
    old = {"stale", "old", "old-code"}
    assert names == [{"all", "code"}, {"stale", "stale-1", "old-code"}, old | {"stale-2"}, old | {"stale-2"},
                     old | {"stale-4"}, old | {"stale-8"}]  # fmt: skip
    assert table.of_batch({"task": "code"}, [0], 1).tolist() == [[True, True, False, False, *NOT_STALE]]


def test_attributes_that_cannot_be_hashed_match_what_they_can():
    table = SliceTable.of(contract({"code": CODE}))
    assert table.of_sequence({"task": "code", "tags": ["a"]}).tolist() == [True, True, *NOT_STALE]


def test_remembered_rows_are_bounded():
    table = SliceTable.of(contract({"long": LONG}))
    for i in range(10_000):
        table.of_sequence({"prompt_tokens": i})
    assert len(table._known) <= 4096
    assert np.array_equal(table.of_sequence({"prompt_tokens": 100}), [True, True, *NOT_STALE])


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
        bounds = np.delete(np.stack([made.before[:, :-1], made.before[:, 1:]]), BETWEEN, axis=2)
        for row, mask in enumerate(counts):
            for token, (column, (position, turn)) in enumerate(by_hand(mask).items()):
                assert (made.positions[row, column], made.turns[row, column]) == (position, turn)
                assert made.begins[row, column] == (column == 0 or not mask[column - 1])
                low, high = bounds[:, row]
                inside = {PLACES[place] for place in np.flatnonzero((low <= token) & (token < high))}
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
    assert np.array_equal(whole.before, packed.before)


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


@pytest.mark.parametrize("later", [False, True])
def test_position_turn_and_phase_come_from_the_mask(recorders, contract, memory, logprobs, mask, later):
    """Nobody has to say them; where sides meet later, tokens that the mask left out are gone, and places are not."""
    recorder = recorders(contract=contract(slices=SLICES))
    train, inference = logprobs(4, 60)
    about = {"mask": mask, "attributes": [{"task": "code"}, {}, {}, {}]}
    if later:
        ids = np.arange(240).reshape(4, 60)
        recorder.sampled(list("abcd"), token_ids=ids, logprobs=inference, **about)
        recorder.scored(list("abcd"), token_ids=ids, logprobs=train, mask=mask)
    else:
        recorder.compare(train, inference, **about)
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
