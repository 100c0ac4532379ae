"""What every file format is read into: rows of numbers of any length, one row per sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import Scalar

__all__ = ["Problems", "Ragged", "RaggedTable"]


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Numbers of S rows, one row after the other.

    Attributes:
        values: All numbers, [M], or [M, V] for logits.
        lengths: Numbers of each row, int64 [S].
    """

    values: NDArray[Any]
    lengths: NDArray[np.int64]

    @classmethod
    def of_rows(cls, rows: list[NDArray[Any]]) -> Ragged:
        """From one array per row."""
        lengths = np.fromiter((row.shape[0] for row in rows), dtype=np.int64, count=len(rows))
        return cls(np.concatenate(rows) if rows else np.empty(0), lengths)


@dataclass(frozen=True, slots=True, eq=False)
class RaggedTable:
    """A file's content.

    Attributes:
        source: The file.
        ragged: Numbers by role.
        names: Column of each role, for messages.
        attributes: One mapping per row.
        place: Words for a row, such as `line 12`.
        unread: Columns that are no role's and no attribute either, and why not.
    """

    source: str
    ragged: Mapping[str, Ragged]
    names: Mapping[str, str]
    attributes: tuple[Mapping[str, Scalar], ...]
    place: Callable[[int], str]
    unread: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Problems:
    """Sentences about what is wrong, up to a cap; the rest is counted."""

    source: str
    cap: int = 20
    _kept: list[str] = field(default_factory=list)
    _more: int = 0

    def add(self, sentence: str, *, times: int = 1) -> None:
        """Note a problem; `times` counts others of its kind that are not listed."""
        if len(self._kept) < self.cap:
            self._kept.append(f"{self.source}: {sentence}")
            self._more += times - 1
        else:
            self._more += times

    def all(self) -> tuple[str, ...]:
        """Every sentence, and how many were left out."""
        rest = (f"{self.source}: and {self._more} more problems like these",) if self._more else ()
        return (*self._kept, *rest)
