"""Minimum requirements of a gate, with identical kernels: observations, and time.

Real kernels need more. A contract whose gate can never open is found here before anybody waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import Unit
from kc_otel.contract.slices import ALL
from kc_otel.contract.units import format_duration
from kc_otel.contract.words import did_you_mean, spoken
from kc_otel.judge.promotion.stages import Position, Stage, path_of
from kc_otel.judge.sample_sizes import observations_to_pass
from kc_otel.judge.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Traffic:
    """Expected traffic of a gate."""

    tokens_per_second: float | None
    """Those that the inference kernel generates; None when unknown."""
    sampling: float
    tokens_per_sequence: float | None
    shares: Mapping[str, float]
    """Part of the traffic in a slice, by its name; a slice that is not named has no known time."""


@dataclass(frozen=True, slots=True)
class Planned:
    """Minimum requirements of one cell of a gate."""

    clause: str
    slice: str
    observations: int | None
    """Fewest per window; None when no number lets the clause pass."""
    unit: str
    first: float
    """Seconds until there are as many; nan when it cannot be told, inf when never."""
    seconds: float | None
    """Until the gate's last window can pass; None when it cannot be told, inf when never."""
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
            count = None if needed.observations is None else max(needed.observations, needed.minimum)
            if count is None:
                why = "not even identical kernels can show that this limit is kept; loosen it"
                found.append(Planned(clause.id, slice, None, needed.unit, math.inf, math.inf, why))
                continue
            rate, why = _rate(traffic, slice, needed.unit)
            first = math.nan if rate is None else count / rate
            seconds = None if rate is None else _seconds(contract, first, windows)
            if seconds == math.inf:
                why = (
                    f"about {spoken(first)} of traffic do not fit into the long window of "
                    f"{format_duration(contract.observability.long_window)}; sample more, or lengthen it"
                )
            found.append(Planned(clause.id, slice, count, needed.unit, first, seconds, why))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """Shortest time that a version stays in a position."""

    position: Position
    seconds: float | None
    """Until its gate can open; None when it cannot be told, inf when never."""
    slowest: str
    """`clause on slice` that takes longest; empty when the time is not known."""
    why: str
    """Why it can never open, or what the time leaves out because it cannot be told; empty otherwise."""


def plan_steps(contract: Contract, traffic: Traffic) -> tuple[PlannedStep, ...]:
    """Return the minimum duration of a promotion, position by position: shadow, and each step of the canary.

    A window counts in a position only when all of its data are from there, so each takes a whole window, however soon
    its observations are together. In shadow every request is mirrored; in the canary the version sees its share.
    """
    found = []
    windows = contract.promotion.windows
    for position in path_of(contract.promotion):
        if position.stage in {Stage.OFFLINE_CI, Stage.FULL}:
            continue
        share = position.share if position.stage is Stage.CANARY else 1.0
        planned = plan_gate(contract, replace(traffic, sampling=traffic.sampling * share), windows)
        never = next((cell for cell in planned if cell.never), None)
        if never is not None:
            found.append(PlannedStep(position, math.inf, "", f"{never.clause} on {never.slice}: {never.why}"))
            continue
        unknown = [f"{cell.clause} on {cell.slice}: {cell.why}" for cell in planned if cell.seconds is None]
        timed = [cell for cell in planned if cell.seconds is not None]
        if not timed:
            found.append(PlannedStep(position, None, "", unknown[0]))
            continue
        slowest = max(timed, key=lambda cell: cell.first)
        watched = contract.observability
        window = watched.window if slowest.first <= watched.window else watched.long_window
        where = f"{slowest.clause} on {slowest.slice}"
        found.append(PlannedStep(position, windows * window, where, unknown[0] if unknown else ""))
    return tuple(found)


def observed_traffic(contract: Contract, verdicts: Sequence[Verdict]) -> Traffic:
    """The traffic that an evaluation has seen, of all kernel versions together.

    The contract's share of measured batches is taken to be the one that recorders keep.
    """
    watched, shares = contract.observability, dict[str, float]()
    lengths = {"short": watched.window, "long": watched.long_window}
    rates: dict[tuple[str, str], float] = {}
    for verdict in verdicts:
        if verdict.window in lengths:
            key = (verdict.cell.clause, verdict.cell.slice)
            rates[key] = rates.get(key, 0.0) + verdict.samples / lengths[verdict.window]
    tokens = [
        clause.id for clause in contract.clauses if clause.quantity is not None and clause.quantity.per is Unit.TOKEN
    ]
    # Prompts are counted as sequences: how many rollouts each has, verdicts do not say.
    own = {Unit.SEQUENCE, Unit.PROMPT}
    sequences = [clause.id for clause in contract.clauses if clause.quantity is not None and clause.quantity.per in own]
    total = max((rates.get((name, ALL), 0.0) for name in tokens), default=0.0)
    per_sequence = max((rates.get((name, ALL), 0.0) for name in sequences), default=0.0)
    for slice in contract.slices:
        rate = max((rates.get((name, slice), 0.0) for name in tokens), default=0.0)
        if total and rate:
            shares[slice] = min(1.0, rate / total)
    return Traffic(
        total / watched.sampling if total else None,
        watched.sampling,
        total / per_sequence if total and per_sequence else contract.assumptions.horizon,
        {ALL: 1.0} | shares,
    )


def shares_of(contract: Contract, texts: Sequence[str]) -> dict[str, float]:
    """Parts of the traffic by slice, from `SLICE=PART`; raises ValueError where a text is not of that form."""
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


def _rate(traffic: Traffic, slice: str, unit: str) -> tuple[float | None, str]:
    """Observations per second, or why that cannot be told; a prompt is taken to have one rollout."""
    if unit not in {"token", "sequence", "prompt"}:
        return None, f"the number of {unit}s does not follow from the number of tokens"
    if traffic.tokens_per_second is None:
        return None, "give --tokens-per-second"
    if slice not in traffic.shares:
        return None, f"give --share {slice}=PART of the traffic"
    tokens = traffic.tokens_per_second * traffic.sampling * traffic.shares[slice]
    if unit == "token":
        return tokens, ""
    if traffic.tokens_per_sequence is None:
        return None, "give --tokens-per-sequence"
    return tokens / traffic.tokens_per_sequence, ""


def _seconds(contract: Contract, first: float, windows: int) -> float:
    watched = contract.observability
    for window in (watched.window, watched.long_window):
        if first <= window:
            return first + (windows - 1) * window
    return math.inf
