"""Who is told what, and when: a pure function of what fires and of what people have decided.

    fires ---------------> told ("firing") ---- `repeat` passes, nobody acknowledges ----> told ("reminder") ---+
      |                     ^    |                                        ^                                     |
      | silenced            |    | resolves                               '-------------------------------------'
      v                     |    v
    untold -- silence ends -'   told ("resolved")
      |       ("silence-ended")
      '--resolves: nothing was said, and nothing needs to be taken back

An alert that was said to fire is said to have resolved, also during a silence: whoever acted on the first has to hear
of the second. Time towards a reminder is counted as the policy counts it: since the evaluation before, never less than
zero and never more than the contract's window, so that a clock that jumps sends no storm of reminders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Any

from kc_otel.contract.model import Contract
from kc_otel.judge.escalation.alerts import Alert, Transition, What
from kc_otel.judge.escalation.people import People
from kc_otel.judge.escalation.policy import edge, step_keys

__all__ = ["Notice", "NoticeReason", "NotificationLog", "NotifiedAlert", "notices", "webhooks"]


class NoticeReason(StrEnum):
    """Why somebody is told."""

    FIRING = "firing"
    RESOLVED = "resolved"
    REMINDER = "reminder"
    SILENCE_ENDED = "silence-ended"


@dataclass(frozen=True, slots=True)
class Notice:
    """Something to say.

    Attributes:
        transition: What is said of which alert.
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
    """What has been said of a contract's alerts.

    Attributes:
        contract: metadata.name.
        said: Alerts that people know of, sorted.
    """

    contract: str
    said: tuple[NotifiedAlert, ...] = ()

    @classmethod
    def of(cls, contract: str, firing: Iterable[Alert]) -> NotificationLog:
        """The book of a contract all of whose alerts have been said."""
        return cls(contract, _sorted(NotifiedAlert(alert.fingerprint, 1, 0.0, alert.seen) for alert in firing))

    def to_json(self) -> dict[str, Any]:
        """The book as a JSON object."""
        said = [[one.fingerprint, one.times, one.waited, one.seen] for one in self.said]
        return {"contract": self.contract, "said": said}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> NotificationLog:
        """The book that `to_json` wrote."""
        return cls(plain["contract"], tuple(NotifiedAlert(*one) for one in plain["said"]))


def notices(
    contract: Contract,
    book: NotificationLog,
    firing: Sequence[Alert],
    transitions: Sequence[Transition],
    people: People,
    now: float,
) -> tuple[NotificationLog, tuple[Notice, ...]]:
    """What to say after an evaluation.

    Args:
        contract: The contract in force.
        book: What this function returned last.
        firing: The contract's alerts that fire now.
        transitions: What fired and resolved in this evaluation.
        people: Silences and acknowledgements in force.
        now: Unix time, seconds.

    Returns:
        The new book, and what to say: what fired and resolved in the order of `transitions`, then the rest.
    """
    known = {one.fingerprint: one for one in book.said}
    repeats = dict(zip(step_keys(contract), (step.repeat for step in contract.escalation), strict=True))
    fired = {one.fingerprint: one for one in transitions if one.what is What.FIRING}
    said: list[NotifiedAlert] = []
    fresh: set[str] = set()
    late: list[Notice] = []
    for alert in firing:
        before, muted = known.get(alert.fingerprint), bool(people.silencing(alert.cell, now))
        if before is None or alert.fingerprint in fired:
            if muted:
                continue
            said.append(NotifiedAlert(alert.fingerprint, 1, 0.0, now))
            if alert.fingerprint in fired:
                fresh.add(alert.fingerprint)
            else:
                late.append(Notice(edge(alert, What.FIRING, now), NoticeReason.SILENCE_ENDED))
            continue
        quiet = muted or people.acknowledged(alert.fingerprint) is not None
        after, reminds = _waited(before, repeats.get(alert.step, 0.0), contract.observability.window, now, quiet=quiet)
        said.append(after)
        if reminds:
            late.append(Notice(edge(alert, What.FIRING, now), NoticeReason.REMINDER))
    first = [
        Notice(one, NoticeReason.FIRING if one.what is What.FIRING else NoticeReason.RESOLVED)
        for one in transitions
        if (one.fingerprint in fresh if one.what is What.FIRING else one.fingerprint in known)
    ]
    return NotificationLog(contract.name, _sorted(said)), (*first, *late)


def webhooks(told: Sequence[Notice]) -> Iterator[tuple[str, NoticeReason, list[Transition]]]:
    """The webhooks that say it: (endpoint, reason, alerts), one per endpoint, step and reason, by endpoint."""
    targets = {
        str(action.target) for notice in told for action in notice.transition.actions if action.kind == "webhook"
    }
    for target in sorted(targets):
        wanted = [n for n in told if any(a.kind == "webhook" and a.target == target for a in n.transition.actions)]
        for (_, reason), group in groupby(wanted, key=lambda notice: (notice.transition.step, notice.reason)):
            yield target, reason, [notice.transition for notice in group]


def _waited(
    said: NotifiedAlert, repeat: float, window: float, now: float, *, quiet: bool
) -> tuple[NotifiedAlert, bool]:
    if quiet:
        return NotifiedAlert(said.fingerprint, said.times, said.waited, now), False
    waited = said.waited + min(max(0.0, now - said.seen), window)
    if repeat > 0 and waited >= repeat:
        return NotifiedAlert(said.fingerprint, said.times + 1, 0.0, now), True
    return NotifiedAlert(said.fingerprint, said.times, waited, now), False


def _sorted(said: Iterable[NotifiedAlert]) -> tuple[NotifiedAlert, ...]:
    return tuple(sorted(said, key=lambda one: one.fingerprint))
