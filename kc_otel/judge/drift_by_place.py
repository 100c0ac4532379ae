"""Drift along the responses of a kernel pair: the mean of (1-w)+ by position and by turn, each with its interval.

The unit is the prompt: an observation is the mean over a prompt's tokens in the bin, so that bins are as sure as they
look though tokens and rollouts depend on each other. The same prompts are in several bins: each interval holds by
itself.
"""

from __future__ import annotations

from kc_otel.contract.registry.clause_metrics import TV_PLACE
from kc_otel.contract.slices import PLACES
from kc_otel.judge.contract_state import ContractState
from kc_otel.judge.series import LONG, SHORT, Pair
from kc_otel.stats import Interval, mean_interval


def drift_by_place(state: ContractState, pair: Pair, now: float) -> dict[str, Interval]:
    """The drift in each of PLACES that was observed, in the short window, and where that is empty in the long one.

    Args:
        state: State of the contract.
        pair: The kernels.
        now: Unix time in seconds.
    """
    alpha = (1.0 - state.contract.observability.confidence) / 2.0
    of = {place: state.pairs(TV_PLACE.name, place).get(pair) for place in PLACES}
    for window in (SHORT, LONG):
        found = {
            place: mean_interval(
                series.histories[window].binned(now), low=0.0, high=1.0, alpha_lower=alpha, alpha_upper=alpha
            )
            for place, series in of.items()
            if series is not None
        }
        if any(interval.samples for interval in found.values()):
            return {place: interval for place, interval in found.items() if interval.samples}
    return {}
