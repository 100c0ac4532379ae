"""The corrections that trainers have, under their own names, as a line to paste into their configuration.

Sources: verl 0.9.1, verl/trainer/config/algorithm.py (`RolloutCorrectionConfig`) and verl/trainer/ppo/
rollout_corr_helper.py; TRL 1.16.0, trl/trainer/grpo_config.py and grpo_trainer.py; slime, slime/utils/arguments.py and
slime/backends/megatron_utils/loss.py. All lines leave the trainer to compute its own log-probabilities of the rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal

from kc_otel.offline.remedy.corrections import Correction, Rejection, Statistic, Weight

Trainer = Literal["verl", "trl", "slime"]

_CAPS: Final = (1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Largest ratios to try; 2 is the default of verl and slime, 3 of TRL, 5 with 0.5 that of IcePop."""
_ICEPOP_BAND: Final = (0.5, 5.0)
_GEOMETRIC: Final = (1.001, 1.003, 1.01, 1.03, 1.1)
_K3: Final = (0.001, 0.003, 0.01, 0.03, 0.1)
_OFF_POLICY: Final = (0.01, 0.03, 0.1, 0.5)


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
"""Trainers whose configuration is known."""


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
