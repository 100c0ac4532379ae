"""A decision table prepared for look-ups on every request: immutable, and indexed by contract."""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal

from kc_otel.contract.slices import ALL, Scalar, SliceCondition
from kc_otel.judge.decisions import (
    INFERENCE_KERNEL,
    TRAIN_KERNEL,
    Canary,
    DecisionTable,
    Directive,
    DirectiveKind,
    Route,
)

if TYPE_CHECKING:
    from kc_otel.contract.model import Contract, SliceSpec

_log: Final = logging.getLogger(__name__)

ServingKernel = Literal["train-kernel", "inference-kernel"]
Where = Mapping[str, Scalar] | frozenset[str]
"""Attributes of a request, or the names of its slices."""
Checks = tuple[tuple[str, frozenset[str] | None, SliceCondition], ...]

NEVER: Final = float("inf")


@dataclass(frozen=True, slots=True)
class Choice:
    """Kernel that serves a request, with the cause of the choice.

    `weight` is the share that the inference kernel has of such requests, where a canary decided; `reason` is a
    sentence, empty where nothing had to be decided; `slice` the one from which all requests are kept away, if any.
    """

    kernel: ServingKernel
    cause: Literal["pin", "route", "canary", "stale", "default"]
    weight: float | None = None
    reason: str = ""
    slice: str = ""


_DEFAULT_CHOICE: Final = Choice(INFERENCE_KERNEL, "default")
UNPROVEN: Final = Choice(
    TRAIN_KERNEL,
    "stale",
    reason="no fresh decision table for the contract, and nothing says that the version was promoted to full",
)
PROVEN: Final = Choice(
    INFERENCE_KERNEL,
    "stale",
    reason="no fresh decision table for the contract; the version was promoted to full, or is trusted",
)


@dataclass(frozen=True, slots=True)
class SliceRule:
    """A person's pin of a slice, or its routes."""

    slice: str
    checks: Checks | None
    """None where the slice is known here only by its name."""
    choice: Choice
    avoids: frozenset[str] | None = None
    """Versions of the inference kernel that routes avoid; None for a pin, whatever the version."""
    until: float = NEVER
    """A pin to the training kernel ends only in the evaluator's next table: the local clock may be wrong."""

    def holds(self, where: Where, version: str | None) -> bool:
        """Return True if it decides a request for a version of the inference kernel, or with None for any."""
        served = self.avoids is not None and version is not None and version not in self.avoids
        if served or (self.until != NEVER and time.time() >= self.until):
            return False
        if type(where) is frozenset:
            return self.slice == ALL or self.slice in where
        # `slices.match` unrolled, with text compared by hash: this loop is most of what a request pays.
        if self.checks is None:
            return False
        for name, texts, condition in self.checks:
            value = where.get(name)  # type: ignore[union-attr]  # not a frozenset, so a mapping
            if texts is not None and type(value) is str:
                if value not in texts:
                    return False
            elif not condition.holds(value):
                return False
        return True


@dataclass(frozen=True, slots=True)
class CanaryShare:
    """A canary.

    A request is in the share when the hash of its key, with contract and version before it, is below the weight. So a
    key stays where it is for as long as the weight does not change, in every process, and only ever moves into the
    share when the weight grows.
    """

    version: str
    salted: Any
    below: bytes | None
    """Hashes below this are in the share; None where all or none are."""
    inside: Choice
    outside: Choice

    def decide(self, key: str | bytes) -> Choice:
        """Inside or outside."""
        if self.below is None:
            return self.inside if self.inside.weight else self.outside
        digest = self.salted.copy()
        digest.update(key if isinstance(key, bytes) else str(key).encode())
        return self.inside if digest.digest() < self.below else self.outside


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A decision table, indexed by contract."""

    table: DecisionTable
    pins: Mapping[str, Sequence[SliceRule]] = field(default_factory=dict)
    routes: Mapping[str, Sequence[SliceRule]] = field(default_factory=dict)
    canaries: Mapping[str, Sequence[CanaryShare]] = field(default_factory=dict)
    directives: Mapping[tuple[str, DirectiveKind], Sequence[Directive]] = field(default_factory=dict)
    promoted: frozenset[tuple[str, str]] = frozenset()
    """(contract, version)"""
    kept: set[tuple[str, str, str]] = field(default_factory=set)
    """(contract, slice, version) from which this table kept a request; an empty version where none was named."""
    told: set[tuple[str, str, str]] = field(default_factory=set)
    """Those of `kept` that the evaluator was told."""

    def choice(self, contract: str, where: Where, version: str | None, key: str | bytes | None) -> Choice:
        """Return the choice by the newest pin, else by a route, then by the smallest canary: at random without a key.

        A pin to the inference kernel lifts routes, but not the limits of a version on trial or rolled back.
        """
        choice = next((pin.choice for pin in self.pins.get(contract, ()) if pin.holds(where, version)), None)
        if choice is None:
            for route in self.routes.get(contract, ()):
                if route.holds(where, version):
                    return route.choice
            choice = _DEFAULT_CHOICE
        elif choice.kernel == TRAIN_KERNEL:
            return choice
        for share in self.canaries.get(contract, ()):
            if version is None or version == share.version:
                key = random.randbytes(8) if key is None else key  # noqa: S311 - nothing secret
                choice = share.decide(key)
                if choice.kernel == TRAIN_KERNEL:
                    break
        return choice


def compiled(table: DecisionTable, contracts: Mapping[str, Contract]) -> Snapshot:
    """The table, ready for look-ups. Slices that the contracts do not have are known by name only, which is logged."""

    @cache
    def checks_of(contract: str, name: str) -> Checks | None:
        known = contracts.get(contract)
        spec = None if known is None else known.slices.get(name)
        if known is not None and spec is None and name != ALL:
            _log.warning("contract %r has no slice %r here; what is decided of it holds only by name", contract, name)
        return () if name == ALL else None if spec is None else _checks(spec)

    by_slice: dict[tuple[str, str], list[Route]] = {}
    for route in table.routes:
        by_slice.setdefault((route.contract, route.slice), []).append(route)
    routes: dict[str, list[SliceRule]] = {}
    for (contract, slice), found in by_slice.items():
        choice = Choice(TRAIN_KERNEL, "route", None, found[-1].reason, slice)
        avoids = frozenset(route.avoid for route in found)
        routes.setdefault(contract, []).append(SliceRule(slice, checks_of(contract, slice), choice, avoids))
    pins: dict[str, list[SliceRule]] = {}
    for pin in sorted(table.pins, key=lambda pin: -pin.at):  # the newest that matches wins
        kept = pin.kernel == TRAIN_KERNEL
        kernel: ServingKernel = TRAIN_KERNEL if kept else INFERENCE_KERNEL
        choice = Choice(kernel, "pin", None, f"{pin.by}: {pin.why}", pin.slice if kept else "")
        until = NEVER if kept or pin.until is None else pin.until
        rule = SliceRule(pin.slice, checks_of(pin.contract, pin.slice), choice, until=until)
        pins.setdefault(pin.contract, []).append(rule)
    canaries: dict[str, list[CanaryShare]] = {}
    for canary in sorted(table.canaries, key=lambda canary: -canary.weight):  # the smallest that matches wins
        canaries.setdefault(canary.contract, []).append(_share(canary))
    directives: dict[tuple[str, DirectiveKind], list[Directive]] = {}
    for asked in table.directives:
        directives.setdefault((asked.contract, asked.kind), []).append(asked)
    promoted = frozenset((promotion.contract, promotion.version) for promotion in table.promoted)
    return Snapshot(table, pins, routes, canaries, directives, promoted)


def _share(canary: Canary) -> CanaryShare:
    salted = hashlib.blake2b(f"{canary.contract}\0{canary.version}\0".encode(), digest_size=8)
    below = int(canary.weight * 2.0**64).to_bytes(8, "big") if 0.0 < canary.weight < 1.0 else None
    inside = Choice(INFERENCE_KERNEL, "canary", canary.weight, canary.reason)
    outside = Choice(TRAIN_KERNEL, "canary", canary.weight, canary.reason, "" if canary.weight else ALL)
    return CanaryShare(canary.version, salted, below, inside, outside)


def _checks(spec: SliceSpec) -> Checks:
    checks = []
    for name, conditions in spec.conditions.items():
        for condition in conditions:
            texts = frozenset(value for value in condition.values if isinstance(value, str))
            only_texts = condition.comparison == "in" and len(texts) == len(set(condition.values))
            checks.append((name, texts if only_texts else None, condition))
    return tuple(checks)
