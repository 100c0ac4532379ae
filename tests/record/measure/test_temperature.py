"""A temperature or another base against honest drift: a multiple of log P, and noise that grows with -log P."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kc_otel.contract.input_reasons import InvalidReason
from kc_otel.record.measure.checks import check
from tests.tools.planted_faults import sampled, texts

pytestmark = pytest.mark.slow

Q4_0 = Path(__file__).parents[2] / "data" / "llama-cpp-q4_0.npz"
SHAPES = [(240, 24), (1, 64), (6, 64), (40, 64), (6, 160), (40, 160), (12, 400)]


def q4_0():
    """Log P and log Q of 240 sequences of 24 tokens, [240, 24] each; see tests/data/README.md."""
    with np.load(Q4_0) as kept:
        return kept["train"], kept["inference"]


def has_temperature(train, inference):
    return check(train, inference) == InvalidReason.TEMPERATURE_MISMATCH


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rows", [240, 120, 60])
def test_llama_cpps_four_bits_have_no_temperature(rows, turned):
    """Every sure token is less sure in four bits, by much the same; the unlikely ones say that it is no temperature."""
    train, inference = reversed(q4_0()) if turned else q4_0()
    for first in range(0, 240, rows):
        here = slice(first, first + rows)
        assert not check(train[here], inference[here]).any()


@pytest.mark.parametrize("base", [2, 10])
@pytest.mark.parametrize("shape", [(240, 24), (60, 96), (12, 480)])
def test_logarithms_to_another_base_are_named_under_four_bits(base, shape):
    """The same numbers with one side in bits or in decimal digits: a multiple, whatever drift comes with it."""
    train, inference = (side.reshape(shape) for side in q4_0())
    assert has_temperature(train / np.log(base), inference).mean() > 0.95
    assert has_temperature(train, inference / np.log(base)).mean() > 0.95


LIKELIHOODS = {
    "of a trained model": lambda rng, shape: rng.choice(q4_0()[1].astype(np.float64).ravel(), shape),
    "mostly likely": lambda rng, shape: -rng.exponential(1.0, shape),
    "of every size": lambda rng, shape: -rng.lognormal(-2.0, 2.0, shape).clip(max=25.0),
    "nearly certain": lambda rng, shape: np.where(
        rng.random(shape) < 0.02, -rng.exponential(3.0, shape) - 0.5, -rng.exponential(1e-3, shape)
    ),
}
NOISE = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "with heavy tails": lambda rng, shape: rng.standard_t(3, shape),
    "that takes more often than it gives": lambda rng, shape: rng.standard_normal(shape) - 0.1,
    "of another size in each row": lambda rng, shape: (
        rng.standard_normal(shape) * np.exp(rng.standard_normal((shape[0], 1)))
    ),
}


@pytest.mark.parametrize("size", [0.02, 0.1, 0.3, 0.8])
@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("likelihoods", LIKELIHOODS)
def test_noise_that_grows_with_the_log_probability_is_no_temperature(likelihoods, noise, size):
    """On either side, of any size and shape, in long rows, in short ones and in one alone: it is drift."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        for shape in SHAPES:
            inference = LIKELIHOODS[likelihoods](rng, shape)
            train = np.minimum(inference * (1.0 + size * NOISE[noise](rng, shape)), 0.0)
            assert not has_temperature(train, inference).any(), (shape, seed)
            assert not has_temperature(inference, train).any(), (shape, seed)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("temperature", [0.7, 0.9, 1.1])
@pytest.mark.parametrize(("shape", "sharp", "least"), [((250, 16), (1.5, 5.0), 1.0), ((40, 128), (1.5, 1.6), 0.25)])
def test_a_temperature_is_named_where_kernels_differ_as_in_four_bits(temperature, turned, shape, sharp, least):
    """Softmaxes over 200 tokens: all short rows, at positions sure and open; of long ones at least a quarter."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        logits = rng.standard_normal((*shape, 200)) * rng.uniform(*sharp, (*shape, 1))
        noisy = (logits + 0.05 * rng.standard_normal(logits.shape)) / temperature
        sides = sampled(rng, logits, noisy)
        assert has_temperature(*(reversed(sides) if turned else sides)).mean() >= least, seed


@pytest.mark.parametrize("rows", [24, 12, 6])
@pytest.mark.parametrize("turned", [False, True])
def test_a_temperature_of_some_rows_is_named_where_no_line_fits(rows, turned):
    """Each position has its own entropy, and a share of the rows was colder; the setting rejects the batch."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        text = texts(rng, (24, 80), 0.5)
        noisy = text + 0.1 * rng.standard_normal(text.shape)
        noisy[:rows] /= 0.6
        sides = sampled(rng, text, noisy)
        assert has_temperature(*(reversed(sides) if turned else sides)).all(), seed
        assert not has_temperature(*sampled(rng, text, text + 0.3 * rng.standard_normal(text.shape))).any(), seed


@pytest.mark.parametrize(
    ("temperature", "rows", "of", "tokens", "noise"), [(0.9, 24, 24, 80, 0.1), (0.9, 12, 48, 128, 0.08)]
)
def test_a_mild_temperature_is_named_where_unlikely_tokens_agree(temperature, rows, of, tokens, noise):
    """Noise makes sure tokens uneven; the unlikely ones bend as a temperature bends them, and no drift does."""
    rng = np.random.default_rng(1)
    text = texts(rng, (of, tokens), 0.5)
    noisy = text + noise * rng.standard_normal(text.shape)
    noisy[:rows] /= temperature
    sides = sampled(rng, text, noisy)
    assert has_temperature(*sides).all()
    assert has_temperature(*reversed(sides)).all()


@pytest.mark.parametrize("size", [0.2, 0.8])
def test_weights_that_are_surer_of_every_likeliest_token_have_no_temperature(size):
    for seed in range(10):
        rng = np.random.default_rng(seed)
        text = texts(rng, (48, 96), 0.5)
        surer = text + (text == text.max(-1, keepdims=True)) * rng.exponential(size, (48, 96, 1))
        sides = sampled(rng, text + 0.05 * rng.standard_normal(text.shape), surer)
        assert not has_temperature(*sides).any(), seed
        assert not has_temperature(*reversed(sides)).any(), seed
