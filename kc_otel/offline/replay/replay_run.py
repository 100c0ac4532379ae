"""A recording through one contract: the evaluator, the policy and the decision table of `kc-otel serve`, told the time.

What is judged is what was measured: a replay cannot move traffic, so a route that would have taken a slice away from a
kernel does not end the drift of that slice, and nobody silences or resumes anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL
from kc_otel.judge.decisions.table import DecisionTable, apply, kept_from
from kc_otel.judge.escalation.alert_lifecycle import advance
from kc_otel.judge.escalation.alerts import PolicyState
from kc_otel.judge.escalation.message_groups import GroupTiming, MessageGroup, group_messages
from kc_otel.judge.escalation.notices import NotificationLog, notices
from kc_otel.judge.escalation.people import People
from kc_otel.judge.evaluator import Evaluator, without_collector
from kc_otel.judge.incidents.incident import Incident, IncidentState
from kc_otel.judge.incidents.incident_lifecycle import follow
from kc_otel.judge.verdict import Status, Verdict
from kc_otel.judge.verdict_sequence import cells_of, selected
from kc_otel.offline.replay.coverage import not_recorded
from kc_otel.offline.replay.timeline import ReplayTimeline, SentWebhook, SpanCollector
from kc_otel.offline.replay.traffic_entries import TrafficEntry

__all__ = ["replay"]

_TOGETHER: Final = 6400
"""Cells that are judged together, of as many evaluations: what their windows hold is remembered until then."""
_MOST_ITEMS: Final = 60_000
"""Points of a message that is read so; larger ones are read by protobuf."""


def replay(
    contract: Contract, entries: Iterable[TrafficEntry], every: float | None, timing: GroupTiming
) -> ReplayTimeline:
    """What a contract makes of a recording.

    Args:
        contract: The contract; its name has to be the recording's.
        entries: The recording, in the order of time.
        every: Seconds between two evaluations, at multiples of it since the Unix epoch; None for the recording's own.
        timing: How long webhooks wait for what belongs to them.

    Raises:
        ValueError: If `every` is not a positive number, or the contract cannot be evaluated.
    """
    if every is not None and not (math.isfinite(every) and every > 0):
        raise ValueError(f"every: {every!r} is not a number of seconds above 0")
    with without_collector():
        return _replayed(_Run(contract, timing), entries, every)


def _replayed(run: _Run, entries: Iterable[TrafficEntry], every: float | None) -> ReplayTimeline:
    due = math.nan
    for entry in entries:
        run.started(entry.at)
        if every is None:
            if entry.is_evaluation:
                run.judge(entry.at)
        elif not entry.is_evaluation:
            if math.isnan(due):
                due = _next(entry.at, every)
            while due <= entry.at:
                run.judge(due)
                due = _next(due, every)
        if not entry.is_evaluation:
            run.take(entry)
    if every is not None and not math.isnan(due):
        run.judge(due)
    return run.timeline()


def _next(at: float, every: float) -> float:
    """The first multiple of `every` after `at`."""
    index = math.floor(at / every) + 1
    return index * every if index * every > at else (index + 1) * every


class _Run:
    """The evaluator's process without its sockets and files."""

    def __init__(self, contract: Contract, timing: GroupTiming) -> None:
        self._contract, self._timing = contract, timing
        self._evaluator = Evaluator([contract])
        self._evaluator.use_columns()
        self._policy = PolicyState(contract.name)
        self._notifications = NotificationLog(contract.name)
        self._incidents: tuple[Incident, ...] = ()
        self._groups: tuple[MessageGroup, ...] = ()
        self._decisions = DecisionTable()
        self._spans = SpanCollector()
        self._messages: list[SentWebhook] = []
        self._waiting: list[tuple[float, Sequence[Verdict], Mapping[str, int]]] = []
        self._silent = {(clause.id, slice) for clause in contract.clauses for slice in (ALL, *contract.slices)}
        self._start = self._end = math.nan
        self._evaluations = self._requests = self._cells = 0

    def started(self, at: float) -> None:
        """The recording has begun."""
        if math.isnan(self._start):
            self._start = self._end = at

    def take(self, entry: TrafficEntry) -> None:
        """A request arrives."""
        columns = self._evaluator.columns_of(entry.body, _MOST_ITEMS) if entry.body else None
        self._evaluator.ingest_metrics(entry.read() if columns is None else columns, entry.at)
        self._requests += 1

    def judge(self, now: float) -> None:
        """Every cell is evaluated."""
        contract = self._contract
        verdicts = self._evaluator.evaluate(now, later=True)[contract.name].verdicts
        invalid = self._evaluator.invalid_input(contract.name, now, contract.observability.window)
        self._waiting.append((now, verdicts, invalid))
        if len(self._waiting) * max(len(verdicts), 1) >= _TOGETHER:
            self._escalate_all()

    def _escalate_all(self) -> None:
        """What the evaluations that wait mean."""
        waiting, self._waiting = self._waiting, []
        for now, verdicts, invalid in waiting:
            self._escalate(now, verdicts, invalid)

    def _escalate(self, now: float, verdicts: Sequence[Verdict], invalid: Mapping[str, int]) -> None:
        contract = self._contract
        self._policy, transitions = advance(
            contract, self._policy, verdicts, invalid, now, kept_from(self._decisions, contract.name)
        )
        self._notifications, told = notices(
            contract, self._notifications, self._policy.firing, transitions, People(), now
        )
        decisions = apply(self._decisions, transitions, contract, now)
        self._spans.edges(transitions)
        if decisions.version != self._decisions.version:
            self._spans.table(decisions, now)
            self._decisions = decisions
        found = follow(contract.name, self._incidents, verdicts, self._policy.firing, decisions, now)
        self._incidents = tuple(one for one in found if one.state is not IncidentState.RESOLVED)
        window = contract.observability.window
        self._groups, sent = group_messages(self._groups, told, found, People(), self._timing, window, now)
        self._messages += [SentWebhook(now, one.endpoint, one.reason.value, len(one.alerts)) for one in sent]
        self._evaluations, self._end, self._cells = self._evaluations + 1, now, len(verdicts)
        self._note(verdicts)

    def timeline(self) -> ReplayTimeline:
        """What came of it."""
        self._escalate_all()
        contract = self._contract
        return ReplayTimeline(
            name=contract.name, version=contract.metadata.version, hash=contract.hash, start=self._start,
            end=self._end, evaluations=self._evaluations, requests=self._requests, cells=self._cells,
            points=dict(sorted(self._evaluator.counters.items())), alerts=self._spans.alerts,
            decisions=self._spans.decisions, messages=tuple(self._messages),
            not_recorded=tuple(not_recorded(contract, self._silent)),
        )  # fmt: skip

    def _note(self, verdicts: Sequence[Verdict]) -> None:
        if self._silent:
            silent = {verdict.cell for verdict in selected(verdicts, {Status.NO_DATA})}
            self._silent -= {(cell.clause, cell.slice) for cell in cells_of(verdicts) if cell not in silent}
