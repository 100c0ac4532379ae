"""Evidence of a gate: what is kept, how it is verified, and sequences that occur again."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kc_otel.contract.load import load_text
from kc_otel.judge.promotion.gate_evidence import EvidenceError, sealed, verdict_row
from kc_otel.judge.promotion.stages import Decision, GateOutcome, Stage
from kc_otel.offline.gate.copies import first_of_each
from kc_otel.offline.gate.evidence import offline_evidence, verify_evidence, verify_recordings
from kc_otel.offline.gate.recorded_gate import GateTerms, gate_recordings, read_input
from kc_otel.record.kernel import Kernel
from kc_otel.recordings.recording import Recording
from kc_otel.recordings.recording_files import save_recording
from tests.offline.gate.conftest import changed, resealed

TEXT = """apiVersion: kernel-contract/v1
kind: KernelContract
metadata: {name: policy, version: 2, owner: rl}
kernels: {train: {engine: torch}, inference: {engine: vllm}}
slices: {code: {where: {task: code}}}
statistical:
  - {id: token-tv, metric: tv_token, unit: token, limit: 0.05}
  - {id: spread, metric: abs_log_ratio, statistic: p99, limit: 0.3}
runtime: [{id: lag, metric: weights_lag, limit: 1}]
observability: {min_samples: 500}
"""
TIMES = {"time", "tool"}


def make(path, seed, scale=0.01, sequences=60):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(20, 40, sequences)
    q = -rng.exponential(1.0, lengths.sum()) - 0.5
    p = -np.abs(q + scale * rng.standard_normal(q.size) - scale**2 / 2)
    save_recording(Recording(p, q, lengths, tuple({"task": "code"} for _ in lengths)), path)
    return path


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")
    return [make(folder / "one.npz", 1), make(folder / "two.npz", 2)]


def evidence(files, terms=GateTerms()):  # noqa: B008
    kernels = Kernel("torch", dtype="float32"), Kernel("vllm", version="0.32.0", extra={"patch": 3})
    gate = gate_recordings(load_text(TEXT), [read_input(path) for path in files], kernels, terms, 1_700_000_000.125)
    return json.loads(json.dumps(offline_evidence(gate, TEXT), allow_nan=False))


@pytest.fixture(scope="session")
def record(files):
    return evidence(files)


def leaves(value, path=()):
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, (*path, name))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from leaves(inner, (*path, place))
    else:
        yield path


def at(record, path):
    for step in path:
        record = record[step]
    return record


def test_record_holds_what_is_needed_to_judge_again(record, files):
    assert record["decision"]["outcome"] == "advance"
    assert record["offline"]["contract"] == TEXT
    assert record["offline"]["kernels"]["inference"] == {"engine": "vllm", "version": "0.32.0", "extra": {"patch": 3}}
    assert [entry["name"] for entry in record["offline"]["recordings"]] == [path.as_posix() for path in files]
    assert all(entry["sequences"] == 60 for entry in record["offline"]["recordings"])
    assert [row["recording"] for row in record["verdicts"]] == [0] * 4 + [1] * 4
    verify_evidence(record)


def test_recordings_are_found_by_content_and_give_the_same_numbers(record, files, tmp_path):
    moved = [tmp_path / "renamed.npz", tmp_path / "other.npz"]
    moved[0].write_bytes(files[1].read_bytes())
    moved[1].write_bytes(b"something else")
    verify_recordings(record, [moved[1], files[0], moved[0]])


def test_a_recording_that_changed_or_is_gone_is_named(record, files, tmp_path):
    other = make(tmp_path / "two.npz", 3)
    with pytest.raises(EvidenceError, match=r"no file has the checksum of .*two\.npz"):
        verify_recordings(record, [files[0], other])


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_change_is_found_by_the_checksum(record, data):
    path = data.draw(st.sampled_from(list(leaves(record))))
    old = at(record, path)
    new = data.draw(st.one_of(st.text(), st.integers(), st.floats(allow_nan=False), st.none()))
    if type(new) is type(old) and new == old:
        return
    with pytest.raises(EvidenceError):
        verify_evidence(changed(record, path, new))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_number_that_was_changed_and_sealed_again_is_found_from_the_recordings(record, files, data):
    numbers = [path for path in leaves(record) if isinstance(at(record, path), int | float)]
    path = data.draw(st.sampled_from(numbers))
    old = at(record, path)
    if isinstance(old, bool):
        new = not old
    elif isinstance(old, int):
        new = old + data.draw(st.integers(-50, 50).filter(bool))
    else:
        new = old + data.draw(st.sampled_from([-1, 1])) * data.draw(st.floats(1e-6, 1.0)) * max(abs(old), 1e-9)
    with pytest.raises(EvidenceError):
        verify_recordings(resealed(changed(record, path, new)), files)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("offline", "contract"), TEXT.replace("0.05", "0.5"), "does not match the hash"),
        (("offline", "contract"), "kind: nothing", "does not load"),
        (("contract", "version"), 9, "another name or version"),
        (("stage",), "canary", "stage offline-ci"),
        (("kernel",), "0" * 12, "do not match the fingerprint"),
        (("offline", "kernels", "train", "dtype"), "float16", "is about other kernels"),
        (("verdicts", 0, "limit"), 0.9, "the contract sets no such limit"),
        (("verdicts", 0, "about"), "population", "`about` is population, and the contract's clause is about the traff"),
        (("verdicts", 0, "quantity"), "0" * 12, "`quantity` is not the digest of what the contract's clause measures"),
        (("verdicts", 0, "samples"), 3, "is a PASS with 3 observations, and the contract asks for"),
        (("verdicts", 0, "status"), "INCONCLUSIVE", "the verdicts lead to 'wait'"),
        (("offline", "recordings", 0, "unreadable"), 5, "the verdicts lead to 'wait'"),
        (("offline", "terms"), {}, "another shape"),
        (("verdicts", 0, "recording"), -1, "there is no recording -1"),
        (("verdicts", 0, "recording"), 2, "there is no recording 2"),
    ],
)
def test_what_does_not_follow_is_found_without_the_recordings(record, path, value, said):
    with pytest.raises(EvidenceError, match=said):
        verify_evidence(resealed(changed(record, path, value)))


def test_a_clause_whose_rows_were_removed_holds_the_gate(record):
    """A recording could have its columns, so that its absence is no permission to advance."""
    rows = [row for row in record["verdicts"] if row["clause"] != "token-tv"]
    assert 0 < len(rows) < len(record["verdicts"])
    with pytest.raises(EvidenceError, match="the verdicts lead to 'wait'"):
        verify_evidence(resealed(changed(record, ("verdicts",), rows)))


def test_a_slice_without_a_verdict_is_found_without_the_recordings(record):
    for left_out in range(len(record["verdicts"])):
        verdicts = [row for number, row in enumerate(record["verdicts"]) if number != left_out]
        clause, slice = (record["verdicts"][left_out][name] for name in ("clause", "slice"))
        others = [row for row in verdicts if (row["recording"], row["clause"]) == (0, clause)]
        if others and record["verdicts"][left_out]["recording"] == 0:
            with pytest.raises(EvidenceError, match=f"{clause} on {slice} has no verdict"):
                verify_evidence(resealed(record | {"verdicts": verdicts}))


def test_a_gate_that_waits_or_refuses_has_sound_evidence_too(files, tmp_path):
    waiting = evidence(files, GateTerms(require=("lag",)))
    assert waiting["decision"]["outcome"] == "wait"
    verify_recordings(waiting, files)
    bad = make(tmp_path / "bad.npz", 4, scale=0.8)
    refused = evidence([bad])
    assert refused["decision"]["outcome"] == "rollback"
    verify_recordings(refused, [bad])
    short = make(tmp_path / "short.npz", 5, sequences=2)
    few = evidence([short])
    assert few["decision"]["outcome"] == "wait"
    verify_recordings(few, [short])


def test_evidence_of_a_gate_that_waits_is_sound_whatever_the_order_of_slices(files):
    text = TEXT.replace("slices: {code:", "slices: {zebra: {where: {task: zebra}}, ant: {where: {task: ant}}, code:")
    kernels = Kernel("torch"), Kernel("vllm")
    gate = gate_recordings(load_text(text), [read_input(files[0])], kernels, GateTerms(), 1.0)
    found = json.loads(json.dumps(offline_evidence(gate, text)))
    assert len(found["decision"]["missing"]) > 2
    verify_recordings(found, files)
    with pytest.raises(EvidenceError, match="the verdicts lead to 'wait'"):
        verify_evidence(resealed(changed(found, ("decision", "missing"), found["decision"]["missing"][1:])))


def test_online_evidence_has_no_recordings(contract, make_verdict):
    decision = Decision(GateOutcome.ADVANCE, Stage.FULL, 3)
    online = sealed(contract, Stage.CANARY, "inferB", decision, [verdict_row(contract, make_verdict())], 0)
    with pytest.raises(EvidenceError, match="stage canary, which has no recordings"):
        verify_recordings(online, [])


def recorded(sequences, *, drift=0.002, ids=None, seed=9, groups=None):
    """A recording of these log-probabilities under the inference kernel, one array for each sequence."""
    inference = np.concatenate(sequences)
    train = np.minimum(inference + drift * np.random.default_rng(seed).standard_normal(inference.size), 0.0)
    lengths = np.array([sequence.size for sequence in sequences])
    ids = None if ids is None else np.concatenate(ids)
    attributes = ({},) * lengths.size if groups is None else tuple({"group": group} for group in groups)
    return Recording(train, inference, lengths, attributes, token_ids=ids)


def sampled(sequences=20, tokens=40, mean=2.0, seed=0):
    return list(-0.02 - np.random.default_rng(seed).exponential(mean, (sequences, tokens)))


def rotations(real):
    return [np.roll(sequence, -by) for by in range(40) for sequence in real]


def prefixes(real):
    return [sequence[:length] for length in range(8, 41) for sequence in real]


def shifted(real):
    return [sequence - 1e-5 * by for by in range(100) for sequence in real]


def noisy(real):
    noise = np.random.default_rng(3)
    return [sequence - np.abs(3e-5 * noise.standard_normal(sequence.size)) for _ in range(100) for sequence in real]


def tweaked(real):
    """One number of each copy is another one."""
    noise = np.random.default_rng(3)
    return [np.where(np.arange(row.size) == noise.integers(row.size), -1.0, row) for _ in range(50) for row in real]


def repeated(real):
    return real * 100


@pytest.mark.parametrize("copies", [repeated, shifted, noisy, tweaked, prefixes, rotations])
def test_copies_count_once(copies):
    made = recorded(copies(sampled()))
    (first,) = first_of_each(made)
    assert 20 <= first.sum() <= 35
    assert set(made.lengths[first]) == {40}, "the longest of a sequence's parts"


def test_the_same_tokens_count_once():
    tokens = list(np.random.default_rng(1).integers(0, 50_000, (8, 40)))
    (first,) = first_of_each(recorded(sampled(800), ids=tokens * 100))
    assert np.flatnonzero(first).tolist() == list(range(8))
    refusals = first_of_each(recorded(sampled(800, 15, 0.2), ids=[tokens[0][:15]] * 800))
    assert refusals[0].all()


def rollouts(peaked):
    """16 rollouts of each of 30 prompts: the numbers are the same up to the token in which they part."""
    dice, found = np.random.default_rng(4), []
    for _ in range(30):
        after: dict[tuple[int, ...], np.ndarray] = {}
        for _ in range(16):
            tokens: tuple[int, ...] = ()
            numbers = []
            for _ in range(40):
                chances = after.setdefault(tokens, dice.dirichlet(np.full(8, peaked)))
                token = int(dice.choice(8, p=chances))
                numbers.append(np.log(chances[token]))
                tokens = (*tokens, token)
            found.append(np.array(numbers))
    return found


def memoryless(words):
    """Sequences of a toy, whose numbers depend on the token before only."""
    dice = np.random.default_rng(5)
    table = np.maximum(dice.dirichlet(np.full(words, 0.5), words), 1e-4)
    table /= table.sum(axis=1, keepdims=True)
    word, columns = np.zeros(1000, dtype=int), []
    for _ in range(40):
        following = (table[word].cumsum(axis=1) < dice.random((1000, 1))).sum(axis=1).clip(max=words - 1)
        columns.append(np.log(table[word, following]))
        word = following
    return list(np.stack(columns, axis=1))


@pytest.mark.parametrize(
    "honest",
    [
        sampled(2000, 100),
        [np.round(sequence, 1) for sequence in sampled(2000, 100)],
        [sequence.astype(np.float16).astype(float) for sequence in sampled(2000, 100, 0.1)],
        [np.zeros(40)] * 200,
        [np.where(np.arange(60) < 52, 0.0, sequence[:60]) for sequence in sampled(200, 60)],
        [np.array([-0.3, -0.01, -0.2])] * 200,
        rollouts(1.0),
        rollouts(0.3),
        memoryless(3),
        memoryless(8),
        memoryless(12),
    ],
    ids=[
        "sampled", "rounded", "half precision", "certain", "nearly certain", "short answers", "rollouts",
        "rollouts that part late", "a toy of 3 words", "a toy of 8 words", "a toy of 12 words",
    ],
)  # fmt: skip
def test_what_was_sampled_counts(honest):
    (first,) = first_of_each(recorded(honest))
    assert first.all()


def test_recordings_are_compared_with_each_other():
    real = sampled(60)
    first, two = first_of_each(recorded(real[:40], seed=1), recorded([*real[20:][::-1]], seed=2))
    assert first.all()
    assert two.tolist() == [True] * 20 + [False] * 20


@pytest.mark.parametrize("noise", [0.0, 3e-5], ids=["deterministic kernels", "kernels that differ by the batch"])
def test_a_probable_answer_of_a_prompt_may_be_sampled_again(noise):
    """Such as an agent's tool call: without its repeats, rare other answers would stand for the prompt's mean."""
    dice = np.random.default_rng(6)
    calls = [-0.02 - dice.exponential(0.3, 24) for _ in range(30)]
    made = [call - noise * np.abs(dice.standard_normal(24)) for call in calls for _ in range(12)]
    ids, prompts = [np.arange(24)] * len(made), np.repeat(np.arange(30), 12)
    (first,) = first_of_each(recorded(made, ids=ids, groups=prompts.tolist(), drift=0.0))
    assert first.all()
    for others in (None, range(len(made)), np.repeat(np.arange(30), 12) + 30 * (np.arange(360) % 2)):
        # Copies under the names of other prompts, or under none, are no evidence.
        (first,) = first_of_each(recorded(made, ids=ids, groups=others, drift=0.0))
        assert 30 <= first.sum() <= 210
    again = recorded(made, ids=ids, groups=prompts.tolist(), drift=0.0)
    rows = tuple({**row, "step": number % 2} for number, row in enumerate(again.attributes))
    (first,) = first_of_each(replace(again, attributes=rows))
    assert 180 <= first.sum() <= 210, "a copy under another step is no evidence either"
    long = [sequence for sequence in sampled(20) for _ in range(12)]
    (first,) = first_of_each(recorded(long, groups=np.repeat(np.arange(20), 12).tolist()))
    assert first.sum() == 20
