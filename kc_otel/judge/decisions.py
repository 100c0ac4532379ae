"""The decision table: which kernel serves a slice, and what else a firing contract asks of everyone.

A route avoids a version of the inference kernel on a slice, because of a clause. It stays after the alert has resolved,
because an alert resolves when the traffic has moved away, not when the kernel is mended; a person resumes it. A
directive lasts as long as the alert that asked for it; a quarantine and a halt last while its breach is unproven, too.
A person's pin says which kernel serves a slice, whatever routes say. A canary gives a version a share of the requests
that neither a pin to the training kernel nor a route has decided: a pin to the inference kernel lifts no limit of a
version that is being tried or was rolled back. A promoted version alone serves while the evaluator cannot be asked.

The table is a value, whose version counts up when its content changes and only then. An evaluator that has lost its
state counts from the start, so a client compares `tag` too, which is made of the content. Routing processes read the
table, so that nothing here needs more than the standard library.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal

from kc_otel.contract.slices import ALL, disjoint

if TYPE_CHECKING:
    from kc_otel.contract.model import Contract
    from kc_otel.judge.escalation.alerts import Alert

TRAIN_KERNEL: Final = "train-kernel"
INFERENCE_KERNEL: Final = "inference-kernel"
LATE_SECONDS: Final = 30.0
"""Seconds since the last evaluation after which an evaluator is late, for /readyz, routers and `status` alike."""


class DirectiveKind(StrEnum):
    """Kind of a directive."""

    SAMPLING = "sample-more"
    LOCATE = "locate"
    HOLD_PROMOTION = "hold-promotion"
    QUARANTINE_ROLLOUTS = "quarantine-rollouts"
    RESYNC_WEIGHTS = "resync-weights"
    HALT = "halt"


@dataclass(frozen=True, slots=True, order=True)
class Route:
    """An order that keeps a slice, or `all` requests, away from a version of the inference kernel."""

    contract: str
    slice: str
    avoid: str
    """Version of the inference kernel that is not used."""
    train: str
    """Version of the training kernel that was healthy beside it."""
    kernel: str
    clause: str
    reason: str
    since: float
    slice_id: str = ""
    """`Contract.slice_ids` of the slice as it was ordered; empty for all traffic."""
    outdated: str = ""
    """Why the route does not do what was ordered: the contract has changed since. Empty while it does."""


@dataclass(frozen=True, slots=True, order=True)
class Directive:
    """A request by a firing alert to recorders, promotion, training loops or machines that can locate."""

    contract: str
    kind: DirectiveKind
    slice: str
    """Slice that broke; it narrows quarantine-rollouts, the other kinds hold for the whole contract."""
    reason: str
    since: float
    fingerprint: str
    """The alert that asked; see `released` for when the directive ends."""
    version: str = ""
    """Of the inference kernel that it is about; empty where none has reported, which is about any."""

    def is_about(self, version: str | None) -> bool:
        """Return True if it is about a version of the inference kernel, or of an unknown one, with None."""
        return not version or self.version in {"", version}


@dataclass(frozen=True, slots=True, order=True)
class Pin:
    """A person decided which kernel, `train-kernel` or `inference-kernel`, serves a slice, or `all` requests."""

    contract: str
    slice: str
    kernel: str
    by: str
    why: str
    at: float
    until: float | None = None
    """None when a person has to end it."""
    slice_id: str = ""
    """`Contract.slice_ids` of the slice as it was pinned; empty for all traffic."""
    outdated: str = ""
    """Why the pin does not do what was ordered: the contract has changed since. Empty while it does."""
    meets: tuple[str, ...] = ()
    """Other slices that may share requests with its slice."""

    def overrides(self, slice: str) -> bool:
        """Return True if it may send requests of a slice to the inference kernel, whatever was ordered of them."""
        covered = slice == self.slice or ALL in {slice, self.slice} or slice in self.meets
        return covered and self.kernel == INFERENCE_KERNEL


@dataclass(frozen=True, slots=True, order=True)
class Canary:
    """A version of the inference kernel that is being promoted serves a share of all requests."""

    contract: str
    version: str
    weight: float
    """Share of requests that it serves, 0 to 1; 0 keeps it from live requests, as while it is in shadow."""
    reason: str
    since: float


@dataclass(frozen=True, slots=True, order=True)
class Promoted:
    """A version of the inference kernel that passed every stage: it serves even while the evaluator does not answer."""

    contract: str
    version: str
    since: float


@dataclass(frozen=True, slots=True)
class DecisionTable:
    """Decision table, as the evaluator publishes it; its entries are sorted."""

    version: int = 0
    at: float = 0.0
    routes: tuple[Route, ...] = ()
    directives: tuple[Directive, ...] = ()
    pins: tuple[Pin, ...] = ()
    """One for each contract and slice."""
    canaries: tuple[Canary, ...] = ()
    """One for each contract and version."""
    promoted: tuple[Promoted, ...] = ()

    @property
    def tag(self) -> str:
        """16 hexadecimal digits that tell this table from another one of the same version."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=8).hexdigest()

    def to_json(self) -> str:
        """Return the table as compact JSON, which `from_plain` reads."""
        return json.dumps(asdict(self), separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_plain(cls, plain: Any) -> DecisionTable:
        """Read the table that an evaluator of any later version sent; without pydantic, which routing does not need."""
        if not isinstance(plain, Mapping) or not plain.keys() >= _REQUIRED:
            raise ValueError(f"a decision table is an object that has {', '.join(sorted(_REQUIRED))}")
        lists = {
            name: tuple(_entry(kind, entry, name) for entry in _list(plain, name)) for name, kind in _KINDS.items()
        }
        directives = tuple(
            _entry(Directive, entry, "directives")
            for entry in _list(plain, "directives")
            if not isinstance(entry, Mapping) or str(entry.get("kind", "halt")) in DIRECTIVE_KINDS
        )
        version, at = _value("int", plain["version"], "version"), _value("float", plain["at"], "at")
        return cls(version=version, at=at, directives=directives, **lists)


_REQUIRED: Final = frozenset({"version", "at", "routes", "directives"})
"""Fields without which an object is no table."""
_KINDS: Final[Mapping[str, type[Any]]] = {"routes": Route, "pins": Pin, "canaries": Canary, "promoted": Promoted}
DIRECTIVE_KINDS: Final = frozenset(kind.value for kind in DirectiveKind)
_KEPT_ASIDE: Final = ("routes", "pins")
"""Entries that only a person ends, also while their contract is not served."""
_PROTECTING: Final = frozenset({DirectiveKind.QUARANTINE_ROLLOUTS, DirectiveKind.HALT})


def _list(plain: Mapping[str, Any], name: str) -> Sequence[Any]:
    found = plain.get(name, ())
    if not isinstance(found, list | tuple):
        raise ValueError(f"{name}: not a list")  # noqa: TRY004 - readers of JSON catch ValueError
    return found


def _entry(kind: type[Any], plain: Any, where: str) -> Any:
    """An entry of a list, without the fields that only a later version knows."""
    if not isinstance(plain, Mapping):
        raise ValueError(f"{where}: not an object")  # noqa: TRY004
    lacking = [field.name for field in fields(kind) if field.default is MISSING and field.name not in plain]
    if lacking:
        raise ValueError(f"{where}: {', '.join(lacking)} is missing")
    known = [field for field in fields(kind) if field.name in plain]
    return kind(**{field.name: _value(str(field.type), plain[field.name], f"{where}.{field.name}") for field in known})


def _value(kind: str, value: Any, where: str) -> Any:
    """A value of a field's type, by the type's name."""
    if value is None and kind.endswith(" | None"):
        return None
    match kind.removesuffix(" | None"):
        case "str" if isinstance(value, str):
            return value
        case "int" if isinstance(value, int) and not isinstance(value, bool):
            return value
        case "float" if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        case "DirectiveKind" if isinstance(value, str):
            return DirectiveKind(value)
        case "tuple[str, ...]" if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
    raise ValueError(f"{where}: {value!r:.40} is not of type {kind}")


def apply(table: DecisionTable, edges: Iterable[Alert], contract: Contract, now: float) -> DecisionTable:
    """The table after what fired and resolved in one evaluation, and after pins whose time has passed.

    Only `route: train-kernel` adds a route: the inference kernel is where traffic goes without one. Nothing is routed
    where there is no version to avoid (no data yet), where the pair's two versions are the same, or where the version
    to avoid is the training kernel that another route of the contract sends traffic to: the last healthy kernel is
    never routed away.
    """
    routes = list(table.routes)
    directives = list(table.directives)
    for alert in edges:
        directives = [directive for directive in directives if directive.fingerprint != alert.fingerprint]
        if not alert.fires:
            continue
        directives += [
            Directive(
                contract.name, DirectiveKind(action.kind), alert.cell.slice, _reason(alert),
                alert.started_at, alert.fingerprint, alert.cell.kernel_inference,
            )
            for action in alert.actions
            if action.kind in DIRECTIVE_KINDS
        ]  # fmt: skip
        if any(action.kind == "route" and action.target == TRAIN_KERNEL for action in alert.actions):
            routes = _routed(routes, alert, contract)
    pins = [pin for pin in table.pins if pin.until is None or now < pin.until]
    return changed(table, now, routes=routes, directives=directives, pins=pins)


def released(
    table: DecisionTable, contract: str, firing: Collection[str], unproven: Collection[str], now: float
) -> DecisionTable:
    """The table without directives of a contract whose alert, by its fingerprint, is over.

    Training that a breach keeps from rollouts, or that it stopped, stays so while the breach is unproven.
    """
    kept = [
        directive
        for directive in table.directives
        if directive.contract != contract
        or directive.fingerprint in firing
        or (directive.kind in _PROTECTING and directive.fingerprint in unproven)
    ]
    return changed(table, now, directives=kept)


def pin(table: DecisionTable, wanted: Pin) -> DecisionTable:
    """Pin a slice in place of an earlier pin of it; ValueError if the pin has ended already."""
    if wanted.until is not None and wanted.until <= wanted.at:
        raise ValueError("until: lies in the past; give a later time, or none for a pin that a person ends")
    others = [pin for pin in table.pins if (pin.contract, pin.slice) != (wanted.contract, wanted.slice)]
    return changed(table, wanted.at, pins=[*others, wanted])


def lift(
    table: DecisionTable, kind: Literal["route", "pin"], contract: str, slice: str | None, now: float
) -> DecisionTable:
    """End a slice's route or pin, or with None every one of the contract; LookupError if there is none."""
    entries: tuple[Route | Pin, ...] = getattr(table, f"{kind}s")
    kept = [entry for entry in entries if entry.contract != contract or slice not in {None, entry.slice}]
    if len(kept) == len(entries):
        where = f"slice {slice!r} of {contract!r}" if slice else f"any slice of {contract!r}"
        raise LookupError(f"no {kind} is in force for {where}")
    return changed(table, now, **{f"{kind}s": kept})


def parted(
    table: DecisionTable, aside: DecisionTable, contracts: Collection[str], now: float
) -> tuple[DecisionTable, DecisionTable]:
    """Return the table of the contracts that are served, and the routes and pins of others, which wait for them."""
    found = {
        name: [*getattr(table, name), *getattr(aside, name)]
        for name in ("routes", "directives", "pins", "canaries", "promoted")
    }
    own = {name: [entry for entry in entries if entry.contract in contracts] for name, entries in found.items()}
    others = {name: [entry for entry in found[name] if entry.contract not in contracts] for name in _KEPT_ASIDE}
    return changed(table, now, **own), changed(DecisionTable(), now, **others)


def without_slice(contract: Contract, slice: str) -> str:
    """Say that a contract has no such slice any more, as the end of a sentence; empty where it has."""
    return "" if slice == ALL or slice in contract.slices else "it has no effect: the contract no longer has this slice"


def with_contract(table: DecisionTable, contract: Contract, now: float) -> DecisionTable:
    """Return the table whose routes and pins say what a changed contract does to them; only a person ends them."""

    def outdated(order: Route | Pin) -> str:
        if (gone := without_slice(contract, order.slice)) or not order.slice_id:
            return gone
        same = contract.slice_ids[order.slice] == order.slice_id
        moved = "what broke may be outside of it" if order.kernel == TRAIN_KERNEL else "other requests may be in it"
        return "" if same else f"the slice was redefined since: {moved} now"

    def pin_now(pin: Pin) -> Pin:
        why = outdated(pin)
        # Where its slice was another, routers may have either definition.
        meets = {*_meeting(contract, pin.slice), *(pin.meets if why else ())}
        return replace(pin, outdated=why, meets=tuple(sorted(meets)))

    routes = [
        replace(route, outdated=outdated(route)) if route.contract == contract.name else route for route in table.routes
    ]
    return changed(
        table, now, routes=routes, pins=[pin_now(pin) if pin.contract == contract.name else pin for pin in table.pins]
    )


def as_defined(pin: Pin, contract: Contract) -> Pin:
    """Return a new pin with its slice's definition, and the slices that it meets, by a contract."""
    return replace(pin, slice_id=contract.slice_ids.get(pin.slice, ""), meets=tuple(_meeting(contract, pin.slice)))


def _meeting(contract: Contract, slice: str) -> list[str]:
    """Names of the other slices that may share requests with a slice, sorted."""
    if slice not in contract.slices:
        return []
    own = contract.slices[slice].conditions
    others = sorted(contract.slices.keys() - {slice})
    return [name for name in others if not disjoint(own, contract.slices[name].conditions)]


def deciding_pin(table: DecisionTable, contract: str, slice: str) -> Pin | None:
    """Return the newest pin of a slice, of all traffic, or to the inference kernel of what may share its requests.

    None where there is none. Routers let the newest pin of any slice that a request belongs to decide.
    """
    covering = (
        pin for pin in table.pins if pin.contract == contract and (pin.slice in {slice, ALL} or pin.overrides(slice))
    )
    return max(covering, key=lambda pin: (pin.at, pin.overrides(slice)), default=None)


def overriding_pin(table: DecisionTable, contract: str, slice: str, version: str) -> tuple[Pin, float] | None:
    """Return the pin that wins over the orders that keep a slice from a version, and when the newest was given."""
    newest = deciding_pin(table, contract, slice)
    if newest is None or not newest.overrides(slice):
        return None
    routes = [(route.contract, route.slice, route.since) for route in table.routes if route.avoid == version]
    pins = [(pin.contract, pin.slice, pin.at) for pin in table.pins if pin.kernel == TRAIN_KERNEL]
    given = [at for of, name, at in (*routes, *pins) if of == contract and name in {slice, ALL}]
    return (newest, max(given)) if given else None


def sharing(table: DecisionTable, contract: str) -> Mapping[str, float]:
    """Return each version's share of a contract's requests; the promoted one has what canaries leave."""
    shares = {share.version: share.weight for share in table.canaries if share.contract == contract and share.weight}
    if (left := 1.0 - sum(shares.values())) > 0.0:
        shares |= {of.version: left for of in table.promoted if of.contract == contract}
    return shares


def kept_since(table: DecisionTable, contract: str) -> Callable[[str, str], float | None]:
    """Says of a slice and a version of the inference kernel since when its requests are to be kept from it.

    `deciding_pin` decides, else a route does, and a canary without a share. None where nothing is decided, which is not
    to say that anybody obeys what is. For an empty slice, what is ordered of all traffic, apart from pins of slices.
    """
    without_share = {
        (ALL, canary.version): canary.since
        for canary in table.canaries
        if (canary.contract, canary.weight) == (contract, 0)
    }
    ordered = without_share | {
        (place := (route.slice, route.avoid)): min(route.since, without_share.get(place, route.since))
        for route in table.routes
        if route.contract == contract
    }

    def kept(slice: str, version: str) -> float | None:
        newest = deciding_pin(table, contract, slice)
        if newest is not None and newest.kernel == TRAIN_KERNEL:
            return newest.at
        found = ordered if newest is None else without_share
        return min(
            (found[name, version] for name in {slice, ALL} if version and (name, version) in found), default=None
        )

    return kept


def _routed(routes: list[Route], alert: Alert, contract: Contract) -> list[Route]:
    """Routes with the one that an alert orders, in place of one of the slice as it was defined before."""
    cell = alert.cell
    own = [route for route in routes if route.contract == cell.contract]
    avoid = cell.kernel_inference
    if not avoid or avoid == cell.kernel_train or any(route.train == avoid for route in own):
        return routes
    same = [route for route in own if (route.slice, route.avoid) == (cell.slice, avoid)]
    if not all(route.outdated for route in same):
        return routes
    ordered = Route(
        contract=cell.contract, slice=cell.slice, avoid=avoid, train=cell.kernel_train, kernel=TRAIN_KERNEL,
        clause=cell.clause, reason=_reason(alert), since=alert.started_at,
        slice_id=contract.slice_ids.get(cell.slice, ""),
    )  # fmt: skip
    return [*(route for route in routes if route not in same), ordered]


def _reason(alert: Alert) -> str:
    return alert.verdict.reason or f"{alert.cell.clause} is {alert.verdict.status}"


def changed(table: DecisionTable, now: float, **entries: Iterable[Any]) -> DecisionTable:
    """Return the table with the entries of these fields replaced and sorted, under a new version if anything changes.

    Routes that a pin to the inference kernel kept from acting are in force since it has ended.
    """
    found = {name: tuple(own) for name, own in entries.items()}
    if "pins" in found:
        kept = {(pin.contract, pin.slice, pin.at) for pin in found["pins"]}
        ended = [pin for pin in table.pins if (pin.contract, pin.slice, pin.at) not in kept]
        again = {
            route: replace(route, since=now)
            for route in found.get("routes", table.routes)
            if any(pin.contract == route.contract and pin.overrides(route.slice) for pin in ended)
        }
        found["routes"] = tuple(again.get(route, route) for route in found.get("routes", table.routes))
    content: dict[str, Any] = {name: tuple(sorted(own)) for name, own in found.items()}
    after = replace(table, **content)
    return table if after == table else replace(after, version=table.version + 1, at=now)
