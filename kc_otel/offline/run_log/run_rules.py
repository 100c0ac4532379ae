"""What a log of averages by step can say of training and inference kernels, and what it cannot.

A trend is a rank correlation (Kendall's tau) of ten medians of consecutive steps with time: medians of blocks are
nearly independent where steps are not, and its distribution under none is exact. It is told at 1 in 1,000, and only
where the last medians are at least twice, or at most half, of the first. Nothing here is a verdict: that takes tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kc_otel._extras import extra
from kc_otel.offline.run_log.read_run_log import RunLog

with extra("stats", "what a log of averages can tell"):
    from scipy import stats

__all__ = ["ROLES", "RULES", "RunFinding", "cannot_tell", "diagnose_run", "roles_of"]

ROLES: Final[Mapping[str, tuple[str, ...]]] = {
    "drift": (
        "rollout_corr/k3_kl", "mismatch_kl/all/mean", "gen_kl_error", "sampling/sampling_logp_difference/mean",
        "training/rollout_probs_diff_mean", "train_rollout_logprob_abs_diff",
    ),
    "k1": ("rollout_corr/kl",),
    "largest": ("training/rollout_probs_diff_max",),
    "ess": ("rollout_corr/rollout_is_eff_sample_size",),
    "clipped": ("actor/pg_clipfrac", "clip_ratio/region_mean"),
    "entropy": ("actor/entropy", "entropy", "approx_entropy"),
    "reward": ("critic/score/mean", "critic/rewards/mean", "reward"),
    "lag": ("weights_lag", "staleness", "off_policy_level"),
}  # fmt: skip
"""What a number is -> names that verl, TRL, prime-rl, NeMo-RL and slime log it under, the one to prefer first."""

_BLOCKS: Final = 10
_LEAST: Final = 3 * _BLOCKS
_EVALUATION: Final = frozenset({"eval", "val", "validation", "test"})
_WORST: Final = frozenset({"drift-rises", "drift-before-collapse"})
"""Rules of how large drift is."""
_PARTS: Final = 60
"""Parts at most that a run is looked at in for a level that changes at once."""
_SHORTEST: Final = 3
"""Parts at least that each level lasts."""
_ALPHA: Final = 1e-3
_APART: Final = 1.5
"""Between the lowest tenth of the higher level and the highest tenth of the lower: what wanders has no two levels."""
_PERIODS: Final = range(2, 13)


@dataclass(frozen=True, slots=True)
class RunFinding:
    """What a rule says.

    Attributes:
        rule: Its name.
        found: Whether it says so of this log; None where the log cannot tell.
        said: A sentence; of None, what is missing.
    """

    rule: str
    found: bool | None
    said: str


def roles_of(log: RunLog, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Which name of a log is which number: as given, else by `ROLES`, also under a prefix such as train/.

    Raises:
        ValueError: If there is no such role, or no such name in the log.
    """
    for role, name in (given or {}).items():
        if role not in ROLES:
            raise ValueError(f"--name: there is no {role!r}; write one of {', '.join(ROLES)}")
        if name not in log:
            raise ValueError(f"--name {role}={name}: the log has no such name; it has {', '.join(list(log)[:40])}")
    found = dict(given or {})
    for role, names in ROLES.items():
        matching = [has for name in names for has in log if has == name or has.endswith("/" + name)]
        if role not in found and matching:  # of training where evaluation has the same
            found[role] = min(matching, key=lambda has: has.partition("/")[0] in _EVALUATION)
    return found


def diagnose_run(log: RunLog, roles: Mapping[str, str]) -> list[RunFinding]:
    """What every rule says of a log.

    Args:
        log: Scalars by step.
        roles: Role -> name, from `roles_of`.
    """
    found = []
    for rule, (needed, judge) in RULES.items():
        if missing := [role for role in needed if role not in roles]:
            found.append(RunFinding(rule, None, f"not in the log: {', '.join(map(_wanted, missing))}"))
            continue
        parts = [log[roles[role]] for role in needed]
        if rule in _WORST:  # a drift that is no number is no smaller than any
            (at, drift), *others = parts
            parts = [(at, np.where(np.isfinite(drift), drift, math.inf)), *others]
        steps = parts[0][0]
        for other, _ in parts[1:]:
            steps = np.intersect1d(steps, other)
        aligned = [values[np.isin(at, steps)] for at, values in parts]
        finite = np.isfinite(aligned[1:] if rule in _WORST else aligned).all(axis=0) & ~np.isnan(aligned[0])
        kept = [values[finite] for values in aligned]
        if rule != "not-finite" and finite.sum() < _LEAST:
            found.append(RunFinding(rule, None, f"only {finite.sum()} steps have all numbers; it takes {_LEAST}"))
            continue
        said = judge(steps if rule == "not-finite" else steps[finite], *(aligned if rule == "not-finite" else kept))
        found.append(RunFinding(rule, said is not None, said or _NOT[rule]))
    return found


def _wanted(role: str) -> str:
    return f"{role} (such as {ROLES[role][0]})"


def _medians(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([np.median(part) for part in np.array_split(values, _BLOCKS)])


def _trend(values: NDArray[np.float64], sign: int) -> bool:
    """Whether it rises (1) or falls (-1), twofold at least: step by step, or at once and for good."""
    return _gradual(values, sign) or _jump(values, sign)


def _jump(values: NDArray[np.float64], sign: int) -> bool:
    """Whether all that comes after some step is another level, which ranks within either part do not show."""
    many = min(_PARTS, values.size // 3)
    medians = np.array([np.median(part) for part in np.array_split(values, many)])
    cuts = range(_SHORTEST, many - _SHORTEST + 1)
    for cut in cuts:
        before, after = medians[:cut], medians[cut:]
        low, high = (before, after) if sign > 0 else (after, before)
        if not (np.median(high) >= 2.0 * np.median(low) and np.median(high) > 0.0):
            continue
        if np.median(after[-_SHORTEST:]) * sign < (np.median(before) * (2.0 if sign > 0 else 0.5)) * sign:
            continue  # it came back
        if np.quantile(high, 0.1) < _APART * np.quantile(low, 0.9):
            continue  # it wanders
        found = stats.mannwhitneyu(high, low, alternative="greater", method="exact")
        if found.pvalue * len(cuts) < _ALPHA:
            return True
    return False


def _gradual(values: NDArray[np.float64], sign: int) -> bool:
    medians = _medians(values)
    found = stats.kendalltau(np.arange(_BLOCKS), medians, alternative="greater" if sign > 0 else "less")
    before, after = np.median(medians[:3]), np.median(medians[-3:])
    low, high = (before, after) if sign > 0 else (after, before)
    return bool(found.pvalue < _ALPHA and high >= 2.0 * low and high > 0.0)


def _change(values: NDArray[np.float64]) -> str:
    medians = _medians(values)
    return f"from {np.median(medians[:3]):.3g} to {np.median(medians[-3:]):.3g}"


def _onset(steps: NDArray[np.int64], values: NDArray[np.float64]) -> int:
    """The step from which on the median of five stays above twice that of the first tenth."""
    smooth = np.array([np.median(values[max(at - 4, 0) : at + 1]) for at in range(values.size)])
    below = np.flatnonzero(smooth <= 2.0 * np.median(values[: max(values.size // 10, 3)]))
    return int(steps[min(int(below[-1]) + 1 if below.size else 0, steps.size - 1)])


def _drift_rises(steps: NDArray[np.int64], drift: NDArray[np.float64]) -> str | None:
    if not _trend(drift, 1):
        return None
    return f"drift rises {_change(drift)}, above twice its beginning for good from step {_onset(steps, drift)}"


def _before_collapse(steps: NDArray[np.int64], drift: NDArray[np.float64], reward: NDArray[np.float64]) -> str | None:
    medians = _medians(reward)
    best = int(medians.argmax())
    gained, lost = medians[best] - medians[0], medians[best] - medians[-1]
    noise = float(np.median(np.abs(np.diff(reward)))) + 1e-12
    if not (0 < best < _BLOCKS - 1 and lost > 0.5 * gained and lost > 4.0 * noise) or not _trend(drift, 1):
        return None
    width = steps.size // _BLOCKS
    after = reward[best * width :]
    gone = np.flatnonzero(after < medians[best] - 0.5 * lost)
    fell, rose = int(steps[best * width + gone[0]]), _onset(steps, drift)
    if rose >= fell:
        return None
    return (
        f"drift was above twice its beginning from step {rose}, and the reward had lost half of its fall at "
        f"step {fell}: an order in time, not a cause; a run with a correction, or in float32, tells"
    )


def _entropy(steps: NDArray[np.int64], drift: NDArray[np.float64], entropy: NDArray[np.float64]) -> str | None:
    del steps
    if not _trend(drift, 1):
        return None
    tau = stats.kendalltau(np.arange(_BLOCKS), _medians(entropy), alternative="greater")
    if tau.pvalue < _ALPHA:
        return (
            f"drift rises {_change(drift)} while entropy rises {_change(entropy)}: unlikely tokens drift more, so that "
            "the policy may be all of it; compare the two kernels on the same tokens of an early and a late step"
        )
    return f"drift rises {_change(drift)} and entropy does not ({_change(entropy)}): the policy's entropy is not why"


def _wrong_side(steps: NDArray[np.int64], k1: NDArray[np.float64]) -> str | None:
    del steps
    negative = int((k1 < 0.0).sum())
    if stats.binomtest(negative, k1.size, 0.5, alternative="greater").pvalue >= 1e-6:
        return None
    return (
        f"the mean of log Q - log P is negative at {negative} of {k1.size} steps; over tokens drawn from Q it "
        "is a KL divergence and cannot be: Q's log-probabilities are not of what was drawn from (temperature, "
        "top-p, top-k), or tokens are masked by what they came to"
    )


def _tokens_differ(steps: NDArray[np.int64], largest: NDArray[np.float64]) -> str | None:
    del steps
    share = float((largest >= 0.9).mean())
    if share < 0.2:
        return None
    return (
        f"at {100 * share:.0f} % of the steps a token has a probability near 1 in one kernel and near 0 in the other: "
        "rounding does not do that; look for other tokens, a shift by one, or weights that did not arrive"
    )


def _ess_falls(steps: NDArray[np.int64], ess: NDArray[np.float64]) -> str | None:
    del steps
    last = float(np.median(_medians(ess)[-3:]))
    if _trend(ess, -1) or last < 0.5:
        return f"effective sample size goes {_change(ess)} of the batch: few tokens carry the gradient"
    return None


def _clip_saturates(steps: NDArray[np.int64], clipped: NDArray[np.float64]) -> str | None:
    del steps
    last = float(np.median(_medians(clipped)[-3:]))
    if last < 0.3:
        return None
    return f"{100 * last:.0f} % of the tokens were clipped in the last third: they have no gradient"


def _follows_lag(steps: NDArray[np.int64], drift: NDArray[np.float64], lag: NDArray[np.float64]) -> str | None:
    del steps
    # Differences of consecutive steps: two series that both grow are not one because of the other.
    with np.errstate(invalid="ignore"):
        found = stats.spearmanr(np.diff(drift), np.diff(lag), alternative="greater") if np.ptp(lag) else None
    if found is None or not (found.pvalue < _ALPHA and found.statistic > 0.3):
        return None
    return (
        f"drift moves with the lag of the weights from step to step (rank correlation {found.statistic:.2f}): part of "
        "it is staleness and no kernel's; record log-probabilities at the weights that sampled"
    )


def _periodic(steps: NDArray[np.int64], drift: NDArray[np.float64]) -> str | None:
    trendless = drift - np.convolve(np.pad(drift, 12, mode="edge"), np.ones(25) / 25.0, mode="valid")
    best = (math.inf, 0)
    for period in _PERIODS:
        phases = [trendless[steps % period == phase] for phase in range(period)]
        if min(part.size for part in phases) >= 5 and np.ptp(trendless):
            best = min(best, (float(stats.kruskal(*phases).pvalue), period))
    if best[0] * len(_PERIODS) >= _ALPHA:
        return None
    return (
        f"drift repeats every {best[1]} steps, as where weights are handed over every so many: part of it is staleness"
    )


def _not_finite(steps: NDArray[np.int64], drift: NDArray[np.float64]) -> str | None:
    bad = np.flatnonzero(~np.isfinite(drift))
    if not bad.size:
        return None
    return f"drift is not finite at {bad.size} of {steps.size} steps, first at {int(steps[bad[0]])}"


RULES: Final[Mapping[str, tuple[tuple[str, ...], Callable[..., str | None]]]] = {
    "drift-rises": (("drift",), _drift_rises),
    "drift-before-collapse": (("drift", "reward"), _before_collapse),
    "drift-and-entropy": (("drift", "entropy"), _entropy),
    "wrong-distribution": (("k1",), _wrong_side),
    "tokens-differ": (("largest",), _tokens_differ),
    "ess-falls": (("ess",), _ess_falls),
    "clipping-saturates": (("clipped",), _clip_saturates),
    "drift-follows-lag": (("drift", "lag"), _follows_lag),
    "drift-repeats": (("drift",), _periodic),
    "not-finite": (("drift",), _not_finite),
}
"""Rule -> roles that it takes, and what says a sentence of their steps and values, or None."""

_NOT: Final[Mapping[str, str]] = {
    "drift-rises": "drift does not rise twofold for good, neither step by step nor at once",
    "drift-before-collapse": "drift did not rise twofold for good before the reward lost half of its gain",
    "drift-and-entropy": "drift does not rise twofold for good, neither step by step nor at once",
    "wrong-distribution": "the mean of log Q - log P is not negative more often than not",
    "tokens-differ": "no token is likely in one kernel and unlikely in the other at many steps",
    "ess-falls": "the effective sample size neither halves nor ends below half of the batch",
    "clipping-saturates": "less than 30 % of the tokens were clipped in the last third",
    "drift-follows-lag": "drift does not move with the lag of the weights",
    "drift-repeats": "drift has no period of 2 to 12 steps",
    "not-finite": "every number of drift is finite",
}


def cannot_tell() -> Iterator[str]:
    """What no log of averages can say."""
    yield "which slice of the traffic drifts: record log-probabilities with what slices are made of"
    yield "whether a limit is kept: an average has no interval; `kc-otel gate run` judges a recording"
    yield "which operator it is: `kc-otel locate`"
