"""The drift of two kernels' expected rewards: its interval, its estimate by baselines, and what a budget allows.

Let u = (r - lo) / (hi - lo) be a reward as a share of its range, W = P(y)/Q(y) of the whole sequence, y sampled from Q,
and d = E_P[u] - E_Q[u]. Of every sequence two numbers are kept, neither ever above 1:

    above = (1 - W) (1 - u)        below = (1 - W) u

`E_Q[W (1 - u)] <= E_P[1 - u]`, because what Q cannot sample only lacks on the left, so `d <= E_Q[above]`; and with u in
place of 1 - u, `-d <= E_Q[below]`. It holds for every P and Q, with or without common support, and is an equality where
P has no mass outside of Q's support. Cutting W at any C >= 1 keeps both inequalities and makes them looser by
`E_Q[(W - C)_+]`. A baseline of the prompt drops out of both, so rewards and advantages give the same interval.

The total variation's bound is the case of C = 1 with the rewards left out: `above <= (1 - W)_+`. All of what sequences
that gained and sequences that lost probability cancel is lost in it.

An upper confidence bound on a mean needs an upper end of the values, which is 1, and no lower one: betting on
`1 - x >= 0` cuts a large W by its logarithm where the data say, so that no C has to be chosen nor paid for.

`estimated_reward_drift` is narrower than what assumes nothing, and only as good as its assumptions. With common support
`E_Q[W - 1] = 0` after each prompt, so any b that does not depend on a sequence may be taken from its reward:

    E_P[r] - E_Q[r] = E_Q[(W - 1)(r - b)],    b = the mean reward of the prompt's other rollouts,

and what a prompt's rewards have in common drops out. One observation per prompt, the mean over its rollouts; the limits
are those of a large sample, by the central limit theorem.

Source: Greensmith, Bartlett and Baxter 2004, Variance Reduction Techniques for Gradient Estimates; Kool, van Hoof and
Welling 2019, Buy 4 REINFORCE Samples, Get a Baseline for Free!, for the baseline that leaves one out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kc_otel.stats.interval import Binned, Interval, level, nothing
from kc_otel.stats.interval_rows import HistogramRows
from kc_otel.stats.means import Placement

_DISTANCE_SCALE = 2.0
"""1 - x is in units of it, so that its mean, 1 -+ d, is in [0, 1]."""


def reward_sides(log_ratio: ArrayLike, reward: ArrayLike, reward_range: tuple[float, float]) -> NDArray[np.float64]:
    """`above` and `below` of each sequence, float64 [2, sequences], from L = log W in nats and rewards [sequences].

    A reward that is not known (NaN), or outside of the range, counts for the worst that it could be within it.

    Raises:
        ValueError: If `reward_range` is not a range, or the shapes differ.

    >>> reward_sides([0.0, -0.1], [1.0, 0.0], (0.0, 1.0)).round(3).tolist()
    [[0.0, 0.095], [0.0, 0.0]]
    """
    low, width = reward_range[0], width_of(reward_range)
    hidden = -np.expm1(np.asarray(log_ratio, dtype=np.float64))
    share = (np.asarray(reward, dtype=np.float64) - low) / width
    if hidden.shape != share.shape:
        msg = f"reward: shape {share.shape} is not that of log_ratio, {hidden.shape}; give one for each sequence"
        raise ValueError(msg)
    known = (share >= 0.0) & (share <= 1.0)
    share = np.where(known, share, 0.0)
    return np.where(known, [hidden * (1.0 - share), hidden * share], np.maximum(hidden, 0.0)) + 0.0


def reward_drift_bounds(
    above: Binned, below: Binned, *, alpha_lower: float, alpha_upper: float, anytime: bool = False
) -> tuple[float, float]:
    """(lower, upper) for `d = E_P[u] - E_Q[u]`, in [-1, 1], from `above` and `below` of the same sequences.

    >>> rng = np.random.default_rng(0)
    >>> L = rng.normal(-0.02, 0.2, 4000)                          # W has mean 1
    >>> sides = reward_sides(L, rng.integers(0, 2, 4000), (0, 1))
    >>> low, high = reward_drift_bounds(*map(Binned.of_samples, sides), alpha_lower=0.005, alpha_upper=0.005)
    >>> low < 0 < high, high - low < 0.03
    (True, True)
    """
    level("alpha_lower", alpha_lower)
    level("alpha_upper", alpha_upper)
    return -_most(below, alpha_lower, anytime=anytime), _most(above, alpha_upper, anytime=anytime)


def reward_drift_interval(
    above: Binned,
    below: Binned,
    reward_range: tuple[float, float],
    *,
    alpha_lower: float,
    alpha_upper: float,
    anytime: bool = False,
) -> Interval:
    """The interval for `|E_P[r] - E_Q[r]|`, in the unit of the rewards; its note has the signed one.

    Each sign has its own upper bound, and only one of them can be wrong, so both have all of `alpha_upper`. Either
    lower bound may be wrong, so each has half of `alpha_lower`.
    """
    method = "anytime betting on rewards" if anytime else "betting on rewards"
    if not (above.total and below.total):
        return nothing(method)
    width = width_of(reward_range)
    half = alpha_lower / 2.0
    low, high = reward_drift_bounds(above, below, alpha_lower=alpha_upper, alpha_upper=alpha_upper, anytime=anytime)
    surely_low, surely_high = reward_drift_bounds(above, below, alpha_lower=half, alpha_upper=half, anytime=anytime)
    drift = (above.sum / above.total - below.sum / below.total) / 2.0
    if low <= high:  # a few sequences of huge weight can carry the means out of what is possible
        drift = min(max(drift, low), high)
    return Interval(
        estimate=width * abs(drift),
        lower=width * max(surely_low, -surely_high, 0.0),
        upper=width * max(high, -low),
        samples=min(above.total, below.total),
        method=method,
        note=f"E_P[r] - E_Q[r] is {width * drift:.3g}, in [{width * low:.3g}, {width * high:.3g}]"
        if low <= high
        else "what bounds it from below is above what bounds it from above: Q did not sample these sequences",
    )


def _most(sample: Binned, alpha: float, *, anytime: bool) -> float:
    """Upper bound for a mean of values that are at most 1, in [-1, 1]."""
    if not sample.total:
        return 1.0
    known = Placement.of(HistogramRows.of(sample), float(min(sample.lower[0], 0.0)), 1.0)
    [share] = known.bounds((known.most, lambda x: (1.0 - x) / _DISTANCE_SCALE, alpha), anytime=anytime)
    return min(1.0, max(1.0 - _DISTANCE_SCALE * float(share[0]), float(known.most[0]), -1.0))


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


def tv_for_reward_budget(budget: float, reward_range: tuple[float, float]) -> float:
    """The sequence total variation that suffices: `TV_seq <= B / (r_max - r_min)` keeps the reward drift within B.

    A budget of the range's width or more, in the reward's unit, allows everything.

    Raises:
        ValueError: If the budget is negative or NaN, or `reward_range` is not a range.
    """
    if not 0.0 <= budget < math.inf:
        raise ValueError(f"budget: {float(budget)!r} is not a finite number of at least 0")
    return min(1.0, budget / width_of(reward_range))


def width_of(reward_range: tuple[float, float]) -> float:
    """Return the width of a range of rewards."""
    low, high = reward_range
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        msg = f"reward_range: {reward_range!r} is not a range; write the smallest reward first, such as (0, 1)"
        raise ValueError(msg)
    return float(high) - float(low)
