"""What is known of a cell when it is judged, and what its verdict says: a reason with its numbers.

A reason names the observations that an undecided cell lacks. A PASS on the mean of what may be far above its limit
needs many: one that was not seen may be as far off as the quantity allows. A cap bounds that, and the reason says what
a cap would give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import QUANTITIES, Unit
from kc_otel.contract.units import format_duration
from kc_otel.contract.words import ABOVE_EARLIER, ABOVE_RECENTLY
from kc_otel.judge.fail_evidence import SHARE_DIGITS
from kc_otel.judge.series import Series
from kc_otel.judge.statistics import clause_interval, rounded, samples_needed
from kc_otel.judge.verdict import Cell, Status, Verdict
from kc_otel.stats import Binned, Histogram, Interval

Window = Literal["short", "long"]
WINDOWS: Final[tuple[Window, Window]] = ("short", "long")
_NOTHING: Final = np.array([math.nan, math.nan, math.nan, 0.0])[:, None]
"""Estimate, lower and upper bound, and observations of a cell that is not judged."""
_STATUS_OF: Final = tuple(Status)
"""By code."""
_NAMED_UNITS: Final = frozenset({Unit.SEQUENCE, Unit.PROMPT, Unit.STEP})
"""Units that sentences name; other observations are samples."""
INVALID_INPUT: Final = "INVALID INPUT"
"""First words of the reason of a cell that input is no sample for."""
_DISTANCES: Final = frozenset(
    key for key, quantity in QUANTITIES.items() if quantity.low == 0.0 and key not in {"ratio", "geometric_ratio"}
) - {"weights_lag", "updates_rounded_away"}
"""Metrics that are 0 where the two kernels agree, and above 0 where they differ."""
_MAX_QUOTED_CHARACTERS: Final = 200
"""Characters of an exception's message that are said."""
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


def nothing(_window: Window = "short") -> Binned:
    """No observations."""
    return Histogram.empty(0).binned()


@dataclass(frozen=True, slots=True)
class Evidence:
    """A cell, and everything known about it at the time it is judged."""

    cell: Cell
    clause: Clause
    sample: Callable[[Window], Binned] = nothing
    """The observations in a window; asked for only where they are needed."""
    absence: str = ""
    """Why there is nothing to judge, as a sentence; empty when there is something."""
    followed: bool = False
    """True if observations are held against the limit as they come; else samples are judged once."""
    share: float = math.nan
    """What is held against the limit, in 0..1 of what an alarm takes; nan where nothing can be."""
    failing: bool = False
    """Whether that was 1, and nothing has cleared the cell since."""
    ended: bool = False
    """Whether "still as it was" is refuted of what it was 1 for, and what came since keeps the limit."""
    improved: tuple[float, float] | None = None
    """Mean of a fault that has not ended before and after it improved last, in limits."""
    observed: bool = True
    """True if any observation is remembered, of the windows or from before them."""
    anytime: bool = False
    """Whether the sample is looked at as it grows, so that its bounds have to hold at all sizes at once."""
    broken: str = ""
    """Why it does not PASS, in words: the data breaks an assumption of the clause, or recorders of the kernel apply
    another slice of this name or measure something else for the clause."""
    series: Series | None = None
    """Where the observations of a followed cell are; None where nothing is remembered of it."""

    @property
    def detected(self) -> bool:
        """True if a FAIL rests on the evidence held against the limit."""
        return not math.isnan(self.share)


class Terms(NamedTuple):
    """Terms of a clause on a slice."""

    limit: float
    needed: int
    allows_none: bool
    """Whether one observation breaks the promise, and while none does it holds: no sample bounds a share by 0."""
    fails_at_once: bool
    """Whether too few observations to pass may be enough to fail: what was observed above a maximum is a fact, while a
    few below it say nothing of the next."""
    what: str
    """Name of the observations, in the plural."""

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
        )


class _Judged(NamedTuple):
    """A cell on the window that decided, or did not."""

    contract: Contract
    evidence: Evidence
    window: Window
    terms: Terms
    level: float
    interval: Interval
    status: Status

    @property
    def span(self) -> str:
        """Length of the window, in words."""
        watched = self.contract.observability
        return format_duration(watched.window if self.window == "short" else watched.long_window)

    @property
    def rests_on(self) -> str:
        """The observations and the note on their interval, in words."""
        note = f" ({self.interval.note})" if self.interval.note else ""
        return f"with {self.interval.samples:,} {self.terms.what} in {self.span}{note}"

    def interval_of(self, times: int) -> Interval:
        """The interval that so many times as many observations like these give."""
        item, sample = self.evidence, self.evidence.sample(self.window)
        return clause_interval(
            item.clause,
            self.contract.assumptions,
            sample if times == 1 else sample.times(times),
            alpha_lower=self.level,
            alpha_upper=alpha_of(self.contract),
            anytime=item.anytime,
        )


def _reason(case: _Judged) -> str:
    """Return the reason for a cell's verdict, in a sentence with its numbers, and what an undecided cell lacks."""
    interval, limit = case.interval, case.terms.limit
    if case.terms.allows_none and interval.samples and not interval.note:
        return _counted(case)
    kept = f"upper bound {interval.upper:.4g} <= limit {limit:.4g} {case.rests_on}"
    if case.status is Status.PASS:
        return kept
    if case.status is Status.FAIL and case.evidence.detected:
        return _alarmed(case)
    if case.status is Status.FAIL:
        once = ", in this evaluation alone" if case.evidence.followed and not case.terms.fails_at_once else ""
        return f"lower bound {interval.lower:.4g} > limit {limit:.4g} {case.rests_on}{once}"
    if case.evidence.broken and interval.upper <= limit:
        return f"no PASS, because an assumption does not hold: {case.evidence.broken}; otherwise {kept}"
    return _undecided(case) if interval.samples else f"no {case.terms.what} in {case.span}"


def _undecided(case: _Judged) -> str:
    """Return what a cell lacks that is neither within its limit nor beyond it."""
    interval, limit, needed = case.interval, case.terms.limit, case.terms.needed
    if interval.lower > limit:
        said = f"lower bound {interval.lower:.4g} > limit {limit:.4g}"
    elif interval.estimate > limit:
        said = f"estimate {interval.estimate:.4g} > limit {limit:.4g}"
    elif math.isfinite(interval.upper):
        said = f"upper bound {interval.upper:.4g} {'<=' if interval.upper <= limit else '>'} limit {limit:.4g}"
    else:
        said = f"no upper bound below limit {limit:.4g}"
    said += f" with {interval.samples:,}{f' of {needed:,}' if interval.samples < needed else ''} {case.terms.what}"
    since = "; the fault has ended, but a PASS takes more observations" if case.evidence.ended else _improved(case)
    if interval.lower > limit and case.evidence.detected:
        share = 100.0 * case.evidence.share
        return f"{said} in {case.span}: {share:.0f} % of the evidence for an alarm{since}"
    return f"{said} in {case.span}: {'; '.join(filter(None, (_missing(case) + since, _with_a_cap(case))))}"


def _with_a_cap(case: _Judged) -> str:
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
    capped = case._replace(evidence=replace(case.evidence, clause=clause.model_copy(update={"cap": cap})))
    interval = capped.interval_of(1)
    if not interval.upper - interval.estimate <= _WORTH_A_CAP * (now.upper - now.estimate):
        return ""
    said = f"with `cap: {cap:.4g}` the upper bound is {interval.upper:.4g}"
    if missing := _missing(capped._replace(interval=interval)):
        return f"{said}: {missing}"
    return said if case.evidence.broken else f"{said}, a PASS"


def _improved(case: _Judged) -> str:
    """Say how far a fault that continues has improved."""
    if case.evidence.improved is None:
        return ""
    before, after = case.evidence.improved
    return f"; improved from {before:.3g} to {after:.3g} times the allowed amount, but not ended"


def _alarmed(case: _Judged) -> str:
    """Return the reason for a FAIL of followed observations, and the rate of false alarms."""
    interval, limit = case.interval, case.terms.limit
    if interval.lower > limit:
        said = f"lower bound {interval.lower:.4g} > limit {limit:.4g} {case.rests_on}"
    elif interval.estimate > limit:
        said = f"estimate {interval.estimate:.4g} > limit {limit:.4g} {case.rests_on}"
    elif interval.samples:
        above = ABOVE_RECENTLY if case.evidence.share >= 1.0 else ABOVE_EARLIER
        said = f"{above} limit {limit:.4g}; estimate {interval.estimate:.4g} {case.rests_on}"
    else:
        said = f"limit {limit:.4g} was exceeded"
    apart = f"false alarms are expected {format_duration(case.contract.observability.false_alarms)} apart or more"
    return f"{said}; {apart}" + (_improved(case) or ("" if case.evidence.share >= 1.0 else "; not cleared yet"))


def _counted(case: _Judged) -> str:
    """Return the number of breaches of a promise that allows none, and their upper bound if none was seen.

    With none seen the exact bound 1 - alpha^(1/n) holds for the mean of the conditional probabilities, whatever depends
    on what: 1{x = 0} / (1 - p) multiplied up is a martingale, so that P(none seen and prod (1 - p) <= alpha) <= alpha.
    """
    interval, clause = case.interval, case.evidence.clause
    quantity, statistic = clause.quantity, clause.parsed_statistic
    what = f"{quantity.per}s" if quantity is not None else "observations"
    distance = statistic.kind == "mean" or (statistic.argument == 0.0 and clause.metric in _DISTANCES)
    do = "differ" if distance else f"are above {statistic.argument:g}"
    said = f"{round(interval.estimate * interval.samples):,} of {interval.samples:,} {what} {do} in {case.span}"
    if case.status is Status.FAIL:
        return f"{said}, and none is allowed to"
    most = f"at most {interval.upper:.3g} at {100 * case.contract.observability.confidence:.10g} %"
    more = f": {case.terms.needed - interval.samples:,} more needed" if case.status is Status.INCONCLUSIVE else ""
    return f"{said}; {most}{more}"


def _missing(case: _Judged) -> str:
    """Return what would decide the cell, in words."""
    few = case.terms.needed - case.interval.samples
    at_least = f"{few:,} more needed" if few > 0 else ""
    if case.interval.lower > case.terms.limit or case.interval.upper <= case.terms.limit:
        return at_least
    more = _samples_to_decide(case)
    if more == math.inf:
        return "; ".join(filter(None, ("more such observations would not decide it", case.interval.note)))
    if more is None:
        return at_least or case.interval.note or "too close to the limit to say how many more are needed"
    return at_least if more <= few else f"about {rounded(math.ceil(more)):,} more needed"


def _samples_to_decide(case: _Judged) -> float | None:
    """Observations that are missing for the nearer bound to reach the limit, if what comes is like what came.

    Intervals narrow as a/sqrt(n) + b/n; a and b come from the present one and the one that _SIZE_FACTOR times as many
    of them would give. Infinity where no number suffices: unknown values, such as missing rewards, keep
    an interval wide.
    """
    now, n = case.interval, case.interval.samples
    above = now.estimate > case.terms.limit
    gap = abs(now.estimate - case.terms.limit)

    def half_width(times: int) -> float:
        found = case.interval_of(times)
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


def said_of(error: Exception) -> str:
    """An exception in a few words."""
    return f"{type(error).__name__}: {error}"[:_MAX_QUOTED_CHARACTERS]


def unjudged(item: Evidence, error: Exception) -> Evidence:
    """A cell that cannot be judged."""
    return replace(item, absence=f"not judged: the evaluator failed ({said_of(error)}); its log has the cause")


def place_of(cell: Cell) -> str:
    """A cell in words."""
    kernels = " -> ".join(filter(None, (cell.kernel_train, cell.kernel_inference)))
    return f"clause {cell.clause} on slice {cell.slice}" + (f" of {kernels}" if kernels else "")


def alpha_of(contract: Contract) -> float:
    """Error probability of either side in each of the two windows."""
    return (1.0 - contract.observability.confidence) / 2.0


class Verdicts(Sequence[Verdict]):
    """Verdicts of all cells of a contract at a Unix time, made of columns [cells] when they are asked for.

    `status` is a code; `window` is the one that decides; `values` are estimate, lower and upper bound, and observations
    in it [4, cells]; `level` is the error probability of lower bounds, `shares` the evidence as a share of an alarm,
    nan where cells are judged once. `special` has the evidence on cells of which there is more to say, by number.
    """

    def __init__(self, contract: Contract, places: Sequence[Evidence], at: float) -> None:
        self._contract, self.places, self.at, self.alpha = contract, places, at, alpha_of(contract)
        size = len(places)
        self.status, self.window = np.full(size, Status.NO_DATA.code, np.int8), np.zeros(size, np.int8)
        self.values = np.tile(_NOTHING, (1, size))
        self.level, self.shares = np.full((2, size), math.nan)
        self.notes, self.methods = np.full((2, size), "", np.object_)
        self.special: dict[int, Evidence] = {}
        self._sample_of, self._cell_of = np.zeros((2, size), np.int64)
        self._samples: list[Callable[[int, Window], Binned]] = []
        self._made: list[Verdict | None] = [None] * size
        self._numbers: dict[Cell, int] = {}

    def put(self, number: int, item: Evidence) -> None:
        """Have this evidence on a cell; where there is none, that is its verdict."""
        self.special[number] = item
        if item.absence:
            invalid = item.absence.startswith(INVALID_INPUT)
            self.status[number] = (Status.INVALID_INPUT if invalid else Status.NO_DATA).code
            self.values[:, [number]], self.notes[number], self.methods[number] = _NOTHING, "", ""

    def remember(self, at: NDArray[np.int64], sample: Callable[[int, Window], Binned]) -> None:
        """Remember what some cells [n] are judged by: the sample of each 0 to n - 1 in a window."""
        self._sample_of[at], self._cell_of[at] = len(self._samples), np.arange(at.size)
        self._samples.append(sample)

    def evidence(self, number: int) -> Evidence:
        """The evidence on a cell."""
        if number in self.special:
            return self.special[number]
        sample = partial(self._samples[self._sample_of[number]], int(self._cell_of[number]))
        return replace(self.places[number], sample=sample, share=round(float(self.shares[number]), SHARE_DIGITS))

    def _verdict_of(self, number: int) -> Verdict:
        contract, item = self._contract, self.evidence(number)
        estimate, lower, upper, samples = self.values[:, number].tolist()
        interval = Interval(estimate, lower, upper, int(samples), self.methods[number], self.notes[number])
        terms, window = Terms.of(contract, item.clause, item.cell.slice), WINDOWS[self.window[number]]
        status = _STATUS_OF[self.status[number]]
        case = _Judged(contract, item, window, terms, float(self.level[number]), interval, status)
        return Verdict(
            cell=item.cell,
            status=status,
            at=self.at,
            limit=terms.limit,
            estimate=estimate,
            lower=lower,
            upper=upper,
            samples=interval.samples,
            window="" if item.absence else window,
            method=interval.method,
            reason=item.absence or _reason(case),
            contract_version=contract.metadata.version,
            contract_hash=contract.hash,
            about=item.clause.about,
            # What came after an alarm passes: nothing of it is left.
            evidence=0.0 if item.failing and status is Status.PASS else item.share,
            observed=item.observed,
            ended=status is Status.INCONCLUSIVE and item.ended,
        )

    def selected(self, statuses: Collection[Status], cells: Iterable[Cell] = ()) -> list[Verdict]:
        """Those that have one of some statuses, and those of some cells, in their order; no other is made."""
        wanted = np.isin(self.status, [status.code for status in statuses])
        for cell in cells:
            if not self._numbers:
                self._numbers = {place.cell: number for number, place in enumerate(self.places)}
            if cell in self._numbers:
                wanted[self._numbers[cell]] = True
        return [self[number] for number in np.flatnonzero(wanted).tolist()]

    @property
    def cells(self) -> list[Cell]:
        """The cells, in the order of their verdicts."""
        return [place.cell for place in self.places]

    def __len__(self) -> int:
        return len(self._made)

    def __iter__(self) -> Iterator[Verdict]:
        return (self[number] for number in range(len(self._made)))

    @overload
    def __getitem__(self, number: int) -> Verdict: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Verdict]: ...
    def __getitem__(self, number: int | slice) -> Verdict | Sequence[Verdict]:
        if isinstance(number, slice):
            return [self[at] for at in range(*number.indices(len(self)))]
        verdict = self._made[number]
        if verdict is None:
            verdict = self._made[number] = self._verdict_of(number)
        return verdict


def selected(verdicts: Iterable[Verdict], statuses: Collection[Status], cells: Iterable[Cell] = ()) -> list[Verdict]:
    """Verdicts that have one of some statuses, and those of some cells, in their order."""
    if isinstance(verdicts, Verdicts):
        return verdicts.selected(statuses, cells)
    also = {*cells}
    return [verdict for verdict in verdicts if verdict.status in statuses or verdict.cell in also]


def cells_of(verdicts: Iterable[Verdict]) -> list[Cell]:
    """The cells that verdicts are about, in their order."""
    return verdicts.cells if isinstance(verdicts, Verdicts) else [verdict.cell for verdict in verdicts]
