"""A contract from a budget, and the noise that it has to stand above."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kc_otel.contract.diff import diff
from kc_otel.contract.load import check_text
from kc_otel.contract.measuring_paths import MeasuringPath, left_open
from kc_otel.judge.sample_sizes import observations_to_pass, typical_size
from kc_otel.offline.draft import Draft, exact, write
from kc_otel.recordings.recording import Recording


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
    budget = share * width
    made = draft(reward_budget=budget, reward_range=(low, low + width), horizon=horizon, clip=clip)
    written = write(made)
    assert check_text(written.text).problems == ()
    assert all(cell.observations is not None for cell in written.needed)
    assert {clause.id: clause.limit for clause in written.contract.statistical} == {"reward": budget}


def test_the_text_says_how_each_limit_follows_and_what_breaks():
    text = write(draft()).text
    assert "TV_seq <= 0.1 / (1 - 0) = 0.1" in text
    assert text.count("A PASS takes at least") == 1
    assert text.count("description:") == 2
    assert max(map(len, text.splitlines())) <= 120
    assert diff(write(draft()).contract, write(draft()).contract) == []


def of(written, clause, slice="all"):
    """A clause, its limit on a slice, and what the baseline keeps there."""
    (found,) = [candidate for candidate in written.contract.clauses if candidate.id == clause]
    floor = next((other for other in written.floors if (other.clause, other.slice) == (clause, slice)), None)
    return found, found.limit_for(slice), floor


@pytest.mark.parametrize("deviation", [0.003, 0.03, 0.3])
def test_limits_are_what_the_baseline_keeps_with_room(deviation):
    """Whether the budget would give more or less; the budget itself stays; and the baseline breaks none of them."""
    written = write(draft(reward_budget=0.3), recording(deviation), margin=1.5)
    assert set(written.measured) == {"token-tv", "token-kl", "tail"}
    clause, limit, floor = of(written, "token-tv")
    assert limit >= 1.5 * floor.interval.upper * 0.999
    assert floor.interval.lower <= deviation * np.sqrt(1 / (2 * np.pi)) * 1.02
    assert clause.cap == pytest.approx(5 * max(limit, clause.limit_for("code")), rel=0.01)
    assert of(written, "token-tv-tail")[0].parsed_statistic.argument == clause.cap
    assert of(written, "reward")[1] == 0.3
    assert check_text(written.text).problems == ()


def test_rewards_outside_of_the_range_are_refused():
    """No verdict on rewards of the contract could ever be a PASS."""
    plain = recording(0.03)
    rows = ({**row, "reward": float(np.nan if at == 2 else at % 2 or -1)} for at, row in enumerate(plain.attributes))
    rewarded = replace(plain, attributes=tuple(rows))
    with pytest.raises(ValueError, match=r"^noise.npz: rewards lie between -1 and 1, outside of 0 to 1; give "):
        write(draft(), rewarded)
    assert write(draft(reward_range=(-1.0, 1.0)), rewarded).contract.assumptions.reward_range == (-1.0, 1.0)


def test_the_comment_beside_a_limit_names_the_figure_that_it_comes_from():
    """The recording, its estimate and bound, and what they rest on."""
    written = write(draft(), recording(0.03))
    text = " ".join(written.text.replace("#", " ").split())
    assert "2 x the upper bound on the drift of noise.npz: 0.0116, at most 0.0122, from 12,800 tokens." in text


@pytest.mark.parametrize(
    ("path", "rewarded", "metric"),
    [
        ("trl", False, "reward_drift"),
        ("verl", False, "reward_drift"),
        ("loop", True, "reward_drift"),
        ("gate", True, "reward_drift"),
        ("loop", False, "reward_drift_bound"),
        ("vllm", True, "reward_drift_bound"),
    ],
)
def test_the_budget_is_measured_where_rewards_are_known(path, rewarded, metric):
    baseline = recording(0.001)
    if rewarded:
        baseline = replace(baseline, attributes=tuple({**labels, "reward": 1.0} for labels in baseline.attributes))
    assert of(write(draft(data=MeasuringPath(path)), baseline), "reward")[0].metric == metric


@pytest.mark.parametrize("path", MeasuringPath)
def test_the_path_can_carry_out_every_action_that_is_written_for_it(path):
    """No rollouts are left out where no clause can judge one, and a verl run is asked for nothing."""
    of_budget, of_tokens = write(draft(data=path)), write(draft(data=path), recording(0.03))
    actions = [
        {action.kind for step in written.contract.escalation for action in step.do}
        for written in (of_budget, of_tokens)
    ]
    for written in (of_budget, of_tokens):
        assert not [found for found in left_open(written.contract, path) if "carries out" in found.what]
    assert ["quarantine-rollouts" in kinds for kinds in actions] == [False, path in {"trl", "loop"}]
    assert ("halt" in actions[0], "route" in actions[0]) == (
        path in {"trl", "loop", "trainer"},
        path in {"vllm", "gate"},
    )


def test_a_bound_of_the_budget_that_the_baseline_breaks_is_explained_and_not_asked_for():
    """The accepted pair would fail by it for ever; the policy's critical steps rest on the limits that it keeps."""
    written = write(draft(reward_budget=0.05), recording(0.1))
    assert "reward" not in {clause.id for clause in written.contract.clauses}
    assert "# Not a clause, reward: " in written.text
    text = " ".join(written.text.replace("#", " ").split())
    assert "The pair of noise.npz breaks it: 0." in text
    critical = [step for step in written.contract.escalation if step.severity == "critical"]
    assert all({"token-tv", "token-kl", "tail"} <= set(step.clauses) for step in critical)
    assert check_text(written.text).problems == ()


def test_a_slice_that_is_worse_than_the_rest_gets_a_limit_of_its_own():
    """A slice on which the accepted pair drifts three times as far would fail for ever by the average's limit."""
    written = write(draft(), recording(0.03, code=3.0))
    _, limit, floor = of(written, "token-tv", "code")
    assert limit >= 2 * floor.interval.upper * 0.999
    assert limit > 1.3 * of(written, "token-tv")[1]


def test_limits_are_what_the_kernels_show_where_half_of_the_baseline_is_stale():
    """A gate holds older weights' drift against no kernel; limits that contain it would let a bad kernel pass."""
    made = recording(0.3)
    noisy = np.repeat(np.arange(400) % 4 < 2, 32)
    made = replace(made, train=np.where(noisy, made.train, made.inference + (made.train - made.inference) / 10))

    def aged(lag):
        rows = zip(made.attributes, lag, strict=True)
        return replace(made, attributes=tuple({**row, "lag": age} for row, age in rows))

    written = write(draft(), aged([int(row % 4 < 2) for row in range(400)]))
    fresh = write(draft(), made.only(np.arange(400) % 4 >= 2))
    assert (written.older, fresh.older) == (200 * 32, 0)
    assert of(written, "token-tv")[1:] == of(fresh, "token-tv")[1:]
    assert written.empty == ("long",), "no sequence says how many tokens its prompt has"
    with pytest.raises(ValueError, match=r"noise\.npz: older weights sampled all of it"):
        write(draft(), aged([1] * 400))


def test_a_pass_takes_no_less_than_the_contract_asks_for():
    written = write(draft(), recording(0.03))
    said = re.findall(r"A PASS takes at least ([\d,]+) prompts", written.text)
    assert min(int(count.replace(",", "")) for count in said) == written.contract.observability.min_sequences


@pytest.mark.parametrize("prompts", [60, 400])
def test_a_pair_like_the_baseline_typically_passes_with_the_prompts_that_there_are(prompts):
    written = write(draft(), recording(0.03), margin=1.05, prompts=prompts)
    contract = written.contract
    clause, limit, floor = of(written, "token-tv")
    assert typical_size(contract, clause, "all", floor.interval.estimate / limit) <= max(prompts, 100)  # min_sequences
    tail = of(written, "token-tv-tail")[0]
    assert observations_to_pass(contract, tail, "all").observations <= prompts
    if prompts == 400:
        assert limit <= of(write(draft(), recording(0.03), margin=1.05, prompts=60), "token-tv")[1]


def test_a_baseline_of_one_prompt_has_no_halves():
    assert write(draft(), recording(0.03, sequences=1)).changed == ""


def test_a_baseline_of_which_one_side_is_a_copy_of_the_other_is_refused():
    """Limits from no drift would alert on every real pair."""
    with pytest.raises(ValueError, match="so that one is a copy of the other"):
        write(draft(), recording(0.0))


def test_a_pair_far_apart_has_no_cap_where_a_total_variation_cannot_be_as_large():
    written = write(draft(), recording(1.0))
    assert of(written, "token-tv")[0].cap is None
    assert all(clause.id != "token-tv-tail" for clause in written.contract.clauses)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"reward_budget": 0.0}, "reward budget: 0.0"),
        ({"reward_budget": 1.0}, "reward budget: 1.0"),
        ({"horizon": 0}, "horizon"),
        ({"margin": 0.5}, r"margin: 0\.5"),
    ],
)
def test_a_budget_that_is_none_and_a_margin_that_narrows_are_refused(changes, named):
    margin = changes.pop("margin", 2.0)
    with pytest.raises(ValueError, match=named):
        write(draft(**changes), recording(0.1), margin=margin)


@given(st.floats(1e-12, 1e6))
def test_a_number_is_written_without_an_exponent_and_exactly(value):
    """YAML 1.1 reads 5e-06 as text."""
    assert "e" not in exact(value)
    assert float(exact(value)) == value
