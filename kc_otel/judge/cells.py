"""The cells of a contract at one time, and the evidence on each.

A contract's cells are its clauses x (`all` and its slices) x the kernel pairs that are current. A pair is current while
its newest observation is less than a short window older than the newest of any pair, so that a version that was rolled
out takes the place of the one before. Current pairs that went silent stay while all of them are silent, or while what
they broke is held against them and they were not replaced, but fell silent beside others: then they are NO_DATA, and
so is a slice on which no current pair has observations: for the pairs that came first, or whoever invents kernels would
have a cell for each of them on every slice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

from kc_otel.contract.clause import Clause
from kc_otel.contract.registry.clause_metrics import QUANTITIES, SAMPLING
from kc_otel.contract.slices import ALL, STALE
from kc_otel.contract.units import format_duration
from kc_otel.contract.words import NO_REPORT, RUN_ENDED
from kc_otel.judge.assumptions import broken_assumption, measurable
from kc_otel.judge.contract_state import ContractState
from kc_otel.judge.fail_evidence import other_side
from kc_otel.judge.input_faults import of_sequences, speaks_of
from kc_otel.judge.points import INVALID, invalid_on, metric_of, series_name
from kc_otel.judge.refused_points import OF_CLOCKS
from kc_otel.judge.series import LONG, PAIRS, SHORT, Heard, Listening, Pair, Series
from kc_otel.judge.statistics import opposite_name
from kc_otel.judge.verdict import Cell
from kc_otel.judge.verdicts import Alarm, Evidence, Window
from kc_otel.stats import Binned, ExponentialHistogram

_NO_PAIR: Final[Pair] = ("", "")
_UNKNOWN_SLICE: Final = ""
_LIMIT_STALE: Final = (
    'their samples show staleness too, which a slice with `where: {lag: ">= 1"}` limits together with drift'
)
_MAX_EMPTY_PAIRS: Final = 8
"""Pairs that have a cell on a slice on which none has observations."""
_MAX_LISTED_OPERATORS: Final = 5
"""Names of operators that a sentence lists."""
_OUT_OF_RANGE: Final = "reward_out_of_range"
"""Reason of `kc.input.invalid` for a reward that the contract's range does not hold."""


class Place(NamedTuple):
    """A cell, and where its observations are.

    Attributes:
        cell: The cell.
        clause: Its clause.
        series: The series that it is about; None where nothing is remembered of that.
        absence: Why there is nothing to judge, as a sentence; empty when there is something.
        observed: Whether any observation is remembered, of the windows or from before them.
        otherwise: Which recorders of its kernel apply another slice of this name, or measure something else for its
            clause, as a phrase; empty for none.
    """

    cell: Cell
    clause: Clause
    series: Series | None
    absence: str = ""
    observed: bool = True
    otherwise: str = ""


class Current(NamedTuple):
    """Inputs that determine a clause's cells; the cells stay the same while these are equal.

    Attributes:
        pairs: Kernel pairs that are current.
        first: Those that have a cell where none of them has observations.
        silence: Why there is nothing to judge; empty if there is.
        fallen: Pairs that fell silent beside others while their promise was broken, and since when, in words.
        untimely: A sender's clock error, in words; empty where the clock seems right.
        invalid: Slices and pairs whose observations are no sample of the kernels, and why; the slice is empty where
            nobody knows those of the sequences.
        otherwise: Slices and versions of the inference kernel with recorders that apply another slice, or measure
            something else for the clause, in words.
        oldest: Where the long window begins, Unix seconds.
        version: Version of the state: which series exist, and which have no room.
    """

    pairs: frozenset[Pair]
    first: frozenset[Pair]
    silence: str
    fallen: Mapping[Pair, str]
    untimely: str
    invalid: Mapping[tuple[str, Pair], str]
    otherwise: Mapping[tuple[str, str], str]
    oldest: float
    version: int


class SilentPairs:
    """Silent kernel pairs at the time of an evaluation, computed once per pair for all clauses.

    Args:
        state: State of the contract.
        now: Unix time in seconds.
        listening: When silence counts.

    Attributes:
        oldest: Where the long window begins, Unix seconds.
        not_sampled: Slices and pairs whose tokens the inference kernel did not sample, and what is said of them.
        otherwise: See `Current`.
        unmeasured: Clauses and versions of the inference kernel with recorders that measure something else for them, in
            words.
    """

    __slots__ = ("_known", "_listening", "_state", "not_sampled", "now", "oldest", "otherwise", "unmeasured")

    def __init__(self, state: ContractState, now: float, listening: Listening) -> None:
        self._state, self.now, self._listening = state, now, listening
        self._known: dict[Pair, float | None] = {}
        grid = state.grids[LONG]
        self.oldest = grid.window(now)[0] * grid.width
        ratios = state.series_of(QUANTITIES["ratio"].name)
        self.not_sampled = state.input_faults.not_sampled(ratios, state.panes, now)
        self.otherwise: dict[tuple[str, str], str] = {}
        self.unmeasured: dict[tuple[str, str], str] = {}
        here = f"the evaluator has version {state.contract.metadata.version}"
        for version, report in state.recorders.otherwise(now):
            applies = f"a recorder applies version {report.version} of the contract, where"
            for slice in report.otherwise:
                said = f"{applies} slice {slice} is defined differently or missing; {here}"
                self.otherwise[slice, version] = said
            for id in report.unmeasured:
                said = f"{applies} clause {id} measures something else or is missing; {here}; restart the recorder with"
                self.unmeasured[id, version] = f"{said} the contract that is served"

    def of(self, pair: Pair) -> float | None:
        """Return the seconds of a pair's silence; None while that means nothing yet."""
        if pair not in self._known:
            heard = self._state.heard.get(pair) or Heard(self._listening.since)
            quiet = self._listening.silence(heard.last, self.now)
            patience = heard.patience(self._state.contract.observability.heartbeat)
            self._known[pair] = None if quiet <= patience else quiet
        return self._known[pair]


def current(state: ContractState, clause: Clause, silence: SilentPairs) -> Current:
    """Return the inputs that determine a clause's cells."""
    metric = state.metrics[clause.id]
    pairs, absence, fallen = _current(state, clause, metric, silence)
    of_samples = speaks_of(clause)
    every = frozenset(pairs)
    if len(every) <= _MAX_EMPTY_PAIRS:
        first = every
    else:
        first = frozenset(islice((pair for pair in state.newest.get(metric, pairs) if pair in pairs), _MAX_EMPTY_PAIRS))
    refused = _refused(state, metric, silence.now) if of_samples else {}
    if _NO_PAIR not in every:
        every = every.union(pair for _, pair in refused if pair != _NO_PAIR)
    invalid = {**silence.not_sampled, **refused} if of_samples else {}
    untimely = _untimely(state, silence.now)
    unmeasured = {
        (slice, version): said
        for (id, version), said in silence.unmeasured.items()
        if id == clause.id
        for slice in state.contract.slices_for(clause)
    }
    otherwise = {**silence.otherwise, **unmeasured}
    return Current(every, first, absence, fallen, untimely, invalid, otherwise, silence.oldest, state.version)


def places(state: ContractState, clause: Clause, of: Current) -> Iterator[Place]:
    """A clause's cells, by slice and pair."""
    contract, metric = state.contract, state.metrics[clause.id]
    measured = state.newest.get(metric, {})
    without_room = {(key.slice, key.pair) for key in state.unjudged if key.metric == metric}
    for slice in contract.slices_for(clause):
        here = state.pairs(metric, slice)
        present = {pair for pair in of.pairs if pair in here and here[pair].newest >= of.oldest}
        present |= {pair for pair in of.pairs if (slice, pair) in of.invalid}
        present |= {pair for pair in of.pairs if (_UNKNOWN_SLICE, pair) in of.invalid and pair in measured}
        crowded = {pair for place, pair in without_room if place == slice and pair not in here}
        for pair in sorted(crowded):
            yield Place(Cell(contract.name, clause.id, slice, *pair), clause, None, _without_room(state))
        absence = of.silence
        if not absence and not present:
            absence = f"no observations of {metric} on slice {slice} in {_span(contract.observability.long_window)}"
            absence += f"; {of.untimely}" if of.untimely else ""
            absence += next((f"; {said}" for (name, _), said in of.otherwise.items() if name == slice), "")
            if any(series.newest >= of.oldest for series in state.pairs(metric, STALE).values()):
                absence += f", but of older weights; {_LIMIT_STALE}"
        for pair in sorted((present or of.first) - crowded - ({_NO_PAIR} if crowded else set())):
            invalid = of.invalid.get((slice, pair)) or of.invalid.get((_UNKNOWN_SLICE, pair), "")
            said = invalid or absence or of.fallen.get(pair, "")
            cell, otherwise = Cell(contract.name, clause.id, slice, *pair), of.otherwise.get((slice, pair[1]), "")
            yield Place(cell, clause, here.get(pair), said, pair in here, otherwise)


def evidence_of(state: ContractState, place: Place, now: float) -> Evidence:
    """Return the evidence on a cell."""
    cell, clause, series, absence, observed, _ = place
    opposite = _opposite(state, clause, cell.slice, (cell.kernel_train, cell.kernel_inference))
    alarm = _alarm(state, cell, series, now, opposite)
    if absence or series is None:
        return Evidence(cell, clause, _nothing, absence, alarm, observed=observed)
    sample, broken = partial(_sample, series, now, opposite), assumption_broken(state, place, now)
    return Evidence(cell, clause, sample, alarm=alarm, broken=broken)


def assumption_broken(state: ContractState, place: Place, now: float) -> str:
    """Return the assumption of a cell's clause that recorders or the long window break, in words; empty if none."""
    cell, clause = place.cell, place.clause
    if place.otherwise or not measurable(clause):
        return place.otherwise

    def observed(quantity: str) -> Binned | None:
        series = state.pairs(SAMPLING[quantity].name, cell.slice).get((cell.kernel_train, cell.kernel_inference))
        return None if series is None else series.histories[LONG].binned(now)

    def outside() -> int:
        held = (
            series.histories[LONG].window(now)
            for key, series in state.invalid(cell.slice).items()
            if key.slice == _OUT_OF_RANGE and key.pair in (place.cell[-2:], _NO_PAIR)
        )
        return sum(content.count for content in held if content is not None)

    return broken_assumption(clause, state.contract.assumptions, observed, outside)


def _current(
    state: ContractState, clause: Clause, metric: str, silence: SilentPairs
) -> tuple[set[Pair], str, Mapping[Pair, str]]:
    """The pairs that a metric's cells are about, why there is nothing to judge, empty if there is, and the fallen."""
    newest = state.newest.get(metric)
    if not newest:
        if (
            clause.quantity is not None
            and (base := QUANTITIES.get(clause.quantity.base))
            and state.newest.get(base.name)
        ):
            # Recorders send means where their own copy of the contract asks for them, and where what they are given
            # has sequences: rows of logits one by one have none.
            said = f"{base.per}s arrive, but nothing for {metric}; give the recorder this version of the contract, or "
            return {_NO_PAIR}, said + f"write `unit: {base.per}` if it is given single {base.per}s", {}
        if others := _other_operators(state, clause):
            said = f"nothing received for {metric}, only for {others}; do the names in both places agree?"
            return {_NO_PAIR}, said, {}
        return {_NO_PAIR}, f"nothing received for {metric} yet; {_why_nothing(state, silence.now)}", {}
    latest = max(newest.values()) - state.contract.observability.window
    current = {pair for pair, time in newest.items() if time > latest}
    silent = {pair: quiet for pair in current if (quiet := silence.of(pair)) is not None}
    if not silent:
        return current, "", {}
    heartbeat = state.contract.observability.heartbeat
    alive = current - silent.keys()
    if alive:
        fallen = {
            pair: f"{_silence(state, [pair], quiet)}; others report, and it was in breach"
            for pair, quiet in silent.items()
            if _fell(state, clause, pair, alive)
        }
        return alive | fallen.keys(), "", fallen
    elsewhere = sum(
        silence.now - heard.last <= heard.patience(heartbeat) for pair, heard in state.heard.items() if all(pair)
    )
    said = _silence(state, silent, min(silent.values()))
    if elsewhere:
        report = "pair of kernel versions reports" if elsewhere == 1 else "pairs of kernel versions report"
        said += f"; {elsewhere} other {report}: were these replaced?"
    return current, said, {}


def _silence(state: ContractState, pairs: Collection[Pair], quiet: float) -> str:
    """Say since when pairs are silent, and why as far as it is known: the last recorder of each shut down cleanly."""
    moved = all(state.recorders.moved_since(inference) for _, inference in pairs)
    if all(map(state.has_ended, pairs)):
        if moved:
            return f"{RUN_ENDED}: its recorder measures another version, and nothing of this for {_span(quiet)}"
        return f"{RUN_ENDED}: its last recorder shut down {_span(quiet)} ago"
    heartbeat = _span(state.contract.observability.heartbeat)
    why = "its recorder measures another version since" if moved else "its run ended, or its recorder died"
    return f"{NO_REPORT} {_span(quiet)} (heartbeat {heartbeat}): {why}"


def _refused(state: ContractState, metric: str, now: float) -> dict[tuple[str, Pair], str]:
    """Slices and kernel pairs of which all that comes fails the input checks, and what is said of each."""
    seen, names = state.contract.observability, {metric, QUANTITIES["tv_token"].name}
    refused: dict[tuple[str, Pair], str] = {}
    for slice in (_UNKNOWN_SLICE, ALL, *state.contract.slices):
        of_all = slice in {_UNKNOWN_SLICE, ALL}
        failed = state.invalid(slice) if of_all else state.series_of(invalid_on(slice))
        if not failed:
            continue
        newest = {key.pair: -math.inf for key in failed}
        for name in names:
            here = {pair: series.newest for pair, series in state.pairs(name, slice).items()}
            for pair, time in (state.newest.get(name, {}) if of_all else here).items():
                newest[pair] = max(newest.get(pair, -math.inf), time)
        newest[_NO_PAIR] = max(newest.values())
        for pair, time in newest.items():
            own = [(key, series) for key, series in failed.items() if pair == _NO_PAIR or key.pair in {pair, _NO_PAIR}]
            if said := of_sequences(own, time, now, seen.heartbeat, seen.window):
                refused[slice, pair] = said
    return refused


def _fell(state: ContractState, clause: Clause, pair: Pair, alive: Collection[Pair]) -> bool:
    """Return True if a pair with an alarm fell silent beside others; a replaced pair ended before the others began."""
    if not any(cell.clause == clause.id and cell[-2:] == pair for cell in state.evidence.alarmed):
        return False
    mine = state.heard.get(pair)
    return mine is not None and any(other.since < mine.last for name, other in state.heard.items() if name in alive)


def _why_nothing(state: ContractState, now: float) -> str:
    """The likely cause of a metric that never came, as the end of a sentence."""
    found: Counter[str] = Counter()
    for key, series in state.invalid(ALL).items():
        if (content := series.histories[LONG].window(now)) is not None and content.count:
            found[key.slice] += content.count
    if found:
        reason, count = found.most_common(1)[0]
        more = f" and {found.total() - count:,} for other reasons" if len(found) > 1 else ""
        return (
            f"{count:,} sequences were not measured ({reason}){more}; `kc-otel reference invalid-input` says what to do"
        )
    if untimely := _untimely(state, now):
        return untimely
    if others := len({name for name in state.newest if metric_of(name) != INVALID}):
        return (
            f"{others} other {'metric arrives' if others == 1 else 'metrics arrive'}; `kc-otel check --for` says "
            "which of them a way of measuring can fill"
        )
    return "does the recorder's OTLP endpoint point here?"


def _untimely(state: ContractState, now: float) -> str:
    ages = [refused.age for refused in state.refused.present(now) if refused.outcome in OF_CLOCKS]
    if not ages:
        return ""
    age = max(ages, key=abs)
    where = f"{_span(age)} old when they arrive" if age > 0.0 else f"{_span(-age)} ahead of this clock"
    return f"points are {where}: check the sender's clock"


def _without_room(state: ContractState) -> str:
    most = state.contract.observability.max_series
    return (
        f"not judged: observations arrive, but the contract already has its maximum of {most:,} series, of their "
        f"streams, or of {PAIRS} kernel pairs; give kernels and senders fewer identities, or raise "
        "observability.max_series"
    )


def _other_operators(state: ContractState, clause: Clause) -> str:
    """Operators that the clause's metric arrives for, as a list in words; empty for other metrics."""
    if clause.quantity is None or clause.operator is None:
        return ""
    head, tail = series_name(clause.quantity.name, "\0").split("\0")
    known = sorted(name[len(head) : -len(tail)] for name in state.newest if name.startswith(head))
    return ", ".join(known[:_MAX_LISTED_OPERATORS]) + (
        f" and {len(known) - _MAX_LISTED_OPERATORS} more" if len(known) > _MAX_LISTED_OPERATORS else ""
    )


def _opposite(state: ContractState, clause: Clause, slice: str, pair: Pair) -> Series | None:
    """The series that bounds a clause's from the other side: an empty one before it came, None where there is none."""
    name = opposite_name(clause)
    return None if name is None else state.pairs(name, slice).get(pair) or state.empty_series()


def _sample(series: Series, now: float, opposite: Series | None, window: Window) -> Binned:
    """Return what a window holds of a series, and of its opposite."""
    number = SHORT if window == "short" else LONG
    own = series.histories[number].binned(now)
    return own if opposite is None else replace(own, opposite=opposite.histories[number].binned(now))


def _alarm(
    state: ContractState, cell: Cell, series: Series | None, now: float, opposite: Series | None = None
) -> Alarm:
    seen, held = state.contract.observability, state.evidence.cells.get(cell)
    since = None
    if series is not None and held is not None and now - held.peak < max(seen.window, seen.long_window):
        since = partial(_sample_since, state, cell, series, now, opposite)
    evidence = state.evidence
    return Alarm(
        evidence.share(cell),
        evidence.failing(cell),
        since,
        ended=evidence.ended(cell),
        improved=evidence.improved(cell),
    )


def _sample_since(
    state: ContractState, cell: Cell, series: Series, now: float, opposite: Series | None, window: Window
) -> Binned:
    """Return the part of a window after the last alarm: everything since then, if that is within the window."""
    seen, held = state.contract.observability, state.evidence.cells[cell]
    length = seen.window if window == "short" else max(seen.window, seen.long_window)
    if now - held.peak >= length:
        return _sample(series, now, opposite, window)
    if opposite is None:
        return held.binned_after()
    other = state.evidence.cells.get(other_side(cell))
    return replace(held.binned_after(), opposite=_nothing(window) if other is None else other.binned_after())


def _nothing(_window: Window) -> Binned:
    return ExponentialHistogram.empty(0).binned()


def _span(seconds: float) -> str:
    return format_duration(float(round(seconds)) if seconds >= 1 else round(seconds, 3))
