"""Which webhooks are sent, and when: one about an incident for each endpoint, not one for each of its alerts.

    first alert --- `wait` passes ---> message (firing) --- more alerts, some end --- `interval` passes ---> (update)
                                                        '-- alerts of a step that was not told, `wait` ----> (update)
                                                        '-- the last one ends -----------------------------> (resolved)

What begins and ends while it waits is not said. A reminder and the end of a silence wait for nothing; what is silenced
while it waits goes on waiting. Time is counted as the policy counts it: since the evaluation before, never less than
zero and never more than the contract's window. Source: Prometheus documentation, "Alerting, Configuration",
`group_wait` and `group_interval`, whose defaults are these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kc_otel.judge.escalation.alerts import Transition, What
from kc_otel.judge.escalation.notices import Notice, NoticeReason
from kc_otel.judge.escalation.people import People
from kc_otel.judge.incidents.incident import Incident

__all__ = ["AT_ONCE", "GroupTiming", "IncidentMessage", "MessageGroup", "group_messages", "last_messages"]

_AT_ONCE_REASONS: Final = (NoticeReason.SILENCE_ENDED, NoticeReason.REMINDER)


@dataclass(frozen=True, slots=True)
class GroupTiming:
    """How long messages wait for what belongs to them.

    Attributes:
        wait: Seconds from the first alert of an incident, or of a step of it, to its message.
        interval: Seconds between a message and an update.
    """

    wait: float = 30.0
    interval: float = 300.0


AT_ONCE: Final = GroupTiming(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class MessageGroup:
    """What an endpoint was told of an incident, and what it is still to be told.

    Attributes:
        incident: Its id; an alert's fingerprint where it belongs to none.
        endpoint: Name of the endpoint.
        told: Fingerprints of alerts that it was told of, and not of their end.
        steps: Keys of the steps that it was told of.
        pending: What waits to be said, one for each alert.
        waited: Seconds that the oldest of it has waited.
        quiet: Seconds since the last message.
        seen: Unix time of the last evaluation, seconds.
    """

    incident: str
    endpoint: str
    told: tuple[str, ...]
    steps: tuple[str, ...]
    pending: tuple[Notice, ...]
    waited: float
    quiet: float
    seen: float


@dataclass(frozen=True, slots=True)
class IncidentMessage:
    """One webhook.

    Attributes:
        endpoint: Name of the endpoint.
        reason: Why it is sent.
        incident: What it is about; None where an alert belongs to none.
        alerts: What fires or has ended since the message before; all that is said again in a reminder.
        lasting: Alerts of the incident that the endpoint knows to fire, after this message.
    """

    endpoint: str
    reason: NoticeReason
    incident: Incident | None
    alerts: tuple[Transition, ...]
    lasting: int


def group_messages(
    groups: Sequence[MessageGroup],
    said: Iterable[Notice],
    incidents: Sequence[Incident],
    people: People,
    timing: GroupTiming,
    window: float,
    now: float,
) -> tuple[tuple[MessageGroup, ...], tuple[IncidentMessage, ...]]:
    """The groups after an evaluation, and the webhooks that are to be sent now.

    Args:
        groups: What this function returned last.
        said: What there is to say of the contract's alerts.
        incidents: The contract's incidents, those that this evaluation ended among them.
        people: Silences in force.
        timing: How long messages wait.
        window: The contract's window, seconds.
        now: Unix time, seconds.
    """
    by_id = {one.id: one for one in incidents}
    by_key = {one.key: one.id for one in incidents}
    known = {(one.incident, one.endpoint): _later(one, window, now) for one in groups}
    told_in = {(fingerprint, one.endpoint): one.incident for one in groups for fingerprint in _heard(one)}
    for notice in said:
        edge = notice.transition
        key = (edge.on, edge.cell.kernel_train, edge.cell.kernel_inference)
        for endpoint in dict.fromkeys(str(one.target) for one in edge.actions if one.kind == "webhook"):
            # An end is said where the beginning was.
            id = told_in.get((edge.fingerprint, endpoint)) or by_key.get(key, edge.fingerprint)
            group = known.get((id, endpoint)) or MessageGroup(id, endpoint, (), (), (), 0.0, 0.0, now)
            known[id, endpoint] = _added(group, notice)
    after: list[MessageGroup] = []
    messages: list[IncidentMessage] = []
    for group in known.values():
        rest, message = _sent(group, by_id.get(group.incident), people, timing, now)
        messages += [message] if message is not None else []
        if rest.pending or rest.told:
            after.append(rest)
    return tuple(sorted(after, key=lambda one: (one.incident, one.endpoint))), tuple(
        sorted(messages, key=lambda one: one.endpoint)
    )


def last_messages(
    groups: Iterable[MessageGroup], ended: Iterable[Transition], incidents: Iterable[Incident]
) -> tuple[IncidentMessage, ...]:
    """The webhooks to whoever was told of a contract's alerts, when nobody follows them any more.

    Args:
        groups: What `group_messages` returned last.
        ended: The alerts that fired until now, resolved.
        incidents: The contract's incidents, ended.
    """
    by_id = {one.id: one for one in incidents}
    over = {one.fingerprint: one for one in ended}
    messages: list[IncidentMessage] = []
    for group in groups:
        waiting = {one.transition.fingerprint: one.transition for one in group.pending}
        alerts = tuple(edge for told in group.told if (edge := over.get(told) or waiting.get(told)) is not None)
        if alerts:
            incident = by_id.get(group.incident)
            messages.append(IncidentMessage(group.endpoint, NoticeReason.UNFOLLOWED, incident, alerts, 0))
    return tuple(messages)


def _heard(group: MessageGroup) -> tuple[str, ...]:
    return (*group.told, *(one.transition.fingerprint for one in group.pending))


def _later(group: MessageGroup, window: float, now: float) -> MessageGroup:
    passed = min(max(0.0, now - group.seen), window)
    waited = group.waited + passed if group.pending else 0.0
    return replace(group, waited=waited, quiet=group.quiet + passed, seen=now)


def _added(group: MessageGroup, notice: Notice) -> MessageGroup:
    fingerprint = notice.transition.fingerprint
    others = tuple(one for one in group.pending if one.transition.fingerprint != fingerprint)
    before = next((one for one in group.pending if one.transition.fingerprint == fingerprint), None)
    if notice.reason is NoticeReason.RESOLVED and fingerprint not in group.told:
        return replace(group, pending=others)  # it began and ended while it waited
    if notice.reason is NoticeReason.FIRING and before is not None and before.reason is NoticeReason.RESOLVED:
        return replace(group, pending=others)  # it ended and began again: nothing has changed for who was told
    if notice.reason is NoticeReason.REMINDER and fingerprint not in group.told:
        return group  # its first word still waits
    return replace(group, pending=(*others, notice))


def _sent(
    group: MessageGroup, incident: Incident | None, people: People, timing: GroupTiming, now: float
) -> tuple[MessageGroup, IncidentMessage | None]:
    """What is left of a group after its message, if one is due."""
    firing = [one for one in group.pending if one.transition.what is What.FIRING]
    muted = [one for one in firing if people.silencing(one.transition.cell, now)]
    ended = [one for one in group.pending if one.transition.what is What.RESOLVED]
    ready = [one for one in firing if one not in muted]
    lasting = set(group.told) - {one.transition.fingerprint for one in ended}
    over = bool(ended) and not lasting and not ready
    urgent = next((reason for reason in _AT_ONCE_REASONS if any(one.reason is reason for one in ready)), None)
    new_step = any(one.transition.step not in group.steps for one in ready)
    due = (
        over
        or urgent is not None
        or (new_step and group.waited >= timing.wait)
        or (bool(ready or ended) and bool(group.told) and group.quiet >= timing.interval)
    )
    if not due:
        return group, None
    told = lasting | {one.transition.fingerprint for one in ready}
    first = NoticeReason.UPDATE if group.told else NoticeReason.FIRING
    reason = NoticeReason.RESOLVED if over else urgent or first
    message = IncidentMessage(
        group.endpoint, reason, incident, tuple(one.transition for one in (*ready, *ended)), len(told)
    )
    steps = {one.transition.step for one in ready} | set(group.steps)
    rest = replace(
        group, told=tuple(sorted(told)), steps=tuple(sorted(steps)), pending=tuple(muted), waited=0.0, quiet=0.0
    )
    return rest, message
