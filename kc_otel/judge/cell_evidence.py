"""What is known of a cell, and what a window says of it: what verdicts are made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kc_otel.contract.clause import About, Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.registry import Unit
from kc_otel.judge.histograms import Histogram
from kc_otel.judge.statistics import samples_needed
from kc_otel.judge.verdict import Cell, Status
from kc_otel.stats import Binned, Interval

__all__ = ["Alarm", "Evidence", "JudgedWindow", "Terms", "Window"]

Window = Literal["short", "long"]


@dataclass(frozen=True, slots=True)
class Alarm:
    """What is held against a cell's limit, as its observations are followed.

    Attributes:
        share: In 0..1, of what an alarm takes; nan where nothing can be held.
        failing: Whether it was 1, and nothing has cleared the cell since.
        since: What a window holds of the time after it was 1 last; None where a window cannot reach back to that.
    """

    share: float
    failing: bool
    since: Callable[[Window], Binned] | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a cell.

    Attributes:
        cell: The cell.
        clause: Its clause.
        sample: The observations in a window; asked for only where they are needed.
        absence: Why there is nothing to judge, as a sentence; empty when there is something.
        alarm: What is held against the limit; None where samples are judged once.
        observed: Whether any observation is remembered, of the windows or from before them.
        anytime: Whether the sample is looked at as it grows, so that its bounds have to hold at all sizes at once.
        parts: The histograms that a window's sample is merged of, the same object until they change; None where it is
            made of something else.
    """

    cell: Cell
    clause: Clause
    sample: Callable[[Window], Binned]
    absence: str = ""
    alarm: Alarm | None = None
    observed: bool = True
    anytime: bool = False
    parts: Callable[[Window], tuple[Histogram, ...]] | None = None

    @property
    def detected(self) -> bool:
        """Whether a FAIL rests on what is held against the limit."""
        return self.alarm is not None and not math.isnan(self.alarm.share)

    @property
    def failing(self) -> bool:
        """Whether what is held against the limit was enough for an alarm, and nothing has cleared the cell since."""
        return self.detected and self.alarm is not None and self.alarm.failing


class Terms(NamedTuple):
    """What a clause says on a slice.

    Attributes:
        limit: In the unit of its metric.
        needed: Observations without which it cannot pass.
        allows_none: Whether one observation breaks the promise, and while none does it holds: no sample bounds a share
            by 0.
        fails_at_once: Whether too few observations to pass may be enough to fail: what was observed above a maximum is
            a fact, while a few below it say nothing of the next.
        what: What an observation is, in the plural.
        about: What a verdict speaks of.
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
            what="sequences" if quantity is not None and quantity.per is Unit.SEQUENCE else "samples",
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
