"""Rules from raw histograms on randomised streams, with resets and gaps.

The streams are what recorders accumulate. Prometheus' own engine runs the generated rules on them, through promtool,
and at every checked minute and for every clause, slice and window:

- the estimate is the float64 one of the observations between the first and the last export in the window;
- the rule's interval holds that estimate, and the interval of the evaluator's own functions for the same observations
  at the same error probabilities: that of Maurer and Pontil for means, the evaluator's very one for the rest. On the
  same observations rules and evaluator cannot contradict: both intervals hold the estimate;
- streams whose drift is steady get the verdict that they deserve.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from kc_otel.contract.clause import Clause
from kc_otel.contract.limits import factors
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import DERIVED
from kc_otel.contract.registry.own_metrics import prometheus_name
from kc_otel.contract.units import format_duration
from kc_otel.generate.prometheus.closed_forms import alphas
from kc_otel.generate.prometheus.standalone_rules import standalone_file
from kc_otel.judge.statistics import clause_interval
from kc_otel.judge.verdict import Status
from kc_otel.record.telemetry.accumulate import Accumulator
from kc_otel.stats import Histogram
from kc_otel.stats.histogram import Buckets

pytestmark = pytest.mark.slow

STEP = 15
STEPS = 80
EXPORTED = ("tv_token", "abs_log_ratio", "log_ratio", "ratio")
PAIR = {"kc.kernel.train": "0123456789ab", "kc.kernel.inference": "ba9876543210"}
DECIDED = ("tv", "distance", "share", "tail", "far")
"""Clauses whose limits are far enough from the steady slices' drift for rules to decide."""
SIGMAS = {"all": (0.02,), "broken": (0.6,), "moving": (0.01, 0.05, 0.12, 0.4)}
"""Deviations of the log ratio that a slice's traffic moves between."""


def contract_of_every_kind() -> Contract:
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
    content: dict[str, Histogram]
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

    def between(self, at: int, seconds: float) -> tuple[np.ndarray, dict[str, Histogram]]:
        """Log ratios observed after the first export of a window and up to its last, and their histograms."""
        inside = [export for export in self.exports if at - seconds < export.step * STEP <= at]
        ratios: list[np.ndarray] = []
        parts: dict[str, list[Histogram]] = {key: [] for key in EXPORTED}
        for before, after in itertools.pairwise(inside):
            same = before.run == after.run
            ratios += self.ratios[after.run][before.values if same else 0 : after.values]
            for key in EXPORTED:
                part = after.content[key].since(before.content[key]) if same else after.content[key]
                parts[key].append(part)
        whole = {key: Histogram.union(found) for key, found in parts.items() if found}
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


def bernstein(clause: Clause, contract: Contract, values: np.ndarray) -> tuple[float, float]:
    """The interval whose closed form the rules are, of what was observed: Maurer and Pontil 2009, Theorem 4.

    What lies beyond a clause's cap counts as the cap; where something lies beyond its quantity's, that side is open.
    """
    quantity, levels = clause.quantity, alphas(contract)
    scale, offset = of_metric(clause, contract)
    bound, n = clause.cap or quantity.cap, values.size
    low, high = max(quantity.low, -bound), min(quantity.high, bound)
    cut, upside_down = values.clip(low, high), scale < 0

    def side(sign: int, alpha: float, end: float) -> float:
        log, beyond = math.log(2.0 / alpha), clause.cap is None and (sign * values > sign * end).any()
        if n < 2 or beyond:
            return sign * math.inf
        half = math.sqrt(2.0 * cut.var(ddof=1) * log / n) + 7.0 * (high - low) * log / (3.0 * (n - 1))
        return sign * min(sign * end, sign * cut.mean() + half)

    sides = side(-1, levels[upside_down], low), side(1, levels[not upside_down], high)
    lower, upper = sorted(scale * end + offset for end in sides)
    return lower, upper


def of_metric(clause: Clause, contract: Contract) -> tuple[float, float]:
    return factors(clause.metric, contract.assumptions) if clause.metric in DERIVED else (1.0, 0.0)


def observed(clause: Clause, ratios: np.ndarray) -> np.ndarray:
    """The clause's quantity of tokens with these log ratios, float64."""
    w = np.exp(ratios)
    of = {"tv_token": np.maximum(1 - w, 0), "abs_log_ratio": abs(ratios), "log_ratio": ratios, "ratio": w}
    return of[clause.quantity.key]


def truth(clause: Clause, contract: Contract, values: np.ndarray) -> tuple[float, float]:
    """The statistic in float64, and how far a histogram's estimate may be from it."""
    statistic = clause.parsed_statistic
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
    scale, offset = of_metric(clause, contract)
    return scale * float(values.mean()) + offset, 1e-6 * scale**2 * float(abs(values).mean())


@pytest.fixture(scope="module")
def contract() -> Contract:
    return contract_of_every_kind()


def literal(value: Histogram) -> str:
    """A native histogram in promtool's notation; its buckets are numbered by their upper edge."""

    def side(name: str, buckets: Buckets) -> str:
        used = buckets.trimmed()
        if not used.counts.size:
            return ""
        return f" {name}offset:{used.offset + 1} {name}buckets:[{' '.join(map(str, used.counts.tolist()))}]"

    content = f"schema:{value.scale} count:{value.count} sum:{value.sum!r} z_bucket:{value.zero_count}"
    return f"{{{{{content}{side('', value.positive)}{side('n_', value.negative)}}}}}"


def series(contract: Contract, stream: Any) -> list[dict[str, str]]:
    labels = ", ".join(f'{key.replace(".", "_")}="{text}"' for key, text in attributes(contract, stream.slice).items())
    by_step = {export.step: export.content for export in stream.exports}
    found = []
    for key in EXPORTED:
        values = [literal(by_step[step][key]) if step in by_step else "_" for step in range(STEPS)]
        name = prometheus_name(next(clause.quantity for clause in contract.clauses if clause.quantity.key == key))
        found.append({"series": f"{name}{{{labels}}}", "values": " ".join(values)})
    return found


def holds(contract: Contract, clause: Clause, stream: Any, window: str, at: int) -> dict | None:
    """A check of one window's numbers; None where the window holds nothing."""
    seen = contract.observability
    ratios, content = stream.between(at, seen.window if window == "short" else seen.long_window)
    if not ratios.size:
        return None
    values, kind = observed(clause, ratios), clause.parsed_statistic.kind
    found, near = truth(clause, contract, values)
    if kind == "mean":
        lower, upper = bernstein(clause, contract, values)
    else:
        sample, levels = content[clause.quantity.key].binned(), alphas(contract)
        inner = clause_interval(
            clause, contract.assumptions, sample, alpha_lower=levels.lower, alpha_upper=levels.upper
        )
        lower, upper = inner.lower, inner.upper
        if kind != "max":
            lower, upper = min(lower, inner.estimate), max(upper, inner.estimate)
    cell = f'{{kc_clause="{clause.id}", kc_slice="{stream.slice}", kc_window="{window}"}}'
    slack = 1e-9 * (1 + abs(found))
    wanted = (
        f"kc_rule_window_lower{cell} <= bool {lower + slack:.17g}",
        f"kc_rule_window_upper{cell} >= bool {upper - slack:.17g}",
        f"kc_rule_window_lower{cell} <= bool {found + slack:.17g}",
        f"kc_rule_window_upper{cell} >= bool {found - slack:.17g}",
        f"abs(kc_rule_window_estimate{cell} - {found:.17g}) <= bool {near:.17g}",
        f"kc_rule_window_samples{cell} <= bool {ratios.size}",
        f"kc_rule_window_samples{cell} >= bool {ratios.size * 0.3:.17g}",
    )
    query = f"sum({' * '.join(f'({factor})' for factor in wanted)})"
    return {"expr": query, "eval_time": format_duration(at), "exp_samples": [{"labels": "{}", "value": 1}]}


@pytest.mark.parametrize("seed", [0, 1])
def test_rules_find_what_was_observed(promtool, contract: Contract, tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    played, end = play(rng), STEPS - 1
    checks: dict[str, list[dict]] = {stream.slice: [] for stream in played}
    for step in sorted({*rng.integers(4, end, 9).tolist(), end}):
        for clause, stream, window in itertools.product(contract.clauses, played, ("short", "long")):
            found = holds(contract, clause, stream, window, STEP * step)
            checks[stream.slice] += [found] if found else []
    assert all(len(found) > 90 for found in checks.values())
    for slice, status in (("all", Status.PASS), ("broken", Status.FAIL)):
        checks[slice] += [
            {
                "expr": f'max(kc_rule_status{{kc_clause="{id}", kc_slice="{slice}"}})',
                "eval_time": f"{STEP * end}s",
                "exp_samples": [{"labels": "{}", "value": status.code}],
            }
            for id in DECIDED
        ]
    rules = tmp_path / "rules.yaml"
    rules.write_text(standalone_file(contract).text)
    content = {
        "rule_files": [rules.name],
        "evaluation_interval": f"{STEP}s",
        # A slice each: promtool's queries may load 10,000 samples, and a histogram counts as hundreds.
        "tests": [
            {
                "name": stream.slice,
                "interval": f"{STEP}s",
                "input_series": series(contract, stream),
                "promql_expr_test": checks[stream.slice],
            }
            for stream in played
        ],
    }
    tests = tmp_path / "tests.yaml"
    tests.write_text(yaml.safe_dump(content, width=10**6))
    code, said = promtool("test", "rules", tests)
    assert code == 0, said[:6000]
