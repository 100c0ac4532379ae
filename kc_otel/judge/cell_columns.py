"""All cells of a contract at once: bounds and statuses are columns, and a verdict is made of them when it is asked for.

Every cell is judged on the short window first, then on the long one; each gets half of alpha = 1 - confidence. A PASS
rests on an interval, and each cell stands alone, for a promotion asks that all of them pass. Where observations are
followed as they arrive, a FAIL rests on what they add up to against the limit (`fail_evidence`): it stays until that is
gone, until what was observed since passes, or until it is refuted that the fault is as it was (`fault_end`). Where they
are judged once, as in a gate, or nothing of the kind can be held, it rests on an interval too, and Holm's procedure
over all such cells keeps the chance of any false FAIL within alpha.

Bounds of cells that have not changed are not computed again. A cell whose bounds cannot be computed fails alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.judge.cells import NO_PAIR, Current, SilentPairs, assumption_broken, current, not_sampled, places
from kc_otel.judge.contract_state import ContractState
from kc_otel.judge.fail_evidence import other_side
from kc_otel.judge.series import LONG, SHORT, Listening, SeriesContent
from kc_otel.judge.statistics import clause_interval, intervals_of_rows, measurable, metric_name, opposite_name
from kc_otel.judge.verdict import Cell, Status, Verdict
from kc_otel.judge.verdicts import WINDOWS, Evidence, Terms, Verdicts, Window, alpha_of, nothing, place_of, unjudged
from kc_otel.stats import Binned, Histogram, Interval
from kc_otel.stats.histogram_columns import HistogramColumns
from kc_otel.stats.interval import Floats, Numbers
from kc_otel.stats.interval_rows import HistogramRows, IntervalRows, rows_of

Mask = NDArray[np.bool_]
_SINCE: Final = 2
"""Beside SHORT and LONG: what came after a cell's last alarm."""


class _Content(NamedTuple):
    """Observations of the cells of a group in a window: of one as a sample; of some [k] as rows, with their numbers.

    Without `rows` the samples are taken one by one. What is known of bounds holds within one `pane`.
    """

    sample: Callable[[int], Binned]
    rows: Callable[[Numbers], Iterator[tuple[Numbers, HistogramRows]]] | None = None
    pane: int = 0


class _Bounds:
    """Intervals of the cells of a group in one window.

    `values` are estimate, lower and upper bound, and observations [4, cells]; `level` is the error probability of each
    lower bound. `errors` are by cell.
    """

    def __init__(self, contract: Contract, clause: Clause, size: int, *, anytime: bool) -> None:
        alpha, of = alpha_of(contract), (clause, contract.assumptions)
        self._of_sample = partial(clause_interval, *of, alpha_upper=alpha, anytime=anytime)
        self._of_rows = partial(intervals_of_rows, *of, alpha_upper=alpha, anytime=anytime)
        self._empty = self._of_sample(nothing(), alpha_lower=alpha)
        self.method = self._empty.method
        self.values, self.notes = np.zeros((4, size)), np.full(size, "", np.object_)
        self._pane, self._version, self.level = -1, np.full(size, -1), np.full(size, math.nan)
        self.errors: dict[int, Exception] = {}

    def look(self, content: _Content, version: Numbers, wanted: Mask, level: float) -> None:
        """Bring the bounds of the wanted cells up to date; the others' may be of before."""
        if self._pane != content.pane:
            self._pane, self._version[:] = content.pane, -1
        new = np.flatnonzero(wanted & ((version != self._version) | (level != self.level)))
        if new.size:
            self._version[new], self.level[new] = version[new], level
            self._compute(content, new, level)

    def _compute(self, content: _Content, cells: Numbers, level: float) -> None:
        self._put(cells, self._empty)
        try:
            if content.rows is None:
                for cell in cells:
                    self._put(cell[None], self._of_sample(content.sample(int(cell)), alpha_lower=level))
                return
            for some, rows in content.rows(cells):
                self._put(some, self._of_rows(rows, alpha_lower=level))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other cells are judged
            if cells.size == 1:
                self.errors[int(cells[0])], self._version[cells] = error, -1
                return
            for cell in cells:
                self._compute(content, cell[None], level)

    def _put(self, cells: Numbers, found: Interval | IntervalRows) -> None:
        values = np.array([found.estimate, found.lower, found.upper, found.samples], np.float64)
        self.values[:, cells], self.notes[cells] = values.reshape(4, -1), found.note


class _Group:
    """Cells of a clause that are judged alike, by their numbers among all.

    `detected` says whether something is held against their limits as observations come. A cell is judged on what came
    after its last alarm where that lies within a window (`recent` [2, cells]), and fails as long as it is `failing`
    unless that passes. It does not pass where an assumption is `broken`.
    """

    def __init__(
        self, contract: Contract, cells: Sequence[Evidence], numbers: Sequence[int], *, detected: bool
    ) -> None:
        of = [cells[number] for number in numbers]
        self.clause, self.numbers, self.size, self.detected = of[0].clause, np.array(numbers), len(of), detected
        terms = [Terms.of(contract, self.clause, item.cell.slice) for item in of]
        self._needed = terms[0].needed
        self._limits = np.array([term.limit for term in terms])
        self._none = np.array([term.allows_none for term in terms])
        self._at_once = np.array([term.fails_at_once for term in terms])
        self._bounds = [_Bounds(contract, self.clause, self.size, anytime=of[0].anytime) for _ in range(3)]

    def begin(self, into: Verdicts, offset: int, contents: Sequence[_Content], version: Numbers | None = None) -> None:
        """Begin to judge the cells by their content of each window; the same version means the same content."""
        self._contents, self._version = contents, np.full(self.size, -1) if version is None else version
        self.at = offset + self.numbers
        self.open = np.ones(self.size, np.bool_)
        self.broken, self.failing = np.zeros((2, self.size), np.bool_)
        self.recent = np.zeros((2, self.size), np.bool_)
        into.methods[self.at] = self._bounds[SHORT].method
        into.remember(self.at, partial(_observed, contents, self.recent))
        for bounds in self._bounds:
            bounds.errors.clear()

    def look(self, window: int, wanted: Mask, level: float) -> None:
        """Have the bounds of some cells that a window has."""
        for number, some in self._parts(window, wanted):
            self._bounds[number].look(self._contents[number], self._version, some, level)

    def above(self, window: int) -> Mask:
        """Mask of the open cells whose own statistic is above the limit: the others fail at no level."""
        found: Mask = self.open & (self._bounds[window].values[0] > self._limits)
        return found

    def failed(self, window: int) -> int:
        """Number of the open cells whose lower bound is above the limit."""
        return int(np.count_nonzero(self.open & self._said(self._bounds[window])[1]))

    def settle(self, window: int, into: Verdicts) -> None:
        """Give the open cells their status by a window, and leave those open that it cannot decide."""
        above = Status.INCONCLUSIVE if self.detected else Status.FAIL
        for number, some in self._parts(window, self.open):
            passes, over = self._said(self._bounds[number])
            status = np.where(passes, Status.PASS.code, np.where(over, above.code, Status.INCONCLUSIVE.code))
            self._put(into, window, number, some, status)
            # The longer window does not take back a breach in this one.
            self.open = self.open & ~(some & (passes | over))

    def keep_failing(self, into: Verdicts) -> None:
        """Have those fail that are held to fail and do not pass, by a whole window: the long one if need be."""
        left = self.failing & (into.status[self.at] != Status.PASS.code)
        for window in (SHORT, LONG):
            if left.any():
                bounds = self._bounds[window]
                bounds.look(self._contents[window], self._version, left, into.alpha)
                some = left & ((bounds.values[3] > 0) | (window == LONG))
                self._put(into, window, window, some, np.full(self.size, Status.FAIL.code))
                left = left & ~some

    def errors(self) -> dict[int, Exception]:
        """Errors by the number of the cell that they befell."""
        return {int(self.at[cell]): error for bounds in self._bounds for cell, error in bounds.errors.items()}

    def _parts(self, window: int, wanted: Mask) -> list[tuple[int, Mask]]:
        """Of some cells those that are judged by all of a window, and by what came after an alarm."""
        recent = self.recent[window]
        parts = (window, wanted & ~recent), (_SINCE, wanted & recent)
        return [(number, some) for number, some in parts if some.any()]

    def _put(self, into: Verdicts, window: int, number: int, some: Mask, status: NDArray[np.integer]) -> None:
        at, bounds = self.at[some], self._bounds[number]
        into.status[at], into.window[at], into.values[:, at] = status[some], window, bounds.values[:, some]
        into.notes[at], into.level[at] = bounds.notes[some], bounds.level[some]

    def _said(self, bounds: _Bounds) -> tuple[Mask, Mask]:
        """Masks of the cells that pass, and of those whose lower bound is above the limit, by enough observations."""
        estimate, lower, upper, samples = bounds.values
        enough = samples >= self._needed
        over = (lower > self._limits) & (enough | self._at_once)
        kept = (upper <= self._limits) | (self._none & (estimate == 0.0))
        return kept & enough & ~over & ~self.broken, over


def _judge(groups: Sequence[_Group], into: Verdicts) -> dict[int, Exception]:
    """Judge the cells of a contract. Returns what failed, by the number of its cell."""
    alpha = into.alpha
    once = [group for group in groups if not group.detected]
    strictest = alpha / max(sum(group.size for group in once), 1)
    for window in (SHORT, LONG):
        for group in groups:
            group.look(window, group.open, alpha if group.detected else strictest)
        # Holm's step-down: with K failed, the rest are tested again as if there were K less.
        level, failed = strictest, 0
        while (now := sum(group.failed(window) for group in once)) > failed:
            failed = now
            level = alpha / max(round(alpha / strictest) - failed, 1)
            for group in once:
                group.look(window, group.above(window), level)
        for group in groups:
            group.settle(window, into)
    for group in groups:
        group.keep_failing(into)
    return {number: error for group in groups for number, error in group.errors().items()}


def decide(contract: Contract, evidence: Sequence[Evidence], now: float) -> tuple[Verdict, ...]:
    """A verdict for every cell of a contract, in the order given, on observations that are judged once.

    `evidence` has all its cells: Holm's procedure has to know how many of them there are.
    """
    found = Verdicts(contract, evidence, now)
    alike: dict[tuple[str, bool], list[int]] = {}
    for number, item in enumerate(evidence):
        found.put(number, item)
        if not item.absence:
            alike.setdefault((item.clause.id, item.anytime), []).append(number)
    groups = [_Group(contract, evidence, numbers, detected=False) for numbers in alike.values()]
    for group, numbers in zip(groups, alike.values(), strict=True):
        own = [evidence[number] for number in numbers]
        group.begin(found, 0, [_Content(partial(_given, own, window)) for window in WINDOWS])
        group.broken[:] = [bool(item.broken) for item in own]
    for error in _judge(groups, found).values():
        raise error
    return tuple(found)


def _given(evidence: Sequence[Evidence], window: Window, cell: int) -> Binned:
    return evidence[cell].sample(window)


class CellColumns:
    """The cells that a contract has, and their verdicts."""

    def __init__(self, state: ContractState) -> None:
        self.state = state
        self._cells: dict[str, _ClauseCells] = {}
        self._places: Sequence[Evidence] = ()

    def verdicts(self, now: float, listening: Listening) -> tuple[Verdicts, dict[str, Exception]]:
        """The verdict of every cell at a Unix time in seconds, and what failed, by where.

        A PASS ends what is held against a cell, and so does input that is no sample of its kernels.
        """
        judged, errors = self.judge(now, listening)
        self._places = judged.places
        for number, item in judged.special.items():
            passes = item.failing and judged.status[number] == Status.PASS.code
            if passes or judged.status[number] == Status.INVALID_INPUT.code:
                self.state.evidence.clear(item.cell)
        return judged, errors

    def unjudged(self, now: float, error: Exception) -> tuple[Verdict, ...]:
        """NO_DATA of the cells that there were, of all that are remembered before any: to lose one resolves alerts."""
        contract = self.state.contract
        cells = [(place.cell, place.clause) for place in self._places] or [
            (Cell(contract.name, clause.id, slice, *pair), clause)
            for clause in contract.clauses
            for slice in contract.slices_for(clause)
            for pair in sorted(self.state.newest.get(metric_name(clause), {NO_PAIR: 0.0}))
        ]
        return decide(contract, [unjudged(Evidence(*cell), error) for cell in cells], now)

    def judge(self, now: float, listening: Listening) -> tuple[Verdicts, dict[str, Exception]]:
        """Judge the cells as they are at a Unix time in seconds; returns what failed, too."""
        state = self.state
        everything: list[Evidence] = []
        groups: list[tuple[int, _FollowedGroup]] = []
        silence = SilentPairs(state, now, listening, not_sampled(state, now))
        for clause in state.contract.clauses:
            of = current(state, clause, silence)
            cells = self._cells.get(clause.id)
            if cells is None or not cells.stay(of):
                cells = self._cells[clause.id] = _ClauseCells(state, clause, of)
            groups += [(len(everything), group) for group in cells.groups]
            everything += cells.places
        judged = Verdicts(state.contract, everything, now)
        for number, place in enumerate(everything):
            if place.absence:
                judged.put(number, _followed(state, place))
        shares = state.evidence.shares()
        held = [(state.panes.window(grid, now), state.grids[grid].index(now)) for grid in (SHORT, LONG)]
        for offset, group in groups:
            group.observe(judged, offset, held, shares)
        errors = _judge([group for _, group in groups], judged)
        for number, error in errors.items():
            judged.put(number, unjudged(judged.evidence(number), error))
        return judged, {place_of(everything[number].cell): error for number, error in errors.items()}


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
        self.groups = [_FollowedGroup(state, self.places, live[is_], detected=is_) for is_ in live if live[is_]]

    def stay(self, of: Current) -> bool:
        """Return True if the clause still has these cells, also in a later long window with the same pairs."""
        if of == self._of:
            return True
        if of.oldest < self._of.oldest or of._replace(oldest=self._of.oldest) != self._of:
            return False
        if self._newest < of.oldest:
            self._newest = min((series.newest for series in self._present), default=math.inf)
        return self._newest >= of.oldest


class _FollowedGroup(_Group):
    """A group of cells whose observations come as time goes on."""

    def __init__(self, state: ContractState, places: Sequence[Evidence], numbers: list[int], *, detected: bool) -> None:
        super().__init__(state.contract, places, numbers, detected=detected)
        self._state, self._places = state, [places[number] for number in numbers]
        opposite = opposite_name(self.clause)
        self._series = [np.array([-1 if place.series is None else place.series.number for place in self._places])]
        if opposite is not None:
            others = [state.pairs(opposite, place.cell.slice).get(place.cell.pair) for place in self._places]
            self._series.append(np.array([-1 if other is None else other.number for other in others]))
        self._assumes = bool(measurable(self.clause)) or any(place.broken for place in self._places)
        self._held, self._held_at = np.full(self.size, -1), -1

    def observe(self, into: Verdicts, offset: int, held: Sequence[tuple[SeriesContent, int]], shares: Floats) -> None:
        """Begin to judge the cells by the windows' content and number of pane; `shares` is the evidence by its rows."""
        state, since = self._state, dict[int, list[Histogram | None]]()
        windows = [self._window(*content) for content in held]
        version = np.sum([state.panes.versions(rows) for rows in self._series], axis=0)
        contents = [*windows, self._since(since)]
        self.begin(into, offset, contents, version)
        into.shares[self.at] = self._shares(shares)
        evidence, seen = state.evidence, state.contract.observability
        two_sided = len(self._series) > 1
        for cell, place in enumerate(self._places if evidence.alarmed or self._assumes or two_sided else ()):
            broken = assumption_broken(state, place, into.at) if self._assumes else ""
            if not (broken or two_sided or place.cell in evidence.alarmed):
                continue
            item = _followed(state, place, sample=partial(_observed, contents, self.recent, cell), broken=broken)
            into.special[int(self.at[cell])] = item
            self.broken[cell], self.failing[cell] = bool(broken), item.failing
            own = evidence.cells.get(place.cell)
            if own is not None:
                other = evidence.cells.get(other_side(place.cell))
                since[cell] = [own.after, *([None if other is None else other.after] if two_sided else [])]
                self.recent[:, cell] = [into.at - own.peak < age for age in (seen.window, seen.long_window)]

    def _window(self, held: SeriesContent, pane: int) -> _Content:
        series = self._series

        def sample(cell: int) -> Binned:
            return _sample(*(held.of(int(rows[cell])) for rows in series))

        def rows(cells: Numbers) -> Iterator[tuple[Numbers, HistogramRows]]:
            there, at = held.places(series[0][cells])
            cells = cells[there]
            for some in rows_of(held.columns.taken(at)):
                yield cells[some.places], some

        return _Content(sample, rows if len(series) == 1 else None, pane)

    def _since(self, since: Mapping[int, list[Histogram | None]]) -> _Content:
        def sample(cell: int) -> Binned:
            return _sample(*since[cell])

        def rows(cells: Numbers) -> Iterator[tuple[Numbers, HistogramRows]]:
            known = {cell: after for cell in cells.tolist() if (after := since[cell][0]) is not None}
            numbers = np.array([*known])
            for some in rows_of(HistogramColumns.of([*known.values()])):
                yield numbers[some.places], some

        return _Content(sample, rows if len(self._series) == 1 else None)

    def _shares(self, shares: Floats) -> Floats:
        evidence = self._state.evidence
        if not self.detected:
            return np.full(self.size, math.nan)
        if self._held_at != evidence.version:
            held = [evidence.cells.get(place.cell) for place in self._places]
            self._held = np.array([-1 if own is None else own.number for own in held])
            self._held_at = evidence.version
        found: Floats = shares[self._held]
        return found


def _sample(own: Histogram | None, *opposite: Histogram | None) -> Binned:
    """Observations of a cell, with those that bound it from the other side."""
    sample = nothing() if own is None else own.binned()
    return replace(sample, opposite=_sample(*opposite)) if opposite else sample


def _observed(contents: Sequence[_Content], recent: NDArray[np.bool_], cell: int, window: Window) -> Binned:
    """Observations that a cell is judged by in a window."""
    number = WINDOWS.index(window)
    return contents[_SINCE if recent[number, cell] else number].sample(cell)


def _followed(state: ContractState, place: Evidence, **changes: Any) -> Evidence:
    """The evidence on a cell, with what is held against its limit now."""
    cell, held = place.cell, state.evidence
    return replace(
        place,
        share=held.share(cell),
        failing=held.failing(cell),
        ended=held.ended(cell),
        improved=held.improved(cell),
        **changes,
    )
