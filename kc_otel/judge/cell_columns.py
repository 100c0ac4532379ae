"""All cells of a contract at once: bounds and statuses are columns, and a verdict is made of them when it is asked for.

What is judged here is the usual case of `verdicts`: a cell whose windows are rows beside those of the others, and that
has not been at an alarm lately; or, where samples are judged once, one of which nothing lies above its limit, so that
Holm's procedure has nothing to decide. Every other cell is left to the functions that judge cells one by one. Those say
what a verdict is, and tests hold the columns against them. Bounds of rows that have not changed are not computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.clause import Clause
from kc_otel.contract.units import format_duration
from kc_otel.judge.cell_bounds import CellBounds
from kc_otel.judge.cell_evidence import Alarm, Evidence, JudgedWindow, Terms, Window
from kc_otel.judge.cells import Current, Place, SilentPairs, current, places
from kc_otel.judge.contract_state import ContractState
from kc_otel.judge.fail_evidence import SHARE_DIGITS
from kc_otel.judge.faults import decide_apart
from kc_otel.judge.histograms import Histogram, union
from kc_otel.judge.panes import WindowContent
from kc_otel.judge.series import LONG, SHORT, Listening
from kc_otel.judge.verdict import Status, Verdict
from kc_otel.judge.verdict_reasons import kept
from kc_otel.judge.verdicts import Memo, verdict_of
from kc_otel.judge.window_rows import WindowState, WindowStates
from kc_otel.stats import Binned, ExponentialHistogram, Interval

__all__ = ["CellColumns", "ClauseColumns", "Judged"]

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]
_WINDOWS: Final[tuple[Window, Window]] = ("short", "long")


@dataclass(frozen=True, slots=True, eq=False)
class ClauseColumns:
    """What was found of cells of one clause at one time; all columns are [cells].

    Attributes:
        state: What is remembered of the contract.
        at: Unix time of the evaluation, seconds.
        alpha: Error probability of the upper bounds.
        level: Error probability of the lower bounds.
        method: Name of the interval.
        group: The cells that are judged alike.
        which: Numbers of those that were judged.
        passes: Whether they PASS; the others are INCONCLUSIVE.
        window: Number of the deciding window.
        bounds: Estimate, lower and upper bound, and observations, in the deciding window [4, cells]; the estimate is
            nan where nobody has looked for them.
        look: Looks for the bounds of one of the group's cells in one of the windows.
        notes: What a reader has to know of them.
        shares: What is held against them; nan where they are judged once.
        held: What each window held.
        above: Whether the estimate of any is above its limit.
    """

    state: ContractState
    at: float
    alpha: float
    level: float
    method: str
    group: _Group
    which: Numbers
    passes: NDArray[np.bool_]
    window: Numbers
    bounds: Floats
    look: Callable[[int, int], tuple[Floats, str, str]]
    notes: NDArray[np.object_]
    shares: Floats
    held: tuple[WindowContent, WindowContent]
    above: bool

    def verdict(self, number: int) -> Verdict:
        """The verdict of one of the cells."""
        place, share, window = int(self.which[number]), float(self.shares[number]), _WINDOWS[self.window[number]]
        bounds, note, method = self.bounds[:, number], self.notes[number], self.method
        if math.isnan(bounds[0]):
            bounds, note, method = self.look(place, int(self.window[number]))
        estimate, lower, upper, samples = bounds.tolist()
        interval = Interval(estimate, lower, upper, int(samples), method, note)
        terms, contract = self.group.terms[place], self.state.contract
        if not self.passes[number] or terms.allows_none:
            status = Status.PASS if self.passes[number] else Status.INCONCLUSIVE
            evidence = self.group.evidence(place, self.held, share)
            case = JudgedWindow(evidence, window, terms, self.level, interval, status)
            return verdict_of(contract, case, self.alpha, self.at)
        # The same for what mostly is, without what only the other sentences are made of.
        return Verdict(
            self.group.places[place].cell,
            Status.PASS,
            self.at,
            terms.limit,
            estimate,
            lower,
            upper,
            interval.samples,
            window,
            method,
            kept(interval, terms.limit, terms.what, self.group.spans[window]),
            contract.metadata.version,
            contract.hash,
            terms.about,
            round(share, SHARE_DIGITS),
        )


class Judged(NamedTuple):
    """What was found of all cells of a contract.

    Attributes:
        places: Every cell, by clause, slice and pair.
        columns: Numbers of cells that were judged, with what was found.
        left: Numbers of those that are to be judged one by one.
        errors: What failed, by where.
        waiting: Cells that can be judged at once, and wait.
    """

    places: list[Place]
    columns: list[tuple[Numbers, ClauseColumns]]
    left: list[int]
    errors: dict[str, Exception]
    waiting: _Waiting | None


class CellColumns:
    """The cells that a contract has.

    Args:
        state: What is remembered of the contract.
    """

    def __init__(self, state: ContractState) -> None:
        self._state = state
        self._cells: dict[str, _ClauseCells] = {}
        self._alpha = (1.0 - state.contract.observability.confidence) / 2.0
        self._waiting: list[_Waiting] = []

    def judge(self, now: float, listening: Listening, *, later: bool = False) -> Judged:
        """Judge what can be judged at once.

        Args:
            now: Unix time in seconds.
            listening: When silence counts.
            later: Whether what needs nothing but the windows may wait, until somebody asks for a verdict of it: then it
                is judged together with all that waits.
        """
        state = self._state
        for window in state.windows:
            window.move(now)
        held = (state.panes.window(SHORT, now), state.panes.window(LONG, now))
        short, long = (window.state(lasting=later) for window in state.windows)
        seen = _Seen(now, (short, long), held)
        everything, groups = self._groups(now, listening)
        found: list[tuple[Numbers, ClauseColumns]] = []
        once: list[tuple[Numbers, ClauseColumns]] = []
        put_off: list[tuple[int, _Group, _Asked]] = []
        errors: dict[str, Exception] = {}
        shares = state.evidence.shares()
        family, usual = sum(group.size for _, group in groups if not group.detected), True
        for begin, group in groups:
            level = self._alpha if group.detected else self._alpha / family
            asked = group.ask(seen, shares)
            if later and group.detected:
                put_off.append((begin, group, asked))
                continue
            try:
                (columns,) = group.judge([asked], [WindowStates([short]), WindowStates([long])], level, self._alpha)
            except Exception as error:  # noqa: BLE001 - its cells are judged one by one, to see which of them it is
                errors[f"clause {group.clause.id}, all cells at once"], usual = error, usual and group.detected
                continue
            (found if group.detected else once).append((begin + group.numbers[columns.which], columns))
            usual &= group.detected or (columns.which.size == group.size and not columns.above)
        found += once if usual else []
        left = np.ones(len(everything), np.bool_)
        for numbers in (
            *(numbers for numbers, _ in found),
            *(begin + group.numbers[asked.plain] for begin, group, asked in put_off),
        ):
            left[numbers] = False
        return Judged(everything, found, np.flatnonzero(left).tolist(), errors, self._put_off(seen, put_off))

    def _groups(self, now: float, listening: Listening) -> tuple[list[Place], list[tuple[int, _Group]]]:
        """Every cell, and those that are judged alike, with where the cells of their clause begin."""
        everything: list[Place] = []
        groups: list[tuple[int, _Group]] = []
        silence = SilentPairs(self._state, now, listening)
        for clause in self._state.contract.clauses:
            of = current(self._state, clause, silence)
            cells = self._cells.get(clause.id)
            if cells is None or not cells.stay(of):
                self._settle()  # what waits is about the cells that there were
                cells = self._cells[clause.id] = _ClauseCells(self._state, clause, of)
            groups += [(len(everything), group) for group in cells.groups]
            everything += cells.places
        return everything, groups

    def _put_off(self, seen: _Seen, groups: Sequence[tuple[int, _Group, _Asked]]) -> _Waiting | None:
        """Judge these later."""
        if not groups:
            return None
        if self._waiting and not seen.is_beside(self._waiting[0].seen):
            self._settle()
        self._waiting.append(_Waiting(seen, groups, self._settle))
        return self._waiting[-1]

    def _settle(self) -> None:
        """Judge all that waits."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        windows = [WindowStates([one.seen.states[number] for one in waiting]) for number in (SHORT, LONG)]
        for asked in zip(*(one.put_off for one in waiting), strict=True):
            begin, group, _ = asked[0]
            try:
                judged = group.judge([one for _, _, one in asked], windows, self._alpha, self._alpha, later=True)
            except Exception:  # noqa: BLE001 - they are judged one by one
                judged = []
            for one, columns in zip_longest(waiting, judged):
                if columns is not None:
                    one.columns.append((begin + group.numbers[columns.which], columns))
        for one in waiting:
            one.decide_others(self._state)


class _Seen(NamedTuple):
    """What the windows held at the time of an evaluation.

    Attributes:
        at: Unix time in seconds.
        states: The rows of each.
        held: The panes of each.
    """

    at: float
    states: tuple[WindowState, WindowState]
    held: tuple[WindowContent, WindowContent]

    def is_beside(self, other: _Seen) -> bool:
        """Whether rows of both can be in one matrix."""
        return all(one.is_beside(another) for one, another in zip(self.states, other.states, strict=True))


class _Asked(NamedTuple):
    """What cells of a group were to be judged by at one time, besides their windows' bounds.

    Attributes:
        seen: The windows.
        plain: Whether each is in rows, and was at no alarm that it is to be judged by [cells].
        shares: What is held against each [cells].
    """

    seen: _Seen
    plain: NDArray[np.bool_]
    shares: Floats


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
        """Whether these are the clause's cells still: also in a later long window that holds something of the same."""
        if of == self._of:
            return True
        if of.oldest < self._of.oldest or of._replace(oldest=self._of.oldest) != self._of:
            return False
        if self._newest < of.oldest:
            self._newest = min((series.newest for series in self._present), default=math.inf)
        return self._newest >= of.oldest


class _Group:
    """Cells of a clause that are judged alike.

    Args:
        state: What is remembered of the contract.
        places: The cells of the clause.
        numbers: Of those that are meant.
        detected: Whether something can be held against their limits.

    Attributes:
        numbers: Their numbers among the clause's cells.
        size: How many they are.
        clause: Their clause.
        places: The cells.
        rows: Their rows in the panes.
        terms: What the clause says of each.
        spans: The windows' lengths, in words.
    """

    def __init__(self, state: ContractState, places: Sequence[Place], numbers: list[int], *, detected: bool) -> None:
        self.detected, self.size = detected, len(numbers)
        self._state, self.numbers = state, np.array(numbers)
        self.places = [places[number] for number in numbers]
        self.clause = self.places[0].clause
        slices = {place.cell.slice for place in self.places}
        terms = {slice: Terms.of(state.contract, self.clause, slice) for slice in slices}
        self.terms = [terms[place.cell.slice] for place in self.places]
        seen = state.contract.observability
        self.spans = {"short": format_duration(seen.window), "long": format_duration(seen.long_window)}
        self._limits = np.array([one.limit for one in self.terms])
        self._none = np.array([one.allows_none for one in self.terms])
        self._rows = np.array([-1 if place.series is None else place.series.row for place in self.places])
        self.rows = np.array([-1 if place.series is None else place.series.number for place in self.places])
        self._usual = self.clause.opposite is None and bool((self._rows >= 0).all())
        self._known = tuple(CellBounds(self.clause, state, self._rows) for _ in (SHORT, LONG))
        self._held, self._held_at = np.full(self.size, -1), -1
        self._every = np.arange(self.size)

    def ask(self, seen: _Seen, shares: Floats) -> _Asked:
        """What has to be known of the time of an evaluation to judge it later."""
        return _Asked(seen, self._plain(seen.at), self._shares(shares))

    def judge(
        self,
        asked: Sequence[_Asked],
        windows: Sequence[WindowStates],
        level: float,
        alpha: float,
        *,
        later: bool = False,
    ) -> list[ClauseColumns]:
        """Judge those that can be judged at once, at each of some times.

        Args:
            asked: What was asked at each time, in their order.
            windows: What each window held at these times.
            level: Error probability of the lower bounds.
            alpha: Error probability of the upper bounds.
            later: Whether the bounds of what passes may wait, until somebody asks for a verdict.
        """
        usual, limits = np.array([one.plain for one in asked]), self._limits if later else None
        short = self._known[SHORT].look(windows[SHORT], usual, level, alpha, limits)
        usual &= ~short.odd
        passes, fails = self._said(short.values)
        open_ = usual & ~passes & ~(fails & self.detected)
        long = self._known[LONG].look(windows[LONG], open_, level, alpha, limits)
        usual &= ~open_ | (~long.odd & (long.values[3] > 0.0))
        values = np.where(open_, long.values, short.values)
        above = usual & ((short.values[0] > self._limits) | (values[0] > self._limits))
        passes = np.where(open_, self._said(long.values)[0], passes)
        notes = np.where(open_, long.notes, short.notes)
        method = self._known[SHORT].method or self._known[LONG].method
        window = np.where(open_, LONG, SHORT)
        whole, some_above = np.all(usual, axis=1).tolist(), np.any(above, axis=1).tolist()
        found = []
        for number, one in enumerate(asked):
            which = self._every if whole[number] else np.flatnonzero(usual[number])
            judged = slice(None) if whole[number] else which
            found.append(
                ClauseColumns(
                    state=self._state,
                    at=one.seen.at,
                    alpha=alpha,
                    level=level,
                    method=method,
                    group=self,
                    which=which,
                    passes=passes[number, judged],
                    window=window[number, judged],
                    bounds=values[:, number, judged],
                    look=partial(self._look, windows, number, level, alpha),
                    notes=notes[number, judged],
                    shares=one.shares[judged],
                    held=one.seen.held,
                    above=some_above[number],
                )
            )
        return found

    def _look(
        self, windows: Sequence[WindowStates], time: int, level: float, alpha: float, cell: int, window: int
    ) -> tuple[Floats, str, str]:
        """Bounds of one cell in one window at one of some times, what a reader has to know, and the interval's name."""
        bounds = CellBounds(self.clause, self._state, self._rows[[cell]])
        found = bounds.look(windows[window].at(time), np.ones((1, 1), np.bool_), level, alpha)
        return found.values[:, 0, 0], str(found.notes[0, 0]), bounds.method

    def evidence(self, number: int, held: tuple[WindowContent, WindowContent], share: float) -> Evidence:
        """What was known of a cell at a time, where it was at no alarm that it was to be judged by."""

        def parts(window: Window) -> tuple[Histogram, ...]:
            return tuple(held[_WINDOWS.index(window)].parts(int(self.rows[number])))

        def sample(window: Window) -> Binned:
            known = parts(window)
            return (union(known) if known else ExponentialHistogram.empty(0)).binned()

        place = self.places[number]
        return Evidence(place.cell, place.clause, sample, alarm=Alarm(round(share, SHARE_DIGITS), failing=False))

    def _plain(self, now: float) -> NDArray[np.bool_]:
        """Which cells are in rows, and were at no alarm that they are to be judged by."""
        if not self._usual:
            return np.zeros(self.size, np.bool_)
        plain = self._state.windows[SHORT].following(self._rows) & self._state.windows[LONG].following(self._rows)
        seen, alarmed = self._state.contract.observability, self._state.evidence.alarmed
        if alarmed:
            recent = now - max(seen.window, seen.long_window)
            for number, place in enumerate(self.places):
                held = alarmed.get(place.cell)
                plain[number] &= held is None or not (held.failing or held.peak > recent)
        return plain

    def _said(self, values: Floats) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which cells pass, and in which enough observations are above the limit."""
        estimate, lower, upper, samples = values
        enough = samples >= self.terms[0].needed
        kept = (upper <= self._limits) | (self._none & (estimate == 0.0))
        return kept & enough & ~(lower > self._limits), (lower > self._limits) & enough

    def _shares(self, shares: Floats) -> Floats:
        evidence = self._state.evidence
        if not self.detected:
            return np.full(self.size, math.nan)
        if self._held_at != evidence.version:
            held = [evidence.cells.get(place.cell) for place in self.places]
            self._held = np.array([-1 if one is None else one.number for one in held])
            self._held_at = evidence.version
        found: Floats = shares[self._held]
        return found


class _Waiting:
    """Cells of an evaluation that are not judged yet.

    Args:
        seen: The windows at its time.
        put_off: Groups, where the cells of their clauses begin, and what was asked of them.
        settle: Judges all that waits.

    Attributes:
        columns: Numbers of cells that were judged, with what was found.
        made: Verdicts of those that had to be judged one by one, by their numbers.
    """

    def __init__(self, seen: _Seen, put_off: Sequence[tuple[int, _Group, _Asked]], settle: Callable[[], None]) -> None:
        self.seen, self.put_off, self.settle = seen, put_off, settle
        self.columns: list[tuple[Numbers, ClauseColumns]] = []
        self.made: dict[int, Verdict] = {}

    def decide_others(self, state: ContractState) -> None:
        """Judge what could not be judged at once."""
        if sum(of.size for of, _ in self.columns) == sum(np.count_nonzero(of.plain) for _, _, of in self.put_off):
            return
        judged = {number for numbers, _ in self.columns for number in numbers.tolist()}
        items = {
            begin + int(group.numbers[place]): group.evidence(place, self.seen.held, float(asked.shares[place]))
            for begin, group, asked in self.put_off
            for place in np.flatnonzero(asked.plain).tolist()
            if begin + int(group.numbers[place]) not in judged
        }
        made, _ = decide_apart(state.contract, [*items.values()], self.seen.at, Memo())
        self.made = dict(zip(items, made, strict=True))
