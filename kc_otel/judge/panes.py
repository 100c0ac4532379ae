"""Rolling windows: a ring of mergeable panes.

A window of W seconds is made of N panes of W/N seconds, aligned to the Unix epoch; it holds the pane of `now` and the
N - 1 before it, so it reaches back between W - W/N and W seconds, and never holds anything older than W. One pane more
is kept for clocks that disagree. What a window holds is read as parts, for whoever merges those of many windows at
once, or merged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kc_otel.judge.histograms import Histogram, layout, union
from kc_otel.stats import Binned, ExponentialHistogram

__all__ = ["Ring"]

_PARTS = 8
"""Increments that a pane collects before they are merged: merging many at once is cheaper than one by one."""


@dataclass(slots=True)
class Ring:
    """Panes of one series for one window length.

    Attributes:
        width: Seconds that a pane covers.
        size: Panes that a window has.
    """

    width: float
    size: int
    _panes: dict[int, list[Histogram]] = field(default_factory=dict)
    _parts: tuple[int, tuple[Histogram, ...]] | None = None
    _whole: tuple[tuple[Histogram, ...], Histogram | None] | None = None
    _binned: Binned | None = None

    def index(self, time: float) -> int:
        """Number of the pane that covers this Unix time in seconds."""
        return math.floor(time / self.width)

    def oldest(self, now: float) -> int:
        """Number of the oldest pane that is kept."""
        return self.index(now) - self.size

    def add(self, time: float, now: float, increment: Histogram) -> bool:
        """Count an increment at its time. Returns whether panes of another layout had to be thrown away for it."""
        index = self.index(min(time, now))
        if index < self.oldest(now):
            return False
        afresh = self._layout_differs(increment)
        if afresh:
            self._panes.clear()
        parts = self._panes.setdefault(index, [])
        parts.append(increment)
        if len(parts) >= _PARTS:
            self._panes[index] = [union(parts)]
        self._parts = None
        return afresh

    def accepts(self, increment: Histogram) -> bool:
        """Whether it can be counted without throwing away panes of another layout."""
        return not self._layout_differs(increment)

    def turn_back(self, now: float) -> set[int]:
        """Move what lies ahead of a clock that went back to where it is now. Returns the panes that changed."""
        head = self.index(now)
        ahead = [index for index in self._panes if index > head]
        for index in ahead:
            self._panes.setdefault(head, []).extend(self._panes.pop(index))
        self._parts = None
        return {*ahead, head} if ahead else set()

    def held(self, panes: Iterable[int]) -> Iterator[tuple[int, Histogram]]:
        """What some panes hold, each part with the number of its pane."""
        for pane in panes:
            for part in self._panes.get(pane, ()):
                yield pane, part

    @property
    def newest(self) -> int:
        """Number of the newest pane that has anything; 0 for none."""
        return max(self._panes, default=0)

    def forget(self, head: int) -> None:
        """Forget the panes that are older than those kept at the time of this one."""
        for index in [index for index in self._panes if index < head - self.size]:
            del self._panes[index]

    def parts(self, now: float) -> tuple[Histogram, ...]:
        """Everything in the window that ends now, to be merged; the same object until there is more or less."""
        head = self.index(now)
        if self._parts is None or self._parts[0] != head:
            self.forget(head)
            first = head - self.size
            held = [part for index in sorted(self._panes) if first < index <= head for part in self._panes[index]]
            self._parts = (head, tuple(held))
        return self._parts[1]

    def window(self, now: float) -> Histogram | None:
        """Everything in the window that ends now; None when nothing is."""
        parts = self.parts(now)
        if self._whole is None or self._whole[0] is not parts:
            self._whole, self._binned = (parts, union(parts) if parts else None), None
        return self._whole[1]

    def binned(self, now: float) -> Binned:
        """The window that ends now, as the view that bounds are computed from."""
        whole = self.window(now)
        if self._binned is None:
            self._binned = (whole or ExponentialHistogram.empty(0)).binned()
        return self._binned

    def count(self, now: float) -> int:
        """Observations in the window that ends now."""
        whole = self.window(now)
        return whole.count if whole is not None else 0

    def last(self, now: float, seconds: float) -> Histogram | None:
        """Everything in the panes that began within the last `seconds`, at most the window; None when nothing is."""
        panes = min(max(math.ceil(seconds / self.width), 1), self.size)
        head = self.index(now)
        return self._union(head - panes + 1, head)

    def pane(self, index: int) -> Histogram | None:
        """Everything in one pane."""
        parts = self._panes.get(index)
        if not parts:
            return None
        if len(parts) > 1:
            parts = self._panes[index] = [union(parts)]
        return parts[0]

    def put(self, index: int, content: Histogram) -> None:
        """Restore a pane; what is there already is added to it."""
        if self._layout_differs(content):
            return
        self._panes.setdefault(index, []).append(content)
        self._parts = None

    def _layout_differs(self, histogram: Histogram) -> bool:
        present = next(iter(self._panes.values()), None)
        return present is not None and layout(present[0]) != layout(histogram)

    def _union(self, first: int, last: int) -> Histogram | None:
        parts = [part for index in sorted(self._panes) if first <= index <= last if (part := self.pane(index))]
        return union(parts) if parts else None
