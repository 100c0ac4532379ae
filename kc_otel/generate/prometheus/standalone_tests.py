"""Tests of a contract's standalone rules, made from its own limits, for `promtool test rules`.

Native histograms are fed in, so what is tested is everything between a recorder's export and an alert. Per clause, and
per slice with a limit of its own: with the statistic just inside the limit the cell passes and nothing fires; just
outside it fails at the second export, and each step for `fail` fires when its `for` is over and not one evaluation
sooner. The last test is a recorder that stops: NO_DATA after two heartbeats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.limits import range_of
from kc_otel.contract.model import Contract
from kc_otel.contract.prometheus_names import label, prometheus_name, selector
from kc_otel.contract.registry import DERIVED
from kc_otel.contract.slices import ALL
from kc_otel.contract.units import format_duration
from kc_otel.generate.alert_steps import AlertStep, static_labels
from kc_otel.generate.files import GeneratedFile, as_yaml
from kc_otel.generate.prometheus.histogram_queries import SCALE
from kc_otel.generate.prometheus.recording_rules import expressible
from kc_otel.generate.prometheus.rule_tests import step_seconds
from kc_otel.generate.prometheus.standalone_rules import standalone_path, standalone_steps
from kc_otel.judge.statistics import factors
from kc_otel.judge.verdict import Status

__all__ = ["standalone_test_file"]

_MANY: Final = 10**12
"""Observations per export: so many that the interval is narrower than the distance to the limit."""
_NEAR: Final = 0.01
"""Distance of a mean or a share to its limit, as a part of the limit."""
_BUCKETS: Final = 2
"""Distance of a quantile or a largest value to its limit, in buckets: one that it is in, one that is doubted."""
_KERNELS: Final = {"kc.kernel.train": "0123456789ab", "kc.kernel.inference": "ba9876543210"}


@dataclass(frozen=True, slots=True)
class _Scenario:
    """One slice of one clause, on one side of its limit."""

    clause: Clause
    slice: str
    outside: bool
    value: float
    share: float = 1.0

    @property
    def series(self) -> str:
        """Increments of a cumulative histogram: a share of the observations at the value, the others at zero."""
        here = round(self.share * _MANY)
        index = math.ceil(round(math.log2(abs(self.value)) * 2**SCALE, 9)) if self.value else 0
        side, sign = ("n_", -1) if self.value < 0 else ("", 1)
        content = f"schema:{SCALE} count:{_MANY} sum:{sign * abs(self.value) * here!r} z_bucket:{_MANY - here}"
        return f"{{{{{content} {side}offset:{index} {side}buckets:[{here}]}}}}"


def standalone_test_file(contract: Contract) -> GeneratedFile:
    """The tests of a contract's standalone rules; they name the rule file by its place beside them."""
    tests = [_test(contract, scenario) for clause in expressible(contract) for scenario in _scenarios(contract, clause)]
    content = {
        "rule_files": [f"../rules/{standalone_path(contract).name}"],
        "evaluation_interval": format_duration(step_seconds(contract)),
        "tests": [*tests, *_silence(contract)],
    }
    path = PurePosixPath("prometheus", "standalone", "tests", f"{contract.name}.yaml")
    note = f"Tests of the standalone rules of {contract.name}: promtool test rules FILE"
    return GeneratedFile(path, as_yaml(content, note))


def _scenarios(contract: Contract, clause: Clause) -> Iterator[_Scenario]:
    special = [name for name in contract.slices if clause.limit_for(name) != clause.limit_for(ALL)]
    for slice in (ALL, *special):
        for outside in (False, True):
            yield from _scenario(contract, clause, slice, outside)


def _scenario(contract: Contract, clause: Clause, slice: str, outside: bool) -> Iterator[_Scenario]:
    """The scenario, where the statistic has room on that side of the limit."""
    limit, statistic = clause.limit_for(slice), clause.parsed_statistic
    near = limit * (1.0 + _NEAR if outside else 1.0 - _NEAR)
    possible = range_of(clause, contract.assumptions)
    if limit <= 0 or possible is None or near * (1.0 + _NEAR) > possible.high:
        return
    match statistic.kind:
        case "fraction":
            if statistic.argument >= 0:
                yield _Scenario(clause, slice, outside, 2.0 * statistic.argument + 1.0, near)
        case "mean":
            scale, offset = (1.0, 0.0)
            if clause.metric in DERIVED:
                scale, offset = factors(clause.metric, contract.assumptions)
            yield _Scenario(clause, slice, outside, (near - offset) / scale)
        case _:
            steps = math.log2(limit) * 2**SCALE
            index = math.ceil(steps) + _BUCKETS if outside else math.floor(steps) - _BUCKETS
            yield _Scenario(clause, slice, outside, 2.0 ** ((index - 0.5) / 2**SCALE))


def _test(contract: Contract, scenario: _Scenario) -> dict[str, Any]:
    step, clause = step_seconds(contract), scenario.clause
    steps = [r for r in standalone_steps(contract) if r.clause is clause and r.status is Status.FAIL]
    waits = sorted({math.ceil(alert.step.after / step) * step for alert in steps})
    end = step * 4 + (max(waits, default=0) if scenario.outside else 0)
    status = Status.FAIL if scenario.outside else Status.PASS
    checks = [_check(_status(contract, clause), end, status.code, scenario.slice)]
    for alert in steps:
        firing = f"count({_firing(alert)})"
        fires = step + math.ceil(alert.step.after / step) * step
        if not scenario.outside:
            checks.append(_check(firing, end, None))
            continue
        checks.append(_check(firing, fires - step, None))
        checks.append(_check(firing, fires, 1))
    return {
        "name": f"{clause.id} on {scenario.slice}: just {'out' if scenario.outside else 'in'}side",
        "interval": format_duration(step),
        "input_series": [_input(contract, scenario, end // step)],
        "promql_expr_test": checks,
    }


def _silence(contract: Contract) -> Iterator[dict[str, Any]]:
    """A recorder that stops after four exports."""
    step, silence = step_seconds(contract), 2 * contract.observability.heartbeat
    every = (found for clause in expressible(contract) for found in _scenario(contract, clause, ALL, False))
    scenario = next(every, None)
    if scenario is None or silence + step > contract.observability.long_window:
        return
    last = 3 * step
    yield {
        "name": f"{scenario.clause.id}: the recorder stops",
        "interval": format_duration(step),
        "input_series": [_input(contract, scenario, 3)],
        "promql_expr_test": [
            _check(_status(contract, scenario.clause), last, Status.PASS.code, ALL),
            _check(
                _status(contract, scenario.clause),
                math.ceil((last + silence) / step) * step,
                Status.NO_DATA.code,
                ALL,
            ),
        ],
    }


def _input(contract: Contract, scenario: _Scenario, steps: int) -> dict[str, str]:
    clause = scenario.clause
    assert clause.quantity is not None
    labels = {"kc.contract": contract.name, "kc.slice": scenario.slice, **_KERNELS}
    if clause.operator is not None:
        labels["kc.operator"] = clause.operator
    written = ", ".join(f'{label(name)}="{value}"' for name, value in labels.items())
    return {
        "series": f"{prometheus_name(clause.quantity)}{{{written}}}",
        "values": f"{scenario.series}+{scenario.series}x{steps}",
    }


def _status(contract: Contract, clause: Clause) -> str:
    cells = selector("kc.rule.status", {"kc.contract": contract.name, "kc.clause": clause.id})
    return f"max by ({label('kc.slice')}) ({cells})"


def _firing(alert: AlertStep) -> str:
    matchers = {"alertname": alert.name, **static_labels(alert), "alertstate": "firing"}
    written = ", ".join(f'{name}="{value}"' for name, value in matchers.items())
    return f"ALERTS{{{written}}}"


def _check(query: str, at: float, value: float | None, slice: str = "") -> dict[str, Any]:
    labels = f'{{{label("kc.slice")}="{slice}"}}' if slice else "{}"
    samples = [] if value is None else [{"labels": labels, "value": value}]
    return {"expr": query, "eval_time": format_duration(at), "exp_samples": samples}
