"""The evaluator: OTLP requests in, verdicts out. It holds state, does no input or output, and is told the time."""

from __future__ import annotations

import gc
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from kc_otel import machine_code
from kc_otel._extras import MissingExtraError
from kc_otel.contract.limits import factors
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import DERIVED
from kc_otel.contract.slices import ALL, PLACES, UNJUDGED, Scalar
from kc_otel.contract.words import FAILS_CHECKS, listed
from kc_otel.judge.causes import causes_of, drift_by_place, passes_against
from kc_otel.judge.cell_columns import CellColumns
from kc_otel.judge.cells import sampling_notes, too_many
from kc_otel.judge.columns.message_streams import MessageStreams
from kc_otel.judge.contract_state import ContractState
from kc_otel.judge.decisions import DecisionTable, sharing
from kc_otel.judge.otlp.requests import ExportResult
from kc_otel.judge.otlp.wire_columns import ColumnMessage
from kc_otel.judge.point_streams import OUTCOME_SENTENCES, Horizon, Missing, missing
from kc_otel.judge.points import (
    DROPPED,
    INVALID,
    KERNEL_INFO,
    TRAIN_STEP,
    AppliedContract,
    ImpossiblePoint,
    Point,
    metric_of,
    walk,
)
from kc_otel.judge.recorders import KernelInfo, LastReport, Recorders, see_kernel
from kc_otel.judge.series import Listening, Pair, SeriesKey
from kc_otel.judge.verdict import INPUT_CLAUSE, Causes, Cell, Evaluation, Verdict
from kc_otel.judge.verdicts import said_of
from kc_otel.stats import Interval

_log: Final = logging.getLogger(__name__)
_REJECTED: Final = frozenset(
    {
        "malformed",
        "unknown_contract",
        "unknown_slice",
        "future",
        "late",
        "over_cap",
        "other_buckets",
        "contradictory",
        "unordered",
    }
)
"""Outcomes that the sender is told of; the others need nobody's attention."""
_REPORTED_OUTCOMES: Final = frozenset({"behind", "two_writers", "unjudged"})
"""Outcomes that the sender is told of as well, although the points count as far as they can."""
_REMEMBERED_OUTCOMES: Final = frozenset({"accepted", "behind", "two_writers", "baseline"})
"""Outcomes of points that the next ones of their stream are held against."""
_MISSING_OUTCOMES: Final = _REJECTED | {"behind"}
"""Outcomes of points that no verdict on the short window has in it."""
_NOT_MISSING: Final = frozenset({"pair-expired", "quarantine-failed"})
"""Reasons of dropped batches that no verdict lacks: one side is left out by trainers; the batch was measured."""
_MAX_REASONS: Final = 3
_MAX_LISTED_SLICES: Final = 5
_MAX_PAIRS: Final = 256
"""Pairs of kernels of a contract whose steps are remembered: the ones that told theirs last."""


class _Arrival(NamedTuple):
    """A message on its way in, and what its recorders say."""

    now: float
    columns: ColumnMessage | None
    horizons: Mapping[str, Horizon]
    observed: dict[tuple[Recorders, str], list[SeriesKey]]
    """Series of which a recorder has observed something new."""
    done: dict[tuple[Recorders, str], dict[str, bool]]
    """Whether a recorder is done with a kernel version that it names."""

    def tell(self) -> None:
        """Tell the recorders' states, at the end of the message."""
        for (recorders, sender), keys in self.observed.items():
            recorders.observe(sender, keys, self.now)
        for (recorders, sender), done in self.done.items():
            recorders.move(sender, done, self.now)


class _RefusedError(Exception):
    """A point that has no place here: (outcome, message for the sender)."""


class Faults:
    """Current failures, by contract: the others go on. Each is logged when it begins and ends, and counted each time.

    The empty name is for failures of no single contract.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._present: dict[tuple[str, str], tuple[object, str]] = {}

    @property
    def present(self) -> Mapping[str, str]:
        """Current failures in words, by the contract's name."""
        found: dict[str, str] = {}
        for (contract, _), (_, sentence) in sorted(self._present.items()):
            found[contract] = f"{found[contract]}; {sentence}" if contract in found else sentence
        return found

    def fails(self, contract: str, stage: str) -> bool:
        """Return whether a stage of the tick fails now."""
        return (contract, stage) in self._present

    def report(self, contract: str, stage: str, errors: Mapping[str, Exception]) -> None:
        """Say what failed in a stage of the tick, by where; nothing when all went well."""
        of = f"contract {contract}: {stage}" if contract else stage
        before = self._present.pop((contract, stage), None)
        if not errors:
            if before is not None:
                _log.warning("%s works again", of)
            return
        self.counts[contract] += len(errors)
        where, error = next(iter(errors.items()))
        more = f"; and {len(errors) - 1} more" if len(errors) > 1 else ""
        sentence = f"{stage} fails for {where}: {said_of(error)}{more}"
        lacks = isinstance(error, MissingExtraError)  # every clause of its kind fails, and the sentence says why
        kind: object = type(error) if lacks else [(place, type(raised)) for place, raised in errors.items()]
        self._present[contract, stage] = (kind, sentence)
        if before is None or before[0] != kind:
            prefix = f"contract {contract}: " if contract else ""
            said = "%s%s; all else goes on, further ones are only counted"
            _log.error(said, prefix, sentence, exc_info=None if lacks else error)


class Evaluator:
    """Streams, windows and verdicts of any number of contracts. Use it from one thread.

    `remember` makes what remembers a contract. `states` and `steps` are by the contract's name: its state, and the
    newest step of the trainer by pair of kernels. `counters` has the data points received so far by what became of
    them, for kc.evaluator.points; each point counts once. `judged_at` is the Unix time of the last evaluation, or
    of the one before a restart; -inf before any.

    Raises ValueError if two contracts share a name, or a clause needs an assumption that its contract does not state.
    """

    def __init__(
        self, contracts: Sequence[Contract], *, remember: Callable[[Contract], ContractState] = ContractState
    ) -> None:
        self.states = {contract.name: remember(contract) for contract in contracts}
        if len(self.states) < len(contracts):
            names = [contract.name for contract in contracts]
            msg = f"two contracts are called {max(names, key=names.count)!r}; metadata.name has to be unique"
            raise ValueError(msg)
        for contract in contracts:
            for clause in contract.clauses:
                if clause.metric in DERIVED:
                    factors(clause.metric, contract.assumptions)
        self.steps: dict[str, dict[Pair, int]] = {name: {} for name in self.states}
        self.counters: Counter[str] = Counter()
        self.faults = Faults()
        self._cells_of = {name: CellColumns(state) for name, state in self.states.items()}
        self.judged_at = -math.inf
        self._listening: Listening | None = None
        self._judged_before = -math.inf
        self._columns, self._reads_columns = MessageStreams(self.states), machine_code.is_available()
        self._gen_ai: dict[str, list[ContractState]] = {}
        for state in self.states.values():
            for name in {clause.metric for clause in state.contract.clauses if clause.metric.startswith("gen_ai.")}:
                self._gen_ai.setdefault(name, []).append(state)
        self._slices = {name: {ALL, *UNJUDGED, *PLACES, *state.contract.slices} for name, state in self.states.items()}

    def listening(self, now: float) -> Listening:
        """Since when it has listened without a gap: silence counts from the first time that this process was told."""
        if self._listening is None:
            self._listening = Listening(now, self._judged_before)
        return self._listening

    def listen_anew(self, now: float) -> None:
        """Count silence from now on, Unix seconds, beside what it was at the last evaluation."""
        self._listening = Listening(now, self.judged_at)

    def listened(self, until: float) -> None:
        """Set the Unix time until which the evaluator that left this state listened: pairs silent then still are."""
        self.judged_at = self._judged_before = until
        if self._listening is not None:
            self._listening = self._listening._replace(before=until)

    def columns_of(self, body: bytes, most: int) -> ColumnMessage | None:
        """A serialized ExportMetricsServiceRequest as columns, to be given to `ingest_metrics`.

        It may have `most` resources, scopes, metrics and points. None where there is no machine code, and for what
        protobuf has to read.
        """
        return self._columns.message(body, most) if self._reads_columns else None

    def settle(self) -> None:
        """Bring the series in `states` up to date with what was taken as columns."""
        for state in self.states.values():
            state.settle()

    def clock(self, now: float) -> None:
        """Note when something arrived, Unix seconds; where the clock went back, so does what is remembered."""
        self.listening(now)
        for state in self.states.values():
            state.horizon(now)

    def ingest_metrics(self, request: Any, now: float) -> ExportResult:
        """Take an ExportMetricsServiceRequest, or one as columns, that arrived at `now`, Unix seconds."""
        self.listening(now)
        counts: Counter[str] = Counter()
        messages: dict[str, None] = {}

        def count(outcome: str, points: int, message: str) -> None:
            counts[outcome] += points
            if message:
                messages[message] = None

        horizons = {name: state.horizon(now) for name, state in self.states.items()}
        columns = request if isinstance(request, ColumnMessage) else None
        arrival = _Arrival(now, columns, horizons, defaultdict(list), defaultdict(dict))
        if columns is not None:
            taken, behind = self._columns.fold(columns, horizons, now)
            counts["accepted"] += taken - behind
            if behind:
                count("behind", behind, OUTCOME_SENTENCES["behind"])
            for sender, state, keys in self._columns.observed(columns):
                arrival.observed[state.recorders, sender] += keys
        points = (
            walk(request, self._gen_ai, counts)
            if columns is None
            else columns.left(self._gen_ai, counts, columns.taken.tobytes())
        )
        for point in points:
            outcome, message = self._take(point, arrival)
            count(outcome, 1, message or OUTCOME_SENTENCES.get(outcome, ""))
        arrival.tell()
        self.counters.update(counts)
        rejected = sum(counts[outcome] for outcome in _REJECTED)
        more = f"; and {len(messages) - _MAX_REASONS} more reasons" if len(messages) > _MAX_REASONS else ""
        heard = rejected or any(counts[outcome] for outcome in _REPORTED_OUTCOMES)
        return ExportResult(rejected, "; ".join(list(messages)[:_MAX_REASONS]) + more if heard else "")

    def evaluate(self, now: float, table: DecisionTable | None = None) -> dict[str, Evaluation]:
        """Verdicts of every cell, by the contract's name.

        A version to which the table gives a share of the requests is missed when it falls silent.
        A cell that cannot be judged because the evaluator itself fails is NO_DATA and says so; see `faults`.
        """
        if self._listening is not None:  # also when the clock went back
            self._listening = self._listening._replace(since=min(self._listening.since, now))
        self.judged_at = now
        for name, state in self.states.items():
            state.sharing = {} if table is None else sharing(table, name)
        with without_collector():
            return {name: self._evaluation(state, now) for name, state in self.states.items()}

    def invalid_input(self, contract: str, now: float) -> dict[Pair, dict[str, int]]:
        """Sequences that failed an input check in the window, by kernel pair and reason."""
        return {**self.states[contract].failed(ALL, now)}

    def failing(self, contract: str, now: float) -> dict[tuple[Pair, str], dict[str, int]]:
        """Sequences that failed an input check in the window, by reason, of each pair and judged slice, also `all`."""
        state = self.states[contract]
        judged = {slice for clause in state.contract.clauses for slice in state.contract.slices_for(clause)}
        return {
            (pair, slice): reasons for slice in sorted(judged) for pair, reasons in state.failed(slice, now).items()
        }

    def missing(self, contract: str, now: float) -> list[Missing]:
        """Points that are not judged now, one row by outcome and kernel pair; the oldest first."""
        return missing(contract, self.states[contract].refused.present(now))

    def newest(self, contract: str) -> dict[tuple[str, str], tuple[float, float]]:
        """Unix times of the newest observation of each slice and inference version, and of the last arrival of one."""
        found: dict[tuple[str, str], tuple[float, float]] = {}
        for key, series in self.states[contract].series.items():
            if key.slice not in UNJUDGED and key.slice not in PLACES:
                slice = key.slice if metric_of(key.metric) != INVALID else key.metric[len(INVALID) + 1 : -1] or ALL
                where = slice, key.kernel_inference
                time, arrived = found.get(where, (-math.inf, -math.inf))
                found[where] = max(series.newest, time), max(series.newest, series.arrived, arrived)
        return found

    def newest_of(self, contract: str, version: str) -> float:
        """Unix time of the newest observation of a version of the inference kernel; -inf for none."""
        pairs = (pair for pairs in self.states[contract].newest.values() for pair in pairs.items())
        return max((time for (_, inference), time in pairs if inference == version), default=-math.inf)

    def silent(self, contract: str, now: float) -> bool:
        """Return True if no kernel pair of a contract has reported for longer than its usual gap."""
        state = self.states[contract]
        heartbeat = state.contract.observability.heartbeat
        return all(self._silence(now)(heard.last) > heard.patience(heartbeat) for heard in state.heard.values())

    def silent_recorders(self, contract: str, version: str, now: float) -> tuple[int, str]:
        """Count the recorders of a kernel version that fell silent without a word while others report, and name them.

        Each counts until it reports again, or for as long as the long window. The sentence is empty for none.
        """
        state, seen = self.states[contract], self.states[contract].contract.observability
        lasting = max(seen.window, seen.long_window)
        return state.recorders.silent_members(version, self._silence(now), lasting)

    def lost(self, contract: str, version: str, since: float, until: float, now: float) -> bool:
        """Return True if a recorder that reported a kernel version from `since` on is silent now, or has been since."""
        return self.states[contract].recorders.lost(version, since, until, self._silence(now))

    def unheard(self, cell: Cell, now: float) -> bool:
        """Return True if a recorder that measured a cell while it was broken has not shown that it is over.

        So it is while points of the version arrive that are not judged: they may be what was broken. A batch that is
        dropped now and then, as in any large fleet, is told as missing and keeps nothing open.
        """
        state, key = self.states[cell.contract], self.series_of_cell(cell)
        if any(
            refused.pair[1] == cell.kernel_inference and refused.outcome != "dropped"
            for refused in state.refused.present(now)
        ):
            return True
        return key is not None and state.recorders.unheard(key, self._silence(now), now)

    def unsliced(self, cell: Cell, slices: Iterable[str]) -> bool:
        """Return True if a recorder has not shown the end of a breach by requests of none of the slices."""
        whole = self.series_of_cell(cell)
        parts = [whole._replace(slice=slice) for slice in slices] if whole is not None else []
        return whole is not None and self.states[cell.contract].recorders.owed_apart(whole, parts)

    def series_of_cell(self, cell: Cell) -> SeriesKey | None:
        """The series that a cell rests on, also one of invalid input; None where the contract has no such clause."""
        metrics = self.states[cell.contract].metrics | {INPUT_CLAUSE: INVALID}
        return SeriesKey(metrics[cell.clause], *cell[2:]) if cell.clause in metrics else None

    def kernels(self, contract: str) -> tuple[KernelInfo, ...]:
        """Kernel versions that reported themselves, the one seen last first."""
        return tuple(sorted(self.states[contract].kernels.values(), key=lambda info: -info.last_seen))

    def inference_versions(self, contract: str) -> list[str]:
        """Versions of the inference kernel that reported themselves, the one seen last first."""
        return [kernel.version for kernel in self.kernels(contract) if kernel.role == "inference"]

    def sampling(self, contract: str) -> list[str]:
        """Return the known sampling of prompts, and the assumptions where no recorder states it, as sentences."""
        self.settle()
        return sampling_notes(self.states[contract])

    def by_place(self, contract: str, pair: Pair, now: float) -> dict[str, Interval]:
        """Return the drift of a kernel pair in each of PLACES that was observed."""
        self.settle()
        return drift_by_place(self.states[contract], pair, now)

    @property
    def taken_as_columns(self) -> int:
        """Points that were taken from columns so far."""
        return self._columns.taken

    @property
    def series_count(self) -> int:
        """Number of series that state is kept for."""
        return sum(len(state.series) for state in self.states.values())

    @property
    def stream_count(self) -> int:
        """Number of streams that state is kept for."""
        return sum(len(state.streams) for state in self.states.values())

    @property
    def events(self) -> Mapping[str, int]:
        """Counts of events of streams and series so far: resets, gaps, evictions and the like."""
        total: Counter[str] = Counter()
        for state in self.states.values():
            total.update(state.events)
        return total

    def _evaluation(self, state: ContractState, now: float) -> Evaluation:
        verdicts, steps = self._verdicts_of(state, now), dict(self.steps[state.contract.name])
        against = passes_against(verdicts, state.kernels.values())
        return Evaluation(now, verdicts, steps, self._causes(state, now), against)

    def _verdicts_of(self, state: ContractState, now: float) -> Sequence[Verdict]:
        contract, cells = state.contract, self._cells_of[state.contract.name]
        try:
            state.evict(now)
            state.weigh(now)
            state.refused.keep_only(FAILS_CHECKS, too_many(state, now), now)
            verdicts: Sequence[Verdict]
            verdicts, errors = cells.verdicts(now, self.listening(now))
        except Exception as error:  # noqa: BLE001 - one contract's fault is not the others'
            verdicts, errors = cells.unjudged(now, error), {"every clause": error}
        self.faults.report(contract.name, "judging", errors)
        return verdicts

    def _causes(self, state: ContractState, now: float) -> dict[Cell, Causes]:
        try:
            return causes_of(state, now)
        except Exception as error:  # noqa: BLE001 - verdicts stand without it
            self.faults.report(state.contract.name, "telling causes apart", {"every clause": error})
            return {}

    def _silence(self, now: float) -> Callable[[float], float]:
        return lambda last: self.listening(now).silence(last, now)

    def _take(self, point: Point | ImpossiblePoint, arrival: _Arrival) -> tuple[str, str]:
        """Take a point; return what became of it, and a message for its sender."""
        try:
            if isinstance(point, ImpossiblePoint):
                raise _RefusedError("malformed", point.message)  # noqa: TRY301 - as what else is refused
            if point.metric in self._gen_ai:
                return self._take_gen_ai(point, arrival), ""
            state = self._addressed(point)
            if point.metric == KERNEL_INFO:
                return self._take_info(point, state, arrival), ""
            if point.metric == TRAIN_STEP:
                return self._take_step(point, self.steps[state.contract.name]), ""
            if point.metric == DROPPED:
                return self._take_dropped(point, state, arrival), ""
            slice, pair = self._place(point, state.contract.name)
        except _RefusedError as refused:
            outcome, message = refused.args
            for state in self._concerned(point.metric, point.attributes):
                _noted(state, outcome, point, arrival.now, message)
            return outcome, message
        outcome = state.take(point, (slice,), pair, arrival.horizons[state.contract.name], arrival.now)
        observed = state.observed
        if observed and point.metric == INVALID:
            observed = [SeriesKey(INVALID, str(point.attributes.get("kc.slice", ALL)), *pair)]
        arrival.observed[state.recorders, point.origin.sender] += observed
        if arrival.columns is not None and outcome in _REMEMBERED_OUTCOMES and point.histogram.layout is None:
            self._columns.learn(arrival.columns, point, state, SeriesKey(point.series, slice, *pair))
        return _noted(state, outcome, point, arrival.now), ""

    def _take_info(self, point: Point, state: ContractState, arrival: _Arrival) -> str:
        if not see_kernel(state.kernels, point.attributes, arrival.now):
            raise _RefusedError("malformed", f"{point.metric} names no kernel role and version")
        done = not point.histogram.count
        version, sender = str(point.attributes["kc.kernel.version"]), point.origin.sender
        applied, contract = point.origin.applied, state.contract
        report = LastReport(
            arrival.now,
            version=applied.version,
            otherwise=applied.otherwise(contract),
            unmeasured=applied.unmeasured(contract),
        )
        if state.recorders.hear(version, sender, report, done=done):
            state.begin(version, arrival.now)
        arrival.done[state.recorders, sender][version] = done
        return "accepted"

    def _take_dropped(self, point: Point, state: ContractState, arrival: _Arrival) -> str:
        """Note a recorder that has dropped more, by the kernels that it reports: its points do not name them."""
        dropped = state.take_dropped(point, arrival.horizons[state.contract.name], arrival.now)
        reason = str(point.attributes.get("kc.reason", "unknown"))[:80]
        if not dropped or reason in _NOT_MISSING:
            return "accepted"
        sender, known = point.origin.sender, state.kernels
        versions = state.recorders.versions_of(sender)
        train = [version for version in versions if ("train", version) in known][-1:] or [""]
        said = f"its recorder dropped batches ({reason}); the recorder's log says why"
        for version in [version for version in versions if ("inference", version) in known] or [""]:
            state.refused.add("dropped", (train[0], version), sender, 0.0, arrival.now, said)
        return "dropped"

    def _take_step(self, point: Point, steps: dict[Pair, int]) -> str:
        pair = _pair(point.attributes)
        steps.pop(pair, None)  # the newest is at the end
        steps[pair] = int(point.histogram.count)
        while len(steps) > _MAX_PAIRS:
            del steps[next(iter(steps))]
        return "accepted"

    def _addressed(self, point: Point) -> ContractState:
        name = point.attributes.get("kc.contract")
        if not isinstance(name, str):
            raise _RefusedError("malformed", f"a point of {point.metric} has no attribute kc.contract")
        if name not in self.states:
            loaded = ", ".join(self.states)
            raise _RefusedError("unknown_contract", f"contract {name[:80]!r} is not loaded here; loaded: {loaded}")
        return self.states[name]

    def _concerned(self, metric: str, attributes: Mapping[str, Scalar]) -> Sequence[ContractState]:
        """The contract that a refused measurement is about; all that it may be about where it names no loaded one."""
        if metric in {KERNEL_INFO, TRAIN_STEP}:
            return []
        states, name = self._gen_ai.get(metric) or list(self.states.values()), attributes.get("kc.contract")
        named = [state for state in states if name in {None, state.contract.name}]
        return named if named or metric in self._gen_ai else states

    def _place(self, point: Point, contract: str) -> tuple[str, Pair]:
        served = self.states[contract].contract
        if point.origin.applied.differs(served, str(point.attributes.get("kc.slice"))):
            raise _RefusedError("unknown_slice", _other_slices(served, point.origin.applied))
        named, pair, invalid = point.attributes.get("kc.slice"), _pair(point.attributes), point.metric == INVALID
        if not invalid and not (named and all(pair)):
            lacks = "lacks kc.slice, kc.kernel.train or kc.kernel.inference"
            raise _RefusedError("malformed", f"a point of {point.metric} {lacks}")
        if named is not None and str(named) not in self._slices[contract]:
            raise _RefusedError("unknown_slice", f"contract {contract} has no slice {str(named)[:80]!r}")
        return str(point.attributes.get("kc.reason", "unknown"))[:80] if invalid else str(named), pair

    def _take_gen_ai(self, point: Point, arrival: _Arrival) -> str:
        # Such a point knows no contract: it counts for each that names its metric, on the slices that its own and
        # its resource's attributes put it into.
        only = point.attributes.get("kc.contract")
        outcome = "ignored"
        for state in self._gen_ai[point.metric]:
            if only in {None, state.contract.name}:
                slices = state.contract.slices_of({**point.origin.resource, **point.attributes})
                pair = _pair(point.attributes)
                horizon, now = arrival.horizons[state.contract.name], arrival.now
                outcome = _noted(state, state.take(point, slices, pair, horizon, now), point, now)
        return outcome


@contextmanager
def without_collector() -> Iterator[None]:
    """Look for no cycles: there are tens of objects for each cell, all of which would be looked at, and no cycles."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _noted(state: ContractState, outcome: str, point: Point | ImpossiblePoint, now: float, message: str = "") -> str:
    """Return what became of a point, after noting that it is missing where it is."""
    if outcome in _MISSING_OUTCOMES:
        age = now - point.time / 1e9 if isinstance(point, Point) else 0.0
        state.refused.add(outcome, _pair(point.attributes), point.origin.sender, age, now, message)
    return outcome


def _other_slices(contract: Contract, applied: AppliedContract) -> str:
    names = applied.otherwise(contract)
    return (
        f"slice{'s' * (len(names) > 1)} {listed(names[:_MAX_LISTED_SLICES])} of {contract.name} version "
        f"{contract.metadata.version} {'is' if len(names) == 1 else 'are'} defined differently or missing in version "
        f"{applied.version}, which the recorder applies; restart it with the contract that is served"
    )


def _pair(attributes: Mapping[str, Scalar]) -> Pair:
    return str(attributes.get("kc.kernel.train", "")), str(attributes.get("kc.kernel.inference", ""))
