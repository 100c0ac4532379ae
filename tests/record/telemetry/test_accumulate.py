"""Accumulated histograms, against one token at a time with the OpenTelemetry SDK's own mapping."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.metrics._internal.exponential_histogram.mapping.logarithm_mapping import LogarithmMapping
from scipy.special import log_softmax

from kc_otel.contract.limits import ZERO_THRESHOLD
from kc_otel.contract.registry.clause_metrics import QUANTITIES, Origin
from kc_otel.record.measure.logits import LOGITS, logit_drift
from kc_otel.record.measure.sampled import HIGHEST, LOWEST, SEQUENCE, TOKEN
from kc_otel.record.telemetry.accumulate import Accumulator

SLICES = ("all", "code", "prose", "long")
ADVANTAGE = ("advantage_drift_positive", "advantage_drift_negative")


def by_sequence(keys):
    return [f"{key}_by_sequence" for key in keys]


def batch(seed=0, shape=(9, 70), noise=0.05):
    rng = np.random.default_rng(seed)
    inference = np.log(rng.uniform(0.02, 1, shape)).astype(np.float32)
    train = np.minimum(inference + noise * rng.standard_normal(shape), 0).astype(np.float32)
    mask = np.arange(shape[1]) < rng.integers(1, shape[1] + 1, (shape[0], 1))
    mask &= rng.random(shape) < 0.9
    train[~mask], inference[~mask] = np.nan, 7.0
    membership = rng.random((shape[0], len(SLICES))) < 0.4
    membership[:, 0] = True
    return {"train": train, "inference": inference, "mask": mask, "membership": membership}


def bucket(value):
    if abs(value) <= ZERO_THRESHOLD:
        return 0, 0
    return (1 if value > 0 else -1), LogarithmMapping(4).map_to_index(abs(value))


def observed(train, inference, mask, membership, advantages=None, *, averaged=False):
    """Every observation that a batch makes, token by token: (quantity, slice) -> values in float64."""
    found = defaultdict(list)
    for row in range(train.shape[0]):
        log_ws, of_row = [], defaultdict(list)
        for position in np.flatnonzero(mask[row]):
            log_w = float(np.clip(train[row, position] - inference[row, position], LOWEST, HIGHEST))
            log_ws.append(log_w)
            values = {key: float(quantity(np.float64(log_w))) for key, quantity in TOKEN.items()}
            advantage = 0.0 if advantages is None else np.broadcast_to(advantages.T, train.T.shape).T[row, position]
            if advantage:
                side = "positive" if advantage > 0 else "negative"
                values[f"advantage_drift_{side}"] = math.expm1(log_w) * float(advantage)
            for key, value in values.items():
                of_row[key].append(value)
                for slice in np.flatnonzero(membership[row]):
                    found[key, SLICES[slice]].append(value)
        for slice in np.flatnonzero(membership[row]) if log_ws else ():
            for key, of in SEQUENCE.items():
                found[key, SLICES[slice]].append(float(of(np.float64(math.fsum(log_ws)), len(log_ws))))
            for key, values in of_row.items() if averaged else ():
                found[f"{key}_by_sequence", SLICES[slice]].append(math.fsum(values) / len(values))
    return found


def counts(histogram):
    found = Counter({(0, 0): histogram.zero_count})
    for sign, buckets in ((1, histogram.positive), (-1, histogram.negative)):
        found.update({(sign, buckets.offset + k): int(n) for k, n in enumerate(buckets.counts)})
    return +found


def assert_same(snapshot, expected):
    assert set(snapshot) == set(expected)
    for key, values in expected.items():
        histogram = snapshot[key]
        if not key[0].endswith("_by_sequence"):  # a mean's last digit decides its bucket
            assert counts(histogram) == Counter(map(bucket, values)), key
        assert histogram.count == len(values)
        assert histogram.sum == pytest.approx(math.fsum(values), rel=1e-9, abs=1e-12)
        assert histogram.minimum == pytest.approx(min(values), rel=1e-9, abs=1e-12)
        assert histogram.maximum == pytest.approx(max(values), rel=1e-9, abs=1e-12)


@pytest.mark.slow
@given(
    st.integers(0, 10_000),
    st.sampled_from([0.0, 1e-6, 0.05, 2.0]),
    st.integers(1, 12),
    st.integers(1, 40),
    st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_histograms_hold_every_token_once_per_slice(seed, noise, sequences, tokens, per_token) -> None:
    """And the mean of each sequence that has such tokens once, by side of the advantage too; padding never counts."""
    given_batch = batch(seed, (sequences, tokens), noise)
    shape = (sequences, tokens) if per_token else (sequences,)
    advantages = np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)
    accumulator = Accumulator(SLICES, averaged=by_sequence((*TOKEN, *ADVANTAGE)))
    result = accumulator.add_sampled(**given_batch, advantages=advantages)
    if not result.invalid:
        assert_same(accumulator.snapshot(), observed(**given_batch, advantages=advantages, averaged=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_floating_dtype_is_read_for_what_it_holds(dtype) -> None:
    """Half precision counts as its float32 copy does; float64 differences are taken in float64."""
    arrays = {key: torch.from_numpy(value) for key, value in batch().items()}
    arrays |= {side: arrays[side].to(dtype) for side in ("train", "inference")}
    accumulator = Accumulator(SLICES)
    accumulator.add_sampled(**arrays)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = {
        key: value.numpy()
        for key, value in (arrays | {side: arrays[side].to(wide) for side in ("train", "inference")}).items()
    }
    difference = (expected["train"] - expected["inference"]).astype(np.float32)
    expected |= {"train": difference, "inference": np.zeros_like(difference)}
    assert_same(accumulator.snapshot(), observed(**expected))


def test_large_batches_take_the_same_path_in_blocks() -> None:
    rng = np.random.default_rng(1)
    inference = -0.25 - rng.random((5, 70_000), dtype=np.float32)
    train = inference + rng.normal(0.0, 0.05, inference.shape).astype(np.float32)
    accumulator = Accumulator(SLICES)
    result = accumulator.add_sampled(train, inference)
    exact = (train.astype(np.float64) - inference).sum()
    histogram = accumulator.snapshot()["log_ratio", "all"]
    assert (result.tokens, histogram.count) == (350_000, 350_000)
    assert histogram.sum == pytest.approx(exact, rel=1e-12)


def test_the_worst_token_is_named() -> None:
    arrays = batch(noise=0.001)
    arrays["mask"][4, 33], arrays["mask"][4, 2] = True, False
    arrays["train"][4, 33], arrays["inference"][4, 33] = -2.5, -0.5
    arrays["membership"][4] = [True, False, True, False]
    ids = np.arange(9 * 70).reshape(9, 70)
    result = Accumulator(SLICES).add_sampled(**arrays, token_ids=ids)
    worst = result.worst
    assert (worst.row, worst.position, worst.token_id, worst.slices) == (4, 33, ids[4, 33], ("all", "prose"))
    assert worst.log_ratio == -2.0
    tv = observed(**arrays)["tv_token", "all"]
    assert result.tv_token == pytest.approx(sum(tv) / len(tv))
    assert (result.sequences, result.tokens) == (9, arrays["mask"].sum())


def test_invalid_sequences_are_counted_and_recorded_nowhere() -> None:
    arrays = batch(noise=0.01)
    arrays["mask"][:] = True
    drawn = np.log(np.random.default_rng(1).uniform(0.02, 0.9, arrays["train"].shape)).astype(np.float32)
    arrays["train"] = np.where(np.isnan(arrays["train"]), drawn, np.minimum(arrays["train"], -0.01))
    arrays["inference"] = arrays["train"] + np.float32(0.001)
    arrays["train"][2, 5] = np.nan
    arrays["inference"][5, 5] = 2.0
    accumulator = Accumulator(SLICES)
    result = accumulator.add_sampled(**arrays)
    assert result.invalid == {"nan_logprob": 1, "positive_logprob": 1}
    assert result.sequences == 7
    valid = np.array([0, 1, 3, 4, 6, 7, 8])
    assert_same(accumulator.snapshot(), observed(**{key: value[valid] for key, value in arrays.items()}))


def test_an_advantage_that_is_no_number_is_invalid() -> None:
    advantages = np.append(np.ones(8), np.nan)
    assert Accumulator(SLICES).add_sampled(**batch(), advantages=advantages).invalid == {"nan_advantage": 1}


def logits(seed=0, shape=(4, 6, 50)):
    rng = np.random.default_rng(seed)
    inference = rng.standard_normal(shape) * 2
    train = inference + 0.1 * rng.standard_normal(shape)
    mask = np.arange(shape[1]) < rng.integers(1, shape[1] + 1, (shape[0], 1))
    train[~mask] = np.nan
    membership = rng.random((shape[0], len(SLICES))) < 0.5
    membership[:, 0] = True
    return train.astype(np.float32), inference.astype(np.float32), mask, membership, rng.integers(0, 50, shape[:2])


def test_logits_are_recorded_per_token_and_slice() -> None:
    train, inference, mask, membership, _ = logits()
    accumulator = Accumulator(SLICES, averaged=by_sequence(LOGITS))
    result = accumulator.add_logits(train, inference, mask=mask, membership=membership)
    drift = logit_drift(train[mask], inference[mask]).values
    snapshot = accumulator.snapshot()
    of_logits = {k for k, quantity in QUANTITIES.items() if quantity.source is Origin.LOGITS}
    assert {key for key, _ in snapshot} == of_logits | set(by_sequence(of_logits))
    rows = np.nonzero(mask)[0]
    means = np.array([drift[rows == row].mean(0) for row in range(4)])
    for column, quantity in enumerate(LOGITS):
        for slice, name in enumerate(SLICES):
            of_tokens, of_sequences = drift[membership[rows, slice], column], means[membership[:, slice], column]
            for key, values in ((quantity, of_tokens), (f"{quantity}_by_sequence", of_sequences)):
                if values.size:
                    assert snapshot[key, name].count == values.size
                    assert snapshot[key, name].sum == pytest.approx(values.sum(), rel=1e-4, abs=1e-6)
    assert (result.sequences, result.tokens, result.worst) == (4, mask.sum(), None)
    assert result.tv_token == pytest.approx(drift[:, LOGITS.index("tv_exact")].mean(), rel=1e-4)


def test_targets_make_logits_a_sample_too() -> None:
    train, inference, mask, membership, targets = logits()
    accumulator, sampled = Accumulator(SLICES), Accumulator(SLICES)
    result = accumulator.add_logits(train, inference, mask=mask, membership=membership, targets=targets)
    scored = [np.take_along_axis(log_softmax(z, 2), targets[..., None], 2)[..., 0] for z in (train, inference)]
    other = sampled.add_sampled(*scored, mask=mask, membership=membership, token_ids=targets)
    found = accumulator.snapshot()
    for key, histogram in sampled.snapshot().items():
        assert found[key].count == histogram.count
        assert found[key].sum == pytest.approx(histogram.sum, rel=1e-4, abs=1e-5)
    assert {key for key, _ in found} == {key for key, _ in sampled.snapshot()} | set(LOGITS)
    assert (result.worst.row, result.worst.position, result.worst.token_id) == (
        (other.worst.row, other.worst.position, other.worst.token_id)
    )


def test_a_mean_stays_within_the_quantity_s_range() -> None:
    """70 tokens at a Jensen-Shannon divergence of log 2 sum to more than 70 log 2 in float64; their mean does not."""
    train, inference = np.full((2, 1, 70, 3), -np.inf)
    train[..., 0], inference[..., 1] = 0.0, 0.0
    accumulator = Accumulator(("all",), averaged=by_sequence(["js"]))
    accumulator.add_logits(train, inference)
    histogram = accumulator.snapshot()["js_by_sequence", "all"]
    assert (histogram.count, histogram.sum, histogram.maximum) == (1, math.log(2), math.log(2))


def test_a_nan_in_logits_makes_its_sequence_invalid() -> None:
    train, inference, mask, membership, targets = logits()
    train[1, 0, 3] = np.nan
    for extra in ({}, {"targets": targets}):
        accumulator = Accumulator(SLICES)
        result = accumulator.add_logits(train, inference, mask=mask, membership=membership, **extra)
        assert result.invalid == {"nan_logits": 1}
        assert {h.count for (key, slice), h in accumulator.snapshot().items() if slice == "all" and key in LOGITS} == {
            mask[[0, 2, 3]].sum()
        }
    for changes in ({"inference": inference[:, :, 1:]}, {"mask": mask[:, 1:]}, {"targets": targets[1:]}):
        given_arrays = {"train": train, "inference": inference, **changes}
        assert accumulator.add_logits(**given_arrays).invalid == {"shape_mismatch": 4}


SHARES = np.array([16, 8, 4, 2, 1, 1])
"""Of the tokens that are kept, in 32nds: every one is sampled exactly as often as it is probable."""
SAMPLED = np.random.default_rng(0).permutation(np.repeat(np.arange(SHARES.size), SHARES))


def case(seed, vocabulary=40):
    """P over a vocabulary, the mass that Q keeps of its own, and its renormalised distribution over the first tokens.

    P is Q but for noise, and for tokens that only P knows.
    """
    rng = np.random.default_rng(seed)
    q_kept, truncated = rng.uniform(0.5, 0.95), SHARES / SHARES.sum()
    rest = rng.dirichlet(np.ones(vocabulary - SHARES.size)) * (1.0 - q_kept)
    p = np.concatenate((truncated * q_kept, rest)) * np.exp(0.1 * rng.normal(size=vocabulary))
    p[-5:] += rng.uniform(0.0, 0.1)
    return p / p.sum(), q_kept, truncated


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("form", ["numpy", "torch"])
def test_drift_is_that_of_the_truncated_policies_and_the_mass_outside_is_measured(seed, form):
    """TV, chi-square and E[w] = 1 of both kernels over the kept tokens, against distributions that are enumerated."""
    p, q_kept, truncated = case(seed)
    log_p, log_q = np.log(p[SAMPLED]), np.log(truncated[SAMPLED] * q_kept)
    kept = np.log(p[: SHARES.size].sum())
    given = [array[None] for array in (log_p, log_q, np.full(32, kept), np.full(32, np.log(q_kept)))]
    if form == "torch":
        given = [torch.from_numpy(array) for array in given]
    accumulator = Accumulator(["all"], averaged=["outside_mass_by_sequence", "tv_token_by_sequence"])
    batch = accumulator.add_sampled(given[0], given[1], train_kept=given[2], inference_kept=given[3])
    assert batch.invalid == {}
    found = {quantity: histogram for (quantity, _), histogram in accumulator.snapshot().items()}
    over_kept = p[: SHARES.size] / p[: SHARES.size].sum()
    tv = 0.5 * np.abs(over_kept - truncated).sum()
    outside = 1.0 - p[: SHARES.size].sum()
    assert found["tv_token"].sum / 32 == pytest.approx(tv, abs=1e-6)
    assert found["ratio"].sum / 32 == pytest.approx(1.0, abs=1e-6)
    assert found["chi2_token"].sum / 32 == pytest.approx((over_kept**2 / truncated).sum() - 1.0, abs=1e-6)
    assert found["outside_mass"].sum / 32 == pytest.approx(outside, abs=1e-9)
    assert found["outside_mass_by_sequence"].sum == pytest.approx(outside, abs=1e-9)


@pytest.mark.parametrize(
    ("kept", "reason"),
    [(0.3, "positive_logprob"), (-5.0, "positive_logprob"), (np.nan, "nan_logprob"), (-np.inf, "positive_logprob")],
)
def test_a_mass_that_cannot_be_is_no_drift(kept, reason):
    log_p = np.log(np.full((2, 20), 0.4))
    mass = np.full((2, 20), np.log(0.8))
    mass[1, 7] = kept
    accumulator = Accumulator(["all"])
    batch = accumulator.add_sampled(log_p, log_p - np.log(0.8), train_kept=mass)
    assert batch.invalid == {reason: 1}
    assert accumulator.snapshot()["outside_mass", "all"].count == 20
