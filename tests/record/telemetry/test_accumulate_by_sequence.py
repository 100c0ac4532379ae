"""Means of token quantities over each sequence, against a loop over sequences in float64."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kc_otel.contract.registry.clause_metrics import AVERAGED, QUANTITIES, RECORDED, Unit
from kc_otel.record.measure.logits import LOGITS, logit_drift
from kc_otel.record.measure.sampled import HIGHEST, LOWEST, TOKEN
from kc_otel.record.telemetry.accumulate import Accumulator

SLICES = ("all", "code", "long")
PATHS = pytest.mark.parametrize("as_device", [False, True], ids=["numpy", "torch"])
SIDES = {"advantage_drift_positive": 1, "advantage_drift_negative": -1}
ASKED = (*TOKEN, *SIDES)


def ragged(seed, sequences, tokens, noise):
    """Log-probabilities under a ragged mask over garbage, overlapping slices, and advantages per token, some zero."""
    rng = np.random.default_rng(seed)
    inference = np.log(rng.uniform(0.02, 1, (sequences, tokens))).astype(np.float32)
    train = np.minimum(inference + noise * rng.standard_normal(inference.shape), 0).astype(np.float32)
    mask = np.arange(tokens) < rng.integers(0, tokens + 1, (sequences, 1))
    mask &= rng.random(mask.shape) < 0.8
    train[~mask], inference[~mask] = np.nan, 7.0
    membership = rng.random((sequences, len(SLICES))) < 0.5
    membership[:, 0] = True
    advantages = rng.integers(-1, 2, (sequences, tokens)) * rng.random((sequences, 1))
    return {
        "train": train,
        "inference": inference,
        "mask": mask,
        "membership": membership,
        "advantages": advantages.astype(np.float32),
    }


def expected(train, inference, mask, membership, advantages):
    """(quantity, slice) -> one float64 mean for each sequence that has such tokens."""
    found = defaultdict(list)
    for row in range(train.shape[0]):
        of_row = defaultdict(list)
        for position in np.flatnonzero(mask[row]):
            log_w = np.float64(np.clip(train[row, position] - inference[row, position], LOWEST, HIGHEST))
            for key, quantity in TOKEN.items():
                of_row[key].append(float(quantity(log_w)))
            for key, sign in SIDES.items():
                if sign * advantages[row, position] > 0:
                    of_row[key].append(math.expm1(log_w) * float(advantages[row, position]))
        for key, values in of_row.items():
            for slice in np.flatnonzero(membership[row]):
                found[BY_SEQUENCE[key].key, SLICES[slice]].append(math.fsum(values) / len(values))
    return found


BY_SEQUENCE = {key: quantity for (key, unit), quantity in AVERAGED.items() if unit is Unit.SEQUENCE}


def by_sequence(keys):
    """Keys of the means over sequences of some quantities."""
    return [f"{key}_by_sequence" for key in keys]


def recorded(accumulator):
    """What of a snapshot was recorded by sequence."""
    keys = {quantity.key for quantity in BY_SEQUENCE.values()}
    return {key: histogram for key, histogram in accumulator.snapshot().items() if key[0] in keys}


@pytest.mark.slow
@PATHS
@given(st.integers(0, 10_000), st.sampled_from([0.0, 1e-6, 0.05, 2.0]), st.integers(1, 12), st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_each_sequence_is_recorded_once_per_slice_with_its_mean(as_device, seed, noise, sequences, tokens) -> None:
    """Count, sum and extremes are those of one float64 mean per sequence with tokens; padding never counts."""
    arrays = ragged(seed, sequences, tokens, noise)
    accumulator = Accumulator(SLICES, averaged=by_sequence(ASKED))
    given_arrays = {key: torch.from_numpy(value) for key, value in arrays.items()} if as_device else arrays
    for _ in range(2):
        result = accumulator.add_sampled(**given_arrays, _tensors=as_device)
    if result.invalid:
        return
    found, wanted = recorded(accumulator), expected(**arrays)
    assert set(found) == set(wanted)
    for key, values in wanted.items():
        histogram = found[key]
        assert histogram.count == 2 * len(values), key
        assert histogram.sum == pytest.approx(2 * math.fsum(values), rel=1e-6, abs=1e-12), key
        assert histogram.minimum == pytest.approx(min(values), rel=1e-6, abs=1e-12)
        assert histogram.maximum == pytest.approx(max(values), rel=1e-6, abs=1e-12)


@PATHS
def test_advantages_per_sequence_leave_the_other_side_without_an_observation(as_device) -> None:
    """A sequence with one advantage is in one of the two histograms, one with advantage 0 in neither."""
    arrays = {"train": np.full((3, 4), -1.5, np.float32), "inference": np.full((3, 4), -1.0, np.float32)}
    advantages = np.float32([2.0, 0.0, -1.0])
    if as_device:
        arrays, advantages = {k: torch.from_numpy(v) for k, v in arrays.items()}, torch.from_numpy(advantages)
    accumulator = Accumulator(("all",), averaged=by_sequence(list(SIDES)))
    accumulator.add_sampled(**arrays, advantages=advantages, _tensors=as_device)
    found = {key: (histogram.count, histogram.sum) for (key, _), histogram in recorded(accumulator).items()}
    assert found == {
        "advantage_drift_positive_by_sequence": (1, pytest.approx(2 * math.expm1(-0.5))),
        "advantage_drift_negative_by_sequence": (1, pytest.approx(-math.expm1(-0.5))),
    }


@PATHS
def test_logits_are_averaged_over_each_sequence_s_tokens(as_device) -> None:
    """With an axis of tokens, quantities of full logits are recorded by sequence too; a faulty sequence is left out."""
    rng = np.random.default_rng(3)
    inference = 2 * rng.standard_normal((5, 6, 40))
    train = inference + 0.1 * rng.standard_normal(inference.shape)
    mask = rng.random((5, 6)) < 0.7
    mask[:, 0], mask[4] = True, False
    train[~mask] = np.nan
    train[1, 0, 0] = np.nan
    membership = np.array([[1, 1, 0], [1, 1, 1], [1, 0, 1], [1, 1, 1], [1, 1, 1]], dtype=bool)
    accumulator = Accumulator(SLICES, averaged=by_sequence(LOGITS))
    accumulator.add_logits(
        torch.from_numpy(train), torch.from_numpy(inference), mask=mask, membership=membership, _tensors=as_device
    )
    means = {row: logit_drift(train[row][mask[row]], inference[row][mask[row]]).values.mean(0) for row in (0, 2, 3)}
    found = recorded(accumulator)
    assert {key for key, _ in found} == {BY_SEQUENCE[key].key for key in LOGITS}
    for column, quantity in enumerate(LOGITS):
        for slice, name in enumerate(SLICES):
            values = [mean[column] for row, mean in means.items() if membership[row, slice]]
            histogram = found[BY_SEQUENCE[quantity].key, name]
            assert histogram.count == len(values)
            assert histogram.sum == pytest.approx(math.fsum(values), rel=1e-4, abs=1e-6)


def test_rows_of_logits_know_nothing_of_sequences() -> None:
    """Logits [rows, vocab] record nothing by sequence: a row is a token of nobody knows which sequence."""
    train = np.random.default_rng(0).standard_normal((4, 30))
    accumulator = Accumulator(SLICES, averaged=by_sequence(ASKED + LOGITS))
    accumulator.add_logits(train, train, targets=np.zeros(4, dtype=int))
    assert recorded(accumulator) == {}


def test_only_what_is_asked_for_is_recorded_by_sequence() -> None:
    """Without a request there is no such histogram, and one request changes nothing else."""
    arrays = ragged(1, 8, 30, 0.05)
    plain, asked = Accumulator(SLICES), Accumulator(SLICES, averaged=by_sequence(["tv_token"]))
    for accumulator in (plain, asked):
        accumulator.add_sampled(**arrays)
    assert recorded(plain) == {}
    assert {key for key, _ in recorded(asked)} == {"tv_token_by_sequence"}
    rest = {key: histogram for key, histogram in asked.snapshot().items() if key[0] != "tv_token_by_sequence"}
    assert {key: (h.count, h.sum) for key, h in rest.items()} == (
        {key: (h.count, h.sum) for key, h in plain.snapshot().items()}
    )


def test_a_mean_stays_within_the_quantity_s_range() -> None:
    """51 tokens at a Jensen-Shannon divergence of log 2 sum to more than 51 log 2 in float64; their mean does not."""
    train, inference = np.full((2, 1, 51, 3), -np.inf)
    train[..., 0], inference[..., 1] = 0.0, 0.0
    accumulator = Accumulator(("all",), averaged=by_sequence(["js"]))
    accumulator.add_logits(train, inference)
    histogram = accumulator.snapshot()["js_by_sequence", "all"]
    assert (histogram.count, histogram.sum, histogram.maximum) == (1, math.log(2), math.log(2))


def test_the_registry_has_each_token_quantity_by_sequence_with_its_range() -> None:
    """Generated from the token quantities: same unit, range and cap, another name, one observation per sequence."""
    tokens = {key: quantity for key, quantity in QUANTITIES.items() if quantity.per is Unit.TOKEN}
    assert set(BY_SEQUENCE) == set(tokens)
    for key, token in tokens.items():
        mean = BY_SEQUENCE[key]
        assert (mean.unit, mean.low, mean.high, mean.cap) == (token.unit, token.low, token.high, token.cap)
        assert (mean.per, mean.statistic, mean.source) == (Unit.SEQUENCE, "mean", token.source)
        assert mean.name == f"{token.name}_by_sequence"
        assert RECORDED[mean.key] is mean
    assert set(Counter(quantity.name for quantity in RECORDED.values()).values()) == {1}
