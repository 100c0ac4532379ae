"""An incident in plain values: its cells, what was done, and the sentences that tell of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from kc_otel.contract.words import interval, listed, number, place

__all__ = ["BROKEN", "ActionTaken", "BrokenCell", "Incident"]

BROKEN: Final = ("FAIL", "NO_DATA")
"""Statuses that make an incident, the more urgent first."""


@dataclass(frozen=True, slots=True)
class BrokenCell:
    """A cell of an incident: where it was broken, and how badly when it was last seen.

    Attributes:
        clause: id of the clause.
        slice: Name of the slice, or `all`.
        since: Unix time, seconds.
        until: Unix time, seconds; None while it lasts.
        limit: Limit in the metric's unit; None where only the event is known.
        estimate: Point estimate; None when unknown.
        lower: Lower confidence bound; None when unknown.
        upper: Upper confidence bound; None when unknown.
        reason: The verdict's sentence.
    """

    clause: str
    slice: str
    since: float
    until: float | None
    limit: float | None = None
    estimate: float | None = None
    lower: float | None = None
    upper: float | None = None
    reason: str = ""

    @property
    def badness(self) -> float:
        """How many times the limit it is at least; 0 when that cannot be said."""
        return self.lower / self.limit if self.lower is not None and self.limit is not None and self.limit > 0 else 0.0


@dataclass(frozen=True, slots=True)
class ActionTaken:
    """Something that the policy or a person did.

    Attributes:
        at: Unix time, seconds.
        kind: Kind of the action; `resumed`, `acknowledged` and the like for what a person did; `would-fire` for what a
            contract that runs dry would have done.
        text: In words.
        in_force: Whether it still holds; None for what is over once it is done.
    """

    at: float
    kind: str
    text: str
    in_force: bool | None = None


@dataclass(frozen=True, slots=True)
class Incident:
    """What was broken at one time for one reason.

    Attributes:
        contract: metadata.name.
        status: FAIL or NO_DATA.
        kernel_train: Short fingerprint.
        kernel_inference: Short fingerprint.
        cells: Where it is or was broken, worst first; at least one.
        actions: What was done, oldest first.
    """

    contract: str
    status: str
    kernel_train: str
    kernel_inference: str
    cells: tuple[BrokenCell, ...]
    actions: tuple[ActionTaken, ...] = ()

    @property
    def id(self) -> str:
        """Twelve hex digits that stay the same while the incident lasts."""
        identity = (self.contract, self.status, self.kernel_train, self.kernel_inference, repr(self.since))
        return hashlib.sha256("\0".join(identity).encode()).hexdigest()[:12]

    @property
    def current(self) -> tuple[BrokenCell, ...]:
        """The cells that are broken still; all of them once it is over."""
        return tuple(one for one in self.cells if one.until is None) or self.cells

    @property
    def clauses(self) -> tuple[str, ...]:
        """The clauses that are broken still, by their ids; all of them once it is over."""
        return tuple(dict.fromkeys(one.clause for one in self.current))

    @property
    def slices(self) -> tuple[str, ...]:
        """Names of the slices where it is broken still, worst first; `all` last, for it is made of the others."""
        return tuple(sorted(dict.fromkeys(one.slice for one in self.current), key=lambda name: name == "all"))

    @property
    def since(self) -> float:
        """Unix time at which the first cell broke, seconds."""
        return min(one.since for one in self.cells)

    @property
    def until(self) -> float | None:
        """Unix time at which the last cell recovered, seconds; None while any is broken."""
        ends = [one.until for one in self.cells]
        return None if None in ends else max(end for end in ends if end is not None)

    @property
    def headline(self) -> str:
        """What and for whom, as a sentence."""
        where, what = listed([place(name) for name in self.slices]), listed(self.clauses)
        if self.status == "NO_DATA":
            return f"No data for {what} on {where}"
        several = len(self.clauses) > 1
        tense = ("are" if several else "is") if self.until is None else ("were" if several else "was")
        return f"{what} {tense} above {'their limits' if several else 'its limit'} on {where}"

    @property
    def extents(self) -> tuple[tuple[str, str], ...]:
        """(clause, how bad it is where it is worst), the worst clause first."""
        worst = {one.clause: one for one in reversed(self.current)}
        return tuple((clause, _extent(worst[clause], self.status)) for clause in self.clauses)


def _extent(worst: BrokenCell, status: str) -> str:
    if status == "NO_DATA" or worst.estimate is None:
        return worst.reason
    times = f", at least {worst.badness:.2g} times that" if worst.badness > 1 else ""
    return (
        f"{number(worst.estimate)} on {place(worst.slice)} where {number(worst.limit)} is the limit{times} "
        f"(confidence interval {interval(worst.lower, worst.upper)})"
    )
