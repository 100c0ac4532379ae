"""All cells of a contract at once: bounds and statuses are columns, and a verdict is made of them when it is asked for.

This module judges the usual case of `verdicts`: a cell whose windows are rows beside those of the others, and that
has not been at an alarm lately; or, where samples are judged once, one of which nothing lies above its limit, so that
Holm's procedure has nothing to decide. Every other cell is left to the functions that judge cells one by one. Those say
what a verdict is, and tests hold the columns against them. Bounds of rows that have not changed are not computed again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.clause import Clause
from kc_otel.judge.cells import (
    NO_PAIR,
    Current,
    Place,
    SilentPairs,
    assumption_broken,
    current,
    evidence_of,
    not_sampled,
    nothing,
    places,
)
from kc_otel.judge.contract_state import ContractState
from kc_otel.judge.fail_evidence import SHARE_DIGITS
from kc_otel.judge.series import LONG, SHORT, Listening, SeriesContent
from kc_otel.judge.statistics import intervals_of_rows, measurable, metric_name
from kc_otel.judge.verdict import Cell, Status, Verdict
from kc_otel.judge.verdicts import (
    Evidence,
    JudgedWindow,
    Terms,
    Window,
    decide,
    decide_apart,
    unjudged,
    verdict_of,
)
from kc_otel.stats import Binned, ExponentialHistogram, Interval
from kc_otel.stats.interval_rows import rows_of

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]
_WINDOWS: Final[tuple[Window, Window]] = ("short", "long")
_EMPTY_WINDOW: Final = np.array([math.nan, -math.inf, math.inf, 0.0])[:, None]
"""Estimate, lower and upper bound, and observations of a window that holds none."""


@dataclass(frozen=True, slots=True, eq=False)
class ClauseColumns:
    """Judged cells of one clause at one time; all columns are [cells]."""

    at: float
    alpha: float
    """Error probability of the upper bounds."""
    level: float
    """Error probability of the lower bounds."""
    method: str
    group: _Group
    which: Numbers
    passes: NDArray[np.bool_]
    window: Numbers
    bounds: Floats
    """Estimate, lower and upper bound, and observations, in the deciding window [4, cells]."""
    notes: NDArray[np.object_]
    shares: Floats
    """Evidence against them, as a share of an alarm; nan where they are judged once."""
    held: tuple[SeriesContent, SeriesContent]
    above: bool

    def verdict(self, number: int) -> Verdict:
        """The verdict of one of the cells."""
        place, share, window = int(self.which[number]), float(self.shares[number]), _WINDOWS[self.window[number]]
        estimate, lower, upper, samples = self.bounds[:, number].tolist()
        interval = Interval(estimate, lower, upper, int(samples), self.method, self.notes[number])
        status = Status.PASS if self.passes[number] else Status.INCONCLUSIVE
        evidence = self.group.evidence(place, self.held, share)
        case = JudgedWindow(evidence, window, self.group.terms[place], self.level, interval, status)
        return verdict_of(self.group.state.contract, case, self.alpha, self.at)


class Judged(NamedTuple):
    """Result for all cells of a contract."""

    places: list[Place]
    """Every cell, by clause, slice and pair."""
    columns: list[tuple[Numbers, ClauseColumns]]
    """Numbers of the cells that were judged, with their results."""
    left: list[int]
    """Numbers of those that are to be judged one by one."""
    errors: dict[str, Exception]


class CellColumns:
    """The cells that a contract has, and their verdicts."""

    def __init__(self, state: ContractState) -> None:
        self.state = state
        self._cells: dict[str, _ClauseCells] = {}
        self._places: list[Place] = []
        self._alpha = (1.0 - state.contract.observability.confidence) / 2.0

    def verdicts(self, now: float, listening: Listening) -> tuple[Verdicts, dict[str, Exception]]:
        """The verdict of every cell at a Unix time in seconds, and what failed, by where.

        A PASS ends what is held against a cell, and so does input that is no sample of its kernels.
        """
        judged = self.judge(now, listening)
        self._places = judged.places
        items = [evidence_of(self.state, judged.places[number], now) for number in judged.left]
        made, errors = decide_apart(self.state.contract, items, now)
        evidence = self.state.evidence
        for verdict in made:
            passes = verdict.status is Status.PASS and evidence.failing(verdict.cell)
            if passes or verdict.status is Status.INVALID_INPUT:
                evidence.clear(verdict.cell)
        return Verdicts(judged, dict(zip(judged.left, made, strict=True))), judged.errors | errors

    def unjudged(self, now: float, error: Exception) -> tuple[Verdict, ...]:
        """NO_DATA of the cells that there were, of all that are remembered before any: to lose one resolves alerts."""
        contract = self.state.contract
        cells = [(place.cell, place.clause) for place in self._places] or [
            (Cell(contract.name, clause.id, slice, *pair), clause)
            for clause in contract.clauses
            for slice in contract.slices_for(clause)
            for pair in sorted(self.state.newest.get(metric_name(clause), {NO_PAIR: 0.0}))
        ]
        return decide(contract, [unjudged(Evidence(*cell, nothing), error) for cell in cells], now)

    def judge(self, now: float, listening: Listening) -> Judged:
        """Judge what can be judged at once, at a Unix time in seconds."""
        state = self.state
        held = state.panes.window(SHORT, now), state.panes.window(LONG, now)
        everything, groups = self._groups(now, listening)
        found: list[tuple[Numbers, ClauseColumns]] = []
        once: list[tuple[Numbers, ClauseColumns]] = []
        errors: dict[str, Exception] = {}
        shares = state.evidence.shares()
        family, usual = sum(group.size for _, group in groups if not group.detected), True
        for begin, group in groups:
            level = self._alpha if group.detected else self._alpha / family
            try:
                columns = group.judge(now, held, shares, level, self._alpha)
            except Exception as error:  # noqa: BLE001 - its cells are judged one by one, to see which of them it is
                errors[f"clause {group.clause.id}, all cells at once"], usual = error, usual and group.detected
                continue
            (found if group.detected else once).append((begin + group.numbers[columns.which], columns))
            usual &= group.detected or (columns.which.size == group.size and not columns.above)
        found += once if usual else []
        left = np.ones(len(everything), np.bool_)
        for numbers, _ in found:
            left[numbers] = False
        return Judged(everything, found, np.flatnonzero(left).tolist(), errors)

    def _groups(self, now: float, listening: Listening) -> tuple[list[Place], list[tuple[int, _Group]]]:
        """Every cell, and those that are judged alike, with where the cells of their clause begin."""
        everything: list[Place] = []
        groups: list[tuple[int, _Group]] = []
        silence = SilentPairs(self.state, now, listening, not_sampled(self.state, now))
        for clause in self.state.contract.clauses:
            of = current(self.state, clause, silence)
            cells = self._cells.get(clause.id)
            if cells is None or not cells.stay(of):
                cells = self._cells[clause.id] = _ClauseCells(self.state, clause, of)
            groups += [(len(everything), group) for group in cells.groups]
            everything += cells.places
        return everything, groups


class _ClauseCells:
    """The cells of one clause, as long as they are the same."""

    def __init__(self, state: ContractState, clause: Clause, of: Current) -> None:
        self._of = of
        self.places = list(places(state, clause, of))
        known = (place.series for place in self.places if place.series is not None)
        self._present = [series for series in known if series.newest >= of.oldest]
        self._newest = -math.inf  # none of them is older
        live: dict[bool, list[int]] = {True: [], False: []}
        for number, place in enumerate(self.places):
            if not place.absence:
                live[state.evidence.test_of(place.cell) is not None].append(number)
        self.groups = [_Group(state, self.places, live[is_], detected=is_) for is_ in live if live[is_]]

    def stay(self, of: Current) -> bool:
        """Return True if the clause still has these cells, also in a later long window with the same pairs."""
        if of == self._of:
            return True
        if of.oldest < self._of.oldest or of._replace(oldest=self._of.oldest) != self._of:
            return False
        if self._newest < of.oldest:
            self._newest = min((series.newest for series in self._present), default=math.inf)
        return self._newest >= of.oldest


class _Group:
    """Cells of a clause that are judged alike, by their numbers among its cells.

    `detected` says whether something can be held against their limits; `rows` are theirs in the panes.
    """

    def __init__(self, state: ContractState, places: Sequence[Place], numbers: list[int], *, detected: bool) -> None:
        self.detected, self.size = detected, len(numbers)
        self.state, self.numbers = state, np.array(numbers)
        self.places = [places[number] for number in numbers]
        self.clause = self.places[0].clause
        slices = {place.cell.slice for place in self.places}
        terms = {slice: Terms.of(state.contract, self.clause, slice) for slice in slices}
        self.terms = [terms[place.cell.slice] for place in self.places]
        self._limits = np.array([term.limit for term in self.terms])
        self._none = np.array([term.allows_none for term in self.terms])
        series = [place.series for place in self.places]
        self.rows = np.array([-1 if own is None else own.number for own in series])
        self._there = self.rows >= 0
        self._assumes = bool(measurable(self.clause)) or any(place.otherwise for place in self.places)
        self._known = tuple(_Bounds(self.clause, state, self.rows, window) for window in (SHORT, LONG))
        self._held, self._held_at = np.full(self.size, -1), -1

    def judge(
        self, now: float, held: tuple[SeriesContent, SeriesContent], shares: Floats, level: float, alpha: float
    ) -> ClauseColumns:
        """Judge those that can be judged at once; `shares` is the evidence by a cell's number in `FailEvidence`."""
        usual = self._plain(now)
        short, long = self._known
        short.look(now, held[SHORT], usual, level, alpha)
        passes, fails = self._said(short.values)
        open_ = usual & ~passes & ~(fails & self.detected)
        long.look(now, held[LONG], open_, level, alpha)
        usual &= ~open_ | (long.values[3] > 0.0)
        values = np.where(open_, long.values, short.values)
        above = usual & ((short.values[0] > self._limits) | (values[0] > self._limits))
        passes = np.where(open_, self._said(long.values)[0], passes)
        which = np.flatnonzero(usual)
        return ClauseColumns(
            at=now,
            alpha=alpha,
            level=level,
            method=short.method or long.method,
            group=self,
            which=which,
            passes=passes[which],
            window=np.where(open_, LONG, SHORT)[which],
            bounds=values[:, which],
            notes=np.where(open_, long.notes, short.notes)[which],
            shares=self._shares(shares)[which],
            held=held,
            above=bool(above.any()),
        )

    def evidence(self, number: int, held: tuple[SeriesContent, SeriesContent], share: float) -> Evidence:
        """Return the evidence on a cell at a time when it was not judged by an alarm."""

        def sample(window: Window) -> Binned:
            known = held[_WINDOWS.index(window)].of(int(self.rows[number]))
            return (known or ExponentialHistogram.empty(0)).binned()

        place = self.places[number]
        return Evidence(place.cell, place.clause, sample, followed=True, share=round(share, SHARE_DIGITS))

    def _plain(self, now: float) -> NDArray[np.bool_]:
        """Mask of the cells that are in the columns of the windows and are not judged by an alarm."""
        if self.clause.opposite is not None:
            return np.zeros(self.size, np.bool_)
        plain = self._there.copy()
        if self._assumes:
            plain &= [not assumption_broken(self.state, place, now) for place in self.places]
        seen, alarmed = self.state.contract.observability, self.state.evidence.alarmed
        if alarmed:
            recent = now - max(seen.window, seen.long_window)
            for number, place in enumerate(self.places):
                held = alarmed.get(place.cell)
                settled = held is None or (held.fault is None and not (held.ended or held.failing))
                plain[number] &= settled and not (held is not None and held.peak > recent)
        return plain

    def _said(self, values: Floats) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Masks of the cells that pass, and of those with enough observations whose lower bound is above the limit."""
        estimate, lower, upper, samples = values
        enough = samples >= self.terms[0].needed
        kept = (upper <= self._limits) | (self._none & (estimate == 0.0))
        return kept & enough & ~(lower > self._limits), (lower > self._limits) & enough

    def _shares(self, shares: Floats) -> Floats:
        evidence = self.state.evidence
        if not self.detected:
            return np.full(self.size, math.nan)
        if self._held_at != evidence.version:
            held = [evidence.cells.get(place.cell) for place in self.places]
            self._held = np.array([-1 if own is None else own.number for own in held])
            self._held_at = evidence.version
        found: Floats = shares[self._held]
        return found


class _Bounds:
    """The bounds of a group's cells in one window; those of cells that have not changed are not computed again.

    `values` are estimate, lower and upper bound, and observations [4, cells].
    """

    def __init__(self, clause: Clause, state: ContractState, rows: Numbers, window: int) -> None:
        self._clause, self._assumptions, self._rows = clause, state.contract.assumptions, rows
        self._panes, self._grid = state.panes, state.grids[window]
        self._version, self._seen = np.full(rows.size, -1), (0, math.nan, math.nan)
        self.values = np.tile(_EMPTY_WINDOW, (1, rows.size))
        self.notes, self.method = np.full(rows.size, "", np.object_), ""

    def look(self, now: float, held: SeriesContent, wanted: NDArray[np.bool_], level: float, alpha: float) -> None:
        """Bring the bounds of the wanted cells up to date; the others' may be of before."""
        if self._seen != (seen := (self._grid.index(now), level, alpha)):
            self._seen, self._version[:] = seen, -1
        version = self._panes.versions(self._rows)
        new = np.flatnonzero(wanted & (version != self._version))
        if new.size:
            self._version[new] = -1  # where what follows fails
            self._compute(held, new, level, alpha)
            self._version[new] = version[new]

    def _compute(self, held: SeriesContent, cells: Numbers, level: float, alpha: float) -> None:
        self.values[:, cells], self.notes[cells] = _EMPTY_WINDOW, ""
        there, at = held.places(self._rows[cells])
        cells = cells[there]
        for rows in rows_of(held.columns.taken(at)):
            found = intervals_of_rows(self._clause, self._assumptions, rows, alpha_lower=level, alpha_upper=alpha)
            of = cells[rows.places]
            self.values[:, of] = (found.estimate, found.lower, found.upper, found.samples)
            self.notes[of], self.method = found.note, found.method


class Verdicts(Sequence[Verdict]):
    """Verdicts of all cells of a contract, made of columns when they are asked for, unless `made` has them."""

    def __init__(self, judged: Judged, made: Mapping[int, Verdict]) -> None:
        self._places, size = judged.places, len(judged.places)
        self._made: list[Verdict | None] = [None] * size
        self._status = np.zeros(size, np.int8)
        self._where = np.zeros((2, size), np.int64)
        self._columns: list[ClauseColumns] = []
        self._numbers: dict[Cell, int] = {}
        for number, verdict in made.items():
            self._made[number], self._status[number] = verdict, verdict.status.code
        for numbers, found in judged.columns:
            self._where[0, numbers], self._where[1, numbers] = len(self._columns), np.arange(numbers.size)
            self._status[numbers] = np.where(found.passes, Status.PASS.code, Status.INCONCLUSIVE.code)
            self._columns.append(found)

    def selected(self, statuses: Collection[Status], cells: Iterable[Cell] = ()) -> list[Verdict]:
        """Those that have one of some statuses, and those of some cells, in their order; no other is made."""
        wanted = np.zeros(self._status.size, np.bool_)
        for status in statuses:
            wanted |= self._status == status.code
        for cell in cells:
            if not self._numbers:
                self._numbers = {place.cell: number for number, place in enumerate(self._places)}
            if cell in self._numbers:
                wanted[self._numbers[cell]] = True
        return [self[number] for number in np.flatnonzero(wanted).tolist()]

    @property
    def cells(self) -> list[Cell]:
        """The cells, in the order of their verdicts."""
        return [place.cell for place in self._places]

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
            column, place = self._where[:, number].tolist()
            verdict = self._made[number] = self._columns[column].verdict(place)
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
