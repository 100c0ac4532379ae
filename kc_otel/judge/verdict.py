"""The evaluator's output: a verdict for every cell, with everything that decided it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

from kc_otel.contract.clause import About
from kc_otel.contract.words import interval, number


class Status(StrEnum):
    """Three values, silence, and what is no sample of the kernels. Alarms fire on FAIL, promotion asks for PASS."""

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


class Cell(NamedTuple):
    """Subject of a verdict: a clause on a slice for one pair of kernel versions.

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
        cell: Cell that was judged.
        status: PASS, FAIL, INCONCLUSIVE, NO_DATA or INVALID_INPUT.
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
        about: `population` if it covers future traffic, too; `traffic` if it covers only the measured traffic.
        evidence: Evidence against the limit, in 0..1: chance alone reaches 1 once per `false_alarms`
            at most, in any cell of the contract; nan where no such thing can be held, and where samples are judged
            once.
        observed: Whether any observation of the cell is remembered: silence is news only where there was something.
        ended: Whether what a FAIL said of the cell has ended, although it has not passed since.
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
    ended: bool = False

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

    estimate: float
    lower: float
    upper: float

    def __str__(self) -> str:
        sides = (side if math.isfinite(side) else None for side in (self.lower, self.upper))
        return f"{number(self.estimate)} ({interval(*sides)})"


@dataclass(frozen=True, slots=True)
class OfLag:
    """A clause's mean over what weights of some lags sampled.

    Attributes:
        lag: Versions that they were behind: `0`, `1`, `2-3`, `4-7` or `8+`.
        share: Share of the observations; of a clause by prompt, of the tokens.
        estimate: The mean.
        lower: Lower bound.
        upper: Upper bound.
    """

    lag: str
    share: float
    estimate: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class Causes:
    """Split of a clause's mean over everything sampled into its causes.

    Attributes:
        clause: id of the clause whose mean it is; that of a clause on the weights' lag is of another.
        limit: That clause's, on all traffic.
        share: Share of the observations that older weights sampled; of a clause by prompt, of the tokens.
        total: The mean over all of them.
        kernel: The kernels' part: the mean over what the training kernel's weights sampled.
        staleness: Increase due to the age of the other weights.
        by_lag: The mean at each lag that was observed, the smallest first; a sequence's older tokens have the lag of
            the oldest.
    """

    clause: str
    limit: float
    share: float
    total: Part
    kernel: Part
    staleness: Part
    by_lag: tuple[OfLag, ...] = ()

    @property
    def text(self) -> str:
        """The cause to blame, as a phrase with its numbers.

        A part is to blame for itself where it alone is above the limit. Staleness is to blame, too, where it takes a
        total above the limit whose kernels' part is not.
        """
        numbers = f"kernel drift {self.kernel}, weights' age adds {self.staleness}, in total {self.total}"
        if math.isnan(self.kernel.estimate):
            return f"all of it was sampled by older weights, so kernel drift is not known; in total {self.total}"
        if self.kernel.lower > self.limit:
            what = "both grew" if self.staleness.lower > self.limit else "the kernels' drift grew"
            return f"{what}: {numbers}"
        if not (self.staleness.lower > 0.0 and self.total.lower > self.limit):
            return numbers
        own = "not the kernels' drift" if self.kernel.upper <= self.limit else "and the kernels' drift is undecided"
        return f"staleness grew, {own}: {numbers}"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Verdicts of one contract at one time.

    Attributes:
        at: Unix time, seconds.
        verdicts: Of every cell, of any kernel versions.
        steps: The trainer's newest step by pair of kernels, (training, inference), of those that tell it.
        causes: Split of a mean between the kernels and the weights' age, for cells on all traffic where older weights
        sampled some of it.
    """

    at: float
    verdicts: Sequence[Verdict] = ()
    steps: Mapping[tuple[str, str], int] = field(default_factory=dict)
    causes: Mapping[Cell, Causes] = field(default_factory=dict)

    def step_of(self, cell: Cell) -> int | None:
        """The trainer's step that a cell was judged at; None where nobody tells it."""
        return self.steps.get((cell.kernel_train, cell.kernel_inference))

    def of_kernel(self, version: str) -> Evaluation:
        """Return the part about one version of the inference kernel."""
        return Evaluation(
            self.at, tuple(verdict for verdict in self.verdicts if verdict.cell.kernel_inference == version)
        )

    def fails(self, version: str) -> bool:
        """Return True if anything FAILs for one version of the inference kernel."""
        return any(verdict.status is Status.FAIL for verdict in self.of_kernel(version).verdicts)
