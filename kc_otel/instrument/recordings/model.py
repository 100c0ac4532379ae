"""A recording: both kernels' log-probabilities of the same sampled tokens, packed, and what is known of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import Scalar

__all__ = ["Recording", "RecordingError"]


class RecordingError(ValueError):
    """A recording cannot be used; the message names file, row, field and remedy."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Log-probabilities of S sequences with N tokens in all, one sequence after the other, without padding.

    Attributes:
        train: log P(y) of the sampled tokens under the training kernel, nats, float64 [N].
        inference: log Q(y) of the same tokens under the kernel that sampled them, nats, float64 [N].
        lengths: Tokens of each sequence, int64 [S]; they add up to N.
        attributes: What slices are made of, one mapping per sequence [S].
        token_ids: The sampled tokens, int64 [N]; None where the file has none.
        advantages: Advantages, float64 [N], a sequence's own repeated over its tokens; None where the file has none.
        train_at_rollout: log P(y) under the training kernel at the weights that the tokens were sampled with, float64
            [N]; None where the file has none. It tells the kernels' mismatch from the weights' staleness.
        policy: log-probability under the policy being optimised (after updates), float64 [N]; None where there is none.
        source: Where it came from, for messages.
    """

    train: NDArray[np.float64]
    inference: NDArray[np.float64]
    lengths: NDArray[np.int64]
    attributes: tuple[Mapping[str, Scalar], ...]
    token_ids: NDArray[np.int64] | None = None
    advantages: NDArray[np.float64] | None = None
    train_at_rollout: NDArray[np.float64] | None = None
    policy: NDArray[np.float64] | None = None
    source: str = field(default="recording")

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each sequence begins, int64 [S]."""
        return np.cumsum(self.lengths) - self.lengths
