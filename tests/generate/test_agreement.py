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
from kc_otel.judge.verdict import Status
from kc_otel.stats import ExponentialHistogram
from kc_otel.stats.histogram import Buckets
from tests.generate import streams

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize("seed", [0, 1])
def test_rules_find_what_was_observed(promtool, contract: Contract, tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    played, end = streams.play(rng), streams.STEPS - 1
    checks: dict[str, list[dict]] = {stream.slice: [] for stream in played}
    for step in sorted({*rng.integers(4, end, 9).tolist(), end}):
        for clause, stream, window in itertools.product(contract.clauses, played, ("short", "long")):
            found = holds(contract, clause, stream, window, streams.STEP * step)
            checks[stream.slice] += [found] if found else []
    assert all(len(found) > 90 for found in checks.values())
    for slice, status in (("all", Status.PASS), ("broken", Status.FAIL)):
        checks[slice] += [
            {
                "expr": f'max(kc_rule_status{{kc_clause="{id}", kc_slice="{slice}"}})',
                "eval_time": f"{streams.STEP * end}s",
                "exp_samples": [{"labels": "{}", "value": status.code}],
            }
            for id in streams.DECIDED
        ]
    rules = tmp_path / "rules.yaml"
    rules.write_text(standalone_file(contract).text)
    content = {
        "rule_files": [rules.name],
        "evaluation_interval": f"{streams.STEP}s",
        # A slice each: promtool's queries may load 10,000 samples, and a histogram counts as hundreds.
        "tests": [
            {
                "name": stream.slice,
                "interval": f"{streams.STEP}s",
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
