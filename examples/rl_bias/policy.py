"""A policy small enough to enumerate: a recurrent network over four tokens, and the exact score of every prefix.

Sequences are numbered in base V, first token first, so that sequence `i` of t tokens continues to `i V + token`. With
four tokens and eight steps there are 65,536 of them, and every expectation in this example is a sum over all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 4
HIDDEN = 6

Floats = NDArray[np.float64]
Rounding = Callable[[Floats], Floats]
"""How a kernel stores what it computes: array in, array of the same shape out."""


def exactly(values: Floats) -> Floats:
    return values


@dataclass(frozen=True)
class Policy:
    """Weights of the network: `h' = tanh(h recur + embed[token])`, `logits = h head + bias`.

    Attributes:
        embed: [V + 1, H]; the last row stands for the beginning of a sequence.
        recur: [H, H].
        head: [H, V].
        bias: [V].
    """

    embed: Floats
    recur: Floats
    head: Floats
    bias: Floats

    @classmethod
    def random(cls, seed: int) -> Policy:
        """Logits of a deviation near 1.5, and one output channel larger than the rest, as trained networks have."""
        rng = np.random.default_rng(seed)
        head = rng.normal(0.0, 0.9, (HIDDEN, VOCABULARY))
        head[:, 0] *= 2.0
        return cls(
            embed=rng.normal(0.0, 1.0, (VOCABULARY + 1, HIDDEN)),
            recur=rng.normal(0.0, 0.8 / np.sqrt(HIDDEN), (HIDDEN, HIDDEN)),
            head=head,
            bias=rng.normal(0.0, 0.3, VOCABULARY),
        )

    def parameters(self) -> int:
        """How many there are."""
        return self.embed.size + self.recur.size + self.head.size + self.bias.size

    def mapped(self, change: Callable[[Floats], Floats]) -> Policy:
        """The same network with every array changed."""
        return Policy(change(self.embed), change(self.recur), change(self.head), change(self.bias))


def logits_of(policy: Policy, horizon: int, rounding: Rounding = exactly) -> list[Floats]:
    """Logits after every prefix, one array [V^t, V] for each step t.

    Args:
        policy: The weights, already as the kernel stores them.
        horizon: Steps.
        rounding: Applied to every activation and to the logits.
    """
    hidden = rounding(np.tanh(policy.embed[None, VOCABULARY]))
    steps = []
    for _ in range(horizon):
        steps.append(rounding(hidden @ policy.head + policy.bias))
        moved = (hidden @ policy.recur)[:, None, :] + policy.embed[:VOCABULARY]
        hidden = rounding(np.tanh(rounding(moved.reshape(-1, HIDDEN))))
    return steps


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def token_scores(policy: Policy, horizon: int) -> list[Floats]:
    """`grad log P(y_t | y_<t)` by all parameters for every prefix and token: [V^t, V, parameters] for each step.

    Forward sensitivities: the derivative of the hidden state travels with the state, which costs H times the memory
    and needs no backward pass per sequence.
    """
    n, h, v = policy.parameters(), HIDDEN, VOCABULARY
    at_recur, at_head, at_bias = policy.embed.size, policy.embed.size + policy.recur.size, n - v
    hidden = np.tanh(policy.embed[None, v])
    sensitivity = np.zeros((1, h, n))
    sensitivity[0, np.arange(h), v * h + np.arange(h)] = 1.0 - hidden[0] ** 2
    scores = []
    for _ in range(horizon):
        by_logit = np.einsum("nhp,hv->nvp", sensitivity, policy.head)
        for token in range(v):
            by_logit[:, token, at_head + np.arange(h) * v + token] += hidden
            by_logit[:, token, at_bias + token] += 1.0
        probability = np.exp(log_softmax(hidden @ policy.head + policy.bias))
        scores.append(by_logit - np.einsum("nv,nvp->np", probability, by_logit)[:, None])

        through = np.einsum("nhp,hk->nkp", sensitivity, policy.recur)
        for unit in range(h):
            through[:, unit, at_recur + np.arange(h) * h + unit] += hidden
        moved = (hidden @ policy.recur)[:, None, :] + policy.embed[:v]
        direct = np.repeat(through[:, None], v, axis=1)
        for token in range(v):
            direct[:, token, np.arange(h), token * h + np.arange(h)] += 1.0
        hidden = np.tanh(moved.reshape(-1, h))
        sensitivity = (1.0 - hidden**2)[:, :, None] * direct.reshape(-1, h, n)
    return scores


def sequence_scores(scores: list[Floats]) -> Floats:
    """`sum_t grad log P(y_t | y_<t)` of every sequence [V^T, parameters]."""
    total = np.zeros((1, scores[0].shape[-1]))
    for step in scores:
        total = (total[:, None] + step).reshape(-1, step.shape[-1])
    return total
