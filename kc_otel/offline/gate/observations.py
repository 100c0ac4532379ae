"""What a recording says of each quantity of the registry: its observations, token by token or sequence by sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.registry import BY_SEQUENCE
from kc_otel.record.measure.logits import LOGITS, logit_drift
from kc_otel.record.measure.sampled import REWARD, SEQUENCE, TOKEN, advantage_drift, log_ratio, saturated
from kc_otel.recordings import Recording
from kc_otel.stats import Binned, capped_mean_interval, reward_sides

__all__ = ["ADVANTAGE", "RecordingObservations", "RecordingSlice"]

ADVANTAGE: Final = ("advantage_drift_positive", "advantage_drift_negative")
"""Registry keys of what needs advantages: of tokens with a positive one, and with a negative one."""
_BINS: Final = 32_768
"""Distinct values from which a mean's interval is computed from bins of neighbours: it stays valid, and is quick."""
_TOKENS: Final = {quantity.key: token for token, quantity in BY_SEQUENCE.items()}
"""Key of a mean over sequences -> key of the token quantity it is the mean of."""

_CAP: Final = 10.0
"""Where a ratio is cut: its mean is only smaller then."""
_SURELY: Final = 1e-6
"""How often chance alone would say that tokens were not sampled by the inference kernel."""

_Values = tuple[NDArray[np.float64], NDArray[np.bool_]]


@dataclass(frozen=True, slots=True, eq=False)
class RecordingSlice:
    """A slice of a recording.

    Attributes:
        name: Name of the slice.
        recording: Its sequences; None where there are none.
    """

    name: str
    recording: Recording | None


@dataclass(frozen=True, slots=True, eq=False)
class RecordingObservations:
    """The values of every quantity of the registry that a recording has, computed when asked for.

    Attributes:
        recording: The recording; its rewards are the sequences' attribute `reward`.
        reward_range: Smallest and largest reward; without it rewards are not looked at.
    """

    recording: Recording
    reward_range: tuple[float, float] | None = None
    _known: dict[str, Binned | None] = field(default_factory=dict)
    _coarse: dict[str, Binned] = field(default_factory=dict)
    _logits: dict[str, _Values] = field(default_factory=dict)

    def of(self, quantity: str) -> Binned | None:
        """The observations of a quantity, by its registry key; None where the recording cannot tell.

        Means over sequences (`BY_SEQUENCE`) have an observation per sequence. One with a token that cannot be measured,
        or without a token that the quantity is about, makes none.
        """
        if quantity not in self._known:
            values = self._values(quantity)
            self._known[quantity] = None if values is None else Binned.of_samples(values)
        return self._known[quantity]

    def for_mean(self, quantity: str) -> Binned | None:
        """The same with an exact sum and count, in at most `_BINS` bins."""
        sample = self.of(quantity)
        if sample is None or sample.count.size <= _BINS:
            return sample
        if quantity not in self._coarse:
            self._coarse[quantity] = sample.merged(_BINS)
        return self._coarse[quantity]

    @property
    def unreadable(self) -> int:
        """Tokens whose logits hold NaN or +inf, or nothing but -inf: they make no observation of any logit drift."""
        found = self._token_values(LOGITS[0])
        return 0 if found is None else int((~found[1]).sum())

    @property
    def mean_ratio(self) -> float:
        """What the mean of P(y)/Q(y) over its tokens surely is at least; of tokens that Q sampled it is at most 1.

        That holds token by token given those before it, so that the bet against it takes no independence.
        """
        sample = self.for_mean("ratio")
        if sample is None or not sample.total:
            return 0.0
        bounds = capped_mean_interval(
            sample, low=0.0, high=math.inf, cap=_CAP, alpha_lower=_SURELY, alpha_upper=0.5, anytime=True
        )
        return max(bounds.lower, 0.0)

    @property
    def unknown_rewards(self) -> int:
        """Sequences without a reward, or with one outside of the range; 0 where rewards are not looked at."""
        rewards = self.recording.rewards
        if rewards is None or self.reward_range is None:
            return 0
        low, high = self.reward_range
        return int((~((rewards >= low) & (rewards <= high))).sum())

    def _values(self, quantity: str) -> NDArray[np.float64] | None:
        of = self.recording
        if quantity in SEQUENCE:
            log_w = log_ratio(of.train, of.inference)
            found: NDArray[np.float64] = SEQUENCE[quantity](np.add.reduceat(log_w, of.starts), of.lengths)
            return found
        if quantity in REWARD:
            rewards = of.rewards
            if rewards is None or self.reward_range is None:
                return None
            log_w = saturated(np.add.reduceat(log_ratio(of.train, of.inference), of.starts))
            side: NDArray[np.float64] = reward_sides(log_w, rewards, self.reward_range)[REWARD.index(quantity)]
            return side
        if quantity not in _TOKENS:
            tokens = self._token_values(quantity)
            return None if tokens is None else tokens[0][tokens[1]]
        tokens = self._token_values(_TOKENS[quantity])
        if tokens is None:
            return None
        values, counted = tokens
        number = np.add.reduceat(counted.astype(np.int64), of.starts)
        # Of the two sides of the advantage, the tokens of the other side are none of its tokens.
        whole = number > 0 if _TOKENS[quantity] in ADVANTAGE else number == of.lengths
        total = np.add.reduceat(np.where(counted, values, 0.0), of.starts)
        return np.asarray(total[whole] / number[whole], dtype=np.float64)

    def _token_values(self, quantity: str) -> _Values | None:
        """A token quantity's values [N], and which of them are observations, bool [N]."""
        of = self.recording
        if quantity in TOKEN:
            values = TOKEN[quantity](log_ratio(of.train, of.inference))
            return values, np.ones(values.size, dtype=np.bool_)
        if quantity in ADVANTAGE and of.advantages is not None:
            side = of.advantages > 0.0 if quantity == ADVANTAGE[0] else of.advantages < 0.0
            return advantage_drift(log_ratio(of.train, of.inference), of.advantages), side
        if quantity == "outside_mass" and of.train_kept is not None:
            return -np.expm1(np.minimum(of.train_kept, 0.0)) + 0.0, np.ones(of.train_kept.size, dtype=np.bool_)
        if quantity in LOGITS and of.train_logits is not None and of.inference_logits is not None:
            if not self._logits:
                drift = logit_drift(of.train_logits, of.inference_logits)
                self._logits.update({name: (drift.values[:, at], drift.valid) for at, name in enumerate(LOGITS)})
            return self._logits[quantity]
        return None
