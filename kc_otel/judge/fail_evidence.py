"""Evidence against each cell's limit: an e-detector per cell, fed with observations in the order of arrival.

A clause is turned into "the mean of something that is never negative is at most m" (`MeanTest`); a cell for which that
cannot be done is not here. A limit on either side of 0 is held against two quantities, and counts as two cells
(`other_side`).

M is what `kc_otel.stats.e_detector` says, with panes as wide as short windows', on the evaluator's clock. A cell fails
at M = A K, A the panes in `false_alarms` and K the largest number of cells that ever existed at once: their sum divided
by K must not grow because a cell disappears.

Recorders of one kernel version export one after the other, and what came last may be a healthy one's alone. Where a
version has several, what arrives about a cell that fails is taken in rounds of a heartbeat.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL, UNJUDGED
from kc_otel.judge.fault_end import Fault, together
from kc_otel.judge.series import SeriesKey
from kc_otel.judge.statistics import MeanTest, mean_test, metric_name, opposite_name
from kc_otel.judge.stored_numbers import StoredFloats, StoredHistogram
from kc_otel.judge.verdict import Cell
from kc_otel.stats import EDetector
from kc_otel.stats.e_detector import BETS, alarm_level
from kc_otel.stats.histogram import Histogram
from kc_otel.stats.histogram_columns import HistogramColumns
from kc_otel.stats.interval import Floats, Numbers
from kc_otel.stats.interval_rows import rows_of

_OTHER_SIDE: Final = "~opposite"
"""Ends the clause of a cell that holds what the clause's opposite quantity says; no clause's own id can end so."""
_NO_WIN_LOG_EVIDENCE: Final = 0.0
"""Logarithm of the M at which no bet has won anything since it began."""
_MAX_EXACT_COUNT: Final = 2**53
"""Observations after an alarm from which on no more are added: a double counts no further."""
_MEAN, _PANE = BETS.size, BETS.size + 1
"""Columns of a row that hold the logarithm of M's mean, and the pane."""
_NONE: Final[Numbers] = np.zeros(0, np.int64)
SHARE_DIGITS: Final = 6
"""Digits of the evidence as a share: a value within rounding of an alarm is one."""


def other_side(cell: Cell) -> Cell:
    """The cell that holds what the opposite quantity of a cell's clause says."""
    return cell._replace(clause=cell.clause + _OTHER_SIDE)


def whole_side(cell: Cell) -> Cell:
    """The cell of a clause itself, of that or of what holds its opposite quantity."""
    return cell._replace(clause=cell.clause.removesuffix(_OTHER_SIDE))


def row_of(log_sums: Floats, pane: int = 0) -> Floats:
    """The row of a cell whose bets have these logarithms of M [bets] since a pane."""
    return np.array([*log_sums, float(EDetector(log_sums[None]).log_evidence[0]), pane])


@dataclass(slots=True, eq=False)
class HeldEvidence:
    """Evidence held against one cell."""

    test: MeanTest
    row: StoredFloats = field(default_factory=lambda: row_of(np.zeros(BETS.size)))
    """Logarithms of M [bets], of their mean, and the pane; `FailEvidence` has those of all cells in an array."""
    failing: bool = False
    peak: float = -math.inf
    """Time at which M was at the level last; -inf before that."""
    after: StoredHistogram | None = None
    """The observations since then; None once it is older than the long window."""
    fault: Fault | None = None
    """Begun with the first alarm, and not ended."""
    ended: bool = False
    """True if one has ended, and neither has the cell passed since nor another begun."""
    number: int = 0
    """That of the row in the array."""

    @property
    def log_sums(self) -> Floats:
        """Logarithm of M for each bet [bets]."""
        return self.row[:_MEAN]

    @property
    def log_evidence(self) -> float:
        """Logarithm of M."""
        return float(self.row[_MEAN])

    @property
    def pane(self) -> int:
        """Number of the pane in which bets began last."""
        return int(self.row[_PANE])


@dataclass(slots=True, eq=False)
class _Waiting:
    """Observations of a failing cell that wait until each of its recorders has exported."""

    since: float
    gains: Floats
    parts: list[Histogram]


class _Arrivals(NamedTuple):
    """The cells that some series are about."""

    series: Sequence[SeriesKey | None]
    version: int
    cells: list[Cell]
    held: list[HeldEvidence]
    numbers: Numbers
    parts: Numbers
    """Number of the series that each is about [cells]."""


class FailEvidence:
    """Evidence held against the cells of one contract, with panes of `width` seconds.

    `most` is the largest number of cells that were held at once; `changed` are the cells that differ from what was
    saved, `alarmed` those that were at the level at some time; `version` changes whenever the set of cells does.
    """

    def __init__(self, contract: Contract, width: float) -> None:
        self.cells: dict[Cell, HeldEvidence] = {}
        self.most = 1
        self.changed: set[Cell] = set()
        self.alarmed: dict[Cell, HeldEvidence] = {}
        self.version = 0
        self._contract = contract
        self._width = width
        self._long = contract.observability.long_window
        self._heartbeat = contract.observability.heartbeat
        self._waiting: dict[Cell, _Waiting] = {}
        self._alpha = 1.0 - contract.observability.confidence
        self._panes = contract.observability.false_alarms / width
        self._clauses: dict[str, list[str]] = {}
        self._two_sided = {clause.id for clause in contract.clauses if clause.opposite is not None}
        self._of_series: dict[SeriesKey, list[Cell]] = {}
        self._rows = np.zeros((0, BETS.size + 2))
        self._free: list[int] = []
        for clause in contract.clauses:
            self._clauses.setdefault(metric_name(clause), []).append(clause.id)
            if (opposite := opposite_name(clause)) is not None:
                self._clauses.setdefault(opposite, []).append(clause.id + _OTHER_SIDE)
        self._by_id = {clause.id: clause for clause in contract.clauses}
        self._tests: dict[tuple[str, str], MeanTest | None] = {}
        self._different: list[MeanTest] = []
        self._number_of: dict[MeanTest, int] = {}
        self._kinds = np.zeros(0, np.int64)  # which of these, by row
        self._known = _Arrivals((), -1, [], [], _NONE, _NONE)

    @property
    def level(self) -> float:
        """Logarithm of the M at which a cell fails: `log(A K)`."""
        return alarm_level(self._panes, self.most)

    def test_of(self, cell: Cell) -> MeanTest | None:
        """Return a cell's limit as a limit on a mean; None if it has no such form."""
        where = (cell.clause, cell.slice)
        if where not in self._tests:
            clause = self._by_id.get(whole_side(cell).clause) if cell.slice in {ALL, *self._contract.slices} else None
            test = mean_test(clause, self._contract.assumptions, cell.slice) if clause is not None else None
            self._tests[where] = test
        return self._tests[where]

    def share(self, cell: Cell) -> float:
        """Return the evidence against a cell, in 0..1: log M as a share of what FAIL takes; nan if untracked.

        What waits for a round of all recorders counts: "recent observations are above" is not said of it if it is good.
        """
        if self.test_of(cell) is None:
            return math.nan
        most = max(map(self._log_evidence, (cell, other_side(cell)) if cell.clause in self._two_sided else (cell,)))
        return round(min(max(most, 0.0) / self.level, 1.0), SHARE_DIGITS)

    def _log_evidence(self, cell: Cell) -> float:
        held, waiting = self.cells.get(cell), self._waiting.get(cell)
        if held is None or waiting is None:
            return 0.0 if held is None else held.log_evidence
        return float(EDetector(held.log_sums[None]).gained(waiting.gains[None]).log_evidence[0])

    def shares(self) -> Floats:
        """`share` of all cells, not rounded, by the numbers of their rows; the last is that of a cell that has none."""
        return np.append(np.minimum(np.maximum(self._rows[:, _MEAN] / self.level, 0.0), 1.0), 0.0)

    def sides(self, cell: Cell) -> list[HeldEvidence]:
        """Return the evidence against a cell, for each side that its limit has; empty before the first observation."""
        found = [self.cells.get(cell)]
        if cell.clause in self._two_sided:
            found.append(self.cells.get(other_side(cell)))
        return [held for held in found if held is not None]

    def ended(self, cell: Cell) -> bool:
        """Return True if the fault of a cell's alarms has ended, on either side, and the cell has not passed since."""
        sides = self.sides(cell)
        return any(held.ended for held in sides) and not any(held.failing or held.fault is not None for held in sides)

    def improved(self, cell: Cell) -> tuple[float, float] | None:
        """Mean of a cell's fault before and after it improved last, in limits; None where it did not."""
        found = [held.fault.improved for held in self.sides(cell) if held.fault is not None]
        return next((means for means in found if means is not None), None)

    def failing(self, cell: Cell) -> bool:
        """Return True if a cell's M reached the level, on either side, and nothing has cleared the cell since."""
        return any(held.failing for held in self.sides(cell))

    def take(
        self,
        now: float,
        series: Sequence[SeriesKey | None],
        columns: HistogramColumns,
        shared: Collection[str] = (),
        *,
        late: bool = False,
    ) -> None:
        """Hold what arrived since the last time against the cells that it is about.

        `columns` has a histogram of each of `series`, None for one that is gone: one of all that arrived of it, because
        merged bounds are wider, and how much is held must not depend on how many points it came in. `shared` are
        versions of the inference kernel that several recorders report. Where what arrived is `late`, older than what a
        window has, and a cell fails already, it shows neither that the fault lasts nor that it has ended.
        """
        found = self._arrivals(series)
        cells, numbers = found.cells, found.numbers
        if not cells:
            return
        self.most = max(self.most, len(self.cells))
        pane = math.floor(now / self._width)
        gains = self._gains(found, columns)
        apart = [place for place, cell in enumerate(cells) if not late and self._waits_for_all(cell, shared)]
        unmoved = [place for place, cell in enumerate(cells) if late and self._fails(cell)]
        gains[unmoved] = 0.0
        whole: dict[Cell, list[Histogram]] = {cells[place]: [] for place in unmoved}
        for place in apart:
            part = columns[int(found.parts[place])]
            whole[cells[place]] = self._of_all_recorders(cells[place], gains[place], part, now, shared)
        rows = self._rows[numbers]
        before = EDetector(rows[:, :_MEAN]).opened(pane > rows[:, _PANE]).gained(gains)
        found_now = before.log_evidence
        reached = found_now >= self.level
        reached[unmoved + [place for place in apart if not whole[cells[place]]]] = False
        after = before.clipped(self.level) if reached.any() else before
        rows[:, :_MEAN], rows[:, _PANE] = after.log_sums, pane
        rows[:, _MEAN] = after.log_evidence if reached.any() else found_now
        self._rows[numbers] = rows
        alarms = {cells[row]: found.held[row] for row in np.flatnonzero(reached).tolist()}
        if self.alarmed or alarms:
            wanted = self.alarmed.keys() | alarms
            parts = {
                cell: taken
                for cell, part in zip(cells, found.parts.tolist(), strict=True)
                if cell in wanted and (taken := whole.get(cell, [columns[part]]))
            }
            self._follow_peaks(parts, now)
            self._follow_faults(parts, alarms)
        self.changed.update(cells)
        for cell, own in alarms.items():
            own.failing, own.peak, own.after = True, now, None
            self.alarmed[cell] = own
        for cell in alarms:
            self._join_peaks(cell)

    def _arrivals(self, series: Sequence[SeriesKey | None]) -> _Arrivals:
        """The cells that some series are about: the same as the last time, mostly."""
        known = self._known
        if known.version != self.version or known.series != series:
            found = [(cell, part) for part, key in enumerate(series) if key is not None for cell in self._cells_of(key)]
            cells, held = [cell for cell, _ in found], [self._held(cell) for cell, _ in found]
            numbers, parts = np.array([own.number for own in held]), np.array([part for _, part in found])
            known = self._known = _Arrivals(series, self.version, cells, held, numbers, parts)
        return known

    def _gains(self, found: _Arrivals, columns: HistogramColumns) -> Floats:
        """Return the gain of each bet on the new observations [cells, bets]."""
        gains, kinds = np.empty((found.parts.size, BETS.size)), self._kinds[found.numbers]
        for rows in rows_of(columns.taken(found.parts)):
            alike = kinds[rows.places]
            for kind in {*alike.tolist()}:
                some = rows.taken(np.flatnonzero(alike == kind))
                gains[some.places] = self._different[kind].gains(some)
        return gains

    def _fails(self, cell: Cell) -> bool:
        """Return True if a cell fails, on either side, or a fault of it has not ended."""
        return any(held.failing or held.fault is not None for held in self.sides(whole_side(cell)))

    def _waits_for_all(self, cell: Cell, shared: Collection[str]) -> bool:
        return cell in self._waiting or self._fails_beside_others(cell, shared)

    def _fails_beside_others(self, cell: Cell, shared: Collection[str]) -> bool:
        own = self.alarmed.get(cell)
        return own is not None and cell.kernel_inference in shared and (own.failing or own.fault is not None)

    def _of_all_recorders(
        self, cell: Cell, gains: Floats, part: Histogram, now: float, shared: Collection[str]
    ) -> list[Histogram]:
        """Return a failing cell's observations of a whole round, empty before its end; `gains` becomes theirs."""
        waiting = self._waiting.setdefault(cell, _Waiting(now, np.zeros(gains.shape), []))
        late = now - waiting.since >= 2.0 * self._heartbeat
        if late and self._fails_beside_others(cell, shared):  # nothing came for a while: what waits is of before that
            self._waiting[cell] = _Waiting(now, gains.copy(), [part])
            gains[:] = waiting.gains
            return waiting.parts
        waiting.gains += gains
        waiting.parts = [Histogram.union([*waiting.parts, part])]
        if cell.kernel_inference in shared and 0.0 <= now - waiting.since < self._heartbeat:
            gains[:] = 0.0
            return []
        del self._waiting[cell]
        gains[:] = waiting.gains
        return waiting.parts

    def _follow_peaks(self, arrived: Mapping[Cell, Sequence[Histogram]], now: float) -> None:
        """Sum the observations since a cell was last at the alarm level, and end alarms without evidence."""
        for cell, parts in arrived.items():
            if cell not in self.alarmed:
                continue
            own = self.cells[cell]
            own.failing = own.failing and own.log_evidence >= _NO_WIN_LOG_EVIDENCE
            within = now - own.peak < self._long
            kept = [] if own.after is not None and own.after.count > _MAX_EXACT_COUNT else parts
            own.after = together([*([own.after] if own.after is not None else []), *kept]) if within else None

    def _follow_faults(self, arrived: Mapping[Cell, Sequence[Histogram]], alarms: Collection[Cell]) -> None:
        """Begin faults at alarms, and end those of which it is refuted that they are as they were."""
        for cell, parts in arrived.items():
            own = self.cells[cell]
            if own.fault is None:
                if cell in alarms:
                    own.fault, own.ended = Fault(together(parts)), False
            elif own.fault.take(parts, own.test, self._alpha):
                own.fault, own.ended = None, True
                self._forget_bets(cell)

    def _join_peaks(self, cell: Cell) -> None:
        """The other side of a cell that alarms forgets what came before the alarm, too: a PASS after it takes both."""
        whole = whole_side(cell)
        for side in (whole, other_side(whole)):
            held = self.cells.get(side)
            if held is not None and side != cell:
                held.peak, held.after = self.cells[cell].peak, None
                self.alarmed[side] = held
                self.changed.add(side)

    def turn_back(self, now: float) -> None:
        """The clock went back: bets begin again with its next pane, and no alarm is later than now."""
        pane = math.floor(now / self._width)
        for cell, held in self.cells.items():
            if held.pane > pane or held.peak > now:
                held.row[_PANE], held.peak = min(held.pane, pane), min(held.peak, now)
                self.changed.add(cell)

    def clear(self, cell: Cell) -> None:
        """Clear a cell whose observations after the peak keep the limit: the alarm is over, its evidence dropped."""
        for side in (cell, other_side(cell)):
            if (held := self.cells.get(side)) is not None:
                held.fault, held.ended = None, False
                self._waiting.pop(side, None)
                self._forget_bets(side)

    def _forget_bets(self, cell: Cell) -> None:
        """Clear the evidence against a cell."""
        held = self.cells[cell]
        held.failing, sums = False, EDetector(np.minimum(held.log_sums, 0.0)[None])
        held.row[:_MEAN], held.row[_MEAN] = sums.log_sums[0], sums.log_evidence[0]
        self.changed.add(cell)

    def restore(self, cell: Cell, held: HeldEvidence) -> bool:
        """Restore a cell's evidence; return False if its limit has changed."""
        if self.test_of(cell) != held.test or held.row.size != _PANE + 1:
            return False
        self._put(cell, held)
        self.most = max(self.most, len(self.cells))
        return True

    def forget(self, key: SeriesKey) -> None:
        """Forget a series and its cells."""
        for cell in self._cells_of(key):
            if (held := self.cells.pop(cell, None)) is not None:
                self._free.append(held.number)
                self.alarmed.pop(cell, None)
                self._waiting.pop(cell, None)
                self.version += 1
                self.changed.add(cell)
        del self._of_series[key]

    def _cells_of(self, key: SeriesKey) -> list[Cell]:
        """The cells that a series is about and that something can be held against."""
        known = self._of_series.get(key)
        if known is None:
            clauses = () if key.slice in UNJUDGED else self._clauses.get(key.metric, ())
            cells = (Cell(self._contract.name, clause, *key[1:]) for clause in clauses)
            known = self._of_series[key] = [cell for cell in cells if self.test_of(cell) is not None]
        return known

    def _held(self, cell: Cell) -> HeldEvidence:
        held = self.cells.get(cell)
        if held is None:
            test = self.test_of(cell)
            assert test is not None
            held = self._put(cell, HeldEvidence(test))
        return held

    def _put(self, cell: Cell, held: HeldEvidence) -> HeldEvidence:
        """Hold this against a cell, in a row of its own."""
        before = self.cells.get(cell)
        if before is not None:
            held.number = before.number
        elif self._free:
            held.number = self._free.pop()
        else:
            held.number = len(self.cells)
            if held.number == len(self._rows):
                self._rows = np.concatenate([self._rows, np.zeros((max(held.number, 64), self._rows.shape[1]))])
                self._kinds = np.concatenate([self._kinds, np.zeros(max(held.number, 64), np.int64)])
                for own in self.cells.values():
                    own.row = self._rows[own.number]
        if held.test not in self._number_of:
            self._number_of[held.test] = len(self._different)
            self._different.append(held.test)
        self._rows[held.number], self._kinds[held.number] = held.row, self._number_of[held.test]
        held.row, self.cells[cell] = self._rows[held.number], held
        self.version += 1
        if held.peak > -math.inf:
            self.alarmed[cell] = held
        return held
