"""From verdicts to what holds and what is said: the policies of all contracts as one pure function.

A contract that runs dry is judged like any other. What it decides goes into a decision table of its own that nobody
acts on, and nobody is told.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
    """What an evaluation makes of what held before.

    Attributes:
        state: What holds from now on.
        transitions: What fired and resolved, of contracts that run dry too.
        notices: What there is to say of alerts, by the contract's name.
        messages: Webhooks to send, by the contract's name.
        ended_silences: Silences that have come to their end.
        ended_pins: Pins that have come to their end.
        resolved: Incidents that are over.
        faults: Contracts whose policy could not be evaluated, and why: what held of them before still holds.
    """

    state: EscalationState
    transitions: tuple[Transition, ...]
    notices: Mapping[str, tuple[Notice, ...]]
    ended_silences: tuple[Silence, ...]
    ended_pins: tuple[Pin, ...]
    resolved: tuple[Incident, ...] = ()
    faults: Mapping[str, Exception] = field(default_factory=dict)
    messages: Mapping[str, tuple[IncidentMessage, ...]] = field(default_factory=dict)


def escalate(
    contracts: Sequence[Contract],
    before: EscalationState,
    evaluations: Mapping[str, Evaluation],
    invalid: Callable[[Contract], Mapping[str, int]],
    dry_run: Collection[str],
    now: float,
    timing: GroupTiming = AT_ONCE,
) -> Escalation:
    """One evaluation of every policy.

    Args:
        contracts: The contracts in force.
        before: What held until now.
        evaluations: The verdicts of every contract, by its name.
        invalid: Sequences of a contract that failed an input check within its window, by reason.
        dry_run: Names of the contracts that run dry.
        now: Unix time, seconds.
        timing: How long webhooks wait for what belongs to them.
    """
    policies: dict[str, PolicyState] = {}
    edges: dict[str, tuple[Transition, ...]] = {}
    faults: dict[str, Exception] = {}
    for contract in contracts:
        name = contract.name
        policies[name], edges[name] = before.policies.get(name, PolicyState(name)), ()
        try:
            policies[name], edges[name] = advance(
                contract,
                policies[name],
                evaluations[name].verdicts,
                invalid(contract),
                now,
                kept_from(before.decisions, name),
            )
        except Exception as error:  # noqa: BLE001 - one contract's fault is not the others'
            faults[name] = error
    fires = {alert.fingerprint for state in policies.values() for alert in state.firing}
    people, ended = current(before.people, fires, now)
    notifications: dict[str, NotificationLog] = {}
    decisions, dry_run_decisions, found = before.decisions, before.dry_run_decisions, dict[str, tuple[Notice, ...]]()
    for contract in contracts:
        name, transitions = contract.name, edges[contract.name]
        log = before.notifications.get(name, NotificationLog(name))
        if name in dry_run:
            decisions = apply(decisions, (), contract, now)
            dry_run_decisions = apply(dry_run_decisions, transitions, contract, now)
            notifications[name] = log
            continue
        decisions = apply(decisions, transitions, contract, now)
        notifications[name], found[name] = notices(contract, log, policies[name].firing, transitions, people, now)
    incidents: dict[str, tuple[Incident, ...]] = {}
    resolved: list[Incident] = []
    groups = dict(before.groups)
    messages: dict[str, tuple[IncidentMessage, ...]] = {}
    for contract in contracts:
        name = contract.name
        verdicts, open_before = evaluations[name].verdicts, before.incidents.get(name, ())
        if name in faults:  # what held of it before still holds
            incidents[name] = open_before
            continue
        for silence in ended:
            if silence.contract == name:
                open_before = with_word(open_before, "unsilenced", ended_silence(silence), now)
        after = follow(name, open_before, verdicts, policies[name].firing, decisions, now)
        after = with_actions(after, edges[name], people, dry_run=name in dry_run)
        groups[name], messages[name] = group_messages(
            before.groups.get(name, ()), found.get(name, ()), after, people, timing, contract.observability.window, now
        )
        after = with_told(after, messages[name], now)
        incidents[name] = tuple(one for one in after if one.state is not IncidentState.RESOLVED)
        resolved += [one for one in after if one.state is IncidentState.RESOLVED]
    return Escalation(
        state=EscalationState(policies, notifications, decisions, dry_run_decisions, people, incidents, groups),
        transitions=tuple(edge for contract in contracts for edge in edges[contract.name]),
        notices=found,
        ended_silences=ended,
        ended_pins=tuple(pin for pin in before.decisions.pins if pin not in decisions.pins),
        resolved=tuple(resolved),
        faults=faults,
        messages=messages,
    )


def ended_silence(silence: Silence) -> dict[str, object]:
    """What is written down when a silence has come to its end."""
    message = f"the silence of {silence.where} by {silence.by} has come to its end"
    return {"id": silence.id, "clause": silence.clause, "slice": silence.slice, "message": message}
