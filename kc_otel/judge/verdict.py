"""The evaluator's output: a verdict for every cell, with everything that decided it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Final, NamedTuple

from pydantic import PlainSerializer

from kc_otel.contract.clause import About
from kc_otel.contract.words import NEXT_DUE, NOTHING_TO_MEASURE, interval, number
from kc_otel.judge.plain_json import finite_or_none

Number = Annotated[float, PlainSerializer(finite_or_none, return_type=float | None, when_used="json")]
"""A number that the API answers as null where it is not finite."""
INPUT_CLAUSE: Final = "input"
"""Clause of the pseudo cell that `on: invalid-input` steps watch; its slice is `all`."""


class Status(StrEnum):
    """Status of a cell: three verdicts, silence, and invalid input. Alarms fire on FAIL, promotion asks for PASS."""

    PASS = "PASS"  # noqa: S105 - a verdict, not a password
    INCONCLUSIVE = "INCONCLUSIVE"
    NO_DATA = "NO_DATA"
    FAIL = "FAIL"
    INVALID_INPUT = "INVALID_INPUT"

    @property
    def code(self) -> int:
        """Value of the metric `kc.verdict`: 0 PASS, 1 INCONCLUSIVE, 2 NO_DATA, 3 FAIL, 4 INVALID_INPUT."""
        return _CODES[self]


_CODES: Final = {status: code for code, status in enumerate(Status)}
MEASURED: Final = frozenset({Status.PASS, Status.INCONCLUSIVE, Status.FAIL})
"""Verdicts on observations."""


class FaultKind(NamedTuple):
    """A kind of fault that steps of a policy wait for: its verdict, and what ends it."""

    status: Status
    word: str
    """Beginning of a sentence that says that it is there."""
    alert: str
    """`alertname` in webhooks and rules."""
    held_by: tuple[Status, ...]
    """Verdicts that neither feed nor clear an alert: doubt and silence do not prove that a breach is over."""
    refuted_by: frozenset[Status]
    """Verdicts that show that it is over; that its cells are gone shows nothing."""


FAULTS: Final[Mapping[str, FaultKind]] = {
    "fail": FaultKind(
        Status.FAIL, "Broken", "KernelContractBroken", (Status.INCONCLUSIVE, Status.NO_DATA, Status.INVALID_INPUT),
        frozenset({Status.PASS, Status.INCONCLUSIVE}),
    ),
    "invalid-input": FaultKind(
        Status.INVALID_INPUT, "Invalid input", "KernelContractInvalidInput", (Status.INCONCLUSIVE, Status.NO_DATA),
        MEASURED,
    ),
    "no-data": FaultKind(Status.NO_DATA, "No data", "KernelContractNoData", (), MEASURED),
    "inconclusive": FaultKind(
        Status.INCONCLUSIVE, "Undecided", "KernelContractInconclusive", (Status.NO_DATA,),
        frozenset({Status.PASS, Status.FAIL}),
    ),
}  # fmt: skip
"""By the `on` of a step; the most urgent first."""


class Cell(NamedTuple):
    """Subject of a verdict: a clause on a slice for a pair of kernel versions, which are empty before one reports."""

    contract: str
    clause: str
    slice: str
    kernel_train: str = ""
    kernel_inference: str = ""

    @property
    def place(self) -> tuple[str, str]:
        """(clause, slice)."""
        return self.clause, self.slice

    @property
    def pair(self) -> tuple[str, str]:
        """Versions of the (training, inference) kernel."""
        return self.kernel_train, self.kernel_inference


@dataclass(frozen=True, slots=True)
class Verdict:
    """A clause's statistic on a slice, over a window, against its limit; estimate and bounds are nan without data."""

    cell: Cell
    status: Status
    at: float
    limit: float
    estimate: float
    lower: float
    upper: float
    samples: int
    window: str
    """The one that decided, `short` or `long`; empty without data."""
    method: str
    reason: str
    contract_version: int
    contract_hash: str
    about: About
    """`population` if it covers future traffic, too; `traffic` if it covers only the measured traffic."""
    evidence: float = math.nan
    """Against the limit, in 0..1: chance alone reaches 1 once per `false_alarms` at most, in any cell of the contract;
    nan where no such thing can be held, and where samples are judged once."""
    observed: bool = True
    """Whether any observation of the cell is remembered: silence is news only where there was something."""
    ended: bool = False
    """Whether what a FAIL said of the cell has ended, although it has not passed since."""

    @property
    def has_nothing_to_measure(self) -> bool:
        """True if it is NO_DATA because no sequence of it is to be measured: that is no alert."""
        return self.reason.startswith(NOTHING_TO_MEASURE)

    @property
    def wakes_nobody(self) -> bool:
        """True if it is NO_DATA and no alert: it has nothing to measure, or its next report is not due yet."""
        return self.has_nothing_to_measure or self.reason.startswith(NEXT_DUE)

    @property
    def margin(self) -> float:
        """Limit minus the bound that decides: the lower bound on FAIL, else the upper; negative is bad.

        0 on a PASS whose upper bound is above the limit: of what none may be, none was seen.
        """
        if self.status is Status.PASS and self.upper > self.limit:
            return 0.0
        return self.limit - (self.lower if self.status is Status.FAIL else self.upper)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a clause's mean, with its confidence interval; nan where nothing is known of it."""

    estimate: Number
    lower: Number
    upper: Number

    def __str__(self) -> str:
        return f"{number(self.estimate)} ({interval(*map(finite_or_none, (self.lower, self.upper)))})"


@dataclass(frozen=True, slots=True)
class OfLag(Part):
    """A clause's mean over the observations that weights within one range of lags sampled."""

    lag: str
    """Versions that they were behind: `0`, `1`, `2-3`, `4-7` or `8+`."""
    share: float
    """Of the observations; of a clause by prompt, of the tokens."""


@dataclass(frozen=True, slots=True)
class Causes:
    """Split of a clause's mean over everything sampled into its causes."""

    clause: str
    """The one whose mean it is; that of a clause on the weights' lag is of another."""
    limit: float
    share: float
    """Of the observations that older weights sampled; of a clause by prompt, of the tokens."""
    total: Part
    kernel: Part
    staleness: Part
    """Increase due to the age of the other weights."""
    by_lag: tuple[OfLag, ...] = ()
    """The smallest lag first; a sequence's older tokens have the lag of the oldest."""
    text: str = ""
    """The cause to blame, as a phrase with its numbers."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Verdicts of one contract at one time, on every cell, of any kernel versions."""

    at: float
    verdicts: Sequence[Verdict] = ()
    steps: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """The trainer's newest step by pair of kernels, (training, inference), of those that tell it."""
    causes: Mapping[Cell, Causes] = field(default_factory=dict)
    """For cells on all traffic where older weights sampled some of it."""
    passes_against: Mapping[Cell, str] = field(default_factory=dict)
    """For cells that FAIL while the same version passes against another training kernel, which one that is; empty where
    another version passes against theirs."""

    def step_of(self, cell: Cell) -> int | None:
        """The trainer's step that a cell was judged at; None where nobody tells it."""
        return self.steps.get((cell.kernel_train, cell.kernel_inference))

    def of_kernel(self, version: str) -> Evaluation:
        """Return the part about one version of the inference kernel."""
        verdicts = tuple(verdict for verdict in self.verdicts if verdict.cell.kernel_inference == version)
        return Evaluation(self.at, verdicts, passes_against=self.passes_against)

    def fails(self, version: str) -> bool:
        """Return True if anything FAILs for one version of the inference kernel."""
        return any(verdict.status is Status.FAIL for verdict in self.of_kernel(version).verdicts)
