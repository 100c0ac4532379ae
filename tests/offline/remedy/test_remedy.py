"""What is chosen, and whether it is true: on rollouts of kernels whose every sequence can be enumerated."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from examples.rl_bias.exact import joint
from examples.rl_bias.kernels import FAMILIES, train_log_probs
from examples.rl_bias.policy import Policy
from examples.rl_bias.rollouts import SEED, record
from kc_otel.cli.remedy_command import _left, remedy_lines, remedy_sentence
from kc_otel.contract.load import load_text
from kc_otel.contract.words import place
from kc_otel.judge.statistics import rounded
from kc_otel.offline import remedy as module
from kc_otel.offline.corrections import Correction, Rejection, Weight
from kc_otel.offline.remedy import as_data, remedy
from kc_otel.recordings.recording import Recording
from kc_otel.recordings.recording_files import load_recording

CONTRACT = """apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: tiny, version: 1, owner: rl}
kernels: {train: {engine: torch}, inference: {engine: vllm}}
assumptions: {reward_range: [0, 2], horizon: 8, advantage_max: 1, score_norm_max: 3, clip: 0.2}
slices: {tables: {where: {task: tables}}, prose: {where: {task: prose}}}
statistical:
"""
TABLES_ONLY = CONTRACT.replace(", prose: {where: {task: prose}}", "")
REWARD = "  - {id: reward, metric: reward_drift_bound, limit: 0.1}\n"
SOME = (
    Correction(),
    Correction(Weight("token", "truncate", 0.0, 2.0)),
    Correction(Weight("sequence", "truncate", 0.0, 1.5)),
    Correction(Weight("sequence", "mask", 0.5, 2.0)),
    Correction(None, Rejection("seq_sum_k1", np.log(0.5), np.log(2.0))),
)


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    """Eight thousand sequences of eight tokens; on tables the rollout kernel has 4-bit weights."""
    return record(tmp_path_factory.mktemp("rollouts") / "rollouts.npz")


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """A short catalogue, for speed."""
    monkeypatch.setattr(module, "catalogue", lambda **_: SOME)


def contract(*clauses, text=CONTRACT):
    return load_text(text + "".join(clauses), "tiny.yaml")


def found(of, correction, clause, slice):
    (replay,) = [candidate for candidate in of.replayed if candidate.correction == correction]
    (finding,) = [row for row in replay.findings if (row.promise.clause, row.promise.slice) == (clause, slice)]
    return finding


def test_what_is_left_of_enumerated_kernels_lies_in_the_intervals(rollouts):
    """TV_seq of tables, and half the L1 distance that truncation at 1.5 leaves, times the width of the rewards."""
    kernel = next(family for family in FAMILIES if family.label == "int4 per channel")
    policy = Policy.random(SEED)
    p = np.exp(joint(train_log_probs(policy, 8)))
    q = np.exp(joint(kernel.log_probs(policy, 8, kernel.reference)))
    of = remedy(rollouts, contract(REWARD))
    for correction, c in ((SOME[0], np.ones_like(p)), (SOME[2], np.minimum(p / q, 1.5))):
        interval = found(of, correction, "reward", "tables").interval
        truth = 2 * 0.5 * np.abs(c * q - p).sum()
        assert interval.lower <= truth <= interval.upper
        assert interval.upper - interval.lower < 0.06
        (replay,) = [candidate for candidate in of.replayed if candidate.correction == correction]
        assert replay.costs["tables"].variance == pytest.approx((q @ c**2) / (q @ c) ** 2, rel=0.02)


def test_the_least_variance_that_keeps_every_promise_is_chosen_for_each_trainer(rollouts):
    of = remedy(rollouts, contract(REWARD))
    states = {replay.correction: replay.meets for replay in of.replayed}
    assert not states[SOME[0]]
    assert not states[SOME[1]]
    assert states[SOME[2]]
    assert states[SOME[3]]
    assert of.chosen["verl"].correction == of.chosen["trl"].correction == SOME[2]
    assert of.chosen["slime"] is None
    assert of.closest["slime"].correction == SOME[1]
    assert found(of, SOME[1], "reward", "tables").state == "broken"


def test_no_correction_is_chosen_where_none_is_needed(rollouts):
    of = remedy(rollouts, contract("  - {id: tv, metric: tv_token, limit: 0.2}\n"))
    assert {replay.correction for replay in of.chosen.values()} == {SOME[0]}


def test_a_promise_on_tokens_is_kept_by_ratios_of_tokens_or_of_sequences(rollouts):
    """Uncorrected it is the clause as it is judged by sequence; both kinds bring it near 0, each in its own way."""
    of = remedy(rollouts, contract("  - {id: tv, metric: tv_token, limit: 0.02}\n"))
    tables = rollouts.only(np.array([labels["task"] == "tables" for labels in rollouts.attributes]))
    plain = np.maximum(-np.expm1(tables.train - tables.inference), 0.0).mean()
    assert found(of, SOME[0], "tv", "tables").interval.estimate == pytest.approx(plain, rel=1e-6)
    assert found(of, SOME[0], "tv", "tables").state == "broken"
    assert found(of, SOME[1], "tv", "tables").state == found(of, SOME[2], "tv", "tables").state == "met"
    assert of.chosen["verl"].correction == SOME[1]


def test_a_cost_can_be_promised_too(rollouts):
    """chi2_token limits what the weights that are used take from the effective sample size."""
    of = remedy(rollouts, contract(REWARD, "  - {id: ess, metric: chi2_token, limit: 0.01}\n"))
    assert found(of, SOME[0], "ess", "tables").interval.estimate == 0.0
    finding = found(of, SOME[2], "ess", "tables")
    assert finding.interval.estimate == pytest.approx(1 / 0.944 - 1, rel=0.05)
    assert of.chosen["verl"] is None


def test_a_fp8_kv_cache_has_corrections_before_none_and_clauses_that_none_changes():
    text = Path("contracts/rl-rollouts-bf16-fp8.yaml").read_text()
    promise = load_text(text.replace("tool-use: {where: {task: [tool-use, agent]}}", "code: {where: {task: code}}"))
    of = remedy(load_recording("examples/real_model/recordings/vllm-fp8-kv.npz"), promise)
    chi2 = found(of, SOME[0], "token-chi2", "code")
    assert (chi2.interval.lower, chi2.interval.upper, chi2.state) == (0.0, 0.0, "met")
    none = next(replay for replay in of.replayed if replay.correction == SOME[0])
    assert none.worst.promise.clause == "token-tv"
    assert of.closest["verl"].correction == SOME[1]
    assert "token-chi2 on code 0, limit 1" in "".join(_left(found) for found in none.findings)
    assert {verdict.cell.clause for verdict in of.exceeded} == {"clip-share", "token-kl"}
    said = remedy_sentence(of)
    assert said.startswith(
        "Beyond their limits, and no correction changes that: clip-share on all traffic 0.876, limit"
    )
    assert [row["clause"] for row in as_data(of)["exceeded"]] == ["clip-share", "token-kl"]


@pytest.mark.parametrize(
    ("sequences", "share", "said"),
    [
        (4000, 0, "Beyond their limits, and no correction changes that: "),
        (4000, 0.9, "Beyond their limits, and no correction changes that: "),
        (40, 0.9, "Estimated above their limits; this recording does not decide it, and no correction changes it: "),
    ],
)
def test_what_no_correction_changes_is_beyond_its_limit_by_its_lower_bound(rollouts, sequences, share, said):
    """An estimate above a limit is told as one; a limit of 0 is beyond with the first token."""
    tables = np.array([row["task"] == "tables" for row in rollouts.attributes])
    some = rollouts.only(tables & (tables.cumsum() <= sequences))
    above = float(np.mean(np.maximum(-np.expm1(some.train - some.inference), 0.0) > 0.1))
    tail = f"  - {{id: tail, metric: tv_token, statistic: fraction > 0.1, limit: {share * above!r}}}\n"
    of = remedy(some, contract(REWARD, tail, text=TABLES_ONLY))
    assert remedy_sentence(of).startswith(f"{said}tail on ")
    assert remedy_sentence(of).count("their limits") == 1


def test_the_push_that_is_missing_is_judged_by_sign_of_the_advantage(rollouts):
    clauses = [
        f"  - {{id: {side}, metric: advantage_drift_{side}, limit: 0.05}}\n" for side in ("positive", "negative")
    ]
    of = remedy(rollouts, contract(*clauses))
    positive = rollouts.advantages > 0
    push = (np.expm1(rollouts.train - rollouts.inference) * rollouts.advantages)[positive].reshape(-1, 8).mean()
    assert found(of, SOME[0], "positive", "all").interval.estimate == pytest.approx(push, abs=1e-7)
    costs = next(replay for replay in of.replayed if replay.correction == SOME[4]).costs["tables"]
    assert costs.dropped > 0.0
    assert costs.dropped == pytest.approx(costs.dropped_sequences)
    assert min(costs.dropped_positive, costs.dropped_negative) <= costs.dropped
    assert max(costs.dropped_positive, costs.dropped_negative) >= costs.dropped


def test_few_sequences_meet_nothing(rollouts):
    kept = np.zeros(rollouts.lengths.size, dtype=bool)
    kept[:50] = True  # of prose, where the kernels hardly differ
    of = remedy(rollouts.only(kept), contract("  - {id: tv, metric: tv_token, limit: 0.9}\n"))
    finding = found(of, SOME[0], "tv", "all")
    assert finding.interval.upper < 0.9
    assert finding.state == "open"
    assert of.chosen == {"verl": None, "trl": None, "slime": None}


def test_a_slice_without_a_sequence_is_open_under_every_correction(rollouts):
    """The closest correction is still the one that keeps the limits where there are sequences."""
    tables = rollouts.only(np.array([row["task"] == "tables" for row in rollouts.attributes]))
    of = remedy(tables, contract("  - {id: tv, metric: tv_token, limit: 0.02}\n"))
    assert of.chosen == dict.fromkeys(of.chosen)
    assert of.closest["verl"].correction == SOME[1]
    assert found(of, SOME[1], "tv", "tables").state == "met"
    (said,) = (row for row in as_data(of)["corrections"][1]["findings"] if row["promise"]["slice"] == "prose")
    assert (said["interval"]["samples"], said["interval"]["upper"], said["state"]) == (0, None, "open")
    assert (as_data(of)["empty"], as_data(of)["more"]["verl"]) == (["prose"], None)
    said = remedy_sentence(of)
    assert said.startswith("No whole sequence of this recording is in prose: no correction is decided there. ")
    assert "tv on prose without data, limit 0.02; this recording does not decide it." in said
    assert "like these" not in said


def test_answers_to_one_prompt_count_as_one(rollouts):
    kept = np.zeros(rollouts.lengths.size, bool)
    kept[:: rollouts.lengths.size // 400] = True
    few, clause = rollouts.only(kept), contract("  - {id: tv, metric: tv_token, limit: 0.9}\n")
    assert found(remedy(few, clause), SOME[0], "tv", "all").state == "met"
    named = tuple({**row, "group": number % 8} for number, row in enumerate(few.attributes))
    of = remedy(Recording(few.train, few.inference, few.lengths, named), clause)
    finding = found(of, SOME[0], "tv", "all")
    assert (finding.state, finding.interval.samples, of.unit) == ("open", 8, "prompt")
    assert "more prompts like these" in remedy_sentence(of)
    unnamed = remedy(replace(few, attributes=tuple({**row, "group": math.nan} for row in few.attributes)), clause)
    assert "each sequence counts once, as if independent of the others." in list(remedy_lines(unnamed))[1]


def test_what_older_weights_sampled_is_said_to_be_apart_and_refused_where_it_is_all(rollouts):
    """No clause counts it; one-step-off-policy runs record nothing else."""
    aged = [{**row, "lag": place % 2} for place, row in enumerate(rollouts.attributes)]
    of = remedy(replace(rollouts, attributes=tuple(aged)), contract(REWARD))
    said = "4,000 more sequences, 32,000 tokens, are slice stale: older weights sampled them, or a part of each."
    assert said in remedy_sentence(of)
    assert said in " ".join(remedy_lines(of))
    steps = [
        {**row, "train_weights": 7, "inference_weights": 7 - place % 2} for place, row in enumerate(rollouts.attributes)
    ]
    assert said in remedy_sentence(remedy(replace(rollouts, attributes=tuple(steps)), contract(REWARD)))
    with pytest.raises(ValueError, match="older weights sampled all of every sequence, or a part"):
        remedy(replace(rollouts, attributes=tuple({**row, "lag": 1} for row in aged)), contract(REWARD))


def test_sequences_of_unknown_age_are_told(rollouts):
    said = "it is unknown which weights sampled 8,000 sequences: their figures contain drift and staleness together"
    for known, told in (({}, True), ({"lag": 0}, False)):
        rows = tuple({**row, "train_weights": 7, **known} for row in rollouts.attributes)
        assert (said in remedy(replace(rollouts, attributes=rows), contract(REWARD)).notes) is told


def test_a_sequence_that_older_weights_sampled_in_part_is_corrected_as_a_whole(rollouts):
    """A trainer has one ratio of it, whatever sampled its last tokens."""
    rows = tuple({**row, "train_weights": 7} for row in rollouts.attributes)
    versions = np.full(rollouts.train.size, 7)
    versions[rollouts.starts[1::2]] = 6
    of = remedy(replace(rollouts, attributes=rows, versions=versions), contract(REWARD))
    assert of.replayed[0].costs["all"].sequences == 4000
    said = "4,000 more sequences, 32,000 tokens, are slice stale: older weights sampled them, or a part of each."
    assert said in remedy_sentence(of)


def test_what_is_not_decided_says_how_many_more_sequences_decide_it(rollouts, monkeypatch):
    monkeypatch.setattr(module, "catalogue", lambda **_: SOME[:1])
    tables = np.array([row["task"] == "tables" for row in rollouts.attributes])
    few = rollouts.only(tables & (tables.cumsum() <= 400))

    def of(recording, limit):
        return remedy(recording, contract(f"  - {{id: tv, metric: tv_token, limit: {limit!r}}}\n", text=TABLES_ONLY))

    near = of(few, 0.9).closest["verl"].worst.interval
    between = float(near.estimate + near.upper) / 2
    undecided = of(few, between)
    more = undecided.lacking["verl"]
    assert (more > 0, more % 400) == (True, 0)
    said = remedy_sentence(undecided)
    assert "No correction is known to keep the contract. The closest is " in said
    decides = f"this recording does not decide it, but at most {rounded(more):,} more sequences like these on "
    assert decides + place(undecided.closest["verl"].worst.promise.slice) + " would" in said
    times = more // 400 + 1
    rows = (np.tile(column, times) for column in (few.train, few.inference, few.lengths))
    assert of(Recording(*rows, few.attributes * times), between).chosen["verl"] is not None
    assert of(few, float(near.estimate)).lacking["verl"] is None
    assert of(few, 1e-9).lacking == {}


def test_clauses_that_no_weight_changes_are_said_and_not_asked(rollouts):
    bare = Recording(rollouts.train, rollouts.inference, rollouts.lengths, rollouts.attributes)
    of = remedy(
        bare,
        contract(
            "  - {id: kl, metric: k3, limit: 0.1}\n",
            "  - {id: tail, metric: tv_token, statistic: p99, limit: 0.1}\n",
            "  - {id: push, metric: advantage_drift_negative, limit: 0.1}\n",
        ),
    )
    assert of.promises == ()
    assert len(of.beyond) == 3
    assert "weights do not change it" in of.beyond[0]
    assert "is not a mean" in of.beyond[1]
    assert of.beyond[2] == "push: the recording has no advantages"
    assert not any(of.chosen.values())


@pytest.mark.parametrize("log_w", [-900.0, 900.0, 0.0])
def test_kernels_that_share_nothing_are_numbers_all_the_same(log_w):
    size = 200
    train, inference = min(log_w, 0.0) - 1.0, min(-log_w, 0.0) - 1.0
    of = remedy(
        Recording(
            np.full(2 * size, train), np.full(2 * size, inference), np.full(size, 2), ({"task": "tables"},) * size
        ),
        contract(REWARD, text=TABLES_ONLY),
    )
    data = as_data(of)
    json.dumps(data, allow_nan=False)
    assert list(data["corrections"][0]["costs"]) == ["all", "tables"]
    assert data["corrections"][0]["meets"] is (log_w >= 0.0)


@pytest.mark.slow
def test_a_repeated_draw_stays_below_the_bound():
    """Of 40 recordings of 300 sequences none has an upper bound below the distance that is really left."""
    kernel = next(family for family in FAMILIES if family.label == "int4 per channel")
    policy = Policy.random(SEED)
    p = np.exp(joint(train_log_probs(policy, 3)))
    q = np.exp(joint(kernel.log_probs(policy, 3, kernel.reference)))
    truth = np.abs(np.minimum(p / q, 1.5) * q - p).sum()
    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(40):
        rows = rng.choice(q.size, size=300, p=q / q.sum())
        drawn = Recording(np.log(p[rows]), np.log(q[rows]), np.ones(300, int), ({"task": "tables"},) * 300)
        missed += found(remedy(drawn, contract(REWARD)), SOME[2], "reward", "all").interval.upper < truth
    assert missed == 0
