"""What one look at a limit says of many histograms, against their bounds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from kc_otel.stats.histogram_rows import rows_of
from kc_otel.stats.interval_rows import IntervalRows, fraction_intervals, mean_intervals, quantile_intervals
from kc_otel.stats.mean_rows import MeanRows
from kc_otel.stats.within_limits import fractions_within, means_within, quantiles_within
from tests.stats.test_interval_rows import ALPHAS, RANGES, samples

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
    """What is looked at first refutes no limit that the sums do not refute, also where values are cut."""
    for rows in rows_of(samples(7, 300)):
        means = MeanRows(rows, **{"cut": False, **RANGES[name]})
        usual = ~means.odd
        assert usual.any()
        rounding = 1e-9 * rows.total[:, None]
        assert (means.scores_at_upper_edges(0.005) <= means.scores_above(0.005) + rounding)[usual].all()


@pytest.mark.parametrize("number", [1, 2, 5])
def test_few_observations_are_within_nothing(number: int) -> None:
    """Where a bound does not exist no limit says that it does."""
    few = [[part] for parts in samples(8, 4000) for part in parts if part.count == number]
    for rows in rows_of(few):
        assert not quantiles_within(rows, 0.99, np.full(rows.total.size, 1e9), alpha_upper=0.005).any()
    assert few
