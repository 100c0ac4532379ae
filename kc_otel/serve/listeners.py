"""Records of the programs that read directives: a directive that no program reads has no effect."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping

from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL
from kc_otel.judge.decisions.entries import DirectiveKind

_ROUTE = "route"
_KINDS = frozenset({_ROUTE, *DirectiveKind}) - {DirectiveKind.HOLD_PROMOTION}
"""Directives that programs carry out; the evaluator and its gates hold promotion."""
_PRESENT_SECONDS = 90.0
"""Seconds since its last request for which a program counts as running: it asks once a minute or more often."""


class Listeners:
    """Time at which a program last reported that it reads a contract's directives of a kind, or obeys its routes."""

    def __init__(self) -> None:
        self._heard: dict[tuple[str, str], float] = {}
        self._otherwise: dict[str, float] = {}
        self._kept: dict[tuple[str, str, str], float] = {}

    def heard(
        self,
        told: Iterable[str],
        contracts: Mapping[str, Contract],
        now: float,
        *,
        current: bool = True,
        kept: Iterable[str] = (),
        versions: Callable[[str], Collection[str]] = lambda _: (),
    ) -> None:
        """Record the directives that a client reports to obey, `CONTRACT/DIRECTIVE` each; unknown names are ignored.

        Args:
            told: Its report; of routes, `CONTRACT/route/HASH` with the `slices_hash` of its contract.
            contracts: Those that are served, by name.
            now: Unix time, seconds.
            current: Whether it has the table in force: a router with an older one has not taken the new entries.
            kept: `CONTRACT/SLICE/VERSION` of requests that it keeps from a version; other slices than `all` count where
                it defines them as the contract does.
            versions: Versions of the inference kernel that a contract has; "" stands for one that is not named.
        """
        same = set()
        for subject in told:
            contract, kind, defined, *_ = *subject.split("/", 2), "", ""
            if contract not in contracts or kind not in _KINDS or (defined and kind != _ROUTE):
                continue
            if kind != _ROUTE or current:
                self._heard[contract, kind] = now
            if kind == _ROUTE and defined == contracts[contract].slices_hash:
                same.add(contract)
            elif kind == _ROUTE:
                self._otherwise[contract] = now
        for subject in kept if current else ():
            contract, slice, version, *_ = *subject.split("/", 2), "", ""
            found = contracts.get(contract)
            if found is None or not (slice == ALL or (contract in same and slice in found.slices)):
                continue
            if version in versions(contract):
                self._kept[contract, slice, version] = now

    def routes(self, contract: str) -> float:
        """Unix time when a program that routes by a contract last had the table in force; -inf where none did."""
        return self._heard.get((contract, _ROUTE), -math.inf)

    def defined_otherwise(self, contract: str, now: float) -> bool:
        """Return whether a program that runs routes by other definitions of a contract's slices, or by none."""
        return now - self._otherwise.get(contract, -math.inf) < _PRESENT_SECONDS

    def kept(self, contract: str, slice: str, version: str) -> float:
        """Unix time when a program last said that it keeps requests of a slice from a version; -inf where none did."""
        return self._kept.get((contract, slice, version), -math.inf)

    def view(self, contracts: Iterable[str]) -> dict[str, dict[str, float | None]]:
        """Contract -> directive -> unix time when somebody last looked at it; None where nobody has."""
        return {name: {kind: self._heard.get((name, kind)) for kind in sorted(_KINDS)} for name in contracts}
