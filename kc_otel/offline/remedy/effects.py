"""What a correction leaves and what it costs, sequence by sequence.

With c_t the weight of token t, w_t and W the ratios of the token and of its sequence, P the training and Q the rollout
kernel, the surrogate that is optimised is the mean over sequences of the mean over tokens of c_t A_t grad log pi. Its
bias against the training kernel's own rollouts is at most `2 A_max G` times

`distance = E_Q[ mean_t ((c_t - W)_+ - c_t / 2) ] + 1/2 = (1/2) sum_y mean_t |c_t(y) Q(y) - P(y)|`,

for any P and Q, common support or not: what Q never samples counts with its full mass. Without a correction it is
TV_seq, with c = W it is half of the support deficit, and every integrand is bounded by the largest weight. With w_t in
place of W it is the distance of single steps at the prefixes that Q visited: the bias against the surrogate that has
the training kernel's steps at the rollouts' prefixes, which token ratios aim at; without a correction it is TV of a
token. G bounds a token's score; summed over tokens instead of averaged, G_seq = T G takes its place.

Source: E_Q[c f] - E_P[f] = sum_y (c Q - P) f, and |a - b| = 2 (a - b)_+ - a + b summed over P and Q of mass 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from kc_otel.offline.remedy.corrections import Correction, Ratios, weights

__all__ = ["Effects", "effects"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Effects:
    """What a correction does to each of S sequences; the mean of an array is the effect on their distribution.

    Attributes:
        weight: Mean weight of its tokens, [S].
        square: Mean squared weight, [S].
        token: Its part of the distance of single steps: tv_token of what is learned from, [S].
        sequence: Its part of the distance of whole sequences: tv_seq of what is learned from, [S].
        positive: Mean of (w - c) A over its tokens with A > 0: push that is still missing; NaN without such, [S].
        negative: The same over its tokens with A < 0, [S].
        kept: Tokens with a weight above 0, [S].
        kept_positive: Of those with A > 0, [S].
        kept_negative: Of those with A < 0, [S].
    """

    weight: Floats
    square: Floats
    token: Floats
    sequence: Floats
    positive: Floats
    negative: Floats
    kept: Floats
    kept_positive: Floats
    kept_negative: Floats

    def only(self, inside: NDArray[np.bool_]) -> Effects:
        """Those on some of the sequences, bool [S]."""
        return Effects(**{each.name: getattr(self, each.name)[inside] for each in fields(self)})


def effects(of: Ratios, corrections: tuple[Correction, ...]) -> Iterator[Effects]:
    """The effects of each correction, one after the other: no more than one weight per token is held at a time.

    Args:
        of: The ratios of a recording of S sequences.
        corrections: What to try.

    Raises:
        ValueError: If a rejection rule needs advantages and the recording has none.
    """
    signed = tuple(_signed(of))
    for correction in corrections:
        c = weights(of, correction)
        half = 0.5 - 0.5 * c
        used = c > 0.0
        sides = [_side(of, c, used, inside, many, advantages) for inside, many, advantages in signed]
        none = np.full(of.recording.lengths.size, np.nan)
        (positive, kept_positive), (negative, kept_negative) = sides or [(none, none), (none, none)]
        yield Effects(
            weight=of.means(c),
            square=of.means(c * c),
            token=of.means(np.maximum(c - of.token, 0.0) + half),
            sequence=of.means(np.maximum(c - of.sequence, 0.0) + half),
            positive=positive,
            negative=negative,
            kept=np.add.reduceat(used.astype(np.float64), of.recording.starts),
            kept_positive=kept_positive,
            kept_negative=kept_negative,
        )


def _signed(of: Ratios) -> Iterator[tuple[NDArray[np.bool_], Floats, Floats]]:
    """For each sign of the advantage: its tokens, how many of them each sequence has, and the advantages."""
    advantages = of.recording.advantages
    if advantages is not None:
        for inside in (advantages > 0.0, advantages < 0.0):
            yield inside, np.add.reduceat(inside.astype(np.float64), of.recording.starts), advantages


def _side(
    of: Ratios, c: Floats, used: NDArray[np.bool_], inside: NDArray[np.bool_], many: Floats, advantages: Floats
) -> tuple[Floats, Floats]:
    missing = np.add.reduceat(np.where(inside, (of.token - c) * advantages, 0.0), of.recording.starts)
    mean = np.divide(missing, many, out=np.full(many.size, np.nan), where=many > 0.0)
    return mean, np.add.reduceat((used & inside).astype(np.float64), of.recording.starts)
