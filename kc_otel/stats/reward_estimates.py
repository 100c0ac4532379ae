"""The drift of a reward by its group's baseline: narrower than what assumes nothing, and only as good as it says.

With common support `E_Q[W - 1] = 0` after each prompt, so any b that does not depend on a sequence may be taken from
its reward:

    E_P[r] - E_Q[r] = E_Q[(W - 1)(r - b)],    b = the mean reward of the prompt's other rollouts,

and what a prompt's rewards have in common drops out. One observation per prompt, the mean over its rollouts; the limits
are those of a large sample, by the central limit theorem. `reward_intervals` needs neither that nor common support.

Source: Greensmith, Bartlett and Baxter 2004, Variance Reduction Techniques for Gradient Estimates; Kool, van Hoof and
Welling 2019, Buy 4 REINFORCE Samples, Get a Baseline for Free!, for the baseline that leaves one out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from kc_otel.stats._check import level


@dataclass(frozen=True, slots=True)
class RewardDriftEstimate:
    """Estimate of E_P[r] - E_Q[r] in the unit of the rewards, with limits valid for a large sample of prompts."""

    drift: float
    lower: float
    upper: float
    prompts: int

    def __str__(self) -> str:
        limits = f"[{self.lower:.3g}, {self.upper:.3g}]"
        return (
            f"E_P[r] - E_Q[r] is {self.drift:.3g} by the prompts' own baselines, in {limits} (large sample, common "
            f"support, {self.prompts:,} prompts)"
        )


def estimated_reward_drift(
    log_ratio: ArrayLike, reward: ArrayLike, prompts: ArrayLike, *, confidence: float = 0.99
) -> RewardDriftEstimate:
    """Estimate E_P[r] - E_Q[r] from the rollouts of prompts, if Q can sample what P can.

    Takes L = log W, nats, reward and prompt's name of each sequence [sequences]; one whose reward is NaN is left out,
    and so are prompts with one rollout.

    Raises:
        ValueError: If shapes differ, there are fewer than two prompts with two rollouts, or the confidence is not in
            (0, 1).

    >>> rng = np.random.default_rng(0)
    >>> prompt = np.repeat(np.arange(500), 8)
    >>> reward = (rng.random(4000) < rng.random(500)[prompt]).astype(float)     # some prompts are easier
    >>> L = rng.normal(-0.02, 0.2, 4000) + 0.1 * (reward - 0.5)                  # good answers became likelier
    >>> found = estimated_reward_drift(L, reward, prompt)
    >>> found.lower < 0.0166 < found.upper, found.upper - found.lower < 0.03
    (True, True)
    """
    ratio, value, names = (np.asarray(array).ravel() for array in (log_ratio, reward, prompts))
    if not ratio.size == value.size == names.size:
        msg = f"reward: {value.size} rewards and {names.size} prompts for {ratio.size} log ratios; give one for each"
        raise ValueError(msg)
    known = np.isfinite(value.astype(np.float64))
    change, value = np.expm1(ratio[known].astype(np.float64)), value[known].astype(np.float64)
    _, of, count = np.unique(names[known], return_inverse=True, return_counts=True)
    several = count > 1
    if np.count_nonzero(several) < 2:
        msg = f"prompts: {np.count_nonzero(several)} have two rollouts with a reward; a baseline takes a few hundred"
        raise ValueError(msg)
    of_several = several[of]
    mean = np.bincount(of, value) / count
    # r less the mean of the others is m / (m - 1) times r less the mean of all.
    beside = (value - mean[of]) * count[of] / np.maximum(count[of] - 1, 1)
    seen = (np.bincount(of, np.where(of_several, change * beside, 0.0)) / count)[several]
    beyond = NormalDist().inv_cdf(1.0 - (1.0 - level("confidence", confidence)) / 2.0)
    drift, spread = float(seen.mean()), float(seen.std(ddof=1)) / math.sqrt(seen.size)
    return RewardDriftEstimate(drift, drift - beyond * spread, drift + beyond * spread, int(seen.size))
