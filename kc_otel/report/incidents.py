"""Incidents: what is or was broken, since when, for whom, and what was done about it.

A cell that turns FAIL or NO_DATA begins an episode, and the next verdict ends it. Episodes of one pair of kernels that
overlap are one incident, whichever clauses and slices they are about: one version of a kernel is their cause. Input
and output have the shapes of the API's answers, so that a running evaluator and a reader of its API tell the same
story.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kc_otel.report.words import interval, listed, number, place

__all__ = ["Deed", "Incident", "Place", "incidents"]

_BROKEN: Final = ("FAIL", "NO_DATA")
_KEY: Final = ("contract", "clause", "slice", "kernel_train", "kernel_inference")

Key = tuple[str, ...]
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
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
class Deed:
    """Something that the policy or a person did.

    Attributes:
        at: Unix time, seconds.
        kind: Kind of the action, or `resumed`.
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
        places: The cells, worst first; at least one.
        deeds: What was done, oldest first.
    """

    contract: str
    status: str
    kernel_train: str
    kernel_inference: str
    places: tuple[Place, ...]
    deeds: tuple[Deed, ...] = ()

    @property
    def id(self) -> str:
        """Twelve hex digits that stay the same while the incident lasts."""
        said = (self.contract, self.status, self.kernel_train, self.kernel_inference, repr(self.since))
        return hashlib.sha256("\0".join(said).encode()).hexdigest()[:12]

    @property
    def clauses(self) -> tuple[str, ...]:
        """The clauses, by their ids."""
        return tuple(dict.fromkeys(one.clause for one in self.places))

    @property
    def slices(self) -> tuple[str, ...]:
        """Names of the slices, worst first; `all` last, for it is made of the others."""
        return tuple(sorted(dict.fromkeys(one.slice for one in self.places), key=lambda name: name == "all"))

    @property
    def since(self) -> float:
        """Unix time at which the first cell broke, seconds."""
        return min(one.since for one in self.places)

    @property
    def until(self) -> float | None:
        """Unix time at which the last cell recovered, seconds; None while any is broken."""
        ends = [one.until for one in self.places]
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
        worst = {one.clause: one for one in reversed(self.places)}
        return tuple((clause, _extent(worst[clause], self.status)) for clause in self.clauses)


def _extent(worst: Place, status: str) -> str:
    if status == "NO_DATA" or worst.estimate is None:
        return worst.reason
    times = f", at least {worst.badness:.2g} times that" if worst.badness > 1 else ""
    return (
        f"{number(worst.estimate)} on {place(worst.slice)} where {number(worst.limit)} is the limit{times} "
        f"(confidence interval {interval(worst.lower, worst.upper)})"
    )


@dataclass(slots=True)
class _Episode:
    key: Key
    status: str
    since: float
    until: float | None = None
    said: dict[str, Any] = field(default_factory=dict)


def incidents(
    cells: Sequence[Json],
    events: Sequence[Json],
    decisions: Json,
    since: float = float("-inf"),
    waiting: Mapping[str, float] | None = None,
) -> tuple[Incident, ...]:
    """Incidents that were open at or after a time: those that last first, FAIL before silence, the worst first.

    Args:
        cells: Every cell as `/api/v1/cells` has it.
        events: Events as `/api/v1/events` has them, oldest first.
        decisions: The decision table as `/api/v1/decisions` has it.
        since: Unix time, seconds.
        waiting: Since when the oldest undelivered webhook of an endpoint waits, Unix seconds.
    """
    episodes = [one for one in _episodes(cells, events) if one.until is None or one.until >= since]
    found = [_incident(group, events, decisions, waiting or {}) for group in _groups(episodes)]
    return tuple(sorted(found, key=_urgency))


def _urgency(one: Incident) -> tuple[Any, ...]:
    return (
        one.until is not None,
        -(one.until or 0.0),
        _BROKEN.index(one.status),
        -max(place.badness for place in one.places),
        one.since,
        one.contract,
        one.clauses,
    )


def _episodes(cells: Sequence[Json], events: Sequence[Json]) -> list[_Episode]:
    standing = {_key(cell["verdict"]): cell for cell in cells}
    done, running = _told(events, standing.keys())
    _add_numbers([*done, *running.values()], events)
    for key, cell in standing.items():
        verdict = cell["verdict"]
        one = running.pop(key, None)
        if verdict["status"] in _BROKEN:
            if one is None or one.status != verdict["status"]:
                one = _Episode(key, verdict["status"], cell["since"])
            one.said = dict(verdict)
            done.append(one)
        elif one is not None:  # the event that ended it is no longer kept, or not yet
            one.until = cell["since"]
            done.append(one)
    last = max((event["at"] for event in events), default=0.0)
    for one in running.values():  # cells that are gone: their kernel version went out of use
        one.until = max(one.since, last)
        done.append(one)
    return done


def _told(events: Sequence[Json], standing: Collection[Key]) -> tuple[list[_Episode], dict[Key, _Episode]]:
    """Episodes that the verdicts' events tell of: those that ended, and those that did not."""
    running: dict[Key, _Episode] = {}
    done: list[_Episode] = []
    for event in events:
        data = event["data"]
        if event["kind"] != "verdict" or "clause" not in data:
            continue
        key, at = _key({**data, "contract": event["contract"]}), event["at"]
        # A verdict on another pair of kernels ends what a pair that is gone has left open on the same cell.
        ended = [one for one in running if one == key or (one[:3] == key[:3] and one not in standing)]
        for other in ended:
            running[other].until = at
            done.append(running.pop(other))
        if data["status"] in _BROKEN:
            running[key] = _Episode(key, data["status"], at, said={"reason": _reason(event["message"])})
    return done, running


def _add_numbers(episodes: Sequence[_Episode], events: Sequence[Json]) -> None:
    """An alert carries the numbers that the verdict's event does not."""
    for event in events:
        verdict = event["data"].get("verdict") if event["kind"] == "firing" else None
        if verdict is None:
            continue
        key, at = _key({**event["data"], "contract": event["contract"]}), event["at"]
        for one in episodes:
            if one.key == key and one.since <= at and (one.until is None or at <= one.until):
                one.said |= {name: _finite(verdict.get(name)) for name in ("limit", "estimate", "lower", "upper")}


def _groups(episodes: Iterable[_Episode]) -> Iterable[list[_Episode]]:
    by: dict[tuple[str, ...], list[_Episode]] = {}
    for one in episodes:
        contract, _, _, *kernels = one.key
        by.setdefault((contract, one.status, *kernels), []).append(one)
    for members in by.values():
        group: list[_Episode] = []
        end = float("-inf")
        for one in sorted(members, key=lambda episode: (episode.since, episode.key)):
            if group and one.since > end:
                yield group
                group, end = [], float("-inf")
            group.append(one)
            end = max(end, float("inf") if one.until is None else one.until)
        yield group


def _incident(
    group: Sequence[_Episode], events: Sequence[Json], decisions: Json, waiting: Mapping[str, float]
) -> Incident:
    contract, _, _, train, inference = group[0].key
    places = [
        Place(
            clause=one.key[1],
            slice=one.key[2],
            since=one.since,
            until=one.until,
            reason=one.said.get("reason", ""),
            **{name: one.said.get(name) for name in ("limit", "estimate", "lower", "upper")},
        )
        for one in group
    ]
    places.sort(key=lambda one: (one.until is not None, -one.badness, one.slice == "all", one.slice, one.clause))
    found = Incident(contract, group[0].status, train, inference, tuple(places))
    return replace(found, deeds=_deeds(found, events, decisions, waiting))


def _deeds(
    incident: Incident, events: Sequence[Json], decisions: Json, waiting: Mapping[str, float]
) -> tuple[Deed, ...]:
    """Actions of the alerts that fired for its cells while it lasted, and what people did to its slices."""
    cells = {(one.clause, one.slice) for one in incident.places}
    fired: dict[tuple[str, str], tuple[float, list[str]]] = {}
    deeds = []
    for event in events:
        data, at = event["data"], event["at"]
        late = incident.until is not None and at > incident.until
        if event["contract"] != incident.contract or at < incident.since or late:
            continue
        if event["kind"] == "resumed" and data.get("slice") in {None, *incident.slices}:
            deeds.append(Deed(at, "resumed", event["message"]))
        kernels = (data.get("kernel_train"), data.get("kernel_inference"))
        mine = kernels == (incident.kernel_train, incident.kernel_inference)
        if event["kind"] == "firing" and mine and (data.get("clause"), data.get("slice")) in cells:
            for action in data.get("actions", ()):
                # As a contract writes it: `notify`, or `{webhook: pager}`.
                kind, target = (action, "") if isinstance(action, str) else next(iter(action.items()))
                _, slices = fired.setdefault((kind, target), (at, []))
                slices.append(data["slice"])
    for (kind, target), (at, slices) in fired.items():
        if kind == "webhook":
            # Messages of an endpoint leave in order: what came after the oldest one that waits has not left either.
            late = target in waiting and waiting[target] <= at
            deeds.append(
                Deed(
                    at,
                    kind,
                    f"{target} is still to be told: its webhook waits" if late else f"told {target} by webhook",
                )
            )
        else:
            deeds.append(_deed(incident, kind, at, list(dict.fromkeys(slices)), decisions))
    return tuple(sorted(deeds, key=lambda deed: (deed.at, deed.kind, deed.text)))


def _deed(incident: Incident, kind: str, at: float, slices: Sequence[str], decisions: Json) -> Deed:
    where = listed([place(name) for name in slices])
    if kind == "route":
        held = {
            route["slice"]
            for route in decisions["routes"]
            if (route["contract"], route["avoid"]) == (incident.contract, incident.kernel_inference)
        }
        text = f"{where} routed to the training kernel"
        return Deed(at, kind, text, in_force=bool(held & set(slices)))
    if kind == "notify":
        return Deed(at, kind, "announced in the log")
    text = {
        "sample-more": "recorders asked to sample more",
        "hold-promotion": "promotions held",
        "quarantine-rollouts": f"rollouts of {where} quarantined",
        "halt": "trainers told to halt",
    }.get(kind, kind)
    asked = any((one["contract"], one["kind"]) == (incident.contract, kind) for one in decisions["directives"])
    return Deed(at, kind, text, in_force=asked)


def _key(data: Json) -> Key:
    return tuple(str(data.get(name, "")) for name in _KEY)


def _reason(message: str) -> str:
    """A verdict event says `clause on slice: before -> after: reason`."""
    return message.split(" -> ", 1)[-1].partition(": ")[2]


def _finite(value: Any) -> float | None:
    return value if isinstance(value, float | int) and not isinstance(value, bool) else None
