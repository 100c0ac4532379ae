"""A fault in judging one cell or one contract stays there: the others are judged, and the fault is shown.

A cell that cannot be judged is NO_DATA, with a reason that names the evaluator's fault: an alert that fires goes on
firing, `on: no-data` fires, and no gate passes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from kc_otel.contract.model import Contract
from kc_otel.judge.verdict import Cell, Verdict
from kc_otel.judge.verdicts import Evidence, Memo, decide

_log: Final = logging.getLogger(__name__)
_MAX_QUOTED_CHARACTERS: Final = 200
"""Characters of an exception's message that are said."""


class Faults:
    """Current failures, by contract; each is logged when it begins and ends, and counted each time.

    Attributes:
        counts: Number of failures, by the contract's name; the empty name is for failures of no single contract.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._present: dict[tuple[str, str], tuple[object, str]] = {}

    @property
    def present(self) -> Mapping[str, str]:
        """Current failures in words, by the contract's name."""
        found: dict[str, str] = {}
        for (contract, _), (_, sentence) in sorted(self._present.items()):
            found[contract] = f"{found[contract]}; {sentence}" if contract in found else sentence
        return found

    def fails(self, contract: str, stage: str) -> bool:
        """Return whether a stage of the tick fails now."""
        return (contract, stage) in self._present

    def report(self, contract: str, stage: str, errors: Mapping[str, Exception]) -> None:
        """Say what failed in a stage of the tick, by where; nothing when all went well."""
        of = f"contract {contract}: {stage}" if contract else stage
        before = self._present.pop((contract, stage), None)
        if not errors:
            if before is not None:
                _log.warning("%s works again", of)
            return
        self.counts[contract] += len(errors)
        where, error = next(iter(errors.items()))
        more = f"; and {len(errors) - 1} more" if len(errors) > 1 else ""
        sentence = f"{stage} fails for {where}: {said(error)}{more}"
        kind = [(place, type(raised)) for place, raised in errors.items()]
        self._present[contract, stage] = (kind, sentence)
        if before is None or before[0] != kind:
            prefix = f"contract {contract}: " if contract else ""
            _log.error("%s%s; all else goes on, further ones are only counted", prefix, sentence, exc_info=error)


def said(error: Exception) -> str:
    """An exception in a few words."""
    return f"{type(error).__name__}: {error}"[:_MAX_QUOTED_CHARACTERS]


def unjudged(item: Evidence, error: Exception) -> Evidence:
    """A cell that cannot be judged."""
    return replace(item, absence=f"not judged: the evaluator failed ({said(error)}); its log has the cause")


def place_of(cell: Cell) -> str:
    """A cell in words."""
    kernels = " -> ".join(filter(None, (cell.kernel_train, cell.kernel_inference)))
    return f"clause {cell.clause} on slice {cell.slice}" + (f" of {kernels}" if kernels else "")


def decide_apart(
    contract: Contract, evidence: Sequence[Evidence], now: float, memo: Memo
) -> tuple[tuple[Verdict, ...], dict[str, Exception]]:
    """`decide`, without the cells for which it fails: these are NO_DATA.

    Returns:
        A verdict for every cell, and what failed, by where.

    Raises:
        Exception: If what fails is no single cell's.
    """
    try:
        return decide(contract, evidence, now, memo), {}
    except Exception:  # noqa: BLE001 - the cause is found below, and the caller reports it
        memo.clear()
    errors: dict[str, Exception] = {}
    sound = []
    for item in evidence:
        try:
            decide(contract, [item], now)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other cells are judged
            errors[place_of(item.cell)] = error
            sound.append(unjudged(item, error))
        else:
            sound.append(item)
    return decide(contract, sound, now), errors
