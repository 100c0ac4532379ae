"""Verdicts as a pure function of the contract, the windows, the evidence and the clock.

Every cell is judged on the short window first. Where that cannot decide, the long window does. Each window gets half of
alpha = 1 - confidence. A PASS rests on an interval, and each cell stands alone, for a promotion asks that all of them
pass. Where observations are followed as they arrive, a FAIL rests on what they add up to against the limit
(`fail_evidence`): it comes when that reaches an alarm, and stays until it is gone, until what was observed since
passes, or until it is refuted that the fault is as it was (`fault_end`). Where they are judged once, as in a gate, or
nothing of the kind can be held, it rests on an interval too, and Holm's procedure over all such cells keeps the chance
of any false FAIL within alpha.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final, cast

from kc_otel.contract.model import Contract
from kc_otel.judge.cell_evidence import Evidence, JudgedWindow, Terms, Window
from kc_otel.judge.input_faults import INVALID_INPUT
from kc_otel.judge.statistics import clause_interval, intervals_of_rows
from kc_otel.judge.verdict import Cell, Status, Verdict
from kc_otel.judge.verdict_reasons import reason_of
from kc_otel.stats import Binned, ExponentialHistogram, Interval, holm
from kc_otel.stats.histogram_rows import rows_of

_MIN_CELLS_TOGETHER: Final = 8
"""Cells of a clause from which on their intervals are computed together."""
_MEMO_INTERVALS: Final = 4
"""Intervals per cell that a memo keeps: two windows, and as many of cells that are gone."""


def _status(item: Evidence, terms: Terms, interval: Interval) -> Status:
    few = interval.samples < terms.needed
    if interval.lower > terms.limit and (terms.fails_at_once or not few):
        return Status.INCONCLUSIVE if item.detected else Status.FAIL
    kept = interval.upper <= terms.limit or (terms.allows_none and interval.estimate == 0.0)
    return Status.PASS if kept and not few and not item.broken else Status.INCONCLUSIVE


class Memo:
    """Intervals of samples that have not changed since they were computed, and what the clauses of one contract say."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Cell, Window], tuple[object, float, float, Interval]] = {}
        self._terms: dict[tuple[str, str], Terms] = {}

    def terms(self, contract: Contract, item: Evidence) -> Terms:
        """Return the terms of a cell's clause on its slice."""
        where = (item.clause.id, item.cell.slice)
        known = self._terms.get(where)
        if known is None:
            known = self._terms[where] = Terms.of(contract, item.clause, item.cell.slice)
        return known

    def interval(
        self, contract: Contract, item: Evidence, window: Window, alpha_lower: float, alpha_upper: float
    ) -> Interval:
        """A cell's interval on a window."""
        sample = item.sample(window) if item.parts is None else item.parts(window)
        kept = self._kept.get((item.cell, window))
        if kept is not None and _same(kept[0], sample) and kept[1] == alpha_lower and kept[2] == alpha_upper:
            return kept[3]
        interval = clause_interval(
            item.clause,
            contract.assumptions,
            sample if isinstance(sample, Binned) else item.sample(window),
            alpha_lower=alpha_lower,
            alpha_upper=alpha_upper,
            anytime=item.anytime,
        )
        self._kept[item.cell, window] = (sample, alpha_lower, alpha_upper, interval)
        return interval

    def compute(
        self, contract: Contract, items: Iterable[Evidence], window: Window, alpha_lower: float, alpha_upper: float
    ) -> None:
        """Compute the intervals of many cells at once, where they are of exponential histograms and not yet known."""
        by_clause: dict[str, list[tuple[Evidence, tuple[ExponentialHistogram, ...]]]] = {}
        for item in items:
            if item.parts is None or item.anytime:
                continue
            parts, kept = item.parts(window), self._kept.get((item.cell, window))
            known = kept is not None and kept[0] is parts and kept[1] == alpha_lower and kept[2] == alpha_upper
            if parts and not known and isinstance(parts[0], ExponentialHistogram):  # and with it the others
                exponential = cast("tuple[ExponentialHistogram, ...]", parts)
                by_clause.setdefault(item.clause.id, []).append((item, exponential))
        for asked in by_clause.values():
            for rows in rows_of([parts for _, parts in asked]) if len(asked) >= _MIN_CELLS_TOGETHER else ():
                found = intervals_of_rows(
                    asked[0][0].clause, contract.assumptions, rows, alpha_lower=alpha_lower, alpha_upper=alpha_upper
                )
                for place, interval in zip(rows.places.tolist(), found or (), strict=found is not None):
                    if interval is not None:
                        item, parts = asked[place]
                        self._kept[item.cell, window] = (parts, alpha_lower, alpha_upper, interval)

    def clear(self) -> None:
        """Start over."""
        self._kept.clear()

    def forget(self, cells: int) -> None:
        """Start over when most of what is kept cannot be of the contract's `cells` cells any more."""
        if len(self._kept) > _MEMO_INTERVALS * cells:
            self.clear()


def decide(
    contract: Contract, evidence: Sequence[Evidence], now: float, memo: Memo | None = None
) -> tuple[Verdict, ...]:
    """A verdict for every cell of a contract, in the order given.

    Args:
        contract: The contract.
        evidence: All its cells: Holm's procedure has to know how many of them are judged once.
        now: Unix time in seconds.
        memo: Saves time where samples have not changed since the last call; it changes no verdict.
    """
    memo = memo or Memo()
    memo.forget(len(evidence))
    alpha = (1.0 - contract.observability.confidence) / 2.0
    live = [item for item in evidence if not item.absence]
    once = [item for item in live if not item.detected]
    followed = [item for item in live if item.detected]
    decided = {case.evidence.cell: case for case in _judged(contract, once, "short", alpha, len(once), memo)}
    open_ = [item for item in once if decided[item.cell].status is Status.INCONCLUSIVE]
    decided.update({case.evidence.cell: case for case in _judged(contract, open_, "long", alpha, len(once), memo)})
    memo.compute(contract, followed, "short", alpha, alpha)
    decided.update({item.cell: _followed(contract, item, alpha, memo) for item in followed})
    return tuple(
        _silence(contract, item, now, memo) if item.absence else verdict_of(contract, decided[item.cell], alpha, now)
        for item in evidence
    )


def _followed(contract: Contract, item: Evidence, alpha: float, memo: Memo) -> JudgedWindow:
    """A cell whose observations are followed: windows that begin after the last alarm, or why it still fails."""
    assert item.alarm is not None
    recent = item if item.alarm.since is None else replace(item, sample=item.alarm.since, parts=None)
    case = _case(contract, recent, "short", alpha, alpha, memo)
    # The longer window does not take back a breach in this one.
    above = case.interval.lower > case.terms.limit and case.interval.samples >= case.terms.needed
    if case.status is Status.INCONCLUSIVE and not above:
        case = _case(contract, recent, "long", alpha, alpha, memo)
    if not item.failing or case.status is Status.PASS:
        return case
    whole = _case(contract, item, "short", alpha, alpha, memo)
    if not whole.interval.samples:
        whole = _case(contract, item, "long", alpha, alpha, memo)
    return whole._replace(status=Status.FAIL)


def _judged(
    contract: Contract, evidence: Sequence[Evidence], window: Window, alpha: float, family: int, memo: Memo
) -> list[JudgedWindow]:
    if not evidence:
        return []
    strictest = alpha / family
    memo.compute(contract, evidence, window, strictest, alpha)
    cases = [_case(contract, item, window, strictest, alpha, memo) for item in evidence]

    def fails(case: JudgedWindow) -> Callable[[float], bool]:
        def at(level: float) -> bool:
            # A sample whose own statistic is within the limit fails at no level.
            if case.interval.samples < case.terms.needed and not case.terms.fails_at_once:
                return False
            if not case.interval.estimate > case.terms.limit:
                return False
            return memo.interval(contract, case.evidence, window, level, alpha).lower > case.terms.limit

        return at

    # The long window is asked only about what the short one left open; the others count as tests that do not fail.
    others: list[Callable[[float], bool]] = [lambda _level: False] * (family - len(cases))
    level = holm([*map(fails, cases), *others], alpha).level
    if level == strictest:
        return cases
    return [
        _case(contract, case.evidence, window, level, alpha, memo)
        if case.interval.estimate > case.terms.limit
        else case
        for case in cases
    ]


def _case(
    contract: Contract, item: Evidence, window: Window, alpha_lower: float, alpha_upper: float, memo: Memo
) -> JudgedWindow:
    terms, interval = memo.terms(contract, item), memo.interval(contract, item, window, alpha_lower, alpha_upper)
    return JudgedWindow(item, window, terms, alpha_lower, interval, _status(item, terms, interval))


def verdict_of(contract: Contract, case: JudgedWindow, alpha: float, now: float) -> Verdict:
    """Return the verdict on a cell from the window that decides."""
    interval = case.interval
    return Verdict(
        cell=case.evidence.cell,
        status=case.status,
        at=now,
        limit=case.terms.limit,
        estimate=interval.estimate,
        lower=interval.lower,
        upper=interval.upper,
        samples=interval.samples,
        window=case.window,
        method=interval.method,
        reason=reason_of(contract, case, alpha),
        contract_version=contract.metadata.version,
        contract_hash=contract.hash,
        about=case.terms.about,
        evidence=_share(case),
        ended=case.status is Status.INCONCLUSIVE and case.evidence.alarm is not None and case.evidence.alarm.ended,
    )


def _share(case: JudgedWindow) -> float:
    """Return the evidence against a cell; 0 once the observations after an alarm pass."""
    alarm = case.evidence.alarm
    if alarm is None:
        return math.nan
    return 0.0 if alarm.failing and case.status is Status.PASS else alarm.share


def _silence(contract: Contract, item: Evidence, now: float, memo: Memo) -> Verdict:
    terms = memo.terms(contract, item)
    return Verdict(
        cell=item.cell,
        status=Status.INVALID_INPUT if item.absence.startswith(INVALID_INPUT) else Status.NO_DATA,
        at=now,
        limit=terms.limit,
        estimate=math.nan,
        lower=math.nan,
        upper=math.nan,
        samples=0,
        window="",
        method="",
        reason=item.absence,
        contract_version=contract.metadata.version,
        contract_hash=contract.hash,
        about=terms.about,
        evidence=item.alarm.share if item.alarm is not None else math.nan,
        observed=item.observed,
    )


def _same(sample: object, other: object) -> bool:
    """Return True if two samples are the same object, or are composed of the same objects."""
    if sample is other or not (isinstance(sample, Binned) and isinstance(other, Binned)):
        return sample is other
    together = sample.opposite is not None and sample.opposite is other.opposite
    return together and sample.count is other.count and sample.lower is other.lower
