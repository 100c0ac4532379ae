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
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.prometheus_names import prometheus_name
from kc_otel.contract.units import format_duration
from kc_otel.generate.prometheus.standalone_rules import standalone_file
from kc_otel.judge.evaluator import Evaluator
from kc_otel.judge.verdict import Status, Verdict
from kc_otel.stats import ExponentialHistogram
from kc_otel.stats.histogram import Buckets
from tests.generate import streams
from tests.tools.verdicts import verdicts_of

pytestmark = pytest.mark.slow

BASE = 1_800_000_000


@pytest.fixture(scope="module")
def contract() -> Contract:
    return streams.contract()


def literal(value: ExponentialHistogram) -> str:
    """A native histogram in promtool's notation; its buckets are numbered by their upper edge."""

    def side(name: str, buckets: Buckets) -> str:
        used = buckets.trimmed()
        if not used.counts.size:
            return ""
        return f" {name}offset:{used.offset + 1} {name}buckets:[{' '.join(map(str, used.counts.tolist()))}]"

    content = f"schema:{value.scale} count:{value.count} sum:{value.sum!r} z_bucket:{value.zero_count}"
    return f"{{{{{content}{side('', value.positive)}{side('n_', value.negative)}}}}}"


def series(contract: Contract, stream: Any) -> list[dict[str, str]]:
    labels = ", ".join(
        f'{key.replace(".", "_")}="{text}"' for key, text in streams.attributes(contract, stream.slice).items()
    )
    by_step = {export.step: export.content for export in stream.exports}
    found = []
    for key in streams.EXPORTED:
        values = [literal(by_step[step][key]) if step in by_step else "_" for step in range(streams.STEPS)]
        name = prometheus_name(next(clause.quantity for clause in contract.clauses if clause.quantity.key == key))
        found.append({"series": f"{name}{{{labels}}}", "values": " ".join(values)})
    return found


def holds(contract: Contract, clause: Clause, stream: Any, window: str, at: int) -> dict | None:
    """A check of one window's numbers; None where the window holds nothing."""
    seen = contract.observability
    ratios, content = stream.between(at, seen.window if window == "short" else seen.long_window)
    if not ratios.size:
        return None
    inner = streams.interval_to_hold(clause, contract, content[clause.quantity.key].binned())
    found, near = streams.truth(clause, contract, ratios)
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
    query = f"sum({' * '.join(f'({factor})' for factor in wanted)})"
    return {"expr": query, "eval_time": format_duration(at), "exp_samples": [{"labels": "{}", "value": 1}]}


def never(found: Status, verdict: Verdict, at: int) -> dict:
    cell = f'{{kc_clause="{verdict.cell.clause}", kc_slice="{verdict.cell.slice}"}}'
    return {"expr": f"kc_rule_status{cell} == {found.code}", "eval_time": format_duration(at), "exp_samples": []}


def says(verdict: Verdict, at: int) -> dict:
    query = f'max(kc_rule_status{{kc_clause="{verdict.cell.clause}", kc_slice="{verdict.cell.slice}"}})'
    samples = [{"labels": "{}", "value": verdict.status.code}]
    return {"expr": query, "eval_time": format_duration(at), "exp_samples": samples}


@pytest.mark.parametrize("seed", [0, 1])
def test_rules_and_evaluator_agree(promtool, contract: Contract, tmp_path: Path, seed: int) -> None:
    """Estimates are those of float64, intervals are as proven, verdicts never contradict; steady slices are decided."""
    rng = np.random.default_rng(seed)
    played, step_seconds = streams.play(rng), streams.STEP
    evaluator, decided = Evaluator([contract]), 0
    checks: dict[str, list[dict]] = {stream.slice: [] for stream in played}
    times = sorted({*rng.integers(4, streams.STEPS, 9).tolist(), streams.STEPS - 1})
    for step in range(streams.STEPS):
        for request in streams.requests(contract, played, step, BASE):
            assert evaluator.ingest_metrics(request, float(BASE + step_seconds * step)).rejected == 0
        if step not in times:
            continue
        verdicts, at = verdicts_of(evaluator, float(BASE + step_seconds * step)), step_seconds * step
        for verdict in verdicts:
            (stream,) = (stream for stream in played if stream.slice == verdict.cell.slice)
            contrary = streams.forbidden(contract, stream, verdict, at)
            if contrary is not None:
                decided += 1
                checks[stream.slice].append(never(contrary, verdict, at))
        for clause, stream, window in itertools.product(contract.clauses, played, ("short", "long")):
            found = holds(contract, clause, stream, window, at)
            checks[stream.slice] += [found] if found else []
    for verdict in verdicts:
        steady = {"all": Status.PASS, "broken": Status.FAIL}.get(verdict.cell.slice)
        if steady is not None and verdict.cell.clause in streams.DECIDED:
            assert verdict.status is steady, verdict
            checks[verdict.cell.slice].append(says(verdict, at))
    assert decided > 60
    assert all(len(found) > 90 for found in checks.values())
    rules = tmp_path / "rules.yaml"
    rules.write_text(standalone_file(contract).text)
    content = {
        "rule_files": [rules.name],
        "evaluation_interval": f"{step_seconds}s",
        # A slice each: promtool's queries may load 10,000 samples, and a histogram counts as hundreds.
        "tests": [
            {
                "name": stream.slice,
                "interval": f"{step_seconds}s",
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
