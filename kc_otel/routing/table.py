"""The decision table: which kernel serves a slice, and what else a firing contract asks of everyone.

A route says: for this contract and slice, avoid this version of the inference kernel and use the training kernel,
because of this clause, since then. It stays after the alert has resolved, because an alert resolves when the traffic
has moved away, not when the kernel is mended; a person resumes it, or `until` passes. A version that is rolled out
later is not avoided. A directive lasts as long as the alert that asked for it.

The table is a value. Its version counts up when its content changes and only then, so `version` is all that a client
needs to compare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.escalation.alerts import Transition, What

__all__ = [
    "INFERENCE_KERNEL",
    "TRAIN_KERNEL",
    "DecisionTable",
    "Directive",
    "DirectiveKind",
    "Resumption",
    "Route",
    "apply",
    "forget",
    "resume",
]

TRAIN_KERNEL: Final = "train-kernel"
INFERENCE_KERNEL: Final = "inference-kernel"

_KEPT_RESUMPTIONS: Final = 50


class DirectiveKind(StrEnum):
    """What a directive asks for."""

    SAMPLING = "sample-more"
    HOLD_PROMOTION = "hold-promotion"
    QUARANTINE_ROLLOUTS = "quarantine-rollouts"
    HALT = "halt"


_DIRECTIVES: Final = frozenset(kind.value for kind in DirectiveKind)


@dataclass(frozen=True, slots=True, order=True)
class Route:
    """A slice is kept away from one version of the inference kernel.

    Attributes:
        contract: metadata.name.
        slice: Name of the slice; `all` for every request.
        avoid: Short fingerprint of the inference kernel version that is not used.
        train: Short fingerprint of the training kernel version that was healthy beside it.
        kernel: Kernel used instead.
        clause: Clause that broke.
        reason: One sentence.
        since: Unix time, seconds.
        until: Unix time at which the route ends by itself, seconds; None when a person has to end it.
    """

    contract: str
    slice: str
    avoid: str
    train: str
    kernel: str
    clause: str
    reason: str
    since: float
    until: float | None = None


@dataclass(frozen=True, slots=True, order=True)
class Directive:
    """What a firing alert asks of recorders, promotion and training loops.

    Attributes:
        contract: metadata.name.
        kind: sample-more, hold-promotion, quarantine-rollouts or halt.
        slice: Slice that broke; it narrows quarantine-rollouts, the other kinds hold for the whole contract.
        reason: One sentence; never empty.
        since: Unix time, seconds.
        fingerprint: The alert that asked; the directive ends when it resolves.
    """

    contract: str
    kind: DirectiveKind
    slice: str
    reason: str
    since: float
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Resumption:
    """A person gave a slice back to the inference kernel.

    Attributes:
        contract: metadata.name.
        slice: Name of the slice; None for every slice.
        by: Who.
        why: Their reason.
        at: Unix time, seconds.
        versions: Inference kernel versions that are no longer avoided.
    """

    contract: str
    slice: str | None
    by: str
    why: str
    at: float
    versions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DecisionTable:
    """What the evaluator publishes.

    Attributes:
        version: Counts up with every change of content.
        at: Unix time of the last change, seconds.
        routes: Sorted by contract, slice and avoided version.
        directives: Sorted by contract, kind and slice.
        resumptions: The latest ones, oldest first.
    """

    version: int = 0
    at: float = 0.0
    routes: tuple[Route, ...] = ()
    directives: tuple[Directive, ...] = ()
    resumptions: tuple[Resumption, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The table as a JSON object, the body of the API's answer."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> DecisionTable:
        """The table that `to_json` wrote; fields that a later version added are ignored.

        Raises:
            KeyError: If a field is missing.
            TypeError: If it is not such an object.
            ValueError: If a value is not one of its kind.
        """
        return cls(
            version=int(plain["version"]),
            at=float(plain["at"]),
            routes=tuple(Route(**_known(Route, route)) for route in plain["routes"]),
            directives=tuple(
                Directive(**{**_known(Directive, one), "kind": DirectiveKind(one["kind"])})
                for one in plain["directives"]
                if one["kind"] in _DIRECTIVES
            ),
            resumptions=tuple(
                Resumption(**{**_known(Resumption, one), "versions": tuple(one["versions"])})
                for one in plain["resumptions"]
            ),
        )


def apply(table: DecisionTable, transitions: Sequence[Transition], contract: Contract, now: float) -> DecisionTable:
    """The table after what fired and resolved in one evaluation, and after routes whose time has passed.

    Only `route: train-kernel` adds a route: the inference kernel is where traffic goes without one. Nothing is routed
    where there is no version to avoid (no data yet, invalid input), where the pair's two versions are the same, or
    where the version to avoid is the training kernel that another route of the contract sends traffic to: the last
    healthy kernel is never routed away.

    Raises:
        ValueError: If a transition belongs to another contract.
    """
    for transition in transitions:
        if transition.contract != contract.name:
            raise ValueError(f"a transition of {transition.contract!r} was given with contract {contract.name!r}")
    routes = [route for route in table.routes if route.until is None or now < route.until]
    directives = list(table.directives)
    for transition in transitions:
        directives = [one for one in directives if one.fingerprint != transition.fingerprint]
        if transition.what is What.RESOLVED:
            continue
        directives += [
            Directive(
                contract.name, DirectiveKind(action.kind), transition.cell.slice, _reason(transition),
                transition.started_at, transition.fingerprint,
            )
            for action in transition.actions
            if action.kind in _DIRECTIVES
        ]  # fmt: skip
        if any(action.kind == "route" and action.target == TRAIN_KERNEL for action in transition.actions):
            routes += _route(routes, transition)
    return _changed(table, routes, directives, table.resumptions, now)


def resume(table: DecisionTable, contract: str, slice: str | None, by: str, why: str, now: float) -> DecisionTable:
    """Give a slice back to the inference kernel.

    Args:
        table: The table in force.
        contract: metadata.name.
        slice: Name of the slice, `all` for the routes of all traffic, or None for every route of the contract.
        by: Who decides this.
        why: Their reason; both are kept in the table.
        now: Unix time, seconds.

    Raises:
        ValueError: If nobody or no reason is named.
        LookupError: If there is no such route.
    """
    if not by.strip() or not why.strip():
        raise ValueError("say who resumes and why; both are kept")
    ended = [route for route in table.routes if route.contract == contract and slice in {None, route.slice}]
    if not ended:
        where = f"slice {slice!r} of {contract!r}" if slice else f"any slice of {contract!r}"
        raise LookupError(f"no route is in force for {where}")
    kept = [route for route in table.routes if route not in ended]
    versions = tuple(sorted({route.avoid for route in ended}))
    resumptions = (*table.resumptions, Resumption(contract, slice, by, why, now, versions))
    return _changed(table, kept, table.directives, resumptions[-_KEPT_RESUMPTIONS:], now)


def forget(table: DecisionTable, contract: str, now: float) -> DecisionTable:
    """The table without the routes and directives of a contract that is no longer served."""
    routes = [route for route in table.routes if route.contract != contract]
    directives = [one for one in table.directives if one.contract != contract]
    return _changed(table, routes, directives, table.resumptions, now)


def _route(routes: Iterable[Route], transition: Transition) -> list[Route]:
    cell = transition.cell
    own = [route for route in routes if route.contract == cell.contract]
    avoid = cell.kernel_inference
    if not avoid or avoid == cell.kernel_train or any(route.train == avoid for route in own):
        return []
    if any(route.slice == cell.slice and route.avoid == avoid for route in own):
        return []
    return [
        Route(
            contract=cell.contract, slice=cell.slice, avoid=avoid, train=cell.kernel_train, kernel=TRAIN_KERNEL,
            clause=cell.clause, reason=_reason(transition), since=transition.started_at,
        )
    ]  # fmt: skip


def _reason(transition: Transition) -> str:
    return transition.verdict.reason or f"{transition.cell.clause} is {transition.verdict.status}"


def _changed(
    table: DecisionTable,
    routes: Iterable[Route],
    directives: Iterable[Directive],
    resumptions: tuple[Resumption, ...],
    now: float,
) -> DecisionTable:
    ordered = tuple(sorted(routes, key=lambda route: (route.contract, route.slice, route.avoid)))
    asked = tuple(sorted(directives))
    if (ordered, asked, resumptions) == (table.routes, table.directives, table.resumptions):
        return table
    return replace(table, version=table.version + 1, at=now, routes=ordered, directives=asked, resumptions=resumptions)


def _known(kind: type, plain: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in plain.items() if name in names}
