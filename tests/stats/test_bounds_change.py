"""Change detection: run lengths, delays and dates."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kc_otel.stats.change import cusum, cusum_arl, cusum_threshold, page_hinkley
from kc_otel.stats.edetector import e_detector


def exact_arl(threshold: float, allowance: float, shift: float = 0.0, nodes: int = 80) -> float:
    """Run length of a Gaussian CUSUM from Page's integral equation, by Gauss-Legendre quadrature."""
    from scipy.stats import norm

    at, weight = np.polynomial.legendre.leggauss(nodes)
    at, weight = (at + 1) * threshold / 2, weight * threshold / 2
    begin = np.concatenate([[0.0], at])
    kernel = np.empty((nodes + 1, nodes + 1))
    kernel[:, 0] = norm.cdf(allowance - shift - begin)
    kernel[:, 1:] = weight * norm.pdf(at + allowance - shift - begin[:, None])
    return float(np.linalg.solve(np.eye(nodes + 1) - kernel, np.ones(nodes + 1))[0])


@pytest.mark.parametrize(("allowance", "within"), [(0.1, 0.01), (0.25, 0.01), (0.5, 0.01), (0.75, 0.04), (1.0, 0.07)])
@pytest.mark.parametrize("arl", [100.0, 1000.0, 100_000.0])
def test_threshold_has_the_run_length_that_was_asked_for(allowance, within, arl):
    """The exact run length at Siegmund's threshold is within the stated tolerance of the wanted one."""
    threshold = cusum_threshold(arl, allowance)
    assert exact_arl(threshold, allowance) == pytest.approx(arl, rel=within)
    assert cusum_arl(threshold, allowance) == pytest.approx(arl, rel=1e-9)


@pytest.mark.parametrize("allowance", [0.1, 0.25, 0.5])
def test_delay_is_that_of_the_integral_equation(allowance):
    """The same formula gives the delay of detecting the shift that the chart is made for."""
    threshold = cusum_threshold(1000.0, allowance)
    delay = cusum_arl(threshold, allowance, 2 * allowance)
    assert delay == pytest.approx(exact_arl(threshold, allowance, 2 * allowance), rel=0.01)
    assert cusum_arl(threshold, allowance, allowance) == pytest.approx(
        exact_arl(threshold, allowance, allowance), rel=0.01
    )


def run_lengths(detect, draw, streams: int, piece: int, pieces: int) -> np.ndarray:
    watch = None
    for _ in range(pieces):
        watch = detect(draw((streams, piece)), watch)
    return np.where(watch.alarm < 0, watch.seen, watch.alarm + 1)


@pytest.mark.slow
def test_false_alarms_come_as_far_apart_as_stated():
    """Simulated, CUSUM and Page-Hinkley have the run length that was asked for; the latter without knowing the mean."""
    rng = np.random.default_rng(11)
    draw = lambda size: rng.normal(5.0, 2.0, size)  # noqa: E731
    known = run_lengths(lambda x, w: cusum(x, mean=5.0, deviation=2.0, arl=200, watch=w), draw, 4000, 500, 4)
    learnt = run_lengths(lambda x, w: page_hinkley(x, deviation=2.0, arl=200, watch=w), draw, 4000, 500, 4)
    # Run lengths are nearly exponential: the mean of 4000 has a deviation of 200 / sqrt(4000) = 3.2.
    assert known.mean() == pytest.approx(200, abs=12)
    # The first residual carries no information and 1 observation is spent on it.
    assert learnt.mean() == pytest.approx(201, abs=12)


@pytest.mark.parametrize("shift", [1.0, 1.5])
def test_cusum_finds_and_dates_a_shift(shift):
    """Alarms come within a few times the theoretical delay, and dates lie around the true change."""
    rng = np.random.default_rng(3)
    x = rng.normal(0.0, 1.0, (400, 300))
    x[:, 200:] += shift
    found = cusum(x, mean=0.0, deviation=1.0, shift=shift, arl=1e6)
    after = found.alarm >= 200
    assert after.mean() > 0.99
    delay = cusum_arl(cusum_threshold(1e6, shift / 2), shift / 2, shift)
    # The formula starts from S = 0, which is the worst; streams are already a little above it when the change comes.
    assert (found.alarm[after] - 199).mean() == pytest.approx(delay, rel=0.1)
    assert np.median(found.change[after]) == pytest.approx(200, abs=1)
    assert (np.abs(found.change[after] - 200) <= 15).mean() > 0.95


def test_page_hinkley_finds_and_dates_a_shift_from_an_unknown_mean():
    """With 300 observations before, a shift by two deviations is found within 20 observations, and dated."""
    rng = np.random.default_rng(4)
    x = rng.normal(1e6, 0.5, (200, 400))
    x[:, 300:] += 1.0
    found = page_hinkley(x, deviation=0.5, shift=1.0, arl=1e6)
    assert ((found.alarm >= 300) & (found.alarm < 320)).mean() > 0.99
    assert np.median(found.change) == pytest.approx(300, abs=1)
    assert (np.abs(found.change - 300) <= 20).mean() > 0.95


def one_by_one(z: np.ndarray, allowance: float, threshold: float) -> tuple[int, int]:
    """Page's recursion as it is defined."""
    s, start = 0.0, 0
    for t, value in enumerate(z):
        s = max(0.0, s + value - allowance)
        if s == 0.0:
            start = t + 1
        if s >= threshold:
            return t, start
    return -1, -1


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_pieces_give_what_the_whole_gives(seed, pieces):
    """Vectorised, in pieces or at once, CUSUM is Page's recursion; a stream that alarmed stays as it was."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0.3, 1.0, (3, sum(pieces)))
    whole = cusum(x, mean=0.0, deviation=1.0, arl=20.0)
    page, sums = page_hinkley(x, deviation=1.0, arl=20.0), e_detector(np.exp(x), limit=1.5, arl=20.0)
    watch, page_watch, sum_watch = None, None, None
    for piece in np.split(x, np.cumsum(pieces)[:-1], axis=1):
        watch = cusum(piece, mean=0.0, deviation=1.0, arl=20.0, watch=watch)
        page_watch = page_hinkley(piece, deviation=1.0, arl=20.0, watch=page_watch)
        sum_watch = e_detector(np.exp(piece), limit=1.5, arl=20.0, watch=sum_watch)
    for one, other in ((whole, watch), (page, page_watch), (sums, sum_watch)):
        assert one.seen == other.seen == x.shape[1]
        assert (one.alarm == other.alarm).all()
        assert (one.change == other.change).all()
        assert one.statistic == pytest.approx(other.statistic)
    threshold = cusum_threshold(20.0, 0.5)
    assert [one_by_one(row, 0.5, threshold) for row in x] == list(
        zip(whole.alarm.tolist(), whole.change.tolist(), strict=True)
    )


def test_recursive_residuals_are_standard_normal_from_the_start():
    """Page-Hinkley's residuals have variance 1 at every step: its statistic moves as a CUSUM of N(0, 1) does."""
    rng = np.random.default_rng(8)
    x = rng.normal(3.0, 0.2, (20_000, 3))
    first, second, third = (page_hinkley(x[:, :n], deviation=0.2, shift=1e-9, arl=1e9) for n in (1, 2, 3))
    assert (first.statistic == 0.0).all()
    # With no allowance to speak of, S_2 = max(0, z_2), whose second moment is 1/2.
    assert np.square(second.statistic).mean() == pytest.approx(0.5, abs=0.03)
    # And S_3 = max(0, S_2 + z_3).
    z = rng.normal(size=(200_000, 2))
    walk = np.maximum(np.maximum(z[:, 0], 0) + z[:, 1], 0)
    assert np.square(third.statistic).mean() == pytest.approx(np.square(walk).mean(), abs=0.04)
    assert third.mean == pytest.approx(x.mean(axis=1))


def volatile(rng, size) -> np.ndarray:
    """Mean 0.2 given the past, but the noise after a rise is five times that after a fall."""
    sign = np.where(rng.random(size) < 0.5, -1.0, 1.0)
    before = np.concatenate([np.ones((*size[:-1], 1)), sign[..., :-1]], axis=-1)
    return 0.2 * (1.0 + sign * np.where(before > 0, 1.0, 0.2))


STREAMS = {
    "two outcomes": lambda rng, size: (rng.random(size) < 0.2).astype(float),
    "little noise": lambda rng, size: rng.beta(200, 800, size),
    "heavy tail": lambda rng, size: 0.1 * rng.pareto(1.5, size),
    "dependent": volatile,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_e_detector_waits_at_least_its_run_length_whatever_the_stream(name):
    """With the mean at the limit the simulated time to a false alarm is no shorter than stated."""
    rng = np.random.default_rng(5)
    lengths = run_lengths(
        lambda x, w: e_detector(x, limit=0.2, arl=100.0, watch=w), lambda size: STREAMS[name](rng, size), 1500, 400, 5
    )
    assert lengths.mean() + 3 * lengths.std() / math.sqrt(lengths.size) >= 100.0
    # Sharp where the noise lets a bet overstep its mark only a little, so the bound is not merely slack.
    if name == "little noise":
        assert lengths.mean() < 115.0
    # P(alarm within n) <= n / ARL.
    for n in (5, 10, 25, 50):
        assert (lengths <= n).mean() <= n / 100.0


def test_e_detector_needs_no_upper_end_and_dates_the_change():
    """A mean of an unbounded quantity that rises by half is found within 45 observations, and dated."""
    rng = np.random.default_rng(2)
    x = rng.gamma(50.0, 0.004 / 50.0, (200, 400))
    x[:, 300:] *= 1.5
    found = e_detector(x, limit=0.0042, arl=1e4)
    assert ((found.alarm >= 300) & (found.alarm < 345)).mean() > 0.99
    assert np.median(found.change) == pytest.approx(300, abs=2)
    assert (np.abs(found.change - 300) <= 30).mean() > 0.95


def test_e_detector_statistic_is_the_sum_over_all_starts():
    """M is the sum of the products of factors from every start, averaged over the bets."""
    from kc_otel.stats.edetector import _BETS

    x = np.random.default_rng(0).random(30)
    factor = 1 + _BETS[:, None] * (x / 0.4 - 1)
    expected = np.mean([sum(np.prod(row[j:]) for j in range(30)) for row in factor])
    assert float(e_detector(x, limit=0.4, arl=1e12).statistic) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: cusum([1.0], mean=0.0, deviation=0.0), "deviation: 0.0"),
        (lambda: cusum([math.nan], mean=0.0, deviation=1.0), "values: nan"),
        (lambda: cusum(3.0, mean=0.0, deviation=1.0), "values: 3.0"),
        (lambda: cusum([1.0], mean=0.0, deviation=1.0, shift=0.0), "shift: 0.0"),
        (lambda: cusum(np.ones((2, 3)), mean=np.zeros(3), deviation=1.0), "mean: shape"),
        (lambda: cusum_threshold(1.0, 1.0), "arl: 1.0"),
        (lambda: cusum_arl(-1.0, 0.5), "threshold: -1.0"),
        (lambda: cusum([[1.0]], mean=0.0, deviation=1.0, watch=cusum([1.0], mean=0.0, deviation=1.0)), "watch"),
        (lambda: e_detector([0.5], limit=0.0), "limit: 0.0"),
        (lambda: e_detector([-0.5], limit=0.1), "values: -0.5"),
        (lambda: e_detector([0.5], limit=0.1, arl=0.5), "arl: 0.5"),
        (lambda: e_detector(0.5, limit=0.1), "values: 0.5"),
    ],
)
def test_bad_input_is_named(call, says):
    """Each refusal names the argument and the value."""
    with pytest.raises(ValueError, match=says):
        call()
