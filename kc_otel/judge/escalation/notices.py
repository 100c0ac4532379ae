"""Notices: what people decided about alerts, who is told of them and when, and the messages that go out together.

A silence mutes: webhooks and log records of the alerts that it covers are held back until it ends. It does not affect
routes, quarantines, holds and halts, which act on kernels and not on notifications. An acknowledgement says that
somebody is at work on an alert: it goes on firing, its reminders stop, and it ends with the alert. Source: Prometheus
documentation, "Alertmanager", silences; PagerDuty, "Incidents", acknowledge.

Who was told that an alert fires is told that it resolved, even during a silence: anyone who acted on the first message
needs the second. Reminders of a step about one pair of kernels are sent together, when the first is due.

There is one message per incident and endpoint, not one per alert. What an endpoint knows of an alert:

          fires, `wait`                      ends, and is refuted or contained
    "" ------------------> "firing" ------------------------------------------------> ""
     '- ends, unproven, a window ---> "unproven" <--- ends, unproven, a window -- "firing"
                                                 <--- fires again -------------- "firing"

What changes is told together: at once where nothing is left or a roll-back, a reminder or the end of a silence is
among it, after `wait` where a step is new or something is unproven, else after `interval`. An alert that begins and
ends before it is told is not told, unless its breach is unproven. Time is counted as the policy counts it: since the
evaluation before, never less than zero and never more than the contract's window. Source: Prometheus documentation,
"Alerting, Configuration", `group_wait` and `group_interval`, whose defaults are these.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Literal

from kc_otel.contract.model import Contract
from kc_otel.judge.escalation.alerts import (
    CHANGED,
    ROLLED_BACK,
    WENT_AWAY,
    Alert,
    PolicyState,
    Transition,
    What,
    edge,
    step_keys,
)
from kc_otel.judge.incidents.incident import Incident, IncidentState
from kc_otel.judge.verdict import Cell, Verdict


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


@dataclass(frozen=True, slots=True)
class GroupTiming:
    """Delays that let related messages be grouped."""

    wait: float = 30.0
    """Seconds from the first alert of an incident, or of a step of it, to its message."""
    interval: float = 300.0
    """Seconds between a message and an update."""


AT_ONCE: Final = GroupTiming(0.0, 0.0)
_AT_ONCE_REASONS: Final = (NoticeReason.ROLLED_BACK, NoticeReason.SILENCE_ENDED, NoticeReason.REMINDER)


Known = Literal["", "firing", "unproven"]


@dataclass(frozen=True, slots=True)
class ToldAlert:
    """An alert, and what an endpoint knows of it."""

    edge: Transition
    """Its last one; a roll-back's is FIRING until its incident is over."""
    known: Known = ""
    """The last thing that the endpoint was told of it, until it is told of its end."""

    @property
    def fires(self) -> bool:
        """True if it fires still."""
        return self.edge.what is What.FIRING

    @property
    def waits(self) -> bool:
        """True if the endpoint may have to be told something else."""
        return self.known != ("firing" if self.fires else "unproven")


@dataclass(frozen=True, slots=True)
class MessageGroup:
    """An endpoint's knowledge of an incident, and news that it may have to be told."""

    incident: str
    """Its id; an alert's fingerprint where it belongs to none."""
    endpoint: str
    alerts: tuple[ToldAlert, ...] = ()
    steps: tuple[str, ...] = ()
    """Those that it was told of."""
    waited: float = 0.0
    """Seconds that the oldest of what is to be told has waited."""
    quiet: float = 0.0
    contained: bool = False
    """True if its last message said that the incident is contained."""


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
    edges: Iterable[Transition],
    said: Iterable[Notice],
    incidents: Sequence[Incident],
    people: People,
    timing: GroupTiming,
    window: float,
    passed: float,
    now: float,
    verdicts: Mapping[str, Verdict] = MappingProxyType({}),
    lasting: Collection[str] = (),
) -> tuple[tuple[MessageGroup, ...], tuple[IncidentMessage, ...]]:
    """The groups after an evaluation, `passed` seconds after the one before, and the webhooks to be sent now.

    `edges` are those of this evaluation, whether or not they were `said`; `verdicts` the last ones of alerts that fire,
    by fingerprint; `lasting` are fingerprints of alerts about rolled back versions without an incident that are not
    over.
    """
    by_id = {incident.id: incident for incident in incidents}
    by_key = {incident.key: incident.id for incident in incidents}
    known = {(group.incident, group.endpoint): _later(group, passed) for group in groups}
    rows = {key: {told.edge.fingerprint: told for told in group.alerts} for key, group in known.items()}
    told_in = {(alert, endpoint): id for (id, endpoint), told in rows.items() for alert in told}
    for change in edges:
        for endpoint in dict.fromkeys(str(action.target) for action in change.actions if action.kind == "webhook"):
            # An end is said where the beginning was.
            id = told_in.get((change.fingerprint, endpoint)) or by_key.get(change.incident, change.fingerprint)
            mine = rows.setdefault((id, endpoint), {})
            before = mine.pop(change.fingerprint, None)  # the newest is at the end
            heard = before.known if before is not None and change.step != ROLLED_BACK else ""
            heard = "unproven" if heard and change.again and change.what is What.FIRING else heard
            mine[change.fingerprint] = ToldAlert(change, heard)
    urgent = {notice.transition.fingerprint: notice.reason for notice in said if notice.reason in _AT_ONCE_REASONS}
    after: list[MessageGroup] = []
    messages: list[IncidentMessage] = []
    for key, alerts in rows.items():
        group, incident = known.get(key) or MessageGroup(*key), by_id.get(key[0])
        over = group.incident not in lasting if incident is None else incident.state is IncidentState.RESOLVED
        if over:
            alerts = {fingerprint: _without_roll_back(told, now) for fingerprint, told in alerts.items()}  # noqa: PLW2901
        rest, message = _sent(group, alerts, incident, people, timing, window, now, urgent)
        if message is not None:
            alerts_now = (
                replace(last, verdict=verdicts.get(last.fingerprint, last.verdict)) for last in message.alerts
            )
            messages.append(replace(message, alerts=tuple(alerts_now)))
        after += [rest] if rest.alerts else []
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
        known = [told.edge for told in group.alerts if told.known]
        edges = [over.get(edge.fingerprint, edge) for edge in known]
        alerts = tuple(edge for edge in edges if edge.what is What.RESOLVED)
        if alerts:
            incident = by_id.get(group.incident)
            messages.append(IncidentMessage(group.endpoint, NoticeReason.UNFOLLOWED, incident, alerts, 0))
    return tuple(messages)


def _later(group: MessageGroup, passed: float) -> MessageGroup:
    waited = group.waited + passed if any(told.waits for told in group.alerts) else 0.0
    return replace(group, waited=waited, quiet=group.quiet + passed)


def _without_roll_back(told: ToldAlert, now: float) -> ToldAlert:
    """An alert whose incident is over: with it ends what was said of a roll-back."""
    if told.edge.step != ROLLED_BACK or not told.fires:
        return told
    return replace(told, edge=replace(told.edge, what=What.RESOLVED, at=now))


def _sent(
    group: MessageGroup,
    alerts: Mapping[str, ToldAlert],
    incident: Incident | None,
    people: People,
    timing: GroupTiming,
    window: float,
    now: float,
    urgent: Mapping[str, NoticeReason],
) -> tuple[MessageGroup, IncidentMessage | None]:
    """Return a group with its alerts, by fingerprint, after an evaluation, and the message that is due.

    `urgent` are reasons by alert.
    """

    def unproven(told: ToldAlert) -> bool:
        # That its step left the contract says nothing of the breach while another alert of it fires.
        return incident is not None and incident.unproven(*told.edge.cell[1:3], held=told.edge.end == CHANGED)

    rows = {alert: told for alert, told in alerts.items() if told.known or told.fires or unproven(told)}
    heard = {alert: told for alert, told in rows.items() if not people.silencing(told.edge.cell, now)}
    # Users are seen to be kept from what is contained: the end of its alert is told, and kept until it is refuted.
    contained = incident is not None and incident.state is IncidentState.CONTAINED
    uncontained = group.contained and incident is not None and incident.state is IncidentState.BROKEN
    ready = {
        alert: told.edge
        for alert, told in heard.items()
        if told.fires and (told.waits or uncontained or urgent.get(alert) is NoticeReason.REMINDER)
    }
    ended = {
        alert: told.edge
        for alert, told in rows.items()
        if told.known and not told.fires and (contained or not unproven(told))
    }
    # For a window after it went away, what its recorders measure next may refute it.
    gone = incident is not None and incident.fell_silent(now, window) and not ready
    away = {
        alert: told.edge
        for alert, told in heard.items()
        if gone and not told.fires and told.waits and alert not in ended
    }
    lasting = any(told.known and alert not in ended for alert, told in rows.items())
    over = bool(ended) and not lasting and not ready
    reasons = {urgent.get(alert) for alert in ready}
    reasons |= {NoticeReason.ROLLED_BACK for edge in ready.values() if edge.step == ROLLED_BACK}
    at_once = next((reason for reason in _AT_ONCE_REASONS if reason in reasons), None)
    steps = {edge.step for edge in ready.values()}
    due = (
        over
        or at_once is not None
        or (bool(steps - {*group.steps} or away) and group.waited >= timing.wait)
        or (bool(ready or ended) and (lasting or bool(ended)) and group.quiet >= timing.interval)
    )
    if not due:
        return replace(group, alerts=tuple(rows.values())), None
    first = NoticeReason.UPDATE if lasting or ended else NoticeReason.FIRING
    reason = NoticeReason.RESOLVED if over else at_once or (NoticeReason.UNPROVEN if away else first)
    changes = (
        *(replace(edge, at=now) for edge in ready.values()),
        *ended.values(),
        *(replace(edge, what=What.FIRING, end=WENT_AWAY) for edge in away.values()),
    )
    after: list[ToldAlert] = []
    for alert, told in rows.items():
        known: Known = "firing" if alert in ready else "unproven" if alert in away else told.known
        after.append(replace(told, known="" if alert in ended else known))
    left = tuple(told for told in after if told.known or told.fires or unproven(told))
    count = sum(bool(told.known) for told in left)
    steps |= {edge.step for edge in away.values()} | {*group.steps}
    rest = MessageGroup(
        group.incident, group.endpoint, left, tuple(sorted(steps)) if count else (), contained=contained
    )
    return rest, IncidentMessage(group.endpoint, reason, incident, changes, count)
