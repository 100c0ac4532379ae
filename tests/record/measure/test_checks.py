"""Input checks: each fault planted, and what looks like a fault but is drift."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kc_otel.contract.input_reasons import REASONS, InvalidReason, remedy
from kc_otel.record.measure.checks import check, check_declared, failed
from tests.tools.planted_faults import log_softmax, sampled

SHAPE = (6, 40)


def logprobs(noise: float = 0.01, seed: int = 0, shape: tuple[int, int] = SHAPE):
    """Log-probabilities of two kernels that differ by `noise`."""
    rng = np.random.default_rng(seed)
    inference = np.log(rng.uniform(0.05, 1, shape))
    train = np.minimum(inference + noise * rng.standard_normal(shape), 0)
    return train.astype(np.float32), inference.astype(np.float32)


def only(row: int, reason: InvalidReason, rows: int = SHAPE[0]) -> list[int]:
    return [int(reason) if index == row else 0 for index in range(rows)]


SINGLE = {
    "NaN": (("train", "inference"), (2, 7), np.nan, InvalidReason.NAN_LOGPROB),
    "a logit": (("train",), (1, 3), 0.3, InvalidReason.POSITIVE_LOGPROB),
    "infinity": (("inference",), (4, 5), np.inf, InvalidReason.POSITIVE_LOGPROB),
    "a rounding error above zero": (("train", "inference"), (5, 0), 5e-4, InvalidReason.VALID),
    "what nobody can have sampled": (("inference",), (3, 0), -np.inf, InvalidReason.IMPOSSIBLE_TOKEN),
    "what the other kernel rules out": (("train",), (3, 0), -np.inf, InvalidReason.VALID),
    "a buffer nobody wrote to": (("train", "inference"), (2, slice(30)), 0.0, InvalidReason.PLACEHOLDER),
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_number_that_cannot_be_makes_its_sequence_invalid_and_no_other(name) -> None:
    """On either side, or on the one where it is a fault: on the other it is drift."""
    sides, (row, tokens), number, reason = SINGLE[name]
    for side in sides:
        pair = dict(zip(("train", "inference"), logprobs(), strict=True))
        pair[side][row, tokens] = number
        mask = np.ones(SHAPE, dtype=bool)
        mask[2, 30:] = False
        assert check(**pair, mask=mask).tolist() == only(row, reason)


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("noise", [1e-5, 0.05])
def test_a_not_same_tokens_is_noticed(by: int, noise: float) -> None:
    """A side that is a token ahead or behind is a fault, between padding too, and only in the row where it is so."""
    train, inference = logprobs(noise)
    mask = np.ones(SHAPE, dtype=bool)
    mask[3, :5], mask[3, 35:] = False, False
    train[3] = np.roll(train[3], by)
    train[3, :5], train[3, 35:] = np.nan, np.nan
    train[3, 5 if by > 0 else 34] = -1.0
    assert check(train, inference, mask=mask).tolist() == only(3, InvalidReason.NOT_SAME_TOKENS)


def test_short_sequences_are_not_called_shifted() -> None:
    train, inference = logprobs(shape=(6, 7))
    train[3] = np.roll(train[3], 1)
    assert not check(train, inference).any()


def test_different_tokens_are_not_compared() -> None:
    ids = np.arange(math.prod(SHAPE)).reshape(SHAPE)
    other, mask = ids.copy(), np.ones(SHAPE, dtype=np.int64)
    other[1, 3], other[2, 3], mask[2, 3] = -1, -1, 0
    codes = check_declared(SHAPE[0], torch.from_numpy(mask), torch.from_numpy(ids), other, None)
    assert codes.tolist() == only(1, InvalidReason.TOKEN_MISMATCH)


def test_shapes_have_to_agree() -> None:
    train, inference = logprobs()
    assert set(check(train, inference[:, 1:])) == {InvalidReason.SHAPE_MISMATCH}
    assert set(check(train, inference, mask=np.ones((6, 39)))) == {InvalidReason.SHAPE_MISMATCH}


def counted(codes: np.ndarray) -> dict[str, int]:
    """Sequences that failed, by the name of the reason."""
    return {reason: rows.size for reason, rows in failed(codes).items()}


def test_a_sequence_has_the_first_reason() -> None:
    train, inference = logprobs()
    train[0, 0], inference[0, 1] = 3.0, -np.inf
    assert counted(check(train, inference)) == {"positive_logprob": 1}
    train[0, 2] = np.nan
    assert counted(check(train, inference)) == {"nan_logprob": 1}


def distributions(temperature: float = 1.0, keep: float = 1.0, seed: int = 0, shape: tuple[int, int] = (6, 160)):
    """Log P and log Q of tokens from softmaxes over 50 entries, Q sharpened by a temperature and truncated to top-p."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((*shape, 50))
    inference = log_softmax(logits / temperature)
    largest = np.sort(np.exp(inference), axis=-1)[..., ::-1]
    last = np.argmax(np.cumsum(largest, axis=-1) >= keep - 1e-12, axis=-1)[..., None]
    inference[np.exp(inference) < np.take_along_axis(largest, last, -1) - 1e-12] = -np.inf
    return sampled(rng, logits, inference)


@pytest.mark.parametrize(
    ("temperature", "shape"),
    [
        *((temperature, (6, 160)) for temperature in (0.6, 0.8, 1.25, 1.5)),
        *((temperature, (1200 // tokens, tokens)) for temperature in (0.7, 1.4) for tokens in (4, 20, 63)),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_a_temperature_on_one_side_is_noticed(temperature: float, shape: tuple[int, int], turned: bool) -> None:
    """Nobody has to say so: the sides' numbers do, under kernel noise too, those of many short sequences together."""
    train, inference = distributions(temperature, shape=shape)
    train = np.minimum(train + 0.01 * np.random.default_rng(1).standard_normal(train.shape), 0)
    codes = check(inference, train) if turned else check(train, inference)
    assert set(codes) == {InvalidReason.TEMPERATURE_MISMATCH}


@pytest.mark.parametrize("keep", [0.8, 0.9, 0.95])
@pytest.mark.parametrize("turned", [False, True])
def test_a_truncation_on_one_side_is_noticed(keep: float, turned: bool) -> None:
    train, inference = distributions(keep=keep)
    codes = check(inference, train) if turned else check(train, inference)
    assert set(codes) == {InvalidReason.TRUNCATED_SAMPLING}


def test_a_token_at_the_edge_of_the_nucleus_is_no_truncation() -> None:
    """By rounding a token may be out on the training side alone: -inf there is drift, and no pattern."""
    train, inference = logprobs(0.02, shape=(4, 160))
    train[1, 40] = -np.inf
    assert not check(train, inference).any()


def test_other_processing_is_looked_for_in_each_sequence_alone() -> None:
    train, inference = logprobs(0.05, shape=(6, 160))
    train[2], inference[2] = (side[0] for side in distributions(0.7, shape=(1, 160)))
    assert check(train, inference).tolist() == only(2, InvalidReason.TEMPERATURE_MISMATCH)


def test_short_or_close_sequences_are_given_no_processing() -> None:
    """Over a few tokens, or with drift no larger than rounding, a pattern may be chance."""
    train, inference = distributions(0.7, shape=(2, 63))
    assert not check(train, inference).any()
    train, inference = distributions(0.99)
    assert not check(train, inference).any()


def uneven(change, seed: int = 0, shape: tuple[int, int] = (100, 16)):
    """Log P and log Q of tokens at positions between sure and open ones, where P has the logits and Q changed ones."""
    rng = np.random.default_rng(seed)
    sharp = np.where(rng.random(shape) < 0.6, rng.uniform(5, 9, shape), rng.uniform(0.5, 2, shape))
    logits = rng.standard_normal((*shape, 60)) * sharp[..., None]
    return list(sampled(rng, logits, change(logits, rng)))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("temperature", [0.7, 0.9, 1.2, 1.5])
def test_a_temperature_is_noticed_where_the_entropy_varies(turned: bool, temperature: float) -> None:
    pair = uneven(lambda logits, rng: (logits + 0.03 * rng.standard_normal(logits.shape)) / temperature)
    assert set(check(*(reversed(pair) if turned else pair))) == {InvalidReason.TEMPERATURE_MISMATCH}


def test_the_same_few_answers_again_and_again_are_no_temperature() -> None:
    choice = np.random.default_rng(0).integers(0, 2, (200, 1))
    train, inference = np.log([0.7, 0.3])[choice], np.log([0.6, 0.4])[choice]
    assert not check(train, inference).any()


def test_a_mask_that_leaves_nothing_is_named() -> None:
    train, inference = logprobs()
    mask = np.ones(SHAPE, dtype=bool)
    mask[3] = False
    assert check(train, inference, mask=mask).tolist() == only(3, InvalidReason.NO_TOKENS)
    assert set(check(train, inference, mask=np.zeros(SHAPE))) == {InvalidReason.NO_TOKENS}


def test_a_constant_offset_is_drift() -> None:
    """The mass that a truncation keeps changes from token to token; a constant does not."""
    _, inference = logprobs(shape=(3, 100))
    assert not check(inference - np.float32(0.125), inference).any()


@given(
    st.floats(0.01, 0.6),
    st.floats(0, 0.9),
    st.floats(2.2, 30),
    st.sampled_from([4, 30, 64, 160, 400]),
    st.integers(0, 1000),
)
def test_no_drift_of_a_kernel_is_taken_for_a_setting(
    size: float, sharp: float, tails: float, tokens: int, seed: int
) -> None:
    """However large, heavy-tailed or concentrated on unlikely tokens: noise in the logits is measured."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((max(4, 400 // tokens), tokens, 20)) * 3
    noise = rng.standard_t(tails, logits.shape) * size * (1 + sharp * (logits < 0))
    codes = check(*sampled(rng, logits, logits + noise))
    assert not np.isin(
        codes, [InvalidReason.TEMPERATURE_MISMATCH, InvalidReason.TRUNCATED_SAMPLING, InvalidReason.PLACEHOLDER]
    ).any()


@pytest.mark.parametrize("filler", [0.0, -1.0, -100.0])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(("tokens", "end"), [(80, 60), (18, 10)])
def test_padding_that_counts_is_noticed(filler: float, side: int, tokens: int, end: int) -> None:
    """A run of one number at the end of a sequence, also of a short one, is a filler; masked it is nothing."""
    pair = logprobs(shape=(6, tokens))
    pair[side][2, end:] = filler
    mask = np.ones((6, tokens), dtype=bool)
    mask[2, end:] = False
    assert check(*pair).tolist() == only(2, InvalidReason.PLACEHOLDER)
    assert not check(*pair, mask=mask).any()


def test_padding_that_training_scores_is_not_taken_for_means_over_tokens() -> None:
    """Every answer is padded: what training gives to padding lies far below the answer, and changes little."""
    train, inference = logprobs(shape=(12, 96))
    for row, end in enumerate(np.linspace(40, 72, 12).astype(int)):
        train[row, end:], inference[row, end:] = -9.0 - 0.01 * np.arange(96 - end), 0.0
    assert (check(train, inference) == InvalidReason.PLACEHOLDER).all()


@pytest.mark.parametrize("side", [0, 1, None])
def test_a_short_filler_is_noticed_where_others_have_a_long_one(side: int | None) -> None:
    """A forgotten mask is missing for the whole batch: also where a tail is too short to tell anything by itself."""
    pair = logprobs(shape=(7, 40))
    ends = {1: 20, 2: 30, 4: 37, 5: 39}
    for row, end in ends.items():
        for array in pair if side is None else (pair[side],):
            array[row, end:] = -1.0
    codes = check(*pair)
    assert np.flatnonzero(codes == InvalidReason.PLACEHOLDER).tolist() == list(ends)
    assert np.flatnonzero(codes).tolist() == list(ends)
    alone = [array[3:] for array in pair]  # neither of these tells it
    assert not check(*alone).any()


@pytest.mark.parametrize("drift", [0.0, 1e-4, 0.1])
@pytest.mark.parametrize("filler", [0.0, -1.0, -100.0])
def test_a_forgotten_mask_is_noticed_at_any_drift(drift: float, filler: float) -> None:
    """The same filler on both sides is no agreement: every row that has one is a fault, and no other."""
    pair = logprobs(drift, shape=(6, 80))
    for row, end in ((1, 20), (2, 60), (4, 72)):
        for side in pair:
            side[row, end:] = filler
    codes = check(*pair)
    assert np.flatnonzero(codes == InvalidReason.PLACEHOLDER).tolist() == [1, 2, 4]
    assert not np.delete(codes, [1, 2, 4]).any()


@given(st.floats(0.05, 0.98), st.integers(16, 200), st.integers(0, 1000))
@example(0.75, 20, 112)  # an end of fifteen after five tokens that say little
def test_kernels_that_are_often_sure_are_not_taken_for_padding(sure: float, tokens: int, seed: int) -> None:
    """Text of which both kernels are entirely sure here and there has runs of zeros, at its end too."""
    rng = np.random.default_rng(seed)
    inference = np.where(rng.random((4, tokens)) < sure, 0.0, -rng.exponential(1.0, (4, tokens)))
    train = np.where(inference == 0.0, 0.0, inference + 0.01 * rng.standard_normal((4, tokens))).clip(max=0.0)
    assert not check(train, inference).any()


@pytest.mark.parametrize("longest", [6, 40], ids=["a few tokens of padding", "much padding"])
def test_a_mask_that_counts_nothing_but_padding_is_told(longest: int) -> None:
    """Both sides are 0 there, so that it would look like kernels without any drift."""
    train, inference = logprobs(0.3, shape=(200, 64))
    padding = np.arange(64) >= 64 - np.random.default_rng(1).integers(1, longest, (200, 1))
    train[padding] = inference[padding] = 0.0
    assert set(check(train, inference, mask=padding)) == {InvalidReason.PLACEHOLDER}
    assert not check(train, inference, mask=~padding).any()
    assert not check(train[:4], inference[:4], mask=padding[:4]).any(), "short answers may be certain"


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_a_kernel_that_says_the_same_of_every_token_has_no_temperature(noise: float) -> None:
    """There is no line in a log Q that does not change: where both are so it is measured, else it is one value."""
    inference = np.full((4, 100), -1.1)
    train = inference + 0.1 + noise * np.random.default_rng(0).standard_normal((4, 100)).clip(-2, 1)
    expected = {InvalidReason.ONE_VALUE} if noise else {InvalidReason.VALID}
    assert set(check(train, inference)) == set(check(inference, train)) == expected


def test_every_reason_says_what_it_means_and_what_to_do() -> None:
    """The table that `kc-otel reference invalid-input` prints has each of them, and a line for a log."""
    assert {reason.name.lower() for reason in InvalidReason} - {"valid"} <= set(REASONS)
    assert all(reason.meaning.endswith(".") and reason.remedy.endswith(".") for reason in REASONS.values())
    assert remedy("not_same_tokens") == f"{REASONS['not_same_tokens'].meaning} {REASONS['not_same_tokens'].remedy}"
    assert "not measured" in remedy("something else")


@pytest.mark.slow
@pytest.mark.parametrize("open_share", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("together", [1, 50, 500])
def test_text_that_is_nearly_certain_shows_no_pattern_by_chance(open_share, together):
    """Few tokens differ there, and those few agree by chance: what would be left out drifts more than the rest."""
    rng = np.random.default_rng(int(100 * open_share))
    shape = (500, 64)
    logits = rng.standard_normal((*shape, 32))
    logits[..., 0] += np.where(rng.random(shape) < open_share, 0.0, 12.0)
    p, q = sampled(rng, logits + 0.6 * rng.standard_normal(logits.shape), logits)
    found = [check(p[at : at + together], q[at : at + together]) for at in range(0, 500, together)]
    assert not np.concatenate(found).any()
