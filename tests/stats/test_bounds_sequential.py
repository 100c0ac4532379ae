"""Confidence sequences and e-values against plain loops written straight from the papers, and against confseq."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kc_otel.stats import (
    BernsteinSequence,
    BettingSequence,
    Binned,
    anytime_bernstein_interval,
    anytime_mean_interval,
    betting_interval,
    e_value,
    running_bounds,
)

UNIT = {"low": 0.0, "high": 1.0}
LEVELS = {"alpha_lower": 0.02, "alpha_upper": 0.05}
streams = st.lists(
    st.one_of(st.floats(0, 1), st.floats(0, 1e-3), st.sampled_from([0.0, 1.0])), min_size=1, max_size=40
).map(np.array)
BETS = [2.0 ** (power / 2) for power in range(-32, 41)]
WEIGHTS = np.array([max(bet, 1.0) ** -0.125 for bet in BETS]) / sum(max(bet, 1.0) ** -0.125 for bet in BETS)


def wealth(x, mean):
    """Mixture over the fixed bets of the product of 1 + lambda (x - m), lambda = c / (1 + c m)."""
    return float(WEIGHTS @ [np.prod([1 + c / (1 + c * mean) * (v - mean) for v in x]) for c in BETS])


def plug_in(x, alpha):
    """Bets before truncation, and predicted means, one observation after the other (Theorem 2)."""
    bets, means, seen, squares = [], [], [], 0.0
    for t, value in enumerate(x, 1):
        mean = (0.5 + sum(seen)) / t
        variance = (0.25 + squares) / t
        bets.append(math.sqrt(2 * math.log(1 / alpha) / (variance * t * math.log(1 + t))))
        means.append(mean)
        seen.append(value)
        squares += (value - (0.5 + sum(seen)) / (t + 1)) ** 2
    return bets, means


def bernstein_by_theorem_2(x, alpha):
    """Lower bounds after each observation."""
    bets, means = plug_in(x, alpha)
    total = gained = paid = 0.0
    out = []
    for value, bet, mean in zip(x, bets, means, strict=True):
        lam = min(bet, 0.5)
        total, gained = total + lam, gained + lam * value
        paid += 4 * (value - mean) ** 2 * (-math.log(1 - lam) - lam) / 4
        out.append(max(0.0, (gained - paid - math.log(1 / alpha)) / total))
    return out


def capital_by_theorem_3(x, mean, alpha):
    """Capital against a mean after each observation, with lambda_i(m) = c_i / (1 + c_i m)."""
    capital, out = 1.0, []
    for value, bet, expected in zip(x, *plug_in(x, alpha), strict=True):
        lam = min(bet, 0.75 / expected)
        c = 2.0 ** (round(4 * math.log2(lam / (1 - lam * expected))) / 4)
        capital *= 1 + c / (1 + c * mean) * (value - mean)
        out.append(capital)
    return out


@given(streams)
def test_bernstein_sequence_is_theorem_2_on_each_side(x):
    """Every running bound equals the loop's, scaled to the range, with its own alpha."""
    lower, upper = running_bounds(3 * x - 1, low=-1, high=2, **LEVELS, kind="bernstein")
    assert (lower + 1) / 3 == pytest.approx(bernstein_by_theorem_2(x, 0.02), abs=1e-9)
    assert (2 - upper) / 3 == pytest.approx(bernstein_by_theorem_2(1 - x, 0.05), abs=1e-9)


@given(streams)
def test_betting_sequence_is_theorem_3_on_each_side(x):
    """At every running bound the capital is 1/alpha; where the bound is an end of the range it has not got there."""
    lower, upper = running_bounds(3 * x - 1, low=-1, high=2, **LEVELS)
    for y, bounds, alpha in ((x, (lower + 1) / 3, 0.02), (1 - x, (2 - upper) / 3, 0.05)):
        for t, bound in enumerate(bounds):
            capital = capital_by_theorem_3(y, bound, alpha)[t]
            if bound < 1e-12:
                assert capital * alpha <= 1 + 1e-6
            else:
                assert capital * alpha == pytest.approx(1, rel=1e-6)


@given(streams)
def test_anytime_betting_ends_where_the_mixture_has_won_one_over_alpha(x):
    """Either side, scaled to the range, is where the wealth of the fixed mixture is 1/alpha."""
    got = anytime_mean_interval(Binned.of_samples(3 * x - 1), low=-1, high=2, **LEVELS)
    for y, bound, alpha in ((x, (got.lower + 1) / 3, 0.02), (1 - x, (2 - got.upper) / 3, 0.05)):
        if bound < 1e-12:
            assert wealth(y, 0.0) * alpha <= 1 + 1e-6
        else:
            assert wealth(y, bound) * alpha == pytest.approx(1, rel=1e-5)


@given(streams, st.floats(0, 1))
def test_anytime_bernstein_is_the_mixture_of_exponentials(x, center):
    """At either bound, the mixture of exp(lam (S - n m) - psi(lam) V) is 1/alpha."""
    got = anytime_bernstein_interval(Binned.of_samples(x), **UNIT, **LEVELS, center=center)
    squares = float(((x - center) ** 2).sum())
    for sign, bound, alpha in ((1, got.lower, 0.02), (-1, got.upper, 0.05)):
        won = 0.0
        for weight, bet in zip(WEIGHTS, BETS, strict=True):
            lam = bet / (1 + bet)
            psi = -math.log1p(-lam) - lam
            won += weight * math.exp(min(lam * sign * float(x.sum() - x.size * bound) - psi * squares, 700))
        if 1e-9 < bound < 1 - 1e-9:
            assert won * alpha == pytest.approx(1, rel=1e-5)
        else:
            assert won * alpha <= 1 + 1e-5


def test_anytime_bernstein_at_the_size_of_a_window():
    """For 2000 small drifts on a range of 3, both bounds are inside the range and where the mixture is 1/alpha."""
    x = np.minimum(np.exp(np.random.default_rng(2).normal(-4, 1, 2000)), 1.0)
    got = anytime_bernstein_interval(Binned.of_samples(3 * x - 1), low=-1, high=2, **LEVELS)
    lam = np.array([bet / (1 + bet) for bet in BETS])
    psi = -np.log1p(-lam) - lam
    for sign, bound, alpha in ((1, (got.lower + 1) / 3, 0.02), (-1, (got.upper + 1) / 3, 0.05)):
        assert 0.0 < bound < 1.0
        won = WEIGHTS @ np.exp(lam * sign * (x.sum() - x.size * bound) - psi * (x @ x))
        assert won * alpha == pytest.approx(1, rel=1e-5)


@given(streams, st.floats(0, 1), st.integers(0, 4))
def test_e_value_is_the_wealth_and_bins_only_lessen_it(histogram_of, x, limit, scale):
    """It is the mixture's product, scaled to the range, and from a histogram never larger."""
    exact = e_value(Binned.of_samples(3 * x - 1), 3 * limit - 1, low=-1, high=2)
    assert exact == pytest.approx(wealth(x, limit), rel=1e-6, abs=1e-12)
    known = histogram_of(x, scale).binned()
    blind = replace(known, sum=math.nan)
    assert e_value(blind, limit, **UNIT) <= e_value(known, limit, **UNIT) * (1 + 1e-6) + 1e-12
    assert e_value(known, limit, **UNIT) <= exact * (1 + 1e-6) + 1e-12


def test_without_a_sum_an_e_value_counts_lower_edges():
    """Fifty values known to lie in [0.2, 0.9], and nothing else of them, are evidence as fifty of 0.2 are."""
    sample = Binned(np.array([0.2]), np.array([0.9]), np.array([50]), 50, math.nan, math.nan, math.nan)
    assert e_value(sample, 0.1, **UNIT) == pytest.approx(wealth(np.full(50, 0.2), 0.1))


def test_e_value_beyond_the_range():
    """Above a cap counts as the cap; a value that may be below the range leaves no evidence; too much of it is inf."""
    assert e_value(Binned.of_samples(np.r_[np.ones(50), 7.0]), 0.1, **UNIT) == pytest.approx(
        e_value(Binned.of_samples(np.ones(51)), 0.1, **UNIT)
    )
    assert e_value(Binned.of_samples(np.r_[np.ones(50), -0.1]), 0.1, **UNIT) == 0.0
    straddling = Binned(np.array([-0.1, 1.0]), np.array([0.1, 1.0]), np.array([1, 50]), 51, 50.0, math.nan, math.nan)
    assert e_value(straddling, 0.1, **UNIT) == 0.0
    assert e_value(Binned.of_samples(np.ones(1000)), 0.1, **UNIT) == math.inf
    assert e_value(Binned.of_samples(np.array([])), 0.1, **UNIT) == 1.0
    assert 0.0 < e_value(Binned.of_samples(np.zeros(100)), 1.0, **UNIT) < 1.0


def test_an_e_value_above_one_over_alpha_is_a_lower_bound_above_the_limit():
    """Evidence and confidence sequence are the same wealth looked at from two ends."""
    sample = Binned.of_samples(np.random.default_rng(0).random(500) * 0.2)
    bound = anytime_mean_interval(sample, **UNIT, **LEVELS).lower
    assert e_value(sample, bound - 1e-9, **UNIT) >= 50 > e_value(sample, bound + 1e-6, **UNIT)


@settings(max_examples=30)
@given(streams, st.lists(st.integers(0, 40), max_size=4))
def test_in_parts_or_at_once_is_the_same(x, cuts):
    """However a stream is cut into updates, the interval after it is the one of a single trace."""
    for kind in (BernsteinSequence, BettingSequence):
        whole, parts = kind(**UNIT, **LEVELS), kind(**UNIT, **LEVELS)
        lower, upper = whole.trace(x)
        assert lower.shape == upper.shape == x.shape
        for part in np.split(x, sorted(min(cut, x.size) for cut in cuts)):
            parts.update(part)
        a, b = whole.interval(), parts.interval()
        assert (a.lower, a.upper) == pytest.approx((b.lower, b.upper), abs=1e-9)
        assert (a.lower, a.upper) == pytest.approx((lower[-1], upper[-1]), abs=1e-12)
        assert b.estimate == pytest.approx(x.mean())
        assert b.samples == x.size


def test_long_streams_in_parts_are_the_loops():
    """After 400 coins in parts of 40, when bets have become small, both sequences end where the papers' loops do."""
    x = (np.random.default_rng(3).random(400) < 0.5).astype(float)
    ends = {}
    for kind in (BernsteinSequence, BettingSequence):
        sequence = kind(**UNIT, **LEVELS)
        for part in np.split(x, 10):
            sequence.update(part)
        ends[kind] = sequence.interval()
    assert ends[BernsteinSequence].lower == pytest.approx(bernstein_by_theorem_2(x, 0.02)[-1], abs=1e-9)
    assert 1 - ends[BernsteinSequence].upper == pytest.approx(bernstein_by_theorem_2(1 - x, 0.05)[-1], abs=1e-9)
    assert capital_by_theorem_3(x, ends[BettingSequence].lower, 0.02)[-1] == pytest.approx(50, rel=1e-6)
    assert capital_by_theorem_3(1 - x, 1 - ends[BettingSequence].upper, 0.05)[-1] == pytest.approx(20, rel=1e-6)


def test_long_traces_are_solved_in_pieces():
    """A trace over several thousand observations agrees with looking at each of a few moments."""
    x = np.random.default_rng(4).beta(0.5, 5.0, 9000)
    lower, upper = running_bounds(x, **UNIT, **LEVELS)
    for t in (1, 4096, 4097, 8192, 9000):
        sequence = BettingSequence(**UNIT, **LEVELS)
        sequence.update(x[:t])
        got = sequence.interval()
        assert (got.lower, got.upper) == pytest.approx((lower[t - 1], upper[t - 1]), abs=1e-9)


def test_widths_shrink_and_order_as_they_should():
    """For a small drift: fixed-size betting < anytime betting < anytime Bernstein, and both sequences close to 0.

    The betting sequence is narrower than the Bernstein one on the upper side, which decides whether a limit is kept.
    """
    x = np.minimum(np.exp(np.random.default_rng(2).normal(-6, 1, 20_000)), 1.0)
    sample = Binned.of_samples(x)
    fixed, anytime, bernstein = (
        f(sample, **UNIT, **LEVELS) for f in (betting_interval, anytime_mean_interval, anytime_bernstein_interval)
    )
    width = [i.upper - i.lower for i in (fixed, anytime, bernstein)]
    assert width[0] < width[1] < 1.2 * width[0] < width[2]
    (_, betting), (_, plain) = (running_bounds(x, **UNIT, **LEVELS, kind=kind) for kind in ("betting", "bernstein"))
    assert x.mean() < betting[-1] < plain[-1] < 2 * x.mean()


def test_confseq_agrees():
    """The public implementation by the authors' group gives the same bets and the same capital for them."""
    try:
        from confseq.betting import betting_mart
        from confseq.betting_strategies import lambda_predmix_eb
    except (ImportError, AttributeError):  # its source needs Boost to build and NumPy 1 to import
        pytest.skip("confseq is not importable: it has no wheel, and its source needs Boost and NumPy 1")

    x = np.random.default_rng(0).beta(1.0, 8.0, 300)
    theirs = lambda_predmix_eb(x, alpha=0.02)
    ours, means = plug_in(x, 0.02)
    assert theirs == pytest.approx(ours)
    stakes = np.minimum(np.array(ours) * means, 0.75)
    c = np.exp2(np.rint(4 * np.log2(stakes / (np.array(means) * (1 - stakes)))) / 4)
    bound = running_bounds(x, **UNIT, alpha_lower=0.02, alpha_upper=0.05)[0][-1]
    capital = betting_mart(
        x, bound, theta=1, trunc_scale=1.0, lambdas_fn_positive=lambda _x, m: c / (1 + c * m), alpha=0.02
    )
    assert capital[-1] == pytest.approx(50, rel=1e-6)


ONE = Binned.of_samples(np.array([0.5]))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: BettingSequence(**UNIT, alpha_lower=0.0, alpha_upper=0.1), r"alpha_lower: 0\.0"),
        (lambda: BernsteinSequence(**UNIT, alpha_lower=0.1, alpha_upper=1.0), r"alpha_upper: 1\.0"),
        (lambda: BettingSequence(low=1, high=0, **LEVELS), r"\[1, 0\] is empty"),
        (lambda: BernsteinSequence(low=0, high=math.inf, **LEVELS), "is not a finite range"),
        (lambda: BettingSequence(**UNIT, **LEVELS).update([0.1, math.nan]), "values: nan"),
        (lambda: BernsteinSequence(**UNIT, **LEVELS).trace([0.1, 1.5]), r"values: 1\.5"),
        (lambda: running_bounds([0.1], **UNIT, **LEVELS, kind="t"), "kind: 't'.*betting, bernstein"),
        (lambda: anytime_mean_interval(ONE, **UNIT, alpha_lower=2.0, alpha_upper=0.1), r"alpha_lower: 2\.0"),
        (lambda: anytime_mean_interval(ONE, low=0, high=math.nan, **LEVELS), "nan"),
        (lambda: anytime_bernstein_interval(ONE, **UNIT, **LEVELS, center=1.5), r"center: 1\.5"),
        (lambda: anytime_bernstein_interval(ONE, **UNIT, **LEVELS, center=math.nan), "center: nan"),
        (lambda: e_value(ONE, 2.0, **UNIT), r"limit: 2\.0"),
        (lambda: e_value(ONE, math.nan, **UNIT), "limit: nan"),
        (lambda: e_value(ONE, 0.5, low=0, high=math.inf), "finite range"),
    ],
)
def test_bad_sequential_input_is_refused_by_name(call, says):
    """A ValueError names the argument and shows its value."""
    with pytest.raises(ValueError, match=says):
        call()


def test_a_refused_update_changes_nothing():
    """After a value outside the range the sequence is what it was, and nothing is claimed before the first value."""
    for kind in (BernsteinSequence, BettingSequence):
        sequence = kind(**UNIT, **LEVELS)
        assert (sequence.interval().lower, sequence.interval().upper) == (-math.inf, math.inf)
        sequence.update([0.2] * 100)
        before = sequence.interval()
        with pytest.raises(ValueError, match=r"values: 3\.0"):
            sequence.update([0.1, 3.0])
        sequence.update([])
        assert sequence.interval() == before
        assert all(part.size == 0 for part in sequence.trace([]))
