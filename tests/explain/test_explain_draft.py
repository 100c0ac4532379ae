"""A contract from a budget, and the noise that it has to stand above."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kc_otel.contract.diff import diff
from kc_otel.contract.load import check_text
from kc_otel.explain import explain
from kc_otel.explain.draft import Draft, exact
from kc_otel.explain.draft_yaml import write
from kc_otel.recordings.recording import Recording
from kc_otel.stats.inverses import mean_token_tv_for_sequence_tv
from kc_otel.stats.rewards import token_kl_for_sequence_tv, tv_for_reward_budget


def draft(**changes):
    given = {
        "name": "policy",
        "owner": "rl",
        "train": {"engine": "torch", "dtype": "bfloat16"},
        "inference": {"engine": "vllm", "dtype": "fp8"},
        "reward_budget": 0.1,
        "horizon": 32,
        "slices": {"code": {"task": "code"}, "long": {"prompt_tokens": ">= 8192"}},
    }
    return Draft(**(given | changes))


def recording(deviation, sequences=400, length=32, *, code=1.0, seed=0):
    """Log-probabilities whose log ratios are normal; every other sequence is code, `code` times as noisy."""
    rng = np.random.default_rng(seed)
    scale = np.where(np.arange(sequences) % 2, 1.0, code)
    q = -rng.exponential(1.0, sequences * length) - 1.0
    noise = deviation * np.repeat(scale, length) * rng.normal(size=q.size)
    return Recording(
        train=q + noise,
        inference=q,
        lengths=np.full(sequences, length, dtype=np.int64),
        attributes=tuple({"task": "chat" if index % 2 else "code"} for index in range(sequences)),
        source="noise.npz",
    )


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    st.floats(0.001, 0.9),
    st.integers(1, 100_000),
    st.sampled_from([-5.0, -0.5, 0.0, 2.0]),
    st.floats(0.1, 10),
    st.sampled_from([None, 0.2]),
)
def test_every_draft_is_sound_and_meets_its_budget(share, horizon, low, width, clip):
    """No error or warning, the limits are those of the inverses, cut and not rounded up, and the budget is met."""
    budget = share * width
    made = draft(reward_budget=budget, reward_range=(low, low + width), horizon=horizon, clip=clip)
    written = write(made)
    assert check_text(written.text).problems == ()
    limits = {clause.id: clause.limit_for("all") for clause in written.contract.clauses}
    tv = tv_for_reward_budget(budget, (low, low + width))
    assert limits["reward"] == budget
    for name, derived in (
        ("token-tv", mean_token_tv_for_sequence_tv(tv, horizon)),
        ("token-kl", token_kl_for_sequence_tv(tv, horizon).value),
        ("tail", mean_token_tv_for_sequence_tv(tv, horizon) / 2),
    ):
        assert derived * 0.99 <= limits[name] <= derived * (1 + 1e-8)
    (said,) = explain(written.contract).backwards
    # A share f of tokens beyond 0.5 leaves a mean of at most 0.5 + f / 2: enough where the budget is most of the range.
    enough = {"tail"} if horizon * (0.5 + limits["tail"] / 2) <= tv else set()
    assert {"reward", "token-tv", "token-kl"} | enough == set(said.guaranteed_by)


@pytest.mark.parametrize(("share", "enough"), [(0.66, False), (0.68, True)])
def test_a_wide_budget_is_kept_by_the_tail_alone(share, enough):
    """At one token, a third of tokens beyond 0.5 keeps a budget of two thirds of the range: 0.5 + 0.34 / 2 <= 0.68."""
    (said,) = explain(write(draft(reward_budget=share, reward_range=(0.0, 1.0), horizon=1)).contract).backwards
    assert ("tail" in said.guaranteed_by) is enough


def test_the_text_says_how_each_limit_follows_and_what_breaks():
    """A formula with its numbers before each clause, and a description in it."""
    text = write(draft()).text
    assert "TV_seq <= 0.1 / (1 - 0) = 0.1" in text
    assert "mean <= 0.1 / 32 = 0.00313" in " ".join(text.replace("#", " ").split())
    assert "2 TV^2 / T = 0.000625 nat" in " ".join(text.replace("#", " ").split())
    assert text.count("A PASS takes at least") == 4
    assert text.count("description:") == 5
    assert max(map(len, text.splitlines())) <= 120
    assert diff(write(draft()).contract, write(draft()).contract) == []


@pytest.mark.parametrize(("horizon", "capped"), [(32, True), (1, False)])
def test_a_capped_claim_is_about_sequences_and_has_a_clause_on_what_is_above(horizon, capped):
    """At five limits, where a total variation can be as large as that; sound, and decided by some ten sequences."""
    written = write(draft(capped=True, horizon=horizon, reward_budget=0.3))
    assert check_text(written.text).problems == ()
    clauses = {clause.id: clause for clause in written.contract.clauses}
    one = clauses["token-tv"]
    assert (one.cap is not None, one.by_sequence, "token-tv-tail" in clauses) == (capped, capped, capped)
    if capped:
        tail = clauses["token-tv-tail"]
        assert one.cap == pytest.approx(5 * one.limit_for("all"))
        assert (tail.parsed_statistic.argument, tail.by_sequence) == (pytest.approx(one.cap), True)
        assert next(each.observations for each in written.needed if each.clause == "token-tv") < 100


def test_a_raised_limit_raises_its_cap():
    """Noise above the limit would else be above the cap too."""
    written = write(draft(capped=True), recording(0.2), raise_to_floor=True)
    one = next(clause for clause in written.contract.clauses if clause.id == "token-tv")
    assert "token-tv" in written.raised
    assert one.cap >= 5 * one.limit_for("all")


def test_noise_below_every_limit_is_said():
    """The floor and the limit in the comment; nothing is raised even where that is allowed."""
    written = write(draft(), recording(1e-6), raise_to_floor=True)
    assert {floor.clause for floor in written.floors} == {"reward", "token-tv", "token-kl", "tail"}
    assert {floor.slice for floor in written.floors} == {"all", "code"}  # no sequence is long
    assert all(floor.limit_side in {"above", "open"} for floor in written.floors)
    assert any(floor.limit_side == "above" for floor in written.floors)
    assert written.raised == ()
    assert "is above it" in written.text


def test_noise_above_a_limit_is_said_and_the_limit_kept():
    """A limit that self-noise breaks would fail for ever; raising it is the reader's decision."""
    plain, written = write(draft()), write(draft(), recording(0.03))
    below = {floor.clause for floor in written.floors if floor.limit_side == "below"}
    assert below == {"token-tv"}
    assert "would fail for ever" in " ".join(written.text.replace("#", " ").split())
    assert written.contract.hash == plain.contract.hash
    (floor,) = [one for one in written.floors if (one.clause, one.slice) == ("token-tv", "all")]
    assert floor.lower <= 0.03 * np.sqrt(1 / (2 * np.pi)) <= floor.upper
    assert (floor.samples, floor.unit) == (400 * 32, "token")


def test_a_raised_limit_is_above_the_floor_and_says_that_it_is_no_guarantee():
    """By the margin, on the slice where noise is larger too; and the floor no longer breaks it."""
    noise = recording(0.03, code=3.0)
    written = write(draft(), noise, raise_to_floor=True, margin=1.5)
    assert "token-tv" in written.raised
    (clause,) = [one for one in written.contract.clauses if one.id == "token-tv"]
    floors = {one.slice: one for one in written.floors if one.clause == "token-tv"}
    assert clause.limit_for("all") == pytest.approx(1.5 * floors["all"].upper, rel=0.02)
    assert clause.limit_for("code") == pytest.approx(1.5 * floors["code"].upper, rel=0.02)
    assert clause.limit_for("all") >= 1.5 * floors["all"].upper * 0.999
    assert "no longer guarantees the budget" in written.text.replace("\n  # ", " ")
    assert check_text(written.text).problems == ()
    (said,) = explain(written.contract).backwards
    assert "reward" in said.guaranteed_by
    assert "token-tv" not in said.guaranteed_by


def test_the_budget_is_never_raised():
    """It is what the business can bear, and noise does not change that."""
    written = write(draft(reward_budget=0.01), recording(0.5), raise_to_floor=True)
    assert "reward" not in written.raised
    assert any(floor.clause == "reward" and floor.limit_side == "below" for floor in written.floors)
    assert {c.id: c.limit_for("all") for c in written.contract.clauses}["reward"] == 0.01


def test_a_short_recording_decides_nothing():
    """A wide interval is not a noise floor."""
    written = write(draft(), recording(1e-6, sequences=3), raise_to_floor=True)
    assert {floor.limit_side for floor in written.floors} == {"open"}
    assert written.raised == ()
    assert "too short" in written.text.replace("\n  # ", " ")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"reward_budget": 0.0}, "reward budget: 0.0"),
        ({"reward_budget": 1.0}, "reward budget: 1.0"),
        ({"horizon": 0}, "horizon"),
    ],
)
def test_a_budget_that_is_none_is_refused(changes, named):
    """Nothing to lose and everything to lose leave nothing to write."""
    with pytest.raises(ValueError, match=named):
        write(draft(**changes))


def test_a_margin_below_one_is_refused():
    """The limit would be below the floor."""
    with pytest.raises(ValueError, match=r"margin: 0\.5"):
        write(draft(), recording(0.1), raise_to_floor=True, margin=0.5)


@given(st.floats(1e-12, 1e6))
def test_a_number_is_written_without_an_exponent_and_exactly(value):
    """YAML 1.1 reads 5e-06 as text."""
    assert "e" not in exact(value)
    assert float(exact(value)) == value
