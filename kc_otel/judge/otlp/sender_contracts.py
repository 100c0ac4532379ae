"""Which contracts a sender may speak of: said by a resource attribute that a receiver which knows its senders writes.

It travels with the request, so that the log of what arrived, a recording and a replay all judge it alike. A sender that
writes it itself can only leave contracts out; the receiver takes whatever a sender wrote away.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

__all__ = ["SENDER_CONTRACTS", "addressees", "restrict"]

SENDER_CONTRACTS: Final = "kc.sender.contracts"
"""Names of contracts, an array of strings: no point or span of the resource counts for any other contract."""
_GROUPS: Final = ("resource_metrics", "resource_spans", "resource_logs")


def addressees(resource: Any) -> frozenset[str] | None:
    """Names of the contracts that a resource's telemetry may be about; None for any."""
    said = [pair.value.array_value.values for pair in resource.attributes if pair.key == SENDER_CONTRACTS]
    if not said:
        return None
    return frozenset.intersection(*(frozenset(value.string_value for value in values) for values in said))


def restrict(request: Any, contracts: Collection[str] | None) -> None:
    """Let an export request be about these contracts only, whatever it says itself; None for any.

    Args:
        request: An OTLP export request of any signal; changed in place.
        contracts: Names of contracts.
    """
    for group in _GROUPS:
        for entry in getattr(request, group, ()):
            attributes = entry.resource.attributes
            for number in reversed(range(len(attributes))):
                if attributes[number].key == SENDER_CONTRACTS:
                    del attributes[number]
            if contracts is not None:
                pair = attributes.add(key=SENDER_CONTRACTS)
                pair.value.array_value.SetInParent()
                for name in sorted(contracts):
                    pair.value.array_value.values.add(string_value=name)
