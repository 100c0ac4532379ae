"""Truncated sampling whose kept mass is known, against distributions that are enumerated."""

import numpy as np
import pytest

from kc_otel.record.telemetry.accumulate import Accumulator

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


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("form", ["numpy", "torch"])
def test_drift_is_that_of_the_truncated_policies_and_the_mass_outside_is_measured(seed, form):
    """TV, chi-square and E[w] = 1 of both kernels over the kept tokens, and what is left out bounds the whole P."""
    p, q_kept, truncated = case(seed)
    log_p, log_q = np.log(p[SAMPLED]), np.log(truncated[SAMPLED] * q_kept)
    kept = np.log(p[: SHARES.size].sum())
    given = [array[None] for array in (log_p, log_q, np.full(32, kept), np.full(32, np.log(q_kept)))]
    if form == "torch":
        torch = pytest.importorskip("torch")
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
    whole = np.zeros(p.size)
    whole[: SHARES.size] = truncated
    of_all = 0.5 * np.abs(p - whole).sum()
    assert of_all <= tv + outside + 1e-12
    assert of_all > max(tv, outside) - 1e-12


def test_without_the_kept_mass_the_same_tokens_are_refused():
    """A trainer that knows nothing of the nucleus is one-sided at every token, which is no drift."""
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=2.0, size=(100, 50))
    q = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    kept = q >= np.sort(q, -1)[:, [-8]]
    mass = np.where(kept, q, 0.0).sum(-1)
    tokens = np.array(
        [rng.choice(50, p=np.where(keep, row, 0.0) / m) for row, keep, m in zip(q, kept, mass, strict=True)]
    )
    log_p = np.log(q[np.arange(100), tokens])[None] + 0.01 * rng.normal(size=(1, 100))
    processed = np.log(q[np.arange(100), tokens] / mass)[None]
    assert Accumulator(["all"]).add_sampled(log_p, processed).invalid == {"truncated_sampling": 1}
    assert Accumulator(["all"]).add_sampled(log_p, processed, train_kept=np.log(mass)[None]).invalid == {}


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


def test_masked_tokens_have_no_mass_outside():
    log_p = np.log(np.full((2, 6), 0.4))
    mass = np.full((2, 6), np.log(0.9))
    mask = np.ones((2, 6), dtype=bool)
    mask[0, 2:], mass[0, 2:] = False, np.nan
    accumulator = Accumulator(["all", "b"])
    membership = np.array([[True, False], [True, True]])
    accumulator.add_sampled(log_p, log_p - np.log(0.9), mask=mask, train_kept=mass, membership=membership)
    found = accumulator.snapshot()
    assert [found["outside_mass", name].count for name in ("all", "b")] == [8, 6]
    assert found["outside_mass", "all"].sum == pytest.approx(0.8)
    assert found["tv_token", "all"].sum == pytest.approx(0.0, abs=1e-6)


def test_logits_outside_of_a_truncation_are_minus_infinity_on_both_sides():
    p, q_kept, truncated = case(3)
    logits = np.full((2, 1, p.size), -np.inf)
    logits[0, 0, : SHARES.size] = np.log(p[: SHARES.size])
    logits[1, 0, : SHARES.size] = np.log(truncated * q_kept)
    accumulator = Accumulator(["all"])
    assert accumulator.add_logits(logits[:1], logits[1:]).invalid == {}
    over_kept = p[: SHARES.size] / p[: SHARES.size].sum()
    assert accumulator.snapshot()["tv_exact", "all"].sum == pytest.approx(0.5 * np.abs(over_kept - truncated).sum())
