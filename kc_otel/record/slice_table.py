"""Which slices get streams of their own, and which sequence counts in which of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.model import Contract
from kc_otel.contract.registry import OPERATORS, QUANTITIES
from kc_otel.contract.slices import ALL, OTHER, Scalar
from kc_otel.record.telemetry.operator_histograms import MOST_OPERATORS

__all__ = ["SliceTable"]

_REMEMBERED = 4096


@dataclass(frozen=True, slots=True, eq=False)
class SliceTable:
    """The slices of a contract within its cap on series.

    Attributes:
        contract: Whose slices.
        names: Slices with streams of their own: `all`, then as declared, then `other` where some are over the cap.
        over: Declared slices that the cap leaves no room for; their sequences count as `other`.
        more_operators: Operators that the cap leaves room for besides those that the contract names.
    """

    contract: Contract
    names: tuple[str, ...]
    over: tuple[str, ...]
    more_operators: int = 0
    _known: dict[tuple[tuple[str, Scalar], ...], NDArray[np.bool_]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, contract: Contract) -> SliceTable:
        """Every quantity may need a stream per slice: there is room for max_series / quantities of them."""
        declared = tuple(contract.slices)
        each_operator = len(OPERATORS)
        quantities = (
            len(QUANTITIES) - each_operator + len(contract.by_sequence) + each_operator * len(contract.operators)
        )
        room = max(contract.observability.max_series // quantities, 1)
        if 1 + len(declared) <= room:
            left = contract.observability.max_series // (1 + len(declared)) - quantities
            return cls(contract, (ALL, *declared), (), min(left // each_operator, MOST_OPERATORS))
        kept = declared[: max(room - 2, 0)]
        return cls(contract, (ALL, *kept, OTHER), declared[len(kept) :])

    def of_sequence(self, attributes: Mapping[str, Scalar]) -> NDArray[np.bool_]:
        """Whether a sequence belongs to each of `names`, [slices]."""
        try:
            key = tuple(sorted(attributes.items()))
            known = self._known.get(key)
        except TypeError:  # an attribute that cannot be hashed matches no condition, but the others still may
            return self._row(attributes)
        if known is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            known = self._known[key] = self._row(attributes)
        return known

    def of_batch(
        self, attributes: Mapping[str, Scalar] | Sequence[Mapping[str, Scalar]] | None, rows: Sequence[int], given: int
    ) -> NDArray[np.bool_]:
        """Membership of the given rows of a batch, [rows, slices].

        Args:
            attributes: Of every sequence alike, or of each, or none.
            rows: Which sequences are kept.
            given: How many sequences the batch had.

        Raises:
            ValueError: If there are attributes for another number of sequences.
        """
        if attributes is None or isinstance(attributes, Mapping):
            return np.tile(self.of_sequence(attributes or {}), (len(rows), 1))
        if len(attributes) != given:
            raise ValueError(
                f"attributes: {len(attributes)} for {given} sequences; give one mapping for each, or one for all"
            )
        return np.array([self.of_sequence(attributes[i]) for i in rows], dtype=bool).reshape(len(rows), len(self.names))

    def _row(self, attributes: Mapping[str, Scalar]) -> NDArray[np.bool_]:
        member = set(self.contract.slices_of(attributes))
        if member.intersection(self.over):
            member.add(OTHER)
        return np.array([name in member for name in self.names], dtype=bool)
