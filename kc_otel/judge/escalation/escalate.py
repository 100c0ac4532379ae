"""A contract's policy as one pure function: from verdicts to alerts, decisions and messages.

A contract that runs dry is judged like any other. Its decisions go into a table of their own; nothing acts on them, and
no notices are sent.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kc_otel.contract.input_reasons import ON_PURPOSE
from kc_otel.contract.model import Contract
from kc_otel.judge.decisions import DecisionTable, Pin, apply, kept_since, released
from kc_otel.judge.escalation.alerts import ROLLED_BACK, PolicyState, Transition, What, advance, fingerprint, step_keys
from kc_otel.judge.escalation.notices import (
    AT_ONCE,
    GroupTiming,
    IncidentMessage,
    MessageGroup,
    Notice,
    People,
    Silence,
    current,
    group_messages,
    notices,
)
from kc_otel.judge.incidents.incident import Incident, IncidentState
from kc_otel.judge.incidents.incident_lifecycle import (
    TrafficSeen,
    follow,
    with_actions,
    with_roll_backs,
    with_told,
    with_word,
)
from kc_otel.judge.promotion.stages import Promotion
from kc_otel.judge.series import Pair
from kc_otel.judge.verdict import Cell, Evaluation, Status, Verdict
from kc_otel.judge.verdicts import selected

Promote = Callable[[DecisionTable, Sequence[Incident]], tuple[DecisionTable, Sequence[Promotion]]]
"""Steps promotions; returns the decision table with their shares, and the versions that are rolled back."""


@dataclass(frozen=True, slots=True)
class EscalationState:
    """State that persists between two evaluations, of all contracts; by the contract's name."""

    policies: Mapping[str, PolicyState] = field(default_factory=dict)
    decisions: DecisionTable = field(default_factory=DecisionTable)
    people: People = field(default_factory=People)
    incidents: Mapping[str, tuple[Incident, ...]] = field(default_factory=dict)
    groups: Mapping[str, tuple[MessageGroup, ...]] = field(default_factory=dict)
    """Messages that endpoints were sent, and those still to be sent."""


@dataclass(frozen=True, slots=True)
class Escalation:
    """Result of escalating one contract's evaluation, with the new state of all contracts."""

    state: EscalationState
    transitions: tuple[Transition, ...]
    """Also of a dry-run contract."""
    notices: tuple[Notice, ...]
    ended_silences: tuple[Silence, ...]
    ended_pins: tuple[Pin, ...]
    resolved: tuple[Incident, ...]
    messages: tuple[IncidentMessage, ...]


def escalate(
    contract: Contract,
    before: EscalationState,
    evaluation: Evaluation,
    invalid: Mapping[Pair, Mapping[str, int]],
    now: float,
    *,
    dry_run: bool = False,
    timing: GroupTiming = AT_ONCE,
    traffic: TrafficSeen = TrafficSeen(),  # noqa: B008 - nothing changes it
    promote: Promote = lambda decisions, _incidents: (decisions, ()),
) -> Escalation:
    """One evaluation of a contract's policy; in a dry run nobody acts and nobody is told.

    `invalid` counts the sequences that failed an input check within the window, by kernel pair and reason.
    """
    name, verdicts = contract.name, evaluation.verdicts
    invalid = {pair: left for pair, reasons in invalid.items() if (left := _faults(reasons, pair, verdicts))}
    failing = {where: left for where, of in traffic.failing.items() if (left := _faults(of, where[0], verdicts))}
    traffic = replace(traffic, failing=failing)
    known = before.policies.get(name, PolicyState(name))
    ordered = kept_since(before.decisions, name)

    def kept_away(slice: str, version: str) -> bool:
        return traffic.excuses(slice, version, ordered)

    incidents = before.incidents.get(name, ())
    closed = {incident.key for incident in incidents if incident.closed_at >= known.at}
    contained = {incident.key for incident in incidents if incident.state is IncidentState.CONTAINED}
    policy, transitions = advance(contract, known, verdicts, invalid, now, kept_away, closed, contained)
    firing = {alert.fingerprint: alert.verdict for alert in policy.firing}
    people, ended = current(before.people, name, firing.keys() - {edge.fingerprint for edge in transitions}, now)
    fired = [transition for transition in transitions if transition.what is What.FIRING]
    decisions = apply(before.decisions, () if dry_run else fired, contract, now)
    said = tuple[Notice, ...]()
    if not dry_run:
        policy, said = notices(contract, known, policy, transitions, people, now)
    incidents = tuple(incident.ended(known.at) if incident.key in closed else incident for incident in incidents)
    for silence in ended:
        incidents = with_word(incidents, "unsilenced", ended_silence(silence), now)
    after = follow(
        name, incidents, verdicts, policy.firing, decisions, now, traffic, evaluation.causes,
        contract.quantity_digests,
    )  # fmt: skip
    after = with_actions(after, transitions, people, dry_run=dry_run)
    unproven = _unproven_alerts(contract, after)
    decisions, rolled = promote(released(decisions, name, firing, unproven, now), after)
    was, after = after, with_roll_backs(after, rolled)
    roll_backs = _roll_backs(contract, was, after, rolled, verdicts, now)
    told = {group.incident for group in before.groups.get(name, ())}
    groups, messages = group_messages(
        before.groups.get(name, ()),
        () if dry_run else (*transitions, *roll_backs, *_unproven(contract, told, after, now)),
        said,
        after,
        people,
        timing,
        contract.observability.window,
        known.passed(now, contract.observability.window),
        now,
        firing,
        {_fingerprint(_alone(promotion), "serves") for promotion in rolled if promotion.seen_serving is not None},
    )
    after = with_told(after, messages, now)
    return Escalation(
        state=EscalationState(
            policies={**before.policies, name: policy},
            decisions=decisions,
            people=people,
            incidents={
                **before.incidents,
                name: tuple(incident for incident in after if incident.state is not IncidentState.RESOLVED),
            },
            groups={**before.groups, name: groups},
        ),
        transitions=transitions,
        notices=said,
        ended_silences=ended,
        ended_pins=tuple(pin for pin in before.decisions.pins if pin not in decisions.pins),
        resolved=tuple(incident for incident in after if incident.state is IncidentState.RESOLVED),
        messages=messages,
    )


def _faults(reasons: Mapping[str, int], pair: Pair, verdicts: Sequence[Verdict]) -> Mapping[str, int]:
    """Failed sequences of a kernel pair by reason, without those that are kept from being measured on purpose."""
    if reasons.keys().isdisjoint(ON_PURPOSE):
        return reasons
    measured = selected(verdicts, set(Status) - {Status.NO_DATA, Status.INVALID_INPUT})
    others_are_valid = any(verdict.cell[-2:] == pair for verdict in measured)
    return {reason: count for reason, count in reasons.items() if not (others_are_valid and reason in ON_PURPOSE)}


def _roll_backs(
    contract: Contract,
    before: Sequence[Incident],
    after: Sequence[Incident],
    rolled: Sequence[Promotion],
    verdicts: Sequence[Verdict],
    now: float,
) -> list[Transition]:
    """Edges of versions that are rolled back, or measured after it, said at once where that is new.

    Every endpoint of the ladder's steps on FAIL is told, whatever a step waits for: somebody else has acted by then. A
    version that is measured after its rollback and breaks nothing has no incident, and a message of its own, whose end
    is said once a person has rolled it back again or started it.
    """
    webhooks = (action for step in contract.escalation if step.on == "fail" for action in step.do)
    actions = tuple(dict.fromkeys(action for action in webhooks if action.kind == "webhook"))
    said: list[Transition] = []

    def say(version_or_incident: str, kind: str, verdict: Verdict, started_at: float) -> None:
        said.append(
            Transition(
                contract=contract.name, step=ROLLED_BACK, on="fail", cell=verdict.cell, what=What.FIRING, at=now,
                started_at=started_at, severity="critical" if kind == "serves" else "warning", actions=actions,
                verdict=verdict, fingerprint=_fingerprint(version_or_incident, kind),
            )
        )  # fmt: skip

    for old, new in zip(before, after, strict=True):
        done = [action for action in new.actions if action not in old.actions]
        if done and (worst := _worst(new, verdicts)) is not None:
            for action in done:
                say(new.id, action.kind, worst, action.at)
    told = {edge.cell.kernel_inference for edge in said}
    for promotion in rolled:
        of_it = (verdict for verdict in verdicts if verdict.cell.kernel_inference == promotion.version)
        if promotion.seen_serving == now and promotion.version not in told and (last := next(of_it, None)) is not None:
            say(_alone(promotion), "serves", last, now)
    return said if actions else []


def _unproven_alerts(contract: Contract, incidents: Iterable[Incident]) -> set[str]:
    """Fingerprints of all alerts of what is unproven and not contained."""
    return {
        fingerprint(key, Cell(contract.name, cell.clause, cell.slice, *incident.key[1:]))
        for incident in incidents
        if incident.state is not IncidentState.CONTAINED
        for cell in incident.cells
        if incident.unproven(cell.clause, cell.slice)
        for key in step_keys(contract)
    }


def _unproven(contract: Contract, told: Collection[str], incidents: Sequence[Incident], now: float) -> list[Transition]:
    """Ends of breaches that went away without proof before anybody was told of them; `told` are ids of incidents.

    They were shorter than a step's `for`, or happened in a dry run. `group_messages` tells the webhooks of every step.
    """
    ends: list[Transition] = []
    for incident in incidents:
        if incident.id in told or not incident.fell_silent(now, contract.observability.window):
            continue
        for cell in (cell for cell in incident.cells if incident.unproven(cell.clause, cell.slice)):
            numbers = (cell.limit, cell.estimate, cell.lower, cell.upper)
            limit, estimate, lower, upper = (math.nan if number is None else number for number in numbers)
            verdict = Verdict(
                cell=Cell(contract.name, cell.clause, cell.slice, *incident.key[1:]), status=Status(incident.status),
                at=cell.at or now, limit=limit, estimate=estimate, lower=lower, upper=upper, samples=0, window="",
                method="", reason=cell.reason, contract_version=contract.metadata.version, contract_hash=contract.hash,
                about="traffic",
            )  # fmt: skip
            ends += [
                Transition(
                    contract=contract.name, step=key, on=step.on, cell=verdict.cell, what=What.RESOLVED, at=now,
                    started_at=cell.since, severity=step.severity, actions=step.do, verdict=verdict,
                    fingerprint=fingerprint(key, verdict.cell),
                )
                for key, step in zip(step_keys(contract), contract.escalation, strict=True)
                if step.on == incident.on and (not step.clauses or cell.clause in step.clauses)
            ]  # fmt: skip
    return ends


def _alone(promotion: Promotion) -> str:
    """Identity of messages about a version that has no incident."""
    return f"{promotion.contract}/{promotion.version}"


def _worst(incident: Incident, verdicts: Iterable[Verdict]) -> Verdict | None:
    """The verdict of an incident's worst cell."""
    pair = incident.kernel_train, incident.kernel_inference
    found = {verdict.cell[1:3]: verdict for verdict in selected(verdicts, {Status.FAIL}) if verdict.cell[3:] == pair}
    return next((found[cell.clause, cell.slice] for cell in incident.cells if (cell.clause, cell.slice) in found), None)


def _fingerprint(incident: str, kind: str) -> str:
    return hashlib.sha256(f"{incident}\0{kind}".encode()).hexdigest()[:16]


def ended_silence(silence: Silence) -> dict[str, object]:
    """Return the log entry for a silence that has ended."""
    message = f"the silence of {silence.where} by {silence.by} has ended"
    return {"id": silence.id, "clause": silence.clause, "slice": silence.slice, "message": message}
