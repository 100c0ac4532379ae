"""People's decisions about alerts: silences and acknowledgements, each with its author and reason.

A silence mutes: webhooks and log records of the alerts that it covers are held back until it ends. It does not affect
routes, quarantines, holds and halts, which act on kernels and not on notifications. Alerts that still fire when a
silence ends are reported then.

An acknowledgement says that somebody is at work on an alert: the alert goes on firing, its reminders stop, and it ends
with the alert. Source: Prometheus documentation, "Alertmanager", silences; PagerDuty, "Incidents", acknowledge.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from kc_otel.judge.escalation.alerts import Alert
from kc_otel.judge.verdict import Cell

__all__ = ["Acknowledgement", "People", "Silence", "acknowledge", "current", "silence", "unsilence"]


@dataclass(frozen=True, slots=True)
class Silence:
    """A silence: no messages about some alerts for some time.

    Attributes:
        id: Text that no other silence has.
        contract: metadata.name.
        clause: id of a clause; None for every clause.
        slice: Name of a slice, or `all` for the cells of all traffic; None for every slice.
        by: Who.
        why: Their reason.
        at: Unix time of the decision, seconds.
        until: Unix time at which it ends by itself, seconds.
    """

    id: str
    contract: str
    clause: str | None
    slice: str | None
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
        """Scope of the silence, in words.

        >>> Silence("1", "policy", "token-tv", None, "ada", "planned", 0.0, 1.0).where
        'token-tv on every slice'
        """
        return f"{self.clause or 'every clause'} on {f'slice {self.slice}' if self.slice else 'every slice'}"


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """A person's acknowledgement of an alert.

    Attributes:
        contract: metadata.name.
        fingerprint: The alert.
        by: Author.
        why: Their finding or their action.
        at: Unix time, seconds.
    """

    contract: str
    fingerprint: str
    by: str
    why: str
    at: float


@dataclass(frozen=True, slots=True)
class People:
    """Everything of this kind that is in force.

    Attributes:
        silences: Oldest first.
        acknowledgements: Oldest first, one for each alert at most.
    """

    silences: tuple[Silence, ...] = ()
    acknowledgements: tuple[Acknowledgement, ...] = ()

    def silencing(self, cell: Cell, now: float) -> tuple[Silence, ...]:
        """The silences that mute a cell at a unix time."""
        return tuple(muting for muting in self.silences if now < muting.until and muting.covers(cell))

    def acknowledged(self, fingerprint: str) -> Acknowledgement | None:
        """Return the acknowledgement of an alert; None if there is none."""
        return next((ack for ack in self.acknowledgements if ack.fingerprint == fingerprint), None)


def silence(people: People, wanted: Silence) -> People:
    """Mute alerts.

    Raises:
        ValueError: If the end is not in the future.
    """
    if wanted.until <= wanted.at:
        raise ValueError("until: is not a time in the future; every silence has an end, such as 2h from now")
    return replace(people, silences=(*people.silences, wanted))


def unsilence(people: People, id: str) -> tuple[People, Silence]:
    """End a silence before its time; returns what is left, and the silence.

    Raises:
        LookupError: If no silence in force has this id.
    """
    ended = next((muting for muting in people.silences if muting.id == id), None)
    if ended is None:
        known = ", ".join(muting.id for muting in people.silences) or "none"
        raise LookupError(f"no silence {id!r} is in force; in force: {known}")
    return replace(people, silences=tuple(muting for muting in people.silences if muting is not ended)), ended


def acknowledge(people: People, alerts: Sequence[Alert], by: str, why: str, now: float) -> People:
    """Take on alerts that fire; those that somebody is at work on already stay theirs.

    Raises:
        LookupError: If there is no alert to take on.
    """
    if not alerts:
        raise LookupError("no such alert fires")
    known = {ack.fingerprint: ack for ack in people.acknowledgements}
    new = tuple(
        Acknowledgement(alert.cell.contract, alert.fingerprint, by, why, now)
        for alert in alerts
        if alert.fingerprint not in known
    )
    if not new:
        who = ", ".join(sorted({known[alert.fingerprint].by for alert in alerts}))
        raise LookupError(f"acknowledged already, by {who}")
    return replace(people, acknowledgements=(*people.acknowledgements, *new))


def current(people: People, contract: str, firing: Collection[str], now: float) -> tuple[People, tuple[Silence, ...]]:
    """Return the decisions still in force, and a contract's silences that have ended.

    Args:
        people: Decisions that were in force, about any contract.
        contract: metadata.name.
        firing: Fingerprints of its alerts that fire.
        now: Unix time, seconds.
    """
    ended = tuple(muting for muting in people.silences if muting.contract == contract and now >= muting.until)
    silences = tuple(muting for muting in people.silences if muting not in ended)
    kept = (ack for ack in people.acknowledgements if ack.contract != contract or ack.fingerprint in firing)
    return People(silences, tuple(kept)), ended
