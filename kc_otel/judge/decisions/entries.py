"""The decision table and what it is made of: routes, directives, pins, canaries, promotions.

Routing processes read it, so that nothing here needs more than the standard library.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Final

from kc_otel.contract.slices import ALL

TRAIN_KERNEL: Final = "train-kernel"
INFERENCE_KERNEL: Final = "inference-kernel"


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
    """Short fingerprint of the inference kernel version that is not used."""
    train: str
    """Short fingerprint of the training kernel version that was healthy beside it."""
    kernel: str
    """Used instead."""
    clause: str
    """The one that broke."""
    reason: str
    """One sentence."""
    since: float
    """Unix time, seconds."""
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
    """One sentence; never empty."""
    since: float
    """Unix time, seconds."""
    fingerprint: str
    """The alert that asked; the directive ends when it resolves."""


@dataclass(frozen=True, slots=True, order=True)
class Pin:
    """A person decided which kernel, `train-kernel` or `inference-kernel`, serves a slice, or `all` requests."""

    contract: str
    slice: str
    kernel: str
    by: str
    why: str
    at: float
    """Unix time, seconds."""
    until: float | None = None
    """Unix time at which the pin ends by itself, seconds; None when a person has to end it."""
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
    """A version of the inference kernel serves a share of all requests; the training kernel serves the others.

    It ends when the version's promotion does.
    """

    contract: str
    version: str
    weight: float
    """Share of requests that it serves, 0 to 1; 0 keeps it from live requests, as while it is in shadow."""
    reason: str
    """One sentence."""
    since: float
    """Unix time, seconds."""


@dataclass(frozen=True, slots=True, order=True)
class Promoted:
    """A version of the inference kernel that passed every stage: it serves even while the evaluator does not answer."""

    contract: str
    version: str
    since: float
    """Unix time, seconds."""


@dataclass(frozen=True, slots=True)
class DecisionTable:
    """Decision table, as the evaluator publishes it; its entries are sorted."""

    version: int = 0
    """Counts up with every change of content."""
    at: float = 0.0
    """Unix time of the last change, seconds."""
    routes: tuple[Route, ...] = ()
    directives: tuple[Directive, ...] = ()
    pins: tuple[Pin, ...] = ()
    """One for each contract and slice."""
    canaries: tuple[Canary, ...] = ()
    """One for each contract and version."""
    promoted: tuple[Promoted, ...] = ()
    """Versions that were promoted to full."""

    @property
    def tag(self) -> str:
        """16 hexadecimal digits that tell this table from another one of the same version."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=8).hexdigest()

    def to_json(self) -> str:
        """Return the table as compact JSON, which `from_plain` reads."""
        return json.dumps(asdict(self), separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_plain(cls, plain: Any) -> DecisionTable:
        """Read the table that an evaluator sent; fields and kinds of directives that a later version added are ignored.

        It is read by hand, because a serving process that routes has no need of pydantic.
        """
        if not isinstance(plain, Mapping):
            raise ValueError(f"a decision table is an object, not {type(plain).__name__}")  # noqa: TRY004 - as of bad JSON
        if missing := _REQUIRED - plain.keys():
            raise ValueError(
                f"a decision table has {', '.join(sorted(_REQUIRED))}; {', '.join(sorted(missing))} is missing"
            )
        lists = {
            name: tuple(_entry(kind, entry, f"{name}[{place}]") for place, entry in enumerate(_list(plain, name)))
            for name, kind in _ENTRIES.items()
        }
        known = [entry for entry in _list(plain, "directives") if _kind_of(entry) in DIRECTIVE_KINDS]
        directives = tuple(_entry(Directive, entry, f"directives[{place}]") for place, entry in enumerate(known))
        version, at = _value("int", plain["version"], "version"), _value("float", plain["at"], "at")
        return cls(version=version, at=at, directives=directives, **lists)


_REQUIRED: Final = frozenset({"version", "at", "routes", "directives"})
"""Fields without which an object is no table."""
_ENTRIES: Final[Mapping[str, type[Any]]] = {
    "routes": Route,
    "pins": Pin,
    "canaries": Canary,
    "promoted": Promoted,
}
DIRECTIVE_KINDS: Final = frozenset(kind.value for kind in DirectiveKind)


def _list(plain: Mapping[str, Any], name: str) -> list[Any]:
    found = plain.get(name, [])
    if not isinstance(found, list | tuple):
        raise ValueError(f"{name}: not a list")  # noqa: TRY004 - readers of JSON catch ValueError
    return list(found)


def _kind_of(entry: Any) -> Any:
    """Return an entry's kind, also one that only a later version knows; a known kind for what is no directive."""
    kind = entry.get("kind") if isinstance(entry, Mapping) else None
    return kind if isinstance(kind, str) else next(iter(DIRECTIVE_KINDS))


def _entry(kind: type[Any], plain: Any, where: str) -> Any:
    if not isinstance(plain, Mapping):
        raise ValueError(f"{where}: not an object")  # noqa: TRY004
    values = {}
    for field in fields(kind):
        if field.name in plain:
            values[field.name] = _value(str(field.type), plain[field.name], f"{where}.{field.name}")
        elif field.default is MISSING:
            raise ValueError(f"{where}.{field.name} is missing")
    return kind(**values)


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
