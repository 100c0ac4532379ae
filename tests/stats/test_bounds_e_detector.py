"""E-detectors and sequential passes: the recursion, what histograms do to it, and the promises, exact and simulated."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.stats import EDetector, SequentialPass
from kc_otel.stats.e_detector import alarm_level, beyond
from tests.benchmarks.bench_e_detector import LIMIT, LOWER, UPPER, pane, panes_until_alarm, sequences_until_pass

BETS = np.geomspace(1e-4, 0.9, 16)
panes = st.lists(st.lists(st.floats(0, 1), min_size=0, max_size=5), min_size=1, max_size=6)


def columns(values):
    """Observations as a histogram of their own values: counts [1, buckets] and edges."""
    edges, counts = np.unique(np.array(values, dtype=float), return_counts=True)
    return counts[None], edges


@given(panes, st.floats(0.01, 0.9))
def test_the_detector_is_its_recursion(stream, limit):
    """M <- max(M, 1) times the pane's factors, for each bet, averaged; a pane without observations is no pane."""
    detector, sums = EDetector.fresh(1), np.ones(BETS.size)
    for values in stream:
        detector = detector.updated(*columns(values), limit=limit)
        if values:
            sums = np.maximum(sums, 1) * np.prod([1 + BETS / limit * (x - limit) for x in values], axis=0)
    assert np.exp(detector.log_evidence[0]) == pytest.approx(sums.mean(), rel=1e-9)


@given(panes, st.floats(0.01, 0.5), st.floats(0.6, 2.0))
def test_a_pass_is_a_product_of_bets_below(stream, limit, cap):
    """The factors are 1 + lam (m - min(x, cap)), and how the observations are divided into panes does not matter."""
    gate = SequentialPass.fresh(1)
    for values in stream:
        gate = gate.updated(*columns(values), limit=limit, cap=cap)
    bets = np.geomspace(0.01, 0.99, 16) / (cap - limit)
    wealth = np.prod([1 + bets * (limit - min(x, cap)) for values in stream for x in values], axis=0)
    assert np.exp(gate.log_evidence[0]) == pytest.approx(np.mean(wealth * np.ones(16)), rel=1e-9)


def test_evidence_grows_by_less_than_one_a_pane_on_average_at_the_limit():
    """Over every outcome of panes of a coin at its limit, the mean of M is 1 after one pane and at most n after n."""
    for panes, expected in ((1, 1.0), (5, None)):
        mean = 0.0
        for outcome in itertools.product((0.0, 1.0), repeat=panes):
            detector = EDetector.fresh(1)
            for x in outcome:
                detector = detector.updated(*columns([x]), limit=0.25)
            mean += math.exp(detector.log_evidence[0]) * 0.25 ** sum(outcome) * 0.75 ** (panes - sum(outcome))
        assert mean == pytest.approx(expected) if expected else 1.0 < mean < panes


@given(panes, st.floats(0.01, 0.9), st.floats(0.1, 6.0))
def test_clipping_leaves_no_more_than_the_level_and_raises_no_bet(stream, limit, level):
    """Also a pane that is taken in parts is what it is as a whole, as long as nothing is clipped in between."""
    detector, parts = EDetector.fresh(1), EDetector.fresh(1)
    for values in stream:
        counts, edges = columns(values)
        detector = detector.updated(counts, edges, limit=limit)
        parts = parts.opened(bool(values))
        for x in values:
            parts = parts.gained(np.log1p(BETS * (x / limit - 1))[None])
        assert parts.log_sums == pytest.approx(detector.log_sums)
    clipped = detector.clipped(level)
    assert clipped.log_evidence[0] == pytest.approx(min(detector.log_evidence[0], level))
    assert (clipped.log_sums <= detector.log_sums).all()


def test_after_a_fault_the_evidence_is_gone_within_panes_also_of_slow_bets():
    """An hour at three times the limit, held at the level, is forgotten in four panes at half of it."""
    rng, detector = np.random.default_rng(5), EDetector.fresh(1)
    for ratio, panes, seen in ((3.0, 120, True), (0.5, 4, False)):
        for _ in range(panes):
            detector = detector.updated(pane(rng, ratio * LIMIT, 0.45, 1), LOWER, limit=LIMIT).clipped(15.0)
        assert bool(detector.log_evidence[0] == pytest.approx(15.0)) is seen
    assert detector.log_evidence[0] < 0.0


def test_wealth_against_a_true_mean_stays_one_on_average():
    """Over every outcome of five coins whose mean is the limit, the evidence for a PASS has exactly the mean 1."""
    mean = 0.0
    for outcome in itertools.product((0.0, 1.0), repeat=5):
        gate = SequentialPass.fresh(1).updated(*columns(outcome), limit=0.25, cap=1.0)
        mean += math.exp(gate.log_evidence[0]) * 0.25 ** sum(outcome) * 0.75 ** (5 - sum(outcome))
    assert mean == pytest.approx(1.0)


def test_buckets_only_lessen_the_evidence_and_at_scale_four_by_little():
    """With lower edges a detector, and with upper edges a pass, has a little less evidence than from the values."""
    x = np.random.default_rng(0).gamma(1.0, 1.5 * LIMIT, 400)
    index = np.searchsorted(UPPER, x)
    counts = np.bincount(index, minlength=UPPER.size)[None]
    exact = EDetector.fresh(1).updated(*columns(x), limit=LIMIT).log_evidence[0]
    binned = EDetector.fresh(1).updated(counts, LOWER, limit=LIMIT).log_evidence[0]
    assert 0.85 * exact < binned < exact
    y = x / 3.0
    counts = np.bincount(np.searchsorted(UPPER, y), minlength=UPPER.size)[None]
    exact = SequentialPass.fresh(1).updated(*columns(y), limit=LIMIT, cap=5 * LIMIT).log_evidence[0]
    binned = SequentialPass.fresh(1).updated(counts, UPPER, limit=LIMIT, cap=5 * LIMIT).log_evidence[0]
    assert 0.85 * exact < binned < exact


def test_cells_with_limits_of_their_own_are_as_if_alone():
    """Many cells in one call, some without observations and some that start anew, are what each would be by itself."""
    rng, limits = np.random.default_rng(1), np.array([0.004, 0.008, 0.004, 0.002])
    together, alone = EDetector.fresh(4), [EDetector.fresh(1) for _ in range(4)]
    for step in range(6):
        counts = pane(rng, 0.006, 1.0, 4) * (np.arange(4) != step)[:, None]
        together = together.updated(counts, LOWER, limit=limits)
        alone = [one.updated(counts[[i]], LOWER, limit=limits[i]) for i, one in enumerate(alone)]
    assert together.log_evidence == pytest.approx([one.log_evidence[0] for one in alone])
    anew = together.restarted([False, True, False, False])
    assert anew.log_evidence[1] == 0.0
    assert anew.log_evidence[[0, 2, 3]].tolist() == together.log_evidence[[0, 2, 3]].tolist()


def test_a_quantity_that_begins_elsewhere_is_shifted():
    """With low = -1 and limit 0, a value of 0.5 is what 1.5 is for low = 0 and limit 1."""
    shifted = EDetector.fresh(1).updated([[3]], [0.5], limit=0.0, low=-1.0)
    assert shifted.log_sums == pytest.approx(EDetector.fresh(1).updated([[3]], [1.5], limit=1.0).log_sums)
    passes = SequentialPass.fresh(1).updated([[3]], [-0.5], limit=0.0, low=-1.0, cap=1.0)
    assert passes.log_wealth == pytest.approx(
        SequentialPass.fresh(1).updated([[3]], [0.5], limit=1.0, cap=2.0).log_wealth
    )


def test_an_indicator_counts_only_what_lies_above_for_certain():
    """A bucket that begins at the threshold is open there, one that it cuts is below it, and zeros are not above 0."""
    counts, lower = [[4, 3, 2, 1]], [0.0, 0.5, 1.0, 2.0]
    assert beyond(counts, lower, 1.0).tolist() == [[7, 3]]
    assert beyond(counts, lower, 1.2).tolist() == [[9, 1]]
    assert beyond(counts, lower, 0.0).tolist() == [[4, 6]]
    detector = EDetector.fresh(1)
    for _ in range(3):
        detector = detector.updated(beyond([[90, 10]], [0.0, 0.5], 0.5), [0.0, 1.0], limit=0.02)
    assert detector.alarmed(panes=10_000).all()


@pytest.mark.slow
def test_false_alarms_are_rarer_than_promised_and_faults_are_found_at_once():
    """20 cells at their limit: 1,000 panes raise none; at twice the limit two to four do, at 1.5 some more."""
    rng = np.random.default_rng(2)
    for cv, at_double, at_half_more in ((0.45, 2, 4), (1.0, 4, 12)):
        assert not panes_until_alarm(rng, 1.0, cv, runs=20, most=1000).any()
        assert np.median(panes_until_alarm(rng, 2.0, cv, runs=40, most=20)) <= at_double
        assert 1 <= np.median(panes_until_alarm(rng, 1.5, cv, runs=40, most=60)) <= at_half_more


@pytest.mark.slow
def test_a_capped_pass_takes_a_fraction_of_the_sequences_of_an_uncapped_one():
    """At half the limit: five limits as the cap against the whole range."""
    rng = np.random.default_rng(3)
    capped = np.median(sequences_until_pass(rng, 0.5, 1.0, 5 * LIMIT, runs=20, most=2000))
    whole = np.median(sequences_until_pass(rng, 0.5, 1.0, 1.0, runs=20, most=20_000))
    assert 60 <= capped <= 200
    assert whole > 20 * capped


def test_a_pass_is_false_less_often_than_alpha():
    """At the limit, looked at after every pane of 20 for 200 panes, a PASS comes in at most one of ten runs."""
    rng, runs = np.random.default_rng(4), 300
    gate, ever = SequentialPass.fresh(runs), np.zeros(runs, dtype=bool)
    for _ in range(200):
        gate = gate.updated(pane(rng, LIMIT, 0.45, runs), UPPER, limit=LIMIT, cap=5 * LIMIT)
        ever |= gate.log_evidence >= math.log(10)
    assert ever.mean() <= 0.1


COUNTS = [[1, 2]]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: EDetector.fresh(1).updated([[1, -2]], [0, 1], limit=1), "counts: -2"),
        (lambda: EDetector.fresh(1).updated([[1, math.nan]], [0, 1], limit=1), "counts: nan"),
        (
            lambda: EDetector.fresh(1).updated(COUNTS, [0, 1, 2], limit=1),
            r"counts, lower: have shapes \(1, 2\) and \(3,\)",
        ),
        (lambda: EDetector.fresh(2).updated(COUNTS, [0, 1], limit=1), r"pass \[2, buckets\]"),
        (lambda: EDetector.fresh(1).updated(COUNTS, [0, 1], limit=0.0), r"limit: 0\.0"),
        (lambda: EDetector.fresh(1).updated(COUNTS, [0, 1], limit=math.nan), "limit: nan"),
        (lambda: EDetector.fresh(1).updated(COUNTS, [-1, 1], limit=1), r"lower: -1\.0"),
        (lambda: EDetector.fresh(1).updated(COUNTS, [0, math.nan], limit=1), "lower: nan"),
        (lambda: EDetector.fresh(1).alarmed(panes=0.5), r"panes: 0\.5"),
        (lambda: alarm_level(100, 0), r"cells: 0\.0"),
        (lambda: SequentialPass.fresh(1).updated(COUNTS, [1, 2], limit=1, cap=1.0), r"cap: 1\.0"),
        (lambda: SequentialPass.fresh(1).updated(COUNTS, [1, math.nan], limit=1, cap=2.0), "upper: nan"),
        (lambda: SequentialPass.fresh(1).passed(alpha=1.0), r"alpha: 1\.0"),
    ],
)
def test_bad_columns_are_refused_by_name(call, says):
    """A ValueError names the argument and shows its value."""
    with pytest.raises(ValueError, match=says):
        call()
