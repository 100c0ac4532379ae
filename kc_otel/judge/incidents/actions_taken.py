"""What was done about an incident: by the escalation policy, from its alerts, and by people."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from kc_otel.contract.words import listed, place
from kc_otel.judge.incidents.incident import ActionTaken, Incident

__all__ = ["actions_taken"]

_BY_PEOPLE: Final = frozenset({"acknowledged", "pinned", "resumed", "silenced", "unpinned", "unsilenced"})
_FIRED: Final = frozenset({"firing", "silence-ended"})
_CELL: Final = ("clause", "slice", "kernel_train", "kernel_inference")

Json = Mapping[str, Any]


def actions_taken(
    incident: Incident, events: Sequence[Json], decisions: Json, waiting: Mapping[str, float]
) -> tuple[ActionTaken, ...]:
    """Actions of the alerts that fired for its cells while it lasted, and what people did to its slices; oldest first.

    Args:
        incident: The incident, without actions.
        events: Events as `/api/v1/events` has them, oldest first; where some are no longer kept, what is in force says
            what they said.
        decisions: The decision table as `/api/v1/decisions` has it.
        waiting: Since when the oldest undelivered webhook of an endpoint waits, Unix seconds.
    """
    mine = [event for event in events if _within(incident, event)]
    kernels = (incident.kernel_train, incident.kernel_inference)
    cells = {(one.clause, one.slice, *kernels) for one in incident.cells}
    actions = [
        ActionTaken(event["at"], event["kind"], event["message"])
        for event in mine
        if event["kind"] in _BY_PEOPLE and _concerns(incident, event["data"])
    ]
    fired: dict[tuple[str, str], tuple[float, list[str]]] = {}
    dry_run: dict[tuple[str, str], float] = {}
    for event in mine:
        data, at = event["data"], event["at"]
        if tuple(map(data.get, _CELL)) not in cells:
            continue
        if event["kind"] in _FIRED:
            for kind, target in _carried_out(data):
                _, slices = fired.setdefault((kind, target), (at, []))
                slices.append(data["slice"])
        elif event["kind"] == "would-fire":
            for action in data.get("actions", ()):
                dry_run.setdefault(_written(action), at)
    for (kind, target), (at, slices) in fired.items():
        if kind == "webhook":
            # Messages of an endpoint leave in order: what came after the oldest one that waits has not left either.
            late = target in waiting and waiting[target] <= at
            text = f"{target} is still to be told: its webhook waits" if late else f"told {target} by webhook"
            actions.append(ActionTaken(at, kind, text))
        else:
            actions.append(_action(incident, kind, at, list(dict.fromkeys(slices)), decisions))
    actions += [
        ActionTaken(at, "would-fire", f"dry run: it would {' '.join(action).strip()}") for action, at in dry_run.items()
    ]
    actions += _in_force(incident, {kind for kind, _ in fired}, decisions)
    return tuple(sorted(actions, key=lambda action: (action.at, action.kind, action.text)))


def _within(incident: Incident, event: Json) -> bool:
    """Whether it happened to the incident's contract while the incident lasted."""
    until = float("inf") if incident.until is None else incident.until
    return bool(event["contract"] == incident.contract and incident.since <= event["at"] <= until)


def _in_force(incident: Incident, known: Collection[str], decisions: Json) -> Iterable[ActionTaken]:
    """What is in force for its slices, though the event that says so is not among those that were given."""
    routes = [("route", one) for one in decisions["routes"] if one["avoid"] == incident.kernel_inference]
    slices = {one.slice for one in incident.cells}
    held: dict[str, list[tuple[float, str]]] = {}
    for kind, one in [*routes, *((one["kind"], one) for one in decisions["directives"])]:
        if kind not in known and one["contract"] == incident.contract and one["slice"] in slices:
            held.setdefault(kind, []).append((one["since"], one["slice"]))
    for kind, places in held.items():
        first, _ = min(places)
        yield _action(incident, kind, first, list(dict.fromkeys(slice for _, slice in sorted(places))), decisions)


def _concerns(incident: Incident, data: Json) -> bool:
    """Whether what a person did to a slice or a clause, or to all of them, is about an incident."""
    slice, clause = data.get("slice"), data.get("clause")
    slices, clauses = {one.slice for one in incident.cells}, {one.clause for one in incident.cells}
    return slice in {None, "all", *slices} and clause in {None, *clauses}


def _carried_out(data: Json) -> Iterable[tuple[str, str]]:
    """Kind and target of every action of an alert's event; nobody is told of one that is silenced."""
    for action in data.get("actions", ()):
        kind, target = _written(action)
        if not (data.get("silenced") and kind in {"notify", "webhook"}):
            yield kind, target


def _written(action: Any) -> tuple[str, str]:
    """Kind and target of an action as a contract writes it: `notify`, or `{webhook: pager}`."""
    return (action, "") if isinstance(action, str) else next(iter(action.items()))


def _action(incident: Incident, kind: str, at: float, slices: Sequence[str], decisions: Json) -> ActionTaken:
    where = listed([place(name) for name in slices])
    if kind == "route":
        held = {
            route["slice"]
            for route in decisions["routes"]
            if (route["contract"], route["avoid"]) == (incident.contract, incident.kernel_inference)
        }
        text = f"{where} routed to the training kernel"
        return ActionTaken(at, kind, text, in_force=bool(held & set(slices)))
    if kind == "notify":
        return ActionTaken(at, kind, "announced in the log")
    text = {
        "sample-more": "recorders asked to sample more",
        "hold-promotion": "promotions held",
        "quarantine-rollouts": f"rollouts of {where} quarantined",
        "resync-weights": "trainers asked to send the weights again",
        "halt": "trainers told to halt",
    }.get(kind, kind)
    asked = any((one["contract"], one["kind"]) == (incident.contract, kind) for one in decisions["directives"])
    return ActionTaken(at, kind, text, in_force=asked)
