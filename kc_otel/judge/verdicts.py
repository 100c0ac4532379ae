"""From what the windows hold to verdicts: a pure function of the contract, the evidence and the clock.

Every cell is judged on the short window first. Where that cannot decide, the long window does. Each window gets half of
alpha = 1 - confidence. A PASS rests on an interval, and each cell stands alone, for a promotion asks that all of them
pass. Where observations are followed as they arrive, a FAIL rests on what they add up to against the limit
(`fail_evidence`): it comes when that reaches an alarm, and stays until it is gone or what was observed since passes.
Where they are judged once, as in a gate, or nothing of the kind can be held, it rests on an interval too, and Holm's
procedure over all such cells keeps the chance of any false FAIL within alpha.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.registry import QUANTITIES, Unit
from kc_otel.contract.units import format_duration
from kc_otel.judge.statistics import clause_interval, samples_needed
from kc_otel.judge.verdict import Cell, Status, Verdict
from kc_otel.stats import Binned, Interval, holm

__all__ = ["Alarm", "Evidence", "Memo", "Window", "decide"]

Window = Literal["short", "long"]

_DISTANCES: Final = frozenset(
    key for key, quantity in QUANTITIES.items() if quantity.low == 0.0 and key not in {"ratio", "geometric_ratio"}
) - {"weights_lag", "updates_rounded_away"}
"""Metrics that are 0 where the two kernels agree, and above 0 where they differ."""
_PROJECTION: Final = 4
"""Times as many observations for which an interval is computed to see how it narrows."""
_REMEMBERED: Final = 4
"""Intervals per cell that a memo keeps: two windows, and as many of cells that are gone."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """What is held against a cell's limit, as its observations are followed.

    Attributes:
        share: In 0..1, of what an alarm takes; nan where nothing can be held.
        failing: Whether it was 1, and nothing has cleared the cell since.
        since: What a window holds of the time after it was 1 last.
    """

    share: float
    failing: bool
    since: Callable[[Window], Binned]


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
    """

    cell: Cell
    clause: Clause
    sample: Callable[[Window], Binned]
    absence: str = ""
    alarm: Alarm | None = None
    observed: bool = True
    anytime: bool = False

    @property
    def detected(self) -> bool:
        """Whether a FAIL rests on what is held against the limit."""
        return self.alarm is not None and not math.isnan(self.alarm.share)

    @property
    def failing(self) -> bool:
        """Whether what is held against the limit was enough for an alarm, and nothing has cleared the cell since."""
        return self.detected and self.alarm is not None and self.alarm.failing


@dataclass(frozen=True, slots=True)
class _Case:
    """A cell on one window."""

    evidence: Evidence
    window: Window
    limit: float
    needed: int
    level: float
    interval: Interval
    fails: bool = False

    @property
    def status(self) -> Status:
        few = self.interval.samples < self.needed
        if self.fails:
            return Status.FAIL
        if self.interval.lower > self.limit and (self.fails_at_once or not few):
            return Status.INCONCLUSIVE if self.evidence.detected else Status.FAIL
        kept = self.interval.upper <= self.limit or (self.allows_none and self.interval.estimate == 0.0)
        return Status.PASS if kept and not few else Status.INCONCLUSIVE

    @property
    def allows_none(self) -> bool:
        """Whether one observation breaks the promise, and while none does it holds: no sample bounds a share by 0."""
        return self.evidence.clause.allows_none(self.evidence.cell.slice)

    @property
    def fails_at_once(self) -> bool:
        """Whether too few observations to pass may be enough to fail: what was observed above a maximum is a fact."""
        return self.evidence.clause.parsed_statistic.kind == "max" or self.allows_none


class Memo:
    """Intervals of samples that have not changed since they were computed; between two reports that is all of them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Cell, Window], tuple[Binned, float, float, Interval]] = {}

    def interval(
        self, contract: Contract, item: Evidence, window: Window, alpha_lower: float, alpha_upper: float
    ) -> Interval:
        """A cell's interval on a window."""
        sample = item.sample(window)
        kept = self._kept.get((item.cell, window))
        if kept is not None and _same(kept[0], sample) and kept[1:3] == (alpha_lower, alpha_upper):
            return kept[3]
        interval = clause_interval(
            item.clause,
            contract.assumptions,
            sample,
            alpha_lower=alpha_lower,
            alpha_upper=alpha_upper,
            anytime=item.anytime,
        )
        self._kept[item.cell, window] = (sample, alpha_lower, alpha_upper, interval)
        return interval

    def clear(self) -> None:
        """Start over."""
        self._kept.clear()

    def forget(self, cells: int) -> None:
        """Start over when most of what is kept cannot be of the contract's `cells` cells any more."""
        if len(self._kept) > _REMEMBERED * cells:
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
    decided = {case.evidence.cell: case for case in _judged(contract, once, "short", alpha, len(once), memo)}
    open_ = [item for item in once if decided[item.cell].status is Status.INCONCLUSIVE]
    decided.update({case.evidence.cell: case for case in _judged(contract, open_, "long", alpha, len(once), memo)})
    decided.update({item.cell: _followed(contract, item, alpha, memo) for item in live if item.detected})
    return tuple(
        _silence(contract, item, now) if item.absence else _verdict(contract, decided[item.cell], alpha, now)
        for item in evidence
    )


def _followed(contract: Contract, item: Evidence, alpha: float, memo: Memo) -> _Case:
    """A cell whose observations are followed: windows that begin after the last alarm, or why it still fails."""
    assert item.alarm is not None
    recent = replace(item, sample=item.alarm.since)
    short = _case(contract, recent, "short", alpha, alpha, memo)
    # What is above the limit in this window is not taken back by the longer one.
    above = short.interval.lower > short.limit and short.interval.samples >= short.needed
    undecided = short.status is Status.INCONCLUSIVE and not above
    case = _case(contract, recent, "long", alpha, alpha, memo) if undecided else short
    if not item.failing or case.status is Status.PASS:
        return case
    whole = _case(contract, item, "short", alpha, alpha, memo)
    return replace(whole if whole.interval.samples else _case(contract, item, "long", alpha, alpha, memo), fails=True)


def _judged(
    contract: Contract, evidence: Sequence[Evidence], window: Window, alpha: float, family: int, memo: Memo
) -> list[_Case]:
    if not evidence:
        return []
    strictest = alpha / family
    cases = [_case(contract, item, window, strictest, alpha, memo) for item in evidence]

    def fails(case: _Case) -> Callable[[float], bool]:
        def at(level: float) -> bool:
            # What is not above the limit in the sample itself fails at no level.
            if case.interval.samples < case.needed and not case.fails_at_once:
                return False
            if not case.interval.estimate > case.limit:
                return False
            return memo.interval(contract, case.evidence, window, level, alpha).lower > case.limit

        return at

    # The long window is asked only about what the short one left open; the others count as tests that do not fail.
    others: list[Callable[[float], bool]] = [lambda _level: False] * (family - len(cases))
    level = holm([*map(fails, cases), *others], alpha).level
    if level == strictest:
        return cases
    return [
        _case(contract, case.evidence, window, level, alpha, memo) if case.interval.estimate > case.limit else case
        for case in cases
    ]


def _case(
    contract: Contract, item: Evidence, window: Window, alpha_lower: float, alpha_upper: float, memo: Memo
) -> _Case:
    return _Case(
        evidence=item,
        window=window,
        limit=item.clause.limit_for(item.cell.slice),
        needed=samples_needed(item.clause, contract.observability),
        level=alpha_lower,
        interval=memo.interval(contract, item, window, alpha_lower, alpha_upper),
    )


def _verdict(contract: Contract, case: _Case, alpha: float, now: float) -> Verdict:
    interval = case.interval
    return Verdict(
        cell=case.evidence.cell,
        status=case.status,
        at=now,
        limit=case.limit,
        estimate=interval.estimate,
        lower=interval.lower,
        upper=interval.upper,
        samples=interval.samples,
        window=case.window,
        method=interval.method,
        reason=_reason(contract, case, alpha),
        contract_version=contract.metadata.version,
        contract_hash=contract.hash,
        about=case.evidence.clause.about,
        evidence=_share(case),
    )


def _share(case: _Case) -> float:
    """What is held against a cell; nothing any more once what was observed after an alarm passes."""
    alarm = case.evidence.alarm
    if alarm is None:
        return math.nan
    return 0.0 if alarm.failing and case.status is Status.PASS else alarm.share


def _silence(contract: Contract, item: Evidence, now: float) -> Verdict:
    return Verdict(
        cell=item.cell,
        status=Status.NO_DATA,
        at=now,
        limit=item.clause.limit_for(item.cell.slice),
        estimate=math.nan,
        lower=math.nan,
        upper=math.nan,
        samples=0,
        window="",
        method="",
        reason=item.absence,
        contract_version=contract.metadata.version,
        contract_hash=contract.hash,
        about=item.clause.about,
        evidence=item.alarm.share if item.alarm is not None else math.nan,
        observed=item.observed,
    )


def _reason(contract: Contract, case: _Case, alpha: float) -> str:
    interval, limit = case.interval, case.limit
    seconds = contract.observability.window if case.window == "short" else contract.observability.long_window
    span = format_duration(seconds)
    note = f" ({interval.note})" if interval.note else ""
    quantity = case.evidence.clause.quantity
    what = "sequences" if quantity is not None and quantity.per is Unit.SEQUENCE else "samples"
    if case.allows_none and interval.samples and not interval.note:
        return _counted(contract, case, span)
    if case.fails:
        return _alarmed(contract, case, f"with {interval.samples:,} {what} in {span}{note}")
    if case.status is Status.FAIL:
        once = "" if case.evidence.alarm is None or case.fails_at_once else ", in this evaluation alone"
        said = f"lower bound {interval.lower:.4g} > limit {limit:.4g} with {interval.samples:,} {what} in {span}{note}"
        return said + once
    if case.status is Status.PASS:
        return f"upper bound {interval.upper:.4g} <= limit {limit:.4g} with {interval.samples:,} {what} in {span}{note}"
    return _undecided(contract, case, alpha, what, span) if interval.samples else f"no {what} in {span}"


def _undecided(contract: Contract, case: _Case, alpha: float, what: str, span: str) -> str:
    """What a cell lacks that is neither within its limit nor beyond it."""
    interval, limit, needed = case.interval, case.limit, case.needed
    if interval.lower > limit:
        said = f"lower bound {interval.lower:.4g} > limit {limit:.4g}"
    elif interval.upper <= limit:
        said = f"upper bound {interval.upper:.4g} <= limit {limit:.4g}"
    elif math.isfinite(interval.upper):
        said = f"upper bound {interval.upper:.4g} > limit {limit:.4g}"
    else:
        said = f"no upper bound below limit {limit:.4g}"
    count = (
        f"{interval.samples:,} of {needed:,} {what}" if interval.samples < needed else f"{interval.samples:,} {what}"
    )
    if interval.lower > limit and case.evidence.alarm is not None and case.evidence.detected:
        return f"{said} with {count} in {span}: {100.0 * case.evidence.alarm.share:.0f} % of what an alarm takes"
    return f"{said} with {count} in {span}: {_missing(contract, case, alpha)}"


def _alarmed(contract: Contract, case: _Case, samples: str) -> str:
    """Why a cell fails whose observations are followed, and how often chance would say so."""
    interval, limit = case.interval, case.limit
    alarm = case.evidence.alarm
    assert alarm is not None
    if interval.lower > limit:
        said = f"lower bound {interval.lower:.4g} > limit {limit:.4g} {samples}"
    elif interval.samples:
        said = f"estimate {interval.estimate:.4g}, limit {limit:.4g} {samples}"
    else:
        said = f"limit {limit:.4g} was exceeded"
    apart = f"false alarms are {format_duration(contract.observability.false_alarms)} apart or more"
    return f"{said}; {apart}" + ("" if alarm.share >= 1.0 else "; not cleared yet")


def _counted(contract: Contract, case: _Case, span: str) -> str:
    """How many broke a promise that none does, and the most that they can be where none was seen.

    With none seen the exact bound 1 - alpha^(1/n) holds for the mean of the conditional probabilities, whatever depends
    on what: 1{x = 0} / (1 - p) multiplied up is a martingale, so that P(none seen and prod (1 - p) <= alpha) <= alpha.
    """
    interval, clause = case.interval, case.evidence.clause
    quantity, statistic = clause.quantity, clause.parsed_statistic
    what = f"{quantity.per}s" if quantity is not None else "observations"
    distance = statistic.kind == "mean" or (statistic.argument == 0.0 and clause.metric in _DISTANCES)
    do = "differ" if distance else f"are above {statistic.argument:g}"
    said = f"{round(interval.estimate * interval.samples):,} of {interval.samples:,} {what} {do} in {span}"
    if case.status is Status.FAIL:
        return f"{said}, and none may"
    most = f"at most {interval.upper:.3g} at {100 * contract.observability.confidence:.10g} %"
    more = f": {case.needed - interval.samples:,} more needed" if case.status is Status.INCONCLUSIVE else ""
    return f"{said}; {most}{more}"


def _missing(contract: Contract, case: _Case, alpha: float) -> str:
    """What would decide the cell, in words."""
    few = case.needed - case.interval.samples
    at_least = f"{few:,} more needed" if few > 0 else ""
    if case.interval.lower > case.limit or case.interval.upper <= case.limit:
        return at_least
    more = _samples_to_decide(contract, case, alpha)
    if more is None:
        return at_least or case.interval.note or "too close to the limit to say how many more are needed"
    return at_least if more <= few else f"about {_round(more):,} more needed"


def _samples_to_decide(contract: Contract, case: _Case, alpha: float) -> float | None:
    """Observations that are missing for the nearer bound to reach the limit, if what comes is like what came.

    Intervals narrow as a/sqrt(n) + b/n; a and b come from the present one and the one that _PROJECTION times as many of
    the same observations would give.
    """
    now, n = case.interval, case.interval.samples
    many = case.evidence.sample(case.window).times(_PROJECTION)
    then = clause_interval(
        case.evidence.clause,
        contract.assumptions,
        many,
        alpha_lower=case.level,
        alpha_upper=alpha,
        anytime=case.evidence.anytime,
    )
    above = now.estimate > case.limit
    gap = abs(now.estimate - case.limit)
    half = now.estimate - now.lower if above else now.upper - now.estimate
    later = then.estimate - then.lower if above else then.upper - then.estimate
    if not (gap > 0 and math.isfinite(half) and math.isfinite(later) and 0 <= later < half):
        return None
    b = max((half - later * math.sqrt(_PROJECTION)) / (1.0 - 1.0 / math.sqrt(_PROJECTION)), 0.0)
    a = max(half - b, 0.0)
    # gap = a / x + b / x^2 for x = sqrt(n'/n)
    x = (a + math.sqrt(a * a + 4.0 * b * gap)) / (2.0 * gap)
    more = n * (x * x - 1.0)
    return more if 0 < more < 1e12 else None


def _same(one: Binned, other: Binned) -> bool:
    """Whether two samples are the same object, or put together of the same objects."""
    together = one.opposite is not None and one.opposite is other.opposite
    return one is other or (together and one.count is other.count and one.lower is other.lower)


def _round(number: float) -> int:
    unit = int(10 ** max(math.floor(math.log10(max(number, 1.0))) - 1, 0))
    return math.ceil(number / unit) * unit
