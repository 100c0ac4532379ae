"""Input checks: each fault planted, and what looks like a fault but is drift."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.measure.checks import Reason, check, counted

SHAPE = (6, 40)


def logprobs(noise: float = 0.01, seed: int = 0, shape: tuple[int, int] = SHAPE):
    """Log-probabilities of two kernels that differ by `noise`."""
    rng = np.random.default_rng(seed)
    inference = np.log(rng.uniform(0.05, 1, shape))
    train = np.minimum(inference + noise * rng.standard_normal(shape), 0)
    return train.astype(np.float32), inference.astype(np.float32)


def only(row: int, reason: Reason, rows: int = SHAPE[0]) -> list[int]:
    """Codes where one row has a reason."""
    return [int(reason) if each == row else 0 for each in range(rows)]


@given(st.floats(0, 0.5), st.integers(0, 1000))
def test_drift_is_not_a_fault(noise: float, seed: int) -> None:
    """Kernels that merely differ, even a lot, pass every check."""
    assert not check(*logprobs(noise, seed)).any()


def test_a_nan_makes_its_sequence_invalid() -> None:
    """One NaN on either side makes the whole sequence invalid, and no other."""
    for side in (0, 1):
        pair = logprobs()
        pair[side][2, 7] = np.nan
        assert check(*pair).tolist() == only(2, Reason.NAN_LOGPROB)


def test_a_masked_nan_does_not() -> None:
    """What lies under the padding is never looked at."""
    train, inference = logprobs()
    mask = np.ones(SHAPE, dtype=int)
    mask[2, 7:] = 0
    train[2, 7:], inference[2, 8:] = np.nan, 1e9
    assert not check(train, inference, mask=mask).any()


def test_positive_log_probabilities_are_not_log_probabilities() -> None:
    """Logits and probabilities passed by mistake are noticed; a rounding error above zero is not."""
    train, inference = logprobs()
    train[1, 3], inference[4, 5], train[5, 0] = 0.3, np.inf, 5e-4
    codes = check(train, inference)
    assert codes.tolist() == [0, Reason.POSITIVE_LOGPROB, 0, 0, Reason.POSITIVE_LOGPROB, 0]


def test_a_sampled_token_cannot_be_impossible() -> None:
    """-inf from the kernel that sampled the token is a fault; from the other kernel it is drift."""
    train, inference = logprobs()
    train[0, 0], inference[3, 0] = -np.inf, -np.inf
    assert check(train, inference).tolist() == only(3, Reason.IMPOSSIBLE_TOKEN)


@pytest.mark.parametrize("side", [0, 1])
def test_a_buffer_nobody_wrote_to_is_noticed(side: int) -> None:
    """A side that is exactly zero throughout its unmasked tokens is a fault."""
    pair = logprobs()
    mask = np.ones(SHAPE, dtype=bool)
    mask[2, 30:] = False
    pair[side][2, :30] = 0
    assert check(*pair, mask=mask).tolist() == only(2, Reason.ZERO_FILLED)


def test_being_sure_is_not_a_fault() -> None:
    """Both sides zero, or one zero and the other nearly so, is a confident model."""
    train, inference = logprobs()
    train[1], inference[1] = 0, 0
    train[2], inference[2] = -1e-4, 0
    assert not check(train, inference).any()


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("noise", [1e-5, 0.05])
def test_a_one_token_shift_is_noticed(by: int, noise: float) -> None:
    """A side that is a token ahead or behind is a fault, between padding too, and only in the row where it is so."""
    train, inference = logprobs(noise)
    mask = np.ones(SHAPE, dtype=bool)
    mask[3, :5], mask[3, 35:] = False, False
    train[3] = np.roll(train[3], by)
    train[3, :5], train[3, 35:] = np.nan, np.nan
    train[3, 5 if by > 0 else 34] = -1.0
    assert check(train, inference, mask=mask).tolist() == only(3, Reason.ONE_TOKEN_SHIFT)


def test_neighbouring_rows_do_not_hide_a_shift() -> None:
    """Rows that lie next to each other in memory are judged apart, however much they differ."""
    train, inference = logprobs(0.05)
    train[3:5] = np.roll(train[3:5], 1, axis=1)
    train[4, 0], train[3, 0] = -60.0, -1.0
    train[4, 0], inference[3, -1] = -60.0, -1e-3
    assert check(train, inference).tolist()[3] == Reason.ONE_TOKEN_SHIFT


def test_short_sequences_are_not_called_shifted() -> None:
    """Over a few tokens a shift cannot be told from drift."""
    train, inference = logprobs(shape=(6, 7))
    train[3] = np.roll(train[3], 1)
    assert not check(train, inference).any()


@pytest.mark.parametrize("as_tensor", [False, True])
def test_different_tokens_are_not_compared(as_tensor: bool) -> None:
    """A difference of token ids makes the sequence invalid unless it is masked."""
    train, inference = logprobs()
    ids = np.arange(train.size).reshape(SHAPE)
    other, mask = ids.copy(), np.ones(SHAPE, dtype=np.int64)
    other[1, 3], other[2, 3], mask[2, 3] = -1, -1, 0
    arrays = [train, inference, mask, ids, other]
    if as_tensor:
        arrays = [torch.from_numpy(each) for each in arrays]
    train, inference, mask, ids, other = arrays
    codes = check(train, inference, mask=mask, train_token_ids=ids, inference_token_ids=other)
    assert codes.tolist() == only(1, Reason.TOKEN_MISMATCH)


def test_shapes_have_to_agree() -> None:
    """Any difference of shape makes the whole batch invalid rather than an exception."""
    train, inference = logprobs()
    assert set(check(train, inference[:, 1:])) == {Reason.SHAPE_MISMATCH}
    assert set(check(train, inference, mask=np.ones((6, 39)))) == {Reason.SHAPE_MISMATCH}
    assert set(check(train, inference, train_token_ids=np.ones((6, 39)))) == {Reason.SHAPE_MISMATCH}


def test_processing_has_to_agree() -> None:
    """A declared difference of temperature makes the batch invalid, an equal declaration does not."""
    pair = logprobs()
    different = ({"temperature": 1.0}, {"temperature": 0.7})
    assert set(check(*pair, processing=different)) == {Reason.PROCESSING_MISMATCH}
    assert not check(*pair, processing=({"temperature": 1.0}, {"temperature": 1})).any()


def test_reasons_are_counted_by_name() -> None:
    """Counts are by the name that the metric's attribute has, and valid sequences are not among them."""
    codes = np.array([0, 4, 4, 8], dtype=np.int8)
    assert counted(codes) == {"nan_logprob": 2, "one_token_shift": 1}


def test_a_sequence_has_the_first_reason() -> None:
    """A sequence with several faults is counted once, under the first."""
    train, inference = logprobs()
    train[0, 0], inference[0, 1] = 3.0, -np.inf
    assert counted(check(train, inference)) == {"positive_logprob": 1}
    train[0, 2] = np.nan
    assert counted(check(train, inference)) == {"nan_logprob": 1}


def test_half_precision_is_checked_like_any_other() -> None:
    """bfloat16 and float16 tensors are read as what they hold."""
    for dtype in (torch.bfloat16, torch.float16):
        train, inference = (torch.from_numpy(each).to(dtype) for each in logprobs())
        train[2, 2] = float("nan")
        assert check(train, inference).tolist() == only(2, Reason.NAN_LOGPROB)


def test_text_is_refused() -> None:
    """What does not hold numbers is an error of the caller, and the message says what to pass."""
    with pytest.raises(ValueError, match="does not hold real numbers"):
        check(np.array([["a"]]), np.array([["a"]]))
