"""The offline stage: what recordings say, and what follows from it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from kc_otel.contract.load import load_text
from kc_otel.judge.promotion.stages import GateOutcome, Stage
from kc_otel.offline.gate.gate_report import headline, notes
from kc_otel.offline.gate.recorded_gate import GatedRecording, GateTerms, gate_recordings, read_input
from kc_otel.offline.gate.recorded_verdicts import RecordingObservations, by_contract, judge
from kc_otel.record.kernel import Kernel
from kc_otel.record.measure.sampled import TOKEN, log_ratio
from kc_otel.recordings.recording import Recording, RecordingError
from kc_otel.recordings.recording_files import load_recording, save_recording
from tests.recordings._files import write_recording
from tests.tools.two_kernels import sampled_from_logits

TEXT = """apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: policy, version: 2, owner: rl}
kernels: {train: {engine: torch}, inference: {engine: vllm}}
slices: {code: {where: {task: code}}}
statistical:
  - {id: token-tv, metric: tv_token, unit: token, limit: 0.05}
  - {id: by-seq, metric: tv_token, unit: sequence, limit: 0.3}
runtime: [{id: lag, metric: weights_lag, limit: 1}]
observability: {min_samples: 500, min_sequences: 50}
"""
CONTRACT = load_text(TEXT)
KERNELS = (Kernel("torch"), Kernel("vllm", version="1"))
EXACT = TEXT.replace("runtime:", "numerical: [{id: exact, metric: tv_exact, unit: token, limit: 0.05}]\nruntime:")


def recording(noise=0.01, *, sequences=200, seed=0, code=0.01, tasks=("code", "prose"), logits=False):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(20, 40, sequences)
    task = [tasks[i % len(tasks)] for i in range(sequences)]
    noises = np.array([code if kind == "code" else noise for kind in task])
    return sampled_from_logits(rng, lengths, noises, tuple({"task": kind} for kind in task), logits=logits)


def some(made, numbers):
    """Those sequences of a recording, in that order."""
    at = np.concatenate([made.starts[index] + np.arange(made.lengths[index]) for index in numbers])
    attributes = tuple(made.attributes[index] for index in numbers)
    return Recording(made.train[at], made.inference[at], made.lengths[list(numbers)], attributes)


def gated(*recordings, terms=None, contract=CONTRACT):
    inputs = [GatedRecording(f"{at}.npz", "", 1, content) for at, content in enumerate(recordings)]
    return gate_recordings(contract, inputs, KERNELS, terms or GateTerms(), 1_700_000_000.0)


def statuses(gate, place=0):
    return {(v.cell.clause, v.cell.slice): str(v.status) for v in gate.judged[place].verdicts}


def test_a_sound_kernel_advances_unless_a_clause_is_not_judged_whose_columns_a_recording_could_have():
    gate = gated(recording())
    assert list(statuses(gate).values()) == ["PASS"] * 4
    assert (gate.decision.outcome, gate.decision.stage) == (GateOutcome.ADVANCE, Stage.SHADOW)
    assert {v.cell.kernel_inference for v in gate.judged[0].verdicts} == {KERNELS[1].fingerprint}
    assert [clause.clause for clause in gate.unjudged] == ["lag"]
    assert headline(gate).endswith("; not judged: lag")
    exact = load_text(EXACT)
    gate = gated(recording(), contract=exact)
    assert gate.decision.outcome is GateOutcome.WAIT
    (missing,) = gate.decision.missing
    assert missing == (
        "held: exact: this recording lacks tv_exact: record a .npz with train_logits and inference_logits; or "
        "--require the other clauses"
    )
    required = gated(recording(), terms=GateTerms(require=("by-seq",)), contract=exact)
    assert required.decision.outcome is GateOutcome.ADVANCE
    assert statuses(gated(recording(logits=True), contract=exact))["exact", "code"] == "PASS"


def test_only_required_clauses_have_to_pass_and_any_failure_refuses():
    """--require narrows what must PASS, never what may FAIL; a required clause that cannot be told waits."""
    assert gated(recording(), terms=GateTerms(require=("token-tv",))).decision.outcome is GateOutcome.ADVANCE
    assert gated(recording(code=0.8), terms=GateTerms(require=("by-seq",))).decision.outcome is GateOutcome.ROLLBACK
    waits = gated(recording(), terms=GateTerms(require=("lag",)))
    assert waits.decision.outcome is GateOutcome.WAIT
    assert "lag on all: no verdict" in waits.decision.missing


def test_a_slice_without_sequences_waits_unless_only_others_are_asked_for():
    prose = recording(tasks=("prose",))
    assert statuses(gated(prose))["token-tv", "code"] == "NO_DATA"
    assert gated(prose).decision.outcome is GateOutcome.WAIT
    assert gated(prose, terms=GateTerms(slices=("all",))).decision.outcome is GateOutcome.ADVANCE


def test_every_recording_is_a_window_and_has_to_pass():
    good, more = recording(), recording(seed=1)
    assert gated(good, more).decision.windows == 2
    assert gated(recording(sequences=10), good).decision.outcome is GateOutcome.WAIT
    assert gated(good, recording(sequences=10)).decision.outcome is GateOutcome.WAIT
    assert gated(recording(code=0.8), good).decision.outcome is GateOutcome.ROLLBACK


def test_windows_that_share_sequences_count_them_once(tmp_path):
    made, inputs = recording(sequences=300), {}
    for name, numbers in (
        ("all", range(300)),
        ("shuffled", np.random.default_rng(1).permutation(300)),
        ("first", range(100)),
        ("more", [*range(100), *range(200, 300)]),
    ):
        save_recording(some(made, numbers), tmp_path / f"{name}.npz")
        inputs[name] = read_input(tmp_path / f"{name}.npz")

    def judged(*names):
        return gate_recordings(CONTRACT, [inputs[name] for name in names], KERNELS, GateTerms(), 0.0)

    with pytest.raises(ValueError, match=r"shuffled\.npz: has the same content as .*all\.npz"):
        judged("all", "shuffled")
    with pytest.raises(ValueError, match=r"first\.npz: has only sequences that repeat others .*; windows that share"):
        judged("all", "first")
    both = judged("first", "more")
    assert [(of.recording.lengths.size, len(of.notes)) for of in both.inputs] == [(100, 0), (100, 1)]
    assert "more.npz: 100 of 200 sequences repeat others" in "".join(notes(both))
    tokens = {verdict.samples for verdict in both.judged[1].verdicts if verdict.cell.clause == "token-tv"}
    assert max(tokens) == made.lengths[200:].sum()


def test_a_contract_that_recordings_cannot_judge_at_all_is_refused():
    """A gate without cells would open for anything."""
    text = TEXT[: TEXT.index("statistical:")] + TEXT[TEXT.index("runtime:") :]
    with pytest.raises(ValueError, match=r"no clause of policy can be judged .* lag"):
        gated(recording(), contract=load_text(text))


def test_a_clause_by_sequence_has_one_observation_per_sequence():
    made = recording(sequences=60, logits=True)
    samples = RecordingObservations(made)
    values = TOKEN["tv_token"](log_ratio(made.train, made.inference))
    means = [part.mean() for part in np.split(values, made.starts[1:])]
    sample = samples.of("tv_token_by_sequence")
    assert sample.total == 60
    assert sample.sum == pytest.approx(math.fsum(means))
    assert samples.of("tv_exact_by_sequence").total == 60
    judged = judge(CONTRACT, by_contract(made, CONTRACT), 0.0)
    counts = {v.cell.clause: v.samples for v in judged.verdicts if v.cell.slice == "all"}
    assert counts == {"token-tv": made.train.size, "by-seq": 60}


def test_a_sequence_that_older_weights_sampled_in_part_counts_once_as_a_whole_at_its_oldest():
    """As in the Recorder: for a clause by sequence, the kernels' are those of which all tokens are at lag 0."""
    text = TEXT[: TEXT.index("runtime:")].replace("slices: {", "slices: {early: {where: {position: '< 4'}}, ")
    contract = load_text(text + "  - {id: whole, metric: tv_seq, unit: sequence, limit: 0.5}\n")
    made = recording(0.1, sequences=30)
    partly = np.arange(30) % 3 == 0
    versions = np.full(made.train.size, 5)
    versions[made.starts[partly]] = 4
    rows = tuple({**row, "train_weights": 5, "reward": 1.0} for row in made.attributes)
    made = replace(made, attributes=rows, versions=versions)
    parts = by_contract(made, contract)
    for quantity in ("tv_seq", "tv_seq_by_prompt", "tv_token_by_sequence", "reward_above"):
        of = {name: RecordingObservations(part, (0.0, 1.0)).of(quantity) for name, part in parts.items() if part}
        own = [RecordingObservations(made.only(some), (0.0, 1.0)).of(quantity) for some in (~partly, partly)]
        assert [of["all"].total, of["early"].total, of["stale"].total] == [20, 20, 10]
        assert [of["all"].sum, of["stale"].sum] == pytest.approx([sample.sum for sample in own])
    tokens = RecordingObservations(parts["all"]).of("tv_token")
    assert tokens.total == made.train.size - 10, "of its tokens each counts at its own lag"


def test_advantages_by_sequence_are_means_over_the_tokens_of_their_side():
    made = replace(
        recording(sequences=3), lengths=np.array([2, 2, 1]), advantages=np.array([1.0, -1.0, 2.0, 2.0, -3.0])
    )
    made = replace(made, train=np.log([0.5, 0.4, 0.3, 0.2, 0.6]), inference=np.log([0.4, 0.4, 0.6, 0.4, 0.3]))
    sample = RecordingObservations(made).of("advantage_drift_positive_by_sequence")
    assert sample.total == 2
    assert sample.sum == pytest.approx(0.25 - 1.0)


def test_the_mass_outside_of_a_truncation_is_judged_where_a_recording_has_it():
    clause = "  - {id: outside, metric: outside_mass, limit: 0.2}\nruntime:"
    contract = load_text(TEXT.replace("runtime:", clause, 1))
    plain = recording()
    kept = replace(plain, train_kept=np.full(plain.train.size, math.log(0.95)))
    observations = RecordingObservations(kept).of("outside_mass_by_sequence")
    assert observations.count.sum() == 200
    assert observations.upper.max() == pytest.approx(0.05)
    left_out = {lost.clause: lost.why for lost in judge(contract, by_contract(plain, contract), 0.0).left_out}
    assert "train_kept_logprobs" in left_out["outside"]
    judged = judge(contract, by_contract(kept, contract), 0.0).verdicts
    assert {verdict.cell.slice: verdict.status for verdict in judged if verdict.cell.clause == "outside"} == {
        "all": "PASS", "code": "PASS",
    }  # fmt: skip


def test_logits_that_are_no_numbers_hold_the_gate():
    """They are left out of every verdict, so that the verdicts alone would not tell."""
    contract = load_text(EXACT)
    made = recording(logits=True)
    made.inference_logits[7] = np.nan
    gate = gated(made, contract=contract)
    assert gate.decision.outcome is GateOutcome.WAIT
    assert gate.decision.missing == ("held: logits of 1 tokens are not numbers",)
    assert RecordingObservations(made).of("tv_exact_by_sequence").total == made.lengths.size - 1


@pytest.mark.slow
def test_a_gate_judges_the_drift_of_the_rewards_that_a_recording_has():
    head = TEXT[: TEXT.index("runtime:")].replace("slices:", "assumptions: {reward_range: [0, 1]}\nslices:")
    contract = load_text(head + "  - {id: reward, metric: reward_drift, limit: 0.1}\n")
    made = recording(sequences=4000)
    (left,) = judge(contract, by_contract(made, contract), 0.0).left_out
    assert "record a reward in each row" in str(left)
    rewards = np.random.default_rng(0).integers(0, 2, 4000)
    attributes = [{**known, "score": int(reward)} for known, reward in zip(made.attributes, rewards, strict=True)]
    attributes[0] = {"task": "code"}
    found = judge(contract, by_contract(replace(made, attributes=tuple(attributes)), contract), 0.0)
    verdict = next(other for other in found.verdicts if other.cell.clause == "reward" and other.cell.slice == "all")
    assert (verdict.status, verdict.samples) == ("PASS", 4000)
    assert "E_P[r] - E_Q[r] is" in verdict.reason


def test_rewards_outside_of_their_range_are_told_of_and_no_number_of_them_is_asked_for():
    """They count for the worst that they could be, so that nothing that comes would decide the clause."""
    head = TEXT[: TEXT.index("runtime:")].replace("slices:", "assumptions: {reward_range: [0, 1]}\nslices:")
    contract = load_text(head + "  - {id: reward, metric: reward_drift, limit: 0.005}\n")
    made = recording(sequences=2000)
    rewards = [5.0, float("nan"), 1.0] * 700

    def with_rewards(values):
        attributes = [{**known, "reward": value} for known, value in zip(made.attributes, values, strict=False)]
        gate = gated(replace(made, attributes=tuple(attributes)), contract=contract)
        reward = next(v for v in gate.judged[0].verdicts if v.cell.clause == "reward" and v.cell.slice == "all")
        return reward, [note for note in notes(gate) if "rewards" in note]

    undecided, said = with_rewards(rewards)
    assert undecided.status == "INCONCLUSIVE"
    assert "with 2,000 prompts: more such observations would not decide it; E_P[r] - E_Q[r] is" in undecided.reason
    assert len(said) == 1
    assert said[0].startswith("0.npz: 1,334 of 2,000 rewards are missing or outside of assumptions.reward_range [0, 1]")
    assert with_rewards([0.0, 1.0] * 1000)[1] == []


def test_a_sequence_without_a_prompt_does_not_make_the_others_independent():
    """It is the only rollout of a prompt of its own."""
    made = recording()
    rows = tuple({**row, "group": number // 4} for number, row in enumerate(made.attributes))
    one_less = tuple(
        {name: value for name, value in row.items() if row is not rows[0] or name != "group"} for row in rows
    )
    assert replace(made, attributes=rows).prompts.max() + 1 == 50
    assert replace(made, attributes=one_less).prompts.max() + 1 == 51


@pytest.mark.parametrize("of", ["step", "train_weights"])
def test_drift_of_one_step_is_not_averaged_away_with_prompts_of_the_same_name(of):
    """A share of prompts, or of steps, counts every step that a prompt was sampled at."""
    clauses = "".join(
        f"  - {{id: {unit}, metric: tv_token, statistic: fraction > 0.1, unit: {unit}, limit: 5%}}\n"
        for unit in ("prompt", "step")
    )
    contract = load_text(TEXT[: TEXT.index("  - {id: token-tv")] + clauses)
    made = recording(tasks=("prose", "prose", "prose", "code"), code=0.8)
    rows = tuple({**row, "group": 0, "lag": 0, of: number} for number, row in enumerate(made.attributes))
    found = judge(contract, by_contract(replace(made, attributes=rows), contract), 0.0)
    assert found.prompts == 200
    of_all = [(str(v.status), v.samples) for v in found.verdicts if v.cell.slice == "all"]
    assert of_all == [("FAIL", 200), ("FAIL", 200)]


def test_a_column_that_cannot_be_read_is_named_where_it_is_missed(tmp_path):
    head = TEXT[: TEXT.index("runtime:")].replace("slices:", "assumptions: {reward_range: [0, 1]}\nslices:")
    contract = load_text(head + "  - {id: reward, metric: reward_drift, limit: 0.1}\n")
    made = recording()
    columns = {"train_logprobs": made.train, "inference_logprobs": made.inference, "lengths": made.lengths}

    def said(**others):
        np.savez(tmp_path / "a.npz", **columns, **others)
        gate = gate_recordings(contract, [read_input(tmp_path / "a.npz")], KERNELS, GateTerms(), 0.0)
        absent = next(v for v in gate.judged[0].verdicts if v.cell.slice == "code")
        return absent, [str(clause) for clause in gate.judged[0].left_out]

    tasks = np.array([attributes["task"] for attributes in made.attributes])
    absent, (left,) = said(task=tasks[:50], reward=np.zeros((2, 200)))
    assert absent.status == "NO_DATA"
    assert "`task` holds text of shape (50,), not a plain value for each of 200 rows" in absent.reason
    assert left.endswith("reward holds float64 of shape (2, 200), not a plain value for each of 200 rows")
    absent, (left,) = said(task=tasks, reward=np.full(200, "0.5"))
    assert absent.status == "PASS"
    assert left.endswith("reward of sequence 0 is '0.5', not a number")
    absent, left = said(task="code", reward=1.0)
    assert (absent.samples, left) == (made.train.size, [])


def test_a_recording_of_log_densities_is_judged_by_its_ratios(tmp_path):
    plain = recording()
    rows = tuple({**row, "density": True} for row in plain.attributes)
    dense = replace(plain, train=plain.train + 4.0, inference=plain.inference + 4.0, attributes=rows, token_ids=None)
    save_recording(dense, tmp_path / "dense.npz")
    read = read_input(tmp_path / "dense.npz")
    assert (read.unchecked, read.notes) == ("", ())
    gate = gate_recordings(CONTRACT, [read], KERNELS, GateTerms(), 1e9)
    assert gate.decision.outcome is GateOutcome.ADVANCE
    assert statuses(gate) == statuses(gated(plain))


def test_tokens_that_the_inference_kernel_did_not_sample_are_no_recording_of_it(tmp_path):
    """Their mean ratio is above 1, which no sample of it has: the trainer's own tokens, or the sides swapped."""
    rng = np.random.default_rng(0)
    p, q = np.array([0.55, 0.15, 0.15, 0.15]), np.array([0.4, 0.2, 0.2, 0.2])
    contract = load_text(TEXT.replace("limit: 0.05", "limit: 0.5"))

    def saved(sampler, train, inference):
        tokens = rng.choice(4, 8000, p=sampler)
        sides = {"train_logprobs": np.log(train)[tokens], "inference_logprobs": np.log(inference)[tokens]}
        np.savez(tmp_path / "a.npz", **sides, lengths=np.full(400, 20), task=np.full(400, "code"))
        return tmp_path / "a.npz"

    assert gated(load_recording(saved(q, p, q)), contract=contract).decision.outcome is GateOutcome.ADVANCE
    for sampler, sides in ((p, (p, q)), (q, (q, p))):
        with pytest.raises(RecordingError, match=r"INVALID INPUT, not_sampled: .* the mean of P/Q .* is 1\.[01]"):
            load_recording(saved(sampler, *sides))


def test_sequences_that_occur_again_are_no_new_evidence(tmp_path):
    made = recording(sequences=30)
    many = Recording(
        np.tile(made.train, 20), np.tile(made.inference, 20), np.tile(made.lengths, 20), made.attributes * 20
    )
    save_recording(many, tmp_path / "many.npz")
    write_recording(many, tmp_path / "many.jsonl")
    inputs = [read_input(tmp_path / name) for name in ("many.npz", "many.jsonl")]
    gate = gate_recordings(CONTRACT, inputs[:1], KERNELS, GateTerms(), 0.0)
    (said,) = [note for note in notes(gate) if "repeat" in note]
    assert "570 of 600 sequences repeat others" in said
    assert "each counts once, which leaves 30" in said
    save_recording(made, tmp_path / "once.npz")
    once = gate_recordings(CONTRACT, [read_input(tmp_path / "once.npz")], KERNELS, GateTerms(), 0.0)
    assert (gate.judged, gate.decision) == (once.judged, once.decision)
    with pytest.raises(ValueError, match=r"many\.jsonl: has the same content as .*many\.npz"):
        gate_recordings(CONTRACT, inputs, KERNELS, GateTerms(), 0.0)
    save_recording(recording(sequences=600), tmp_path / "own.npz")
    sound = gate_recordings(CONTRACT, [read_input(tmp_path / "own.npz")], KERNELS, GateTerms(), 0.0)
    assert not [note for note in notes(sound) if "repeat" in note]


def test_sides_that_are_equal_are_not_two_number_formats():
    made = recording()
    copied = replace(made, train=made.inference)
    assert gated(copied).decision.outcome == "advance"  # two engines may agree bit for bit
    fp8 = TEXT.replace("{engine: torch}", "{engine: vllm, kv_cache_dtype: auto}")
    fp8 = load_text(fp8.replace("inference: {engine: vllm}", "inference: {engine: vllm, kv_cache_dtype: fp8}"))
    with pytest.raises(ValueError, match=r"^0\.npz: no decision: both sides have the same number at every token, but"):
        gated(copied, contract=fp8)
    assert gated(made, contract=fp8).decision.outcome == "advance"
    assert gated(recording(code=1.0, tasks=("code",)), copied, contract=fp8).decision.outcome == "rollback"
    code = np.repeat([row["task"] == "code" for row in made.attributes], made.lengths)
    of_slice = replace(made, train=np.where(code, made.inference, made.train))
    assert gated(of_slice).decision.outcome == "advance"
    with pytest.raises(
        ValueError, match=r"^0\.npz: no decision: on slice code both sides have the same number at every"
    ):
        gated(of_slice, contract=fp8)


def test_a_cap_on_series_leaves_no_slice_of_a_recording_out():
    """A gate that judged the last slices together as `other` would advance what breaks one of them."""
    made = recording(code=1.0, tasks=("prose", "code"))
    few = load_text(TEXT.replace("slices: {", "slices: {prose: {where: {task: prose}}, ").replace(
        "observability: {", "observability: {max_series: 1, "
    ))  # fmt: skip
    assert set(by_contract(made, few)) == {"all", "prose", "code"}
    assert gated(made, contract=few).decision.outcome is GateOutcome.ROLLBACK
