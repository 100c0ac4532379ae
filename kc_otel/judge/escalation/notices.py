"""Recipients and timing of notices: a pure function of the firing alerts and of people's decisions.

    fires ---------------> told ("firing") ---- `repeat` passes, nobody acknowledges ----> told ("reminder") ---+
      |                     ^    |                                        ^                                     |
      | silenced            |    | resolves                               '-------------------------------------'
      v                     |    v
    silent -- silence ends -'   told ("resolved")
      |       ("silence-ended")
      '--resolves: nothing was said, and nothing needs to be taken back

If people were told that an alert fires, they are told that it resolved, even during a silence: anyone who acted on the
first message needs the second. Time towards a reminder is counted as the policy counts it: since the evaluation before,
never less than zero and never more than the contract's window, so that a clock that jumps sends no storm of reminders.
Reminders of a step about one pair of kernels are sent together, when the first is due: an incident that grew is one
reminder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from kc_otel.contract.model import Contract
from kc_otel.judge.escalation.alert_lifecycle import edge, step_keys
from kc_otel.judge.escalation.alerts import Alert, Transition, What
from kc_otel.judge.escalation.people import People

__all__ = ["Notice", "NoticeReason", "NotificationLog", "NotifiedAlert", "notices"]


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
    """Something to say.

    Attributes:
        transition: Transition of the alert.
        reason: Why it is said.
    """

    transition: Transition
    reason: NoticeReason


@dataclass(frozen=True, slots=True)
class NotifiedAlert:
    """An alert of which people know.

    Attributes:
        fingerprint: The alert.
        times: How often it has been said that it fires.
        waited: Seconds counted towards the next reminder.
        seen: Unix time of the last evaluation, seconds.
    """

    fingerprint: str
    times: int
    waited: float
    seen: float


@dataclass(frozen=True, slots=True)
class NotificationLog:
    """Record of the notices sent about a contract's alerts.

    Attributes:
        contract: metadata.name.
        alerts: Those that people know of, sorted.
    """

    contract: str
    alerts: tuple[NotifiedAlert, ...] = ()


def notices(
    contract: Contract,
    log: NotificationLog,
    firing: Sequence[Alert],
    transitions: Sequence[Transition],
    people: People,
    now: float,
) -> tuple[NotificationLog, tuple[Notice, ...]]:
    """Return the notices due after an evaluation.

    Args:
        contract: The contract in force.
        log: Last result of this function.
        firing: The contract's alerts that fire now.
        transitions: Alerts that fired and resolved in this evaluation.
        people: Silences and acknowledgements in force.
        now: Unix time, seconds.

    Returns:
        The new log and the notices: fired and resolved alerts in the order of `transitions`, then the rest.
    """
    known = {alert.fingerprint: alert for alert in log.alerts}
    repeats = dict(zip(step_keys(contract), (step.repeat for step in contract.escalation), strict=True))
    fired = {transition.fingerprint: transition for transition in transitions if transition.what is What.FIRING}
    notified: list[NotifiedAlert] = []
    fresh: set[str] = set()
    late: list[Notice] = []
    waiting: dict[tuple[str, str, str], list[tuple[Alert, NotifiedAlert]]] = {}
    for alert in firing:
        before, muted = known.get(alert.fingerprint), bool(people.silencing(alert.cell, now))
        if before is None or alert.fingerprint in fired:
            if muted:
                continue
            notified.append(NotifiedAlert(alert.fingerprint, 1, 0.0, now))
            if alert.fingerprint in fired:
                fresh.add(alert.fingerprint)
            else:
                late.append(Notice(edge(alert, What.FIRING, now), NoticeReason.SILENCE_ENDED))
            continue
        if muted or people.acknowledged(alert.fingerprint) is not None:
            notified.append(replace(before, seen=now))
            continue
        waited = before.waited + min(max(0.0, now - before.seen), contract.observability.window)
        of = alert.step, alert.cell.kernel_train, alert.cell.kernel_inference
        waiting.setdefault(of, []).append((alert, replace(before, waited=waited, seen=now)))
    for (step, *_), together in waiting.items():
        repeat = repeats.get(step, 0.0)
        due = repeat > 0 and any(notification.waited >= repeat for _, notification in together)
        for alert, notification in together:
            notified.append(replace(notification, times=notification.times + 1, waited=0.0) if due else notification)
            if due:
                late.append(Notice(edge(alert, What.FIRING, now), NoticeReason.REMINDER))
    first = [
        Notice(transition, NoticeReason.FIRING if transition.what is What.FIRING else NoticeReason.RESOLVED)
        for transition in transitions
        if (transition.fingerprint in fresh if transition.what is What.FIRING else transition.fingerprint in known)
    ]
    notified.sort(key=lambda alert: alert.fingerprint)
    return NotificationLog(contract.name, tuple(notified)), (*first, *late)
