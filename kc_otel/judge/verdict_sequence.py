"""Verdicts of all cells of a contract, made of columns when they are asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import overload

import numpy as np

from kc_otel.judge.cell_columns import ClauseColumns, Judged
from kc_otel.judge.verdict import Cell, Status, Verdict


class Verdicts(Sequence[Verdict]):
    """Verdicts of all cells of a contract, made of columns when they are asked for.

    Args:
        judged: Result for all cells.
        made: Those that were made one by one, by their numbers.
    """

    def __init__(self, judged: Judged, made: Mapping[int, Verdict]) -> None:
        self._places, size = judged.places, len(judged.places)
        self._made: list[Verdict | None] = [None] * size
        self._status = np.zeros(size, np.int8)
        self._where = np.zeros((2, size), np.int64)
        self._columns: list[ClauseColumns] = []
        self._numbers: dict[Cell, int] = {}
        for number, verdict in made.items():
            self._made[number], self._status[number] = verdict, verdict.status.code
        for numbers, found in judged.columns:
            self._where[0, numbers], self._where[1, numbers] = len(self._columns), np.arange(numbers.size)
            self._status[numbers] = np.where(found.passes, Status.PASS.code, Status.INCONCLUSIVE.code)
            self._columns.append(found)

    def selected(self, statuses: Collection[Status], cells: Iterable[Cell] = ()) -> list[Verdict]:
        """Those that have one of some statuses, and those of some cells, in their order; no other is made."""
        wanted = np.zeros(self._status.size, np.bool_)
        for status in statuses:
            wanted |= self._status == status.code
        for cell in cells:
            if not self._numbers:
                self._numbers = {place.cell: number for number, place in enumerate(self._places)}
            if cell in self._numbers:
                wanted[self._numbers[cell]] = True
        return [self[number] for number in np.flatnonzero(wanted).tolist()]

    @property
    def cells(self) -> list[Cell]:
        """The cells, in the order of their verdicts."""
        return [place.cell for place in self._places]

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
            return [self[at] for at in range(*number.indices(len(self)))]
        verdict = self._made[number]
        if verdict is None:
            column, place = self._where[:, number].tolist()
            verdict = self._made[number] = self._columns[column].verdict(place)
        return verdict


def selected(verdicts: Iterable[Verdict], statuses: Collection[Status], cells: Iterable[Cell] = ()) -> list[Verdict]:
    """Verdicts that have one of some statuses, and those of some cells, in their order."""
    if isinstance(verdicts, Verdicts):
        return verdicts.selected(statuses, cells)
    also = {*cells}
    return [verdict for verdict in verdicts if verdict.status in statuses or verdict.cell in also]


def cells_of(verdicts: Iterable[Verdict]) -> list[Cell]:
    """The cells that verdicts are about, in their order."""
    return verdicts.cells if isinstance(verdicts, Verdicts) else [verdict.cell for verdict in verdicts]
