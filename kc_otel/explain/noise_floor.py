"""The noise floor: what the limited statistics are on a recording of a kernel pair that is as good as it gets.

Such as the training kernel against itself in another batch, or the real pair at a learning rate of 0. A limit that this
recording already breaks would fail for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.registry import Unit
from kc_otel.contract.slices import ALL
from kc_otel.judge.statistics import clause_interval
from kc_otel.record.measure.sampled import SEQUENCE, TOKEN, log_ratio
from kc_otel.recordings.recording import Recording
from kc_otel.stats import Binned, Interval

__all__ = ["NoiseFloor", "floors"]

LimitSide = Literal["above", "below", "open"]


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """A clause's statistic on a recording.

    Attributes:
        clause: Id of the clause.
        slice: The slice.
        limit: The clause's limit there.
        estimate: The statistic on the recording.
        lower: Lower confidence bound.
        upper: Upper confidence bound: the floor.
        samples: Observations that it rests on.
        unit: What an observation is: token or sequence.
    """

    clause: str
    slice: str
    limit: float
    estimate: float
    lower: float
    upper: float
    samples: int
    unit: str

    @property
    def limit_side(self) -> LimitSide:
        """Whether the limit is above the floor, below it (it fails for ever), or open: the recording is too short."""
        if self.lower > self.limit:
            return "below"
        return "above" if self.upper <= self.limit else "open"


def floors(contract: Contract, recording: Recording) -> tuple[NoiseFloor, ...]:
    """The floor of each clause that log-probabilities decide, on every slice of which the recording has sequences.

    Args:
        contract: The contract: clauses, slices, confidence.
        recording: Log-probabilities of both sides.
    """
    return tuple(_floors(contract, recording))


def _floors(contract: Contract, recording: Recording) -> Iterable[NoiseFloor]:
    alpha = (1.0 - contract.observability.confidence) / 2.0
    log_w = np.asarray(log_ratio(recording.train, recording.inference))
    members = [contract.slices_of(attributes) for attributes in recording.attributes]
    for slice in (ALL, *contract.slices):
        chosen = np.array([slice in names for names in members], dtype=bool)
        if not chosen.any():
            continue
        for clause in contract.clauses:
            values = _values(clause, log_w, recording, chosen)
            if values is None:
                continue
            interval: Interval = clause_interval(
                clause, contract.assumptions, Binned.of_samples(values), alpha_lower=alpha, alpha_upper=alpha
            )
            yield NoiseFloor(
                clause.id,
                slice,
                clause.limit_for(slice),
                interval.estimate,
                interval.lower,
                interval.upper,
                interval.samples,
                str(clause.quantity.per) if clause.quantity else "",
            )


def _values(
    clause: Clause, log_w: NDArray[np.float64], recording: Recording, chosen: NDArray[np.bool_]
) -> NDArray[np.float64] | None:
    """Observations of a clause's quantity in the chosen sequences; None where log-probabilities do not give it."""
    if clause.quantity is None:
        return None
    key = clause.quantity.key.removesuffix("_by_sequence")
    lengths = recording.lengths
    if key in TOKEN:
        tokens = np.asarray(TOKEN[key](log_w), dtype=np.float64)
        if clause.quantity.per is Unit.TOKEN:
            return tokens[np.repeat(chosen, lengths)]
        return (np.add.reduceat(tokens, recording.starts) / lengths)[chosen]
    if key in SEQUENCE:
        sums = np.add.reduceat(log_w, recording.starts)
        return np.asarray(SEQUENCE[key](sums, lengths), dtype=np.float64)[chosen]
    return None
