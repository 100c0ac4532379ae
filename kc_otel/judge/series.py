"""A series is (metric, slice, kernel pair) within a contract: its key, its panes, and when its pair was heard."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kc_otel.contract.model import Contract
from kc_otel.judge.histograms import Histogram
from kc_otel.judge.pane_history import PaneHistory
from kc_otel.judge.panes import PaneGrid

__all__ = ["LONG", "SHORT", "Heard", "Listening", "Pair", "Series", "SeriesKey", "grids"]

SHORT: Final = 0
LONG: Final = 1
_SHORT_PANES: Final = 10
_LONG_PANES: Final = 12
_GAPS: Final = 8

Pair = tuple[str, str]
"""Short fingerprints of the training and the inference kernel."""


class SeriesKey(NamedTuple):
    """A series within a contract. For `kc.input.invalid` the slice is the reason and the pair is empty.

    For what is observed of operators, `metric` names the operator too: see `points.series_name`.
    """

    metric: str
    slice: str
    kernel_train: str
    kernel_inference: str

    @property
    def pair(self) -> Pair:
        """The kernel pair."""
        return self.kernel_train, self.kernel_inference


@dataclass(slots=True)
class Series:
    """The panes of a series, and the Unix time in seconds of its newest observation.

    Attributes:
        row: Its number in the rows of what windows hold; -1 where no clause is about it.
    """

    histories: tuple[PaneHistory, PaneHistory]
    newest: float = 0.0
    row: int = -1

    @property
    def number(self) -> int:
        """Its row in the panes."""
        return self.histories[SHORT].row

    @property
    def has_explicit(self) -> bool:
        """Whether it holds histograms of explicit bounds."""
        short, long = self.histories
        return short.has_explicit or long.has_explicit

    def accepts(self, histogram: Histogram) -> bool:
        """Whether its buckets are those of what is in the panes."""
        return all(history.accepts(histogram) for history in self.histories)


@dataclass(slots=True)
class Heard:
    """When a kernel pair was last heard of, and how often it usually is.

    Attributes:
        last: Unix time in seconds.
        gaps: Seconds between its latest reports, at most _GAPS of them.
        since: Unix time in seconds from which on it has been heard of without falling silent.
    """

    last: float
    gaps: list[float] = field(default_factory=list)
    since: float = math.nan

    def __post_init__(self) -> None:
        if math.isnan(self.since):
            self.since = self.last

    def hear(self, now: float, heartbeat: float) -> None:
        """Count a report."""
        if now - self.last > self.patience(heartbeat):
            self.since = now
        if now > self.last:
            self.gaps = [*self.gaps[1 - _GAPS :], now - self.last]
            self.last = now

    def patience(self, heartbeat: float) -> float:
        """Seconds of silence that mean something: the heartbeat, from when the next report was due.

        A sender that reports once per minute is not silent between two reports. The second largest of the latest gaps
        tells when the next is due; the largest may have been an outage.
        """
        gaps = sorted(self.gaps)
        return heartbeat + (gaps[-2] if len(gaps) > 1 else heartbeat)


class Listening(NamedTuple):
    """When somebody was there to hear: nobody is silent while nobody listens.

    Attributes:
        since: Unix time in seconds from which on this process listens.
        before: Unix time in seconds until which the one before it did.
    """

    since: float
    before: float = -math.inf

    def silence(self, last: float, now: float) -> float:
        """Seconds of silence of who was heard last at a Unix time."""
        if last >= self.since:
            return now - last
        return now - self.since + max(min(self.before, self.since) - last, 0.0)


def grids(contract: Contract) -> tuple[PaneGrid, PaneGrid]:
    """The panes of the short and of the long window."""
    short = contract.observability.window
    long = max(contract.observability.long_window, short)
    return PaneGrid(short / _SHORT_PANES, _SHORT_PANES), PaneGrid(long / _LONG_PANES, _LONG_PANES)
