"""Streams that recorders could have sent, and what they say: for tests of everything that judges histograms.

A stream is one slice's traffic. It restarts, goes silent, and changes its drift, all at random from a seed.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kc_otel.contract.clause import Clause
from kc_otel.contract.limits import factors
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import DERIVED
from kc_otel.generate.prometheus.closed_forms import alphas
from kc_otel.judge.statistics import clause_interval
from kc_otel.record.telemetry.accumulate import Accumulator
from kc_otel.stats import ExponentialHistogram, Interval, affine
from kc_otel.stats.histogram import union
from kc_otel.stats.interval import Binned
from kc_otel.stats.interval_rows import HistogramRows
from kc_otel.stats.means import Placement, capped_mean_interval, mean_interval

STEP = 15
STEPS = 80
EXPORTED = ("tv_token", "abs_log_ratio", "log_ratio", "ratio")
PAIR = {"kc.kernel.train": "0123456789ab", "kc.kernel.inference": "ba9876543210"}
DECIDED = ("tv", "distance", "share", "tail", "far")
"""Clauses whose limits are far enough from the steady slices' drift for rules to decide."""
SIGMAS = {"all": (0.02,), "broken": (0.6,), "moving": (0.01, 0.05, 0.12, 0.4)}
"""Deviations of the log ratio that a slice's traffic moves between."""


def contract() -> Contract:
    """A contract with a clause per kind of statistic, whose limits lie between the slices' drifts."""
    clauses = [
        {"id": "tv", "metric": "tv_token", "unit": "token", "limit": 0.03, "slices": {"moving": 0.04}},
        {"id": "distance", "metric": "abs_log_ratio", "unit": "token", "limit": 0.08, "cap": 1.0},
        {"id": "share", "metric": "clip_budget_share", "unit": "token", "limit": 0.4},
        {"id": "k1", "metric": "k1", "unit": "token", "limit": 0.01},
        {"id": "tail", "metric": "abs_log_ratio", "statistic": "p99", "limit": 0.3},
        {"id": "middle", "metric": "log_ratio", "statistic": "p50", "limit": 0.05},
        {"id": "far", "metric": "ratio", "statistic": "fraction > 1.3", "limit": "2%"},
        {"id": "largest", "metric": "abs_log_ratio", "statistic": "max", "limit": 0.9},
    ]
    return Contract.model_validate(
        {
            "apiVersion": "kernel-contract/v1",
            "kind": "KernelContract",
            "metadata": {"name": "agreement", "version": 1, "owner": "tests"},
            "kernels": {"train": {"engine": "torch"}, "inference": {"engine": "vllm"}},
            "assumptions": {"clip": 0.2},
            "slices": {name: {"where": {"task": name}} for name in ("broken", "moving")},
            "statistical": clauses,
            "observability": {"window": "3m", "long_window": "6m", "min_samples": 300, "heartbeat": "1m"},
            "escalation": [{"on": "fail", "do": ["notify"]}],
        }
    )


@dataclass
class Export:
    step: int
    run: int
    content: dict[str, ExponentialHistogram]
    values: int


@dataclass
class Stream:
    """A slice's traffic: it restarts, goes silent, and changes its drift at random."""

    slice: str
    rng: np.random.Generator
    exports: list[Export] = field(default_factory=list)
    ratios: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def play(self) -> None:
        run, silent, sigma, accumulator = -1, 0, self.rng.choice(SIGMAS[self.slice]), None
        for step in range(STEPS):
            # A restart is noticed by a count that goes down, so there has to be something that can.
            if accumulator is None or (len(self.ratios[run]) > 8 and self.rng.random() < 0.08):
                run, accumulator = run + 1, Accumulator([self.slice])
                self.ratios[run] = []
            if self.rng.random() < 0.05:
                sigma = self.rng.choice(SIGMAS[self.slice])
            if self.rng.random() < 0.9:
                inference = np.log(self.rng.uniform(0.05, 0.5, (8, 32)))
                inference = inference.astype(np.float32).astype(np.float64)
                normal = self.slice != "moving"
                noise = sigma * (self.rng.normal(size=(8, 32)) if normal else self.rng.standard_t(4, (8, 32)))
                train = -np.abs(inference + noise - sigma**2 / 2).astype(np.float32).astype(np.float64)
                assert accumulator.add_sampled(train, inference).tokens == 256
                self.ratios[run].append((train - inference).ravel())
            if silent or self.rng.random() < 0.04:
                silent = silent - 1 if silent else int(self.rng.integers(1, 6))
            elif self.ratios[run]:
                found = {key: value for (key, _), value in accumulator.snapshot().items() if key in EXPORTED}
                self.exports.append(Export(step, run, found, len(self.ratios[run])))

    def between(self, at: int, seconds: float) -> tuple[np.ndarray, dict[str, ExponentialHistogram]]:
        """Log ratios observed after the first export of a window and up to its last, and their histograms."""
        inside = [export for export in self.exports if at - seconds < export.step * STEP <= at]
        ratios: list[np.ndarray] = []
        parts: dict[str, list[ExponentialHistogram]] = {key: [] for key in EXPORTED}
        for before, after in itertools.pairwise(inside):
            same = before.run == after.run
            ratios += self.ratios[after.run][before.values if same else 0 : after.values]
            for key in EXPORTED:
                part = after.content[key].since(before.content[key]) if same else after.content[key]
                parts[key].append(part)
        whole = {key: union(found) for key, found in parts.items() if found}
        return np.concatenate(ratios) if ratios else np.zeros(0), whole


def play(rng: np.random.Generator) -> list[Stream]:
    """A stream per slice, each with a restart or more."""
    streams = [Stream(slice, rng) for slice in SIGMAS]
    for stream in streams:
        stream.play()
    assert all(len({export.run for export in stream.exports}) > 1 for stream in streams)
    return streams


def attributes(contract: Contract, slice: str) -> dict[str, str]:
    return {"kc.contract": contract.name, "kc.slice": slice, **PAIR}


def interval_to_hold(clause: Clause, contract: Contract, sample: Any) -> Interval:
    """The interval that a rule's has to contain, at the rule's own error probabilities."""
    levels = alphas(contract)
    given = {"alpha_lower": levels.lower, "alpha_upper": levels.upper}
    if clause.parsed_statistic.kind != "mean":
        return clause_interval(clause, contract.assumptions, sample, **given)
    quantity, scale, offset = clause.quantity, 1.0, 0.0
    if clause.metric in DERIVED:
        scale, offset = factors(clause.metric, contract.assumptions)
    if scale < 0:
        given = {"alpha_lower": levels.upper, "alpha_upper": levels.lower}
    if math.isfinite(quantity.high):
        return affine(bernstein_interval(sample, low=quantity.low, high=quantity.high, **given), scale, offset)
    cap = clause.cap or quantity.cap
    cut = clause.cap is not None
    sure = capped_mean_interval(sample, low=quantity.low, high=quantity.high, cap=cap, cut=cut, **given)
    low, high = max(quantity.low, -cap), min(quantity.high, cap)
    inside = sample.lower[0] >= low and sample.upper[-1] <= high
    return affine(bernstein_interval(sample, low=low, high=high, **given) if inside else sure, scale, offset)


def bernstein_interval(sample: Binned, *, low: float, high: float, alpha_lower: float, alpha_upper: float) -> Interval:
    """The interval whose closed form the rules are: Maurer and Pontil 2009, Theorem 4, for a quantity in [low, high].

    Each side is `mean +- (sqrt(2 V ln(2/alpha) / n) + 7 (high - low) ln(2/alpha) / (3 (n - 1)))`, V the sample
    variance; a side claims nothing where an observation lies outside of the range.
    """
    plain = replace(
        mean_interval(sample, low=low, high=high, alpha_lower=alpha_lower, alpha_upper=alpha_upper),
        method="empirical Bernstein",
    )
    if not plain.samples:
        return plain
    known = Placement.of(HistogramRows.of(sample), low, high)
    lower = max(low, known.least[0] - _deviation(known, high - low, alpha_lower))
    upper = min(high, known.most[0] + _deviation(known, high - low, alpha_upper))
    return replace(
        plain,
        lower=lower if math.isfinite(plain.lower) else plain.lower,
        upper=upper if math.isfinite(plain.upper) else plain.upper,
    )


def _deviation(known: Placement, width: float, alpha: float) -> float:
    n, log = known.rows.total[0], math.log(2.0 / alpha)
    return math.sqrt(2.0 * _variance(known) * log / n) + 7.0 * width * log / (3.0 * (n - 1)) if n > 1 else math.inf


def _variance(known: Placement) -> float:
    """Largest possible sample variance (denominator n - 1) of the cut sample.

    Of all worst placements it is the one that raises exactly the bins whose middle lies above the centre, or, where
    the sum does not allow that, the nearest one that it allows.
    """
    count, n = known.rows.count[0], known.rows.total[0]
    lower, upper, least, most = known.lower[0], known.upper[0], known.least[0], known.most[0]
    center = (least + most) / 2.0
    best = float(count @ lower + (count * (upper - lower))[lower + upper > 2.0 * center].sum()) / n
    raised = known.raised(np.array([min(max(best, least), most)]))[0]
    return float((count - raised) @ (lower - center) ** 2 + raised @ (upper - center) ** 2) / (n - 1)


def truth(clause: Clause, contract: Contract, ratios: np.ndarray) -> tuple[float, float]:
    """The statistic in float64, and how far a histogram's estimate may be from it."""
    w = np.exp(ratios)
    of = {"tv_token": np.maximum(1 - w, 0), "abs_log_ratio": abs(ratios), "log_ratio": ratios, "ratio": w}
    values, statistic = of[clause.quantity.key], clause.parsed_statistic
    match statistic.kind:
        case "quantile":
            # The bucket of an observation that is at most two ranks away.
            ordered, rank = np.sort(values), math.ceil(values.size * statistic.argument) - 1
            low, found, high = (float(ordered[rank + by]) for by in (-2, 0, 2))
            return found, high - low + 0.05 * max(abs(low), abs(high)) + 1e-9
        case "max":
            return float(values.max()), 0.05 * float(values.max())
        case "fraction":
            cut = (values > statistic.argument / 1.05) & (values <= statistic.argument * 1.05)
            return float((values > statistic.argument).mean()), float(cut.mean()) + 1e-9
    scale, offset = factors(clause.metric, contract.assumptions) if clause.metric in DERIVED else (1.0, 0.0)
    found = scale * float(values.mean()) + offset
    return found, 1e-6 * scale**2 * float(abs(values).mean())
