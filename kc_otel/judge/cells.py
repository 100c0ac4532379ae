"""Which cells a contract has at a time, and what is known of each.

A contract's cells are its clauses x (`all` and its slices) x the kernel pairs that are current. A pair is current while
its newest observation is less than a short window older than the newest of any pair, so that a version that was rolled
out takes the place of the one before. Current pairs that went silent stay while all of them are silent, or while what
they broke is held against them and they were not replaced, but fell silent beside others: then they are NO_DATA, and
so is a slice on which no current pair has observations: for the pairs that came first, or whoever invents kernels would
have a cell for each of them on every slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

from kc_otel.contract.clause import Clause
from kc_otel.contract.slices import ALL
from kc_otel.contract.units import format_duration
from kc_otel.judge.cell_evidence import Alarm, Evidence, Window
from kc_otel.judge.contract_state import PAIRS, ContractState
from kc_otel.judge.fail_evidence import other_side
from kc_otel.judge.histograms import Histogram
from kc_otel.judge.points import INVALID, series_name
from kc_otel.judge.series import LONG, SHORT, Heard, Listening, Pair, Series
from kc_otel.judge.statistics import metric_name, opposite_name
from kc_otel.judge.verdict import Cell
from kc_otel.stats import Binned, ExponentialHistogram

__all__ = ["Current", "Place", "SilentPairs", "current", "evidence", "evidence_of", "places"]

_NOBODY: Final[Pair] = ("", "")
_WITHOUT: Final = 8
"""Pairs that have a cell on a slice on which none has observations."""
_LISTED: Final = 5
"""Names of operators that a sentence lists."""


class Place(NamedTuple):
    """A cell, and where its observations are.

    Attributes:
        cell: The cell.
        clause: Its clause.
        series: The series that it is about; None where nothing is remembered of that.
        absence: Why there is nothing to judge, as a sentence; empty when there is something.
        observed: Whether any observation is remembered, of the windows or from before them.
    """

    cell: Cell
    clause: Clause
    series: Series | None
    absence: str = ""
    observed: bool = True


class Current(NamedTuple):
    """What says which cells a clause has; while it is the same, so are they.

    Attributes:
        pairs: Kernel pairs that are current.
        first: Those that have a cell where none of them has observations.
        silence: Why there is nothing to judge; empty if there is.
        fallen: Pairs that fell silent beside others while their promise was broken, and since when, in words.
        oldest: Where the long window begins, Unix seconds.
        version: Of what is remembered: which series there are, and which have no room.
    """

    pairs: frozenset[Pair]
    first: frozenset[Pair]
    silence: str
    fallen: Mapping[Pair, str]
    oldest: float
    version: int


class SilentPairs:
    """Who is silent at the time of an evaluation: asked once of each kernel pair, for all clauses.

    Args:
        state: What is remembered of the contract.
        now: Unix time in seconds.
        listening: When silence counts.

    Attributes:
        oldest: Where the long window begins, Unix seconds.
    """

    __slots__ = ("_known", "_listening", "_state", "now", "oldest")

    def __init__(self, state: ContractState, now: float, listening: Listening) -> None:
        self._state, self.now, self._listening = state, now, listening
        self._known: dict[Pair, float | None] = {}
        grid = state.grids[LONG]
        self.oldest = grid.window(now)[0] * grid.width

    def of(self, pair: Pair) -> float | None:
        """For how many seconds a pair has been silent; None where that means nothing yet."""
        if pair not in self._known:
            heard = self._state.heard.get(pair) or Heard(self._listening.since)
            quiet = self._listening.silence(heard.last, self.now)
            patience = heard.patience(self._state.contract.observability.heartbeat)
            self._known[pair] = None if quiet <= patience else quiet
        return self._known[pair]


def evidence(state: ContractState, now: float, listening: Listening) -> Iterator[Evidence]:
    """Every cell of a contract, by clause, slice and pair.

    Args:
        state: What is remembered of the contract.
        now: Unix time in seconds.
        listening: When silence counts.
    """
    silence = SilentPairs(state, now, listening)
    for clause in state.contract.clauses:
        for place in places(state, clause, current(state, clause, silence)):
            yield evidence_of(state, place, now)


def current(state: ContractState, clause: Clause, silence: SilentPairs) -> Current:
    """What says which cells a clause has."""
    metric = state.metrics[clause.id]
    pairs, absence, fallen = _current(state, clause, metric, silence)
    every = frozenset(pairs)
    if len(every) <= _WITHOUT:
        first = every
    else:
        first = frozenset(islice((pair for pair in state.newest.get(metric, pairs) if pair in pairs), _WITHOUT))
    return Current(every, first, absence, fallen, silence.oldest, state.version)


def places(state: ContractState, clause: Clause, of: Current) -> Iterator[Place]:
    """A clause's cells, by slice and pair."""
    contract, metric = state.contract, state.metrics[clause.id]
    without_room = {(key.slice, key.pair) for key in state.unjudged if key.metric == metric}
    for slice in (ALL, *contract.slices):
        here = state.pairs(metric, slice)
        present = {pair for pair in of.pairs if pair in here and here[pair].newest >= of.oldest}
        crowded = {pair for place, pair in without_room if place == slice and pair not in here}
        for pair in sorted(crowded):
            yield Place(Cell(contract.name, clause.id, slice, *pair), clause, None, _without_room(state))
        absence = of.silence
        if not absence and not present:
            absence = f"no observations of {metric} on slice {slice} in {_span(contract.observability.long_window)}"
        for pair in sorted((present or of.first) - crowded - ({_NOBODY} if crowded else set())):
            said = absence or of.fallen.get(pair, "")
            yield Place(Cell(contract.name, clause.id, slice, *pair), clause, here.get(pair), said, pair in here)


def evidence_of(state: ContractState, place: Place, now: float) -> Evidence:
    """What is known of a cell."""
    cell, clause, series, absence, observed = place
    opposite = _opposite(state, clause, cell.slice, (cell.kernel_train, cell.kernel_inference))
    alarm = _alarm(state, cell, series, now, opposite)
    if absence or series is None:
        return Evidence(cell, clause, _nothing, absence, alarm, observed=observed)
    windows = _Windows(series, now, opposite)
    return Evidence(cell, clause, windows.sample, alarm=alarm, parts=windows.parts if opposite is None else None)


def _current(
    state: ContractState, clause: Clause, metric: str, silence: SilentPairs
) -> tuple[set[Pair], str, Mapping[Pair, str]]:
    """The pairs that a metric's cells are about, why there is nothing to judge, empty if there is, and the fallen."""
    newest = state.newest.get(metric)
    if not newest:
        if clause.by_sequence and state.newest.get(metric_name(clause.model_copy(update={"unit": "token"}))):
            # Recorders send means by sequence where their own copy of the contract asks for them, and where what they
            # are given has sequences: rows of logits one by one have none.
            said = f"tokens arrive, but nothing for {metric}; give the recorder this version of the contract, or write "
            return {_NOBODY}, said + "`unit: token` if what it is given are single tokens", {}
        if others := _other_operators(state, clause):
            said = f"nothing received for {metric}, only for {others}; do the names in both places agree?"
            return {_NOBODY}, said, {}
        return {_NOBODY}, f"nothing received for {metric} yet; {_why_nothing(state, silence.now)}", {}
    latest = max(newest.values()) - state.contract.observability.window
    current = {pair for pair, time in newest.items() if time > latest}
    silent = {pair: quiet for pair in current if (quiet := silence.of(pair)) is not None}
    if not silent:
        return current, "", {}
    heartbeat = state.contract.observability.heartbeat
    alive = current - silent.keys()
    if alive:
        fallen = {
            pair: f"no report for {_span(quiet)} (heartbeat {_span(heartbeat)}) while others report, and its promise "
            "was broken; is the recorder's process alive?"
            for pair, quiet in silent.items()
            if _fell(state, clause, pair, alive)
        }
        return alive | fallen.keys(), "", fallen
    elsewhere = sum(
        silence.now - heard.last <= heard.patience(heartbeat) for pair, heard in state.heard.items() if all(pair)
    )
    cause = "is the recorder's process alive?"
    if elsewhere:
        report = "pair of kernel versions reports" if elsewhere == 1 else "pairs of kernel versions report"
        cause = f"{elsewhere} other {report}; were these replaced?"
    return current, f"no report for {_span(min(silent.values()))} (heartbeat {_span(heartbeat)}); {cause}", {}


def _fell(state: ContractState, clause: Clause, pair: Pair, alive: Collection[Pair]) -> bool:
    """Whether a pair with an alarm fell silent beside others; one that they replaced ended before they began."""
    if not any(cell.clause == clause.id and cell[-2:] == pair for cell in state.evidence.alarmed):
        return False
    mine = state.heard.get(pair)
    return mine is not None and any(other.since < mine.last for name, other in state.heard.items() if name in alive)


def _why_nothing(state: ContractState, now: float) -> str:
    """The likely cause of a metric that never came, as the end of a sentence."""
    found: Counter[str] = Counter()
    for key, series in state.series_of(INVALID).items():
        if (content := series.histories[LONG].window(now)) is not None and content.count:
            found[key.slice] += content.count
    if found:
        reason, count = found.most_common(1)[0]
        more = f" and {found.total() - count:,} for other reasons" if len(found) > 1 else ""
        return f"{count:,} sequences were not measured ({reason}){more}; `kc-otel checks` says what to do"
    if others := len({name for name in state.newest if name != INVALID}):
        return (
            f"{others} other {'metric arrives' if others == 1 else 'metrics arrive'}; `kc-otel check --for` says "
            "which of them a way of measuring can fill"
        )
    return "does the recorder's OTLP endpoint point here?"


def _without_room(state: ContractState) -> str:
    most = state.contract.observability.max_series
    return (
        f"not judged: observations arrive, but the contract has its {most:,} series or their streams already, or "
        f"{PAIRS} kernel pairs; give kernels and senders fewer identities, or raise observability.max_series"
    )


def _other_operators(state: ContractState, clause: Clause) -> str:
    """Operators that the clause's metric arrives for, as a list in words; empty for other metrics."""
    if clause.quantity is None or clause.operator is None:
        return ""
    head, tail = series_name(clause.quantity.name, "\0").split("\0")
    known = sorted(name[len(head) : -len(tail)] for name in state.newest if name.startswith(head))
    return ", ".join(known[:_LISTED]) + (f" and {len(known) - _LISTED} more" if len(known) > _LISTED else "")


def _opposite(state: ContractState, clause: Clause, slice: str, pair: Pair) -> Series | None:
    """The series that bounds a clause's from the other side: an empty one before it came, None where there is none."""
    name = opposite_name(clause)
    return None if name is None else state.pairs(name, slice).get(pair) or state.empty_series()


class _Windows:
    """What the windows hold that cells are judged by."""

    __slots__ = ("_histories", "_now", "_opposite")

    def __init__(self, series: Series, now: float, opposite: Series | None) -> None:
        self._histories, self._now, self._opposite = series.histories, now, opposite

    def sample(self, window: Window) -> Binned:
        own = self._histories[SHORT if window == "short" else LONG].binned(self._now)
        return (
            own
            if self._opposite is None
            else replace(own, opposite=_Windows(self._opposite, self._now, None).sample(window))
        )

    def parts(self, window: Window) -> tuple[Histogram, ...]:
        return self._histories[SHORT if window == "short" else LONG].parts(self._now)


def _alarm(
    state: ContractState, cell: Cell, series: Series | None, now: float, opposite: Series | None = None
) -> Alarm:
    seen, held = state.contract.observability, state.evidence.cells.get(cell)
    since = None
    if series is not None and held is not None and now - held.peak < max(seen.window, seen.long_window):
        since = partial(_sample_since, state, cell, series, now, opposite)
    return Alarm(state.evidence.share(cell), state.evidence.failing(cell), since)


def _sample_since(
    state: ContractState, cell: Cell, series: Series, now: float, opposite: Series | None, window: Window
) -> Binned:
    """What a window holds of the time after the last alarm: all that came since, where that is within the window."""
    seen, held = state.contract.observability, state.evidence.cells[cell]
    length = seen.window if window == "short" else max(seen.window, seen.long_window)
    if now - held.peak >= length:
        return _Windows(series, now, opposite).sample(window)
    if opposite is None:
        return held.binned_after()
    other = state.evidence.cells.get(other_side(cell))
    return replace(held.binned_after(), opposite=_nothing(window) if other is None else other.binned_after())


def _nothing(_window: Window) -> Binned:
    return ExponentialHistogram.empty(0).binned()


def _span(seconds: float) -> str:
    return format_duration(float(round(seconds)) if seconds >= 1 else round(seconds, 3))
