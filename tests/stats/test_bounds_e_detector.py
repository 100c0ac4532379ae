"""E-detectors: the recursion, what histograms do to it, and the promises, exact and simulated."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kc_otel.stats import EDetector
from kc_otel.stats.e_detector import alarm_level

BETS = np.geomspace(1e-4, 0.9, 16)
LIMIT, SEQUENCES = 0.004, 20
FIRST, LAST = -320, 0
EDGES = np.exp2(np.arange(FIRST, LAST + 1) / 16)
"""Edges of the buckets of scale 4 from 2^-20 to 1; what is smaller is in the first, with the edge 0."""
LOWER, UPPER = np.r_[0.0, EDGES], np.r_[EDGES, np.inf]
panes = st.lists(st.lists(st.floats(0, 1), min_size=0, max_size=5), min_size=1, max_size=6)


def columns(values):
    """Observations as a histogram of their own values: counts [1, buckets] and edges."""
    edges, counts = np.unique(np.array(values, dtype=float), return_counts=True)
    return counts[None], edges


def pane(rng, mean, cv, cells):
    """Bucket counts [cells, buckets] of a pane of sequences that drift by a gamma law."""
    drift = rng.gamma(cv**-2, mean * cv**2, (cells, SEQUENCES))
    with np.errstate(divide="ignore"):
        index = np.clip(np.ceil(np.log2(drift) * 16), FIRST, LAST + 1).astype(np.int64) - FIRST
    flat = (np.arange(cells)[:, None] * LOWER.size + index).ravel()
    return np.bincount(flat, minlength=cells * LOWER.size).reshape(cells, LOWER.size)


def after_pane(detector, counts, lower=LOWER, limit=LIMIT):
    """The detector after a pane of counts [cells, buckets]; a cell without observations stays as it was."""
    held = np.asarray(counts, dtype=np.float64)
    return detector.opened(held.sum(axis=1) > 0).gained(held @ np.log1p(BETS * (lower[:, None] / limit - 1.0)))


def panes_until_alarm(rng, ratio, cv, *, runs, most):
    """Panes until each of `runs` cells alarms, at 10,000 panes between alarms of 20 cells; 0 where none does."""
    detector, alarm = EDetector.fresh(runs), np.zeros(runs, dtype=np.int64)
    for count in range(1, most + 1):
        detector = after_pane(detector, pane(rng, LIMIT * ratio, cv, runs))
        alarm[(alarm == 0) & (detector.log_evidence >= alarm_level(10_000, 20))] = count
    return alarm


@given(panes, st.floats(0.01, 0.9))
def test_the_detector_is_its_recursion(stream, limit):
    """M <- max(M, 1) times the pane's factors, for each bet, averaged; a pane without observations is no pane."""
    detector, sums = EDetector.fresh(1), np.ones(BETS.size)
    for values in stream:
        detector = after_pane(detector, *columns(values), limit)
        if values:
            sums = np.maximum(sums, 1) * np.prod([1 + BETS / limit * (x - limit) for x in values], axis=0)
    assert np.exp(detector.log_evidence[0]) == pytest.approx(sums.mean(), rel=1e-9)


def test_evidence_grows_by_less_than_one_a_pane_on_average_at_the_limit():
    """Over every outcome of panes of a coin at its limit, the mean of M is 1 after one pane and at most n after n."""
    for panes, expected in ((1, 1.0), (5, None)):
        mean = 0.0
        for outcome in itertools.product((0.0, 1.0), repeat=panes):
            detector = EDetector.fresh(1)
            for x in outcome:
                detector = after_pane(detector, *columns([x]), 0.25)
            mean += math.exp(detector.log_evidence[0]) * 0.25 ** sum(outcome) * 0.75 ** (panes - sum(outcome))
        assert mean == pytest.approx(expected) if expected else 1.0 < mean < panes


@pytest.mark.slow
@given(panes, st.floats(0.01, 0.9), st.floats(0.1, 6.0))
def test_clipping_leaves_no_more_than_the_level_and_raises_no_bet(stream, limit, level):
    """Also a pane that is taken in parts is what it is as a whole, as long as nothing is clipped in between."""
    detector, parts = EDetector.fresh(1), EDetector.fresh(1)
    for values in stream:
        counts, edges = columns(values)
        detector = after_pane(detector, counts, edges, limit)
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
            detector = after_pane(detector, pane(rng, ratio * LIMIT, 0.45, 1)).clipped(15.0)
        assert bool(detector.log_evidence[0] == pytest.approx(15.0)) is seen
    assert detector.log_evidence[0] < 0.0


@pytest.mark.slow
def test_false_alarms_are_rarer_than_promised_and_faults_are_found_at_once():
    """20 cells at their limit: 1,000 panes raise none; at twice the limit two to four do, at 1.5 some more."""
    rng = np.random.default_rng(2)
    for cv, at_double, at_half_more in ((0.45, 2, 4), (1.0, 4, 12)):
        assert not panes_until_alarm(rng, 1.0, cv, runs=20, most=1000).any()
        assert np.median(panes_until_alarm(rng, 2.0, cv, runs=40, most=20)) <= at_double
        assert 1 <= np.median(panes_until_alarm(rng, 1.5, cv, runs=40, most=60)) <= at_half_more


@pytest.mark.parametrize(("panes", "cells"), [(1, 1), (10_000, 1), (10_000, 20), (1, 20)])
def test_the_level_is_that_of_all_cells_together(panes, cells):
    assert alarm_level(panes, cells) == pytest.approx(math.log(panes) + math.log(cells))
