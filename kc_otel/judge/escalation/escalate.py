"""A contract's policy as one pure function: from verdicts to alerts, decisions and messages.

A contract that runs dry is judged like any other. Its decisions go into a table of their own; nothing acts on them, and
nobody is told. Who was told that an alert fires is told that it resolved, even during a silence: anyone who acted on
the first message needs the second. Reminders of a step about one pair of kernels are sent together, when the first is
due.

There is one message per incident and endpoint, not one per alert. What an endpoint knows of an alert:

          fires, `wait`                      ends, and is refuted or contained
    "" ------------------> "firing" ------------------------------------------------> ""
     '- ends, unproven, a window ---> "unproven" <--- ends, unproven, a window -- "firing"
                                                 <--- fires again -------------- "firing"

What changes is told together: at once where nothing is left or a roll-back, a reminder or the end of a silence is
among it, after `wait` where a step is new or something is unproven, else after `interval`. An alert that begins and
ends before it is told is not told, unless its breach is unproven. A breach that nothing refuted before its run ended is
told once to each endpoint that was told nothing of it; no end follows. Time is counted as the policy counts it: since
the evaluation before, never less than zero and never more than the contract's window. Source: Prometheus documentation,
"Alerting, Configuration", `group_wait` and `group_interval`, whose defaults are these.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, Literal

from kc_otel.contract.model import Contract
from kc_otel.judge.decisions import DecisionTable, Pin, apply, released
from kc_otel.judge.escalation.alerts import (
    CHANGED,
    ROLLED_BACK,
    WENT_AWAY,
    Alert,
    People,
    Phase,
    PolicyState,
    Silence,
    advance,
    current,
    fingerprint,
    step_keys,
)
from kc_otel.judge.escalation.tick import Tick, TrafficSeen
from kc_otel.judge.incidents.incident import BrokenCell, Incident, IncidentAction, IncidentState
from kc_otel.judge.incidents.incident_lifecycle import follow, with_actions, with_done, with_roll_backs, with_word
from kc_otel.judge.promotion.stages import Promotion
from kc_otel.judge.verdict import Cell, Evaluation, Status, Verdict
from kc_otel.judge.verdicts import selected


class MessageReason(StrEnum):
    """Reason for a message."""

    FIRING = "firing"
    UPDATE = "update"
    UNPROVEN = "unproven"
    RESOLVED = "resolved"
    REMINDER = "reminder"
    ROLLED_BACK = "rolled-back"
    SILENCE_ENDED = "silence-ended"
    UNFOLLOWED = "unfollowed"


_AT_ONCE_REASONS: Final = (MessageReason.ROLLED_BACK, MessageReason.SILENCE_ENDED, MessageReason.REMINDER)


@dataclass(frozen=True, slots=True)
class GroupTiming:
    """Delays that let related messages be grouped."""

    wait: float = 30.0
    """Seconds from the first alert of an incident, or of a step of it, to its message."""
    interval: float = 300.0
    """Seconds between a message and an update."""


AT_ONCE: Final = GroupTiming(0.0, 0.0)
Known = Literal["", "firing", "unproven"]


@dataclass(frozen=True, slots=True)
class ToldAlert:
    """An alert, and what an endpoint knows of it."""

    alert: Alert
    """As of its last edge; a roll-back's is FIRING until its incident is over."""
    known: Known = ""
    """The last thing that the endpoint was told of it, until it is told of its end."""

    @property
    def waits(self) -> bool:
        """True if the endpoint may have to be told something else."""
        return self.known != ("firing" if self.alert.fires else "unproven")


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
    reason: MessageReason
    incident: Incident | None
    """None where an alert belongs to none."""
    alerts: tuple[Alert, ...]
    """Those that fired or ended since the previous message; in a reminder, all of them."""
    lasting: int
    """Alerts of the incident that the endpoint knows to fire, after this message."""


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
    edges: tuple[Alert, ...]
    """Alerts that have just fired or resolved, also of a dry-run contract."""
    told_again: Mapping[str, MessageReason]
    """Why alerts that fire are told again, by their fingerprints: a reminder is due, or a silence has ended."""
    ended_silences: tuple[Silence, ...]
    ended_pins: tuple[Pin, ...]
    resolved: tuple[Incident, ...]
    messages: tuple[IncidentMessage, ...]


def escalate(
    contract: Contract,
    before: EscalationState,
    evaluation: Evaluation,
    *,
    dry_run: bool = False,
    timing: GroupTiming = AT_ONCE,
    traffic: TrafficSeen = TrafficSeen(),  # noqa: B008 - nothing changes it
    promote: Promote = lambda decisions, _incidents: (decisions, ()),
) -> Escalation:
    """One evaluation of a contract's policy; in a dry run nobody acts and nobody is told."""
    name, now, incidents = contract.name, evaluation.at, before.incidents.get(contract.name, ())
    tick = Tick(contract, evaluation, before.decisions, replace(traffic, incidents=incidents))
    previous = before.policies.get(name, PolicyState(name))
    policy, edges = advance(tick, previous)
    firing = {alert.fingerprint for alert in policy.firing}
    people, ended = current(before.people, name, firing - {edge.fingerprint for edge in edges}, now)
    fired = [edge for edge in edges if edge.fires]
    tick = replace(tick, table=apply(before.decisions, () if dry_run else fired, contract, now))
    again: Mapping[str, MessageReason] = {}
    if not dry_run:
        policy, again = _told_again(tick, previous, policy, fired, people)
    incidents = tuple(
        incident.ended(previous.at) if incident.closed_at >= previous.at else incident for incident in incidents
    )
    for silence in ended:
        incidents = with_word(incidents, "unsilenced", ended_silence(silence), now)
    after = with_actions(follow(tick, incidents, policy.firing), fired, people, tick.table, dry_run=dry_run)
    decisions, rolled = promote(released(tick.table, name, firing, _unproven_alerts(contract, after), now), after)
    before_roll_backs, after = after, with_roll_backs(after, rolled)
    roll_backs = _roll_backs(tick, before_roll_backs, after, rolled)
    groups = before.groups.get(name, ())
    missed = _unproven(tick, {(group.incident, group.endpoint) for group in groups}, after)
    serving = {_fingerprint(_alone(promotion), "serves") for promotion in rolled if promotion.seen_serving is not None}
    news = News(tick, previous, policy, after, people, again, serving, timing)
    groups, messages = group_messages(news, groups, () if dry_run else (*edges, *roll_backs, *missed))
    messages += () if dry_run else _missed_endings(tick, after, people)
    announced = (
        (message.incident.key, IncidentAction("webhook", message.endpoint, now, slices))
        for message in messages
        if message.incident is not None
        if (slices := tuple(alert.cell.slice for alert in message.alerts if alert.fires))
    )
    after = with_done(after, announced)
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
        edges=edges,
        told_again=again,
        ended_silences=ended,
        ended_pins=tuple(pin for pin in before.decisions.pins if pin not in decisions.pins),
        resolved=tuple(incident for incident in after if incident.state is IncidentState.RESOLVED),
        messages=messages,
    )


def _told_again(
    tick: Tick, before: PolicyState, after: PolicyState, fired: Iterable[Alert], people: People
) -> tuple[PolicyState, Mapping[str, MessageReason]]:
    """Return the policy, which counts what people are told, and why alerts that fire are told again."""
    contract, now = tick.contract, tick.now
    repeats = dict(zip(step_keys(contract), (step.repeat for step in contract.escalation), strict=True))
    new, passed = {alert.fingerprint for alert in fired}, before.passed(now, contract.observability.window)
    alerts = {alert.fingerprint: alert for alert in after.alerts}
    again: dict[str, MessageReason] = {}
    waiting: dict[tuple[str, str, str], list[Alert]] = {}
    for alert in after.firing:
        if people.silencing(alert.cell, now):
            continue
        if not alert.told:
            alerts[alert.fingerprint] = replace(alert, told=1)
            if alert.fingerprint not in new:
                again[alert.fingerprint] = MessageReason.SILENCE_ENDED
        elif people.acknowledged(alert.fingerprint) is None and not alert.run_ended:
            step_and_pair = alert.step, alert.cell.kernel_train, alert.cell.kernel_inference
            waiting.setdefault(step_and_pair, []).append(replace(alert, waited=alert.waited + passed))
    for (step, *_), together in waiting.items():
        due = 0.0 < repeats.get(step, 0.0) <= max(alert.waited for alert in together)
        for alert in together:
            alerts[alert.fingerprint] = replace(alert, told=alert.told + 1, waited=0.0) if due else alert
        again |= {alert.fingerprint: MessageReason.REMINDER for alert in together if due}
    return replace(after, alerts=tuple(alerts.values())), again


def _roll_backs(
    tick: Tick, before: Sequence[Incident], after: Sequence[Incident], rolled: Sequence[Promotion]
) -> list[Alert]:
    """Edges of versions that are rolled back, or measured after it, said at once where that is new.

    Every endpoint of the ladder's steps on FAIL is told, whatever a step waits for: somebody else has acted by then. A
    version that is measured after its rollback and breaks nothing has no incident, and a message of its own, whose end
    is said once a person has rolled it back again or started it.
    """
    verdicts, now = tick.verdicts, tick.now
    webhooks = (action for step in tick.contract.escalation if step.on == "fail" for action in step.do)
    actions = tuple(dict.fromkeys(action for action in webhooks if action.kind == "webhook"))
    alerts: list[Alert] = []

    def say(version_or_incident: str, kind: str, verdict: Verdict, started_at: float) -> None:
        severity = "critical" if kind == "serves" else "warning"
        identity = _fingerprint(version_or_incident, kind)
        alert = Alert(ROLLED_BACK, "fail", severity, actions, verdict.cell, verdict, started_at, identity)
        alerts.append(replace(alert, phase=Phase.FIRING, started_at=started_at, at=now))

    for old, new in zip(before, after, strict=True):
        done = [action for action in new.actions if action not in old.actions]
        if done and (worst := _worst(new, verdicts)) is not None:
            for action in done:
                say(new.id, action.kind, worst, action.at)
    versions = {edge.cell.kernel_inference for edge in alerts}
    for promotion in rolled:
        of_version = (verdict for verdict in verdicts if verdict.cell.kernel_inference == promotion.version)
        if promotion.seen_serving == now and promotion.version not in versions and (last := next(of_version, None)):
            say(_alone(promotion), "serves", last, now)
    return alerts if actions else []


def _unproven_alerts(contract: Contract, incidents: Iterable[Incident]) -> set[str]:
    """Fingerprints of all alerts of what is unproven and not contained."""
    return {
        fingerprint(key, Cell(contract.name, cell.clause, cell.slice, *incident.pair))
        for incident in incidents
        if incident.state is not IncidentState.CONTAINED
        for cell in incident.cells
        if incident.unproven(cell.clause, cell.slice)
        for key in step_keys(contract)
    }


def _unproven(tick: Tick, told: Collection[tuple[str, str]], incidents: Iterable[Incident]) -> list[Alert]:
    """Ends of breaches that went away, or fell silent, before some endpoints of the steps that watch them were told.

    They were shorter than a step's `for`, or happened in a dry run; `told` are (incident, endpoint).
    """
    return [
        alert.resolved(tick.now)
        for incident in incidents
        if _lapsed(tick, incident)
        for cell in incident.cells
        if incident.unproven(cell.clause, cell.slice)
        for alert in _missed_alerts(tick, incident, cell, told)
    ]


def _lapsed(tick: Tick, incident: Incident) -> bool:
    """`Incident.lapsed`, of an evaluator that has listened for so long that a recorder which reports was heard."""
    window = tick.contract.observability.window
    return incident.lapsed(tick.now, window) and tick.now - tick.traffic.listening >= window + tick.traffic.heartbeat


def _missed_endings(tick: Tick, incidents: Iterable[Incident], people: People) -> tuple[IncidentMessage, ...]:
    """The only messages about breaches that nothing refuted before their run ended, to endpoints told nothing of them.

    A run can be shorter than a step's `for`, or than the wait of a message.
    """
    messages: list[IncidentMessage] = []
    for incident in (incident for incident in incidents if incident.ended_unrefuted):
        done = [action for action in incident.actions if action.kind == "webhook" and not action.dry_run]
        by_endpoint: dict[str, list[Alert]] = {}
        for cell in (cell for cell in incident.cells if not cell.over):
            told = {(incident.id, action.target) for action in done if cell.slice in action.slices}
            for alert in _missed_alerts(tick, incident, cell, told):
                for action in () if people.silencing(alert.cell, tick.now) else alert.actions:
                    by_endpoint.setdefault(str(action.target), []).append(replace(alert, end=WENT_AWAY))
        messages += [
            IncidentMessage(endpoint, MessageReason.UNPROVEN, incident, tuple(mine), 0)
            for endpoint, mine in sorted(by_endpoint.items())
        ]
    return tuple(messages)


def _missed_alerts(
    tick: Tick, incident: Incident, cell: BrokenCell, told: Collection[tuple[str, str]]
) -> Iterator[Alert]:
    """An alert of a cell as it was, for each step that watches it and has endpoints that are not `told`; it fires."""
    contract, now = tick.contract, tick.now
    numbers = (cell.limit, cell.estimate, cell.lower, cell.upper)
    limit, estimate, lower, upper = (math.nan if number is None else number for number in numbers)
    verdict = Verdict(
        cell=Cell(contract.name, cell.clause, cell.slice, *incident.pair), status=incident.status,
        at=cell.at or now, limit=limit, estimate=estimate, lower=lower, upper=upper, samples=0, window="",
        method="", reason=cell.reason, contract_version=contract.metadata.version, contract_hash=contract.hash,
        about="traffic",
    )  # fmt: skip
    for key, step in zip(step_keys(contract), contract.escalation, strict=True):
        webhooks = (action for action in step.do if action.kind == "webhook")
        do = tuple(action for action in webhooks if (incident.id, str(action.target)) not in told)
        if do and step.on == incident.on and (not step.clauses or cell.clause in step.clauses):
            identity = fingerprint(key, verdict.cell)
            alert = Alert(key, step.on, step.severity, do, verdict.cell, verdict, cell.since, identity)
            yield replace(alert, phase=Phase.FIRING, started_at=cell.since, at=now)


def _alone(promotion: Promotion) -> str:
    """Identity of messages about a version that has no incident."""
    return f"{promotion.contract}/{promotion.version}"


def _worst(incident: Incident, verdicts: Iterable[Verdict]) -> Verdict | None:
    """The verdict of an incident's worst cell."""
    fails = {
        verdict.cell.place: verdict
        for verdict in selected(verdicts, {Status.FAIL})
        if verdict.cell.pair == incident.pair
    }
    return next((fails[cell.clause, cell.slice] for cell in incident.cells if (cell.clause, cell.slice) in fails), None)


def _fingerprint(incident: str, kind: str) -> str:
    return hashlib.sha256(f"{incident}\0{kind}".encode()).hexdigest()[:16]


def ended_silence(silence: Silence) -> dict[str, object]:
    """Return the log entry for a silence that has ended."""
    message = f"the silence of {silence.where} by {silence.by} has ended"
    return {"id": silence.id, "clause": silence.clause, "slice": silence.slice, "message": message}


@dataclass(frozen=True, slots=True)
class News:
    """Facts that messages tell after an evaluation, beside the alerts that fired or ended in it."""

    tick: Tick
    before: PolicyState
    policy: PolicyState
    incidents: Sequence[Incident]
    people: People
    urgent: Mapping[str, MessageReason]
    """Reasons for which alerts are told again, by fingerprint."""
    serving: Collection[str]
    """Fingerprints of alerts about versions that were rolled back, have no incident and are not over."""
    timing: GroupTiming


def group_messages(
    news: News, groups: Sequence[MessageGroup], edges: Iterable[Alert]
) -> tuple[tuple[MessageGroup, ...], tuple[IncidentMessage, ...]]:
    """The groups after an evaluation, of which these are the edges, and the webhooks to be sent now."""
    by_id = {incident.id: incident for incident in news.incidents}
    by_key = {incident.key: incident.id for incident in news.incidents}
    passed = news.before.passed(news.tick.now, news.tick.contract.observability.window)
    groups_before = {
        (group.incident, group.endpoint): replace(
            group,
            waited=group.waited + passed if any(told.waits for told in group.alerts) else 0.0,
            quiet=group.quiet + passed,
        )
        for group in groups
    }
    rows = {key: {told.alert.fingerprint: told for told in group.alerts} for key, group in groups_before.items()}
    told_in = {(alert, endpoint): id for (id, endpoint), told in rows.items() for alert in told}
    for change in edges:
        for endpoint in dict.fromkeys(str(action.target) for action in change.actions if action.kind == "webhook"):
            # An end is said where the beginning was.
            id = told_in.get((change.fingerprint, endpoint)) or by_key.get(change.incident, change.fingerprint)
            mine = rows.setdefault((id, endpoint), {})
            before = mine.pop(change.fingerprint, None)  # the newest is at the end
            heard = before.known if before is not None and change.step != ROLLED_BACK else ""
            heard = "unproven" if heard and change.again and change.fires else heard
            mine[change.fingerprint] = ToldAlert(change, heard)
    verdicts = {alert.fingerprint: alert.verdict for alert in news.policy.firing}
    after: list[MessageGroup] = []
    messages: list[IncidentMessage] = []
    for key, alerts in rows.items():
        group, incident = groups_before.get(key) or MessageGroup(*key), by_id.get(key[0])
        over = group.incident not in news.serving if incident is None else incident.state is IncidentState.RESOLVED
        left = incident is not None and incident.only_route_left
        for alert, told in alerts.items():
            # A critical one says that the version was measured after its rollback.
            gone = over or (left and told.known and told.alert.severity != "critical")
            if gone and told.alert.step == ROLLED_BACK and told.alert.fires:
                alerts[alert] = replace(told, alert=told.alert.resolved(news.tick.now))
        rest, message = _due_message(news, group, alerts.values(), incident)
        if message is not None:
            last = (replace(alert, verdict=verdicts.get(alert.fingerprint, alert.verdict)) for alert in message.alerts)
            messages.append(replace(message, alerts=tuple(last)))
        after += [rest] if rest.alerts else []
    return tuple(sorted(after, key=lambda entry: (entry.incident, entry.endpoint))), tuple(
        sorted(messages, key=lambda entry: entry.endpoint)
    )


def last_messages(
    groups: Iterable[MessageGroup], ended: Iterable[Alert], incidents: Iterable[Incident]
) -> tuple[IncidentMessage, ...]:
    """Return the last webhooks about a contract's alerts, when nobody follows them any more: all has ended."""
    by_id = {lasting.id: lasting for lasting in incidents}
    over = {alert.fingerprint: alert for alert in ended}
    messages: list[IncidentMessage] = []
    for group in groups:
        told_alerts = [told.alert for told in group.alerts if told.known]
        edges = [over.get(edge.fingerprint, edge) for edge in told_alerts]
        alerts = tuple(edge for edge in edges if not edge.fires)
        if alerts:
            incident = by_id.get(group.incident)
            messages.append(IncidentMessage(group.endpoint, MessageReason.UNFOLLOWED, incident, alerts, 0))
    return tuple(messages)


def _due_message(
    news: News, group: MessageGroup, alerts: Iterable[ToldAlert], incident: Incident | None
) -> tuple[MessageGroup, IncidentMessage | None]:
    """Return a group with its alerts after an evaluation, and the message that is due."""
    now = news.tick.now
    # Users are seen to be kept from what is contained: the end of its alert is told, and kept until it is refuted.
    contained = incident is not None and incident.state is IncidentState.CONTAINED
    uncontained = group.contained and incident is not None and incident.state is IncidentState.BROKEN

    def lasts(alert: Alert) -> bool:
        broken = {(cell.clause, cell.slice) for cell in incident.broken} if incident is not None else set()
        return alert.verdict.status is Status.PASS and alert.cell.place in broken

    def unproven(told: ToldAlert) -> bool:
        # That its step left the contract says nothing of the breach while another alert of it fires.
        return incident is not None and incident.unproven(*told.alert.cell.place, held=told.alert.end == CHANGED)

    def news_of(told: ToldAlert) -> Known | Literal["ended"]:
        alert, muted = told.alert, bool(news.people.silencing(told.alert.cell, now))
        if alert.fires:
            reminded = news.urgent.get(alert.fingerprint) is MessageReason.REMINDER
            again = reminded or (uncontained and alert.step != ROLLED_BACK)  # it may have been started again
            return "firing" if (told.waits or again) and not muted else ""
        if told.known and (contained or not unproven(told)):
            return "ended"
        # For a window after it went away, what its recorders measure next may refute it.
        gone = incident is not None and _lapsed(news.tick, incident)
        return "unproven" if gone and told.waits and not muted else ""

    rows = [(told, news_of(told)) for told in alerts if told.known or told.alert.fires or unproven(told)]
    if any(what == "firing" for _, what in rows):
        rows = [(told, "" if what == "unproven" else what) for told, what in rows]
    ready, ended, away = ([told.alert for told, what in rows if what == of] for of in ("firing", "ended", "unproven"))
    lasting = any(told.known and what != "ended" for told, what in rows)
    over = bool(ended) and not (lasting or ready or away)
    silenced = any(not told.known and told.alert.step != ROLLED_BACK for told, _ in rows)
    if over and not contained and (silenced or any(lasts(told.alert) for told, _ in rows)):
        # A receiver closes the incident on its end, so that waits for what a silence or another step's alert holds.
        return replace(group, alerts=tuple(told for told, _ in rows)), None
    reasons = {news.urgent.get(edge.fingerprint) for edge in ready}
    reasons |= {MessageReason.ROLLED_BACK for edge in ready if edge.step == ROLLED_BACK}
    at_once = next((reason for reason in _AT_ONCE_REASONS if reason in reasons), None)
    due = (
        over
        or at_once is not None
        or (bool({edge.step for edge in ready} - {*group.steps} or away) and group.waited >= news.timing.wait)
        or (bool(ready or ended) and (lasting or bool(ended)) and group.quiet >= news.timing.interval)
    )
    if not due:
        return replace(group, alerts=tuple(told for told, _ in rows)), None
    first = MessageReason.UPDATE if lasting or ended else MessageReason.FIRING
    reason = MessageReason.RESOLVED if over else at_once or (MessageReason.UNPROVEN if away else first)
    changes = (
        *(replace(edge, at=now) for edge in ready),
        *ended,
        *(replace(edge, phase=Phase.FIRING, end=WENT_AWAY) for edge in away),
    )
    after = [replace(told, known="" if what == "ended" else what or told.known) for told, what in rows]
    left = tuple(told for told in after if told.known or told.alert.fires or unproven(told))
    count = sum(bool(told.known) for told in left)
    steps = sorted({*group.steps, *(edge.step for edge in (*ready, *away))}) if count else ()
    rest = MessageGroup(group.incident, group.endpoint, left, tuple(steps), contained=contained)
    return rest, IncidentMessage(group.endpoint, reason, incident, changes, count)
