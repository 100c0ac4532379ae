"""Drift by position and by turn: for each prompt, the mean of (1-w)+ over its tokens there, counted once.

The mean is over a prompt's rollouts of each rollout's mean over its tokens in the bin, as everywhere else. A prompt's
rollouts are collected as they are for clauses that are judged by prompt.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import PLACES, TURN
from kc_otel.record.telemetry.buckets import Slots
from kc_otel.record.telemetry.moments import QuantityStream
from kc_otel.record.telemetry.prompt_means import Finished, PromptMeans, Rollouts
from kc_otel.record.telemetry.reduce_host import Reduced
from kc_otel.stats.histogram import ExponentialHistogram

_FIRST_TURN, _SECOND_TURN = PLACES.index(f"{TURN}:1"), PLACES.index(f"{TURN}:2")


class PlaceMeans:
    """One histogram of prompts' means for each of PLACES. Not thread-safe.

    Args:
        slots: Buckets of the histograms.
        patience: Seconds for which a prompt is waited for whose rollouts come in several batches.
    """

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
        sums, counts = reduced.places
        means = np.full((len(PLACES), members.size), np.nan)
        means[:, reduced.rows] = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0).T
        means = np.minimum(means, 1.0)  # a mean is at most its largest value; a sum's last digit may not be
        means[:, ~members] = np.nan
        if of.prompts is None:
            self._stream.add_by_slice(means.T)
            return
        names = [(of.step, name) for name in of.prompts]  # a step of its own would be waited for
        once = Rollouts(names, of.size, None, of.at, of.again)
        self._count(self._prompts.add(dict(zip(PLACES, means, strict=True)), members[:, None], once))

    def expire(self, now: float) -> None:
        """Count the prompts that were waited for long enough; `now` is monotonic seconds."""
        self._count(self._prompts.expire(now))

    def histograms(self) -> dict[str, ExponentialHistogram]:
        """Histogram of each of PLACES that has observations; without a second turn, those of turns say nothing."""
        every = [self._stream.histogram(place) for place in range(len(PLACES))]
        if every[_SECOND_TURN] is None:
            every[_FIRST_TURN] = None
        return {place: found for place, found in zip(PLACES, every, strict=True) if found is not None}

    def _count(self, found: Finished) -> None:
        if found.prompts is not None and found.prompts.shape[1]:
            self._stream.add_by_slice(found.prompts[..., 0].T)
