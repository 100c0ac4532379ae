"""The decision table: which kernel serves a slice, and what else a firing contract asks of everyone.

A route says: for this contract and slice, avoid this version of the inference kernel and use the training kernel,
because of this clause, since then. It stays after the alert has resolved, because an alert resolves when the traffic
has moved away, not when the kernel is mended; a person resumes it, or `until` passes. A version that is rolled out
later is not avoided. A directive lasts as long as the alert that asked for it.

A person's pin says which kernel serves a slice, whatever routes say and whether or not the evaluator is there. A
canary gives a version of the inference kernel a share of the requests that neither a pin nor a route has decided.

The table is a value. Its version counts up when its content changes and only then. An evaluator that has lost its state
counts from the start, so a client compares `tag` too, which is made of the content.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, TypeVar

from pydantic import BeforeValidator

from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL
from kc_otel.judge.decisions.entries import Canary, Directive, DirectiveKind, Pin, Resumption, Route
from kc_otel.judge.escalation.alerts import Transition, What
from kc_otel.judge.plain_json import read_plain, to_json

__all__ = [
    "INFERENCE_KERNEL",
    "TRAIN_KERNEL",
    "Canary",
    "DecisionTable",
    "Directive",
    "DirectiveKind",
    "Pin",
    "Resumption",
    "Route",
    "apply",
    "changed",
    "forget",
    "kept_from",
    "pin",
    "remove_canary",
    "resume",
    "set_canary",
    "unpin",
]


TRAIN_KERNEL: Final = "train-kernel"
INFERENCE_KERNEL: Final = "inference-kernel"

_KEPT_RESUMPTIONS: Final = 50
_DIRECTIVES: Final = frozenset(kind.value for kind in DirectiveKind)


_SENT: Final = frozenset({"version", "at", "routes", "directives", "resumptions"})
"""Fields without which an object is no table."""


def _known(directives: Any) -> Any:
    """A later version may ask for what nobody here can do."""
    if not isinstance(directives, list):
        return directives
    return [one for one in directives if not isinstance(one, Mapping) or one.get("kind") in _DIRECTIVES]


@dataclass(frozen=True, slots=True)
class DecisionTable:
    """What the evaluator publishes.

    Attributes:
        version: Counts up with every change of content.
        at: Unix time of the last change, seconds.
        routes: Sorted by contract, slice and avoided version.
        directives: Sorted by contract, kind and slice.
        resumptions: The latest ones, oldest first.
        pins: Sorted by contract and slice; one for each.
        canaries: Sorted by contract, slice and version; one for each.
    """

    version: int = 0
    at: float = 0.0
    routes: tuple[Route, ...] = ()
    directives: Annotated[tuple[Directive, ...], BeforeValidator(_known)] = ()
    resumptions: tuple[Resumption, ...] = ()
    pins: tuple[Pin, ...] = ()
    canaries: tuple[Canary, ...] = ()

    @property
    def tag(self) -> str:
        """16 hexadecimal digits that tell this table from another one of the same version."""
        return hashlib.blake2b(to_json(self).encode(), digest_size=8).hexdigest()

    @classmethod
    def from_plain(cls, plain: Any) -> DecisionTable:
        """The table that an evaluator sent; fields and kinds of directives that a later version added are ignored.

        Raises:
            ValueError: If it is not such an object.
        """
        table = read_plain(cls, plain)
        if missing := _SENT - plain.keys():
            raise ValueError(
                f"a decision table has {', '.join(sorted(_SENT))}; {', '.join(sorted(missing))} is missing"
            )
        return table


Timed = TypeVar("Timed", Route, Pin)


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
    routes = list(_in_force(table.routes, now))
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
    return changed(table, now, routes=routes, directives=directives, pins=_in_force(table.pins, now))


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
    return changed(table, now, routes=kept, resumptions=resumptions[-_KEPT_RESUMPTIONS:])


def pin(table: DecisionTable, wanted: Pin) -> DecisionTable:
    """Let a person decide which kernel serves a slice; it takes the place of an earlier pin of that slice.

    Raises:
        ValueError: If nobody or no reason is named, the kernel is not one, or the pin has ended already.
    """
    if not wanted.by.strip() or not wanted.why.strip():
        raise ValueError("say who pins and why; both are kept")
    if wanted.kernel not in {TRAIN_KERNEL, INFERENCE_KERNEL}:
        raise ValueError(f"kernel: {wanted.kernel!r} is not a kernel; write {TRAIN_KERNEL} or {INFERENCE_KERNEL}")
    if wanted.until is not None and wanted.until <= wanted.at:
        raise ValueError("until: lies in the past; give a later time, or none for a pin that a person ends")
    others = [one for one in table.pins if (one.contract, one.slice) != (wanted.contract, wanted.slice)]
    return changed(table, wanted.at, pins=[*others, wanted])


def unpin(table: DecisionTable, contract: str, slice: str | None, now: float) -> DecisionTable:
    """End the pin of a slice, or with None every pin of the contract.

    Raises:
        LookupError: If there is no such pin.
    """
    kept = [one for one in table.pins if one.contract != contract or slice not in {None, one.slice}]
    if len(kept) == len(table.pins):
        where = f"slice {slice!r} of {contract!r}" if slice else f"any slice of {contract!r}"
        raise LookupError(f"no pin is in force for {where}")
    return changed(table, now, pins=kept)


def forget(table: DecisionTable, contract: str, now: float) -> DecisionTable:
    """The table without what it says of a contract that is no longer served."""
    routes = [route for route in table.routes if route.contract != contract]
    directives = [one for one in table.directives if one.contract != contract]
    pins = [one for one in table.pins if one.contract != contract]
    canaries = [one for one in table.canaries if one.contract != contract]
    return changed(table, now, routes=routes, directives=directives, pins=pins, canaries=canaries)


def kept_from(table: DecisionTable, contract: str) -> Callable[[str, str], bool]:
    """Says of a slice and a version of the inference kernel whether the slice's requests do not reach it.

    The newest pin of the slice or of all traffic decides, else a route does.
    """
    routed = {(route.slice, route.avoid) for route in table.routes if route.contract == contract}
    pins = sorted((one for one in table.pins if one.contract == contract), key=lambda one: one.at)
    pinned = {one.slice: one for one in pins}

    def kept(slice: str, version: str) -> bool:
        decided = [pinned[name] for name in {slice, ALL} if name in pinned]
        if decided:
            return max(decided, key=lambda one: one.at).kernel == TRAIN_KERNEL
        return bool(version) and not routed.isdisjoint({(slice, version), (ALL, version)})

    return kept


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


def _in_force(found: Iterable[Timed], now: float) -> tuple[Timed, ...]:
    return tuple(one for one in found if one.until is None or now < one.until)


def changed(
    table: DecisionTable,
    now: float,
    *,
    routes: Iterable[Route] | None = None,
    directives: Iterable[Directive] | None = None,
    resumptions: tuple[Resumption, ...] | None = None,
    pins: Iterable[Pin] | None = None,
    canaries: Iterable[Canary] | None = None,
) -> DecisionTable:
    """The table with what is given in place of what it had, sorted, and a new version where that changes anything."""
    after = replace(
        table,
        routes=table.routes
        if routes is None
        else tuple(sorted(routes, key=lambda route: (route.contract, route.slice, route.avoid))),
        directives=table.directives if directives is None else tuple(sorted(directives)),
        resumptions=table.resumptions if resumptions is None else resumptions,
        pins=table.pins if pins is None else tuple(sorted(pins, key=lambda one: (one.contract, one.slice))),
        canaries=table.canaries
        if canaries is None
        else tuple(sorted(canaries, key=lambda one: (one.contract, one.slice, one.version))),
    )
    return table if after == table else replace(after, version=table.version + 1, at=now)


def set_canary(table: DecisionTable, wanted: Canary) -> DecisionTable:
    """Give a version of the inference kernel a share of a slice's requests, in place of the share that it had.

    Raises:
        ValueError: If the weight is no share, the version or the reason is empty, or it has ended already.
    """
    if not 0.0 <= wanted.weight <= 1.0:
        raise ValueError(f"weight: {wanted.weight!r} is not a share; write a number from 0 to 1, such as 0.05 for 5 %")
    if not wanted.version.strip():
        raise ValueError("version: it is empty; give the short fingerprint of the inference kernel version")
    if not wanted.reason.strip():
        raise ValueError("reason: it is empty; say why the version serves this share")
    if wanted.until is not None and wanted.until <= wanted.since:
        raise ValueError("until: lies before since; give a later time, or none for a canary without an end")
    place = (wanted.contract, wanted.slice, wanted.version)
    others = [one for one in table.canaries if (one.contract, one.slice, one.version) != place]
    return changed(table, wanted.since, canaries=[*others, wanted])


def remove_canary(
    table: DecisionTable, contract: str, version: str, slice: str | None = None, *, now: float
) -> DecisionTable:
    """Lift the limit on a version of the inference kernel: from now on it serves every request that it is asked for.

    Args:
        table: The table in force.
        contract: metadata.name.
        version: Short fingerprint of the inference kernel version.
        slice: Name of the slice; None for every slice.
        now: Unix time, seconds.

    Returns:
        The table without it, or the same table where there is no such canary.
    """
    kept = [
        one
        for one in table.canaries
        if (one.contract, one.version) != (contract, version) or slice not in {None, one.slice}
    ]
    return changed(table, now, canaries=kept)
