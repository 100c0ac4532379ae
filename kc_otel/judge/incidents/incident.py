"""An incident in plain values: its cells, its state, what was done, and the sentences that tell of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

from kc_otel.contract.slices import ALL
from kc_otel.contract.words import interval, listed, moment, number, place

__all__ = ["BrokenCell", "Diagnosis", "Incident", "IncidentAction", "IncidentState", "PersonsWord"]

_STATUS: Final = {"fail": "FAIL", "no-data": "NO_DATA", "inconclusive": "INCONCLUSIVE", "invalid-input": "FAIL"}
_TOLD_STEPS: Final = 5
"""Times at which a sentence says how far an incident had grown."""


class IncidentState(StrEnum):
    """Where an incident is, the more urgent first."""

    BROKEN = "broken"
    """Users of the kernel meet what is broken."""
    CONTAINED = "contained"
    """Routes or pins keep users from the kernel wherever it is broken, or was and nobody has given it back."""
    RESOLVED = "resolved"
    """Nothing is broken, no alert fires, and no route is left of it."""


@dataclass(frozen=True, slots=True)
class BrokenCell:
    """A cell of an incident: where it was broken, and how badly when it was last seen.

    Attributes:
        clause: id of the clause.
        slice: Name of the slice, or `all`.
        since: Unix time, seconds.
        until: Unix time, seconds; None while it lasts.
        limit: Limit in the metric's unit; None where there is none.
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
class IncidentAction:
    """What the policy did because of an incident.

    Attributes:
        kind: Kind of the action, as in a contract.
        target: Kernel of `route`, endpoint of `webhook`; empty for the others.
        at: Unix time at which it was first done, seconds.
        slices: Where, in the order in which it was done.
        dry_run: Whether it would only have been done.
    """

    kind: str
    target: str
    at: float
    slices: tuple[str, ...]
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class PersonsWord:
    """What a person did or said while an incident lasted.

    Attributes:
        at: Unix time, seconds.
        kind: acknowledged, silenced, unsilenced, pinned, unpinned, enabled or resumed.
        text: In words, with who and why.
    """

    at: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What somebody, or a program, found out about an incident after looking.

    Attributes:
        at: Unix time at which it was attached, seconds.
        kind: `locate` for which operator it is, `remedy` for what to do about it.
        slice: Slice that was looked at, or `all`.
        text: In one line.
        by: Who attached it.
        evidence: SHA-256 of the evidence, hexadecimal; it is kept apart, under this name.
    """

    at: float
    kind: Literal["locate", "remedy"]
    slice: str
    text: str
    by: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Incident:
    """What was broken at one time for one reason on one pair of kernels.

    Attributes:
        id: Twelve hex digits; the same from the first breach to the end.
        contract: metadata.name.
        on: What is wrong, as escalation steps call it: fail, no-data, inconclusive or invalid-input.
        kernel_train: Short fingerprint.
        kernel_inference: Short fingerprint.
        state: broken, contained or resolved.
        cells: Where it is or was broken, worst first; at least one. Each stays until the incident is over.
        actions: What the policy did, oldest first.
        words: What people did, oldest first.
        contained_at: Unix time since when it is contained, seconds; None while it is not.
        resolved_at: Unix time at which it was over, seconds; None while it lasts.
        diagnoses: What was found out about it, oldest first.
    """

    id: str
    contract: str
    on: str
    kernel_train: str
    kernel_inference: str
    state: IncidentState
    cells: tuple[BrokenCell, ...]
    actions: tuple[IncidentAction, ...] = ()
    words: tuple[PersonsWord, ...] = ()
    contained_at: float | None = None
    resolved_at: float | None = None
    diagnoses: tuple[Diagnosis, ...] = ()

    @property
    def key(self) -> tuple[str, str, str]:
        """(on, kernel_train, kernel_inference): a contract has one incident of each at a time."""
        return self.on, self.kernel_train, self.kernel_inference

    @property
    def status(self) -> str:
        """Status of its cells: FAIL, NO_DATA or INCONCLUSIVE."""
        return _STATUS[self.on]

    @property
    def outline(self) -> tuple[object, ...]:
        """All but the numbers, which change with every evaluation."""
        cells = sorted((one.clause, one.slice, one.since, one.until is None) for one in self.cells)
        return self.state, cells, self.actions, self.words, self.diagnoses

    @property
    def broken(self) -> tuple[BrokenCell, ...]:
        """The cells that are broken still."""
        return tuple(one for one in self.cells if one.until is None)

    @property
    def current(self) -> tuple[BrokenCell, ...]:
        """The cells that are broken still; all of them once none is."""
        return self.broken or self.cells

    @property
    def clauses(self) -> tuple[str, ...]:
        """The clauses that are broken still, by their ids; all of them once none is."""
        return tuple(dict.fromkeys(one.clause for one in self.current))

    @property
    def slices(self) -> tuple[str, ...]:
        """Names of the slices where it is broken still, as they broke; `all` last, for it is made of the others.

        Not by how bad they are: that changes with every evaluation, and what is read must not move.
        """
        onsets = sorted(self.current, key=lambda one: (one.slice == ALL, one.since, one.slice))
        return tuple(dict.fromkeys(one.slice for one in onsets))

    @property
    def since(self) -> float:
        """Unix time at which the first cell broke, seconds."""
        return min(one.since for one in self.cells)

    @property
    def growth(self) -> tuple[tuple[float, int], ...]:
        """(Unix time, slices that had broken by then, `all` among them), at the end of each minute that added some."""
        onsets: dict[str, float] = {}
        for one in self.cells:
            onsets[one.slice] = min(one.since, onsets.get(one.slice, one.since))
        by_minute: dict[int, tuple[float, int]] = {}
        for count, at in enumerate(sorted(onsets.values()), start=1):
            by_minute[int(at // 60)] = (at, count)
        return tuple(by_minute.values())

    @property
    def growth_text(self) -> str:
        """How it grew, as a phrase; empty where it never did."""
        grown = self.growth
        if len(grown) < 2:
            return ""
        steps = [*grown[: _TOLD_STEPS - 1], grown[-1]] if len(grown) > _TOLD_STEPS else list(grown)
        first, *others = [(moment(at)[11:16], count) for at, count in steps]
        said = [f"{first[1]} slice{'s' * (first[1] != 1)} at {first[0]}", *(f"{count} at {at}" for at, count in others)]
        return f"{', '.join(said)} UTC"

    @property
    def headline(self) -> str:
        """What and for whom, as a sentence."""
        where, what = listed([place(name) for name in self.slices]), listed(self.clauses)
        over, several = not self.broken, len(self.clauses) > 1
        if self.on == "no-data":
            return f"No data for {what} on {where}"
        if self.on == "invalid-input":
            return f"Sequences {'failed' if over else 'fail'} the input checks"
        tense = ("were" if several else "was") if over else ("are" if several else "is")
        if self.on == "inconclusive":
            return f"{what} {tense} undecided on {where}"
        return f"{what} {tense} above {'their limits' if several else 'its limit'} on {where}"

    @property
    def extents(self) -> tuple[tuple[str, str], ...]:
        """(clause, how bad it is where it is worst), the worst clause first."""
        worst = {one.clause: one for one in reversed(self.current)}
        return tuple((clause, _extent(worst[clause], self.on)) for clause in self.clauses)


def _extent(worst: BrokenCell, on: str) -> str:
    if on in {"no-data", "invalid-input"} or worst.estimate is None:
        return worst.reason
    times = f", at least {_at_least(worst.badness)} times that" if worst.badness > 1 else ""
    return (
        f"{number(worst.estimate)} on {place(worst.slice)} where {number(worst.limit)} is the limit{times} "
        f"(confidence interval {interval(worst.lower, worst.upper)})"
    )


def _at_least(times: float) -> str:
    """Two digits, downwards: what is said to be at least that is no less."""
    step = 10.0 ** (math.floor(math.log10(times)) - 1)
    return number(math.floor(times / step * (1 + 1e-12)) * step)
