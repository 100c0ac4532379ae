"""Common form of every file format: rows of numbers of any length, one row per sequence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import Scalar


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
        """Join arrays, each a row."""
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


_VARYING_PART: Final = re.compile(r"[-+]?\d[\d.,e+-]*|\b(?:nan|inf)\b")
"""Parts in which two sentences about one fault may differ."""


@dataclass(slots=True)
class Problems:
    """Problems of a file: the first occurrence of each fault, and a count."""

    source: str
    _first: dict[str, str] = field(default_factory=dict)
    _count: Counter[str] = field(default_factory=Counter)

    def add(self, sentence: str, *, times: int = 1) -> None:
        """Note a fault, and that it occurs so many times; sentences that differ in numbers alone are one fault."""
        kind = _VARYING_PART.sub("#", sentence)
        self._first.setdefault(kind, sentence)
        self._count[kind] += times

    def all(self) -> tuple[str, ...]:
        """Return a sentence for each fault."""
        return tuple(
            f"{self.source}: {first}" + (f" ({more:,} more like this)" if (more := self._count[kind] - 1) else "")
            for kind, first in self._first.items()
        )
