"""Inference kernels: the training kernel's weights, evaluated as a serving engine might.

Each family has one knob, from hardly any drift to a broken kernel, and a setting to be looked at first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from examples.rl_bias.policy import Floats, Policy, exactly, log_softmax, logits_of


@dataclass(frozen=True)
class Family:
    """A kind of perturbation.

    Attributes:
        name: What is perturbed.
        knob: What the scale means, for an axis.
        scales: From the least drift to the most.
        reference: The scale that tables and the horizon picture show.
        label: What the reference is called.
        log_probs: (policy, horizon, scale) to the kernel's log-probs [V^t, V] for each step; -inf for what it never
            samples.
    """

    name: str
    knob: str
    scales: tuple[float, ...]
    reference: float
    label: str
    log_probs: Callable[[Policy, int, float], list[Floats]]


def train_log_probs(policy: Policy, horizon: int) -> list[Floats]:
    """The training kernel P: float64 throughout."""
    return [log_softmax(step) for step in logits_of(policy, horizon)]


def round_to(values: Floats, bits: int) -> Floats:
    """To the nearest number of so many significant bits, ties to even: 8 is bf16's precision, 11 that of fp16."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa * 2.0**bits), exponent - bits)


def quantized(weight: Floats, bits: int, *, per_channel: bool) -> Floats:
    """Integers of so many bits times a scale from the largest magnitude, of the tensor or of each output channel."""
    largest = np.abs(weight).max(axis=0 if per_channel else None, keepdims=True)
    step = largest / (2 ** (bits - 1) - 1)
    return np.round(weight / step) * step


def nucleus(log_probs: Floats, kept: float) -> Floats:
    """Top-p: the fewest most likely tokens whose mass reaches `kept`, renormalised; -inf for the rest."""
    order = np.argsort(-log_probs, axis=-1, kind="stable")
    ordered = np.take_along_axis(np.exp(log_probs), order, axis=-1)
    drop = np.cumsum(ordered, axis=-1) - ordered >= kept
    cut = np.where(np.take_along_axis(drop, np.argsort(order, axis=-1), axis=-1), -np.inf, log_probs)
    return log_softmax(cut)


def _rounded(policy: Policy, horizon: int, scale: float) -> list[Floats]:
    bits = int(scale)
    stored = policy.mapped(lambda weight: round_to(weight, bits))
    return [log_softmax(step) for step in logits_of(stored, horizon, lambda values: round_to(values, bits))]


def _integer_weights(*, per_channel: bool) -> Callable[[Policy, int, float], list[Floats]]:
    def log_probs(policy: Policy, horizon: int, scale: float) -> list[Floats]:
        bits = int(scale)
        stored = Policy(
            policy.embed,
            quantized(policy.recur, bits, per_channel=per_channel),
            quantized(policy.head, bits, per_channel=per_channel),
            policy.bias,
        )
        return [log_softmax(step) for step in logits_of(stored, horizon, exactly)]

    return log_probs


def _truncated(policy: Policy, horizon: int, scale: float) -> list[Floats]:
    return [nucleus(step, scale) for step in train_log_probs(policy, horizon)]


def _biased(policy: Policy, horizon: int, scale: float) -> list[Floats]:
    extra = np.eye(policy.bias.size)[0] * scale
    return [log_softmax(step + extra) for step in logits_of(policy, horizon)]


def _noisy(policy: Policy, horizon: int, scale: float) -> list[Floats]:
    # One draw per prefix and token, the same at every scale, as if the order of the reductions depended on the prefix.
    rng = np.random.default_rng(7)
    return [log_softmax(step + scale * rng.standard_normal(step.shape)) for step in logits_of(policy, horizon)]


FAMILIES = (
    Family("rounding", "significant bits (bf16: 8)", (11, 9, 8, 7, 6, 5, 4, 3), 8, "bf16", _rounded),
    Family(
        "integer weights, per tensor",
        "weight bits",
        (10, 8, 7, 6, 5, 4, 3),
        8,
        "int8 per tensor",
        _integer_weights(per_channel=False),
    ),
    Family(
        "integer weights, per channel",
        "weight bits",
        (10, 8, 7, 6, 5, 4, 3),
        4,
        "int4 per channel",
        _integer_weights(per_channel=True),
    ),
    Family("dropped tail", "top-p", (0.999, 0.99, 0.98, 0.95, 0.9, 0.8, 0.7), 0.95, "top-p 0.95", _truncated),
    Family("biased token", "nats added", (0.003, 0.01, 0.03, 0.1, 0.3, 1.0), 0.1, "one token +0.1", _biased),
    Family("noise by prefix", "deviation, nats", (0.003, 0.01, 0.03, 0.1, 0.3, 1.0), 0.03, "noise 0.03", _noisy),
)
