"""One series' panes on one grid: a view of the columns that all series share, and what it has of explicit bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from kc_otel.judge.histograms import ExplicitHistogram, Histogram, layout, union
from kc_otel.judge.panes import PaneColumns, PaneContent, PaneGrid, WindowContent
from kc_otel.stats import Binned, ExponentialHistogram

_HISTOGRAMS_BEFORE_MERGE: Final = 8
"""Histograms that a pane collects before they are merged."""


@dataclass(slots=True)
class PaneHistory:
    """Panes of one series and one grid.

    Attributes:
        grid: The panes.
        columns: Panes of all series.
        number: Of the grid.
        row: Of the series.
    """

    grid: PaneGrid
    columns: PaneColumns
    number: int
    row: int
    _explicit: dict[int, list[ExplicitHistogram]] = field(default_factory=dict)
    _parts: tuple[int, int, tuple[Histogram, ...]] | None = None
    _whole: tuple[tuple[Histogram, ...], Histogram | None] | None = None
    _binned: Binned | None = None

    def add(self, time: float, now: float, increment: ExplicitHistogram) -> None:
        """Count an increment of explicit bounds at its time."""
        index = self.grid.index(time)
        if index < self.grid.oldest(now):
            return
        parts = self._explicit.setdefault(index, [])
        parts.append(increment)
        if len(parts) >= _HISTOGRAMS_BEFORE_MERGE:
            self._explicit[index] = [ExplicitHistogram.union(parts)]
        self._parts = None

    def make_way(self, increment: Histogram) -> bool:
        """Throw away panes of another layout than an increment has. Returns whether there were any."""
        if self.accepts(increment):
            return False
        self._explicit.clear()
        self._parts = None
        self.columns.drop([self.row], [self.number])
        return True

    def accepts(self, increment: Histogram) -> bool:
        """Return True if the increment can be counted without dropping panes of another layout."""
        if self._explicit:
            return layout(next(iter(self._explicit.values()))[0]) == layout(increment)
        return isinstance(increment, ExponentialHistogram) or not self._exponential()

    def turn_back(self, now: float) -> set[int]:
        """Move what of explicit bounds lies ahead of a clock that went back to where it is now.

        Returns:
            The panes that changed.
        """
        head = self.grid.index(now)
        ahead = [index for index in self._explicit if index > head]
        for index in ahead:
            self._explicit.setdefault(head, []).extend(self._explicit.pop(index))
        self._parts = None
        return {*ahead, head} if ahead else set()

    @property
    def numbers(self) -> list[int]:
        """Panes in which anything is held, ascending."""
        return sorted({*self._explicit, *(content.pane for content in self._exponential())})

    @property
    def has_explicit(self) -> bool:
        """True if it holds histograms of explicit bounds."""
        return bool(self._explicit)

    def is_explicit(self, now: float) -> bool:
        """Return True if it holds histograms of explicit bounds that are not too old."""
        for index in [index for index in self._explicit if index < self.grid.oldest(now)]:
            del self._explicit[index]
        return self.has_explicit

    def parts(self, now: float) -> tuple[Histogram, ...]:
        """Everything in the window that ends now, to be merged; the same object until there is more or less."""
        head = self.grid.index(now)
        self.columns.settle()
        version = int(self.columns.version[self.row]) if self.row < self.columns.version.size else 0
        if self._parts is None or self._parts[:2] != (head, version):
            self.is_explicit(now)
            self._parts = (head, version, tuple(self._of(self.grid.window(now))))
        return self._parts[2]

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

    def last(self, now: float, seconds: float) -> Histogram | None:
        """Everything in the panes that began within the last `seconds`, at most the window; None when nothing is."""
        panes = min(max(math.ceil(seconds / self.grid.width), 1), self.grid.size)
        head = self.grid.index(now)
        return self._union(range(head - panes + 1, head + 1))

    def pane(self, index: int) -> Histogram | None:
        """Everything in one pane."""
        return self._union(range(index, index + 1))

    def put(self, index: int, content: ExplicitHistogram) -> None:
        """Restore a saved pane, and add it to the existing content."""
        if self.accepts(content):
            self._explicit.setdefault(index, []).append(content)
            self._parts = None

    def _exponential(self) -> list[PaneContent]:
        everything = self.columns.held(self.number, self.columns.numbers(self.number))
        return [content for content in everything if content.of(self.row) is not None]

    def _of(self, panes: range) -> Iterator[Histogram]:
        if self._explicit:
            for pane in panes:
                yield from self._explicit.get(pane, ())
        else:
            yield from WindowContent([*self.columns.held(self.number, panes)]).parts(self.row)

    def _union(self, panes: range) -> Histogram | None:
        parts = [*self._of(panes)]
        return union(parts) if parts else None
