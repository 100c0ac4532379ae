"""Accumulators of single operators: histograms by quantity, operator and slice, with a bounded number of operators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.registry.clause_metrics import OPERATORS
from kc_otel.record.telemetry.buckets import slots
from kc_otel.record.telemetry.moments import QuantityStream
from kc_otel.stats.histogram import ExponentialHistogram

MOST_OPERATORS: Final = 64
"""Operators recorded besides those that the contract is about."""
_MAX_FLOAT32: Final = float(np.finfo(np.float32).max)


class OperatorAccumulator:
    """Cumulative exponential histograms of what was observed of operators, since it was made. Not thread-safe.

    Args:
        slices: Names of the slices, the columns of every `membership`.
        named: Operators for which there is always room: those of the contract's clauses.
        more: Operators that are recorded besides these.
        scale: Scale of the histograms, 0 to 6.
    """

    def __init__(
        self, slices: Sequence[str], *, named: Iterable[str] = (), more: int = MOST_OPERATORS, scale: int = 4
    ) -> None:
        self.slices: Final = tuple(slices)
        self._named: Final = frozenset(named)
        self._more: Final = more
        self._slots: Final = slots(scale)
        self._streams: Final[dict[tuple[str, str], QuantityStream]] = {}
        self._others: Final[set[str]] = set()

    def has_room(self, operator: str) -> bool:
        """Return True if an operator is recorded: the contract names it, it was recorded before, or it still fits."""
        return operator in self._named or operator in self._others or len(self._others) < self._more

    def add(self, operator: str, values: Mapping[str, NDArray[np.float64]], membership: NDArray[np.bool_]) -> None:
        """Record observations of one operator.

        Args:
            operator: Its name; there must be room for it.
            values: Observations by the registry's key of an operator quantity, float64 [n] each. A value beyond the
            range of float32 counts as its largest number: if only the inference kernel's output is not zero, a row has
            an infinite relative error.
            membership: Slices of each observation, bool [n, slices].

        Raises:
            ValueError: If there is no room, a quantity is not one of operators, or a value is NaN.
        """
        if not self.has_room(operator):
            raise ValueError(f"operator: {operator!r} is one more than the {self._more} that there is room for")
        if unknown := values.keys() - OPERATORS.keys():
            raise ValueError(f"values: {min(unknown)!r} is not one of {', '.join(OPERATORS)}")
        if any(np.isnan(value).any() for value in values.values()):
            raise ValueError(f"values: NaN is no observation of {operator}; leave such rows out")
        if operator not in self._named:
            self._others.add(operator)
        for quantity, observed in values.items():
            stream = self._streams.get((quantity, operator))
            if stream is None:
                stream = self._streams[quantity, operator] = QuantityStream(len(self.slices), self._slots)
            stream.add(np.clip(observed, -_MAX_FLOAT32, _MAX_FLOAT32), membership)

    def snapshot(self) -> dict[tuple[str, str, str], ExponentialHistogram]:
        """Cumulative histogram of each (quantity, operator, slice) that has observations."""
        return {
            (quantity, operator, slice): histogram
            for (quantity, operator), stream in self._streams.items()
            for column, slice in enumerate(self.slices)
            if (histogram := stream.histogram(column)) is not None
        }
