"""Accumulators of single operators: histograms by quantity, operator and slice, with a bounded number of operators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.record.telemetry.buckets import slots
from kc_otel.record.telemetry.moments import QuantityStream
from kc_otel.stats.histogram import ExponentialHistogram

MOST_OPERATORS: Final = 64
"""Operators recorded besides those that the contract is about."""


class OperatorAccumulator:
    """Cumulative exponential histograms of what was observed of operators, since it was made. Not thread-safe.

    Args:
        slices: Names of the slices, the columns of every `membership`.
        named: Operators for which there is always room: those of the contract's clauses.
        more: Operators that are recorded besides these.
    """

    def __init__(self, slices: Sequence[str], *, named: Iterable[str] = (), more: int = MOST_OPERATORS) -> None:
        self.slices: Final = tuple(slices)
        self._named: Final = frozenset(named)
        self._more: Final = more
        self._slots: Final = slots()
        self._streams: Final[dict[tuple[str, str], QuantityStream]] = {}
        self._others: Final[set[str]] = set()

    def has_room(self, operator: str) -> bool:
        """Return True if an operator is recorded: the contract names it, it was recorded before, or it still fits."""
        return operator in self._named or operator in self._others or len(self._others) < self._more

    def add(self, operator: str, values: Mapping[str, NDArray[np.float64]], membership: NDArray[np.bool_]) -> None:
        """Record observations of one operator.

        Args:
            operator: Its name; there must be room for it.
            values: Finite observations by the registry's key of an operator quantity, float64 [n] each.
            membership: Slices of each observation, bool [n, slices].
        """
        if operator not in self._named:
            self._others.add(operator)
        for quantity, observed in values.items():
            stream = self._streams.get((quantity, operator))
            if stream is None:
                stream = self._streams[quantity, operator] = QuantityStream(len(self.slices), self._slots)
            stream.add(observed, membership)

    def snapshot(self) -> dict[tuple[str, str, str], ExponentialHistogram]:
        """Cumulative histogram of each (quantity, operator, slice) that has observations."""
        return {
            (quantity, operator, slice): histogram
            for (quantity, operator), stream in self._streams.items()
            for column, slice in enumerate(self.slices)
            if (histogram := stream.histogram(column)) is not None
        }
