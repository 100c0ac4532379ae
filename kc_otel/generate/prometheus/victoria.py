"""Recording rules for VictoriaMetrics, which has a series per bucket where Prometheus has a native histogram.

vmalert writes what a rule finds, and a query sees it seconds later: rules cannot read each other's results at once. So
there are stages, each of which reads what the ones before recorded an interval ago, or two, so that all of it is of the
same evaluation: what either window holds; the statistic and its bounds; the verdict; the numbers of the window that
decided. The steps are those of `judging`. A verdict is two intervals old.

A window holds what was observed between the first and the last export in it. Buckets appear when something falls into
them: one that was not in its stream's first export in the window was empty then. Streams that restart under the same
`service.instance.id` within the window are left out, for the restart of a single bucket cannot be seen for sure;
recorders have an id for each process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.prometheus_names import metric, prometheus_name, selector
from kc_otel.contract.units import format_duration
from kc_otel.generate.files import GeneratedFile, as_yaml
from kc_otel.generate.prometheus.alerting_rules import INTERVAL, alert_rule
from kc_otel.generate.prometheus.histogram_queries import RANGE_CELL, Ranges
from kc_otel.generate.prometheus.judging import BOUNDS, CELL, WINDOWS, steps
from kc_otel.generate.prometheus.recording_rules import expressible, recorded, rule, seconds
from kc_otel.generate.prometheus.standalone_rules import RULES, notes, standalone_steps

__all__ = ["victoria_file", "victoria_groups"]

_WINDOW: Final = "kc.rule.window."
_HISTOGRAM: Final = f"{_WINDOW}histogram"
_SAMPLES: Final = f"{_WINDOW}samples"
_TOTAL: Final = f"{_WINDOW}total"
_STAGES: Final = (
    (_HISTOGRAM, _SAMPLES, _TOTAL),
    tuple(f"{_WINDOW}{name}" for name in ("estimate", "lower", "upper")),
    ("kc.rule.limit", f"{_WINDOW}status", "kc.rule.status"),
    tuple(f"kc.rule.{name}" for name in BOUNDS),
)
"""What each stage records; it reads the stages before it."""
_LOOKBACK: Final = INTERVAL * 2.0 / 3.0
"""Shorter than an interval, so that only one evaluation is seen."""


def victoria_file(contract: Contract) -> GeneratedFile:
    """The rule file of a contract for vmalert."""
    path = PurePosixPath("prometheus", "victoriametrics", "rules", f"{contract.name}.yaml")
    text = as_yaml({"groups": victoria_groups(contract)}, *notes(contract, native=False))
    return GeneratedFile(path, text)


def victoria_groups(contract: Contract) -> list[dict[str, Any]]:
    """A group for each clause, and one for the alerts.

    vmalert spreads groups over an interval, and a rule has to run a whole interval after those that it reads: the rules
    of a clause stay together. Clauses do not wait for each other.
    """
    groups = {
        clause.id: [
            one
            for place in range(len(_STAGES))
            for one in (_later(clause, contract, place) if place else _windows(clause, contract))
        ]
        for clause in expressible(contract)
    }
    prefix = f"kernel-contract-{contract.name}-victoriametrics"
    named = {f"{prefix}-{clause}": rules for clause, rules in groups.items()}
    named[prefix] = [alert_rule(alert, RULES) for alert in standalone_steps(contract)]
    interval = format_duration(INTERVAL)
    return [{"name": name, "interval": interval, "rules": rules} for name, rules in named.items() if rules]


def _windows(clause: Clause, contract: Contract) -> Iterator[dict[str, Any]]:
    """Observations by bucket, their number, and their sum, of either window."""
    assert clause.quantity is not None
    name, matchers = prometheus_name(clause.quantity), recorded(clause, contract)

    def over(function: str, part: str, span: str) -> str:
        return f"{function}_over_time({name}_{part}{{{matchers}}}[{span}])"

    for window in WINDOWS:
        span = format_duration(seconds(contract, window))
        restarted = f"resets({name}_count{{{matchers}}}[{span}]) > 0"
        # Both times are of the same export where the bucket was in use from the first one on.
        there = (
            f"{over('tfirst', 'bucket', span)} <= bool ignoring (vmrange) group_left () {over('tfirst', 'count', span)}"
        )
        grown = f"{over('last', 'bucket', span)} - {over('first', 'bucket', span)} * ({there})"
        ranges = f"sum by ({CELL}, vmrange) (\n  {grown}\n  unless ignoring (vmrange) {restarted}\n) > 0"
        yield rule(clause, contract, _HISTOGRAM, ranges, window)
        more = f"{over('count', 'count', span)} > 1"
        for part, found in (("count", _SAMPLES), ("sum", _TOTAL)):
            grown = f"{over('last', part, span)} - {over('first', part, span)}"
            whole = f"sum by ({CELL}) (\n  {grown}\n  and {more}\n  unless {restarted}\n)"
            yield rule(clause, contract, found, whole, window)


def _later(clause: Clause, contract: Contract, place: int) -> Iterator[dict[str, Any]]:
    """The rules of a stage after the first: each a query that reads earlier stages, with names for what it needs."""
    assert clause.quantity is not None
    raw = f"{prometheus_name(clause.quantity)}_count{{{recorded(clause, contract)}}}"
    reading = Ranges(metric(_HISTOGRAM), metric(_TOTAL), metric(_SAMPLES), "low_edge", "high_edge")
    found = dict(steps(clause, contract, _own, reading, raw))
    named = {
        metric(name): _read(clause, contract, name, place - earlier)
        for earlier in range(place)
        for name in _STAGES[earlier]
    }
    named |= {"low_edge": _edge("(.+)[.]{3}.+"), "high_edge": _edge(".+[.]{3}(.+)")}
    named |= {metric(name): found[name] for name in _STAGES[place]}
    for name in _STAGES[place]:
        yield rule(clause, contract, name, _with(named, metric(name)))


def _edge(pattern: str) -> str:
    text = f'label_replace({metric(_HISTOGRAM)}, "edge", "$1", "vmrange", "{pattern}")'
    return f'sum by ({RANGE_CELL}, vmrange) (label_value({text}, "edge"))'


def _read(clause: Clause, contract: Contract, name: str, intervals: int) -> str:
    """What a stage recorded some intervals before."""
    series = selector(name, {"kc.contract": contract.name, "kc.clause": clause.id})
    before = f"[{format_duration(_LOOKBACK)}] offset {format_duration(intervals * INTERVAL)}"
    labels = RANGE_CELL if name.startswith(_WINDOW) else CELL
    labels += ", vmrange" if name == _HISTOGRAM else ""
    return f"sum by ({labels}) (last_over_time({series}{before}))"


def _own(name: str, window: str = "", slice: str = "") -> str:
    """A step by its name in the query."""
    found = metric(name)
    for label, value in (("kc_window", window), ("kc_slice", slice)):
        if value:
            found = f'label_match({found}, "{label}", "{value.replace(".", "[.]")}")'
    return found


def _with(named: dict[str, str], result: str) -> str:
    """The query of one step, and those that it needs, each after what it needs itself."""
    wanted, kept = {result}, []
    for name in reversed(named):
        if name in wanted:
            kept.append(name)
            wanted |= set(re.findall(r"\w+", named[name])) & named.keys()
    lines = ",\n".join(f"  {name} = {_indented(named[name])}" for name in reversed(kept))
    return f"WITH (\n{lines}\n)\n{result}"


def _indented(expression: str) -> str:
    return expression.replace("\n", "\n    ")
