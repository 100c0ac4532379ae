"""What belongs together is one incident, from its first breach until nothing is left of it.

    a cell breaks ---> BROKEN ---- routes or pins keep users from all of it ----> CONTAINED
                        ^  |                                                      |   |
                        |  '-- nothing broken, no alert, no route --> RESOLVED <--+   |
                        '------------- a cell that users reach breaks ----------------'

What is wrong (a step's `on`) and the pair of kernels say which cells belong together: one version of a kernel is the
cause. A cell is broken while its verdict is FAIL, or NO_DATA after data, and while an alert about it fires: the alert
holds over an inconclusive verdict, and so does the incident. Silence where routes or pins keep requests from the kernel
is what they are for. What was once part of an incident stays part of it until its end. Its id is made when it begins
and kept: neither an earlier onset nor a restart changes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kc_otel.contract.slices import ALL
from kc_otel.judge.decisions.table import DecisionTable, kept_from
from kc_otel.judge.escalation.alerts import Alert, Transition, What
from kc_otel.judge.escalation.message_groups import IncidentMessage
from kc_otel.judge.escalation.people import People
from kc_otel.judge.incidents.incident import (
    BrokenCell,
    Diagnosis,
    Incident,
    IncidentAction,
    IncidentState,
    PersonsWord,
)
from kc_otel.judge.plain_json import finite_or_none
from kc_otel.judge.verdict import Status, Verdict
from kc_otel.judge.verdict_sequence import selected

__all__ = ["by_urgency", "follow", "with_actions", "with_diagnosis", "with_told", "with_word"]

_BREAKS: Final = {Status.FAIL: "fail", Status.NO_DATA: "no-data"}
_MOST_WORDS: Final = 200
_MOST_DIAGNOSES: Final = 10
_URGENT: Final = ("fail", "invalid-input", "no-data", "inconclusive")

Key = tuple[str, str, str]
Place = tuple[str, str]
"""(clause, slice)."""


@dataclass(frozen=True, slots=True)
class _Broken:
    """A place where something is broken; `held` where only an alert says so, whatever the verdict is now."""

    verdict: Verdict
    since: float
    held: bool = False


def follow(
    contract: str,
    before: Sequence[Incident],
    verdicts: Iterable[Verdict],
    firing: Iterable[Alert],
    table: DecisionTable,
    now: float,
) -> tuple[Incident, ...]:
    """The incidents after an evaluation: those that last, and those that it has ended.

    Args:
        contract: metadata.name.
        before: Those that lasted until now.
        verdicts: Of every cell of the contract.
        firing: Alerts of the contract that fire now.
        table: The decision table in force.
        now: Unix time, seconds.
    """
    broken = _broken(before, verdicts, firing, kept_from(table, contract), now)
    known = {one.key: one for one in before}
    after = [_advanced(one, broken.get(key, {}), table, now) for key, one in known.items()]
    after += [_begun(contract, key, cells, table, now) for key, cells in broken.items() if key not in known]
    return tuple(sorted(after, key=by_urgency))


def by_urgency(one: Incident) -> tuple[Any, ...]:
    """Sorts incidents: what users meet first, FAIL before silence, the worst first; what is over last, newest first."""
    return (
        list(IncidentState).index(one.state),
        -(one.resolved_at or 0.0),
        _URGENT.index(one.on),
        -max(cell.badness for cell in one.cells),
        one.since,
        one.contract,
        one.key,
    )


def with_actions(
    incidents: Sequence[Incident], transitions: Iterable[Transition], people: People, *, dry_run: bool
) -> tuple[Incident, ...]:
    """The incidents with what the alerts that fired in this evaluation do; webhooks only where nothing is done."""
    done: dict[Key, dict[tuple[str, str], tuple[float, list[str]]]] = {}
    for edge in transitions:
        if edge.what is not What.FIRING:
            continue
        muted = bool(people.silencing(edge.cell, edge.at))
        mine = done.setdefault((edge.on, edge.cell.kernel_train, edge.cell.kernel_inference), {})
        for action in edge.actions:
            if dry_run or not (action.kind == "webhook" or (muted and action.kind == "notify")):
                _, slices = mine.setdefault((action.kind, action.target or ""), (edge.at, []))
                slices.append(edge.cell.slice)
    return tuple(
        replace(one, actions=_merged(one.actions, done[one.key], dry_run=dry_run)) if one.key in done else one
        for one in incidents
    )


def with_told(incidents: Sequence[Incident], messages: Iterable[IncidentMessage], now: float) -> tuple[Incident, ...]:
    """The incidents with who was told of them in this evaluation."""
    told: dict[str, dict[tuple[str, str], tuple[float, list[str]]]] = {}
    for message in messages:
        fires = [edge.cell.slice for edge in message.alerts if edge.what is What.FIRING]
        if fires and message.incident is not None:
            told.setdefault(message.incident.id, {})["webhook", message.endpoint] = (now, fires)
    return tuple(
        replace(one, actions=_merged(one.actions, told[one.id], dry_run=False)) if one.id in told else one
        for one in incidents
    )


def with_word(incidents: Sequence[Incident], kind: str, said: Mapping[str, Any], now: float) -> tuple[Incident, ...]:
    """The incidents with what a person did to a slice or a clause of theirs, or to all; the newest words are kept."""
    slice, clause = said.get("slice"), said.get("clause")
    word = PersonsWord(now, kind, str(said["message"]))

    def concerns(one: Incident) -> bool:
        slices, clauses = {cell.slice for cell in one.cells}, {cell.clause for cell in one.cells}
        return slice in {None, ALL, *slices} and clause in {None, *clauses}

    return tuple(replace(one, words=(*one.words, word)[-_MOST_WORDS:]) if concerns(one) else one for one in incidents)


def with_diagnosis(one: Incident, found: Diagnosis) -> Incident:
    """The incident with what was found out about it, said once; the newest are kept."""
    same = (found.kind, found.slice, found.evidence)
    others = [each for each in one.diagnoses if (each.kind, each.slice, each.evidence) != same]
    return replace(one, diagnoses=(*others, found)[-_MOST_DIAGNOSES:])


def _broken(
    before: Sequence[Incident],
    verdicts: Iterable[Verdict],
    firing: Iterable[Alert],
    kept: Callable[[str, str], bool],
    now: float,
) -> dict[Key, dict[Place, _Broken]]:
    """What is broken now, by incident and place."""
    known_before = {(one.key, (cell.clause, cell.slice)) for one in before for cell in one.broken}
    found: dict[Key, dict[Place, _Broken]] = {}
    for verdict in selected(verdicts, _BREAKS):
        cell, on = verdict.cell, _BREAKS[verdict.status]
        key = (on, cell.kernel_train, cell.kernel_inference)
        # A cell that nobody has ever reported to is not broken: there is nothing yet.
        heard = cell.kernel_inference and (verdict.observed or (key, (cell.clause, cell.slice)) in known_before)
        if verdict.status is Status.FAIL or (heard and not kept(cell.slice, cell.kernel_inference)):
            found.setdefault(key, {})[cell.clause, cell.slice] = _Broken(verdict, now)
    for alert in firing:
        cell = alert.cell
        mine = found.setdefault((alert.on, cell.kernel_train, cell.kernel_inference), {})
        known = mine.get((cell.clause, cell.slice))
        since = min(alert.since, now if known is None else known.since)
        mine[cell.clause, cell.slice] = (
            _Broken(alert.verdict, since, held=True) if known is None else replace(known, since=since)
        )
    return found


def _begun(contract: str, key: Key, broken: Mapping[Place, _Broken], table: DecisionTable, now: float) -> Incident:
    cells = [_cell(None, where, one) for where, one in broken.items()]
    since = min(one.since for one in cells)
    id = hashlib.sha256("\0".join((contract, *key, repr(since))).encode()).hexdigest()[:12]
    return _settled(Incident(id, contract, *key, IncidentState.BROKEN, tuple(cells)), table, now)


def _advanced(one: Incident, broken: Mapping[Place, _Broken], table: DecisionTable, now: float) -> Incident:
    cells = {(cell.clause, cell.slice): cell for cell in one.cells}
    ended = [
        replace(cell, until=now if cell.until is None else cell.until)
        for where, cell in cells.items()
        if where not in broken
    ]
    lasting = [_cell(cells.get(where), where, found) for where, found in broken.items()]
    return _settled(replace(one, cells=(*lasting, *ended)), table, now)


def _cell(before: BrokenCell | None, where: Place, broken: _Broken) -> BrokenCell:
    verdict = broken.verdict
    since = broken.since if before is None else min(before.since, broken.since)
    if before is not None and broken.held:
        return replace(before, since=since, until=None)
    limit, estimate, lower, upper = map(finite_or_none, (verdict.limit, verdict.estimate, verdict.lower, verdict.upper))
    return BrokenCell(*where, since, None, limit, estimate, lower, upper, verdict.reason)


def _settled(one: Incident, table: DecisionTable, now: float) -> Incident:
    """The incident with its cells in order, and in the state that they and the decision table put it into."""
    cells = sorted(
        one.cells, key=lambda cell: (cell.until is not None, -cell.badness, cell.slice == ALL, cell.slice, cell.clause)
    )
    one = replace(one, cells=tuple(cells))
    slices = {cell.slice for cell in one.broken}
    kept = kept_from(table, one.contract)
    if slices and not all(kept(slice, one.kernel_inference) for slice in slices):
        return replace(one, state=IncidentState.BROKEN, contained_at=None)
    if slices or _routed(table, one, {cell.slice for cell in one.cells}):
        at = now if one.contained_at is None else one.contained_at
        return replace(one, state=IncidentState.CONTAINED, contained_at=at)
    return replace(one, state=IncidentState.RESOLVED, resolved_at=now)


def _routed(table: DecisionTable, one: Incident, slices: Collection[str]) -> bool:
    return bool(one.kernel_inference) and any(
        (route.contract, route.avoid) == (one.contract, one.kernel_inference) and route.slice in slices
        for route in table.routes
    )


def _merged(
    before: Sequence[IncidentAction], done: Mapping[tuple[str, str], tuple[float, list[str]]], *, dry_run: bool
) -> tuple[IncidentAction, ...]:
    known = {(one.kind, one.target, one.dry_run): one for one in before}
    for (kind, target), (at, slices) in done.items():
        one = known.get((kind, target, dry_run), IncidentAction(kind, target, at, (), dry_run))
        known[kind, target, dry_run] = replace(one, slices=tuple(dict.fromkeys((*one.slices, *slices))))
    return tuple(known.values())
