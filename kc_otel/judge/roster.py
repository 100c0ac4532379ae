"""All cells of a contract at once: bounds and statuses are columns, and a verdict is made of them when it is asked for.

What is judged here is the usual case of `verdicts`: a cell whose windows are rows beside those of the others, and that
has not been at an alarm lately; or, where samples are judged once, one of which nothing lies above its limit, so that
Holm's procedure has nothing to decide. Every other cell is left to the functions that judge cells one by one. Those say
what a verdict is, and tests hold the columns against them. Bounds of rows that have not changed are not computed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, overload

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.clause import Clause
from kc_otel.judge.cell_evidence import Alarm, Evidence, JudgedWindow, Terms, Window
from kc_otel.judge.cells import Current, Place, current, places
from kc_otel.judge.contract_state import ContractState
from kc_otel.judge.fail_evidence import SHARE_DIGITS
from kc_otel.judge.histograms import union
from kc_otel.judge.panes import WindowContent
from kc_otel.judge.series import LONG, SHORT, Listening
from kc_otel.judge.statistics import intervals_of_rows
from kc_otel.judge.verdict import Status, Verdict
from kc_otel.judge.verdicts import verdict_of
from kc_otel.stats import Binned, ExponentialHistogram, Interval

__all__ = ["ClauseColumns", "Roster", "Verdicts"]

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]
_WINDOWS: Final[tuple[Window, Window]] = ("short", "long")


@dataclass(frozen=True, slots=True, eq=False)
class ClauseColumns:
    """What was found of cells of one clause; all columns are [cells].

    Attributes:
        state: What is remembered of the contract.
        at: Unix time of the evaluation, seconds.
        alpha: Error probability of the upper bounds.
        level: Error probability of the lower bounds.
        terms: What the clause says of each.
        method: Name of the interval.
        places: The cells.
        passes: Whether they PASS; the others are INCONCLUSIVE.
        window: Number of the deciding window.
        bounds: Estimate, lower and upper bound, and observations, in the deciding window [4, cells].
        notes: What a reader has to know of them.
        shares: What is held against them; nan where they are judged once.
        rows: Their rows in the panes.
        held: What each window held.
    """

    state: ContractState
    at: float
    alpha: float
    level: float
    terms: Sequence[Terms]
    method: str
    places: Sequence[Place]
    passes: NDArray[np.bool_]
    window: Numbers
    bounds: Floats
    notes: NDArray[np.object_]
    shares: Floats
    rows: Numbers
    held: tuple[WindowContent, WindowContent]

    def verdict(self, number: int) -> Verdict:
        """The verdict of one of the cells."""
        place, window = self.places[number], _WINDOWS[self.window[number]]

        def sample(_: Window) -> Binned:
            parts = self.held[self.window[number]].parts(int(self.rows[number]))
            return (union(parts) if parts else ExponentialHistogram.empty(0)).binned()

        estimate, lower, upper, samples = self.bounds[:, number].tolist()
        interval = Interval(estimate, lower, upper, int(samples), self.method, self.notes[number])
        item = Evidence(
            place.cell,
            place.clause,
            sample,
            alarm=Alarm(round(float(self.shares[number]), SHARE_DIGITS), failing=False),
        )
        status = Status.PASS if self.passes[number] else Status.INCONCLUSIVE
        case = JudgedWindow(item, window, self.terms[number], self.level, interval, status)
        return verdict_of(self.state.contract, case, self.alpha, self.at)


class Roster:
    """The cells that a contract has.

    Args:
        state: What is remembered of the contract.
    """

    def __init__(self, state: ContractState) -> None:
        self._state = state
        self._cells: dict[str, _ClauseCells] = {}
        self._alpha = (1.0 - state.contract.observability.confidence) / 2.0

    def judge(
        self, now: float, listening: Listening
    ) -> tuple[list[Place], list[tuple[Numbers, ClauseColumns]], dict[str, Exception]]:
        """Judge what can be judged at once.

        Args:
            now: Unix time in seconds.
            listening: When silence counts.

        Returns:
            Every cell, by clause, slice and pair; of those that were judged their numbers, with what was found; and
            what failed, by where.
        """
        state = self._state
        for window in state.windows:
            window.move(now)
        held = (state.panes.window(SHORT, now), state.panes.window(LONG, now))
        everything: list[Place] = []
        groups: list[tuple[int, _Group]] = []
        for clause in state.contract.clauses:
            of = current(state, clause, now, listening)
            cells = self._cells.get(clause.id)
            if cells is None or cells.of != of:
                cells = self._cells[clause.id] = _ClauseCells(state, clause, of)
            groups += [(len(everything), group) for group in cells.groups]
            everything += cells.places
        found: list[tuple[Numbers, ClauseColumns]] = []
        once: list[tuple[Numbers, ClauseColumns]] = []
        errors: dict[str, Exception] = {}
        family, usual = sum(group.size for _, group in groups if not group.detected), True
        for begin, group in groups:
            level = self._alpha if group.detected else self._alpha / family
            try:
                numbers, columns, above = group.judge(now, level, self._alpha, held)
            except Exception as error:  # noqa: BLE001 - its cells are judged one by one, to see which of them it is
                errors[f"clause {group.clause.id}, all cells at once"], usual = error, usual and group.detected
                continue
            (found if group.detected else once).append((begin + numbers, columns))
            usual &= group.detected or (numbers.size == group.size and not above)
        return everything, found + once if usual else found, errors


class _ClauseCells:
    """The cells of one clause, as long as they are the same."""

    def __init__(self, state: ContractState, clause: Clause, of: Current) -> None:
        self.of = of
        self.places = list(places(state, clause, of))
        live: dict[bool, list[int]] = {True: [], False: []}
        for number, place in enumerate(self.places):
            if not place.absence:
                live[state.evidence.test_of(place.cell) is not None].append(number)
        self.groups = [_Group(state, self.places, live[is_], detected=is_) for is_ in live if live[is_]]


class _Group:
    """Cells of a clause that are judged alike.

    Args:
        state: What is remembered of the contract.
        places: The cells of the clause.
        numbers: Of those that are meant.
        detected: Whether something can be held against their limits.

    Attributes:
        size: How many they are.
        clause: Their clause.
    """

    def __init__(self, state: ContractState, places: Sequence[Place], numbers: list[int], *, detected: bool) -> None:
        self.detected, self.size = detected, len(numbers)
        self._state, self._numbers = state, np.array(numbers)
        self._places = [places[number] for number in numbers]
        self.clause = self._places[0].clause
        slices = {place.cell.slice for place in self._places}
        terms = {slice: Terms.of(state.contract, self.clause, slice) for slice in slices}
        self._terms = [terms[place.cell.slice] for place in self._places]
        self._limits = np.array([one.limit for one in self._terms])
        self._none = np.array([one.allows_none for one in self._terms])
        self._rows = np.array([-1 if place.series is None else place.series.row for place in self._places])
        self._held_rows = np.array([-1 if place.series is None else place.series.number for place in self._places])
        self._usual = self.clause.opposite is None and bool((self._rows >= 0).all())
        self._known = tuple(_Bounds(self.clause, state, number, self._rows) for number in (SHORT, LONG))
        self._held, self._held_at = np.full(self.size, -1), -1

    def judge(
        self, now: float, level: float, alpha: float, held: tuple[WindowContent, WindowContent]
    ) -> tuple[Numbers, ClauseColumns, bool]:
        """Judge those that can be judged at once.

        Returns:
            Their numbers among the clause's cells, what was found, and whether any estimate is above its limit.
        """
        short, long = self._known
        usual = self._plain(now)
        short.look(np.flatnonzero(usual), level, alpha)
        usual &= ~short.odd
        passes, fails = self._said(short.values)
        open_ = usual & ~passes & ~(fails & self.detected)
        long.look(np.flatnonzero(open_), level, alpha)
        usual &= ~open_ | (~long.odd & (long.values[3] > 0.0))
        later, _ = self._said(long.values)
        which = np.flatnonzero(usual)
        window = np.where(open_, LONG, SHORT)[which]
        values = np.where(window == LONG, long.values[:, which], short.values[:, which])
        passes = np.where(window == LONG, later[which], passes[which])
        estimates = (short.values[0, which], values[0])
        columns = ClauseColumns(
            state=self._state,
            at=now,
            alpha=alpha,
            level=level,
            terms=[self._terms[number] for number in which.tolist()] if which.size < self.size else self._terms,
            method=short.method or long.method,
            places=[self._places[number] for number in which.tolist()] if which.size < self.size else self._places,
            passes=passes,
            window=window,
            bounds=values,
            notes=np.where(window == LONG, long.notes[which], short.notes[which]),
            shares=self._shares()[which],
            rows=self._held_rows[which],
            held=held,
        )
        return self._numbers[which], columns, any((each > self._limits[which]).any() for each in estimates)

    def _plain(self, now: float) -> NDArray[np.bool_]:
        """Which cells are in rows, and were at no alarm that they are to be judged by."""
        if not self._usual:
            return np.zeros(self.size, np.bool_)
        plain = self._state.windows[SHORT].following(self._rows) & self._state.windows[LONG].following(self._rows)
        seen, alarmed = self._state.contract.observability, self._state.evidence.alarmed
        if alarmed:
            recent = now - max(seen.window, seen.long_window)
            for number, place in enumerate(self._places):
                held = alarmed.get(place.cell)
                plain[number] &= held is None or not (held.failing or held.peak > recent)
        return plain

    def _said(self, values: Floats) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which cells pass, and in which enough observations are above the limit."""
        estimate, lower, upper, samples = values
        enough = samples >= self._terms[0].needed
        kept = (upper <= self._limits) | (self._none & (estimate == 0.0))
        return kept & enough & ~(lower > self._limits), (lower > self._limits) & enough

    def _shares(self) -> Floats:
        evidence = self._state.evidence
        if not self.detected:
            return np.full(self.size, math.nan)
        if self._held_at != evidence.version:
            held = [evidence.cells.get(place.cell) for place in self._places]
            self._held = np.array([-1 if one is None else one.number for one in held])
            self._held_at = evidence.version
        return evidence.shares(self._held)


class _Bounds:
    """The bounds of a group's cells in one window, of the observations that there were when they were asked for.

    Attributes:
        values: Estimate, lower and upper bound, and observations [4, cells].
        odd: Whether a cell is to be judged by itself [cells].
        notes: What a reader has to know [cells].
        method: Name of the interval.
    """

    def __init__(self, clause: Clause, state: ContractState, window: int, rows: Numbers) -> None:
        self._clause, self._assumptions = clause, state.contract.assumptions
        self._window, self._rows = state.windows[window], rows
        self._version, self._levels = np.full(rows.size, -1), (math.nan, math.nan)
        self.values, self.odd = np.tile(_NOTHING, (1, rows.size)), np.zeros(rows.size, np.bool_)
        self.notes, self.method = np.full(rows.size, "", np.object_), ""

    def look(self, cells: Numbers, level: float, alpha: float) -> None:
        """Bring these cells up to date, for an error probability of the lower side and one of the upper side."""
        if self._levels != (level, alpha):
            self._levels, self._version[:] = (level, alpha), -1
        new = cells[self._version[cells] != self._window.version[self._rows[cells]]]
        if not new.size:
            return
        self._version[new] = self._window.version[self._rows[new]]
        self.values[:, new], self.odd[new], self.notes[new] = _NOTHING, False, ""
        rows = self._window.rows(self._rows[new])
        if not rows.places.size:
            return
        found = intervals_of_rows(self._clause, self._assumptions, rows, alpha_lower=level, alpha_upper=alpha)
        at = new[rows.places]
        if found is None:
            self.odd[at] = True
        else:
            self.values[:, at] = (found.estimate, found.lower, found.upper, found.samples)
            self.odd[at], self.notes[at], self.method = found.odd, found.note, found.method


_NOTHING: Final = np.array([math.nan, -math.inf, math.inf, 0.0])[:, None]


class Verdicts(Sequence[Verdict]):
    """Verdicts of all cells of a contract, made of columns when they are asked for.

    Args:
        size: How many there are.
        made: Those that were made one by one, by their numbers.
        columns: The others.
    """

    def __init__(self, size: int, made: dict[int, Verdict], columns: Sequence[tuple[Numbers, ClauseColumns]]) -> None:
        self._made: list[Verdict | None] = [made.get(number) for number in range(size)]
        self._columns = [each for _, each in columns]
        self._where = np.zeros((size, 2), np.int64)
        for column, (numbers, _) in enumerate(columns):
            self._where[numbers, 0], self._where[numbers, 1] = column, np.arange(numbers.size)

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, number: int) -> Verdict: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Verdict]: ...
    def __getitem__(self, number: int | slice) -> Verdict | Sequence[Verdict]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        verdict = self._made[number]
        if verdict is None:
            column, place = self._where[number].tolist()
            verdict = self._made[number] = self._columns[column].verdict(place)
        return verdict
