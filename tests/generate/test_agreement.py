"""Rules from raw histograms and the evaluator on the same randomised streams, with resets and gaps.

The streams are what recorders accumulate. Prometheus' own engine runs the generated rules on them, through promtool,
and at every checked minute and for every clause, slice and window:

- the estimate is the float64 one of the observations between the first and the last export in the window;
- the rule's interval holds that estimate, and the interval of the evaluator's own functions for the same observations
  at the same error probabilities: that of Maurer and Pontil for means, the evaluator's very one for the rest;
- the evaluator, which gets the same exports over OTLP, never says PASS where the rules say FAIL, nor the contrary, on
  streams whose drift is steady, and on the others wherever the observations that either has put the statistic on the
  same side of the limit. The two windows end up to a pane and an export apart, so that while drift changes each may be
  right about its own; on the same observations they cannot contradict, for both intervals hold the estimate.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import yaml
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from kc_otel.bounds import ExponentialHistogram, affine, bernstein_interval
from kc_otel.bounds.histogram import Buckets
from kc_otel.bounds.means import capped_mean_interval
from kc_otel.contract import Contract
from kc_otel.contract.registry import DERIVED
from kc_otel.contract.units import format_duration
from kc_otel.evaluator.evaluator import Evaluator
from kc_otel.evaluator.histograms import difference, union
from kc_otel.evaluator.statistics import clause_interval, factors
from kc_otel.evaluator.verdict import Status
from kc_otel.generate.names import prometheus_name
from kc_otel.generate.prometheus.closed_forms import SCALE, alphas
from kc_otel.generate.prometheus.standalone import standalone_file
from kc_otel.telemetry.accumulate import Accumulator
from kc_otel.telemetry.points import histogram, histogram_point

pytestmark = pytest.mark.slow

BASE = 1_800_000_000
STEP = 15
STEPS = 80
EXPORTED = ("tv_token", "abs_log_ratio", "log_ratio", "ratio")
PAIR = {"kc.kernel.train": "0123456789ab", "kc.kernel.inference": "ba9876543210"}
DECIDED = ("tv", "distance", "share", "tail", "far")
"""Clauses whose limits are far enough from the steady slices' drift for rules and evaluator to decide."""
SIGMAS = {"all": (0.02,), "broken": (0.6,), "moving": (0.01, 0.05, 0.12, 0.4)}
"""Deviations of the log ratio that a slice's traffic moves between."""


@pytest.fixture(scope="module")
def contract() -> Contract:
    """A clause per kind of statistic, whose limits lie between the slices' drifts."""
    clauses = [
        {"id": "tv", "metric": "tv_token", "limit": 0.03, "slices": {"moving": 0.04}},
        {"id": "distance", "metric": "abs_log_ratio", "limit": 0.08, "cap": 1.0},
        {"id": "share", "metric": "clip_budget_share", "limit": 0.4},
        {"id": "k1", "metric": "k1", "limit": 0.01},
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
            "kernels": {
                "train": {"engine": "torch"},
                "inference": {"engine": "vllm"},
            },
            "assumptions": {"clip": 0.2},
            "slices": {name: {"where": {"task": name}} for name in ("broken", "moving")},
            "statistical": clauses,
            "observability": {"window": "3m", "long_window": "6m", "min_samples": 300, "heartbeat": "1m"},
            "escalation": [{"on": "fail", "do": ["notify"]}],
        }
    )


@dataclass
class Export:
    """What one process exported of one slice at one time."""

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
    starts: dict[int, int] = field(default_factory=dict)

    def play(self) -> None:
        """Fill `exports`."""
        run, silent, sigma, accumulator = -1, 0, self.rng.choice(SIGMAS[self.slice]), None
        for step in range(STEPS):
            # A restart is noticed by a count that goes down, so there has to be something that can.
            if accumulator is None or (len(self.ratios[run]) > 8 and self.rng.random() < 0.08):
                run, accumulator = run + 1, Accumulator([self.slice], scale=SCALE)
                self.ratios[run], self.starts[run] = [], step
            if self.rng.random() < 0.05:
                sigma = self.rng.choice(SIGMAS[self.slice])
            if self.rng.random() < 0.9:
                inference = np.log(self.rng.uniform(0.05, 0.5, (8, 32)))
                inference = inference.astype(np.float32).astype(np.float64)
                normal = self.slice != "moving"
                noise = sigma * (self.rng.normal(size=(8, 32)) if normal else self.rng.standard_t(4, (8, 32)))
                train = np.minimum(inference + noise - sigma**2 / 2, 0.0).astype(np.float32).astype(np.float64)
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
                part = difference(after.content[key], before.content[key]) if same else after.content[key]
                parts[key].append(part)
        whole = {key: union(found) for key, found in parts.items() if found}
        return np.concatenate(ratios) if ratios else np.zeros(0), whole


def literal(value: ExponentialHistogram) -> str:
    """A native histogram in promtool's notation; its buckets are numbered by their upper edge."""

    def side(name: str, buckets: Buckets) -> str:
        used = buckets.trimmed()
        if not used.counts.size:
            return ""
        return f" {name}offset:{used.offset + 1} {name}buckets:[{' '.join(map(str, used.counts.tolist()))}]"

    content = f"schema:{value.scale} count:{value.count} sum:{value.sum!r} z_bucket:{value.zero_count}"
    return f"{{{{{content}{side('', value.positive)}{side('n_', value.negative)}}}}}"


def attributes(contract: Contract, slice: str) -> dict[str, str]:
    return {"kc.contract": contract.name, "kc.slice": slice, **PAIR}


def series(contract: Contract, stream: Stream) -> list[dict[str, str]]:
    """The stream as promtool's input."""
    labels = ", ".join(f'{key.replace(".", "_")}="{text}"' for key, text in attributes(contract, stream.slice).items())
    by_step = {export.step: export.content for export in stream.exports}
    found = []
    for key in EXPORTED:
        values = [literal(by_step[step][key]) if step in by_step else "_" for step in range(STEPS)]
        name = prometheus_name(next(clause.quantity for clause in contract.clauses if clause.quantity.key == key))
        found.append({"series": f"{name}{{{labels}}}", "values": " ".join(values)})
    return found


def requests(contract: Contract, streams: list[Stream], step: int):
    """The exports of one step as OTLP requests."""
    for stream in streams:
        for export in stream.exports:
            if export.step == step:
                start, now = ((BASE + STEP * at) * 10**9 for at in (stream.starts[export.run] - 1, step))
                metrics = [
                    histogram(key, [histogram_point(value, attributes(contract, stream.slice), start, now)])
                    for key, value in export.content.items()
                ]
                scope = ScopeMetrics(InstrumentationScope("kc_otel"), metrics, "")
                yield encode_metrics(MetricsData([ResourceMetrics(Resource({}), [scope], "")]))


def interval_to_hold(clause, contract: Contract, sample):
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
    sure = capped_mean_interval(sample, low=quantity.low, high=quantity.high, cap=cap, **given)
    low, high = max(quantity.low, -cap), min(quantity.high, cap)
    inside = sample.lower[0] >= low and sample.upper[-1] <= high
    return affine(bernstein_interval(sample, low=low, high=high, **given) if inside else sure, scale, offset)


def truth(clause, contract: Contract, ratios: np.ndarray) -> tuple[float, float]:
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


def holds(contract: Contract, clause, stream: Stream, window: str, at: int) -> dict | None:
    """A check of one window's numbers; None where the window holds nothing."""
    seen = contract.observability
    ratios, content = stream.between(at, seen.window if window == "short" else seen.long_window)
    if not ratios.size:
        return None
    inner = interval_to_hold(clause, contract, content[clause.quantity.key].binned())
    found, near = truth(clause, contract, ratios)
    cell = f'{{kc_clause="{clause.id}", kc_slice="{stream.slice}", kc_window="{window}"}}'
    lower, upper = inner.lower, inner.upper
    if clause.parsed_statistic.kind != "max":
        lower, upper = min(lower, inner.estimate), max(upper, inner.estimate)
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
    query = f"sum({' * '.join(f'({one})' for one in wanted)})"
    return {"expr": query, "eval_time": format_duration(at), "exp_samples": [{"labels": "{}", "value": 1}]}


def never(contract: Contract, stream: Stream, verdict, at: int) -> list[dict]:
    """A check that the rules do not say the contrary of the evaluator's verdict, where both look at the same drift."""
    contrary = {Status.PASS: Status.FAIL, Status.FAIL: Status.PASS}.get(verdict.status)
    if contrary is None:
        return []
    (clause,) = (clause for clause in contract.clauses if clause.id == verdict.cell.clause)
    steady = len(SIGMAS[stream.slice]) == 1 and clause.id != "largest"
    seen = [stream.between(at, span)[0] for span in (contract.observability.window, contract.observability.long_window)]
    sides = {truth(clause, contract, ratios)[0] > verdict.limit for ratios in seen if ratios.size}
    if not steady and sides != {verdict.estimate > verdict.limit}:
        return []
    cell = f'{{kc_clause="{clause.id}", kc_slice="{stream.slice}"}}'
    check = {"eval_time": format_duration(at), "exp_samples": []}
    return [{"expr": f"kc_rule_status{cell} == {contrary.code}", **check}]


def says(verdict, at: int) -> dict:
    """A check that the rules say what the evaluator says."""
    query = f'max(kc_rule_status{{kc_clause="{verdict.cell.clause}", kc_slice="{verdict.cell.slice}"}})'
    samples = [{"labels": "{}", "value": verdict.status.code}]
    return {"expr": query, "eval_time": format_duration(at), "exp_samples": samples}


@pytest.mark.parametrize("seed", [0, 1])
def test_rules_and_evaluator_agree(promtool, contract: Contract, tmp_path: Path, seed: int) -> None:
    """Estimates are those of float64, intervals are as proven, verdicts never contradict; steady slices are decided."""
    rng = np.random.default_rng(seed)
    streams = [Stream(slice, rng) for slice in SIGMAS]
    for stream in streams:
        stream.play()
    assert all(len({export.run for export in stream.exports}) > 1 for stream in streams)
    evaluator, decided = Evaluator([contract]), 0
    checks: dict[str, list[dict]] = {stream.slice: [] for stream in streams}
    times = sorted({*rng.integers(4, STEPS, 9).tolist(), STEPS - 1})
    for step in range(STEPS):
        for request in requests(contract, streams, step):
            assert evaluator.ingest_metrics(request, float(BASE + STEP * step)).rejected == 0
        if step not in times:
            continue
        verdicts, at = evaluator.evaluate(float(BASE + STEP * step)), STEP * step
        for verdict in verdicts:
            (stream,) = (stream for stream in streams if stream.slice == verdict.cell.slice)
            found = never(contract, stream, verdict, at)
            decided += len(found)
            checks[verdict.cell.slice] += found
        for clause, stream, window in itertools.product(contract.clauses, streams, ("short", "long")):
            found = holds(contract, clause, stream, window, at)
            checks[stream.slice] += [found] if found else []
    for verdict in verdicts:
        steady = {"all": Status.PASS, "broken": Status.FAIL}.get(verdict.cell.slice)
        if steady is not None and verdict.cell.clause in DECIDED:
            assert verdict.status is steady, verdict
            checks[verdict.cell.slice].append(says(verdict, at))
    assert decided > 60
    assert all(len(found) > 90 for found in checks.values())
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
            for stream in streams
        ],
    }
    tests = tmp_path / "tests.yaml"
    tests.write_text(yaml.safe_dump(content, width=10**6))
    code, said = promtool("test", "rules", tests)
    assert code == 0, said[:6000]
