"""Records of the programs that read directives: a directive that no program reads has no effect."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable

from kc_otel.judge.decisions.entries import DirectiveKind

_ROUTE = "route"
_KINDS = frozenset({_ROUTE, *DirectiveKind}) - {DirectiveKind.HOLD_PROMOTION}
"""Directives that programs carry out; the evaluator and its gates hold promotion."""


class Listeners:
    """Time at which a program last reported that it reads a contract's directives of a kind, or obeys its routes."""

    def __init__(self) -> None:
        self._heard: dict[tuple[str, str], float] = {}

    def heard(self, told: Iterable[str], contracts: Container[str], now: float, *, current: bool = True) -> None:
        """Record the directives that a client reports to obey, `CONTRACT/DIRECTIVE` each; unknown names are ignored.

        Args:
            told: Its report.
            contracts: Names of those that are served.
            now: Unix time, seconds.
            current: Whether it has the table in force: a router with an older one has not taken the new entries.
        """
        for subject in told:
            contract, _, kind = subject.partition("/")
            if contract in contracts and kind in _KINDS and (current or kind != _ROUTE):
                self._heard[contract, kind] = now

    def routes(self, contract: str) -> float:
        """Unix time when a program that routes by a contract last had the table in force; -inf where none did."""
        return self._heard.get((contract, _ROUTE), -math.inf)

    def view(self, contracts: Iterable[str]) -> dict[str, dict[str, float | None]]:
        """Contract -> directive -> unix time when somebody last looked at it; None where nobody has."""
        return {name: {kind: self._heard.get((name, kind)) for kind in sorted(_KINDS)} for name in contracts}
