"""Penalties on tokens that came before, on one side: named by which tokens came before, and no drift is called so."""

import numpy as np
import pytest

from kc_otel.record.measure.checks import penalised
from kc_otel.record.telemetry.accumulate import Accumulator
from kc_otel.recordings.recording import Recording, RecordingError
from kc_otel.recordings.recording_files import load_recording, save_recording
from tests.tools.planted_faults import HONEST, honest, log_softmax

ROWS, TOKENS, VOCABULARY, PROMPT = 24, 96, 300, 16


def lowered(logits, kind, size, counts, prompt):
    if kind == "presence":
        return logits - size * (counts > 0)
    if kind == "frequency":
        return logits - size * counts
    if kind == "repetition":
        return np.where((counts > 0) | prompt, np.where(logits > 0, logits / size, logits * size), logits)
    return logits / size if kind == "temperature" else logits


def sampled(kind, size, side, noise=0.03, seed=0):
    """Log P, log Q and ids of tokens that are drawn from Q one after the other, of words that come again."""
    rng = np.random.default_rng(seed)
    base, here = -1.1 * np.log(np.arange(1, VOCABULARY + 1)), np.arange(ROWS)
    counts, prompt = np.zeros((ROWS, VOCABULARY)), np.zeros((ROWS, VOCABULARY), dtype=bool)
    for row in prompt:
        row[rng.choice(VOCABULARY, PROMPT, p=np.exp(log_softmax(base)))] = True
    found = []
    for _ in range(TOKENS):
        spread = np.where(rng.random(ROWS) < 0.4, rng.uniform(3, 8, ROWS), 1.5)[:, None]
        train = base - base.mean() + spread * rng.standard_normal((ROWS, VOCABULARY))
        inference = train + noise * rng.standard_normal(train.shape)
        if side == "inference":
            inference = lowered(inference, kind, size, counts, prompt)
        else:
            train = lowered(train, kind, size, counts, prompt)
        p, q = log_softmax(train), log_softmax(inference)
        token = np.argmax(q + rng.gumbel(size=q.shape), -1)
        found.append((p[here, token], q[here, token], token))
        counts[here, token] += 1
    return tuple(np.stack(column, axis=1) for column in zip(*found, strict=True))


def said(train, inference, ids):
    return penalised(train.ravel(), inference.ravel(), ids.ravel(), np.full(len(train), train.shape[1]))


@pytest.mark.parametrize("side", ["inference", "training"])
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("presence", 0.2),
        pytest.param("presence", 1.0, marks=pytest.mark.slow),
        ("frequency", 0.2),
        pytest.param("frequency", 0.5, marks=pytest.mark.slow),
        ("repetition", 1.05),
        pytest.param("repetition", 1.2, marks=pytest.mark.slow),
    ],
)
def test_a_penalty_of_one_side_is_named(kind, size, side):
    """Of usual sizes, beside the rounding of bfloat16, also where the prompt is penalised and not known."""
    assert f"the {side} side gives less to tokens that came before" in said(*sampled(kind, size, side))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize(("kind", "size"), [("none", 0.0), ("temperature", 0.8), ("temperature", 1.3)])
@pytest.mark.parametrize("noise", [0.05, 0.25, 0.5])
def test_drift_and_other_settings_are_no_penalty(kind, size, noise, seed):
    """Noise of every size has both signs among tokens that came before; a temperature nearly so."""
    assert not said(*sampled(kind, size, "inference", noise, seed))


@pytest.mark.parametrize("kind", HONEST)
@pytest.mark.parametrize("batches", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_honest_drift_is_no_penalty_whatever_came_before(kind, batches):
    for seed in range(batches):
        rng = np.random.default_rng(seed)
        train, inference = honest(kind, rng, (24, 96), 0.4)
        assert not said(train, inference, rng.zipf(1.3, train.shape).clip(max=999))


def test_a_batch_and_a_recording_with_a_penalty_are_not_measured(tmp_path):
    """The whole batch is held, not the rows that show it; without ids of tokens nobody can tell."""
    train, inference, ids = sampled("presence", 0.5, "inference")
    batch = Accumulator(["all"]).add_sampled(train, inference, token_ids=ids)
    assert batch.invalid == {"penalised_sampling": ROWS}
    assert Accumulator(["all"]).add_sampled(train, inference).invalid == {}
    mask = np.ones(train.shape, dtype=bool)
    mask[:, -5:] = False
    assert Accumulator(["all"]).add_sampled(train, inference, mask=mask, token_ids=ids).sequences == 0
    lengths = np.full(ROWS, TOKENS)
    save_recording(Recording(train.ravel(), inference.ravel(), lengths, ({},) * ROWS, ids.ravel()), tmp_path / "a.npz")
    with pytest.raises(RecordingError, match=r"INVALID INPUT, penalised_sampling: .* the inference side gives less"):
        load_recording(tmp_path / "a.npz")
