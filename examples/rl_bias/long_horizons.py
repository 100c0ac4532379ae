"""Long horizons: a policy whose next token does not depend on the ones before, so that the truth stays exact.

64 tokens, up to 4,096 of them; the reward is 1 where at least as many tokens as P expects are of one half of the
vocabulary. Counts are multinomial, so that rewards and gradients under P and Q are sums of binomial tails, and
sequences can be drawn by their counts. Q's logits differ by noise that makes 0.026 nat of a token's log ratio.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import binom

from examples.rl_bias.gradient_bounds import gradient_bias_from_chi2, gradient_bias_from_tv, largest_second_moment
from examples.rl_bias.policy import Floats
from examples.rl_bias.tables import Table, number
from kc_otel.stats import Binned, mean_interval
from kc_otel.stats.gradient_estimates import GradientBias, estimated_gradient_bias
from kc_otel.stats.rewards import reward_drift_bounds, reward_sides

TOKENS = 64
DEVIATION = 0.026
HORIZONS = (64, 256, 1024, 4096)
SIZES = (1_000, 4_000, 16_000)
RUNS = 5
ALPHA = 0.01


@dataclass(frozen=True)
class LongPair:
    """Two kernels at one horizon.

    Attributes:
        horizon: T.
        p: Next-token distribution of the training kernel [V].
        q: That of the inference kernel.
    """

    horizon: int
    p: Floats
    q: Floats

    @classmethod
    def at(cls, horizon: int, seed: int = 0) -> LongPair:
        """The pair of a seed at a horizon; kernels are the same at all of them."""
        rng = np.random.default_rng(seed)
        logits = rng.normal(0.0, 1.0, TOKENS)
        moved = logits + rng.normal(0.0, DEVIATION, TOKENS)
        p, q = np.exp(moved), np.exp(logits)
        return cls(horizon, p / p.sum(), q / q.sum())

    @property
    def enough(self) -> int:
        """Tokens of the first half of the vocabulary that are rewarded."""
        return math.ceil(self.horizon * float(self.p[: TOKENS // 2].sum()))

    def reward(self, of: Floats) -> float:
        """Mean reward where tokens are drawn from a distribution."""
        return float(binom.sf(self.enough - 1, self.horizon, of[: TOKENS // 2].sum()))

    @property
    def score_norm(self) -> float:
        """Largest norm of one token's score: `score_norm_max` of a contract."""
        return float(np.linalg.norm(np.eye(TOKENS) - self.p, axis=1).max())

    @property
    def reward_drift(self) -> float:
        """E_P[r] - E_Q[r]."""
        return self.reward(self.p) - self.reward(self.q)

    def gradient(self, of: Floats) -> Floats:
        """`E[A(y) sum_t grad log P(y_t)]` [V] with A = r - E_P[r], where tokens are drawn from a distribution."""
        half = of[: TOKENS // 2].sum()
        one_more = np.where(np.arange(TOKENS) < TOKENS // 2, 2, 1)
        rewarded = self.horizon * of * binom.sf(self.enough - one_more, self.horizon - 1, half)
        expected = self.horizon * self.p
        return rewarded - self.reward(of) * expected - self.reward(self.p) * (self.horizon * of - expected)

    @property
    def bias(self) -> Floats:
        """E_Q[f] - E_P[f]."""
        return self.gradient(self.q) - self.gradient(self.p)

    def drawn(self, n: int, seed: int) -> tuple[Floats, Floats, Floats]:
        """Log ratios [n], rewards [n] and scores [n, V] of n sequences drawn from Q."""
        counts = np.random.default_rng(seed).multinomial(self.horizon, self.q, n).astype(np.float64)
        rewards = (counts[:, : TOKENS // 2].sum(axis=1) >= self.enough).astype(np.float64)
        return counts @ (np.log(self.p) - np.log(self.q)), rewards, counts - self.horizon * self.p


def reward_drift(horizons: tuple[int, ...] = HORIZONS, sizes: tuple[int, ...] = SIZES, runs: int = RUNS) -> Table:
    """The drift of the expected reward: truth, bound from total variation, interval of the drift itself."""
    rows = []
    for horizon in horizons:
        pair = LongPair.at(horizon)
        for n in sizes:
            halves, limits, kept = [], [], 0
            for seed in range(runs):
                log_ratio, rewards, _ = pair.drawn(n, seed)
                sides = map(Binned.of_samples, reward_sides(log_ratio, rewards, (0.0, 1.0)))
                low, high = reward_drift_bounds(*sides, alpha_lower=ALPHA / 2, alpha_upper=ALPHA / 2)
                tv = Binned.of_samples(np.maximum(-np.expm1(log_ratio), 0.0))
                limits.append(mean_interval(tv, low=0.0, high=1.0, alpha_lower=ALPHA / 2, alpha_upper=ALPHA / 2).upper)
                halves.append((high - low) / 2.0)
                kept += low <= pair.reward_drift <= high
            times = np.mean(limits) / np.mean(halves)
            cells = (*map(number, (abs(pair.reward_drift), np.mean(limits), np.mean(halves))), f"{times:.1f}")
            rows.append((str(horizon), f"{n:,}", *cells, f"{kept} of {runs}"))
    return Table(
        "The drift of the expected reward at long horizons",
        "Rewards are 0 or 1. The bound is the upper limit of TV_seq, the half width that of the interval for "
        "E_P[r] - E_Q[r], both at 99% from the same sequences, averaged over samples; times: how much sharper. Kept: "
        "samples whose interval contains the truth.",
        ("T", "sequences", "truth", "bound", "half width", "times", "kept"),
        rows,
    )


def gradient_bias(horizons: tuple[int, ...] = HORIZONS, sizes: tuple[int, ...] = SIZES, runs: int = RUNS) -> Table:
    """The bias of the policy gradient: truth, estimate and limits from pairs of scores."""
    rows = []
    for horizon in horizons:
        pair = LongPair.at(horizon)
        truth = float(np.linalg.norm(pair.bias))
        for n in sizes:
            found, seen, stated, moment = [], [], [], []
            for seed in range(runs):
                log_ratio, rewards, scores = pair.drawn(n, seed)
                found.append(estimate(pair, log_ratio, rewards, scores))
                tv = float(np.maximum(-np.expm1(log_ratio), 0.0).mean())
                known = {"advantage_max": float(np.abs(rewards - pair.reward(pair.p)).max())}
                longest = float(np.linalg.norm(scores, axis=1).max())
                seen.append(gradient_bias_from_tv(tv, sequence_score_norm=longest, **known))
                stated.append(gradient_bias_from_tv(tv, sequence_score_norm=horizon * pair.score_norm, **known))
                chi2 = float((np.expm1(log_ratio) ** 2).mean())
                advantages = rewards - pair.reward(pair.p)
                moment.append(gradient_bias_from_chi2(chi2, second_moment=largest_second_moment(advantages, scores)))
            norms, uppers = (np.array([getattr(estimate, name) for estimate in found]) for name in ("norm", "upper"))
            kept = sum(estimate.lower <= truth <= estimate.upper for estimate in found)
            rows.append(
                (
                    str(horizon),
                    f"{n:,}",
                    number(truth),
                    f"{np.mean(stated) / truth:.0f}x",
                    f"{np.mean(seen) / truth:.0f}x",
                    f"{np.mean(moment) / truth:.0f}x",
                    f"{norms.mean() / truth:.2f}x",
                    f"{uppers.mean() / truth:.1f}x",
                    f"{uppers.max() / truth:.1f}x",
                    f"{kept} of {runs}",
                )
            )
    return Table(
        "The bias of the policy gradient at long horizons",
        "Norm of E_Q[f] - E_P[f], in the unit of `gradient_bias_bound`: an advantage times a score. The others are "
        "times that: `2 A_max G_seq TV_seq` with the clause's G_seq = T score_norm_max, and with the longest score "
        "seen; `sqrt(lambda_max(F) chi2_seq)` of what was seen, F the second moment of A times the score; the estimate "
        "from pairs, averaged over samples; its upper limit at 99%, on average and the largest. "
        "Kept: samples whose limits contain the truth.",
        (
            "T",
            "sequences",
            "truth",
            "clause's bound",
            "bound, scores seen",
            "from chi-square",
            "estimate",
            "upper limit",
            "largest",
            "kept",
        ),
        rows,
    )


def estimate(pair: LongPair, log_ratio: Floats, rewards: Floats, scores: Floats) -> GradientBias:
    """The bias from a sample."""
    advantages = rewards - pair.reward(pair.p)
    return estimated_gradient_bias(log_ratio, advantages, scores)
