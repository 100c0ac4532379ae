"""Corrections of the mismatch between rollout and training kernel, as weights of recorded tokens.

A correction gives token t of a sequence the weight c_t in the policy gradient: a ratio that is cut or zeroed outside of
a range, times 0 or 1 from a rejection rule. c_t = 1 is no correction.

Sources: Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (truncation, TIS); Liu,
Li et al. 2025, When Speed Kills Stability (masking, MIS; geometric ratios); Ling Team 2025, Every Step Evolves
(IcePop: two-sided masking of tokens); DeepSeek-AI 2025, DeepSeek-V3.2 (masking of sequences with negative advantages).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kc_otel.record.measure.sampled import log_ratio, saturated
from kc_otel.recordings.recording import Recording

Floats = NDArray[np.float64]
Statistic = Literal["token_k1", "token_k3", "seq_sum_k1", "seq_mean_k1", "seq_mean_k3", "seq_max_k3", "off_policy"]
"""Statistic of a rejection rule, k1 = -l and k3 = w - 1 - l of a token, as verl names it.

`off_policy` is TRL's: the mean of k1 over a sequence whose advantage is negative; other sequences are never
rejected."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A ratio r, exp(l_t) of a `token` or exp(sum l) of a `sequence`, that is cut to a range or 0 outside (`mask`)."""

    level: Literal["token", "sequence"]
    edge: Literal["truncate", "mask"]
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Rejection:
    """A rule that removes tokens, or whole sequences, whose statistic is outside of [low, high]."""

    statistic: Statistic
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Correction:
    """Correction applied to rollouts before they are learned from: a weight of tokens, a rule that takes some out."""

    weight: Weight | None = None
    rejection: Rejection | None = None

    @property
    def family(self) -> str:
        """Kind of the correction, without its thresholds, such as `sequence truncate, seq_mean_k1`."""
        weight = "" if self.weight is None else f"{self.weight.level} {self.weight.edge}"
        rejection = "" if self.rejection is None else self.rejection.statistic
        return ", ".join(filter(None, (weight, rejection))) or "none"

    @property
    def name(self) -> str:
        """The same with its thresholds, such as `token mask [0.5, 2]`."""
        weight = "" if self.weight is None else f"{self.weight.level} {self.weight.edge} {_range(self.weight)}"
        rejection = "" if self.rejection is None else f"keep {self.rejection.statistic} {_range(self.rejection)}"
        return ", ".join(filter(None, (weight, rejection))) or "none"

    @property
    def largest(self) -> float:
        """Upper bound of the token weights."""
        return 1.0 if self.weight is None else self.weight.high

    def never_above(self, level: str) -> bool:
        """Return True if no token's weight exceeds its ratio of a level: it is only ever cut or dropped."""
        weight = self.weight
        return weight is not None and weight.level == level and (weight.edge == "mask" or weight.low <= 0.0)


class Ratios:
    """The ratios of a recording's tokens and sequences, and what rejection rules look at, each computed once.

    Log ratios, `log_w` of each token [N] and `log_sequence` of each sequence [S], are kept within the range of all
    other measures; no threshold lies beyond it.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.log_w: Floats = log_ratio(recording.train, recording.inference)
        self.log_sequence: Floats = self.sums(self.log_w)

    @cached_property
    def token(self) -> Floats:
        """W of each token, [N]."""
        return np.exp(self.log_w)

    @cached_property
    def sequence(self) -> Floats:
        """W = exp(sum l) of each token's sequence, [N]."""
        return self.spread(np.exp(saturated(self.log_sequence)))

    @cached_property
    def k3(self) -> Floats:
        """k3 of each token, [N]."""
        return np.expm1(self.log_w) - self.log_w

    def spread(self, values: Floats) -> Floats:
        """A number per sequence [S] for each of its tokens [N]."""
        return np.repeat(values, self.recording.lengths)

    def sums(self, values: NDArray[Any]) -> Floats:
        """The sum of token values [N] over each sequence, [S]."""
        return np.add.reduceat(values.astype(np.float64, copy=False), self.recording.starts)

    def means(self, values: Floats) -> Floats:
        """The mean of token values [N] over each sequence, [S]."""
        return self.sums(values) / self.recording.lengths


def _off_policy(of: Ratios) -> Floats:
    if of.recording.advantages is None:
        raise ValueError(f"{of.recording.source}: has no advantages; off_policy looks at their sign")
    return np.where(of.recording.advantages < 0.0, of.spread(of.means(-of.log_w)), -math.inf)


_STATISTICS: Final[Mapping[Statistic, Callable[[Ratios], Floats]]] = {
    "token_k1": lambda of: -of.log_w,
    "token_k3": lambda of: of.k3,
    "seq_sum_k1": lambda of: of.spread(-of.log_sequence),
    "seq_mean_k1": lambda of: of.spread(of.means(-of.log_w)),
    "seq_mean_k3": lambda of: of.spread(of.means(of.k3)),
    "seq_max_k3": lambda of: of.spread(np.maximum.reduceat(of.k3, of.recording.starts)),
    "off_policy": _off_policy,
}


def weights(of: Ratios, correction: Correction) -> Floats:
    """The weight c_t of every token, [N]; 0 for what is dropped."""
    found = np.ones(of.log_w.size)
    if (wanted := correction.weight) is not None:
        ratio: Floats = getattr(of, wanted.level)
        if wanted.edge == "truncate":
            found = np.clip(ratio, wanted.low, wanted.high)
        else:
            found = np.where((ratio >= wanted.low) & (ratio <= wanted.high), ratio, 0.0)
    if (rule := correction.rejection) is not None:
        value = _STATISTICS[rule.statistic](of)
        found = np.where((value >= rule.low) & (value <= rule.high), found, 0.0)
    return found


def _range(of: Weight | Rejection) -> str:
    if math.isinf(of.low) or (of.low == 0.0 and isinstance(of, Weight)):
        return f"at most {of.high:g}"
    return f"[{of.low:.4g}, {of.high:.4g}]"
