"""Checks of a batch that need to know which tokens were sampled: penalties of one side, and first tokens of a prompt.

A presence or frequency penalty lowers the logits of tokens that the sequence already has, and a repetition penalty
those of the prompt as well. With d > 0 what it takes from each such token, on the inference side alone,

    l(y) = d(y) [y came before] + log E_P[exp(-d)],

so that tokens that came before have a positive l, and all the others, of which none may be in the prompt, a negative
one, each of at most d. No other fault and no drift knows which tokens came before: honest drift has both signs among
both, a truncation one sign for all, and a temperature that of how sure a token is.

Different tokens after one prompt have one distribution, whatever it is. Where both sides are too sure of all tokens (in
another base, divided by the length, at another temperature) nothing between the sides contradicts it, and of texts with
many alternatives nothing along a sequence does; but five first tokens with a third of the mass each do. And n rollouts
all begin with one token of probability q at most once in q^(1 - n) prompts: with the prompt's own they always do.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel.record.measure.blocks import DRIFT
from kc_otel.record.measure.sampled import saturated

LOOK: Final = 65_536  # tokens of a batch that are looked at: a penalty is set for all of its requests
_ONE_SIDED: Final = 0.88
"""Share of sum |l| of one sign, of tokens that came before. Simulated with words of Zipf's law and the noise of
bfloat16: 0.90 to 1 with presence and frequency of 0.1 to 1 and repetition of 1.05 to 1.3; of drift of the size of fp8
and of 4 bits 0.67 at most, of temperatures from 0.8 to 1.3 at most 0.84."""
_SHARE_GAP: Final = 0.45
"""By how much that share is another one among the other tokens: 0.6 to 1 with a penalty, 0.02 with drift or top-p, 0.43
with a temperature."""
_EFFECTIVE_TOKENS: Final = 48.0  # tokens that sum |l| is made of, in effect, of each of the two kinds
TOO_SURE: Final = (
    "there are far fewer tokens with less than half of the mass than these probabilities would give: they are the "
    "sampled tokens' of a colder or greedy sampler, or multiplied by less than 1 on both sides (base 10, the length)"
)
"""Message for a finding of `stats.sureness`."""
_MAX_MASS: Final = 1.15
"""Mass of the different tokens of a prompt from which it is too much; rounding to bfloat16 adds 0.01, and weights that
change between the rollouts of a prompt what they drift."""
_SAME_NATS: Final = 0.05
"""Nats up to which a token that came twice has one log-probability, so that both came after the same tokens."""
_MAX_OTHER_SHARE: Final = 0.2
"""Share of prompts with a token that came twice, of which one may have had several log-probabilities."""
_LOG_WEALTH: Final = math.log(1e6)
"""Log of the wealth of a bet, half of it at each prompt, that all rollouts of a prompt begin alike."""
_PROMPTS: Final = 3
"""Prompts that show it, at least, and at least every fourth of those that could: one may be named wrongly."""


def penalised(
    train: NDArray[np.floating],
    inference: NDArray[np.floating],
    token_ids: NDArray[np.integer],
    lengths: NDArray[np.integer],
) -> str:
    """Return the reason where one side penalises earlier tokens of rows of these lengths; empty where neither does."""
    log_w = saturated(train.astype(np.float64) - inference)
    if not log_w.size or not float(np.abs(log_w).mean()) > DRIFT:
        return ""
    ids, row = token_ids.astype(np.int64), np.repeat(np.arange(lengths.size), lengths)
    _, first = np.unique(row * (int(ids.max()) + 1) + ids, return_index=True)
    before = np.ones(ids.size, dtype=np.bool_)
    before[first] = False
    shares = []
    for part in (log_w[before], log_w[~before]):
        size = float(np.abs(part).sum())
        if not size or size * size < _EFFECTIVE_TOKENS * float(part @ part):
            return ""
        shares.append(float(np.maximum(part, 0.0).sum()) / size)
    on_inference = shares[0] > 0.5
    again, new = shares if on_inference else [1.0 - share for share in shares]
    if again < _ONE_SIDED or again - new < _SHARE_GAP:
        return ""
    name = "inference" if on_inference else "training"
    return (
        f"the {name} side gives less to tokens that came before in their sequence: {again:.0%} of sum |l| has that "
        f"sign among them, {new:.0%} among the others"
    )


def more_than_all(logprobs: NDArray[np.floating], token_ids: NDArray[np.integer], prompts: Sequence[Hashable]) -> str:
    """Return the reason where first tokens of prompts, [sequences], have more mass than there is; else empty.

    Only prompts count of which a token came more than once and had one log-probability each time: turns of one
    conversation, and rollouts of other weights, come after other tokens. Where many tokens that came again had several,
    rows of one prompt do not begin at the same place, and none counts.
    """
    names: dict[Hashable, int] = {}
    prompt = np.array([names.setdefault(name, len(names)) for name in prompts], dtype=np.int64)
    ids = token_ids.astype(np.int64)
    pair, place, count = np.unique(prompt * (int(ids.max()) + 1) + ids, return_inverse=True, return_counts=True)
    highest, lowest = np.full(pair.size, -np.inf), np.full(pair.size, np.inf)
    np.maximum.at(highest, place, logprobs)
    np.minimum.at(lowest, place, logprobs)
    of = np.zeros(pair.size, dtype=np.int64)
    of[place] = prompt
    rollouts = np.bincount(prompt)[of]
    alone = (count == rollouts) & (count > 1) & (highest - lowest <= _SAME_NATS)
    bets = np.logaddexp(0.0, -(count[alone] - 1.0) * np.minimum(highest[alone], 0.0)) - math.log(2.0)
    several = np.unique(of[count < rollouts]).size
    if bets.sum() - several * math.log(2.0) > _LOG_WEALTH:
        return (
            f"all rollouts of {bets.size:,} prompts begin with the same token, which has a probability of "
            f"{np.exp(highest[alone].min()):.2g} at least: it is the prompt's, or they are one rollout"
        )
    again = np.bincount(of[count > 1], minlength=len(names)) > 0
    other = np.bincount(of[highest - lowest > _SAME_NATS], minlength=len(names)) > 0
    if np.count_nonzero(other) > _MAX_OTHER_SHARE * np.count_nonzero(again):
        return ""
    mass = np.bincount(of, weights=np.exp(lowest), minlength=len(names))[again & ~other]
    over = np.count_nonzero(mass > _MAX_MASS)
    if over < max(_PROMPTS, 0.25 * mass.size):
        return ""
    return (
        f"different first tokens of {over:,} of {mass.size:,} prompts have probabilities that add up to more than 1, "
        f"{mass.max():.3g} at most: they are other tokens', or all too large by a base, a length or a temperature"
    )
