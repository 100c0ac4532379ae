"""A recording: both kernels' log-probabilities of the same sampled tokens, packed, and what is known of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.slices import Scalar

__all__ = ["Recording", "RecordingError", "reward_of"]


_REWARDS: Final = ("reward", "rewards", "score")
"""Attributes that may hold the reward of a sequence, the first that does counting."""


def reward_of(attributes: Mapping[str, Scalar]) -> float:
    """The reward of a sequence, from its attributes `reward`, `rewards` or `score`; NaN where none is a number."""
    given = (attributes.get(name) for name in _REWARDS)
    return next((float(each) for each in given if isinstance(each, int | float)), math.nan)


class RecordingError(ValueError):
    """A recording cannot be used; the message names file, row, field and remedy.

    Attributes:
        problems: Everything that is wrong, one sentence each, in the order of the file.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Log-probabilities of S sequences with N tokens in all, one sequence after the other, without padding.

    Attributes:
        train: log P(y) of the sampled tokens under the training kernel, nats, float64 [N].
        inference: log Q(y) of the same tokens under the kernel that sampled them, nats, float64 [N].
        lengths: Tokens of each sequence, int64 [S], each at least 1; they add up to N.
        attributes: What slices are made of, one mapping per sequence [S].
        token_ids: The sampled tokens, int64 [N]; None where the file has none.
        advantages: Advantages, float64 [N], a sequence's own repeated over its tokens; None where the file has none.
        train_at_rollout: log P(y) under the training kernel at the weights that the tokens were sampled with, float64
            [N]; None where the file has none. It tells the kernels' mismatch from the weights' staleness.
        policy: log-probability under the policy being optimised (after updates), float64 [N]; None where there is none.
        train_kept: log of P's mass on the tokens that truncation (top-p, top-k) kept, nats, float64 [N]: `train` and
            `inference` are renormalised over them. None where the file has none.
        versions: Step of the weights that sampled each token, int64 [N]; None where the file has none.
        source: Where it came from, for messages.
        train_logits: Logits of the training kernel, floating [N, V]; None where the file has none.
        inference_logits: Logits of the inference kernel, floating [N, V]; None where the file has none.
        masked: Attributes of the sequences that the file's mask leaves no token of; they are not among the S.
        unread: Columns of the file that are no attributes, and why not: "holds ..., not ...".
    """

    train: NDArray[np.float64]
    inference: NDArray[np.float64]
    lengths: NDArray[np.int64]
    attributes: tuple[Mapping[str, Scalar], ...]
    token_ids: NDArray[np.int64] | None = None
    advantages: NDArray[np.float64] | None = None
    train_at_rollout: NDArray[np.float64] | None = None
    policy: NDArray[np.float64] | None = None
    train_kept: NDArray[np.float64] | None = None
    versions: NDArray[np.int64] | None = None
    source: str = field(default="recording")
    train_logits: NDArray[np.floating] | None = None
    inference_logits: NDArray[np.floating] | None = None
    masked: tuple[Mapping[str, Scalar], ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)

    @property
    def rewards(self) -> NDArray[np.float64] | None:
        """`reward_of` each sequence, float64 [S], NaN where it is not known; None where none is."""
        found = np.array([reward_of(attributes) for attributes in self.attributes])
        return None if np.isnan(found).all() else found

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each sequence begins, int64 [S]."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def lengths_with_masked(self) -> NDArray[np.int64]:
        """`lengths`, and a 0 for each sequence in `masked`: some tools' averages over sequences count these."""
        return np.concatenate((self.lengths, np.zeros(len(self.masked), dtype=np.int64)))

    @property
    def unread_reward(self) -> str:
        """What is wrong with a column of rewards that none could be read from; empty where there is no such column."""
        for name in _REWARDS:
            if name in self.unread:
                return f"{name} {self.unread[name]}"
            for row, attributes in enumerate(self.attributes):
                if isinstance(attributes.get(name), str):
                    return f"{name} of sequence {row} is {attributes[name]!r}, not a number"
        return ""

    def only(self, kept: NDArray[np.bool_], masked: NDArray[np.bool_]) -> Recording:
        """The sequences that are kept, bool [S], and those of `masked` that are, bool."""
        if kept.all() and masked.all():
            return self
        tokens = np.repeat(kept, self.lengths)
        per_token = (
            "token_ids", "advantages", "train_at_rollout", "policy", "train_kept", "versions", "train_logits",
            "inference_logits",
        )  # fmt: skip
        given = {name: values for name in per_token if (values := getattr(self, name)) is not None}
        return replace(
            self,
            train=self.train[tokens],
            inference=self.inference[tokens],
            lengths=self.lengths[kept],
            attributes=tuple(self.attributes[each] for each in np.flatnonzero(kept)),
            masked=tuple(self.masked[each] for each in np.flatnonzero(masked)),
            **{name: values[tokens] for name, values in given.items()},
        )
