"""Minimum requirements of a gate, with identical kernels: observations, and time. Real kernels need more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kc_otel.contract.model import Contract
from kc_otel.contract.units import format_duration
from kc_otel.contract.words import did_you_mean, spoken
from kc_otel.judge.sample_sizes import observations_to_pass


@dataclass(frozen=True, slots=True)
class Traffic:
    """Expected traffic of a gate: all tokens, None when unknown, the share that is measured, and slices' shares."""

    tokens_per_second: float | None
    sampling: float
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Planned:
    """Minimum requirements of one cell of a gate.

    `observations` is None when no number lets the clause pass; `seconds` until the last window can pass is None when it
    cannot be told, and inf when never. `why` says why it can never pass, or why the time is unknown.
    """

    clause: str
    slice: str
    observations: int | None
    unit: str
    seconds: float | None
    why: str

    @property
    def never(self) -> bool:
        """True if this cell prevents the gate from ever opening."""
        return self.observations is None or self.seconds == math.inf


def plan_gate(contract: Contract, traffic: Traffic, windows: int) -> tuple[Planned, ...]:
    """Return the minimum requirements of each clause on each slice.

    A clause has to pass in `windows` windows that share no data. It may do so on the short window, or on the long one,
    which then has to pass in between: the first takes as long as its observations, each further one a whole window.
    """
    found = []
    for clause in contract.clauses:
        for slice in contract.slices_for(clause):
            needed = observations_to_pass(contract, clause, slice)
            if needed.observations is None:
                why = "not even identical kernels can show that this limit is kept; loosen it"
                found.append(Planned(clause.id, slice, None, needed.unit, math.inf, why))
                continue
            count = max(needed.observations, needed.minimum)
            rate, why = _rate(contract, traffic, slice, needed.unit)
            seconds = None if rate is None else _seconds(contract, count / rate, windows)
            if rate is not None and seconds == math.inf:
                why = (
                    f"about {spoken(count / rate)} of traffic do not fit into the long window of "
                    f"{format_duration(contract.observability.long_window)}; sample more, or lengthen it"
                )
            found.append(Planned(clause.id, slice, count, needed.unit, seconds, why))
    return tuple(found)


def shares_of(contract: Contract, texts: Sequence[str]) -> dict[str, float]:
    """Parts of the traffic by slice, from `SLICE=PART`; a ValueError for another form, or another slice."""
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in contract.slices:
            raise ValueError(
                f"--share: the contract has no slice {name!r}; {did_you_mean(name, contract.slices, 'there are')}"
            )
        try:
            share = float(value)
        except ValueError:
            share = math.nan
        if not 0.0 < share <= 1.0:
            raise ValueError(f"--share: {value!r} is not a part of the traffic; write {name}=0.1 for a tenth")
        found[name] = share
    return found


def _rate(contract: Contract, traffic: Traffic, slice: str, unit: str) -> tuple[float | None, str]:
    """Observations per second, or why that cannot be told; prompts have one rollout, and rollouts the horizon."""
    if unit not in {"token", "sequence", "prompt"}:
        return None, f"the number of {unit}s does not follow from the number of tokens"
    if traffic.tokens_per_second is None:
        return None, "give --tokens-per-second"
    if slice not in traffic.shares:
        return None, f"give --share {slice}=PART of the traffic"
    tokens = traffic.tokens_per_second * traffic.sampling * traffic.shares[slice]
    if unit == "token":
        return tokens, ""
    horizon = contract.assumptions.horizon
    return (None, "state assumptions.horizon") if horizon is None else (tokens / horizon, "")


def _seconds(contract: Contract, first: float, windows: int) -> float:
    watched = contract.observability
    for window in (watched.window, watched.long_window):
        if first <= window:
            return first + (windows - 1) * window
    return math.inf
