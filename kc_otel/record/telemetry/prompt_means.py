"""Means over what depends on each other: the rollouts of a prompt, and the prompts of a training step.

Rollouts of one prompt share its drift, so a prompt is one observation: the mean over its rollouts. They may come in
different batches. Where the number of rollouts of a prompt is known it is waited for, in a bounded buffer, until the
step after the next begins, and for a bounded time; where it is not, a batch is taken to hold all rollouts of its
prompts. Where nobody knows the prompts, each sequence is taken to be one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import PLACES, TURN
from kc_otel.record.telemetry.buckets import QuantityStream, Slots
from kc_otel.record.telemetry.reduce import Reduced
from kc_otel.stats.histogram import Histogram

Floats = NDArray[np.float64]
_Key = tuple[Hashable, Hashable]  # step and name of a prompt

_FIRST_TURN, _SECOND_TURN = PLACES.index(f"{TURN}:1"), PLACES.index(f"{TURN}:2")
_MAX_OPEN_PROMPTS: Final = 16_384
"""Prompts that wait for more rollouts; beyond that the oldest counts with those that came."""
_MAX_REMEMBERED_PROMPTS: Final = 16_384
"""Prompts that have counted, by which it is noticed that more of their rollouts come."""


@dataclass(frozen=True, slots=True, eq=False)
class Rollouts:
    """Grouping of a batch's sequences by prompt.

    Each prompt, or that of each sequence, has `size` rollouts; where it is None a batch holds all. Where the `step` is
    not known each batch is one. A row that is a further part of a sequence that has a row already is there `again`.
    """

    prompts: Sequence[Hashable] | None = None  # name of the prompt of each sequence; None where nobody knows it
    size: int | Sequence[int] | None = None
    step: Hashable = None
    at: float = 0.0  # when the batch was measured, monotonic seconds
    again: NDArray[np.bool_] | None = None
    whole: NDArray[np.intp] | None = None  # row that each row's whole sequence counts at; None where each is one

    def repeated(self, times: int, sequences: int) -> Rollouts:
        """Append, so many times, a further part of each sequence."""
        if not times:
            return self
        again = np.ones((1 + times) * sequences, dtype=np.bool_)
        again[:sequences] = False if self.again is None else self.again
        names = None if self.prompts is None else [*self.prompts] * (1 + times)
        size = self.size if self.size is None or isinstance(self.size, int) else [*self.size] * (1 + times)
        return Rollouts(names, size, self.step, self.at, again)


class Finished(NamedTuple):
    """Prompts and steps that are complete and counted.

    Each has the mean of each quantity over a prompt's rollouts, or a step's prompts, in a slice; NaN where it has none.
    """

    prompts: Floats | None  # [quantities, prompts, slices]; None where nobody knows the prompts
    steps: Floats  # [quantities, steps, slices]
    rollouts: Floats  # of each prompt, in any slice [prompts]


@dataclass(slots=True, eq=False)
class _Sums:
    """Partial sums of a prompt or a step."""

    sums: Floats  # of values, and how many they are [2, quantities, slices]
    since: float = 0.0
    arrived: int = 0
    squares: float = 0.0  # sum of squares of the first quantity in the first slice


class PromptMeans:
    """Counts prompts and steps once, each waited for at most `patience` seconds. Not thread-safe.

    `outcomes` counts prompts by how they counted: `whole`; `part` where some rollouts did not come in time, or came
    after it had counted; `assumed`, sequences that were taken for prompts of their own.
    """

    def __init__(self, quantities: Sequence[str], slices: int, *, patience: float = 900.0) -> None:
        self.quantities: Final = tuple(quantities)
        self.outcomes: Counter[str] = Counter()
        self._shape = (len(self.quantities), slices)
        self._patience = patience
        self._open: OrderedDict[_Key, _Sums] = OrderedDict()
        self._counted: OrderedDict[_Key, None] = OrderedDict()
        self._step: tuple[Hashable, _Sums] | None = None
        self._newest_step = 0
        self._variance = np.zeros(6)
        """Of the first quantity in the first slice: prompts, rollouts n_i, sums of n_i^2, x, x^2, (sum x)_i^2 / n_i."""

    @property
    def design_effect(self) -> float:
        """Factor 1 + (m - 1) rho by which a prompt's rollouts tell less than independent sequences; NaN while unknown.

        There are m rollouts a prompt, and rho is their intra-class correlation, by a one-way analysis of variance.
        """
        prompts, rollouts, sizes_squared, total, squares, between = self._variance.tolist()
        if prompts < 2 or rollouts <= prompts:
            return np.nan
        within = max(squares - between, 0.0) / (rollouts - prompts)
        among = max(between - total * total / rollouts, 0.0) / (prompts - 1)
        size = (rollouts - sizes_squared / rollouts) / (prompts - 1)
        whole = among + (size - 1.0) * within
        if size <= 1.0 or whole <= 0.0:
            return np.nan
        return float(max(1.0, 1.0 + (size - 1.0) * (among - within) / whole))

    @property
    def waiting(self) -> int:
        """Prompts and steps that wait for more."""
        return len(self._open) + (self._step is not None)

    def add(self, given: Floats, membership: NDArray[np.bool_], of: Rollouts) -> Finished:
        """Take a batch: values of sequences [quantities, n], NaN for none; and their slices [n, slices]."""
        if of.prompts is None:
            found = np.where(membership, given[..., None], np.nan)
            some = ~np.isnan(given).all(0)
            self.outcomes["assumed"] += int(np.count_nonzero(some if of.again is None else some & ~of.again))
            return Finished(None, self._in_steps(found[:, some], of), np.zeros(0))
        number: dict[Hashable, int] = {}
        prompt = np.fromiter((number.setdefault(name, len(number)) for name in of.prompts), np.intp)
        sums = _summed(given, prompt, membership, len(number))
        squares = _summed(given[:1] * given[:1], prompt, membership[:, :1], len(number))[0, 0, :, 0].tolist()
        expected = np.zeros(len(number), np.int64)
        if of.size is not None:
            np.maximum.at(expected, prompt, of.size)
        whole = prompt if of.again is None else prompt[~of.again]
        arrived = np.bincount(whole, minlength=len(number)).tolist()
        ready: list[tuple[_Key, _Sums, bool]] = []
        for place, (name, size) in enumerate(zip(number, expected.tolist(), strict=True)):
            key, part = (of.step, name), _Sums(sums[:, :, place], of.at, arrived[place], squares[place])
            if key in self._counted:
                ready.append((key, part, False))
                continue
            if (known := self._open.pop(key, None)) is not None:
                total, count = known.sums + part.sums, known.arrived + part.arrived
                part = _Sums(total, min(known.since, of.at), count, known.squares + part.squares)
            if part.arrived < size:
                self._open[key] = part
                continue
            ready.append((key, part, True))
            if of.size is None and of.step is not None:
                self._remember(key)
        if isinstance(of.step, int) and of.step > self._newest_step:
            self._newest_step = of.step
            left = [key for key in self._open if isinstance(key[0], int) and key[0] < of.step - 1]
            ready += [(key, self._open.pop(key), False) for key in left]
        while len(self._open) > _MAX_OPEN_PROMPTS:
            ready.append((*self._open.popitem(last=False), False))
        done = self._done(ready)
        assert done.prompts is not None
        return done._replace(steps=self._in_steps(done.prompts, of))

    def expire(self, now: float) -> Finished:
        """Count incomplete prompts that waited long enough."""
        late = [key for key, sums in self._open.items() if now - sums.since > self._patience]
        found = self._done([(key, self._open.pop(key), False) for key in late])
        if self._step is None:
            return found
        assert found.prompts is not None
        steps = [self._in_steps(found.prompts, Rollouts(step=self._step[0], at=self._step[1].since))]
        if self._step is not None and now - self._step[1].since > self._patience:
            steps.append(self._end_step())
        return found._replace(steps=np.concatenate(steps, axis=1))

    def _done(self, ready: Sequence[tuple[_Key, _Sums, bool]]) -> Finished:
        """Count these prompts as finished, and return their means."""
        for key, _, whole in ready:
            self.outcomes["whole" if whole else "part"] += 1
            if not whole:
                self._remember(key)
        quantities, slices = self._shape
        none = np.zeros((quantities, 0, slices))
        if not ready:
            return Finished(none, none, np.zeros(0))
        sums = np.stack([prompt.sums for _, prompt, _ in ready], axis=2)
        some = sums[1, 0, :, 0] > 0
        totals, counts = sums[:, 0, some, 0]
        squares, arrived = np.array([(prompt.squares, prompt.arrived) for _, prompt, _ in ready]).T
        terms = np.ones_like(counts), counts, counts**2, totals, squares[some], totals**2 / counts
        self._variance += [term.sum() for term in terms]
        return Finished(_ratio(sums), none, arrived)

    def _remember(self, key: _Key) -> None:
        self._counted[key] = None
        if len(self._counted) > _MAX_REMEMBERED_PROMPTS:
            self._counted.popitem(last=False)

    def _in_steps(self, found: Floats, of: Rollouts) -> Floats:
        """Add prompts to their step; returns the means of the steps that ended with that."""
        ended = []
        if self._step is not None and self._step[0] != of.step:
            ended.append(self._end_step())
        if found.shape[1]:
            if self._step is None:
                self._step = of.step, _Sums(np.zeros((2, *self._shape)), of.at)
            there = ~np.isnan(found)
            self._step[1].sums += np.stack([np.where(there, found, 0.0), there]).sum(2)
            self._step[1].since = max(self._step[1].since, of.at)
        if of.step is None and self._step is not None:
            ended.append(self._end_step())
        return np.concatenate(ended, axis=1) if ended else np.zeros((self._shape[0], 0, self._shape[1]))

    def _end_step(self) -> Floats:
        assert self._step is not None
        (_, sums), self._step = self._step, None
        return _ratio(sums.sums)[:, None]


class PlaceMeans:
    """Drift by position and turn: a histogram of prompts' means of (1-w)+ there for each of PLACES. Not thread-safe."""

    def __init__(self, slots: Slots, patience: float) -> None:
        self._prompts: Final = PromptMeans(PLACES, 1, patience=patience)
        self._stream: Final = QuantityStream(len(PLACES), slots)

    @property
    def waiting(self) -> int:
        """Prompts that wait for more rollouts."""
        return self._prompts.waiting

    def add(self, reduced: Reduced, members: NDArray[np.bool_], of: Rollouts) -> None:
        """Take a batch, of which the sequences `members`, bool [sequences], count."""
        if reduced.places is None:
            return
        means = np.full((len(PLACES), members.size), np.nan)
        means[:, reduced.rows] = _ratio(reduced.places).T
        means = np.minimum(means, 1.0)  # a mean is at most its largest value; a sum's last digit may not be
        means[:, ~members] = np.nan
        if of.prompts is None:
            self._stream.add_by_slice(means.T)
            return
        names = [(of.step, name) for name in of.prompts]  # a step of its own would be waited for
        once = Rollouts(names, of.size, None, of.at, of.again)
        self._count(self._prompts.add(means, members[:, None], once))

    def expire(self, now: float) -> None:
        """Count the prompts that were waited for long enough; `now` is monotonic seconds."""
        self._count(self._prompts.expire(now))

    def histograms(self) -> dict[str, Histogram]:
        """Histogram of each of PLACES that has observations; without a second turn, those of turns say nothing."""
        every = [self._stream.histogram(place) for place in range(len(PLACES))]
        if every[_SECOND_TURN] is None:
            every[_FIRST_TURN] = None
        return {place: found for place, found in zip(PLACES, every, strict=True) if found is not None}

    def _count(self, found: Finished) -> None:
        if found.prompts is not None and found.prompts.shape[1]:
            self._stream.add_by_slice(found.prompts[..., 0].T)


def _summed(values: Floats, prompt: NDArray[np.intp], membership: NDArray[np.bool_], prompts: int) -> Floats:
    """Sums of values [quantities, n] by prompt, and how many they are [2, quantities, prompts, slices]."""
    if not prompt.size:
        return np.zeros((2, values.shape[0], prompts, membership.shape[1]))
    order = np.argsort(prompt, kind="stable")
    starts = np.flatnonzero(np.diff(prompt[order], prepend=-1))
    values, there = values[:, order, None], ~np.isnan(values)[:, order, None] & membership[order]
    return np.add.reduceat(np.stack([np.where(there, values, 0.0), there]), starts, axis=2)


def _ratio(sums: Floats) -> Floats:
    """Means from sums and numbers of values, stacked; NaN of none."""
    found: Floats = np.divide(sums[0], sums[1], out=np.full(sums[0].shape, np.nan), where=sums[1] > 0)
    return found
