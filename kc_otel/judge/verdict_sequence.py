"""Verdicts of all cells of a contract, made of columns when they are asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, overload

import numpy as np
from numpy.typing import NDArray

from kc_otel.judge.cell_columns import ClauseColumns, Judged
from kc_otel.judge.verdict import Cell, Status, Verdict

__all__ = ["Verdicts", "cells_of", "selected"]

_UNKNOWN: Final = -1
"""Of a cell that is not judged yet, in place of the code of its status."""


class Verdicts(Sequence[Verdict]):
    """Verdicts of all cells of a contract, made of columns when they are asked for.

    Args:
        judged: What was found of all cells.
        made: Those that were made one by one, by their numbers.
    """

    def __init__(self, judged: Judged, made: Mapping[int, Verdict]) -> None:
        self._judged, size = judged, len(judged.places)
        self._made: list[Verdict | None] = [None] * size
        self._status = np.full(size, _UNKNOWN, np.int8)
        self._where = np.zeros((2, size), np.int64)
        self._columns: list[ClauseColumns] = []
        self._numbers: dict[Cell, int] = {}
        self._take(made, judged.columns)

    def selected(self, statuses: Collection[Status], cells: Iterable[Cell] = ()) -> list[Verdict]:
        """Those that have one of some statuses, and those of some cells, in their order; no other is made."""
        self._settle()
        wanted = np.zeros(self._status.size, np.bool_)
        for status in statuses:
            wanted |= self._status == status.code
        for cell in cells:
            if not self._numbers:
                self._numbers = {place.cell: number for number, place in enumerate(self._judged.places)}
            if cell in self._numbers:
                wanted[self._numbers[cell]] = True
        return [self[number] for number in np.flatnonzero(wanted).tolist()]

    @property
    def cells(self) -> list[Cell]:
        """The cells, in the order of their verdicts."""
        return [place.cell for place in self._judged.places]

    def __len__(self) -> int:
        return len(self._made)

    def __iter__(self) -> Iterator[Verdict]:
        return (self[number] for number in range(len(self._made)))

    @overload
    def __getitem__(self, number: int) -> Verdict: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Verdict]: ...
    def __getitem__(self, number: int | slice) -> Verdict | Sequence[Verdict]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        verdict = self._made[number]
        if verdict is None:
            self._settle()
            column, place = self._where[:, number].tolist()
            verdict = self._made[number] = self._made[number] or self._columns[column].verdict(place)
        return verdict

    def _settle(self) -> None:
        """See to it that all are judged."""
        waiting = self._judged.waiting
        if waiting is not None:
            waiting.settle()
            self._judged = self._judged._replace(waiting=None)
            self._take(waiting.made, waiting.columns)

    def _take(self, made: Mapping[int, Verdict], columns: Sequence[tuple[NDArray[np.int64], ClauseColumns]]) -> None:
        for number, verdict in made.items():
            self._made[number], self._status[number] = verdict, verdict.status.code
        for numbers, found in columns:
            self._where[0, numbers], self._where[1, numbers] = len(self._columns), np.arange(numbers.size)
            self._status[numbers] = np.where(found.passes, Status.PASS.code, Status.INCONCLUSIVE.code)
            self._columns.append(found)


def selected(verdicts: Iterable[Verdict], statuses: Collection[Status], cells: Iterable[Cell] = ()) -> list[Verdict]:
    """Verdicts that have one of some statuses, and those of some cells, in their order."""
    if isinstance(verdicts, Verdicts):
        return verdicts.selected(statuses, cells)
    also = {*cells}
    return [one for one in verdicts if one.status in statuses or one.cell in also]


def cells_of(verdicts: Iterable[Verdict]) -> list[Cell]:
    """The cells that verdicts are about, in their order."""
    return verdicts.cells if isinstance(verdicts, Verdicts) else [one.cell for one in verdicts]
