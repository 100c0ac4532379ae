"""What one look at a limit says of many histograms, against their bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from kc_otel.stats import Buckets, ExponentialHistogram
from kc_otel.stats.histogram_rows import rows_of
from kc_otel.stats.interval_rows import IntervalRows, fraction_intervals, mean_intervals, quantile_intervals
from kc_otel.stats.mean_rows import MeanRows
from kc_otel.stats.within_limits import fractions_within, means_within, quantiles_within
from tests.stats.test_interval_rows import ALPHAS, samples
from tests.stats.test_interval_rows import RANGES as USUAL

RANGES = {**USUAL, "signed, cut": {"low": -np.inf, "high": np.inf, "cap": 0.36, "cut": True}}

BOUNDS: dict[str, tuple[Callable[..., IntervalRows], Callable[..., np.ndarray]]] = {
    **{of: (partial(mean_intervals, **ends), partial(means_within, **ends)) for of, ends in RANGES.items()},
    **{
        f"p{100 * rank}": (partial(quantile_intervals, rank=rank), partial(quantiles_within, rank=rank))
        for rank in (0.5, 0.99, 0.999, 1e-4)
    },
    **{
        f"above {at}": (partial(fraction_intervals, above=at), partial(fractions_within, above=at))
        for at in (0.0, 0.0078125, 0.01, 5.0)
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDS)
def test_one_look_at_a_limit_says_what_the_bound_says(name: str) -> None:
    """Within it is only what has its bound there, and all that has it clearly below."""
    intervals, within = BOUNDS[name]
    decided = 0
    for rows in rows_of(samples(5, 400)):
        found = intervals(rows, **ALPHAS)
        bounded = np.where(np.isfinite(found.upper), found.upper, 1.0)
        room = np.maximum(np.abs(bounded), 1e-3)
        for more in (-0.5, -1e-3, -1e-9, 0.0, 1e-9, 1e-3, 0.5):
            limits = bounded + more * room
            said = within(rows, limits=limits, alpha_upper=ALPHAS["alpha_upper"])
            assert not (said & (found.odd | (found.upper > limits))).any()
            if more > 1e-6:
                assert (said | found.odd | (found.upper >= most(name)) | (limits >= most(name))).all()
            decided += int(np.count_nonzero(said))
    assert decided > 100 or name == "p0.01"


def most(name: str) -> float:
    """What no bound is above, and no test can say anything about."""
    if name in RANGES:
        return min(RANGES[name]["high"], RANGES[name]["cap"])
    return 1.0 if name.startswith("above") else np.inf


@pytest.mark.parametrize("name", RANGES)
def test_at_upper_edges_bets_have_won_less(name: str) -> None:
    """What is looked at first refutes no limit that the sums do not refute."""
    for rows in rows_of(samples(7, 300)):
        means = MeanRows(rows, **{"cut": False, **RANGES[name]})
        usual = ~means.odd
        assert usual.any()
        scores, most = means.at_upper_edges(0.005)
        assert (scores <= means.scores_above(0.005) + 1e-9 * rows.total[:, None])[usual].all()
        if not means.cuts:
            assert (np.fmax(most, rows.sum / rows.total) >= means.most - 1e-12 * np.abs(means.most)).all()


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("more", [1.01, 1.5, 10.0, np.nan, np.inf, -np.inf, 0.5, -3.0])
def test_a_forged_sum_is_not_within_what_its_bound_is_not(name: str, more: float) -> None:
    """Sums beyond what the bins allow, in very many observations, at limits beside the bound and the mean."""
    decided = 0
    for rows in rows_of([[crowd(part, more)] for parts in samples(9, 200) for part in parts]):
        found = mean_intervals(rows, **RANGES[name], **ALPHAS)
        for limits in (found.upper * (1.0 - 1e-6), found.upper - 1e-6, found.upper + 1e-6, found.upper * 2.0):
            said = means_within(rows, limits, **RANGES[name], alpha_upper=ALPHAS["alpha_upper"])
            assert not (said & (found.odd | (found.upper > limits + 1e-12))).any()
            decided += int(np.count_nonzero(said))
    assert decided or name == "share"


def crowd(part: ExponentialHistogram, more: float) -> ExponentialHistogram:
    """The same a million times, with its sum times something."""
    sides = (Buckets(side.offset, side.counts * 10**6) for side in (part.positive, part.negative))
    sizes = {"count": part.count * 10**6, "zero_count": part.zero_count * 10**6, "sum": part.sum * 10**6 * more}
    return replace(part, positive=next(sides), negative=next(sides), **sizes)


@pytest.mark.parametrize("number", [1, 2, 5])
def test_few_observations_are_within_nothing(number: int) -> None:
    """Where a bound does not exist no limit says that it does."""
    few = [[part] for parts in samples(8, 4000) for part in parts if part.count == number]
    for rows in rows_of(few):
        assert not quantiles_within(rows, 0.99, np.full(rows.total.size, 1e9), alpha_upper=0.005).any()
    assert few
