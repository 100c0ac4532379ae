"""Intervals for a mean: the formulas, what binning does to them, and what the cap means."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.stats import Binned, capped_mean_interval, fraction_interval, mean_interval, quantile_interval

anytime_mean_interval = functools.partial(mean_interval, anytime=True)

unit_samples = st.lists(
    st.one_of(st.floats(0, 1), st.floats(0, 1e-4), st.sampled_from([0.0, 1.0])), min_size=2, max_size=60
).map(np.array)
signed_samples = st.lists(st.floats(-20, 20), min_size=2, max_size=40).map(np.array)
alphas = st.sampled_from([1e-9, 0.001, 0.01, 0.3, 0.9])
LEVELS = {"alpha_lower": 0.01, "alpha_upper": 0.05}
UNIT = {"low": 0.0, "high": 1.0}
INTERVALS = [mean_interval, anytime_mean_interval]


def wealth(x, mean, bets):
    """The mixture's wealth against a mean in [0, 1], in plain loops from the paper's 1 + lambda (x - m)."""
    total = 0.0
    for bet in bets:
        product = 1.0
        for value in x:
            product *= 1.0 + bet / (1.0 + bet * mean) * (value - mean)
        total += product * max(bet, 1.0) ** -0.125
    return total / sum(max(bet, 1.0) ** -0.125 for bet in bets)


def bets_of(n, *, anytime):
    """Powers of sqrt(2): for a size that is known beforehand, or for all."""
    first, last = (4 / math.sqrt(n), max(n, 16)) if not anytime else (2**-16, 2**20)
    return [2.0 ** (power / 2) for power in range(math.floor(2 * math.log2(first)), math.ceil(2 * math.log2(last)) + 1)]


@pytest.mark.parametrize("anytime", [False, True])
@given(st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0])), min_size=1, max_size=30), alphas, alphas)
def test_betting_ends_where_the_wealth_of_theorem_3_is_one_over_alpha(anytime, x, alpha_lower, alpha_upper):
    """Either side, scaled to the range, is where the mixture of fixed bets has won 1/alpha, or the end of the range."""
    x, bets, levels = (
        np.array(x),
        bets_of(len(x), anytime=anytime),
        {"alpha_lower": alpha_lower, "alpha_upper": alpha_upper},
    )
    got = mean_interval(Binned.of_samples(3 * x - 1), low=-1, high=2, **levels, anytime=anytime)
    for y, bound, alpha in ((x, (got.lower + 1) / 3, alpha_lower), (1 - x, (2 - got.upper) / 3, alpha_upper)):
        if bound < 1e-12:
            assert wealth(y, 0.0, bets) * alpha <= 1 + 1e-6
        else:
            assert wealth(y, bound, bets) * alpha == pytest.approx(1, rel=1e-5)


@given(unit_samples, st.integers(0, 6), st.sampled_from(INTERVALS))
def test_bins_only_widen_and_keep_the_mean(histogram_of, x, scale, interval):
    """The mean from a histogram is exact, and its interval contains the sample's own."""
    exact = interval(Binned.of_samples(x), **UNIT, **LEVELS)
    binned = interval(histogram_of(x, scale).binned(), **UNIT, **LEVELS)
    assert binned.estimate == pytest.approx(exact.estimate, rel=1e-12, abs=1e-15)
    assert binned.lower <= exact.lower + 1e-7
    assert binned.upper >= exact.upper - 1e-7


@pytest.mark.parametrize("interval", INTERVALS)
def test_bins_widen_a_bet_by_little(histogram_of, interval):
    """At scale 4 the distance of either side from the mean grows by less than a twentieth."""
    x = np.minimum(np.exp(np.random.default_rng(1).normal(-6, 2, 5000)), 1.0)
    exact, binned = (interval(s, **UNIT, **LEVELS) for s in (Binned.of_samples(x), histogram_of(x).binned()))
    assert 1.0 < (binned.estimate - binned.lower) / (exact.estimate - exact.lower) < 1.05
    assert 1.0 < (binned.upper - binned.estimate) / (exact.upper - exact.estimate) < 1.05


@given(unit_samples, st.integers(0, 6))
def test_an_unknown_sum_is_bounded_by_the_bins(histogram_of, x, scale):
    known = histogram_of(x, scale).binned()
    blind = Binned(known.lower, known.upper, known.count, known.total, math.nan, known.minimum, known.maximum)
    with_sum, without = (mean_interval(s, **UNIT, **LEVELS) for s in (known, blind))
    assert without.lower <= with_sum.lower + 1e-12
    assert without.upper >= with_sum.upper - 1e-12
    assert without.lower <= without.estimate <= without.upper


UNBOUNDED = {"low": 0.0, "high": math.inf, "cap": 5.0}


def test_beyond_the_cap_no_upper_bound_is_claimed(histogram_of):
    """One observation beyond the cap, and the mean may be anything; the lower bound stays and uses the cap for it."""
    x = np.r_[np.full(5000, 1.0), 1e6]
    got = capped_mean_interval(histogram_of(x).binned(), **UNBOUNDED, **LEVELS)
    assert got.upper == math.inf
    assert got.estimate == pytest.approx(x.mean())
    assert got.lower == pytest.approx(
        capped_mean_interval(Binned.of_samples(np.minimum(x, 5.0)), **UNBOUNDED, **LEVELS).lower, rel=0.01
    )
    assert got.note.endswith("1 observation above 5: no upper bound is claimed")


def test_a_bin_that_may_reach_beyond_the_cap_counts_as_beyond():
    """What is known to lie in [1.9, 2.1] is not known to respect a cap of 2; a promised end it may straddle."""
    above = Binned(np.array([0.0, 1.9]), np.array([0.1, 2.1]), np.array([999, 1]), 1000, 30.0, math.nan, math.nan)
    assert capped_mean_interval(above, low=0.0, high=math.inf, cap=2.0, **LEVELS).upper == math.inf
    below = Binned(np.array([-2.1, 0.0]), np.array([-1.9, 0.1]), np.array([1, 999]), 1000, 30.0, math.nan, math.nan)
    assert capped_mean_interval(below, low=-math.inf, high=5.0, cap=2.0, **LEVELS).lower == -math.inf
    assert capped_mean_interval(below, low=-2.0, high=5.0, cap=5.0, **LEVELS).lower >= -2.0


def test_a_signed_quantity_is_cut_on_both_sides():
    levels = {"low": -math.inf, "high": math.inf, "cap": 2.0, **LEVELS}
    x = np.tile([-1.0, 1.0], 2000)
    got = capped_mean_interval(Binned.of_samples(x), **levels)
    assert -0.2 < got.lower < 0 < got.upper < 0.2
    assert got.note == "bounds are for the mean of values cut to [-2, 2]"
    assert capped_mean_interval(Binned.of_samples(np.append(x, 3.0)), **levels).upper == math.inf
    below = capped_mean_interval(Binned.of_samples(np.append(x, -3.0)), **levels)
    assert (below.lower, below.upper < 1) == (-math.inf, True)
    assert below.note.endswith("1 observation below -2: no lower bound is claimed")


def test_a_broken_promise_of_range_claims_nothing():
    """A value above the promised range leaves no upper bound; a bin that only straddles its end is inside it."""
    x = np.r_[np.full(1000, 0.5), 1.5]
    for interval in INTERVALS:
        assert interval(Binned.of_samples(x), **UNIT, **LEVELS).upper == math.inf
        assert interval(Binned.of_samples(-x), low=-1.0, high=0.0, **LEVELS).lower == -math.inf
        straddling = Binned(np.array([0.98]), np.array([1.02]), np.array([1000]), 1000, 990.0, math.nan, math.nan)
        assert interval(straddling, **UNIT, **LEVELS).upper <= 1.0


@given(signed_samples, st.floats(0.5, 25), st.integers(0, 5))
def test_estimate_lies_inside(histogram_of, x, cap, scale):
    sample = histogram_of(x, scale).binned()
    for low, high in ((-math.inf, math.inf), (-20.0, math.inf), (-20.0, 20.0)):
        got = capped_mean_interval(sample, low=low, high=high, cap=cap, **LEVELS)
        assert got.lower <= got.upper
        if not (x.min() < max(low, -cap) and x.max() > min(high, cap)):
            assert got.lower - 1e-9 <= got.estimate <= got.upper + 1e-9


def test_looking_at_every_size_costs_a_fifth_of_the_width():
    """For a small drift the anytime interval contains that of a fixed size, and is less than 1.2 times as wide."""
    x = np.minimum(np.exp(np.random.default_rng(2).normal(-6, 1, 20_000)), 1.0)
    fixed, anytime = (mean_interval(Binned.of_samples(x), **UNIT, **LEVELS, anytime=always) for always in (False, True))
    assert anytime.lower < fixed.lower < x.mean() < fixed.upper < anytime.upper
    assert anytime.upper - anytime.lower < 1.2 * (fixed.upper - fixed.lower)


SIDES = {"alpha_lower": 0.05, "alpha_upper": 0.05}
LOOKS = [20, 25, 32, 40, 50, 63, 79, 99, 124, 155, 194, 243, 304, 380]


def ever_missed(of, truth, runs=200, seed=5):
    """In how many of `runs` streams each side misses the truth at one of the looks or more."""
    rng = np.random.default_rng(seed)
    missed = np.zeros(2, dtype=int)
    for _ in range(runs):
        stream = rng.exponential(1.0, LOOKS[-1])
        bounds = [of(Binned.of_samples(stream[:count])) for count in LOOKS]
        missed += any(interval.lower > truth for interval in bounds), any(interval.upper < truth for interval in bounds)
    return missed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "truth", "least"),
    [
        (lambda sample, **more: fraction_interval(sample, 2.0, **SIDES, **more), math.exp(-2), 20),
        (lambda sample, **more: quantile_interval(sample, 0.9, **SIDES, **more), math.log(10), 20),
        (
            lambda sample, **more: capped_mean_interval(
                sample, low=0.0, high=math.inf, cap=3.0, cut=True, **SIDES, **more
            ),
            1.0 - math.exp(-3.0),
            0,
        ),
    ],
)
def test_shares_quantiles_and_cut_means_hold_at_all_looks_together(of, truth, least):
    """Over fourteen looks either side misses in at most alpha of 200 streams; the exact ones of one size in more."""
    assert (ever_missed(lambda sample: of(sample, anytime=True), truth) <= 200 * 0.05).all()
    assert ever_missed(of, truth).sum() >= least


def test_what_lies_beyond_a_cap_counts_as_the_cap_where_that_is_the_claim():
    """Interval and estimate are those of the cut sample, from a histogram within its buckets."""
    x = np.random.default_rng(3).exponential(1.0, 500)
    claim = {"low": 0.0, "high": math.inf, "cap": 2.0, **LEVELS}
    cut = capped_mean_interval(Binned.of_samples(np.minimum(x, 2.0)), **claim)
    got = capped_mean_interval(Binned.of_samples(x), cut=True, **claim)
    assert (got.lower, got.estimate, got.upper) == pytest.approx((cut.lower, cut.estimate, cut.upper))
    assert got.note == "for the mean of min(value, 2)"
    assert capped_mean_interval(Binned.of_samples(x), **claim).upper == math.inf


@given(signed_samples, st.floats(0.1, 10))
def test_a_scaled_mean_has_scaled_sides_and_a_negative_scale_swaps_them(x, scale):
    sample, levels = Binned.of_samples(x), {"low": -math.inf, "high": math.inf, "cap": 25.0}
    plain, up = (capped_mean_interval(sample, **levels, **LEVELS, scale=by) for by in (1.0, scale))
    down = capped_mean_interval(sample, **levels, alpha_lower=0.05, alpha_upper=0.01, scale=-scale)
    sides = np.array([plain.lower, plain.estimate, plain.upper])
    assert [up.lower, up.estimate, up.upper] == pytest.approx(scale * sides)
    assert [down.lower, down.estimate, down.upper] == pytest.approx(-scale * sides[::-1])


@pytest.mark.parametrize(
    ("value", "low", "scale", "note"),
    [
        (1.0, 0.0, 2.0, "the upper bound is for the mean of min(value, 10)"),
        (1.0, 0.0, -2.0, "the lower bound is for the mean of max(value, -10)"),
        (6.0, 0.0, -1.0, "9 observations below -5: no lower bound is claimed"),
        (1.0, -math.inf, -2.0, "bounds are for the mean of values cut to [-10, 10]"),
    ],
)
def test_the_note_on_a_scaled_mean_is_in_its_unit(value, low, scale, note):
    """A cap from above is one from below after a change of sign."""
    sample = Binned.of_samples(np.full(9, value))
    assert capped_mean_interval(sample, low=low, high=math.inf, cap=5.0, **LEVELS, scale=scale).note.endswith(note)


def test_a_mean_of_0_is_0_of_either_scale():
    sample = Binned.of_samples(np.zeros(9))
    found = capped_mean_interval(sample, low=0.0, high=math.inf, cap=1.0, **LEVELS, scale=-1.0)
    assert [f"{end:g}" for end in (found.estimate, found.upper)] == ["0", "0"]
