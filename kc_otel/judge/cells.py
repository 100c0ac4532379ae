"""The cells of a contract at one time, and the evidence on each.

A contract's cells are its clauses x (`all` and its slices) x the kernel pairs that are current: those whose newest
observation is less than a short window older than that of any pair, so that a version that was rolled out takes the
place of the one before. Current pairs that fell silent stay while all of them are silent, while a breach is held
against them and they were not replaced, or while their promotion gives them requests: then they are NO_DATA. So is a
slice on which no current pair has observations, for a few pairs: whoever invents kernels would have a cell for each of
them on every slice.

Input that is no sample of two kernels' scores makes INVALID INPUT of its cells. Over tokens sampled from Q, E_Q[P/Q] <=
1: where the ratios of a short window have a mean that is surely larger (a bet on each window anew, at 1e6 to 1), they
were not sampled. And where failing sequences are newer by a heartbeat than all that was measured, nothing is measured
any more. Sequences that are kept from being measured on purpose count only for a pair of which nothing else was
measured in the long window. Of a pair that only older weights sampled in the long window, as in a recipe whose lag is
always 1, a clause has nothing to measure but on slices by lag.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple

import numpy as np

from kc_otel.contract.clause import Clause
from kc_otel.contract.input_reasons import ON_PURPOSE, remedy
from kc_otel.contract.registry.clause_metrics import QUANTITIES, SAMPLING, Origin, Unit
from kc_otel.contract.slices import ALL, LAG, STALE, UNJUDGED
from kc_otel.contract.units import format_duration
from kc_otel.contract.words import NEXT_DUE, NO_REPORT, NOTHING_TO_MEASURE, RUN_ENDED, moment
from kc_otel.judge.contract_state import ContractState
from kc_otel.judge.point_streams import OF_CLOCKS
from kc_otel.judge.points import INVALID, invalid_on, metric_of, series_name
from kc_otel.judge.series import LONG, PAIRS, SHORT, Heard, Listening, Pair, Series, SeriesKey
from kc_otel.judge.statistics import broken_assumption, measurable
from kc_otel.judge.verdict import Cell
from kc_otel.judge.verdicts import INVALID_INPUT, Evidence
from kc_otel.stats import Binned
from kc_otel.stats.quantiles import maximum_interval
from kc_otel.stats.surplus import ROUNDING_SURPLUS, is_surplus

NO_PAIR: Final[Pair] = ("", "")
_UNKNOWN_SLICE: Final = ""
_LIMIT_STALE: Final = (
    'their samples show staleness too, which a slice with `where: {lag: ">= 1"}` limits together with drift'
)
_MAX_EMPTY_PAIRS: Final = 8
"""Pairs that have a cell on a slice on which none has observations."""
_SHARES: Final = "its promotion gives it requests"
_MAX_LISTED_OPERATORS: Final = 5
_OF_SAMPLES: Final = frozenset({Origin.LOGPROBS, Origin.ADVANTAGES, Origin.REWARDS, Origin.TRUNCATION})
_MAX_FAILING_SHARE: Final = 0.01
"""Share of sequences that may fail the input checks: a PASS says nothing about them, and drift in one in a hundred can
raise a total variation by 0.01, as much as a usual limit leaves."""
_OUT_OF_RANGE: Final = "reward_out_of_range"
"""Reason of `kc.input.invalid` for a reward that the contract's range does not hold; its sequence is measured all the
same."""
_NOT_FAILING: Final = frozenset({_OUT_OF_RANGE, *ON_PURPOSE})
_OF_ROWS: Final = "operator_not_finite"
"""Reason of rows of operators, not of sequences."""
_JUDGED_UNITS: Final = frozenset({Unit.PROMPT, Unit.STEP})

Where = tuple[str, Pair]
"""Slice and pair of kernels."""


class Current(NamedTuple):
    """Inputs that determine a clause's cells; the cells stay the same while these are equal."""

    pairs: frozenset[Pair]
    first: frozenset[Pair]
    """Those that have a cell where none of them has observations."""
    silence: Mapping[Pair, str]
    """Why there is nothing to judge, by pair; empty if there is."""
    fallen: Mapping[Pair, str]
    """Pairs that fell silent in breach, or while their promotion gives them requests, and since when, in words."""
    waits: Mapping[Pair, str]
    """Pairs of which each recorder shut down cleanly, and when the next report is due, in words."""
    untimely: str
    """A sender's clock error, in words; empty where the clock seems right."""
    outage: str
    """Time within the long window in which the evaluator did not listen, in words; empty for none."""
    invalid: Mapping[Where, str]
    """Reasons why input is no sample of the kernels, or why there is none; the slice is empty where those of the
    sequences are unknown."""
    otherwise: Mapping[tuple[str, str], str]
    """Slices and inference versions with recorders that apply another slice, or measure something else, in words."""
    oldest: float
    version: int
    """Of the state: which series exist, and which have no room."""


class SilentPairs:
    """Silent kernel pairs at the time of an evaluation, and what else is computed once for all clauses."""

    def __init__(
        self, state: ContractState, now: float, listening: Listening, not_sampled: Mapping[Where, str]
    ) -> None:
        self._state, self.now, self._listening, self.not_sampled = state, now, listening, not_sampled
        self._known: dict[Pair, float | None] = {}
        grid = state.grids[LONG]
        self.oldest = grid.window(now)[0] * grid.width
        before, since = listening.before, listening.since
        away = before > -math.inf and since - before > state.contract.observability.heartbeat and since > self.oldest
        self.outage = f"the evaluator did not listen from {moment(before)} to {moment(since)}" if away else ""
        self.otherwise: dict[tuple[str, str], str] = {}
        self.unmeasured: dict[str, dict[str, str]] = {}
        here = f"the evaluator has version {state.contract.metadata.version}"
        for version, report in state.recorders.otherwise(now):
            applies = f"a recorder applies version {report.version} of the contract, where"
            for slice in report.otherwise:
                said = f"{applies} slice {slice} is defined differently or missing; {here}"
                self.otherwise[slice, version] = said
            for id in report.unmeasured:
                said = f"{applies} clause {id} measures something else or is missing; {here}; restart the recorder with"
                self.unmeasured.setdefault(id, {})[version] = f"{said} the contract that is served"

    def of(self, pair: Pair) -> float | None:
        """Return the seconds of a pair's silence; None while that means nothing yet."""
        if pair not in self._known:
            heard = self._state.heard.get(pair) or Heard(self._listening.since)
            quiet = self._listening.silence(heard.last, self.now)
            # A breach ends with its run, whenever the next is due.
            ended = self._state.has_ended(pair) and not self._in_breach(pair)
            patience = heard.patience(self._state.contract.observability.heartbeat, ended=ended)
            self._known[pair] = None if quiet <= patience else quiet
        return self._known[pair]

    def due(self, pair: Pair) -> str:
        """Say when the next report of a pair is due whose recorders all shut down cleanly; empty without a schedule."""
        heard, heartbeat = self._state.heard.get(pair), self._state.contract.observability.heartbeat
        if heard is None or not self._state.has_ended(pair) or self.of(pair) is not None:
            return ""
        return _next_due(heard, heartbeat)

    def _in_breach(self, pair: Pair) -> bool:
        """Return whether a cell of a pair FAILs; a largest value does so without evidence that is held against it."""
        state = self._state
        alarmed = state.evidence.alarmed.items()
        if any(cell.pair == pair and (held.failing or held.fault is not None) for cell, held in alarmed):
            return True
        return any(
            maximum_interval(state.binned(series, LONG, self.now)).lower > clause.limit_for(slice)
            for clause in state.contract.clauses
            if clause.parsed_statistic.kind == "max"
            for slice in state.contract.slices_for(clause)
            if (series := state.pairs(state.metrics[clause.id], slice).get(pair)) is not None
        )


def current(state: ContractState, clause: Clause, silence: SilentPairs) -> Current:
    """Return the inputs that determine a clause's cells."""
    metric = state.metrics[clause.id]
    pairs, absence, fallen = _current(state, clause, metric, silence)
    of_samples = clause.quantity is not None and clause.quantity.source in _OF_SAMPLES
    every = frozenset(pairs)
    if len(every) <= _MAX_EMPTY_PAIRS:
        first = every
    else:
        first = frozenset(islice((pair for pair in state.newest.get(metric, pairs) if pair in pairs), _MAX_EMPTY_PAIRS))
    refused = _refused(state, metric, silence.now, silence.oldest) if of_samples else {}
    named = {pair for (_, pair), said in refused.items() if said.startswith(INVALID_INPUT)} - {NO_PAIR}
    every = (every - {NO_PAIR} if named else every) | named
    invalid = {**silence.not_sampled, **refused} if of_samples else {}
    untimely = _untimely(state, silence.now)
    otherwise = silence.otherwise | {
        (slice, version): said
        for version, said in silence.unmeasured.get(clause.id, {}).items()
        for slice in state.contract.slices_for(clause)
    }
    waits = {pair: due for pair in every if (due := silence.due(pair))}
    outage, oldest, version = silence.outage, silence.oldest, state.version
    return Current(every, first, absence, fallen, waits, untimely, outage, invalid, otherwise, oldest, version)


def places(state: ContractState, clause: Clause, of: Current) -> Iterator[Evidence]:
    """A clause's cells, by slice and pair."""
    contract, metric = state.contract, state.metrics[clause.id]
    measured = state.newest.get(metric, {})
    without_room = {(key.slice, key.pair) for key in state.unjudged if key.metric == metric}
    stale, whole = (
        {pair for pair, series in state.pairs(metric, name).items() if series.newest >= of.oldest}
        for name in (STALE, ALL)
    )
    by_lag = {name for name, spec in contract.slices.items() if LAG in spec.conditions}
    for slice in contract.slices_for(clause):
        here = state.pairs(metric, slice)
        present = {pair for pair in here.keys() & of.pairs if here[pair].newest >= of.oldest or pair in of.fallen}
        present |= {pair for pair in of.pairs if (slice, pair) in of.invalid}
        present |= {pair for pair in of.pairs if (_UNKNOWN_SLICE, pair) in of.invalid and pair in measured}
        crowded = {pair for place, pair in without_room if place == slice and pair not in here}
        for pair in sorted(crowded):
            cell = Cell(contract.name, clause.id, slice, *pair)
            yield Evidence(cell, clause, absence=_without_room(state), followed=True)
        absence = next(iter(of.silence.values()), "")
        if not absence and not present:
            absence = f"no observations of {metric} on slice {slice} in {_span(contract.observability.long_window)}"
            absence += "".join(f"; {said}" for said in (of.outage, of.untimely) if said)
            absence += next((f"; {said}" for (name, _), said in of.otherwise.items() if name == slice), "")
            if stale:
                absence += f", but of older weights; {_LIMIT_STALE}"
        for pair in sorted((present or of.first) - crowded - ({NO_PAIR} if crowded else set())):
            invalid = of.invalid.get((slice, pair)) or of.invalid.get((_UNKNOWN_SLICE, pair), "")
            silent = of.silence.get(pair, absence) or of.fallen.get(pair, "")
            unknown = bool(of.silence or of.untimely) or slice in by_lag or (slice, pair[1]) in of.otherwise
            if absence and pair in stale - whole and not unknown:
                silent = f"{NOTHING_TO_MEASURE} on slice {slice}: older weights sampled all of it; {_LIMIT_STALE}"
            elif not present and measured.get(pair, math.inf) < of.oldest:
                silent = of.waits.get(pair, silent)
            said = invalid if invalid.startswith(INVALID_INPUT) else silent or invalid
            yield Evidence(
                Cell(contract.name, clause.id, slice, *pair),
                clause,
                absence=said,
                followed=True,
                observed=pair in here or not said,
                broken=of.otherwise.get((slice, pair[1]), ""),
                series=here.get(pair),
            )


def assumption_broken(state: ContractState, place: Evidence, now: float) -> str:
    """Return the assumption of a cell's clause that recorders or the long window break, in words; empty if none."""
    if place.broken or not measurable(place.clause):
        return place.broken
    pair, slice = place.cell.pair, place.cell.slice

    def observed(quantity: str) -> Binned | None:
        series = state.pairs(SAMPLING[quantity].name, slice).get(pair)
        return None if series is None else state.binned(series, LONG, now)

    def outside() -> int:
        return sum(
            state.counted(series, LONG, now)
            for key, series in state.invalid(slice).items()
            if key.slice == _OUT_OF_RANGE and key.pair in (pair, NO_PAIR)
        )

    return broken_assumption(place.clause, state.contract.assumptions, observed, outside)


def _current(
    state: ContractState, clause: Clause, metric: str, silence: SilentPairs
) -> tuple[set[Pair], Mapping[Pair, str], Mapping[Pair, str]]:
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
            return {NO_PAIR}, {NO_PAIR: said + f"write `unit: {base.per}` if it is given single {base.per}s"}, {}
        if others := _other_operators(state, clause):
            said = f"nothing received for {metric}, only for {others}; do the names in both places agree?"
            return {NO_PAIR}, {NO_PAIR: said}, {}
        why = next(iter(silence.unmeasured.get(clause.id, {}).values()), "") or _why_nothing(state, silence.now)
        return {NO_PAIR}, {NO_PAIR: f"nothing received for {metric} yet; {why}"}, {}
    latest = max(newest.values()) - state.contract.observability.window
    sharers = state.sharers(metric)
    current = {pair for pair, time in newest.items() if time > latest or pair in sharers}
    silent = {pair: quiet for pair in current if (quiet := silence.of(pair)) is not None}
    if not silent:
        return current, {}, {}
    heartbeat = state.contract.observability.heartbeat
    alive = current - silent.keys()
    if alive:
        fallen = {
            pair: f"{_silence(state, pair, quiet)}; others report, and {why}"
            for pair, quiet in silent.items()
            if (why := _SHARES if pair in sharers else _was_in_breach(state, clause, pair, alive))
        }
        return alive | fallen.keys(), {}, fallen
    elsewhere = sum(
        silence.now - heard.last <= heard.patience(heartbeat) for pair, heard in state.heard.items() if all(pair)
    )
    replaced = ""
    if elsewhere:
        report = "pair of kernel versions reports" if elsewhere == 1 else "pairs of kernel versions report"
        replaced = f"; {elsewhere} other {report}: were these replaced?"
    absence = {pair: _silence(state, pair, quiet) + replaced for pair, quiet in silent.items()}
    return current, absence, {pair: absence[pair] for pair in sharers}


def _silence(state: ContractState, pair: Pair, quiet: float) -> str:
    """Say since when a pair is silent, and why as far as it is known: its last recorder shut down cleanly."""
    moved, heard = state.recorders.moved_since(pair[1]), state.heard.get(pair)
    if state.has_ended(pair):
        if heard is not None and quiet <= heard.patience(state.contract.observability.heartbeat, ended=True):
            return _next_due(heard, state.contract.observability.heartbeat)  # its breach has ended with its run
        if moved:
            return f"{RUN_ENDED}: its recorder measures another version, and nothing of this for {_span(quiet)}"
        return f"{RUN_ENDED}: its last recorder shut down {_span(quiet)} ago"
    heartbeat = _span(state.contract.observability.heartbeat)
    unknown = "its run ended, its recorder died, or its exports do not arrive"
    why = "its recorder measures another version since" if moved else unknown
    return f"{NO_REPORT} {_span(quiet)} (heartbeat {heartbeat}): {why}"


def _next_due(heard: Heard, heartbeat: float) -> str:
    patience = heard.patience(heartbeat, ended=True)
    every = f"reports came about every {_span(patience - heartbeat)}"
    return f"{NEXT_DUE} {moment(heard.last + patience)}: {every}, and each recorder shut down"


def _refused(state: ContractState, metric: str, now: float, oldest: float) -> dict[Where, str]:
    """Slices and kernel pairs of which all that comes fails the input checks, and what is said of each.

    `oldest` is the begin of the long window.
    """
    seen, names = state.contract.observability, {metric, QUANTITIES["tv_token"].name}
    refused: dict[Where, str] = {}
    measured: dict[Pair, float] = {}
    for pair, time in (item for name in names for item in state.newest.get(name, {}).items()):
        measured[pair] = max(measured.get(pair, -math.inf), time)
    measured[NO_PAIR] = max(measured.values(), default=-math.inf)
    for slice in (_UNKNOWN_SLICE, ALL, *state.contract.slices):
        of_all = slice in {_UNKNOWN_SLICE, ALL}
        failed = state.invalid(slice) if of_all else state.series_of(invalid_on(slice))
        if not failed:
            continue
        newest = {key.pair: -math.inf for key in failed}
        here = (item for name in names for item in state.pairs(name, slice).items())
        for pair, time in measured.items() if of_all else ((pair, series.newest) for pair, series in here):
            newest[pair] = max(newest.get(pair, -math.inf), time)
        newest[NO_PAIR] = max(newest.values())
        for pair, time in newest.items():
            own = [(key, series) for key, series in failed.items() if pair == NO_PAIR or key.pair in {pair, NO_PAIR}]
            is_measured = measured.get(pair, -math.inf) >= oldest
            failing = [(key, series) for key, series in own if not (is_measured and key.slice in ON_PURPOSE)]
            found = _failed(state, failing, max(time + seen.heartbeat, now - seen.window), SHORT, now)
            if found:
                refused[slice, pair] = f"{INVALID_INPUT}, {_in_words(found)}"
            elif is_measured and time < oldest:
                ends = [(series.newest, key.slice in ON_PURPOSE) for key, series in own if key.slice != _OUT_OF_RANGE]
                on_purpose = [(key, series) for key, series in own if key.slice in ON_PURPOSE]
                found = _failed(state, on_purpose, oldest, LONG, now)
                if found and max(ends)[1]:  # the last ones were no fault
                    refused[slice, pair] = f"{NOTHING_TO_MEASURE} on slice {slice}: {_in_words(found)}"
    return refused


def _failed(
    state: ContractState, failed: Iterable[tuple[SeriesKey, Series]], since: float, grid: int, now: float
) -> Counter[str]:
    """Sequences of a window that fail the input checks, by reason, of series with any since a time."""
    found: Counter[str] = Counter()
    for key, series in failed:
        if key.slice != _OUT_OF_RANGE and series.newest > since and (count := state.counted(series, grid, now)):
            found[key.slice] += count
    return found


def _in_words(found: Counter[str]) -> str:
    ((reason, count),) = found.most_common(1)
    return f"{reason}: {count:,} sequences were not measured{_and_others(found)}. {remedy(reason)}"


def _and_others(found: Counter[str]) -> str:
    """Count the sequences that failed for other reasons than the most frequent one, in words; empty for none."""
    others = found.total() - max(found.values())
    return f" and {others:,} for other reasons" if others else ""


def _was_in_breach(state: ContractState, clause: Clause, pair: Pair, alive: Collection[Pair]) -> str:
    """Say that a pair which fell silent beside others was in breach; empty if not, or where they have replaced it."""
    alarmed = [held for cell, held in state.evidence.alarmed.items() if (cell.clause, cell.pair) == (clause.id, pair)]
    if not any(held.failing or held.fault is not None for held in alarmed):
        return ""
    mine = state.heard.get(pair)  # a replaced pair ended before the others began
    beside = mine is not None and any(other.since < mine.last for name, other in state.heard.items() if name in alive)
    return "it was in breach" if beside else ""


def _why_nothing(state: ContractState, now: float) -> str:
    """The likely cause of a metric that never came, as the end of a sentence."""
    found = sum(state.failed(ALL, now, LONG).values(), Counter[str]())
    if found and not state.newest.get(QUANTITIES["tv_token"].name):  # which comes of every sequence that is measured
        ((reason, count),) = found.most_common(1)
        said = f"{count:,} sequences were not measured ({reason}){_and_others(found)}"
        return f"{said}; `kc-otel reference invalid-input` says what to do"
    if untimely := _untimely(state, now):
        return untimely
    if others := len({name for name in state.newest if metric_of(name) != INVALID}):
        return (
            f"{others} other {'metric arrives' if others == 1 else 'metrics arrive'}; `kc-otel doctor --path` says "
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


def _span(seconds: float) -> str:
    return format_duration(float(round(seconds)) if seconds >= 1 else round(seconds, 3))


def not_sampled(state: ContractState, now: float) -> dict[Where, str]:
    """Return why the inference kernel did not sample the tokens of some slices and pairs."""
    ratios = state.series_of(QUANTITIES["ratio"].name)
    window = state.panes.window(SHORT, now)
    high, at = window.places(np.array([series.number for series in ratios.values()], np.int64))
    high[high] = window.columns.sum[at] > (1.0 + ROUNDING_SURPLUS) * window.columns.count[at]
    found: dict[Where, str] = {}
    for (key, series), look in zip(ratios.items(), high.tolist(), strict=True):
        if look and key.slice not in UNJUDGED:
            bins = state.binned(series, SHORT, now)
            if is_surplus(bins.lower, bins.upper, bins.count, bins.sum):
                said = f"the mean of P/Q over {bins.total:,} tokens is {bins.sum / bins.total:.3g}"
                found[key.slice, key.pair] = f"{INVALID_INPUT}, not_sampled: {said}. {remedy('not_sampled')}"
    return found


def too_many(state: ContractState, now: float) -> dict[Pair, str]:
    """Return the kernel pairs of which more than one in a hundred sequences failed the input checks, and a sentence."""
    found: dict[Pair, str] = {}
    for slice in (ALL, *state.contract.slices):
        failed: dict[Pair, Counter[str]] = {}
        for pair, reasons in state.failed(slice, now).items():
            if told := Counter({name: count for name, count in reasons.items() if name not in _NOT_FAILING}):
                failed[pair] = told
        if failed:
            found = _failing_on(state, slice, failed, now) | found
    return found


def _failing_on(state: ContractState, slice: str, failed: dict[Pair, Counter[str]], now: float) -> dict[Pair, str]:
    measured: dict[tuple[Pair, bool], dict[str, int]] = {}  # observations by metric, of sequences or of operators' rows
    for metric in state.newest.keys() - {SAMPLING["prompt_rollouts"].name}:  # which count those that failed, too
        for pair, series in state.pairs(metric, slice).items():
            measured.setdefault((pair, "[" in metric), {})[metric] = state.counted(series, SHORT, now)
    unnamed = failed.pop(NO_PAIR, Counter())
    pairs = failed.keys() | ({pair for pair, _ in measured} if unnamed else set())
    found: dict[Pair, str] = {}
    for pair in pairs or {NO_PAIR}:
        reasons = failed.get(pair, Counter()) + unnamed
        for of_rows in (False, True):
            counted = {reason: count for reason, count in reasons.items() if (reason == _OF_ROWS) is of_rows}
            known, failing = measured.get((pair, of_rows), {}), sum(counted.values())
            # Without a count of sequences there are at most as many as observations: of tokens, or rows.
            passed = known.get(SAMPLING["sequence_tokens"].name) or max(known.values(), default=0)
            if failing > _MAX_FAILING_SHARE * (failing + passed):
                reason, what = max(counted, key=counted.__getitem__), "rows of operators" if of_rows else "sequences"
                share = f"{100.0 * failing / (failing + passed):.3g} % of the {what}"
                share += "" if slice == ALL else f" on slice {slice}"
                found[pair] = f"{share} failed the input checks in the window, most of them {reason}: {remedy(reason)}"
    return found


def sampling_notes(state: ContractState) -> list[str]:
    """A sentence for each pair of kernel versions with prompts, or steps, in the long window."""
    judged = [clause.quantity for clause in state.contract.clauses if clause.averaged in _JUDGED_UNITS]
    names = {quantity.name for quantity in judged if quantity is not None}
    pairs = {pair for name in names for pair in state.pairs(name, ALL) if _held(state, name, pair) is not None}
    return [_said(state, pair, several=len(pairs) > 1) for pair in sorted(pairs)]


def _said(state: ContractState, pair: Pair, *, several: bool) -> str:
    whose = f" of kernel {pair[1]}" if several else ""
    rollouts = _held(state, SAMPLING["prompt_rollouts"].name, pair)
    if rollouts is None:
        return (
            f"Assumes that sequences{whose} are independent: no recorder says which of them answer one prompt "
            "(`groups=` or `prompt_ids=`)."
        )
    effect, mean = _held(state, SAMPLING["design_effect"].name, pair), rollouts.sum / rollouts.total
    said = f"Prompts{whose} count once, with {mean:.3g} rollouts on average"
    if effect is not None:
        said += f"; {effect.sum / effect.total:.2g} of these are worth one independent sequence (design effect)"
    return f"{said}."


def _held(state: ContractState, metric: str, pair: Pair) -> Binned | None:
    """Return the long window's content of a metric; None if empty."""
    series = state.pairs(metric, ALL).get(pair)
    held = None if series is None else state.binned(series, LONG, state.clock)
    return None if held is None or not held.total else held
