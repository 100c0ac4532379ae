"""What a clause says about distributions, if it is kept: each fact with the assumptions that it takes.

A limit is a promise about the true statistic of the traffic. Tokens are sampled from the inference kernel Q, so a mean
over tokens is a mean over Q's own rollouts: `E_Q[sum_t x_t] = mean * E[length] <= mean * T`. The mean over sequences of
each sequence's mean (`unit: sequence`) gives the same for quantities that are never negative, because no sequence has
more than T tokens. A maximum is read as one over all tokens that Q can sample, observed or not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from kc_otel.explain.promise import Promise
from kc_otel.explain.ratio_regions import region
from kc_otel.stats.averages import tv_from_js, tv_from_mean_abs_log_ratio, tv_from_tail
from kc_otel.stats.bound import Bound, smallest
from kc_otel.stats.divergences import tv_from_chi2, tv_from_kl
from kc_otel.stats.sequences import sequence_tv
from kc_otel.stats.tokens import tv_from_half_range, tv_from_log_ratio_range, tv_from_ratio_range

__all__ = ["ASSUMPTIONS", "Assumption", "Facts", "facts_of", "sequence_bounds"]

Assumption = Literal["support", "prefixes", "unobserved"]

ASSUMPTIONS: Final[dict[Assumption, str]] = {
    "support": "P << Q: the training kernel gives no probability to tokens that the inference kernel cannot sample "
    "(top-k, top-p, underflow). support_deficit measures it.",
    "prefixes": "the full logits are compared on prefixes that the inference kernel sampled.",
    "unobserved": "what was not observed is no worse than the largest observation. No sample shows that.",
}

_NEED_SUPPORT: Final = frozenset({"k3", "chi2_token", "chi2_seq"})
_LOGITS: Final = frozenset({"logit_half_range", "tv_exact", "kl_train_inference", "kl_inference_train", "js"})
_SEQUENCE: Final = frozenset({"tv_seq", "chi2_seq"})


@dataclass(frozen=True, slots=True)
class Facts:
    """What follows from one kept limit. Means are over the inference kernel's rollouts; None where nothing follows.

    Attributes:
        mean_tv: Mean total variation of a token, and the statement that gave it.
        mean_kl: Mean KL(Q||P) of a token, nats.
        mean_abs_log_ratio: Mean |l| of a token, nats.
        every_tv: Total variation of a token after every prefix.
        every_kl: KL, one way round, after every prefix, nats.
        every_half_range: Half range of the logit difference after every prefix.
        every_log_ratio: |l| of every token after every prefix, nats.
        sequence_tv: Total variation of whole sequences, without a horizon, and the statement that gave it.
        chi2_token: Mean chi-square of a token.
        chi2_seq: Chi-square of whole sequences.
        needs: What the facts take beyond the limit being kept.
        per_sequence: Whether means weigh every sequence alike, so that none of them is one over tokens.
    """

    mean_tv: Bound | None = None
    mean_kl: float | None = None
    mean_abs_log_ratio: float | None = None
    every_tv: float | None = None
    every_kl: float | None = None
    every_half_range: float | None = None
    every_log_ratio: float | None = None
    sequence_tv: Bound | None = None
    chi2_token: float | None = None
    chi2_seq: float | None = None
    needs: frozenset[Assumption] = frozenset()
    per_sequence: bool = False


def facts_of(promise: Promise, support_deficit: float | None = None) -> Facts:
    """Facts from a promise.

    Args:
        promise: A statistic and its limit.
        support_deficit: Limit that the contract puts on the support deficit, where it does. It stands in for P << Q
            where k3 is turned into KL: `KL(Q||P) = E_Q[k3] + support deficit`.
    """
    make = {"mean": _of_mean, "max": _of_maximum, "quantile": _of_tail, "fraction": _of_tail}[promise.kind]
    facts = make(promise)
    needs = set(facts.needs)
    if promise.metric == "k3" and promise.kind == "mean" and support_deficit is not None:
        needs.discard("support")
        kl = promise.limit + support_deficit
        facts = replace(facts, mean_kl=kl, mean_tv=_pinsker(kl))
    if promise.kind == "fraction" and promise.limit == 0.0 and facts != Facts():
        needs.add("unobserved")
    if promise.metric in _LOGITS and facts != Facts():
        needs.add("prefixes")
    return replace(facts, needs=frozenset(needs), per_sequence=promise.by_sequence)


def sequence_bounds(facts: Facts, horizon: int) -> tuple[Bound, ...]:
    """Every bound on TV_seq at a horizon that follows from the facts, smallest first."""
    known: list[Bound] = []
    if facts.sequence_tv is not None:
        known.append(facts.sequence_tv)
    if facts.mean_tv is not None:
        tv = sequence_tv(horizon, token_tv_mean=min(1.0, facts.mean_tv.value))
        known.append(Bound(tv.value, "on policy, T x mean"))
    if facts.mean_kl is not None:
        tv = tv_from_kl(horizon * facts.mean_kl)
        known.append(Bound(tv.value, f"KL over steps, {tv.name}"))
    if facts.mean_abs_log_ratio is not None:
        tv = Bound(float(tv_from_mean_abs_log_ratio(horizon * facts.mean_abs_log_ratio)), "log ratios over steps")
        known.append(tv)
    if facts.every_half_range is not None:
        known.append(sequence_tv(horizon, half_range=facts.every_half_range))
    if facts.every_log_ratio is not None:
        known.append(sequence_tv(horizon, log_ratio=facts.every_log_ratio))
    if facts.every_tv is not None:
        known.append(sequence_tv(horizon, token_tv_worst=min(1.0, facts.every_tv)))
    if facts.every_kl is not None:
        tv = tv_from_kl(horizon * facts.every_kl)
        known.append(Bound(tv.value, f"KL over steps, {tv.name}"))
    return tuple(sorted(known, key=lambda bound: bound.value))


def _pinsker(kl: float) -> Bound:
    tv = tv_from_kl(max(0.0, kl))
    return Bound(min(1.0, tv.value), tv.name)


_ARE_TV: Final = frozenset({"tv_token", "tv_exact"})

_MEAN_TV: Final[dict[str, Callable[[float], Bound]]] = {
    "tv_token": lambda x: Bound(min(1.0, x), "TV = E_Q[(1-w)+]"),
    "tv_exact": lambda x: Bound(min(1.0, x), "measured from logits"),
    "k1": _pinsker,
    "k3": _pinsker,
    "kl_inference_train": _pinsker,
    "kl_train_inference": _pinsker,
    "abs_log_ratio": lambda x: Bound(float(tv_from_mean_abs_log_ratio(x)), "1 - exp(-mean |l|)"),
    "chi2_token": lambda x: Bound(float(tv_from_chi2(x)), "chi-square"),
    "js": lambda x: Bound(float(tv_from_js(x)), "Pinsker for the midpoint"),
    "logit_half_range": lambda x: Bound(float(tv_from_half_range(x)), "tanh(rho/2)"),
}
"""Limit on a mean -> mean total variation. Each is concave in the limit, so that it holds between means (Jensen)."""


def _of_mean(promise: Promise) -> Facts:
    metric, limit = promise.metric, promise.limit
    if limit < 0.0:
        return Facts()
    if metric == "tv_seq":
        return Facts(sequence_tv=Bound(min(1.0, limit), "TV_seq = E_Q[(1-W)+], measured"))
    if metric == "chi2_seq":
        tv = Bound(float(tv_from_chi2(limit)), "chi-square of sequences")
        return Facts(sequence_tv=tv, chi2_seq=limit, needs=frozenset({"support"}))
    if metric not in _MEAN_TV or (metric == "k1" and promise.by_sequence):
        # -l may be negative, so a mean that weighs sequences alike does not bound the sum over the tokens.
        return Facts()
    return Facts(
        mean_tv=_MEAN_TV[metric](limit),
        mean_kl=limit if metric in {"k1", "k3", "kl_inference_train"} else None,
        mean_abs_log_ratio=limit if metric == "abs_log_ratio" else None,
        chi2_token=limit if metric == "chi2_token" else None,
        needs=frozenset({"support"}) if metric in _NEED_SUPPORT else frozenset(),
    )


def _inside(promise: Promise, threshold: float) -> Bound | None:
    """What (1-w)+ of a token or sequence, or TV after a prefix, is at most where the metric is within a threshold."""
    metric = promise.metric
    if threshold < 0.0:
        return None
    if metric in _LOGITS:
        return _MEAN_TV[metric](threshold)
    lowest = region(metric, threshold)
    if lowest is None or not math.isfinite(lowest[0]):
        return None
    return Bound(-math.expm1(lowest[0]), "(1-w)+ of each token")


def _of_tail(promise: Promise) -> Facts:
    threshold, share = promise.tail
    inside = _inside(promise, threshold)
    if inside is None or (promise.by_sequence and promise.metric not in _ARE_TV):
        # What the mean of a sequence's values says of each of them, only a total variation itself tells.
        return Facts()
    mean = Bound(float(tv_from_tail(min(1.0, inside.value), min(1.0, share))), f"{inside.name}, 1 beyond")
    if promise.metric in _SEQUENCE:
        return Facts(sequence_tv=replace(mean, name="(1-W)+ of each sequence, 1 beyond"))
    return Facts(mean_tv=mean)


def _of_maximum(promise: Promise) -> Facts:
    metric, limit = promise.metric, promise.limit
    inside = _inside(promise, limit)
    needs: set[Assumption] = {"unobserved"}
    if metric == "ratio" and limit >= 1.0:
        tv = float(tv_from_ratio_range(1.0, limit - 1.0))
        return Facts(mean_tv=Bound(tv, "ratio range"), every_tv=tv, needs=frozenset({*needs, "support"}))
    if metric == "log_ratio" and limit >= 0.0:
        tv = float(tv_from_ratio_range(1.0, float(np.expm1(min(limit, 700.0)))))
        return Facts(mean_tv=Bound(tv, "ratio range"), every_tv=tv, needs=frozenset({*needs, "support"}))
    if inside is None:
        return Facts()
    if metric in _SEQUENCE:
        tv_seq = Bound(min(1.0, inside.value), "(1-W)+ of each sequence")
        return Facts(sequence_tv=tv_seq, needs=frozenset(needs))
    if metric == "abs_log_ratio":
        mean = smallest(Bound(float(tv_from_log_ratio_range(limit)), "tanh(lam/2)"), inside)
        return Facts(mean_tv=mean, every_tv=mean.value, every_log_ratio=limit, needs=frozenset({*needs, "support"}))
    return Facts(
        mean_tv=inside,
        every_tv=min(1.0, inside.value),
        every_kl=limit if metric in {"kl_inference_train", "kl_train_inference"} else None,
        every_half_range=limit if metric == "logit_half_range" else None,
        needs=frozenset(needs),
    )
