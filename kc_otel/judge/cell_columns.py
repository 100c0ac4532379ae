"""All cells of a contract at once: bounds and statuses are columns, and a verdict is made of them when it is asked for.

This module judges the usual case of `verdicts`: a cell whose windows are rows beside those of the others, and that
has not been at an alarm lately; or, where samples are judged once, one of which nothing lies above its limit, so that
Holm's procedure has nothing to decide. Every other cell is left to the functions that judge cells one by one. Those say
what a verdict is, and tests hold the columns against them. Bounds of rows that have not changed are not computed again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, overload

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
_LEFT: Final = -1
_EMPTY_WINDOW: Final = np.array([math.nan, -math.inf, math.inf, 0.0])[:, None]
"""Estimate, lower and upper bound, and observations of a window that holds none."""


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
        judged, errors = self.judge(now, listening)
        self._places = judged.places
        items = [evidence_of(self.state, judged.places[number], now) for number in judged.left]
        made, failed = decide_apart(self.state.contract, items, now)
        judged.put(made)
        evidence = self.state.evidence
        for verdict in made:
            passes = verdict.status is Status.PASS and evidence.failing(verdict.cell)
            if passes or verdict.status is Status.INVALID_INPUT:
                evidence.clear(verdict.cell)
        return judged, errors | failed

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

    def judge(self, now: float, listening: Listening) -> tuple[Verdicts, dict[str, Exception]]:
        """Judge what can be judged at once, at a Unix time in seconds; returns what failed, too."""
        everything, groups = self._groups(now, listening)
        judged, errors = Verdicts(self.state, everything, now, self._alpha), dict[str, Exception]()
        shares = self.state.evidence.shares()
        family, usual = sum(group.size for _, group in groups if not group.detected), True
        for begin, group in groups:
            level = self._alpha if group.detected else self._alpha / family
            try:
                usual &= group.judge(judged, begin, shares, level)
            except Exception as error:  # noqa: BLE001 - its cells are judged one by one, to see which of them it is
                errors[f"clause {group.clause.id}, all cells at once"], usual = error, usual and group.detected
        if not usual:  # Holm's procedure has something to decide
            for begin, group in groups:
                if not group.detected:
                    judged.status[begin + group.numbers] = _LEFT
        return judged, errors

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
        self._needed = next(iter(terms.values())).needed
        self._limits = np.array([terms[place.cell.slice].limit for place in self.places])
        self._none = np.array([terms[place.cell.slice].allows_none for place in self.places])
        series = [place.series for place in self.places]
        self.rows = np.array([-1 if own is None else own.number for own in series])
        self._there = self.rows >= 0
        self._assumes = bool(measurable(self.clause)) or any(place.otherwise for place in self.places)
        self._known = tuple(_Bounds(self.clause, state, self.rows, window) for window in (SHORT, LONG))
        self._held, self._held_at = np.full(self.size, -1), -1

    def judge(self, into: Verdicts, begin: int, shares: Floats, level: float) -> bool:
        """Judge those that can be judged at once, whose clause's cells begin at a number.

        `shares` is the evidence by a cell's number in `FailEvidence`. Returns False if some are judged once, and one is
        left or above its limit.
        """
        usual, (short, long) = self._plain(into.at), self._known
        short.look(into.at, into.held[SHORT], usual, level, into.alpha)
        passes, fails = self._said(short.values)
        open_ = usual & ~passes & ~(fails & self.detected)
        long.look(into.at, into.held[LONG], open_, level, into.alpha)
        usual &= ~open_ | (long.values[3] > 0.0)
        values = np.where(open_, long.values, short.values)
        above = usual & ((short.values[0] > self._limits) | (values[0] > self._limits))
        passes = np.where(open_, self._said(long.values)[0], passes)
        numbers = begin + self.numbers[usual]
        into.status[numbers] = np.where(passes, Status.PASS.code, Status.INCONCLUSIVE.code)[usual]
        into.window[numbers], into.values[:, numbers] = np.where(open_, LONG, SHORT)[usual], values[:, usual]
        into.notes[numbers] = np.where(open_, long.notes, short.notes)[usual]
        into.shares[numbers], into.level[numbers] = self._shares(shares)[usual], level
        into.methods[numbers] = short.method or long.method
        return self.detected or bool(usual.all() and not above.any())

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
        enough = samples >= self._needed
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
    """Verdicts of all cells of a contract at a Unix time, made of columns [cells] when they are asked for.

    `status` is a code, or _LEFT for a cell that is to be judged by itself; `window` is the one that decides; `values`
    are estimate, lower and upper bound, and observations in it [4, cells]; `level` and `alpha` are error probabilities
    of lower and upper bounds, `shares` the evidence as a share of an alarm, nan where cells are judged once.
    """

    def __init__(self, state: ContractState, places: list[Place], at: float, alpha: float) -> None:
        self._state, self.places, self.at, self.alpha = state, places, at, alpha
        self.held = state.panes.window(SHORT, at), state.panes.window(LONG, at)
        size = len(places)
        self.status, self.window = np.full(size, _LEFT, np.int8), np.zeros(size, np.int8)
        self.values, self.level, self.shares = np.zeros((4, size)), np.zeros(size), np.zeros(size)
        self.notes, self.methods = np.full(size, "", np.object_), np.full(size, "", np.object_)
        self._made: list[Verdict | None] = [None] * size
        self._numbers: dict[Cell, int] = {}

    @property
    def left(self) -> list[int]:
        """Numbers of the cells that are to be judged one by one."""
        found: list[int] = np.flatnonzero(self.status == _LEFT).tolist()
        return found

    def put(self, verdicts: Iterable[Verdict]) -> None:
        """Have the verdicts of those that are `left`."""
        for number, verdict in zip(self.left, verdicts, strict=True):
            self._made[number], self.status[number] = verdict, verdict.status.code

    def _judged(self, number: int) -> Verdict:
        cell, clause, series, *_ = self.places[number]

        def sample(window: Window) -> Binned:
            known = None if series is None else self.held[_WINDOWS.index(window)].of(series.number)
            return (known or ExponentialHistogram.empty(0)).binned()

        share = round(float(self.shares[number]), SHARE_DIGITS)
        estimate, lower, upper, samples = self.values[:, number].tolist()
        case = JudgedWindow(
            Evidence(cell, clause, sample, followed=True, share=share),
            _WINDOWS[self.window[number]],
            Terms.of(self._state.contract, clause, cell.slice),
            float(self.level[number]),
            Interval(estimate, lower, upper, int(samples), self.methods[number], self.notes[number]),
            Status.PASS if self.status[number] == Status.PASS.code else Status.INCONCLUSIVE,
        )
        return verdict_of(self._state.contract, case, self.alpha, self.at)

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
            verdict = self._made[number] = self._judged(number)
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
