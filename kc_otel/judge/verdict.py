"""What the evaluator says: a verdict for every cell, with everything that decided it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from kc_otel.contract.clause import About

__all__ = ["Cell", "Evaluation", "Status", "Verdict"]


class Status(StrEnum):
    """Three values and silence. Alarms fire on FAIL, promotion asks for PASS."""

    PASS = "PASS"  # noqa: S105 - a verdict, not a password
    INCONCLUSIVE = "INCONCLUSIVE"
    NO_DATA = "NO_DATA"
    FAIL = "FAIL"

    @property
    def code(self) -> int:
        """Value of the metric `kc.verdict`: 0 PASS, 1 INCONCLUSIVE, 2 NO_DATA, 3 FAIL."""
        return _CODES[self]


_CODES: Final = {status: code for code, status in enumerate(Status)}


class Cell(NamedTuple):
    """What a verdict is about: a clause on a slice for one pair of kernel versions.

    Attributes:
        contract: metadata.name.
        clause: id of the clause.
        slice: Name of the slice, or `all`.
        kernel_train: Short fingerprint; empty when none has reported yet.
        kernel_inference: Short fingerprint; empty when none has reported yet.
    """

    contract: str
    clause: str
    slice: str
    kernel_train: str = ""
    kernel_inference: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A clause's statistic on a slice, over a window, against its limit.

    Attributes:
        cell: What it is about.
        status: PASS, FAIL, INCONCLUSIVE or NO_DATA.
        at: Unix time of the evaluation, seconds.
        limit: Limit in the metric's unit.
        estimate: Point estimate of the statistic; nan without data.
        lower: Lower confidence bound; nan without data.
        upper: Upper confidence bound; nan without data.
        samples: Observations in the deciding window.
        window: Name of the deciding window, `short` or `long`; empty without data.
        method: Interval that decided, such as `mixture betting`.
        reason: One sentence a person can act on.
        contract_version: metadata.version.
        contract_hash: Content hash of the contract.
        about: `population` where it speaks of what the slice will show, `traffic` where of what this window saw only.
        evidence: What is held against the limit, in 0..1: at 1 it is what chance alone reaches once per `false_alarms`
            at most, in any cell of the contract; nan where no such thing can be held, and where samples are judged
            once.
        observed: Whether any observation of the cell is remembered: silence is news only where there was something.
    """

    cell: Cell
    status: Status
    at: float
    limit: float
    estimate: float
    lower: float
    upper: float
    samples: int
    window: str
    method: str
    reason: str
    contract_version: int
    contract_hash: str
    about: About
    evidence: float = math.nan
    observed: bool = True

    @property
    def margin(self) -> float:
        """Limit minus the bound that decides: the lower bound on FAIL, else the upper; negative is bad.

        0 on a PASS whose upper bound is above the limit: of what none may be, none was seen.
        """
        if self.status is Status.PASS and self.upper > self.limit:
            return 0.0
        return self.limit - (self.lower if self.status is Status.FAIL else self.upper)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was judged of one contract at one time.

    Attributes:
        at: Unix time, seconds.
        verdicts: Of every cell, of any kernel versions.
        steps: The trainer's newest step by pair of kernels, (training, inference), of those that tell it.
    """

    at: float
    verdicts: Sequence[Verdict] = ()
    steps: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def step_of(self, cell: Cell) -> int | None:
        """The trainer's step that a cell was judged at; None where nobody tells it."""
        return self.steps.get((cell.kernel_train, cell.kernel_inference))

    def of_kernel(self, version: str) -> Evaluation:
        """What is about one version of the inference kernel."""
        return Evaluation(self.at, tuple(one for one in self.verdicts if one.cell.kernel_inference == version))

    def fails(self, version: str) -> bool:
        """Whether anything FAILs for one version of the inference kernel."""
        return any(one.status is Status.FAIL for one in self.of_kernel(version).verdicts)
