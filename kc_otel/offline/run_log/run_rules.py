"""Conclusions about training and inference kernels from a log of averages by step, and their limits.

A trend is a rank correlation (Kendall's tau) of ten medians of consecutive steps with time: medians of blocks are
nearly independent where steps are not, and its distribution under none is exact. It is told at 1 in 1,000, and only
where the last medians are at least twice, or at most half, of the first. A run that is stopped soon after a change has
too few steps for that, and the drift of a policy that has collapsed may fall by itself: neither a level that has
changed until the end nor one that came back is denied. Nothing here is a verdict: that takes tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from kc_otel._extras import extra
from kc_otel.offline.run_log.read_run_log import ABSURD, ROLES, UNITS, Role, RunLog, Unit

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]

with extra("stats", "what a log of averages can tell"):
    from scipy import stats

_BLOCK_COUNT: Final = 10
_MIN_STEPS: Final = 3 * _BLOCK_COUNT
"""Numbers that a trend takes."""
_EVALUATION: Final = frozenset({"eval", "val", "validation", "test"})
_SIZE_RULES: Final = frozenset({"drift-rises", "drift-before-collapse", "drift-and-entropy"})
"""Rules of how large drift is: drift that is NaN or infinite is larger than any number."""
_TRENDS: Final = {"drift-rises": 1, "tail-grows": 1, "ess-falls": -1, "ratio-falls": -1}
_MIN_LATE_STEPS: Final = 5
_MIN_COMMON_SHARE: Final = 0.9
"""Least part of a run that two numbers have in common; slime counts optimizer steps of one, rollouts of another."""
_NOT_FINITE: Final = 1e300
"""Stands for drift that is NaN or infinite; quantiles between infinite numbers do not exist."""
_MAX_SHIFT_PARTS: Final = 60
"""Parts at most that a run is looked at in for a level that changes at once."""
_MIN_PARTS_PER_LEVEL: Final = 3
_FALSE_ALARM_PROBABILITY: Final = 1e-3
_MIN_LEVEL_RATIO: Final = 1.5
"""Gap between the lowest tenth of the higher level and the highest tenth of the lower: a drifting value has none."""
_FIRST_STEPS: Final = 10
_MAX_EXCEPTION_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True)
class RunFinding:
    """Result of a rule on a log: found, and what; not found; or None where the log cannot tell, and what is missing."""

    rule: str
    found: bool | None
    said: str


def roles_of(log: RunLog, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Map each role to a name in the log: as given, else by `ROLES`, also under a prefix such as train/."""
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
    """Apply every rule to a log, given the name of each role from `roles_of`."""
    return [RunFinding(rule, *_judged(log, roles, rule)) for rule in RULES]


def _judged(log: RunLog, roles: Mapping[str, str], rule: str) -> tuple[bool | None, str]:
    needed, judge, fewest = RULES[rule]
    if lacks := _lacking(log, roles, needed, fewest):
        return None, lacks
    if rule == "drift-and-entropy" and (rises := _judged(log, roles, "drift-rises"))[0] is not True:
        return rises
    parts = [(log[roles[role]][0], _values(log, role, roles[role])) for role in needed]
    steps = parts[0][0]
    for other, _ in parts[1:]:
        steps = np.intersect1d(steps, other)
    aligned = [values[np.isin(at, steps)] for at, values in parts]
    finite = np.isfinite(aligned).all(axis=0)
    kept = np.ones(steps.size, dtype=np.bool_) if rule == "not-finite" else finite
    if kept.sum() < fewest:
        return None, f"only {kept.sum()} steps have all numbers; it takes {fewest}"
    if rule in _SIZE_RULES:
        aligned[0] = np.where(np.isfinite(aligned[0]), aligned[0], _NOT_FINITE)
        kept = np.isfinite(aligned).all(axis=0)
    values = [column[kept] for column in aligned]
    if rule == "level-absurd":
        if (unit := _unit(roles["drift"])) is None:
            return None, f"the unit of {roles['drift']} is not known"
        said = judge(steps[kept], *values, ABSURD[unit])
    elif rule == "steps-missing":
        said = judge(steps, _steps_beside(log, roles["drift"]))
    else:
        said = judge(steps[kept], *values)
    if said is None and (doubt := _doubt(rule, roles, steps[kept], values)):
        return None, doubt
    return said is not None, said or ""


def _lacking(log: RunLog, roles: Mapping[str, str], needed: tuple[Role, ...], fewest: int) -> str:
    """Name the numbers that the log does not have, or not of the same steps; empty if it has them, or too few."""
    if missing := [role for role in needed if role not in roles]:
        names = ", ".join(f"{role} (such as {ROLES[role][0]})" for role in missing)
        return f"not in the log: {names}; if it has another name there: --name {missing[0]}=NAME"
    if len(set.intersection(*(set(log[roles[role]][0].tolist()) for role in needed))) < fewest:
        return ""
    ends = {roles[role]: log[roles[role]][0][-1] for role in needed}
    begin = min(log[name][0][0] for name in ends)
    if min(ends.values()) - begin >= _MIN_COMMON_SHARE * (max(ends.values()) - begin):
        return ""
    counts = " and ".join(f"{name} goes to step {end}" for name, end in ends.items())
    return f"{counts}: they count different steps, or one stops early"


def _doubt(rule: str, roles: Mapping[str, str], steps: Steps, values: list[Floats]) -> str:
    """Say why the log cannot tell what a rule did not find; empty if the rule denies it."""
    if rule == "level-absurd" and (unit := _unit(roles["drift"])):
        return _absurd_for_a_while(steps, values[0], ABSURD[unit])
    if rule in _SIZE_RULES and _constant(steps, values[0]):
        return "drift is the same number at nearly every step: see drift-constant"
    if rule == "drift-before-collapse":
        fell = _fell(values[1])
        before = "" if fell is None or fell < _MIN_STEPS else _late(steps[:fell], values[0][:fell], 1)
        if before:
            return f"before the reward was halfway down at step {steps[fell]}, {before}"
        return "" if _trend(values[0], 1) else _doubt("drift-rises", roles, steps, values)
    if rule not in _TRENDS:
        return ""
    return _late(steps, values[0], _TRENDS[rule]) or _for_a_while(steps, values[0], _TRENDS[rule])


def _unit(name: str) -> Unit | None:
    return next((unit for known, unit in UNITS.items() if name == known or name.endswith("/" + known)), None)


def _values(log: RunLog, role: str, name: str) -> Floats:
    """A role's numbers; drift from 0 and without a sign, whatever its name counts from."""
    values = log[name][1]
    if role != "drift":
        return values
    return np.abs(values - 1.0 if _unit(name) == "factor" else values)


def _medians(values: Floats) -> Floats:
    return np.array([np.median(part) for part in np.array_split(values, _BLOCK_COUNT)])


def _trend(values: Floats, sign: int) -> bool:
    """Return True for a rise (1) or a fall (-1), twofold at least: step by step, or at once and for good."""
    return _gradual(values, sign) or _jump(values, sign)


def _jump(values: Floats, sign: int) -> bool:
    """Return True if the level changes for good at some step, which ranks within either part do not show."""
    many = min(_MAX_SHIFT_PARTS, values.size // 3)
    medians = np.array([np.median(part) for part in np.array_split(values, many)])
    cuts = range(_MIN_PARTS_PER_LEVEL, many - _MIN_PARTS_PER_LEVEL + 1)
    for cut in cuts:
        before, after = medians[:cut], medians[cut:]
        low, high = (before, after) if sign > 0 else (after, before)
        if not (np.median(high) >= 2.0 * np.median(low) and np.median(high) > 0.0):
            continue
        if np.median(after[-_MIN_PARTS_PER_LEVEL:]) * sign < (np.median(before) * (2.0 if sign > 0 else 0.5)) * sign:
            continue  # it came back
        if np.quantile(high, 0.1) < _MIN_LEVEL_RATIO * np.quantile(low, 0.9):
            continue  # it wanders
        found = stats.mannwhitneyu(high, low, alternative="greater", method="exact")
        if found.pvalue * len(cuts) < _FALSE_ALARM_PROBABILITY:
            return True
    return False


def _gradual(values: Floats, sign: int) -> bool:
    medians = _medians(values)
    found = stats.kendalltau(np.arange(_BLOCK_COUNT), medians, alternative="greater" if sign > 0 else "less")
    before, after = np.median(medians[:3]), np.median(medians[-3:])
    low, high = (before, after) if sign > 0 else (after, before)
    return bool(found.pvalue < _FALSE_ALARM_PROBABILITY and high >= 2.0 * low and high > 0.0)


def _late(steps: Steps, values: Floats, sign: int) -> str:
    """Say that the level has changed by the end, where the trend is not told; empty if it has not."""
    onset = _onset(values, sign)
    before, after = values[:onset], values[onset:]
    if after.size < _MIN_LATE_STEPS or not before.size:
        return ""
    low, high = (before, after) if sign > 0 else (after, before)
    if np.quantile(high, 0.1) < _MIN_LEVEL_RATIO * np.quantile(low, 0.9):
        return ""  # it wanders
    went = f"{'rose' if sign > 0 else 'fell'} {_change(values, sign)}"
    return f"it {went} from step {steps[onset]} on: {after.size} entries of the log, too few to tell a trend"


def _for_a_while(steps: Steps, values: Floats, sign: int) -> str:
    """Say that the level changed for more than a few steps and came back; empty if it did not."""
    start, end = _longest(_changed(values, sign))
    first, then = values[: max(values.size // 10, 3)], values[start:end]
    low, high = (first, then) if sign > 0 else (then, first)
    if not then.size or np.quantile(high, 0.1) < _MIN_LEVEL_RATIO * np.quantile(low, 0.9):
        return ""  # it wanders
    went, came = ("rose", "fell") if sign > 0 else ("fell", "rose")
    levels = f"from {_level(np.median(first))} to {_level(np.median(then))}"
    return f"it {went} {levels} at steps {steps[start]} to {steps[end - 1]}, and {came} again: no trend, and not level"


def _longest(mask: NDArray[np.bool_]) -> tuple[int, int]:
    """Return start and end of the longest stretch of True, if that is more than exceptions are; else 0 and 0."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2).tolist()
    start, end = max(edges, key=lambda edge: edge[1] - edge[0], default=(0, 0))
    return (start, end) if end - start > max(_MAX_EXCEPTION_SHARE * mask.size, _MIN_LATE_STEPS) else (0, 0)


def _change(values: Floats, sign: int = 0) -> str:
    """Return the first level and the last in words; the last is that since the onset of a rise (1) or a fall (-1)."""
    onset = _onset(values, sign) if sign else values.size
    last = _medians(values)[-3:] if onset <= values.size * 7 // 10 or onset == values.size else values[onset:]
    levels = (float(np.median(part)) for part in (_medians(values)[:3], last))
    first, now = map(_level, levels)
    return f"from {first} to {now}"


def _level(level: float) -> str:
    return f"{level:.3g}" if level < _NOT_FINITE / 2 else "NaN or infinite values"


def _onset(values: Floats, sign: int = 1) -> int:
    """The place from which on the median of five stays above twice (1) or below half of the first tenth, or the end."""
    before = np.flatnonzero(~_changed(values, sign))
    return int(before[-1]) + 1 if before.size else 0


def _changed(values: Floats, sign: int) -> NDArray[np.bool_]:
    """Return at which places the median of five is above twice (1) or below half (-1) of the first tenth."""
    level = (2.0 if sign > 0 else 0.5) * np.median(values[: max(values.size // 10, 3)])
    return np.asarray(_smooth(values) * sign > level * sign)


def _smooth(values: Floats) -> Floats:
    """Return the median of each number and the two on either side, which are mirrored at the ends."""
    return np.asarray(np.median(sliding_window_view(np.pad(values, 2, mode="reflect"), 5), axis=1))


def _drift_rises(steps: Steps, drift: Floats) -> str | None:
    if not _trend(drift, 1):
        return None
    onset = _onset(drift)
    since = f", and stays above twice its initial value from step {steps[onset]}" if onset < steps.size else ""
    return f"drift rises {_change(drift, 1)}{since}"


def _before_collapse(steps: Steps, drift: Floats, reward: Floats) -> str | None:
    fell = _fell(reward)
    if fell is None:
        return None
    # Up to the fall, too: a policy that has collapsed may drift less.
    for judged in (drift, drift[:fell]):
        if judged.size >= _MIN_STEPS and (onset := _onset(judged)) < fell and _trend(judged, 1):
            return (
                f"drift was above twice its initial value from step {steps[onset]}, and the reward was halfway down at "
                f"step {steps[fell]}: the order alone does not prove the cause; a run in float32, or with a "
                "correction, does"
            )
    return None


def _fell(reward: Floats) -> int | None:
    """The place at which the reward had lost half of what it lost by the end; None if it did not collapse."""
    medians = _medians(reward)
    best = int(medians.argmax())
    gained, lost = medians[best] - medians[0], medians[best] - medians[-1]
    noise = float(np.median(np.abs(np.diff(reward)))) + 1e-12
    if not (0 < best < _BLOCK_COUNT - 1 and lost > 0.5 * gained and lost > 4.0 * noise):
        return None
    start = best * (reward.size // _BLOCK_COUNT)
    return start + int(np.flatnonzero(reward[start:] < medians[best] - 0.5 * lost)[0])


def _entropy(_: Steps, drift: Floats, entropy: Floats) -> str:
    tau = stats.kendalltau(np.arange(_BLOCK_COUNT), _medians(entropy), alternative="greater")
    if tau.pvalue < _FALSE_ALARM_PROBABILITY:
        return (
            f"drift rises {_change(drift, 1)} while entropy rises {_change(entropy)}: unlikely tokens drift more, so "
            "the policy alone may explain this; compare the two kernels on the same tokens of an early and a late step"
        )
    kept = f"entropy does not ({_change(entropy)})"
    return f"drift rises {_change(drift, 1)} and {kept}: the policy's entropy does not explain it"


def _wrong_side(_: Steps, k1: Floats) -> str | None:
    negative = int((k1 < 0.0).sum())
    if stats.binomtest(negative, k1.size, 0.5, alternative="greater").pvalue >= 1e-6:
        return None
    return (
        f"the mean of log Q - log P is negative at {negative} of {k1.size} steps; over tokens drawn from Q it is a KL "
        "divergence, which is never negative: Q's log-probabilities are of another distribution (temperature, top-p, "
        "top-k), or tokens are masked by their log ratio"
    )


def _tokens_differ(_: Steps, largest: Floats) -> str | None:
    share = float((largest >= 0.9).mean())
    if share < 0.2:
        return None
    return (
        f"at {100 * share:.0f} % of the steps a token has a probability near 1 in one kernel and near 0 in the other: "
        "rounding does not do that; look for other tokens, a shift by one, or weights that did not arrive"
    )


def _ess_falls(_: Steps, ess: Floats) -> str | None:
    last = float(np.median(_medians(ess)[-3:]))
    if _trend(ess, -1) or last < 0.5:
        return f"effective sample size goes {_change(ess, -1)} of the batch: few tokens carry the gradient"
    return None


def _follows_lag(_: Steps, drift: Floats, lag: Floats) -> str | None:
    # Differences of consecutive steps: two series that both grow are not one because of the other.
    with np.errstate(invalid="ignore"):
        varies = np.ptp(lag) and np.ptp(np.diff(drift))
        found = stats.spearmanr(np.diff(drift), np.diff(lag), alternative="greater") if varies else None
    if found is None or not (found.pvalue < _FALSE_ALARM_PROBABILITY and found.statistic > 0.3):
        return None
    return (
        f"drift moves with the lag of the weights from step to step (rank correlation {found.statistic:.2f}): part of "
        "it is staleness, not drift of a kernel; record log-probabilities under the weights that sampled"
    )


def _absurd(steps: Steps, drift: Floats, most: float) -> str | None:
    """Say a level that kernels of the same weights do not have, from the beginning to the end."""
    first = float(np.median(drift[: max(drift.size // 10, 5)]))
    if min(first, np.median(drift)) < most:
        return None
    return (
        f"drift is {first:.3g} from step {int(steps[0])} on, but kernels with the same weights are less than {most:g} "
        "apart (bfloat16 about a tenth of that, fp8 close to it; a small model in 4 bits may exceed it): look for "
        "another temperature, tokens shifted by one or encoded again from text, masks, and weights or adapters that "
        "never arrived"
    )


def _absurd_for_a_while(steps: Steps, drift: Floats, most: float) -> str:
    start, end = _longest(_smooth(drift) >= most)
    if start == end:
        return ""
    return (
        f"drift is {np.median(drift[start:end]):.3g} at steps {steps[start]} to {steps[end - 1]} alone, and kernels "
        f"with the same weights are less than {most:g} apart: see what else changed then"
    )


def _constant(_: Steps, drift: Floats) -> str | None:
    """Say drift that does not vary: what is measured does."""
    usual = float(np.quantile(drift, 0.5, method="lower"))
    same = int((drift == usual).sum())
    if same < (1.0 - _MAX_EXCEPTION_SHARE) * drift.size:
        return None
    if usual:
        return (
            f"drift is {usual:.3g} at {same} of {drift.size} steps: it is rounded, or not measured; no rule finds "
            "anything in such a number"
        )
    return (
        f"drift is exactly 0 at {same} of {drift.size} steps: unless the kernels agree bit for bit, one side is a copy "
        "of the other (verl: algorithm.rollout_correction.bypass_mode), and nothing was measured"
    )


def _first_high(steps: Steps, drift: Floats) -> str | None:
    out, _ = _outlying(drift, 3.0, 4.0)
    leading = int(out.size if out.all() else out.argmin())
    if not 0 < leading <= _FIRST_STEPS or drift.size <= 3 * _FIRST_STEPS:
        return None
    return (
        f"drift is {drift[:leading].max():.3g} in the first {leading} step{'s' * (leading > 1)} (to step "
        f"{int(steps[leading - 1])}) and {np.median(drift[leading:]):.3g} after: the engine sampled with other weights "
        "until the first sync, or with a graph that was not warm"
    )


def _spikes(steps: Steps, drift: Floats) -> str | None:
    out, usual = _outlying(drift, 10.0, 6.0)
    out[: int(out.argmin())] = False  # the first steps have a rule of their own
    many = int(out.sum())
    if not 0 < many <= _MAX_EXCEPTION_SHARE * drift.size:
        return None
    named = ", ".join(map(str, steps[out][:5].tolist())) + (" ..." if many > 5 else "")
    gaps = np.diff(steps[out])
    regular = f", {int(gaps[0])} apart" if many > 2 and np.ptp(gaps) == 0 else ""
    return (
        f"at {many} of {drift.size} steps ({named}{regular}) drift is more than ten times that of the steps around "
        f"them, up to {drift[out].max():.3g} from {usual[out][drift[out].argmax()]:.2g}: a few tokens or one batch "
        "caused that, not a kernel's rounding; see what else ran then (an evaluation, a checkpoint, a restarted "
        "engine), and look for placeholders such as -inf or 0 in place of a log-probability"
    )


def _outlying(drift: Floats, times: float, deviations: float) -> tuple[NDArray[np.bool_], Floats]:
    """Return which steps exceed their surroundings by a factor and by robust deviations, and the surroundings."""
    floor = max(float(np.median(drift)) * 1e-3, 1e-12)
    logarithm = np.log(np.maximum(drift, floor))
    usual = np.median(np.lib.stride_tricks.sliding_window_view(np.pad(logarithm, 12, mode="reflect"), 25), axis=1)
    apart = logarithm - usual
    spread = 1.4826 * float(np.median(np.abs(apart - np.median(apart))))
    return apart > max(math.log(times), deviations * spread), np.exp(usual)


def _tail_grows(_: Steps, tail: Floats, drift: Floats) -> str | None:
    if not _trend(tail, 1):
        return None
    mean = (
        f"while the mean goes {_change(drift, 1)}"
        if _trend(drift, 1)
        else f"and the mean does not ({_change(drift)}): a few tokens drift further and further"
    )
    return (
        f"the largest difference of a step rises {_change(tail, 1)} {mean}; sequence weights and gradients depend on "
        "the largest, not on the mean: record log-probabilities and look at p99.9"
    )


def _ratio_falls(steps: Steps, ratio: Floats) -> str | None:
    last = float(np.median(_medians(ratio)[-3:]))
    if not (_trend(ratio, -1) or last < 0.5):
        return None
    below = np.flatnonzero(ratio < 0.5)
    since = f", below one half first at step {int(steps[below[0]])}" if below.size else ""
    return (
        f"the mean importance ratio P/Q goes {_change(ratio, -1)}{since}: over tokens drawn from Q it is 1 where both "
        "kernels can give the same tokens; masks and caps remove the rest of the gradient, or Q gives its tokens "
        "probabilities that P does not"
    )


def _ratio_above(_: Steps, ratio: Floats) -> str | None:
    above = int((ratio > 1.05).sum())
    if stats.binomtest(above, ratio.size, 0.5, alternative="greater").pvalue >= 1e-6:
        return None
    return (
        f"the mean importance ratio P/Q is above 1.05 at {above} of {ratio.size} steps; over tokens drawn from Q it is "
        "at most 1: the tokens, or Q's log-probabilities of them, are another distribution's (temperature, top-p, a "
        "shift by one)"
    )


def _steps_beside(log: RunLog, name: str) -> Steps:
    """Return the steps of the number that is logged most often together with this one, from its first step on."""
    steps = log[name][0]
    together = (
        at for other, (at, _) in log.items()
        if other.partition("/")[0] not in _EVALUATION and np.isin(steps, at).mean() > 0.9
    )  # fmt: skip
    every: Steps = max(together, key=len)
    return np.asarray(every[every >= steps[0]])


def _missing(steps: Steps, every: Steps) -> str | None:
    """Say at which steps a log has other numbers and none of drift, as a logger that drops NaN leaves them."""
    places = np.searchsorted(every, steps)
    usual = max(int(np.median(np.diff(places))), 1)
    gaps = np.diff(np.append(places, every.size - 1 + usual)) // usual - 1
    if not (absent := int(gaps.sum())):
        return None
    first = int(every[places[np.flatnonzero(gaps)[0]] + usual])
    rest = " and none after it" if absent == gaps[-1] else ""
    return (
        f"drift has no number at {absent} of {absent + steps.size} steps at which others have one, first at step "
        f"{first}{rest}: prime-rl's file, W&B's history and TRL omit NaN and infinite values, so they go "
        "unnoticed; look for -inf, empty batches, or a correction that was switched off"
    )


def _not_finite(steps: Steps, drift: Floats) -> str | None:
    bad = np.flatnonzero(~np.isfinite(drift))
    if not bad.size:
        return None
    return f"drift is not finite at {bad.size} of {steps.size} steps, first at {int(steps[bad[0]])}"


class _Rule(NamedTuple):
    """The roles that a rule takes, and what says a sentence of their steps and values, or None."""

    roles: tuple[Role, ...]
    judge: Callable[..., str | None]
    fewest: int = _MIN_STEPS


RULES: Final[Mapping[str, _Rule]] = {
    "level-absurd": _Rule(("drift",), _absurd, 5),
    "drift-constant": _Rule(("drift",), _constant, 5),
    "first-steps-high": _Rule(("drift",), _first_high),
    "spikes": _Rule(("drift",), _spikes),
    "steps-missing": _Rule(("drift",), _missing, 10),
    "tail-grows": _Rule(("tail", "drift"), _tail_grows),
    "ratio-falls": _Rule(("ratio",), _ratio_falls),
    "ratio-above-one": _Rule(("ratio",), _ratio_above),
    "drift-rises": _Rule(("drift",), _drift_rises),
    "drift-before-collapse": _Rule(("drift", "reward"), _before_collapse),
    "drift-and-entropy": _Rule(("drift", "entropy"), _entropy),
    "wrong-distribution": _Rule(("k1",), _wrong_side),
    "tokens-differ": _Rule(("largest",), _tokens_differ),
    "ess-falls": _Rule(("ess",), _ess_falls),
    "drift-follows-lag": _Rule(("drift", "lag"), _follows_lag),
    "not-finite": _Rule(("drift",), _not_finite, 1),
}


def cannot_tell() -> Iterator[str]:
    """Yield the questions that no log of averages can answer."""
    yield "which slice of the traffic drifts: record log-probabilities with the attributes of your slices"
    yield "whether a limit is kept: an average has no interval; `kc-otel gate run` judges a recording"
    yield "which operator it is: `kc-otel locate run`"
