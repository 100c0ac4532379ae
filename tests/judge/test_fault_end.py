"""When faults end: simulated faults that last, end, improve, or hide in a tail; and what is kept of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kc_otel.judge.fail_evidence import HeldEvidence
from kc_otel.judge.fault_end import Fault
from kc_otel.judge.plain_json import read_json, to_json
from kc_otel.judge.statistics import MeanTest
from kc_otel.record.telemetry.buckets import QuantityStream, cells
from kc_otel.stats import Histogram

LIMIT = 0.004
PANE = 20
TEST = MeanTest(LIMIT, low=0.0, cap=1.0)
ALPHA = 0.01


def histogram(values: np.ndarray) -> Histogram:
    """Observations as a recorder has them."""
    stream = QuantityStream(1, cells().slots)
    stream.add(np.minimum(values, 1.0), np.ones((values.size, 1), dtype=bool))
    found = stream.histogram(0)
    assert found is not None
    return found


def pane(rng: np.random.Generator, cv: float, ratio: float) -> Histogram:
    """Drifts with a mean of so many limits, gamma distributed."""
    return histogram(rng.gamma(cv**-2, ratio * LIMIT * cv**2, PANE))


def taken(fault: Fault, rng: np.random.Generator, cv: float, ratio: float, most: int) -> float:
    """Observations until the fault ends; inf if it does not."""
    for count in range(1, most + 1):
        if fault.take([pane(rng, cv, ratio)], TEST, ALPHA):
            return count * PANE
    return math.inf


@pytest.mark.slow
@pytest.mark.parametrize("cv", [0.5, 1.0, 2.6])
@pytest.mark.parametrize("ratio", [1.5, 2.0, 5.0])
def test_a_fault_that_lasts_is_never_ended(cv: float, ratio: float) -> None:
    """Four runs of 150 panes each, whatever looks like a recovery on the way."""
    rng = np.random.default_rng(11)
    for _ in range(4):
        assert taken(Fault(pane(rng, cv, ratio)), rng, cv, ratio, 150) == math.inf


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cv", "after", "most"),
    [(0.5, 0.25, 100), (0.5, 0.5, 140), (0.5, 0.8, 200), (1.0, 0.25, 140), (1.0, 0.5, 200), (1.0, 0.8, 400)],
)
def test_a_fault_that_is_repaired_ends_within_some_hundred_observations(cv: float, after: float, most: int) -> None:
    """The median of nine faults of one and a half to five limits that lasted for 20 panes of 20 observations."""
    rng = np.random.default_rng(12)
    found = []
    for ratio in (1.5, 2.0, 5.0) * 3:
        fault = Fault(pane(rng, cv, ratio))
        assert taken(fault, rng, cv, ratio, 20) == math.inf
        found.append(taken(fault, rng, cv, after, 200))
    assert np.median(found) <= most


def test_a_partial_recovery_does_not_end_it_and_is_told() -> None:
    """From five to twice the limit: means before and after are near the truth, and a full recovery ends it later."""
    rng = np.random.default_rng(13)
    fault = Fault(pane(rng, 0.5, 5.0))
    assert taken(fault, rng, 0.5, 5.0, 10) == math.inf
    assert fault.improved is None
    assert taken(fault, rng, 0.5, 2.0, 60) == math.inf
    assert fault.improved == (pytest.approx(5.0, rel=0.15), pytest.approx(2.0, rel=0.25))
    assert taken(fault, rng, 0.5, 0.5, 60) < math.inf


def test_a_fault_in_the_tail_is_not_ended_while_the_tail_is_there() -> None:
    """One in fifty sequences is off by everything, and the others are within the limit."""
    rng = np.random.default_rng(14)

    def drift(broken: bool) -> Histogram:
        values = rng.gamma(4.0, 0.5 * LIMIT / 4.0, PANE)
        return histogram(np.where((rng.random(PANE) < 0.02) & broken, 1.0, values))

    whole = [drift(True) for _ in range(4)]
    fault = Fault(Histogram.union(whole))
    assert not any(fault.take([drift(True)], TEST, ALPHA) for _ in range(150))
    assert any(fault.take([drift(False)], TEST, ALPHA) for _ in range(150))


def test_nothing_that_arrives_changes_nothing() -> None:
    fault = Fault(histogram(np.full(3, 0.1)))
    assert not fault.take([], TEST, ALPHA)
    assert not fault.take([Histogram.empty(4)], TEST, ALPHA)
    assert (fault.run, fault.begun) == (None, 0)


def test_a_fault_is_stored_with_what_is_known_of_its_recovery() -> None:
    rng = np.random.default_rng(15)
    fault = Fault(pane(rng, 0.5, 5.0))
    for ratio, panes in ((5.0, 3), (2.0, 60), (0.5, 2)):
        taken(fault, rng, 0.5, ratio, panes)
        data = to_json(HeldEvidence(TEST, fault=fault, ended=False))
        found = read_json(HeldEvidence, data)
        assert to_json(found) == data
        assert found.fault is not None
        assert (found.fault.begun, found.fault.improved) == (fault.begun, fault.improved)
    assert read_json(HeldEvidence, to_json(HeldEvidence(TEST, ended=True))).ended
