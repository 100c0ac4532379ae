"""Corrections of the mismatch between rollout and training kernel, and the lines that set them in trainers.

A correction gives token t of a sequence the weight c_t in the policy gradient: a ratio that is cut or zeroed outside of
a range, times 0 or 1 from a rejection rule. c_t = 1 is no correction. All lines leave the trainer to compute its own
log-probabilities of the rollouts.

Sources: Yao et al. 2025, Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (truncation, TIS); Liu,
Li et al. 2025, When Speed Kills Stability (masking, MIS; geometric ratios); Ling Team 2025, Every Step Evolves
(IcePop: two-sided masking of tokens); DeepSeek-AI 2025, DeepSeek-V3.2 (masking of sequences with negative advantages);
verl 0.9.1, verl/trainer/config/algorithm.py (`RolloutCorrectionConfig`) and verl/trainer/ppo/rollout_corr_helper.py;
TRL 1.16.0, trl/trainer/grpo_config.py and grpo_trainer.py; slime, slime/utils/arguments.py and
slime/backends/megatron_utils/loss.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kc_otel.record.measure.sampled import log_ratio, saturated
from kc_otel.recordings.recording import Recording

Floats = NDArray[np.float64]
Statistic = Literal["token_k1", "token_k3", "seq_sum_k1", "seq_mean_k1", "seq_mean_k3", "seq_max_k3", "off_policy"]
"""Statistic of a rejection rule, k1 = -l and k3 = w - 1 - l of a token, as verl names it.

`off_policy` is TRL's: the mean of k1 over a sequence whose advantage is negative; other sequences are never
rejected."""
Trainer = Literal["verl", "trl", "slime"]
_CAPS: Final = (1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Largest ratios to try; 2 is the default of verl and slime, 3 of TRL, 5 with 0.5 that of IcePop."""
_ICEPOP_BAND: Final = (0.5, 5.0)
_GEOMETRIC: Final = (1.001, 1.003, 1.01, 1.03, 1.1)
_K3: Final = (0.001, 0.003, 0.01, 0.03, 0.1)
_OFF_POLICY: Final = (0.01, 0.03, 0.1, 0.5)


@dataclass(frozen=True, slots=True)
class Weight:
    """A ratio r, exp(l_t) of a `token` or exp(sum l) of a `sequence`, that is cut to a range or 0 outside (`mask`)."""

    level: Literal["token", "sequence"]
    edge: Literal["truncate", "mask"]
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Rejection:
    """A rule that removes tokens, or whole sequences, whose statistic is outside of [low, high]."""

    statistic: Statistic
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Correction:
    """Correction applied to rollouts before they are learned from: a weight of tokens, a rule that takes some out."""

    weight: Weight | None = None
    rejection: Rejection | None = None

    @property
    def name(self) -> str:
        """Kind of the correction and its thresholds, such as `token mask [0.5, 2]`."""
        weight = "" if self.weight is None else f"{self.weight.level} {self.weight.edge} {_range(self.weight)}"
        rejection = "" if self.rejection is None else f"keep {self.rejection.statistic} {_range(self.rejection)}"
        return ", ".join(filter(None, (weight, rejection))) or "none"

    @property
    def largest(self) -> float:
        """Upper bound of the token weights."""
        return 1.0 if self.weight is None else self.weight.high

    def never_above(self, level: str) -> bool:
        """Return True if no token's weight exceeds its ratio of a level: it is only ever cut or dropped."""
        weight = self.weight
        return weight is not None and weight.level == level and (weight.edge == "mask" or weight.low <= 0.0)


class Ratios:
    """Ratios of a recording's tokens [N] and sequences [S] within the range of all measures, each computed once."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.log_w: Floats = log_ratio(recording.train, recording.inference)
        self.log_sequence: Floats = self.sums(self.log_w)

    @cached_property
    def sides(self) -> dict[str, Floats]:
        """Advantages [N] of tokens with a positive one, and with a negative one, else 0; nothing without any."""
        of = self.recording.advantages
        return {} if of is None else {"positive": np.maximum(of, 0.0), "negative": np.minimum(of, 0.0)}

    @cached_property
    def token(self) -> Floats:
        """W of each token, [N]."""
        return np.exp(self.log_w)

    @cached_property
    def sequence(self) -> Floats:
        """W = exp(sum l) of each token's sequence, [N]."""
        return self.spread(np.exp(saturated(self.log_sequence)))

    @cached_property
    def k3(self) -> Floats:
        """k3 of each token, [N]."""
        return np.expm1(self.log_w) - self.log_w

    def spread(self, values: Floats) -> Floats:
        """A number per sequence [S] for each of its tokens [N]."""
        return np.repeat(values, self.recording.lengths)

    def sums(self, values: NDArray[Any]) -> Floats:
        """The sum of token values [N] over each sequence, [S]."""
        return np.add.reduceat(values.astype(np.float64, copy=False), self.recording.starts)

    def means(self, values: Floats) -> Floats:
        """The mean of token values [N] over each sequence, [S]."""
        return self.sums(values) / self.recording.lengths


def _off_policy(of: Ratios) -> Floats:
    if of.recording.advantages is None:
        raise ValueError(f"{of.recording.source}: has no advantages; off_policy looks at their sign")
    return np.where(of.recording.advantages < 0.0, of.spread(of.means(-of.log_w)), -math.inf)


_STATISTICS: Final[Mapping[Statistic, Callable[[Ratios], Floats]]] = {
    "token_k1": lambda of: -of.log_w,
    "token_k3": lambda of: of.k3,
    "seq_sum_k1": lambda of: of.spread(-of.log_sequence),
    "seq_mean_k1": lambda of: of.spread(of.means(-of.log_w)),
    "seq_mean_k3": lambda of: of.spread(of.means(of.k3)),
    "seq_max_k3": lambda of: of.spread(np.maximum.reduceat(of.k3, of.recording.starts)),
    "off_policy": _off_policy,
}


def weights(of: Ratios, correction: Correction) -> Floats:
    """The weight c_t of every token, [N]; 0 for what is dropped."""
    found = np.ones(of.log_w.size)
    if (wanted := correction.weight) is not None:
        ratio: Floats = getattr(of, wanted.level)
        if wanted.edge == "truncate":
            found = np.clip(ratio, wanted.low, wanted.high)
        else:
            found = np.where((ratio >= wanted.low) & (ratio <= wanted.high), ratio, 0.0)
    if (rule := correction.rejection) is not None:
        value = _STATISTICS[rule.statistic](of)
        found = np.where((value >= rule.low) & (value <= rule.high), found, 0.0)
    return found


def _range(of: Weight | Rejection) -> str:
    if math.isinf(of.low) or (of.low == 0.0 and isinstance(of, Weight)):
        return f"at most {of.high:g}"
    return f"[{of.low:.4g}, {of.high:.4g}]"


def catalogue(*, advantages: bool) -> tuple[Correction, ...]:
    """Every correction that some trainer has, at the thresholds that are tried, the least first: none."""
    found = [Correction()]
    ratios: list[Weight] = []
    for level in ("token", "sequence"):
        ratios += [Weight(level, "truncate", 0.0, cap) for cap in _CAPS]
        ratios += [Weight(level, "mask", 0.0, cap) for cap in _CAPS]
        ratios += [Weight(level, "mask", _inverse(cap), cap) for cap in _CAPS]
        ratios.append(Weight(level, "mask", *_ICEPOP_BAND))
    found += [Correction(weight) for weight in ratios]
    rules = [*_between("token_k1", _CAPS), *_between("seq_sum_k1", _CAPS), *_between("seq_mean_k1", _GEOMETRIC)]
    k3: tuple[Statistic, ...] = ("token_k3", "seq_mean_k3", "seq_max_k3")
    rules += [Rejection(statistic, -math.inf, most) for statistic in k3 for most in _K3]
    with_rule = (None, Weight("token", "truncate", 0.0, 2.0), Weight("sequence", "truncate", 0.0, 2.0))
    found += [Correction(weight, rule) for rule in rules for weight in with_rule]
    if advantages:
        off_policy = [Rejection("off_policy", -math.inf, most) for most in _OFF_POLICY]
        found += [Correction(weight, rule) for rule in off_policy for weight in with_rule]
    return tuple(found)


def line(trainer: Trainer, correction: Correction) -> str | None:
    """Return the configuration line that sets a correction in a trainer; None where the trainer has none like it."""
    return _LINES[trainer](correction)


def _verl(correction: Correction) -> str | None:
    """Hydra overrides of verl; ranges are quoted, because Hydra reads `0.5_5` as the number 0.55."""
    weight, rule = correction.weight, correction.rejection
    if weight is not None and weight.edge == "mask" and weight.low <= 0.0:
        return None
    if rule is not None and rule.statistic == "off_policy":
        return None
    settings = {"rollout_is": "null", "rollout_rs": "null"}
    if weight is not None:
        settings["rollout_is"] = weight.level
        cut = weight.edge == "truncate"
        settings["rollout_is_threshold"] = _decimal(weight.high) if cut else _pair(weight.low, weight.high)
    if rule is not None:
        settings["rollout_rs"] = rule.statistic
        ratio = rule.statistic.endswith("k1")  # bounds on exp(k1) = 1/w, although verl compares logarithms
        bounds = _pair(math.exp(rule.low), math.exp(rule.high)) if ratio else _decimal(rule.high)
        settings["rollout_rs_threshold"] = bounds
    return " ".join(f"algorithm.rollout_correction.{name}={value}" for name, value in settings.items())


def _trl(correction: Correction) -> str | None:
    weight, rule = correction.weight, correction.rejection
    if rule is not None and rule.statistic != "off_policy":
        return None
    settings = [f"vllm_importance_sampling_correction={weight is not None}"]
    if weight is not None:
        low = weight.low if weight.low > 0.0 else None
        settings.append(f'vllm_importance_sampling_mode="{weight.level}_{weight.edge}"')
        settings.append(f"vllm_importance_sampling_clip_min={low}")
        settings.append(f"vllm_importance_sampling_clip_max={weight.high}")
    settings.append(f"off_policy_mask_threshold={None if rule is None else rule.high}")
    return ", ".join(settings)


def _slime(correction: Correction) -> str | None:
    """Arguments of slime's train.py; masking is its IcePop function."""
    weight = correction.weight
    if correction.rejection is not None or (weight is not None and weight.level != "token"):
        return None
    if weight is None:
        return "--get-mismatch-metrics"
    bounds = f"--tis-clip-low {weight.low:g} --tis-clip {weight.high:g}"
    if weight.edge == "truncate":
        return f"--use-tis {bounds}"
    return f"--use-tis --custom-tis-function-path slime.backends.megatron_utils.loss.icepop_function {bounds}"


_LINES: Final[Mapping[Trainer, Callable[[Correction], str | None]]] = {"verl": _verl, "trl": _trl, "slime": _slime}
TRAINERS: Final = tuple(_LINES)


def _between(statistic: Statistic, caps: tuple[float, ...]) -> Iterator[Rejection]:
    for cap in caps:
        yield Rejection(statistic, math.log(_inverse(cap)), math.log(cap))


def _inverse(cap: float) -> float:
    """1/cap to the digits that a configuration shows, so that what is measured is what is pasted."""
    return float(f"{1.0 / cap:.4g}")


def _pair(low: float, high: float) -> str:
    return f"'\"{_decimal(low)}_{_decimal(high)}\"'"


def _decimal(value: float) -> str:
    text = f"{value:.6g}"
    return text if "." in text or "e" in text else f"{text}.0"
