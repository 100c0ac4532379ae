"""Every quantity that the bounds speak of, by summing over all sequences; nothing here is sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from examples.rl_bias.known_bounds import sequence_coupling
from examples.rl_bias.policy import VOCABULARY, Floats, Policy, sequence_scores, token_scores
from examples.rl_bias.token_bounds import half_range

RESTARTS = 4
ROUNDS = 60


def joint(log_probs: list[Floats]) -> Floats:
    """Log-probability of every sequence [V^T]."""
    total = np.zeros(1)
    for step in log_probs:
        total = (total[:, None] + step).ravel()
    return total


def rewards_of(horizon: int) -> dict[str, Floats]:
    """Rewards in [0, 1] of every sequence.

    `random` draws each by itself, so that a gradient averages it out. `verifier` is 1 for sequences at least half of
    whose tokens are among the first two of the vocabulary: like a checker's, it is shared by many sequences.
    """
    digits = np.indices((VOCABULARY,) * horizon).reshape(horizon, -1)
    return {
        "random": np.random.default_rng(horizon).random(VOCABULARY**horizon),
        "verifier": ((digits < 2).mean(axis=0) >= 0.5).astype(np.float64),
    }


class Training:
    """The training kernel and the scores of its policy at one horizon."""

    def __init__(self, policy: Policy, log_probs: list[Floats]) -> None:
        self.horizon = len(log_probs)
        self.log_probs = log_probs
        self.probability = np.exp(joint(log_probs))
        self.rewards = rewards_of(self.horizon)
        self.scores = token_scores(policy, self.horizon)
        self.sequence_scores = sequence_scores(self.scores)
        self.score_norm = max(float(np.linalg.norm(step, axis=-1).max()) for step in self.scores)
        self.sequence_score_norm = float(np.linalg.norm(self.sequence_scores, axis=-1).max())

    def advantage(self, reward: str) -> Floats:
        """Reward less its mean under P."""
        return self.rewards[reward] - self.probability @ self.rewards[reward]

    def gradient(self, weight: Floats, advantage: Floats) -> Floats:
        """`sum_y weight(y) A(y) sum_t grad log P(y_t|y_<t)`."""
        return (weight * advantage) @ self.sequence_scores

    def gradient_of_steps(self, weight: Floats, advantage: Floats, ratios: list[Floats]) -> Floats:
        """The same with each step's score multiplied by a ratio of its own."""
        total = np.zeros(self.sequence_scores.shape[1])
        for step, (scores, ratio) in enumerate(zip(self.scores, ratios, strict=True)):
            mass = (weight * advantage).reshape(VOCABULARY**step, VOCABULARY, -1).sum(axis=-1)
            total += np.einsum("nv,nvp->p", mass * ratio, scores)
        return total

    def worst_advantage(self, difference: Floats) -> Floats:
        """|A| = 1 that makes the bias as long as can be found: each sequence's sign along the bias, repeated.

        Each round makes the bias longer or leaves it; the best of a few starting directions is kept.
        """
        best, longest = np.ones_like(difference), -1.0
        parts = difference[:, None] * self.sequence_scores
        starts = np.random.default_rng(0).normal(size=(RESTARTS, parts.shape[1]))
        for start in starts:
            direction, advantage = start, best
            for _ in range(ROUNDS):
                advantage = np.where(parts @ direction >= 0.0, 1.0, -1.0)
                moved = advantage @ parts
                if np.array_equal(moved, direction):
                    break
                direction = moved
            length = float(np.linalg.norm(direction))
            if length > longest:
                best, longest = advantage, length
        return best


@dataclass(frozen=True)
class Pair:
    """A training kernel and an inference kernel at one horizon, and all that is true of them.

    Ratios are taken over what Q can sample, as a recorder sees them; `half_range` is inf where P and Q do not exclude
    the same tokens.
    """

    train: Training
    log_q: list[Floats]

    @property
    def horizon(self) -> int:
        """T."""
        return self.train.horizon

    @cached_property
    def q(self) -> Floats:
        """Q of every sequence [V^T]."""
        return np.exp(joint(self.log_q))

    @cached_property
    def sampled(self) -> list[np.ndarray]:
        """Per step [V^t, V]: whether Q reaches the prefix and samples the token."""
        reached, steps = np.ones(1, bool), []
        for log_q in self.log_q:
            steps.append(reached[:, None] & np.isfinite(log_q))
            reached = steps[-1].ravel()
        return steps

    @cached_property
    def log_ratios(self) -> list[Floats]:
        """l_t per step [V^t, V]; 0 where Q never goes."""
        return [
            np.subtract(p, q, out=np.zeros_like(p), where=s)
            for p, q, s in zip(self.train.log_probs, self.log_q, self.sampled, strict=True)
        ]

    @cached_property
    def log_ratio_of_sequences(self) -> Floats:
        """L [V^T]."""
        return joint(self.log_ratios)

    @cached_property
    def visits(self) -> list[Floats]:
        """Q of every prefix [V^t] per step."""
        prefixes, steps = np.ones(1), []
        for log_q in self.log_q:
            steps.append(prefixes)
            prefixes = (prefixes[:, None] * np.exp(log_q)).ravel()
        return steps

    def _on_policy(self, values: list[Floats]) -> float:
        return sum(float(v @ x) for v, x in zip(self.visits, values, strict=True)) / self.horizon

    @cached_property
    def _tv_of_steps(self) -> list[Floats]:
        return [
            np.abs(np.exp(p) - np.exp(q)).sum(axis=-1) / 2
            for p, q in zip(self.train.log_probs, self.log_q, strict=True)
        ]

    @property
    def token_tv_mean(self) -> float:
        """Mean total variation of a step over Q's rollouts."""
        return self._on_policy(self._tv_of_steps)

    @cached_property
    def token_tv_of_steps(self) -> Floats:
        """Largest total variation of each step [T], over every prefix."""
        return np.array([step.max() for step in self._tv_of_steps])

    @property
    def token_kl_mean(self) -> float:
        """Mean KL(Q||P) of a step over Q's rollouts, nats."""
        steps = [-(np.exp(q) * ratio).sum(axis=-1) for q, ratio in zip(self.log_q, self.log_ratios, strict=True)]
        return max(0.0, self._on_policy(steps))

    @property
    def mean_abs_log_ratio(self) -> float:
        """E_Q|l| of a token."""
        return self._on_policy(
            [(np.exp(q) * np.abs(ratio)).sum(axis=-1) for q, ratio in zip(self.log_q, self.log_ratios, strict=True)]
        )

    @cached_property
    def half_range(self) -> float:
        """Largest half range over every prefix."""
        if not all(np.isfinite(step).all() for step in self.log_q):
            return math.inf
        return max(float(half_range(p, q).max()) for p, q in zip(self.train.log_probs, self.log_q, strict=True))

    @cached_property
    def log_ratio(self) -> float:
        """Largest |l_t| of a token that Q samples."""
        return max(float(np.abs(step).max()) for step in self.log_ratios)

    @cached_property
    def ratio_range(self) -> tuple[float, float]:
        """(a, b) with 1 - a <= w_t <= 1 + b for every token that Q samples."""
        w = np.concatenate([np.expm1(step[s]) for step, s in zip(self.log_ratios, self.sampled, strict=True)])
        return max(0.0, -float(w.min())), max(0.0, float(w.max()))

    @property
    def ratio_deviation(self) -> float:
        """Largest |w_t - 1| of a token that Q samples."""
        return max(self.ratio_range)

    @cached_property
    def token_deficits(self) -> Floats:
        """Largest mass that P puts outside Q's support at each step [T]."""
        return np.array(
            [
                float(np.where(np.isfinite(q), 0.0, np.exp(p)).sum(axis=-1).max())
                for p, q in zip(self.train.log_probs, self.log_q, strict=True)
            ]
        )

    @cached_property
    def sequence_tv(self) -> float:
        """TV_seq."""
        return float(np.abs(self.train.probability - self.q).sum() / 2)

    @cached_property
    def weights(self) -> Floats:
        """W of every sequence [V^T]; 0 where Q never samples it."""
        return np.where(self.q > 0.0, np.exp(self.log_ratio_of_sequences), 0.0)

    @property
    def mean_weight(self) -> float:
        """E_Q[W]: 1 where P << Q, less by the support deficit elsewhere."""
        return float(self.q @ self.weights)

    @property
    def half_mean_deviation(self) -> float:
        """E_Q|1 - W| / 2: TV_seq where P << Q, and short of it by half of the support deficit elsewhere."""
        return float(self.q @ np.abs(1.0 - self.weights)) / 2

    @property
    def sequence_chi2(self) -> float:
        """chi2(P, Q) of sequences; inf unless P << Q."""
        if self.mean_weight < 1.0 - 1e-9:
            return math.inf
        return float(self.q @ (self.weights - 1.0) ** 2)

    @property
    def coupling_mean(self) -> float:
        """E_Q[1 - prod min(1, w_t)]."""
        columns = [
            np.repeat(step.ravel(), VOCABULARY ** (self.horizon - t - 1)) for t, step in enumerate(self.log_ratios)
        ]
        return float(min(1.0, self.q @ sequence_coupling(np.stack(columns, axis=1))))

    def mean_excess(self, cut: float) -> float:
        """E_Q[(W - C)_+]."""
        return float(self.q @ np.maximum(self.weights - cut, 0.0))

    def reward_drift(self, reward: str) -> float:
        """|E_P r - E_Q r|; `adversarial` is the reward in [0, 1] that drifts most."""
        difference = self.train.probability - self.q
        if reward == "adversarial":
            return float(difference[difference > 0].sum())
        return abs(float(difference @ self.train.rewards[reward]))

    @cached_property
    def worst_advantage(self) -> Floats:
        """|A| = 1 that makes the uncorrected bias as long as can be found."""
        return self.train.worst_advantage(self.q - self.train.probability)

    def advantage(self, reward: str) -> Floats:
        """Advantages [V^T], divided by the largest magnitude among them: A_max is 1."""
        if reward == "adversarial":
            return self.worst_advantage
        given = self.train.advantage(reward)
        return given / np.abs(given).max()

    def bias(self, reward: str) -> float:
        """||E_Q[f] - E_P[f]|| / (A_max G_seq)."""
        return self._length(self.train.gradient(self.q - self.train.probability, self.advantage(reward)))

    def bias_truncated(self, reward: str, cut: float) -> float:
        """The same with weights min(W, C)."""
        weight = self.q * np.minimum(self.weights, cut) - self.train.probability
        return self._length(self.train.gradient(weight, self.advantage(reward)))

    def bias_token_corrected(self, reward: str) -> float:
        """The same with each step's score weighted by its own w_t."""
        ratios = [np.where(s, np.exp(r), 0.0) for r, s in zip(self.log_ratios, self.sampled, strict=True)]
        advantage = self.advantage(reward)
        corrected = self.train.gradient_of_steps(self.q, advantage, ratios)
        return self._length(corrected - self.train.gradient(self.train.probability, advantage))

    def _length(self, vector: Floats) -> float:
        return float(np.linalg.norm(vector)) / self.train.sequence_score_norm
