"""Reason for a cell's verdict, in words; for an undecided cell, the number of observations it lacks.

A PASS on the mean of an unbounded quantity, or of one that may be far above its limit, needs many observations: one
that was not seen may be as far off as the quantity allows. A cap bounds it, and the reason says what a cap would give.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import QUANTITIES
from kc_otel.contract.units import format_duration
from kc_otel.judge.cell_evidence import JudgedWindow
from kc_otel.judge.statistics import clause_interval
from kc_otel.judge.verdict import Status
from kc_otel.stats import Interval

_DISTANCES: Final = frozenset(
    key for key, quantity in QUANTITIES.items() if quantity.low == 0.0 and key not in {"ratio", "geometric_ratio"}
) - {"weights_lag", "updates_rounded_away"}
"""Metrics that are 0 where the two kernels agree, and above 0 where they differ."""
_SIZE_FACTOR: Final = 4
"""Times as many observations for which an interval is computed to see how it narrows."""
_SLOW_NARROWING: Final = 0.75
"""Part of its width that an interval keeps with four times as many, above which it may not narrow to a point."""
_CAP_IN_LIMITS: Final = 5.0
"""The cap that is advised, in limits: a tenth of the observations decide such a mean."""
_WORTH_A_CAP: Final = 0.5
"""Part of the distance from the estimate to its upper bound that a cap has to leave at most to be advised."""
_FAR_POWER: Final = 10
"""Power of `_SIZE_FACTOR` that stands for as many observations as one likes."""


def reason_of(contract: Contract, case: JudgedWindow, alpha: float) -> str:
    """Return the reason for a cell's verdict, in a sentence with its numbers, and what an undecided cell lacks."""
    interval, limit = case.interval, case.terms.limit
    seconds = contract.observability.window if case.window == "short" else contract.observability.long_window
    span = format_duration(seconds)
    note = f" ({interval.note})" if interval.note else ""
    what = case.terms.what
    if case.terms.allows_none and interval.samples and not interval.note:
        return _counted(contract, case, span)
    if case.status is Status.FAIL and case.evidence.detected:
        return _alarmed(contract, case, f"with {interval.samples:,} {what} in {span}{note}")
    if case.status is Status.FAIL:
        once = "" if case.evidence.alarm is None or case.terms.fails_at_once else ", in this evaluation alone"
        said = f"lower bound {interval.lower:.4g} > limit {limit:.4g} with {interval.samples:,} {what} in {span}{note}"
        return said + once
    if case.status is Status.PASS:
        return kept(interval, limit, what, span)
    return _undecided(contract, case, alpha, what, span) if interval.samples else f"no {what} in {span}"


def kept(interval: Interval, limit: float, what: str, span: str) -> str:
    """Return the reason for a PASS whose upper bound is within the limit."""
    note = f" ({interval.note})" if interval.note else ""
    return f"upper bound {interval.upper:.4g} <= limit {limit:.4g} with {interval.samples:,} {what} in {span}{note}"


def _undecided(contract: Contract, case: JudgedWindow, alpha: float, what: str, span: str) -> str:
    """Return what a cell lacks that is neither within its limit nor beyond it."""
    interval, limit, needed = case.interval, case.terms.limit, case.terms.needed
    if case.evidence.broken and interval.upper <= limit:
        kept_all_the_same = kept(interval, limit, what, span)
        return f"no PASS, because an assumption does not hold: {case.evidence.broken}; otherwise {kept_all_the_same}"
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
    alarm = case.evidence.alarm
    since = (
        "; the fault has ended, but a PASS takes more observations"
        if alarm is not None and alarm.ended
        else _improved(case)
    )
    if interval.lower > limit and alarm is not None and case.evidence.detected:
        return f"{said} with {count} in {span}: {100.0 * alarm.share:.0f} % of the evidence for an alarm{since}"
    parts = (_missing(contract, case, alpha) + since, _with_a_cap(contract, case, alpha))
    return f"{said} with {count} in {span}: {'; '.join(filter(None, parts))}"


def _with_a_cap(contract: Contract, case: JudgedWindow, alpha: float) -> str:
    """Suggest a cap and the observations that it takes; empty if none is possible or it saves little."""
    clause, quantity, now = case.evidence.clause, case.evidence.clause.quantity, case.interval
    cap = _CAP_IN_LIMITS * case.terms.limit
    if not (
        quantity is not None
        and clause.cap is None
        and clause.parsed_statistic.kind == "mean"
        and not quantity.two_valued
        and clause.opposite is None
        and clause.metric != "support_deficit"
        and 0.0 < cap < quantity.high
        and now.estimate <= case.terms.limit < now.upper
    ):
        return ""
    evidence = replace(case.evidence, clause=clause.model_copy(update={"cap": cap}))
    interval = clause_interval(
        evidence.clause,
        contract.assumptions,
        evidence.sample(case.window),
        alpha_lower=case.level,
        alpha_upper=alpha,
        anytime=evidence.anytime,
    )
    if not interval.upper - interval.estimate <= _WORTH_A_CAP * (now.upper - now.estimate):
        return ""
    said = f"with `cap: {cap:.4g}` the upper bound is {interval.upper:.4g}"
    missing = _missing(contract, case._replace(evidence=evidence, interval=interval), alpha)
    if missing:
        return f"{said}: {missing}"
    return said if evidence.broken else f"{said}, a PASS"


def _improved(case: JudgedWindow) -> str:
    """Say how far a fault that continues has improved."""
    alarm = case.evidence.alarm
    if alarm is None or alarm.improved is None:
        return ""
    before, after = alarm.improved
    return f"; improved from {before:.3g} to {after:.3g} times the allowed amount, but not ended"


def _alarmed(contract: Contract, case: JudgedWindow, samples: str) -> str:
    """Return the reason for a FAIL of followed observations, and the rate of false alarms."""
    interval, limit = case.interval, case.terms.limit
    alarm = case.evidence.alarm
    assert alarm is not None
    if interval.lower > limit:
        said = f"lower bound {interval.lower:.4g} > limit {limit:.4g} {samples}"
    elif interval.estimate > limit:
        said = f"estimate {interval.estimate:.4g} > limit {limit:.4g} {samples}"
    elif interval.samples:
        said = f"recent observations are above limit {limit:.4g}; estimate {interval.estimate:.4g} {samples}"
    else:
        said = f"limit {limit:.4g} was exceeded"
    apart = f"false alarms are expected {format_duration(contract.observability.false_alarms)} apart or more"
    return f"{said}; {apart}" + (_improved(case) or ("" if alarm.share >= 1.0 else "; not cleared yet"))


def _counted(contract: Contract, case: JudgedWindow, span: str) -> str:
    """Return the number of breaches of a promise that allows none, and their upper bound if none was seen.

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
        return f"{said}, and none is allowed to"
    most = f"at most {interval.upper:.3g} at {100 * contract.observability.confidence:.10g} %"
    more = f": {case.terms.needed - interval.samples:,} more needed" if case.status is Status.INCONCLUSIVE else ""
    return f"{said}; {most}{more}"


def _missing(contract: Contract, case: JudgedWindow, alpha: float) -> str:
    """Return what would decide the cell, in words."""
    few = case.terms.needed - case.interval.samples
    at_least = f"{few:,} more needed" if few > 0 else ""
    if case.interval.lower > case.terms.limit or case.interval.upper <= case.terms.limit:
        return at_least
    more = _samples_to_decide(contract, case, alpha)
    if more == math.inf:
        return "; ".join(filter(None, ("more such observations would not decide it", case.interval.note)))
    if more is None:
        return at_least or case.interval.note or "too close to the limit to say how many more are needed"
    return at_least if more <= few else f"about {_round(more):,} more needed"


def _samples_to_decide(contract: Contract, case: JudgedWindow, alpha: float) -> float | None:
    """Observations that are missing for the nearer bound to reach the limit, if what comes is like what came.

    Intervals narrow as a/sqrt(n) + b/n; a and b come from the present one and the one that _SIZE_FACTOR times as many
    of them would give. Infinity where no number suffices: unknown values, such as missing rewards, keep
    an interval wide.
    """
    now, n = case.interval, case.interval.samples
    above = now.estimate > case.terms.limit
    gap = abs(now.estimate - case.terms.limit)

    def half_width(times: int) -> float:
        found = clause_interval(
            case.evidence.clause,
            contract.assumptions,
            case.evidence.sample(case.window).times(times),
            alpha_lower=case.level,
            alpha_upper=alpha,
            anytime=case.evidence.anytime,
        )
        return found.estimate - found.lower if above else found.upper - found.estimate

    half = now.estimate - now.lower if above else now.upper - now.estimate
    later = half_width(_SIZE_FACTOR)
    if later > half * _SLOW_NARROWING and half_width(_SIZE_FACTOR**_FAR_POWER) >= gap > 0:
        return math.inf
    if not (gap > 0 and math.isfinite(half) and math.isfinite(later) and 0 <= later < half):
        return None
    b = max((half - later * math.sqrt(_SIZE_FACTOR)) / (1.0 - 1.0 / math.sqrt(_SIZE_FACTOR)), 0.0)
    a = max(half - b, 0.0)
    # gap = a / x + b / x^2 for x = sqrt(n'/n)
    x = (a + math.sqrt(a * a + 4.0 * b * gap)) / (2.0 * gap)
    more = n * (x * x - 1.0)
    return more if 0 < more < 1e12 else None


def _round(number: float) -> int:
    unit = int(10 ** max(math.floor(math.log10(max(number, 1.0))) - 1, 0))
    return math.ceil(number / unit) * unit
