"""Quantities of full logits, against the straight formulas in float64."""

import importlib.util
import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax

from kc_otel.contract.registry.clause_metrics import QUANTITIES, Origin
from kc_otel.record.measure import logits as measured_logits
from kc_otel.record.measure.logits import LOGITS, SATURATION, logit_drift

TRITON = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton, which is for Linux")
QUICK_PATHS = pytest.mark.parametrize("path", ["numpy", "torch"])
PATHS = pytest.mark.parametrize("path", ["numpy", "torch", pytest.param("kernel", marks=TRITON)])
# Of Triton's interpreter, which computes with NumPy what a GPU computes silently.
pytestmark = [pytest.mark.filterwarnings(f"ignore:{what}:RuntimeWarning") for what in ("invalid", "overflow")]
HALF_RANGE, TV, KL_PQ, KL_QP, JS, TOP1, ENTROPY = range(7)


def compared(path, train, inference, **arguments):
    """`logit_drift`, by NumPy in several blocks a row, by torch, or by the Triton kernel, interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured_logits, "_BLOCK", 128)
        patch.setattr(measured_logits, "_failed", [True] if path == "torch" else [])
        patch.setattr(measured_logits, "_LANES", 256)
        found = logit_drift(train, inference, _tensors=path != "numpy", **arguments)
        assert measured_logits._failed == ([True] if path == "torch" else [])
        return found


def reference(train, inference):
    """The formulas as a textbook has them, float64 [rows, 7]."""
    z_p, z_q = np.asarray(train, dtype=np.float64), np.asarray(inference, dtype=np.float64)
    log_p, log_q = log_softmax(z_p, axis=1), log_softmax(z_q, axis=1)
    p, q, delta = np.exp(log_p), np.exp(log_q), z_p - z_q
    log_m = np.log((p + q) / 2)
    return np.stack(
        [
            (delta.max(1) - delta.min(1)) / 2,
            np.abs(p - q).sum(1) / 2,
            (p * (log_p - log_q)).sum(1),
            (q * (log_q - log_p)).sum(1),
            ((p * (log_p - log_m)).sum(1) + (q * (log_q - log_m)).sum(1)) / 2,
            z_p.argmax(1) != z_q.argmax(1),
            (q * log_q).sum(1) - (p * log_p).sum(1),
        ],
        axis=1,
    )


def pair(drift, rows=5, vocab=300, seed=0, spread=3.0):
    rng = np.random.default_rng(seed)
    inference = spread * rng.standard_normal((rows, vocab))
    train = inference + drift * rng.standard_normal((rows, vocab)) + 3 * rng.standard_normal((rows, 1))
    return train.astype(np.float32), inference.astype(np.float32)


def test_columns_are_the_registry_s_quantities() -> None:
    assert set(LOGITS) == {key for key, quantity in QUANTITIES.items() if quantity.source is Origin.LOGITS}


@pytest.mark.slow
@QUICK_PATHS
@given(st.sampled_from([0.01, 0.1, 1.0, 4.0]), st.integers(1, 12), st.integers(2, 400), st.integers(0, 999))
@settings(max_examples=min(40, settings().max_examples), deadline=None)
def test_float32_agrees_with_the_straight_formulas(path, drift, rows, vocab, seed) -> None:
    train, inference = pair(drift, rows, vocab, seed)
    values = compared(path, torch.from_numpy(train), torch.from_numpy(inference)).values
    expected = reference(train, inference)
    np.testing.assert_allclose(values, expected, rtol=2e-4, atol=1e-6 * (1 + drift))


@pytest.mark.slow
@PATHS
def test_kernels_that_differ_in_the_fifth_digit_are_resolved(path) -> None:
    """Divergences of 1e-10 come out right: they are not the difference of two numbers near one."""
    train, inference = pair(1e-5, rows=4, vocab=2000)
    inference -= inference.max(1, keepdims=True)
    values = compared(path, torch.from_numpy(train), torch.from_numpy(inference)).values
    expected = reference(train, inference)
    assert expected[:, KL_PQ].max() < 1e-9
    np.testing.assert_allclose(values[:, TV:TOP1], expected[:, TV:TOP1], rtol=0.05)


@PATHS
def test_float64_keeps_its_precision(path) -> None:
    train, inference = (side.astype(np.float64) for side in pair(0.1))
    values = compared(path, torch.from_numpy(train), torch.from_numpy(inference)).values
    np.testing.assert_allclose(values, reference(train, inference), rtol=1e-10, atol=1e-14)


@pytest.mark.slow
@PATHS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_means_what_it_holds(path, dtype) -> None:
    train, inference = (torch.from_numpy(side).to(dtype) for side in pair(0.1))
    half = compared(path, train, inference).values
    full = compared(path, train.float(), inference.float()).values
    assert half.tolist() == full.tolist()


@PATHS
def test_a_constant_shift_is_no_drift(path) -> None:
    z = np.float32([[1, 2, 3, -4]])
    values = compared(path, torch.from_numpy(z), torch.from_numpy(z + 8)).values
    assert values.tolist() == [[0.0] * 7]


@QUICK_PATHS
@given(st.integers(0, 999))
@settings(max_examples=20, deadline=None)
def test_tokens_outside_of_both_distributions_count_for_nothing(path, seed) -> None:
    train, inference = pair(0.3, vocab=60, seed=seed)
    outside = np.random.default_rng(seed).random(60) < 0.5
    outside[0] = False
    expected = reference(train[:, ~outside], inference[:, ~outside])
    train[:, outside], inference[:, outside] = -np.inf, -np.inf
    values = compared(path, torch.from_numpy(train), torch.from_numpy(inference)).values
    np.testing.assert_allclose(values, expected, rtol=2e-4, atol=1e-6)


@PATHS
def test_a_token_outside_of_one_distribution_saturates(path) -> None:
    """-inf on one side: half range and the divergence that is infinite are SATURATION, the others stay exact."""
    p, q = np.array([0.5, 0.25, 0.25, 0.0]), np.array([0.5, 0.5, 0.0, 0.0])
    with np.errstate(divide="ignore"):
        train, inference = np.log(p)[None], np.log(q)[None]
    js = (0.25 * math.log(2 / 3) + 0.25 * math.log(2) + 0.5 * math.log(4 / 3)) / 2
    expected = [SATURATION, 0.25, SATURATION, math.log(2) / 2, js, 0.0, 1.5 * math.log(2) - math.log(2)]
    for left, right, order in ((train, inference, 1), (inference, train, -1)):
        want = list(expected)
        want[KL_PQ : KL_QP + 1] = want[KL_PQ : KL_QP + 1][::order]
        want[ENTROPY] *= order
        values = compared(path, torch.from_numpy(left), torch.from_numpy(right)).values
        np.testing.assert_allclose(values[0], want, atol=1e-12)


@PATHS
def test_differences_of_any_size_stay_finite(path) -> None:
    train, inference = np.float32([[0, 200, -500, 3]]), np.float32([[300, 0, 100, 3]])
    values = compared(path, torch.from_numpy(train), torch.from_numpy(inference)).values[0]
    np.testing.assert_allclose(values, [SATURATION, 1, SATURATION, SATURATION, math.log(2), 1, 0], atol=1e-6)


@PATHS
def test_rows_that_are_not_distributions_are_not_valid(path) -> None:
    """NaN, +inf and nothing but -inf make a row invalid and leave its neighbours alone."""
    train, inference = pair(0.1, rows=5)
    expected = reference(train, inference)
    train[0, 3], inference[1, 3], train[3] = np.nan, np.inf, -np.inf
    found = compared(path, torch.from_numpy(train), torch.from_numpy(inference))
    assert found.valid.tolist() == [False, False, True, False, True]
    assert np.isnan(found.values[[0, 1, 3]]).all()
    np.testing.assert_allclose(found.values[[2, 4]], expected[[2, 4]], rtol=2e-4, atol=1e-6)


@PATHS
def test_rows_are_chosen_and_targets_scored(path) -> None:
    train, inference = (torch.from_numpy(side.reshape(4, 5, -1)) for side in pair(0.1, rows=20, vocab=50))
    train[0, 0], inference[3, 4] = float("nan"), float("nan")
    at = np.array([0, 2, 2, 3]), np.array([1, 0, 3, 2])
    targets = np.array([7, 0, 49, 3])
    train, inference = train[:, :4], inference[:, :4]
    found = compared(path, train, inference, at=at, targets=targets)
    picked = train.numpy()[at], inference.numpy()[at]
    np.testing.assert_allclose(found.values, reference(*picked), rtol=2e-4, atol=1e-6)
    for logprob, z in zip((found.train_logprob, found.inference_logprob), picked, strict=True):
        expected = log_softmax(z.astype(np.float64), axis=1)[np.arange(4), targets]
        np.testing.assert_allclose(logprob, expected, rtol=1e-6)


@PATHS
def test_no_rows_are_no_error(path) -> None:
    train, inference = (torch.from_numpy(side) for side in pair(0.1))
    found = compared(path, train, inference, at=(np.zeros(0, dtype=int),), targets=[])
    assert found.values.shape == (0, 7)
    assert found.train_logprob.shape == (0,)


@pytest.mark.slow
def test_extra_memory_is_a_few_rows() -> None:
    """Beyond the inputs, less than a tenth of one logits tensor is needed, for half precision too."""
    inference = np.random.default_rng(0).random((256, 32768), dtype=np.float32)
    train = inference + np.roll(inference, 1) / 8
    for left, right in ((train, inference), (train.astype(np.float16), inference.astype(np.float16))):
        tracemalloc.start()
        logit_drift(left, right)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 0.1 * left.nbytes


@PATHS
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"inference": torch.zeros(5, 299)}, r"inference: shape \(5, 299\)"),
        ({"targets": [0, 1, 2]}, "is not one token for each of 5 rows"),
        ({"targets": [[0, 1, 2, 3, 4]]}, "is not one token for each of 5 rows"),
        ({"targets": []}, "is not one token for each of 5 rows"),
        ({"targets": [0, 1, -100, 2, 3]}, "targets: -100 is not a token of a vocabulary of 300"),
        ({"targets": [0, 1, 300, 2, 3]}, "targets: 300 is not a token of a vocabulary of 300"),
    ],
)
def test_what_does_not_fit_is_refused(path, changes, said) -> None:
    train, inference = (torch.from_numpy(side) for side in pair(0.1))
    with pytest.raises(ValueError, match=said):
        compared(path, **{"train": train, "inference": inference, **changes})


@pytest.mark.parametrize("vocab", [1, 2, 257, 9000])
def test_sides_may_be_of_different_types_and_rows_in_any_order(vocab) -> None:
    """One token, one that is certain, and a vocabulary of several blocks, the last of them short."""
    train, inference = pair(0.5, rows=6, vocab=vocab, seed=vocab)
    train[0], train[0, vocab // 2] = -60, 40
    at = (np.random.default_rng(0).permutation(6),)
    halves = torch.from_numpy(train).bfloat16(), np.rint(inference).astype(np.int16)
    for left, right in ((train, inference), (train[::-1], torch.from_numpy(inference)), halves):
        wide = (side.float().numpy() if isinstance(side, torch.Tensor) else side for side in (left, right))
        expected = np.clip(reference(*wide), -SATURATION, SATURATION)[at]
        np.testing.assert_allclose(compared("numpy", left, right, at=at).values, expected, rtol=2e-4, atol=3e-6)


def test_memory_of_any_kind_is_read() -> None:
    """Without alignment, write-protected, in another order of bytes."""
    train, inference = pair(0.3)
    expected = compared("numpy", train, inference).values
    shifted = [np.frombuffer(b"-" + side.tobytes(), np.float32, offset=1).reshape(side.shape) for side in pair(0.3)]
    read_only = [np.frombuffer(side.tobytes(), np.float32).reshape(side.shape) for side in (train, inference)]
    for sides in (shifted, read_only, [side.astype(">f4") for side in (train, inference)]):
        assert compared("numpy", *sides).values.tolist() == expected.tolist()
