"""Early stopping of a gate: as soon as the sequences so far decide it, in either direction.

The bounds are betting confidence sequences (`anytime` in `kc_otel.stats`), which hold at every number of sequences at
once, so that it costs no confidence to look again and again, and to stop where it suits. That takes sequences in an
order that says nothing of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from kc_otel.contract.model import Contract
from kc_otel.judge.promotion.stages import GateOutcome
from kc_otel.offline.gate.recorded_gate import GateTerms, gate_decision
from kc_otel.offline.gate.recorded_verdicts import by_contract, judge
from kc_otel.offline.gate.sampling_terms import in_force
from kc_otel.record.kernel import Kernel
from kc_otel.recordings.recording import Recording

_FIRST_LOOK: Final = 20
_LOOK_GROWTH: Final = 1.25
"""Each look costs a pass over all sequences so far: with this factor all together cost five times the last."""


def looks() -> Iterator[int]:
    """Numbers of sequences at which a gate looks.

    >>> from itertools import islice
    >>> list(islice(looks(), 5))
    [20, 25, 32, 40, 50]
    """
    number = _FIRST_LOOK
    while True:
        yield number
        number = math.ceil(number * _LOOK_GROWTH)


def decides(contract: Contract, recording: Recording, kernels: tuple[Kernel, Kernel], terms: GateTerms) -> bool:
    """Return True if the sequences so far decide the gate; clauses that no recording can judge do not delay it.

    Raises:
        ValueError: As of `gate_decision` and `in_force`.
    """
    in_force("the recording", recording, contract.promotion.sampling)
    pair = (kernels[0].fingerprint, kernels[1].fingerprint)
    found = judge(contract, by_contract(recording, contract), 0.0, pair, anytime=True)
    asked = replace(terms, windows=1, require=terms.require or tuple({judged.cell.clause for judged in found.verdicts}))
    return gate_decision(contract, [found], pair[1], asked, 0.0).outcome is not GateOutcome.WAIT


def stops_after(
    contract: Contract, recording: Recording, kernels: tuple[Kernel, Kernel], terms: GateTerms
) -> int | None:
    """Sequences of a recording, in its order, after which a gate would have stopped; None for no such place."""
    there = recording.lengths.size
    for number in looks():
        so_far = min(number, there)
        first = recording.only(np.arange(there) < so_far, np.zeros(len(recording.masked), dtype=np.bool_))
        if decides(contract, first, kernels, terms):
            return so_far
        if so_far == there:
            return None
    return None
