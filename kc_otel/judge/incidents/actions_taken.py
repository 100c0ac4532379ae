"""Actions taken on an incident, in words: by the escalation policy, from its alerts, and by people."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kc_otel.contract.slices import ALL
from kc_otel.contract.words import listed, moment, place
from kc_otel.judge.decisions.entries import DecisionTable, Route
from kc_otel.judge.incidents.incident import Incident, IncidentAction, IncidentState

_PROMOTION: Final = {
    "roll-back": "",
    "serves": "a version still serves after its rollback: its drift has been measured since",
}

_NONE: Final[Mapping[str, float]] = MappingProxyType({})


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


def actions_taken(
    incident: Incident,
    table: DecisionTable,
    waiting: Mapping[str, float],
    given_up: Mapping[str, float] = _NONE,
    disabled: Mapping[str, float] = _NONE,
) -> tuple[ActionTaken, ...]:
    """Return the actions taken, oldest first, and for each if it is in force.

    Args:
        incident: The incident.
        table: The decision table in force.
        waiting: Since when the oldest undelivered webhook of an endpoint waits, Unix seconds.
        given_up: When the newest webhook of an endpoint that it refused, or that expired, was written, Unix seconds.
        disabled: Since when an endpoint is sent nothing, because it answered HTTP 410, Unix seconds.
    """
    done = [_in_words(incident, action, table, waiting, given_up, disabled) for action in incident.actions]
    said = [ActionTaken(word.at, word.kind, word.text) for word in incident.words]
    return tuple(sorted([*done, *said], key=lambda action: (action.at, action.kind, action.text)))


def lifting_commands(incident: Incident, table: DecisionTable) -> tuple[str, ...]:
    """Return the commands that end the routes and pins left on an incident's slices."""
    slices = {cell.slice for cell in incident.cells}
    routed = [route.slice for route in _routed(incident, slices, table)]
    pinned = [pin.slice for pin in table.pins if pin.contract == incident.contract and pin.slice in {ALL, *slices}]

    def only(names: list[str]) -> str:
        return f" --slice {names[0]}" if len(set(names)) == 1 else ""

    lift = f"kc-otel route resume {incident.contract}{only(routed)} --why '...'"
    free = f"kc-otel route unpin {incident.contract}{only(pinned)} --why '...'"
    return (*[lift] * bool(routed), *[free] * bool(pinned))


def _in_words(
    incident: Incident,
    action: IncidentAction,
    table: DecisionTable,
    waiting: Mapping[str, float],
    given_up: Mapping[str, float],
    disabled: Mapping[str, float],
) -> ActionTaken:
    if action.dry_run:
        return ActionTaken(action.at, "would-fire", f"dry run: it would {action.kind} {action.target}".rstrip())
    if action.kind == "notify":
        return ActionTaken(action.at, action.kind, "announced in the log")
    if action.kind == "webhook":
        # Messages of an endpoint leave in order: those after the oldest waiting one have not left either.
        late = action.target in waiting and waiting[action.target] <= action.at
        text = f"the webhook to {action.target} is still waiting" if late else f"notified {action.target} by webhook"
        if not late and given_up.get(action.target, -math.inf) >= action.at:
            text = f"a webhook to {action.target} was given up: it was rejected or has expired"
        if late and action.target in disabled:
            since = moment(disabled[action.target])[11:16]
            text += f": the endpoint answered HTTP 410 at {since} UTC and is sent nothing more"
        return ActionTaken(action.at, action.kind, text)
    if action.kind in _PROMOTION:
        return ActionTaken(action.at, action.kind, _PROMOTION[action.kind] or action.target)
    where = listed([place(name) for name in action.slices])
    if action.kind == "route":
        routes = _routed(incident, action.slices, table)
        held = any(not route.outdated for route in routes)
        text = f"routing {where} to the training kernel was ordered"
        if routes and not held:
            text += f", but {routes[0].outdated}"
        elif held and incident.state is IncidentState.BROKEN and incident.ordered_at is not None:
            text += f", but {incident.obeyed_text}"
        return ActionTaken(action.at, action.kind, text, in_force=held)
    text = {
        "sample-more": "recorders asked to sample more",
        "locate": "machines asked to locate the operator",
        "hold-promotion": "promotions held",
        "quarantine-rollouts": f"trainers asked to quarantine rollouts of {where}",
        "resync-weights": "trainers asked to send the weights again",
        "halt": "trainers asked to halt",
    }.get(action.kind, action.kind)
    asked = any(
        (directive.contract, directive.kind) == (incident.contract, action.kind) for directive in table.directives
    )
    return ActionTaken(action.at, action.kind, text, in_force=asked)


def _routed(incident: Incident, slices: Collection[str], table: DecisionTable) -> list[Route]:
    return [
        route
        for route in table.routes
        if (route.contract, route.avoid) == (incident.contract, incident.kernel_inference) and route.slice in slices
    ]
