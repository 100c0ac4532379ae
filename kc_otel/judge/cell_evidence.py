"""The evidence on a cell and its sample in a window, from which verdicts are made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from kc_otel.contract.clause import About, Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import Unit
from kc_otel.judge.statistics import samples_needed
from kc_otel.judge.verdict import Cell, Status
from kc_otel.stats import Binned, Interval

Window = Literal["short", "long"]
_NAMED_UNITS: Final = frozenset({Unit.SEQUENCE, Unit.PROMPT, Unit.STEP})
"""Units that sentences name; other observations are samples."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Evidence against a cell's limit, where its observations are followed over time.

    Attributes:
        share: In 0..1, of what an alarm takes; nan where nothing can be held.
        failing: Whether it was 1, and nothing has cleared the cell since.
        since: Content of a window after it was last 1; None where a window cannot reach back to that.
        ended: Whether what it was 1 for has ended: "still as it was" is refuted, and what came since keeps the limit.
        improved: Mean of a fault that has not ended before and after it improved last, in limits.
    """

    share: float
    failing: bool
    since: Callable[[Window], Binned] | None = None
    ended: bool = False
    improved: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything known about a cell at the time it is judged.

    Attributes:
        cell: The cell.
        clause: Its clause.
        sample: The observations in a window, the same object until they change; asked for only where they are needed.
        absence: Why there is nothing to judge, as a sentence; empty when there is something.
        alarm: Evidence against the limit; None where samples are judged once.
        observed: Whether any observation is remembered, of the windows or from before them.
        anytime: Whether the sample is looked at as it grows, so that its bounds have to hold at all sizes at once.
        broken: Which assumption of the clause the data breaks, in words: it does not PASS then.
    """

    cell: Cell
    clause: Clause
    sample: Callable[[Window], Binned]
    absence: str = ""
    alarm: Alarm | None = None
    observed: bool = True
    anytime: bool = False
    broken: str = ""

    @property
    def detected(self) -> bool:
        """True if a FAIL rests on the evidence held against the limit."""
        return self.alarm is not None and not math.isnan(self.alarm.share)

    @property
    def failing(self) -> bool:
        """True if the evidence against the limit was enough for an alarm and nothing has cleared the cell since."""
        return self.detected and self.alarm is not None and self.alarm.failing


class Terms(NamedTuple):
    """Terms of a clause on a slice.

    Attributes:
        limit: In the unit of its metric.
        needed: Observations without which it cannot pass.
        allows_none: Whether one observation breaks the promise, and while none does it holds: no sample bounds a share
            by 0.
        fails_at_once: Whether too few observations to pass may be enough to fail: what was observed above a maximum is
            a fact, while a few below it say nothing of the next.
        what: Name of the observations, in the plural.
        about: Subject of the verdict's sentence.
    """

    limit: float
    needed: int
    allows_none: bool
    fails_at_once: bool
    what: str
    about: About

    @classmethod
    def of(cls, contract: Contract, clause: Clause, slice: str) -> Terms:
        """The terms of a clause on a slice."""
        none, quantity = clause.allows_none(slice), clause.quantity
        return cls(
            limit=clause.limit_for(slice),
            needed=samples_needed(clause, contract.observability),
            allows_none=none,
            fails_at_once=none or clause.parsed_statistic.kind == "max",
            what=f"{quantity.per}s" if quantity is not None and quantity.per in _NAMED_UNITS else "samples",
            about=clause.about,
        )


class JudgedWindow(NamedTuple):
    """A cell on one window."""

    evidence: Evidence
    window: Window
    terms: Terms
    level: float
    interval: Interval
    status: Status
