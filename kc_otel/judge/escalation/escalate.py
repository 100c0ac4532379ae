"""From verdicts to what holds and what is said: a contract's policy as one pure function.

A contract that runs dry is judged like any other. What it decides goes into a decision table of its own that nobody
acts on, and nobody is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kc_otel.contract.model import Contract
from kc_otel.judge.decisions.table import DecisionTable, Pin, apply, kept_from
from kc_otel.judge.escalation.alert_lifecycle import advance
from kc_otel.judge.escalation.alerts import PolicyState, Transition
from kc_otel.judge.escalation.message_groups import AT_ONCE, GroupTiming, IncidentMessage, MessageGroup, group_messages
from kc_otel.judge.escalation.notices import Notice, NotificationLog, notices
from kc_otel.judge.escalation.people import People, Silence, current
from kc_otel.judge.incidents.incident import Incident, IncidentState
from kc_otel.judge.incidents.incident_lifecycle import follow, with_actions, with_told, with_word
from kc_otel.judge.verdict import Evaluation

__all__ = ["Escalation", "EscalationState", "ended_silence", "escalate"]


@dataclass(frozen=True, slots=True)
class EscalationState:
    """What holds between two evaluations.

    Attributes:
        policies: Alerts, by the contract's name.
        notifications: What people have been told of them, by the contract's name.
        decisions: The table that is published.
        dry_run_decisions: What contracts that run dry would have published.
        people: Silences and acknowledgements.
        incidents: What is broken or not given back, by the contract's name.
        groups: What endpoints were told of it and are still to be told, by the contract's name.
    """

    policies: Mapping[str, PolicyState] = field(default_factory=dict)
    notifications: Mapping[str, NotificationLog] = field(default_factory=dict)
    decisions: DecisionTable = field(default_factory=DecisionTable)
    dry_run_decisions: DecisionTable = field(default_factory=DecisionTable)
    people: People = field(default_factory=People)
    incidents: Mapping[str, tuple[Incident, ...]] = field(default_factory=dict)
    groups: Mapping[str, tuple[MessageGroup, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Escalation:
    """What an evaluation of one contract makes of what held before.

    Attributes:
        state: What holds from now on, of all contracts.
        transitions: What fired and resolved, of a contract that runs dry too.
        notices: What there is to say of alerts.
        ended_silences: Silences that have come to their end.
        ended_pins: Pins that have come to their end.
        resolved: Incidents that are over.
        messages: Webhooks to send.
    """

    state: EscalationState
    transitions: tuple[Transition, ...]
    notices: tuple[Notice, ...]
    ended_silences: tuple[Silence, ...]
    ended_pins: tuple[Pin, ...]
    resolved: tuple[Incident, ...]
    messages: tuple[IncidentMessage, ...]


def escalate(
    contract: Contract,
    before: EscalationState,
    evaluation: Evaluation,
    invalid: Mapping[str, int],
    now: float,
    *,
    dry_run: bool = False,
    timing: GroupTiming = AT_ONCE,
) -> Escalation:
    """One evaluation of a contract's policy. Where it fails, what held before still holds, of this contract alone.

    Args:
        contract: The contract in force.
        before: What held until now, of all contracts.
        evaluation: The contract's verdicts.
        invalid: Sequences that failed an input check within the contract's window, by reason.
        now: Unix time, seconds.
        dry_run: Whether nobody acts on it and nobody is told.
        timing: How long webhooks wait for what belongs to them.
    """
    name = contract.name
    policy = before.policies.get(name, PolicyState(name))
    kept = kept_from(before.decisions, name)
    policy, transitions = advance(contract, policy, evaluation.verdicts, invalid, now, kept)
    policies = {**before.policies, name: policy}
    people, ended = _people(before.people, policies, name, now)
    log = before.notifications.get(name, NotificationLog(name))
    decisions = apply(before.decisions, () if dry_run else transitions, contract, now)
    dry_run_decisions, said = before.dry_run_decisions, tuple[Notice, ...]()
    if dry_run:
        dry_run_decisions = apply(dry_run_decisions, transitions, contract, now)
    else:
        log, said = notices(contract, log, policy.firing, transitions, people, now)
    incidents = before.incidents.get(name, ())
    for silence in ended:
        incidents = with_word(incidents, "unsilenced", ended_silence(silence), now)
    after = follow(name, incidents, evaluation.verdicts, policy.firing, decisions, now)
    after = with_actions(after, transitions, people, dry_run=dry_run)
    groups, messages = group_messages(
        before.groups.get(name, ()), said, after, people, timing, contract.observability.window, now
    )
    after = with_told(after, messages, now)
    return Escalation(
        state=EscalationState(
            policies=policies,
            notifications={**before.notifications, name: log},
            decisions=decisions,
            dry_run_decisions=dry_run_decisions,
            people=people,
            incidents={
                **before.incidents,
                name: tuple(one for one in after if one.state is not IncidentState.RESOLVED),
            },
            groups={**before.groups, name: groups},
        ),
        transitions=transitions,
        notices=said,
        ended_silences=ended,
        ended_pins=tuple(pin for pin in before.decisions.pins if pin not in decisions.pins),
        resolved=tuple(one for one in after if one.state is IncidentState.RESOLVED),
        messages=messages,
    )


def _people(
    before: People, policies: Mapping[str, PolicyState], contract: str, now: float
) -> tuple[People, tuple[Silence, ...]]:
    """What people decided that is still in force, and what of this contract's is not; that of others stays as it is."""
    firing = {alert.fingerprint for alert in policies[contract].firing}
    own = People(
        tuple(one for one in before.silences if one.contract == contract),
        tuple(one for one in before.acknowledgements if one.contract == contract),
    )
    after, ended = current(own, firing, now)
    return People(
        tuple(one for one in before.silences if one.contract != contract or one in after.silences),
        tuple(one for one in before.acknowledgements if one.contract != contract or one in after.acknowledgements),
    ), ended


def ended_silence(silence: Silence) -> dict[str, object]:
    """What is written down when a silence has come to its end."""
    message = f"the silence of {silence.where} by {silence.by} has come to its end"
    return {"id": silence.id, "clause": silence.clause, "slice": silence.slice, "message": message}
