"""Observations of a recording for each quantity of the registry, by token, sequence, prompt or step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Assumptions
from kc_otel.contract.registry.clause_metrics import RECORDED, Unit
from kc_otel.judge.statistics import broken_assumption
from kc_otel.record.measure.logits import LOGITS, logit_drift
from kc_otel.record.measure.sampled import REWARD, SEQUENCE, TOKEN, advantage_drift, log_ratio, saturated
from kc_otel.recordings.recording import Recording
from kc_otel.stats import Binned, reward_sides

ADVANTAGE: Final = ("advantage_drift_positive", "advantage_drift_negative")
"""Registry keys of what needs advantages: of tokens with a positive one, and with a negative one."""
_MIN_VALUES_FOR_BINS: Final = 32_768
"""Distinct values from which a mean's interval is computed from bins of neighbours: it stays valid, and is quick."""

_Values = tuple[NDArray[np.float64], NDArray[np.bool_]]


@dataclass(frozen=True, slots=True, eq=False)
class RecordingObservations:
    """The values of every quantity of the registry that a recording has, computed when asked for.

    Rewards are the sequences' attribute `reward`; without a range they are not looked at.
    """

    recording: Recording
    reward_range: tuple[float, float] | None = None
    _known: dict[str, Binned | None] = field(default_factory=dict)
    _logits: dict[str, _Values] = field(default_factory=dict)

    def of(self, quantity: str) -> Binned | None:
        """The observations of a quantity, by its registry key; None where the recording cannot tell.

        Means over sequences, prompts or steps have an observation for each. A sequence with a token that cannot be
        measured, or without a token that the quantity is about, makes none. Where the recording does not name prompts,
        each sequence is one; its steps are those of its attribute `step`, and without it the recording is one step.
        """
        if quantity not in self._known:
            values = self._values(quantity)
            self._known[quantity] = None if values is None else Binned.of_samples(values)
        return self._known[quantity]

    def for_mean(self, quantity: str) -> Binned | None:
        """Reduce to at most `_MIN_VALUES_FOR_BINS` bins with the exact sum and count."""
        sample = self.of(quantity)
        return None if sample is None else sample.merged(_MIN_VALUES_FOR_BINS)

    @property
    def unreadable(self) -> int:
        """Tokens whose logits hold NaN or +inf, or nothing but -inf: they make no observation of any logit drift."""
        found = self._token_values(LOGITS[0])
        return 0 if found is None else int((~found[1]).sum())

    def broken_assumption(self, clause: Clause, assumptions: Assumptions) -> str:
        """Return the assumption of a clause that the recording breaks, in words; empty if none."""
        of = self.recording

        def observed(quantity: str) -> Binned | None:
            if quantity == "sequence_tokens":
                return Binned.of_samples(of.lengths.astype(np.float64))
            if quantity == "advantage_abs" and of.advantages is not None:
                return Binned.of_samples(np.abs(of.advantages))
            return None

        def outside() -> int:
            if of.rewards is None or assumptions.reward_range is None:
                return 0
            low, high = assumptions.reward_range
            return int(((of.rewards < low) | (of.rewards > high)).sum())

        return broken_assumption(clause, assumptions, observed, outside)

    @property
    def unknown_rewards(self) -> int:
        """Sequences without a reward, or with one outside of the range; 0 where rewards are not looked at."""
        rewards = self.recording.rewards
        if rewards is None or self.reward_range is None:
            return 0
        low, high = self.reward_range
        return int((~((rewards >= low) & (rewards <= high))).sum())

    def _values(self, quantity: str) -> NDArray[np.float64] | None:
        known = RECORDED[quantity]
        if not known.base and known.per is Unit.TOKEN:
            tokens = self._token_values(quantity)
            return None if tokens is None else tokens[0][tokens[1]]
        values = self._of_sequences(known.base or quantity)
        if values is None or known.per is Unit.SEQUENCE:
            return None if values is None else values[~np.isnan(values)]
        prompts, place = self.recording.prompts, np.arange(values.size)
        means, first = _means(values, place if prompts is None else prompts)
        if known.per is Unit.PROMPT:
            return means
        number: dict[object, int] = {}
        steps = [number.setdefault(self.recording.attributes[row].get("step"), len(number)) for row in first]
        return _means(means, np.array(steps))[0]

    def _of_sequences(self, quantity: str) -> NDArray[np.float64] | None:
        """A quantity's value in each sequence, or its mean over the sequence's tokens [S]; NaN where it has none."""
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
        tokens = self._token_values(quantity)
        if tokens is None:
            return None
        values, counted = tokens
        number = np.add.reduceat(counted.astype(np.int64), of.starts)
        # Of the two sides of the advantage, the tokens of the other side are none of its tokens.
        whole = number > 0 if quantity in ADVANTAGE else number == of.lengths
        total = np.add.reduceat(np.where(counted, values, 0.0), of.starts)
        return np.where(whole, total / np.maximum(number, 1), np.nan)

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


def _means(values: NDArray[np.float64], of: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Means of the values that are known, by what they are of, and where each of these begins."""
    rows = np.flatnonzero(~np.isnan(values))
    _, first, place = np.unique(of[rows], return_index=True, return_inverse=True)
    return np.bincount(place, values[rows]) / np.maximum(np.bincount(place), 1), rows[first]
