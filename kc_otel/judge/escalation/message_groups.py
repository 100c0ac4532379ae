"""Grouping and timing of webhooks: one message per incident and endpoint, not one per alert.

    first alert --- `wait` passes ---> message (firing) --- more alerts, some end --- `interval` passes ---> (update)
                                                        |-- alerts of a step that was not told, `wait` ----> (update)
                                                        |-- the last one ends, unproven, `wait` -----------> (unproven)
                                                        '-- the last one ends -----------------------------> (resolved)

The end of an alert whose breach went away without proof is held back until it is known how the breach ended. An alert
that begins and ends within the wait is not reported. A roll-back, a reminder and the end of a silence are sent at once;
an alert that is silenced while it waits continues to wait. Time is counted as the policy counts it: since the
evaluation before, never less than zero and never more than the contract's window. Source: Prometheus documentation,
"Alerting, Configuration", `group_wait` and `group_interval`, whose defaults are these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kc_otel.judge.escalation.alerts import WENT_AWAY, Transition, What
from kc_otel.judge.escalation.notices import Notice, NoticeReason
from kc_otel.judge.escalation.people import People
from kc_otel.judge.incidents.incident import Incident, IncidentState

__all__ = ["AT_ONCE", "GroupTiming", "IncidentMessage", "MessageGroup", "group_messages", "last_messages"]

_AT_ONCE_REASONS: Final = (NoticeReason.ROLLED_BACK, NoticeReason.SILENCE_ENDED, NoticeReason.REMINDER)


@dataclass(frozen=True, slots=True)
class GroupTiming:
    """Delays that let related messages be grouped.

    Attributes:
        wait: Seconds from the first alert of an incident, or of a step of it, to its message.
        interval: Seconds between a message and an update.
    """

    wait: float = 30.0
    interval: float = 300.0


AT_ONCE: Final = GroupTiming(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class MessageGroup:
    """Alerts of an incident that an endpoint has been told of, and those still to be sent.

    Attributes:
        incident: Its id; an alert's fingerprint where it belongs to none.
        endpoint: Name of the endpoint.
        told: Fingerprints of alerts that it was told of, and not of their end.
        steps: Keys of the steps that it was told of.
        pending: Pending notices, one for each alert.
        waited: Seconds that the oldest of it has waited.
        quiet: Seconds since the last message.
        seen: Unix time of the last evaluation, seconds.
        closing: Roll-backs that it was told of, which end with the incident.
    """

    incident: str
    endpoint: str
    told: tuple[str, ...]
    steps: tuple[str, ...]
    pending: tuple[Notice, ...]
    waited: float
    quiet: float
    seen: float
    closing: tuple[Transition, ...] = ()


@dataclass(frozen=True, slots=True)
class IncidentMessage:
    """One webhook.

    Attributes:
        endpoint: Name of the endpoint.
        reason: Reason for sending it.
        incident: Its incident; None where an alert belongs to none.
        alerts: Alerts that fired or ended since the previous message; in a reminder, all of them.
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
    lasting: Collection[str] | None = None,
) -> tuple[tuple[MessageGroup, ...], tuple[IncidentMessage, ...]]:
    """The groups after an evaluation, and the webhooks that are to be sent now.

    Args:
        groups: Last result of this function.
        said: Notices about the contract's alerts.
        incidents: The contract's incidents, those that this evaluation ended among them.
        people: Silences in force.
        timing: How long messages wait.
        window: The contract's window, seconds.
        now: Unix time, seconds.
        lasting: Fingerprints of alerts about rolled back versions that have no incident and are not over; None for all.
    """
    by_id = {incident.id: incident for incident in incidents}
    by_key = {incident.key: incident.id for incident in incidents}
    known = {(old.incident, old.endpoint): _later(old, window, now) for old in groups}
    told_in = {(fingerprint, old.endpoint): old.incident for old in groups for fingerprint in _heard(old)}
    for notice in said:
        edge = notice.transition
        for endpoint in dict.fromkeys(str(action.target) for action in edge.actions if action.kind == "webhook"):
            # An end is said where the beginning was.
            id = told_in.get((edge.fingerprint, endpoint)) or by_key.get(edge.incident, edge.fingerprint)
            group = known.get((id, endpoint)) or MessageGroup(id, endpoint, (), (), (), 0.0, 0.0, now)
            known[id, endpoint] = _added(group, notice)
    after: list[MessageGroup] = []
    messages: list[IncidentMessage] = []
    for group in known.values():
        over = by_id.get(group.incident)
        alone = over is None and any(edge.fingerprint == group.incident for edge in group.closing)
        if alone:
            ended = lasting is not None and group.incident not in lasting
        else:
            ended = over is None or over.state is IncidentState.RESOLVED
        if ended:
            group = _closed(group, now)  # noqa: PLW2901 - the same one
        rest, message = _sent(group, by_id.get(group.incident), people, timing, window, now)
        messages += [message] if message is not None else []
        if rest.pending or rest.told:
            after.append(rest)
    return tuple(sorted(after, key=lambda entry: (entry.incident, entry.endpoint))), tuple(
        sorted(messages, key=lambda entry: entry.endpoint)
    )


def last_messages(
    groups: Iterable[MessageGroup], ended: Iterable[Transition], incidents: Iterable[Incident]
) -> tuple[IncidentMessage, ...]:
    """Return the last webhooks about a contract's alerts, when nobody follows them any more.

    Args:
        groups: Last result of `group_messages`.
        ended: The alerts that fired until now, resolved.
        incidents: The contract's incidents, ended.
    """
    by_id = {lasting.id: lasting for lasting in incidents}
    over = {transition.fingerprint: transition for transition in ended}
    messages: list[IncidentMessage] = []
    for group in groups:
        waiting = {notice.transition.fingerprint: notice.transition for notice in group.pending}
        alerts = tuple(edge for told in group.told if (edge := over.get(told) or waiting.get(told)) is not None)
        if alerts:
            incident = by_id.get(group.incident)
            messages.append(IncidentMessage(group.endpoint, NoticeReason.UNFOLLOWED, incident, alerts, 0))
    return tuple(messages)


def _heard(group: MessageGroup) -> tuple[str, ...]:
    return (*group.told, *(notice.transition.fingerprint for notice in group.pending))


def _later(group: MessageGroup, window: float, now: float) -> MessageGroup:
    passed = min(max(0.0, now - group.seen), window)
    waits = any(notice.transition.end != WENT_AWAY for notice in group.pending)
    waited = group.waited + passed if waits else 0.0
    return replace(group, waited=waited, quiet=group.quiet + passed, seen=now)


def _added(group: MessageGroup, notice: Notice) -> MessageGroup:
    fingerprint = notice.transition.fingerprint
    others = tuple(pending for pending in group.pending if pending.transition.fingerprint != fingerprint)
    before = next((pending for pending in group.pending if pending.transition.fingerprint == fingerprint), None)
    if notice.reason is NoticeReason.RESOLVED and fingerprint not in group.told:
        return replace(group, pending=others)  # it began and ended while it waited
    if before is not None and (before.reason, notice.reason) == (NoticeReason.RESOLVED, NoticeReason.FIRING):
        if before.transition.end != WENT_AWAY:
            return replace(group, pending=others)  # it ended and began again: nothing has changed for who was told
    elif before is not None and (before.reason, notice.reason) == (NoticeReason.FIRING, NoticeReason.RESOLVED):
        notice = _without_proof(notice)  # it was told that it went away, and not that it was back
    if notice.reason is NoticeReason.REMINDER and fingerprint not in group.told:
        return group  # its first word still waits
    closing = (*group.closing, notice.transition) if notice.reason is NoticeReason.ROLLED_BACK else group.closing
    return replace(group, pending=(*others, notice), closing=closing)


def _without_proof(notice: Notice) -> Notice:
    """The end of an alert, which its endpoint was told is no proof that the breach is over."""
    return replace(notice, transition=replace(notice.transition, end=WENT_AWAY))


def _closed(group: MessageGroup, now: float) -> MessageGroup:
    """A group whose incident is over: with it ends what was said of roll-backs."""
    ended = (replace(transition, what=What.RESOLVED, at=now) for transition in group.closing)
    for transition in ended:
        group = _added(group, Notice(transition, NoticeReason.RESOLVED))
    return replace(group, closing=())


def _sent(
    group: MessageGroup, incident: Incident | None, people: People, timing: GroupTiming, window: float, now: float
) -> tuple[MessageGroup, IncidentMessage | None]:
    """Return the group after its message, and the message if one is due."""
    firing = [notice for notice in group.pending if notice.transition.what is What.FIRING]
    muted = [notice for notice in firing if people.silencing(notice.transition.cell, now)]
    ended = [notice for notice in group.pending if notice.transition.what is What.RESOLVED]
    # Users are seen to be kept from what is contained: its alert may end, and the incident stays.
    held: list[Notice] = []
    if incident is not None and incident.state is not IncidentState.CONTAINED:
        held = [notice for notice in ended if incident.unproven(*notice.transition.cell[1:3])]
    ended = [notice for notice in ended if notice not in held]
    ready = [notice for notice in firing if notice not in muted]
    away: list[Notice] = []
    # For a window after that, what its recorders measure next may refute it.
    if incident is not None and incident.went_away and not ready and now - incident.last_until >= window:
        pending = (notice for notice in held if notice.transition.end != WENT_AWAY)
        away = [notice for notice in pending if not people.silencing(notice.transition.cell, now)]
    lasting = set(group.told) - {notice.transition.fingerprint for notice in ended}
    over = bool(ended) and not lasting and not ready
    urgent = next((reason for reason in _AT_ONCE_REASONS if any(notice.reason is reason for notice in ready)), None)
    new_step = any(notice.transition.step not in group.steps for notice in ready)
    due = (
        over
        or urgent is not None
        or (bool(new_step or away) and group.waited >= timing.wait)
        or (bool(ready or ended) and bool(group.told) and group.quiet >= timing.interval)
    )
    if not due:
        return group, None
    told = lasting | {notice.transition.fingerprint for notice in ready}
    first = NoticeReason.UPDATE if group.told else NoticeReason.FIRING
    reason = NoticeReason.RESOLVED if over else urgent or (NoticeReason.UNPROVEN if away else first)
    held = [_without_proof(notice) if notice in away else notice for notice in held]
    unproven = [replace(_without_proof(notice).transition, what=What.FIRING) for notice in away]
    changes = (*(notice.transition for notice in (*ready, *ended)), *unproven)
    message = IncidentMessage(group.endpoint, reason, incident, changes, len(told))
    steps = {notice.transition.step for notice in ready} | set(group.steps)
    rest = replace(
        group, told=tuple(sorted(told)), steps=tuple(sorted(steps)), pending=(*muted, *held), waited=0.0, quiet=0.0
    )
    return rest, message
