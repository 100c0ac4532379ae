"""When a gate may stop: as soon as the sequences so far decide it, in either direction.

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
from kc_otel.recordings import Recording

__all__ = ["decides", "looks", "stops_after"]

_FIRST: Final = 20
_GROWTH: Final = 1.25
"""Each look costs a pass over all sequences so far: with this factor all together cost five times the last."""


def looks() -> Iterator[int]:
    """Numbers of sequences at which a gate looks.

    >>> from itertools import islice
    >>> list(islice(looks(), 5))
    [20, 25, 32, 40, 50]
    """
    number = _FIRST
    while True:
        yield number
        number = math.ceil(number * _GROWTH)


def decides(contract: Contract, recording: Recording, kernels: tuple[Kernel, Kernel], terms: GateTerms) -> bool:
    """Whether the sequences so far decide the gate; clauses that no recording can be judged by do not hold it up.

    Args:
        contract: The contract in force.
        recording: All sequences so far.
        kernels: The training and the inference kernel.
        terms: What the gate asks.

    Raises:
        ValueError: If no clause can be judged by such a recording, an assumption is missing, or it was sampled
            otherwise than the contract allows.
    """
    in_force("the recording", recording, contract.promotion.sampling)
    pair = (kernels[0].fingerprint, kernels[1].fingerprint)
    found = judge(contract, by_contract(recording, contract), 0.0, pair, anytime=True)
    asked = replace(terms, windows=1, allow_unjudged=True)
    return gate_decision(contract, [found], pair[1], asked, 0.0).outcome is not GateOutcome.WAIT


def stops_after(
    contract: Contract, recording: Recording, kernels: tuple[Kernel, Kernel], terms: GateTerms
) -> int | None:
    """Sequences of a recording, in its order, after which a gate that stops would have stopped; None for no such place.

    Args:
        contract: The contract in force.
        recording: The recording.
        kernels: The training and the inference kernel.
        terms: What the gate asks.
    """
    there = recording.lengths.size
    for number in looks():
        so_far = min(number, there)
        first = recording.only(np.arange(there) < so_far, np.zeros(len(recording.masked), dtype=np.bool_))
        if decides(contract, first, kernels, terms):
            return so_far
        if so_far == there:
            return None
    return None
