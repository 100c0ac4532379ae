"""Position and turn of the tokens of a batch, from the mask of the tokens that count."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import POSITION_EDGES, TURNS

BETWEEN: Final = len(POSITION_EDGES)
"""Column of `Places.bounds`, and of differences of it, at which turns follow positions."""


class TokenSlice(NamedTuple):
    """The tokens of a batch that a slice selects."""

    column: int  # number of the slice among those of the membership
    mask: NDArray[np.bool_]  # bool [sequences, tokens]


@dataclass(frozen=True, eq=False)
class Places:
    """Positions and turns of a batch."""

    counts: NDArray[np.bool_]  # which tokens count, bool [sequences, tokens]
    given: NDArray[np.integer] | None = None  # positions, rising; None where the first token that counts is at 0

    def of_parts(self, rows: NDArray[np.integer], counts: NDArray[np.bool_]) -> Places:
        """The places of some of the rows again, where fewer tokens count, bool [parts, tokens]."""
        found = Places(counts)
        found.__dict__.update({name: getattr(self, name)[rows] for name in ("positions", "turns", "begins", "bounds")})
        return found

    @cached_property
    def positions(self) -> NDArray[np.integer]:
        """Position of each token, integers [sequences, tokens]; of those that do not count, any."""
        if self.given is not None:
            return self.given
        found: NDArray[np.integer] = np.arange(self.counts.shape[1]) - self.counts.argmax(1)[:, None]
        return found

    @cached_property
    def turns(self) -> NDArray[np.integer]:
        """Turn of each token that counts, integers [sequences, tokens]; the others have that of the last before."""
        return np.cumsum(self.begins, axis=1)

    @cached_property
    def bounds(self) -> NDArray[np.intp]:
        """Columns between which the tokens of each of PLACES are, integers [sequences, bins + 1 + turns + 1]."""
        sequences, width = self.counts.shape
        found = np.full((sequences, BETWEEN + 1 + TURNS + 1), width, dtype=np.intp)
        if self.given is None:
            first = self.counts.argmax(1)
            found[:, :BETWEEN] = np.minimum(first[:, None] + np.array(POSITION_EDGES), width)
        else:
            for column, edge in enumerate(POSITION_EDGES):
                beyond = self.counts & (self.given >= edge)
                found[:, column] = np.where(beyond.any(1), beyond.argmax(1), width)
        found[:, BETWEEN + 1] = 0
        several = np.flatnonzero(np.count_nonzero(self.begins, axis=1) > 1)
        if several.size:
            number = np.cumsum(self.begins[several], axis=1)
            for turn in range(2, TURNS + 1):
                found[several, BETWEEN + turn] = np.count_nonzero(number < turn, axis=1)
        return found

    @cached_property
    def begins(self) -> NDArray[np.bool_]:
        """Mask of the tokens that are the first of a turn, bool [sequences, tokens]: prefill computed these."""
        begins = self.counts.copy()
        follows = self.counts[:, :-1]
        if self.given is not None:
            follows = follows & (np.diff(self.given, axis=1) == 1)
        begins[:, 1:] &= ~follows
        return begins
