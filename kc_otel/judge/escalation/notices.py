"""Notices: what people decided about alerts, who is told of them and when, and the messages that go out together.

A silence mutes: webhooks and log records of the alerts that it covers are held back until it ends. It does not affect
routes, quarantines, holds and halts, which act on kernels and not on notifications. Alerts that still fire when a
silence ends are reported then. An acknowledgement says that somebody is at work on an alert: the alert goes on firing,
its reminders stop, and it ends with the alert. Source: Prometheus documentation, "Alertmanager", silences; PagerDuty,
"Incidents", acknowledge.

Notices of one alert:

    fires ---------------> told ("firing") ---- `repeat` passes, nobody acknowledges ----> told ("reminder") ---+
      |                     ^    |                                        ^                                     |
      | silenced            |    | resolves                               '-------------------------------------'
      v                     |    v
    silent -- silence ends -'   told ("resolved")
      |       ("silence-ended")
      '--resolves: nothing was said, and nothing needs to be taken back, unless the breach went away without proof

If people were told that an alert fires, they are told that it resolved, even during a silence: anyone who acted on the
first message needs the second. Time towards a reminder is counted as the policy counts it: since the evaluation before,
never less than zero and never more than the contract's window, so that a clock that jumps sends no storm of reminders.
Reminders of a step about one pair of kernels are sent together, when the first is due: an incident that grew is one
reminder.

Messages: one per incident and endpoint, not one per alert.

    first alert --- `wait` passes ---> message (firing) --- more alerts, some end --- `interval` passes ---> (update)
                                                        |-- alerts of a step that was not told, `wait` ----> (update)
                                                        |-- the last one ends, unproven, `wait` -----------> (unproven)
                                                        '-- the last one ends -----------------------------> (resolved)

The end of an alert whose breach went away without proof is held back until it is known how the breach ended. So is the
end that was told while the breach was contained: containment may end before the breach is refuted. An alert
that begins and ends within the wait, or during a silence, is not reported, unless its breach went away without proof:
then that is reported after the wait, or once the silence has ended. A roll-back, a reminder and the end of a silence
are sent at once; an alert that is silenced while it waits continues to wait. Time is counted as the policy counts it:
since the evaluation before, never less than zero and never more than the contract's window. Source: Prometheus
documentation, "Alerting, Configuration", `group_wait` and `group_interval`, whose defaults are these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from kc_otel.contract.model import Contract
from kc_otel.judge.escalation.alerts import WENT_AWAY, Alert, PolicyState, Transition, What, edge, step_keys
from kc_otel.judge.incidents.incident import Incident, IncidentState
from kc_otel.judge.verdict import Cell


@dataclass(frozen=True, slots=True)
class Silence:
    """No messages about some alerts for some time."""

    id: str
    contract: str
    clause: str | None
    """None for every clause."""
    slice: str | None
    """`all` for the cells of all traffic; None for every slice."""
    by: str
    why: str
    at: float
    until: float

    def covers(self, cell: Cell) -> bool:
        """Return True if alerts about a cell are muted."""
        asked = (self.contract, self.clause or cell.clause, self.slice or cell.slice)
        return asked == (cell.contract, cell.clause, cell.slice)

    @property
    def where(self) -> str:
        """Scope of the silence, in words."""
        return f"{self.clause or 'every clause'} on {f'slice {self.slice}' if self.slice else 'every slice'}"


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """A person's acknowledgement of an alert, with what they found or do."""

    contract: str
    fingerprint: str
    by: str
    why: str
    at: float


@dataclass(frozen=True, slots=True)
class People:
    """Silences and acknowledgements in force, oldest first; of these one for each alert at most."""

    silences: tuple[Silence, ...] = ()
    acknowledgements: tuple[Acknowledgement, ...] = ()

    def silencing(self, cell: Cell, now: float) -> tuple[Silence, ...]:
        """The silences that mute a cell at a unix time."""
        return tuple(muting for muting in self.silences if now < muting.until and muting.covers(cell))

    def acknowledged(self, fingerprint: str) -> Acknowledgement | None:
        """Return the acknowledgement of an alert; None if there is none."""
        return next((ack for ack in self.acknowledgements if ack.fingerprint == fingerprint), None)


def current(people: People, contract: str, firing: Collection[str], now: float) -> tuple[People, tuple[Silence, ...]]:
    """Return the decisions still in force, and a contract's silences that have ended; `firing` are fingerprints."""
    ended = tuple(muting for muting in people.silences if muting.contract == contract and now >= muting.until)
    silences = tuple(muting for muting in people.silences if muting not in ended)
    kept = (ack for ack in people.acknowledgements if ack.contract != contract or ack.fingerprint in firing)
    return People(silences, tuple(kept)), ended


class NoticeReason(StrEnum):
    """Reason for a notice."""

    FIRING = "firing"
    UPDATE = "update"
    UNPROVEN = "unproven"
    RESOLVED = "resolved"
    REMINDER = "reminder"
    ROLLED_BACK = "rolled-back"
    SILENCE_ENDED = "silence-ended"
    UNFOLLOWED = "unfollowed"


@dataclass(frozen=True, slots=True)
class Notice:
    """Something to say about an alert."""

    transition: Transition
    reason: NoticeReason


def notices(
    contract: Contract,
    before: PolicyState,
    after: PolicyState,
    transitions: Sequence[Transition],
    people: People,
    now: float,
) -> tuple[PolicyState, tuple[Notice, ...]]:
    """Return the policy, which knows what is told, and that: fired and resolved as in `transitions`, then the rest."""
    known = {alert.fingerprint for alert in before.alerts if alert.told}
    repeats = dict(zip(step_keys(contract), (step.repeat for step in contract.escalation), strict=True))
    fired = {transition.fingerprint for transition in transitions if transition.what is What.FIRING}
    passed = before.passed(now, contract.observability.window)
    alerts = {alert.fingerprint: alert for alert in after.alerts}
    late: list[Notice] = []
    waiting: dict[tuple[str, str, str], list[Alert]] = {}
    for alert in after.firing:
        if people.silencing(alert.cell, now):
            continue
        if not alert.told:
            alerts[alert.fingerprint] = replace(alert, told=1)
            if alert.fingerprint not in fired:
                late.append(Notice(edge(alert, What.FIRING, now), NoticeReason.SILENCE_ENDED))
        elif people.acknowledged(alert.fingerprint) is None:
            of = alert.step, alert.cell.kernel_train, alert.cell.kernel_inference
            waiting.setdefault(of, []).append(replace(alert, waited=alert.waited + passed))
    for (step, *_), together in waiting.items():
        due = 0.0 < repeats.get(step, 0.0) <= max(alert.waited for alert in together)
        for alert in together:
            alerts[alert.fingerprint] = replace(alert, told=alert.told + 1, waited=0.0) if due else alert
            if due:
                late.append(Notice(edge(alert, What.FIRING, now), NoticeReason.REMINDER))
    told = known | {fingerprint for fingerprint in fired if alerts[fingerprint].told}
    first = [
        Notice(transition, NoticeReason(transition.what))
        for transition in transitions
        if transition.fingerprint in told
    ]
    return replace(after, alerts=tuple(alerts.values())), (*first, *late)


_AT_ONCE_REASONS: Final = (NoticeReason.ROLLED_BACK, NoticeReason.SILENCE_ENDED, NoticeReason.REMINDER)


@dataclass(frozen=True, slots=True)
class GroupTiming:
    """Delays that let related messages be grouped."""

    wait: float = 30.0
    """Seconds from the first alert of an incident, or of a step of it, to its message."""
    interval: float = 300.0
    """Seconds between a message and an update."""


AT_ONCE: Final = GroupTiming(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class MessageGroup:
    """Alerts of an incident that an endpoint has been told of, and those still to be sent."""

    incident: str
    """Its id; an alert's fingerprint where it belongs to none."""
    endpoint: str
    told: tuple[str, ...]
    """Fingerprints of alerts that it was told of, and not of their end."""
    steps: tuple[str, ...]
    pending: tuple[Notice, ...]
    waited: float
    """Seconds that the oldest of it has waited."""
    quiet: float
    closing: tuple[Transition, ...] = ()
    """Roll-backs that it was told of, which end with the incident."""


@dataclass(frozen=True, slots=True)
class IncidentMessage:
    """One webhook."""

    endpoint: str
    reason: NoticeReason
    incident: Incident | None
    """None where an alert belongs to none."""
    alerts: tuple[Transition, ...]
    """Those that fired or ended since the previous message; in a reminder, all of them."""
    lasting: int
    """Alerts of the incident that the endpoint knows to fire, after this message."""


def group_messages(
    groups: Sequence[MessageGroup],
    said: Iterable[Notice],
    incidents: Sequence[Incident],
    people: People,
    timing: GroupTiming,
    window: float,
    passed: float,
    now: float,
    lasting: Collection[str] | None = None,
) -> tuple[tuple[MessageGroup, ...], tuple[IncidentMessage, ...]]:
    """The groups after an evaluation, `passed` seconds after the one before, and the webhooks to be sent now.

    `lasting` are fingerprints of alerts about rolled back versions without an incident that are not over; None for all.
    """
    by_id = {incident.id: incident for incident in incidents}
    by_key = {incident.key: incident.id for incident in incidents}
    known = {(old.incident, old.endpoint): _later(old, passed) for old in groups}
    told_in = {(fingerprint, old.endpoint): old.incident for old in groups for fingerprint in _heard(old)}
    for notice in said:
        edge = notice.transition
        for endpoint in dict.fromkeys(str(action.target) for action in edge.actions if action.kind == "webhook"):
            # An end is said where the beginning was.
            id = told_in.get((edge.fingerprint, endpoint)) or by_key.get(edge.incident, edge.fingerprint)
            group = known.get((id, endpoint)) or MessageGroup(id, endpoint, (), (), (), 0.0, 0.0)
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
    """Return the last webhooks about a contract's alerts, when nobody follows them any more: all has ended."""
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


def _later(group: MessageGroup, passed: float) -> MessageGroup:
    waits = any(notice.transition.end != WENT_AWAY for notice in group.pending)
    waited = group.waited + passed if waits else 0.0
    return replace(group, waited=waited, quiet=group.quiet + passed)


def muted_ends(transitions: Iterable[Transition], said: Iterable[Notice]) -> tuple[Notice, ...]:
    """Ends of alerts of which nothing was said, as during a silence: `group_messages` keeps those without proof."""
    told = {notice.transition.fingerprint for notice in said}
    ends = (transition for transition in transitions if transition.what is What.RESOLVED)
    return tuple(Notice(edge, NoticeReason.RESOLVED) for edge in ends if edge.fingerprint not in told)


def _added(group: MessageGroup, notice: Notice) -> MessageGroup:
    fingerprint = notice.transition.fingerprint
    others = tuple(pending for pending in group.pending if pending.transition.fingerprint != fingerprint)
    before = next((pending for pending in group.pending if pending.transition.fingerprint == fingerprint), None)
    if notice.reason is NoticeReason.RESOLVED and fingerprint not in group.told:
        return replace(group, pending=(*others, notice))  # it began and ended while it waited: `_is_news`
    if before is not None and (before.reason, notice.reason) == (NoticeReason.RESOLVED, NoticeReason.FIRING):
        if before.transition.end != WENT_AWAY and fingerprint in group.told:
            return replace(group, pending=others)  # it ended and began again: nothing has changed for who was told
    elif before is not None and (before.reason, notice.reason) == (NoticeReason.FIRING, NoticeReason.RESOLVED):
        notice = _without_proof(notice)  # it was told that it went away, and not that it was back
    if notice.reason is NoticeReason.REMINDER and fingerprint not in group.told:
        return group  # its first word still waits
    closing = (*group.closing, notice.transition) if notice.reason is NoticeReason.ROLLED_BACK else group.closing
    return replace(group, pending=(*others, notice), closing=closing)


def _is_news(notice: Notice, group: MessageGroup, incident: Incident | None) -> bool:
    """Return False for the end of an alert that its endpoint was never told of, unless its breach is unproven."""
    if notice.reason is not NoticeReason.RESOLVED or notice.transition.fingerprint in group.told:
        return True
    return incident is not None and incident.unproven(*notice.transition.cell[1:3])


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
    group = replace(group, pending=tuple(notice for notice in group.pending if _is_news(notice, group, incident)))
    firing = [notice for notice in group.pending if notice.transition.what is What.FIRING]
    muted = [notice for notice in firing if people.silencing(notice.transition.cell, now)]
    ended = [notice for notice in group.pending if notice.transition.what is What.RESOLVED]
    # Users are seen to be kept from what is contained: the end of its alert is told, and kept until it is refuted.
    held = [notice for notice in ended if notice.transition.fingerprint not in group.told]
    if incident is not None and incident.state is not IncidentState.CONTAINED:
        held = [notice for notice in ended if notice in held or incident.unproven(*notice.transition.cell[1:3])]
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
    told = lasting | {notice.transition.fingerprint for notice in (*ready, *away)}
    first = NoticeReason.UPDATE if group.told else NoticeReason.FIRING
    reason = NoticeReason.RESOLVED if over else urgent or (NoticeReason.UNPROVEN if away else first)
    held = [_without_proof(notice) if notice in away else notice for notice in held]
    held += [
        replace(notice, transition=replace(notice.transition, end=""))
        for notice in ended
        if incident is not None and incident.unproven(*notice.transition.cell[1:3])
    ]
    unproven = [replace(_without_proof(notice).transition, what=What.FIRING) for notice in away]
    changes = (*(notice.transition for notice in (*ready, *ended)), *unproven)
    message = IncidentMessage(group.endpoint, reason, incident, changes, len(told))
    steps = {notice.transition.step for notice in (*ready, *away)} | set(group.steps) if told else ()
    rest = replace(
        group, told=tuple(sorted(told)), steps=tuple(sorted(steps)), pending=(*muted, *held), waited=0.0, quiet=0.0
    )
    return rest, message
