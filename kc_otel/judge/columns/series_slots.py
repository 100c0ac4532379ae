"""Slots: what series have counted since it was last put into their panes, one for each short and long pane.

A slot has room for SPAN buckets of each sign, of one scale and one zero bucket. What does not fit into the slot of a
series begins another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kc_otel.judge.columns.fold import CLOSED, NONE, SLOT, SPAN, used_parts
from kc_otel.judge.contract_state import ContractState
from kc_otel.judge.series import SeriesKey
from kc_otel.stats.histogram_columns import HistogramColumns

__all__ = ["SeriesSlots"]

Numbers = NDArray[np.int64]

_SLOTS: Final = 4096


class _Counted(NamedTuple):
    """Slots of one contract's series.

    Attributes:
        contract: Its number.
        which: Numbers of the slots, ascending.
        keys: The series of each.
    """

    contract: int
    which: Numbers
    keys: list[SeriesKey]


class SeriesSlots:
    """The slots, and whose they are.

    Args:
        states: Where the series are, by the number of their contract.

    Attributes:
        slots: What was counted, but for the buckets: SLOT [n].
        buckets: Counts of the positive and of the negative buckets [2, n, SPAN]; unwritten where a slot has none.
        used: How many slots are in use.
        of: The slots that each series counts into, one for even and one for odd short panes: where a pane ends, some
            senders are still in the one before [series, 2]. NONE for no slot, CLOSED for a series that takes nothing.
    """

    def __init__(self, states: Sequence[ContractState]) -> None:
        self._states = states
        self.slots = np.zeros(_SLOTS, SLOT)
        self.buckets = np.zeros((2, _SLOTS, SPAN), np.int64)
        self.used = 0
        self.forget()

    def forget(self) -> None:
        """Know no series; what was counted has to be settled before."""
        self._numbers: dict[tuple[int, SeriesKey], int] = {}
        self._keys: list[tuple[int, SeriesKey]] = []
        self._settled, self._counted = np.zeros(0, np.int64), list[_Counted]()
        self.of = np.full((64, 2), NONE)

    def number_of(self, contract: int, key: SeriesKey) -> int:
        """The number of a series, which is open from now on."""
        number = self._numbers.get((contract, key))
        if number is None:
            number = self._numbers[contract, key] = len(self._keys)
            self._keys.append((contract, key))
            if number == len(self.of):
                self.of = np.concatenate([self.of, np.full((number, 2), NONE)])
        elif self.of[number, 0] == CLOSED:
            self.of[number] = NONE
        return number

    def close(self, metric: str) -> None:
        """Count nothing for a metric's series until they are opened."""
        for number, (_, key) in enumerate(self._keys):
            if key.metric == metric:
                self.of[number] = CLOSED

    def make_room(self, most: int) -> None:
        """See to it that as many more slots may be taken."""
        if self.used + most > self.slots.size:
            self.settle()

    def settle(self) -> None:
        """Put what was counted into panes."""
        used, self.used = self.used, 0
        if not used:
            return
        every = self.slots[:used]
        series = every["series"].copy()
        self.of[series] = NONE
        for number, which, keys in self._by_contract(series):
            of = every if which.size == used else every[which]
            sides = (used_parts(self.slots, buckets, which, side) for side, buckets in enumerate(self.buckets))
            columns = HistogramColumns(
                of["scale"].copy(),
                of["zero_threshold"].copy(),
                of["count"].copy(),
                of["zero_count"].copy(),
                of["sum"] + of["carry"],
                of["min"].copy(),
                of["max"].copy(),
                of["observed"] != 0,
                *sides,
            )
            self._states[number].count_all(keys, columns, of["newest"].tolist(), of["now"].tolist())

    def _by_contract(self, series: Numbers) -> list[_Counted]:
        """The slots of each contract, by their series: the same as the last time, mostly."""
        if not np.array_equal(series, self._settled):
            keys = [self._keys[number] for number in series.tolist()]
            contracts = np.array([contract for contract, _ in keys])
            self._settled, self._counted = series, []
            for number in np.unique(contracts).tolist():
                which = np.flatnonzero(contracts == number)
                self._counted.append(_Counted(number, which, [keys[slot][1] for slot in which.tolist()]))
        return self._counted
