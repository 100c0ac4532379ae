"""Which number format may train beside which may sample: one contract, and a recording for each pair of the two."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kc_otel.contract.model import Contract
from kc_otel.judge.verdict import Status, Verdict
from kc_otel.offline.gate.recorded_verdicts import UnjudgedClause, by_contract, judge
from kc_otel.offline.gate.sampling_terms import in_force
from kc_otel.recordings import Recording

__all__ = ["MatrixCell", "PrecisionMatrix", "judge_matrix"]

_WORST: Final = (Status.FAIL, Status.NO_DATA, Status.INCONCLUSIVE, Status.PASS)


@dataclass(frozen=True, slots=True)
class MatrixCell:
    """A pair of a trainer and a rollout.

    Attributes:
        status: The worst of its verdicts.
        worst: Among the verdicts of that status, the one that spends most of its limit.
        sequences: Sequences of its recording.
    """

    status: Status
    worst: Verdict
    sequences: int

    @property
    def spent(self) -> float:
        """Estimate of the worst verdict as a multiple of its limit; inf at a limit of 0, nan without an estimate."""
        return _spent(self.worst)


@dataclass(frozen=True, slots=True)
class PrecisionMatrix:
    """Every pair that was recorded.

    Attributes:
        trainers: Names of the training side, as they came.
        rollouts: Names of the inference side, as they came.
        cells: By (trainer, rollout); pairs without a recording are not there.
        left_out: Clauses that no recording could be judged by.
    """

    trainers: tuple[str, ...]
    rollouts: tuple[str, ...]
    cells: Mapping[tuple[str, str], MatrixCell]
    left_out: tuple[UnjudgedClause, ...]


def judge_matrix(contract: Contract, recordings: Mapping[tuple[str, str], Recording], now: float) -> PrecisionMatrix:
    """Judge each pair by itself, as a gate would.

    Args:
        contract: The contract.
        recordings: By (trainer, rollout): tokens that the rollout sampled, with both sides' log-probabilities.
        now: Unix time, seconds.

    Raises:
        ValueError: If a clause needs an assumption that the contract does not state, no clause can be judged,
            or a recording was sampled otherwise than the contract allows.
    """
    cells, left_out = {}, {}
    for pair, recording in recordings.items():
        in_force("/".join(pair), recording, contract.promotion.sampling)
        judged = judge(contract, by_contract(recording, contract), now)
        left_out.update({one.clause: one for one in judged.left_out})
        if not judged.verdicts:
            msg = f"{'/'.join(pair)}: no clause of {contract.name} can be judged by this recording"
            raise ValueError(msg)
        cells[pair] = _cell(judged.verdicts, int(recording.lengths.size))
    trainers, rollouts = (tuple(dict.fromkeys(pair[side] for pair in recordings)) for side in (0, 1))
    return PrecisionMatrix(trainers, rollouts, cells, tuple(left_out.values()))


def _cell(verdicts: Sequence[Verdict], sequences: int) -> MatrixCell:
    status = min((one.status for one in verdicts), key=_WORST.index)
    worst = max((one for one in verdicts if one.status is status), key=lambda one: _known(_spent(one)))
    return MatrixCell(status, worst, sequences)


def _spent(one: Verdict) -> float:
    if one.limit == 0.0:
        return math.inf if one.estimate > 0.0 else 0.0
    return one.estimate / one.limit


def _known(value: float) -> float:
    return -1.0 if math.isnan(value) else value
