"""Incidents: what is or was broken, since when, for whom, and what was done about it.

A cell that turns FAIL or NO_DATA begins an episode, and the next verdict ends it. Episodes of one pair of kernels that
overlap are one incident, whichever clauses and slices they are about: one version of a kernel is their cause. Input
and output have the shapes of the API's answers, so that a running evaluator and a reader of its API tell the same
story.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kc_otel.judge.incidents.actions_taken import actions_taken
from kc_otel.judge.incidents.incident import BROKEN, ActionTaken, BrokenCell, Incident

__all__ = ["ActionTaken", "BrokenCell", "Incident", "incidents"]

_KEY: Final = ("contract", "clause", "slice", "kernel_train", "kernel_inference")

Key = tuple[str, ...]
Json = Mapping[str, Any]


@dataclass(slots=True)
class _Episode:
    key: Key
    status: str
    since: float
    until: float | None = None
    numbers: dict[str, Any] = field(default_factory=dict)


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
        BROKEN.index(one.status),
        -max(cell.badness for cell in one.cells),
        one.since,
        one.contract,
        one.clauses,
    )


def _episodes(cells: Sequence[Json], events: Sequence[Json]) -> list[_Episode]:
    current = {_key(cell["verdict"]): cell for cell in cells}
    done, running = _from_events(events, current.keys())
    _add_numbers([*done, *running.values()], events)
    for key, cell in current.items():
        verdict = cell["verdict"]
        one = running.pop(key, None)
        if verdict["status"] in BROKEN:
            if one is None or one.status != verdict["status"]:
                one = _Episode(key, verdict["status"], cell["since"])
            one.numbers = dict(verdict)
            done.append(one)
        elif one is not None:  # the event that ended it is no longer kept, or not yet
            one.until = cell["since"]
            done.append(one)
    last = max((event["at"] for event in events), default=0.0)
    for one in running.values():  # cells that are gone: their kernel version went out of use
        one.until = max(one.since, last)
        done.append(one)
    return done


def _from_events(events: Sequence[Json], current: Collection[Key]) -> tuple[list[_Episode], dict[Key, _Episode]]:
    """Episodes that the verdicts' events tell of: those that ended, and those that did not."""
    running: dict[Key, _Episode] = {}
    done: list[_Episode] = []
    for event in events:
        data = event["data"]
        if event["kind"] != "verdict" or "clause" not in data:
            continue
        key, at = _key({**data, "contract": event["contract"]}), event["at"]
        # A verdict on another pair of kernels ends what a pair that is gone has left open on the same cell.
        ended = [one for one in running if one == key or (one[:3] == key[:3] and one not in current)]
        for other in ended:
            running[other].until = at
            done.append(running.pop(other))
        if data["status"] in BROKEN:
            running[key] = _Episode(key, data["status"], at, numbers={"reason": _reason(event["message"])})
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
                one.numbers |= {name: _finite(verdict.get(name)) for name in ("limit", "estimate", "lower", "upper")}


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
    cells = [
        BrokenCell(
            clause=one.key[1],
            slice=one.key[2],
            since=one.since,
            until=one.until,
            reason=one.numbers.get("reason", ""),
            **{name: one.numbers.get(name) for name in ("limit", "estimate", "lower", "upper")},
        )
        for one in group
    ]
    cells.sort(key=lambda one: (one.until is not None, -one.badness, one.slice == "all", one.slice, one.clause))
    found = Incident(contract, group[0].status, train, inference, tuple(cells))
    return replace(found, actions=actions_taken(found, events, decisions, waiting))


def _key(data: Json) -> Key:
    return tuple(str(data.get(name, "")) for name in _KEY)


def _reason(message: str) -> str:
    """A verdict event says `clause on slice: before -> after: reason`."""
    return message.split(" -> ", 1)[-1].partition(": ")[2]


def _finite(value: Any) -> float | None:
    return value if isinstance(value, float | int) and not isinstance(value, bool) else None
