"""What one promise says about the statistic of another: the largest value it can have while the first is kept.

Three kinds of rules, each a theorem:

- of any sample: both statistics are of the same tokens (or sequences), and the one follows from the other by arithmetic
  (a limit on |l| is one on every function of l; Markov's inequality; Jensen's);
- of the traffic as a whole: identities of sampling from Q come in (E_Q[w] <= 1, so that k3 is a KL divergence);
- over a horizon: from tokens to sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from kc_otel.contract.registry import QUANTITIES, Origin
from kc_otel.explain.clause_facts import facts_of, sequence_bounds
from kc_otel.explain.promise import Promise
from kc_otel.explain.ratio_regions import SEQUENCE, TOKEN, region, top
from kc_otel.stats.averages import tv_from_js, tv_from_mean_abs_log_ratio
from kc_otel.stats.divergences import tv_from_chi2, tv_from_kl
from kc_otel.stats.tokens import kl_from_half_range, tv_from_half_range

__all__ = ["Implied", "Proviso", "bound_on", "never_exceeded"]

Proviso = Literal["traffic", "support", "same tokens", "horizon", "prefixes"]
"""`traffic`: of the true statistics, not of each sample. `same tokens`: both are measured on the same tokens."""


@dataclass(frozen=True, slots=True)
class Implied:
    """What a kept promise says about another statistic.

    Attributes:
        value: The other statistic is at most this.
        by: The statement.
        conditions: What it takes.
    """

    value: float
    by: str
    conditions: frozenset[Proviso] = frozenset()


def bound_on(known: Promise, other: Promise, horizon: int | None = None) -> Implied | None:
    """The largest value of another promise's statistic while the known one is kept; None when nothing is known of it.

    Args:
        known: A promise that is kept.
        other: The statistic asked about; its limit does not count.
        horizon: T, for what is said of sequences from tokens.
    """
    if known.by_sequence != other.by_sequence and other.metric not in SEQUENCE:
        return None
    found = [implied for rule in _RULES if (implied := rule(known, other, horizon)) is not None]
    found = [implied for implied in found if not math.isnan(implied.value)]
    return min(found, key=lambda implied: (implied.value, len(implied.conditions)), default=None)


def never_exceeded(promise: Promise) -> str:
    """Why no pair of kernels could break a promise, whatever its limit is meant to catch; empty when one could.

    It rests on E_Q[w] <= 1 for tokens and sequences sampled from Q, the ratio of what Q cannot sample being lost.
    """
    if promise.kind == "mean":
        ceilings = {"ratio": 1.0, "geometric_ratio": 1.0, "log_ratio": 0.0, "log_ratio_seq": 0.0}
        ceiling = ceilings.get(promise.metric)
        if ceiling is None or promise.limit < ceiling:
            return ""
        return f"the mean over samples from Q is at most {ceiling:g} for any two distributions (E_Q[w] <= 1)"
    if promise.kind == "max":
        return ""
    threshold, share = promise.tail
    if promise.metric == "geometric_ratio":
        beyond = 1.0 / threshold if threshold > 1.0 else 1.0
    else:
        where = region(promise.metric, threshold)
        if where is None or math.isfinite(where[0]):
            return ""
        beyond = math.exp(-where[1]) if where[1] > 0.0 else 1.0
    if beyond > share:
        return ""
    return f"for any two distributions at most {100 * beyond:.3g} % of samples from Q are beyond {threshold:g} (Markov)"


def _same(known: Promise, other: Promise, _: int | None) -> Implied | None:
    if (known.metric, known.kind, known.argument) == (other.metric, other.kind, other.argument):
        return Implied(known.limit, "the same statistic")
    return None


def _pointwise(known: Promise, other: Promise, _: int | None) -> Implied | None:
    """Through the log ratios that the known promise allows, for all observations but a share of them."""
    if known.by_sequence or other.by_sequence or not _comparable(known.metric, other.metric):
        return None
    if known.kind == "mean":
        return _markov(known, other)
    threshold, share = known.tail
    value = _top(known.metric, threshold, other.metric)
    if value is None:
        return None
    return _from_tail(value, share, other, f"{_named(known)} limits each of them", _same_tokens(known, other))


def _from_tail(value: float, share: float, other: Promise, by: str, conditions: frozenset[Proviso]) -> Implied | None:
    """The other statistic, when all observations of its quantity but a share are at most a value."""
    if other.kind == "mean":
        high = QUANTITIES[other.metric].high if other.metric in QUANTITIES else math.inf
        if share > 0.0 and not math.isfinite(high):
            return None
        return Implied(value if share == 0.0 else value * (1.0 - share) + share * high, by, conditions)
    if other.kind == "max":
        return Implied(value, by, conditions) if share == 0.0 else None
    if other.kind == "quantile":
        return Implied(value, by, conditions) if share <= other.tail[1] else None
    return Implied(share, by, conditions) if value <= other.argument else None


def _markov(known: Promise, other: Promise) -> Implied | None:
    """P(X > a) <= E[X] / a for a quantity that is never negative."""
    quantity = QUANTITIES.get(known.metric)
    if quantity is None or quantity.low < 0.0 or other.kind in {"mean", "max"} or known.limit < 0.0:
        return None
    conditions = _same_tokens(known, other)
    if other.kind == "quantile":
        value = _top(known.metric, known.limit / other.tail[1], other.metric)
        return None if value is None else Implied(value, "Markov's inequality", conditions)
    threshold = _largest(lambda a: _top(known.metric, a, other.metric), other.argument)
    if threshold is None or threshold <= 0.0:
        return None
    return Implied(min(1.0, known.limit / threshold), "Markov's inequality", conditions)


def _means(known: Promise, other: Promise, _: int | None) -> Implied | None:
    if known.kind != "mean" or other.kind != "mean" or known.limit < 0.0:
        return None
    rule = _MEANS.get((known.metric, other.metric))
    if rule is None or (known.by_sequence and "traffic" in rule.conditions):
        return None
    return Implied(rule.of(known.limit), rule.by, rule.conditions | _same_tokens(known, other))


def _sequences(known: Promise, other: Promise, horizon: int | None) -> Implied | None:
    """The mean of tv_seq, from whatever says something about sequences."""
    if (other.metric, other.kind) != ("tv_seq", "mean") or known.kind == "max":
        return None
    facts = facts_of(known)
    if facts.sequence_tv is None and horizon is None:
        return None
    bounds = sequence_bounds(facts, horizon or 1)
    if not bounds or bounds[0].value >= 1.0:
        return None
    conditions: set[Proviso] = {"traffic"} if facts.sequence_tv is None or facts.needs else set()
    if facts.sequence_tv is None:
        conditions.add("horizon")
    for need in facts.needs:
        conditions.add("support" if need == "support" else "prefixes")
    return Implied(bounds[0].value, bounds[0].name, frozenset(conditions))


@dataclass(frozen=True, slots=True)
class _Mean:
    of: Callable[[float], float]
    by: str
    conditions: frozenset[Proviso] = frozenset()


_TRAFFIC: Final[frozenset[Proviso]] = frozenset({"traffic"})
_SUPPORT: Final[frozenset[Proviso]] = frozenset({"traffic", "support"})


def _pinsker(kl: float) -> float:
    return min(1.0, tv_from_kl(kl).value)


def _js_from_tv(tv: float) -> float:
    return math.log(2.0) * min(1.0, tv)


_MEANS: Final[dict[tuple[str, str], _Mean]] = {
    ("abs_log_ratio", "tv_token"): _Mean(lambda x: float(tv_from_mean_abs_log_ratio(x)), "TV <= 1 - exp(-mean |l|)"),
    ("abs_log_ratio", "k1"): _Mean(lambda x: x, "-l <= |l|"),
    ("abs_log_ratio", "k3"): _Mean(lambda x: x, "mean k3 <= KL <= mean |l|", _TRAFFIC),
    ("k1", "k3"): _Mean(lambda x: x, "mean k3 = KL - support deficit", _TRAFFIC),
    ("k3", "k1"): _Mean(lambda x: x, "k1 and k3 have one mean", _SUPPORT),
    ("k1", "tv_token"): _Mean(_pinsker, "Pinsker and Jensen", _TRAFFIC),
    ("k3", "tv_token"): _Mean(_pinsker, "Pinsker and Jensen", _SUPPORT),
    ("chi2_token", "tv_token"): _Mean(lambda x: float(tv_from_chi2(x)), "Cauchy-Schwarz and Jensen", _SUPPORT),
    ("kl_inference_train", "tv_exact"): _Mean(_pinsker, "Pinsker and Jensen"),
    ("kl_train_inference", "tv_exact"): _Mean(_pinsker, "Pinsker and Jensen"),
    ("js", "tv_exact"): _Mean(lambda x: float(tv_from_js(x)), "Pinsker for the midpoint"),
    ("tv_exact", "js"): _Mean(_js_from_tv, "JS <= log(2) TV"),
    ("logit_half_range", "tv_exact"): _Mean(lambda x: float(tv_from_half_range(x)), "TV <= tanh(rho/2)"),
    ("tv_exact", "tv_token"): _Mean(lambda x: x, "one mean, two estimates", _TRAFFIC),
    ("tv_token", "tv_exact"): _Mean(lambda x: x, "one mean, two estimates", _TRAFFIC),
    ("kl_inference_train", "k1"): _Mean(lambda x: x, "one mean, two estimates", _TRAFFIC),
    ("k1", "kl_inference_train"): _Mean(lambda x: x, "one mean, two estimates", _TRAFFIC),
    ("kl_inference_train", "k3"): _Mean(lambda x: x, "mean k3 = KL - support deficit", _TRAFFIC),
    ("kl_inference_train", "tv_token"): _Mean(_pinsker, "Pinsker and Jensen", _TRAFFIC),
    ("kl_train_inference", "tv_token"): _Mean(_pinsker, "Pinsker and Jensen", _TRAFFIC),
    ("logit_half_range", "tv_token"): _Mean(lambda x: float(tv_from_half_range(x)), "TV <= tanh(rho/2)", _TRAFFIC),
}
"""Limit on one mean -> limit on another. What is not marked `traffic` holds for the means of any sample."""

_EACH: Final[dict[tuple[str, str], Callable[[float], float]]] = {
    ("logit_half_range", "tv_exact"): lambda x: float(tv_from_half_range(x)),
    ("logit_half_range", "kl_train_inference"): lambda x: float(kl_from_half_range(x)),
    ("logit_half_range", "kl_inference_train"): lambda x: float(kl_from_half_range(x)),
    ("logit_half_range", "js"): lambda x: _js_from_tv(float(tv_from_half_range(x))),
    ("kl_train_inference", "tv_exact"): _pinsker,
    ("kl_inference_train", "tv_exact"): _pinsker,
    ("js", "tv_exact"): lambda x: float(tv_from_js(x)),
    ("tv_exact", "js"): _js_from_tv,
}
"""Limit on what full logits show after one prefix -> limit on another such quantity after the same prefix."""


def _comparable(known: str, other: str) -> bool:
    if known == other or (known, other) in _EACH:
        return True
    if other in TOKEN:
        return known in TOKEN or known == "logit_half_range"
    return other in SEQUENCE and known in SEQUENCE


def _top(known: str, limit: float, other: str) -> float | None:
    """Largest value of one quantity where another one is at most a limit."""
    if known == other:
        return limit
    if (known, other) in _EACH:
        return _EACH[known, other](limit) if limit >= 0.0 else None
    where = region(known, limit)
    value = None if where is None else top(other, where)
    return value if value is not None and math.isfinite(value) else None


def _largest(of: Callable[[float], float | None], target: float) -> float | None:
    """Largest argument at which a rising function is at most a target."""

    def within(argument: float) -> bool:
        value = of(argument)
        return value is not None and value <= target

    if not within(0.0):
        return None
    low, high = 0.0, 1e-12
    while within(high):
        low, high = high, 2.0 * high
        if high > 1e12:
            return high
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if within(middle) else (low, middle)
    return low


def _same_tokens(known: Promise, other: Promise) -> frozenset[Proviso]:
    sources = {QUANTITIES[p.metric].source if p.metric in QUANTITIES else Origin.LOGPROBS for p in (known, other)}
    return frozenset({"same tokens"}) if len(sources) > 1 else frozenset()


def _named(promise: Promise) -> str:
    return {"max": "the maximum", "quantile": "the quantile", "fraction": "the share"}.get(promise.kind, "the mean")


_RULES: Final = (_same, _pointwise, _means, _sequences)
