"""What was done about an incident, in words: by the escalation policy, from its alerts, and by people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kc_otel.contract.words import listed, place
from kc_otel.judge.decisions.table import DecisionTable
from kc_otel.judge.incidents.incident import Incident, IncidentAction

__all__ = ["ActionTaken", "actions_taken"]


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


def actions_taken(incident: Incident, table: DecisionTable, waiting: Mapping[str, float]) -> tuple[ActionTaken, ...]:
    """What was done, oldest first, and whether it holds.

    Args:
        incident: The incident.
        table: The decision table in force.
        waiting: Since when the oldest undelivered webhook of an endpoint waits, Unix seconds.
    """
    done = [_in_words(incident, one, table, waiting) for one in incident.actions]
    said = [ActionTaken(word.at, word.kind, word.text) for word in incident.words]
    return tuple(sorted([*done, *said], key=lambda action: (action.at, action.kind, action.text)))


def _in_words(
    incident: Incident, one: IncidentAction, table: DecisionTable, waiting: Mapping[str, float]
) -> ActionTaken:
    if one.dry_run:
        return ActionTaken(one.at, "would-fire", f"dry run: it would {one.kind} {one.target}".rstrip())
    if one.kind == "notify":
        return ActionTaken(one.at, one.kind, "announced in the log")
    if one.kind == "webhook":
        # Messages of an endpoint leave in order: what came after the oldest one that waits has not left either.
        late = one.target in waiting and waiting[one.target] <= one.at
        text = f"{one.target} is still to be told: its webhook waits" if late else f"told {one.target} by webhook"
        return ActionTaken(one.at, one.kind, text)
    where = listed([place(name) for name in one.slices])
    if one.kind == "route":
        held = _routed(incident, one.slices, table)
        return ActionTaken(one.at, one.kind, f"{where} routed to the training kernel", in_force=held)
    text = {
        "sample-more": "recorders asked to sample more",
        "locate": "machines asked to locate the operator",
        "hold-promotion": "promotions held",
        "quarantine-rollouts": f"rollouts of {where} quarantined",
        "resync-weights": "trainers asked to send the weights again",
        "halt": "trainers told to halt",
    }.get(one.kind, one.kind)
    asked = any((each.contract, each.kind) == (incident.contract, one.kind) for each in table.directives)
    return ActionTaken(one.at, one.kind, text, in_force=asked)


def _routed(incident: Incident, slices: Sequence[str], table: DecisionTable) -> bool:
    return any(
        (route.contract, route.avoid) == (incident.contract, incident.kernel_inference) and route.slice in slices
        for route in table.routes
    )
