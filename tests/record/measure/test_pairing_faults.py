"""Faults of the pairing, each planted in healthy rollouts, and drift of every kind that must not be accused."""

from itertools import product

import numpy as np
import pytest

from kc_otel.contract.input_reasons import InvalidReason
from kc_otel.record.measure.blocks import Block
from kc_otel.record.measure.checks import check, check_block, failed, held_together
from kc_otel.record.telemetry.accumulate import Accumulator
from kc_otel.stats.surplus import surely_surplus, surplus, surplus_of_sums
from tests.tools.planted_faults import FAULTS, FAULTS_OF_BATCHES, HONEST, healthy, honest, log_softmax, sampled, texts


def block_of(rows):
    lengths = np.array([train.size for train, _ in rows])
    train, inference = (np.concatenate(side) for side in zip(*rows, strict=True))
    return Block(np.arange(lengths.size), np.cumsum(lengths) - lengths, lengths, train, inference)


def checked(rows):
    block = block_of(rows)
    found = check_block(block)
    counted = {reason: rows.size for reason, rows in failed(found.codes).items()}
    return counted, {reason.name.lower(): words for reason, words in found.why.items()}


def test_healthy_rollouts_are_measured():
    assert checked(healthy()) == ({}, {})


@pytest.mark.parametrize("name", sorted(set(FAULTS) - set(FAULTS_OF_BATCHES)))
@pytest.mark.parametrize("sequences", [pytest.param(150, marks=pytest.mark.slow), 16])
def test_each_planted_fault_is_named(name, sequences):
    """Reason and words say what it is, on most of the rows that have it, in a small batch too."""
    plant, reason, words = FAULTS[name]
    counts, why = checked(plant(healthy(sequences), np.random.default_rng(1)))
    assert reason in counts
    assert sum(counts.values()) >= (0.02 if name in {"a sentinel", "the lowest float"} else 0.9) * sequences, counts
    for part in words:
        assert part in why[reason], why[reason]


@pytest.mark.parametrize("kind", HONEST)
@pytest.mark.parametrize(("rows", "tokens", "sure"), [(16, 128, 0.5), (8, 300, 0.97), (48, 5, 0.8), (12, 90, 0.9)])
@pytest.mark.parametrize(
    "batches",
    [2, pytest.param(200, marks=pytest.mark.slow), pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.long])],
)
def test_honest_drift_is_never_accused(kind, rows, tokens, sure, batches):
    """Rounding, formats of 8 and 4 bits, stale weights, coarse storage; very sure texts, and very short ones."""
    for seed in range(batches):
        train, inference = honest(kind, np.random.default_rng(seed), (rows, tokens), sure)
        assert not check(train, inference).any(), seed


def broken(rng, share):
    """At some tokens, in some rows (1.0), or with one number for all of a vocabulary, whose few others lie below it."""
    if share and share < 1.0:
        return honest("garbage", rng, (40, 128), 0.5, share)
    train, inference = honest("bf16", rng, (60, 128), 0.5)
    if share:
        train[::4], inference[::4] = honest("garbage", rng, (15, 128), 0.5, 1.0)
        return train, inference
    uniform = rng.random(train.shape) < 0.1
    inference[uniform] = np.float32(-np.log(49_152))
    train[uniform] = -rng.gamma(8.0, 2.0, np.count_nonzero(uniform))
    return train, inference


def open_together(rng, tokens):
    """So many tokens that are open, or sure, together go with the next one, and are no means."""
    logits = np.repeat(texts(rng, (60, 126), 0.5)[:, ::tokens], tokens, axis=1)
    return sampled(rng, *(logits + noise * rng.standard_normal(logits.shape) for noise in (0.1, 0.3)))


def begun_alike(rng):
    """Rollouts of one prompt that begin with one token are no fillers."""
    train, inference = honest("int8", rng, (400, 32), 0.5)
    inference[:300, 0], train[:300, 0] = -1.234567, -1.3 + 0.02 * rng.standard_normal(300)
    return train, inference


def tails(rng):
    """A sharp lower end on one side, and a tail that only the training side has, are no floor."""
    inference = np.maximum(-rng.exponential(2.0, (60, 128)), -rng.uniform(3.0, 5.0, (60, 128)))
    train = np.minimum(inference * (1.0 + 0.2 * rng.standard_normal(inference.shape)), 0.0)
    return train - (rng.random(train.shape) < 0.05) * rng.exponential(4.0, train.shape), inference


def equal_elsewhere(rng, share):
    """A fault behind the last layer changes single tokens and leaves the others bit for bit: that is the kernel's."""
    train, inference = honest("garbage", rng, (40, 128), 0.5, 1.0)
    return np.where(rng.random(train.shape) < share, train, inference), inference


def begun_otherwise(rng, tokens, share):
    """New weights begin answers otherwise: they give away a share of the first tokens, as another prompt may."""
    train, inference = honest("bf16", rng, (40, 128), 0.5)
    kept = np.clip(1.0 - share + rng.normal(0.0, 0.3 * (1.0 - share), (40, tokens)), 0.002, 1.0)
    train[:, :tokens] += np.log(kept)
    train[:, tokens : 2 * tokens] += rng.normal(0.0, 0.1, (40, tokens)).astype("f4")
    return np.minimum(train, 0.0), inference


def ended_otherwise(rng, part, share, scatter):
    """New weights give the end of some answers away, by much the same or by anything from little to much."""
    train, inference = honest("bf16", rng, (80, 96), 0.5)
    ended = rng.random(80) < part
    train[ended, -1] += np.log(np.clip(1.0 - share * rng.uniform(0.9, 1.0, ended.sum()), 0.002, 1.0)).astype("f4")
    train[ended, -1] -= scatter * rng.lognormal(-0.5, 1.0, ended.sum()).astype("f4")
    return train, inference


def mixtures(rng, size, weights):
    """Mixtures of the same models differ by no more than the ratio of the weights, and often by that."""
    first = texts(rng, (60, 128), 0.5)
    models = [log_softmax(side.astype(float)) for side in (first, first + size * rng.standard_normal(first.shape))]
    return sampled(rng, *(np.logaddexp(np.log(share) + models[0], np.log1p(-share) + models[1]) for share in weights))


def forgotten(rng, size, over):
    """Another prompt matters for dozens of tokens: drift that is forgotten sooner is staleness, or a kernel's."""
    text = texts(rng, (60, 128), 0.4)
    noise = size * np.exp(-np.arange(128) / over)[:, None] + 0.03
    return sampled(rng, text + noise * rng.standard_normal(text.shape), text)


def copied(rng, template):
    """Stretches of which both kernels are entirely sure, a template at the beginning too, among others nearly 0."""
    train, inference = honest("copied", rng, (16, 256), 0.5)
    train[:, :template] = inference[:, :template] = 0.0
    return train, inference


MEASURED = [
    *((broken, share) for share in (0.0, 0.15, 0.5, 1.0)),
    *((open_together, tokens) for tokens in (1, 2, 3)),
    (begun_alike,),
    (tails,),
    *((equal_elsewhere, share) for share in (0.002, 0.02, 0.2, 0.45)),
    *((begun_otherwise, tokens, share) for tokens in (1, 2, 4, 8) for share in (0.5, 0.9, 0.99)),
    *((ended_otherwise, *of) for of in product((0.1, 0.4, 1.0), (0.5, 0.9, 0.99), (0.0, 1.0))),
    *((mixtures, *of) for of in product((1.0, 2.0, 4.0), ((0.7, 0.3), (0.6, 0.4), (0.9, 0.5)))),
    *((forgotten, size, over) for size in (1.0, 2.0, 3.0) for over in (4, 8)),
    (copied, 0),
    (copied, 4),
]
"""Drift that looks like a fault, and how to make it."""


@pytest.mark.slow
@pytest.mark.parametrize("drift", MEASURED, ids=lambda drift: " ".join([drift[0].__name__, *map(str, drift[1:])]))
def test_what_looks_like_a_fault_and_is_drift_is_measured(drift):
    make, *of = drift
    for seed in range(10):
        train, inference = make(np.random.default_rng(seed), *of)
        assert not check(train, inference).any(), seed
        if make is begun_otherwise and of[0] == 8:
            said = checked(list(zip(train, inference, strict=True)))[1]["valid"]
            assert "not checked whether the prompts are the same: the first 8 tokens differ by" in said


@pytest.mark.parametrize("sides", [slice(2), slice(1, 2)])
@pytest.mark.parametrize("entry", [2, 5])
def test_a_later_entry_of_the_likeliest_tokens_is_named(sides, entry):
    """Read from both kernels' lists, or from one's, in the place of the sampled token's."""
    rng = np.random.default_rng(0)
    text = texts(rng, (40, 64), 0.5)
    logits = [text, text + 0.03 * rng.standard_normal(text.shape)]
    rows = np.stack(sampled(rng, *logits))
    entries = np.stack([np.sort(log_softmax(side.astype(float)), -1)[..., -entry] for side in logits])
    rows[sides] = entries[sides]
    counts, why = checked(list(zip(*rows, strict=True)))
    assert counts == {"not_sampled": 40}
    assert "lists of the likeliest tokens" in why["not_sampled"]


def test_text_that_neither_side_sampled_is_named_where_the_sides_drift():
    """Tool output that both kernels predict well: the mean of P/Q is above 1 by the variance of what they drift."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        text = texts(rng, (60, 128), 0.5)
        kernels = [log_softmax(text + 0.4 * rng.standard_normal(text.shape)) for _ in range(2)]
        token = np.argmax(text + rng.gumbel(size=text.shape), -1)[..., None]
        train, inference = (np.take_along_axis(side, token, -1)[..., 0] for side in kernels)
        found = Accumulator(["all"]).add_sampled(np.float32(train), np.float32(inference))
        assert found.invalid == {"not_sampled": 60}, seed


def test_what_could_not_be_checked_is_told():
    """Of a handful of tokens nobody can say that they are the same; nor where P misses mass that Q has."""
    rows = healthy(40)
    few = [(train[:3] - 0.3, inference[:3]) for train, inference in rows[:2]]
    assert "not checked whether both sides score the same tokens" in checked(few)[1]["valid"]
    drifting = list(zip(*honest("int4", np.random.default_rng(0), (200, 128), 0.5), strict=True))
    assert checked(drifting) == ({}, {})
    averaged = [((train + inference) / 2, inference) for train, inference in drifting]
    counts, why = checked(averaged)
    assert counts == {}
    assert "significantly below 1" in why["valid"]


def test_a_shift_of_the_second_half_is_told_from_which_token_on():
    rows = healthy(40, tokens=160)
    rows = [(train, np.concatenate([q[:96], np.roll(q[96:], -3)])) for train, q in rows]
    _, why = checked(rows)
    assert "(lag 3)" in why["not_same_tokens"]
    first = int(why["not_same_tokens"].split("from token ")[1].split()[0])
    assert abs(first - 96) <= 4


@pytest.mark.parametrize(
    ("code", "many", "few"), [(InvalidReason.TRUNCATED_SAMPLING, 26, 3), (InvalidReason.NOT_SAME_TOKENS, 110, 50)]
)
def test_a_sampler_of_many_rows_and_a_pairing_of_most_are_those_of_the_batch(code, many, few):
    codes = np.where(np.arange(150) < many, np.int8(code), np.int8(0))
    assert set(held_together(codes)) == {code}
    codes[few:] = 0
    assert held_together(codes) is codes


@pytest.mark.slow
def test_a_mean_ratio_is_not_called_above_one_by_chance():
    """Of honest samples, of any drift, few or many, rounded or not."""
    rng = np.random.default_rng(1)
    for _ in range(300):
        n = int(rng.choice([200, 2000, 20_000]))
        p, q = rng.dirichlet(np.full(50, rng.uniform(0.1, 2.0)), 2)
        q = (1 - (mix := rng.uniform(0.0, 1.0))) * p + mix * q
        tokens = rng.choice(50, n, p=q)
        train, inference = np.log(np.maximum(p, 1e-300))[tokens], np.log(q)[tokens]
        if rng.random() < 0.5:
            inference = inference.astype(np.float16).astype(np.float64)
        changes = np.expm1((train - np.minimum(inference, 0.0)).clip(-64, 16))
        assert not surely_surplus(surplus(changes))
        bound = surplus_of_sums(float(changes.sum()), float(np.square(changes).sum()), n)
        assert (
            bound <= np.array([np.log1p(bet * (changes - 0.02)).sum() for bet in (0.005, 0.05, 0.2, 0.5)]) + 1e-6
        ).all()


@pytest.mark.parametrize("name", FAULTS_OF_BATCHES)
def test_a_fault_that_only_a_batch_shows_is_named(name):
    plant, reason, _ = FAULTS[name]
    rows = plant(healthy(40), np.random.default_rng(1))
    mask = np.arange(max(train.size for train, _ in rows)) < np.array([[train.size] for train, _ in rows])
    sides = np.full((2, *mask.shape), -1.0)
    sides[:, mask] = [np.concatenate(side) for side in zip(*rows, strict=True)]
    assert reason in Accumulator(["all"]).add_sampled(*sides, mask=mask).invalid
