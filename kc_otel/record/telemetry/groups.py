"""Counting by slice when slices overlap: each token is counted once per group of sequences in the same slices.

A few dozen slices cut traffic into about as many groups, and a group's counts are then added to each of its slices:
the work per token does not grow with the number of slices or their overlap. Where nearly every sequence is a group of
its own, counting each slice's tokens is cheaper, and is what is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Groups", "by_slice", "count_by_slice", "in_groups"]

_SHORT: Final = 256
"""Tokens per group below which one pass over all tokens is quicker than putting pieces together."""
_ADD: Final = 0.3
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
    """How often each slice has each code.

    Args:
        codes: What is counted, in 0..size-1, [tokens], sequence after sequence in the order of their groups.
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
        if codes.size < _SHORT * present.size:
            part = codes[np.repeat(inside, tokens)]
        else:
            part = np.concatenate([codes[ends[each] : ends[each + 1]] for each in np.flatnonzero(inside)])
        counts[slice] = np.bincount(part, minlength=size)
    return counts


def count_groups(members: NDArray[np.bool_], tokens: NDArray[np.intp], size: int) -> bool:
    """Whether counting each of `groups.members` once is cheaper than counting each slice; `tokens` are per group."""
    each_group = tokens.sum() + _ADD * size * (members.shape[0] + members.sum())
    each_slice = (members.sum(1) * tokens).sum() + _ADD * size * members.any(0).sum()
    return bool(each_group <= each_slice)


def by_slice(membership: NDArray[np.bool_], totals: Any, low: Any, high: Any) -> tuple[Any, Any, Any]:
    """Sums, minima and maxima per slice.

    Args:
        membership: bool [rows, slices].
        totals: What is summed, float64 [rows, k].
        low: What the minimum is taken of, float64 [rows, k].
        high: What the maximum is taken of, float64 [rows, k].

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
