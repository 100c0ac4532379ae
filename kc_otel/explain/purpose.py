"""What a clause is for where it bounds no distance, and what its statistic can show at all."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.registry import DERIVED, Unit
from kc_otel.contract.slices import ALL
from kc_otel.explain.promise import Promise
from kc_otel.stats.divergences import tv_from_kl

__all__ = ["evidence", "note", "outcome_attributes", "purpose"]

_PURPOSE: Final = {
    "log_ratio": "only tokens that the training kernel likes more are limited, not the mass it lost elsewhere",
    "log_ratio_seq": "only sequences that the training kernel likes more are limited, not the mass it lost elsewhere",
    "geometric_ratio": "the length-normalised weight of GSPO; it tells how often a sequence cap cuts, not how far the "
    "distributions are apart",
    "support_deficit": "measures the assumption P << Q that bounds from k3, ratios and chi-square are made of",
    "ratio": "only tokens that the training kernel likes more are limited, not the mass it lost elsewhere",
    "entropy_difference": "two distributions far apart can have one entropy; it finds sharpening or flattening",
    "advantage_drift_positive": "what the mismatch adds to the push of good tokens; no distance follows from it",
    "advantage_drift_negative": "what the mismatch adds to the push of bad tokens; no distance follows from it",
    "outside_mass": "what truncation hides from every other clause: TV(P, Q truncated) is at most this and tv_token "
    "together",
    "reward_drift": "the drift of the expected reward is measured itself, on rewards that were given; at any horizon, "
    "where distances between distributions say nothing, too",
    "weights_lag": "with stale weights every drift below is the policy's own change "
    "and not the kernels', so it has to be excluded first",
    "weights_mismatch": "an engine without a tensor's update is another policy, so it has to be excluded first",
    "updates_rounded_away": "what the engine's number format hides of an update; it tells how much, not how far the "
    "kernels are apart",
}
_RUNTIME: Final = "it keeps a slow kernel from being promoted for being close"
_OPERATOR: Final = "it finds the operator that changed; what its error does to the logits, later layers decide"

_OUTCOME: Final = (
    "response",
    "completion",
    "output",
    "generated",
    "generation",
    "finish",
    "reward",
    "correct",
    "gen_ai.response",
    "gen_ai.completion",
    "gen_ai.output",
    "gen_ai.usage.output",
    "gen_ai.usage.completion",
)
"""Beginnings of attribute names that are known only once a sequence is generated."""


def outcome_attributes(contract: Contract, slice: str) -> tuple[str, ...]:
    """Attributes of a slice whose names say that the sampled sequence decides them, such as `response_tokens`."""
    names: Iterable[str] = () if slice == ALL else contract.slices[slice].where
    return tuple(name for name in names if name.lower().startswith(_OUTCOME))


def purpose(promise: Promise, horizon: int | None) -> str:
    """What a clause that bounds no distance is for."""
    metric = promise.metric
    if metric == "top1_disagreement" and promise.kind == "mean":
        return _greedy(promise.limit, horizon)
    if metric == "ratio" and promise.kind == "fraction":
        return (
            f"it counts tokens that a cap at {promise.argument:g} truncates, at most {100 * promise.limit:.3g} % of "
            "them; a few huge ratios hide in a small share"
        )
    if metric.startswith("gen_ai."):
        return _RUNTIME
    if metric.startswith("operator_"):
        return _OPERATOR
    return _PURPOSE.get(metric, "it finds a change that no distance is made of")


def _greedy(limit: float, horizon: int | None) -> str:
    answer = "sampled text can agree or differ whatever the most likely tokens do"
    if horizon is None or limit <= 0.0:
        return f"{answer}; it is about greedy decoding"
    along = f"{answer}. Compared along greedy answers of {horizon:,} tokens"
    if horizon * limit < 1.0:
        return f"{along}, at most {100 * horizon * limit:.2g} % of them change"
    return f"{along}, one token in {math.floor(1.0 / limit)} may change, so all of them may"


def evidence(clause: Clause, promise: Promise, slice: str = ALL, tail: Clause | None = None) -> str:
    """What the statistic of a clause can show from samples, and what it leaves open.

    Args:
        clause: The clause.
        promise: What it says.
        slice: The slice whose limit counts.
        tail: The clause that limits how often what it observes is above its cap.
    """
    native = clause.quantity.per if clause.quantity is not None and not clause.by_sequence else Unit.TOKEN
    unit = "sequence" if native is Unit.SEQUENCE else "token"
    if promise.metric.startswith("gen_ai."):
        unit = "request"
    elif clause.quantity is not None and clause.quantity.per is Unit.BATCH:
        unit = "batch"
    elif clause.operator is not None:
        unit = "row"
    elif clause.by_sequence and promise.kind == "fraction":
        unit = "sequence"
    match promise.kind:
        case "mean":
            return _mean(clause, promise, unit) + _beyond_cap(clause, slice, tail)
        case "quantile":
            share = promise.tail[1]
            return f"a {clause.statistic_text}, which is no worst case: 1 {unit} in {1.0 / share:,.4g} may do anything"
        case "fraction" if promise.limit == 0.0:
            return f"a count: a PASS says that no {unit} was seen beyond {promise.argument:g}, and how many may be"
        case "fraction":
            return f"a share: what the {100 * promise.limit:.3g} % of {unit}s beyond {promise.argument:g} do is open"
    return f"a maximum: a {unit} that was not observed may be worse"


def note(promise: Promise, horizon: int | None) -> str:
    """What a reader may expect to follow from a promise and does not; empty where nothing does."""
    if (promise.metric, promise.kind) != ("kl_train_inference", "mean") or horizon is None or promise.limit < 0.0:
        return ""
    kl = horizon * promise.limit
    tv = min(1.0, tv_from_kl(kl).value)
    return (
        f"KL(P||Q) adds up along text that P samples, KL(Q||P) along text that Q samples. Measured on P's own text, "
        f"{horizon:,} tokens of it are {kl:.3g} nat and TV_seq <= {tv:.3g}; on Q's, only each token's TV adds up"
    )


def _beyond_cap(clause: Clause, slice: str, tail: Clause | None) -> str:
    """What a cap that the clause writes leaves open, and what the clause on the tail says of that."""
    if clause.cap is None or clause.quantity is None or clause.metric == "support_deficit":
        return ""
    said = f"; what is above {clause.cap:g} counts as {clause.cap:g}"
    if tail is None:
        return f"{said}, and how often it is above, no clause limits ({clause.tail_text})"
    share = tail.limit_for(slice)
    said = f"{said}, and how often it is above, {tail.id} limits to {100.0 * share:.3g} %"
    if clause.metric in DERIVED or not math.isfinite(clause.quantity.high):
        return said
    most = clause.limit_for(slice) + share * (clause.quantity.high - clause.cap)
    return f"{said}: of the value itself, the mean is at most {most:.3g}"


def _mean(clause: Clause, promise: Promise, unit: str) -> str:
    quantity = clause.quantity
    if promise.by_sequence:
        return "a mean over sequences of each one's mean: dependence within a sequence does no harm"
    if clause.opposite is not None:
        return f"means over every {unit} that bound it from either side, whatever the supports and the tail of W"
    if quantity is None or quantity.high < float("inf"):
        return f"a mean over every {unit}"
    if clause.cap is not None and clause.metric != "support_deficit":
        return f"a mean over every {unit} of min(value, {clause.cap:g})"
    if clause.metric == "support_deficit":
        taken = f"takes no ratio to be above {clause.cap:g}" if clause.cap else "needs a cap, a ratio that none exceeds"
        return f"a mean over every {unit}; a PASS holds for any tail of w, a FAIL {taken}"
    return f"a mean over every {unit}; a PASS shows that of min(value, {quantity.cap:g})"
