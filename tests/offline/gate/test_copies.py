"""Which sequences of recordings are others again, and which only look like others."""

from __future__ import annotations

import numpy as np
import pytest

from kc_otel.offline.gate.copies import first_of_each
from kc_otel.recordings.recording import Recording


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
    long = [sequence for sequence in sampled(20) for _ in range(12)]
    (first,) = first_of_each(recorded(long, groups=np.repeat(np.arange(20), 12).tolist()))
    assert first.sum() == 20
