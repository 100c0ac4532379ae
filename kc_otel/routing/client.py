"""The router: asks the decision table in the serving process, on every request, without network and without locks.

A daemon thread keeps the table fresh and swaps one reference to an immutable snapshot; readers take that reference and
never wait. When the evaluator is gone the last table stays in force: a route is lifted by a person, never by an outage.
Once it has been gone for longer than `stale_after`, `on_stale` decides for everything that no route covers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Final, Literal, Self

from kc_otel.contract.model import Contract, SliceSpec
from kc_otel.contract.slices import ALL, Condition, Scalar
from kc_otel.routing.poll import Poller
from kc_otel.routing.table import INFERENCE_KERNEL, TRAIN_KERNEL, DecisionTable, DirectiveKind, Pin, Route

__all__ = ["Kernel", "Router"]

_log = logging.getLogger(__name__)

Kernel = Literal["train-kernel", "inference-kernel"]

Checks = tuple[tuple[str, frozenset[str] | None, Condition], ...]

_NEVER: Final = float("inf")
_MAPPINGS: Final = (dict, Mapping)
"""dict first: the abstract class is slow to ask."""


@dataclass(frozen=True, slots=True)
class _SliceRoutes:
    """The routes of one slice, ready to be asked: unix times at which they end, by avoided version."""

    name: str
    checks: Checks | None
    versions: Mapping[str, float]
    last: float

    def covers(self, where: Mapping[str, Scalar] | frozenset[str]) -> bool:
        if type(where) is frozenset:
            return self.name == ALL or self.name in where
        return self.matches(where)  # type: ignore[arg-type]  # not a frozenset, so a mapping

    def matches(self, attributes: Mapping[str, Scalar]) -> bool:
        # `slices.match` unrolled, with text compared by hash: this loop is most of what a request pays.
        if self.checks is None:
            return False
        for name, texts, condition in self.checks:
            value = attributes.get(name)
            if texts is not None and type(value) is str:
                if value not in texts:
                    return False
            elif not condition.holds(value):
                return False
        return True

    def avoids(self, version: str | None) -> bool:
        until = self.last if version is None else self.versions.get(version, 0.0)
        return until == _NEVER or (until > 0.0 and time.time() < until)


@dataclass(frozen=True, slots=True)
class _SlicePin:
    """A person's pin of one slice; `where` matches requests to it."""

    kernel: Kernel
    until: float
    where: _SliceRoutes

    def holds(self, where: Mapping[str, Scalar] | frozenset[str]) -> bool:
        if self.until != _NEVER and time.time() >= self.until:
            return False
        return self.where.covers(where)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    table: DecisionTable
    routes: Mapping[str, tuple[_SliceRoutes, ...]]
    directives: Mapping[tuple[str, DirectiveKind], Mapping[str, str]] = field(default_factory=dict)
    pins: Mapping[str, tuple[_SlicePin, ...]] = field(default_factory=dict)


class Router:
    """Which kernel serves a request, and what the evaluator asks of this process.

        with Router("http://127.0.0.1:4319", contracts=[contract]) as router:
            kernel = router.choose("policy-7b", {"prompt_tokens": 9000}, inference_version="9f1c2ab04d77")

    Make it after forking worker processes: threads do not survive a fork.

    Args:
        url: Base URL of the evaluator's API.
        contracts: Contracts whose slices requests are matched against; not needed by callers that name slices.
        refresh: Least time between two requests to the evaluator, seconds.
        wait: How long the evaluator may hold an answer back until something changes, seconds.
        stale_after: Seconds without an answer after which `on_stale` applies.
        on_stale: Kernel for requests that no route covers while the table is stale. `inference-kernel` goes on as
            before; `train-kernel` serves nothing that nobody watches.

    Raises:
        ValueError: If the URL is not one, or `on_stale` is not a kernel.
    """

    def __init__(
        self,
        url: str,
        *,
        contracts: Iterable[Contract] = (),
        refresh: float = 1.0,
        wait: float = 25.0,
        stale_after: float = 300.0,
        on_stale: Kernel = INFERENCE_KERNEL,
    ) -> None:
        self._setup(contracts, stale_after, on_stale, time.monotonic)
        self._poller: Poller | None = Poller(url, self._take, self._touch, wait=wait, refresh=refresh)
        self._poller.start()

    @classmethod
    def from_table(
        cls,
        table: DecisionTable,
        *,
        contracts: Iterable[Contract] = (),
        stale_after: float = _NEVER,
        on_stale: Kernel = INFERENCE_KERNEL,
        clock: Callable[[], float] = time.monotonic,
    ) -> Router:
        """A router over a fixed table, without a thread or an evaluator: for tests and for batch jobs."""
        router = cls.__new__(cls)
        router._setup(contracts, stale_after, on_stale, clock)  # noqa: SLF001 - its own
        router._poller = None  # noqa: SLF001 - its own
        router._take(table)  # noqa: SLF001 - its own
        router._touch()  # noqa: SLF001 - its own
        return router

    def _setup(
        self, contracts: Iterable[Contract], stale_after: float, on_stale: Kernel, clock: Callable[[], float]
    ) -> None:
        if on_stale not in {TRAIN_KERNEL, INFERENCE_KERNEL}:
            raise ValueError(f"on_stale={on_stale!r} is not a kernel; write {TRAIN_KERNEL!r} or {INFERENCE_KERNEL!r}")
        self._contracts = {contract.name: contract for contract in contracts}
        self._clock = clock
        self._stale_after = stale_after
        self._on_stale: Kernel = on_stale
        self._fresh_until = -_NEVER
        self._snapshot = _Snapshot(DecisionTable(), {})

    @property
    def table(self) -> DecisionTable:
        """The table in force; version 0 and empty until the first one has arrived."""
        return self._snapshot.table

    @property
    def stale(self) -> bool:
        """Whether the evaluator has been silent for longer than `stale_after`, or has never answered."""
        return self._clock() > self._fresh_until

    def choose(
        self,
        contract: str,
        where: Mapping[str, Scalar] | Iterable[str],
        inference_version: str | None = None,
    ) -> Kernel:
        """Which kernel serves a request.

        Args:
            contract: metadata.name.
            where: Attributes of the request, matched against the contract's slices; or the names of its slices, where
                `all` need not be named.
            inference_version: Short fingerprint of the inference kernel that would serve it. Without it every version
                counts as avoided that has a route, also one that was rolled out since.

        Returns:
            What a person has pinned for one of the request's slices, the newest pin first. Else `train-kernel` if a
            route covers one of them, or if the table is stale and `on_stale` says so; else `inference-kernel`.

        Raises:
            LookupError: If attributes are given for a contract that the router was not given.
        """
        snapshot = self._snapshot
        if isinstance(where, _MAPPINGS):
            if contract not in self._contracts:
                raise LookupError(f"no contract {contract!r} to match attributes against; pass Router(contracts=[...])")
        else:
            where = frozenset((where,) if isinstance(where, str) else where)
        for pin in snapshot.pins.get(contract, ()):
            if pin.holds(where):
                return pin.kernel
        for one in snapshot.routes.get(contract, ()):
            if one.avoids(inference_version) and one.covers(where):
                return TRAIN_KERNEL
        if self._clock() > self._fresh_until:
            return self._on_stale
        return INFERENCE_KERNEL

    def sampling(self, contract: str, default: float) -> float:
        """Share of comparisons to measure: 1 while a `sample-more` step fires, else the default."""
        return 1.0 if (contract, DirectiveKind.SAMPLING) in self._snapshot.directives else default

    def halted(self, contract: str) -> str | None:
        """Why training should stop, while a `halt` step fires; else None."""
        return self._first(contract, DirectiveKind.HALT)

    def held(self, contract: str) -> str | None:
        """Why promotion should wait, while a `hold-promotion` step fires; else None."""
        return self._first(contract, DirectiveKind.HOLD_PROMOTION)

    def quarantined(self, contract: str) -> Mapping[str, str]:
        """Slices whose rollouts should not be trained on, each with the reason; empty when there are none."""
        return self._snapshot.directives.get((contract, DirectiveKind.QUARANTINE_ROLLOUTS), MappingProxyType({}))

    def wait_for_table(self, timeout: float) -> bool:
        """Wait until the evaluator has answered; for start-up. Returns whether it has."""
        deadline = time.monotonic() + timeout
        while self._fresh_until == -_NEVER and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._fresh_until != -_NEVER

    def close(self) -> None:
        """Stop polling. The last table stays in force."""
        if self._poller is not None:
            self._poller.stop()
            self._poller.join(timeout=2.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _first(self, contract: str, kind: DirectiveKind) -> str | None:
        asked = self._snapshot.directives.get((contract, kind))
        return next(iter(asked.values())) if asked else None

    def _touch(self) -> None:
        self._fresh_until = self._clock() + self._stale_after

    def _take(self, table: DecisionTable) -> None:
        by_slice: dict[str, dict[str, list[Route]]] = {}
        for route in table.routes:
            by_slice.setdefault(route.contract, {}).setdefault(route.slice, []).append(route)
        routes = {
            contract: tuple(self._compiled(contract, name, found) for name, found in slices.items())
            for contract, slices in by_slice.items()
        }
        directives: dict[tuple[str, DirectiveKind], dict[str, str]] = {}
        for asked in table.directives:
            directives.setdefault((asked.contract, asked.kind), {}).setdefault(asked.slice, asked.reason)
        pins: dict[str, tuple[_SlicePin, ...]] = {}
        for one in sorted(table.pins, key=lambda one: -one.at):
            pins[one.contract] = (*pins.get(one.contract, ()), self._pinned(one))
        self._snapshot = _Snapshot(table, routes, directives, pins)

    def _pinned(self, one: Pin) -> _SlicePin:
        kernel: Kernel = TRAIN_KERNEL if one.kernel == TRAIN_KERNEL else INFERENCE_KERNEL
        where = _SliceRoutes(one.slice, self._checks_of(one.contract, one.slice), {}, 0.0)
        return _SlicePin(kernel, _NEVER if one.until is None else one.until, where)

    def _compiled(self, contract: str, name: str, routes: Iterable[Route]) -> _SliceRoutes:
        versions: dict[str, float] = {}
        for route in routes:
            until = _NEVER if route.until is None else route.until
            versions[route.avoid] = max(until, versions.get(route.avoid, 0.0))
        return _SliceRoutes(name, self._checks_of(contract, name), versions, max(versions.values()))

    def _checks_of(self, contract: str, name: str) -> Checks | None:
        """What requests of a slice are known by; None where the contract or the slice is not known here."""
        if name == ALL:
            return ()
        known = self._contracts.get(contract)
        spec = None if known is None else known.slices.get(name)
        if known is not None and spec is None:
            _log.warning("contract %r has no slice %r here; its route or pin holds only by name", contract, name)
        return None if spec is None else _checks(spec)


def _checks(spec: SliceSpec) -> Checks:
    checks = []
    for name, conditions in spec.conditions.items():
        for condition in conditions:
            texts = frozenset(value for value in condition.values if isinstance(value, str))
            only_texts = condition.comparison == "in" and len(texts) == len(set(condition.values))
            checks.append((name, texts if only_texts else None, condition))
    return tuple(checks)
