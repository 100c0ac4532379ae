"""Who looks at what is asked for: a directive that no program looks at changes nothing, and people should see that."""

from __future__ import annotations

from collections.abc import Container, Iterable

from kc_otel.judge.decisions.entries import DirectiveKind

__all__ = ["Listeners"]

_KINDS = frozenset(DirectiveKind) - {DirectiveKind.HOLD_PROMOTION}
"""What programs carry out; promotion is held by the evaluator and its gates."""


class Listeners:
    """When a program last said that it looks at a contract's directives of a kind."""

    def __init__(self) -> None:
        self._heard: dict[tuple[str, DirectiveKind], float] = {}

    def heard(self, told: Iterable[str], contracts: Container[str], now: float) -> None:
        """Take what a client says it obeys, `CONTRACT/DIRECTIVE` each; what names neither is ignored."""
        for one in told:
            contract, _, kind = one.partition("/")
            if contract in contracts and kind in _KINDS:
                self._heard[contract, DirectiveKind(kind)] = now

    def view(self, contracts: Iterable[str]) -> dict[str, dict[str, float | None]]:
        """Contract -> directive -> unix time when somebody last looked at it; None where nobody has."""
        return {name: {kind: self._heard.get((name, kind)) for kind in sorted(_KINDS)} for name in contracts}
