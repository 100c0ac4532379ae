"""Counting by slice when slices overlap: each token is counted once per group of sequences in the same slices.

A few dozen slices cut traffic into about as many groups, and a group's counts are then added to each of its slices:
the work per token does not grow with the number of slices or their overlap. Where nearly every sequence is a group of
its own, counting each slice's tokens is cheaper, and is what is done.

One partition of the log ratio l serves every quantity of a sampled token: l, |l|, w, (1-w)+, w - 1 - l and (w-1)^2 are
all functions of l that rise or fall throughout on either side of zero. Cut the line of l wherever any of them enters
another bucket, and finding a token's cell, once, is as good as finding its bucket in six histograms: counts per cell
become counts per bucket only when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.record.measure.sampled import HIGHEST, LOWEST, TOKEN
from kc_otel.record.telemetry.buckets import Partition, Slots, magnitudes, slots

_SHORT_GROUP: Final = 256
"""Tokens per group below which one pass over all tokens is quicker than putting pieces together."""
_ADD_COST: Final = 0.3
"""Cost of adding one count to another, in units of counting one token."""


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Sequences by the set of slices that they belong to.

    Attributes:
        members: Which slices a group belongs to, bool [groups, slices].
        of: Group of each sequence, [sequences].
        order: Sequences in the order of their groups, [sequences].
    """

    members: NDArray[np.bool_]
    of: NDArray[np.intp]
    order: NDArray[np.intp]


def of_one_age(rows: NDArray[np.intp], groups: Groups) -> list[NDArray[np.intp]]:
    """Rows in their order, parted where those in `all` meet those that older weights sampled.

    Checks compare the rows of a block with each other, and kernels that agree bit by bit drift on older weights alone.
    """
    current = groups.members[groups.of[rows], 0]
    return np.split(rows, np.flatnonzero(current[1:] != current[:-1]) + 1)


def in_groups(membership: NDArray[np.bool_]) -> Groups:
    """Groups of sequences with equal rows of `membership`, bool [sequences, slices]."""
    bits = np.packbits(membership, axis=1)
    if bits.shape[0] and (bits == bits[0]).all():
        every = np.arange(bits.shape[0], dtype=np.intp)
        return Groups(membership[:1], np.zeros_like(every), every)
    _, first, of = np.unique(bits, axis=0, return_index=True, return_inverse=True)
    of = of.reshape(-1).astype(np.intp)
    return Groups(membership[first], of, np.argsort(of, kind="stable"))


def count_by_slice(
    codes: NDArray[np.uint16], size: int, group: NDArray[np.intp], lengths: NDArray[np.intp], groups: Groups
) -> NDArray[np.int64]:
    """Count each code in each slice.

    Args:
        codes: Codes to count, in 0..size-1, [tokens], sequence after sequence in the order of their groups.
        size: Number of codes.
        group: Group of each sequence, ascending, [sequences].
        lengths: Tokens of each sequence, [sequences].
        groups: The groups.

    Returns:
        int64 [slices, size].
    """
    counts = np.zeros((groups.members.shape[1], size), dtype=np.int64)
    present, first = np.unique(group, return_index=True)
    ends = np.append(np.append(0, np.cumsum(lengths))[first], codes.size)
    members, tokens = groups.members[present], np.diff(ends)
    if count_groups(members, tokens, size):
        for member, begin, end in zip(members, ends[:-1], ends[1:], strict=True):
            counts[member] += np.bincount(codes[begin:end], minlength=size)
        return counts
    for slice in np.flatnonzero(members.any(0)):
        inside = members[:, slice]
        if codes.size < _SHORT_GROUP * present.size:
            part = codes[np.repeat(inside, tokens)]
        else:
            part = np.concatenate([codes[ends[index] : ends[index + 1]] for index in np.flatnonzero(inside)])
        counts[slice] = np.bincount(part, minlength=size)
    return counts


def count_groups(members: NDArray[np.bool_], tokens: NDArray[np.intp], size: int) -> bool:
    """Return True if counting each of `groups.members` once is cheaper than each slice; `tokens` are per group."""
    each_group = tokens.sum() + _ADD_COST * size * (members.shape[0] + members.sum())
    each_slice = (members.sum(1) * tokens).sum() + _ADD_COST * size * members.any(0).sum()
    return bool(each_group <= each_slice)


def by_slice(membership: NDArray[np.bool_], totals: Any, low: Any, high: Any) -> tuple[Any, Any, Any]:
    """Sums, minima and maxima per slice.

    Args:
        membership: bool [rows, slices].
        totals: Values to sum, float64 [rows, k].
        low: Values to take the minimum of, float64 [rows, k].
        high: Values to take the maximum of, float64 [rows, k].

    Returns:
        Three arrays float64 [slices, k]; 0, inf and -inf for slices without rows.
    """
    # Not a matrix product: its threads would compete with the caller's, and rows are few.
    shape = (membership.shape[1], totals.shape[1])
    sums, least, most = np.zeros(shape), np.full(shape, np.inf), np.full(shape, -np.inf)
    for slice in np.flatnonzero(membership.any(0)):
        rows = membership[:, slice]
        if rows.all():
            sums[slice], least[slice], most[slice] = totals.sum(0), low.min(0), high.max(0)
        else:
            sums[slice], least[slice], most[slice] = totals[rows].sum(0), low[rows].min(0), high[rows].max(0)
    return sums, least, most


class LogRatioCells:
    """The joint partition at one scale, and the bucket that each cell means for each quantity of a sampled token."""

    def __init__(self, scale: int) -> None:
        self.slots: Final[Slots] = slots(scale)
        self.partition: Final = Partition(self._cuts(1.0, HIGHEST), self._cuts(-1.0, -LOWEST))
        self.size: Final = self.partition.size
        within = self.partition.representatives()
        self._slot: Final = {key: self.slots.of_exact(quantity(within)) for key, quantity in TOKEN.items()}

    def per_slot(self, quantity: str, counts: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
        """Counts per bucket of a quantity, from counts per cell [size]: the first slot, and counts from there on."""
        slot = self._slot[quantity]
        first = int(slot.min())
        per_slot = np.zeros(int(slot.max()) - first + 1, dtype=np.int64)
        np.add.at(per_slot, slot - first, counts)
        return first, per_slot

    def _cuts(self, sign: float, largest: float) -> NDArray[np.uint32]:
        bounds = self.slots.bounds
        found = []
        for quantity in TOKEN.values():
            # Along growing magnitudes of l a quantity's own magnitude leaves bounds behind, upwards or downwards; its
            # sign never changes on the way.
            at_zero = abs(quantity(np.float64(0.0))) > bounds
            found.append(magnitudes(partial(_differs, quantity, sign, bounds, at_zero), bounds.size, largest))
        return np.unique(np.concatenate(found))


@cache
def cells(scale: int) -> LogRatioCells:
    """The joint partition of a scale."""
    return LogRatioCells(scale)


def _differs(
    quantity: Callable[[Any], Any],
    sign: float,
    bounds: NDArray[np.float64],
    at_zero: NDArray[np.bool_],
    magnitude: NDArray[np.float64],
) -> NDArray[np.bool_]:
    differs: NDArray[np.bool_] = (abs(quantity(sign * magnitude)) > bounds) != at_zero
    return differs
