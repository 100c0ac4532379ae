"""Tests of a contract's rules, made from the contract, for `promtool test rules`.

One scenario per clause and verdict that a step waits for: every cell passes, then the clause gets that verdict on all
traffic for as long as its slowest step needs, then the verdicts that keep it firing (if any), then PASS until
every alert has cleared. Each step is expected to be quiet just before its `for` is over and to fire when it is, to
fire just before its `clear_for` is over and to be quiet when it is; nothing else may fire.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.prometheus_names import label, selector
from kc_otel.contract.units import format_duration
from kc_otel.generate.alert_steps import HELD_BY, AlertStep, CellText, alert_steps, annotation_texts, static_labels
from kc_otel.generate.files import GeneratedFile, as_yaml
from kc_otel.generate.prometheus.alerting_rules import BOUNDS, INTERVAL_SECONDS, rules_path
from kc_otel.generate.state_alerts import EVALUATOR_DOWN, FRESH_SECONDS, STATE_ALERTS, StateAlert
from kc_otel.judge.verdict import Status

_CALM: Final = 4
_CELL: Final = {"kc.slice": "all", "kc.kernel.train": "0123456789ab", "kc.kernel.inference": "ba9876543210"}
_BEYOND: Final = {"estimate": 1.5, "lower bound": 1.25, "upper bound": 1.75, "limit": 1.0}


@dataclass(frozen=True, slots=True)
class _Scenario:
    """A clause that leaves PASS and comes back. Times in seconds, multiples of `step`, which is that of evaluations."""

    clause: Clause
    status: Status
    steps: tuple[AlertStep, ...]
    step: int

    @property
    def breach(self) -> int:
        return _CALM * self.step

    @property
    def hold(self) -> int:
        return self.breach + max(self._up(alert.step.after) for alert in self.steps) + _CALM * self.step

    @property
    def over(self) -> int:
        return self.hold + _CALM * self.step * len(HELD_BY[self.status])

    @property
    def end(self) -> int:
        return self.over + max(self._up(alert.step.clear_for) for alert in self.steps) + _CALM * self.step

    def fires(self, alert: AlertStep, at: int) -> bool:
        return self.breach + self._up(alert.step.after) <= at < self.over + self._up(alert.step.clear_for)

    def checks(self) -> list[int]:
        """Times at which a step's state changes, and the evaluation before each."""
        edges = {self.breach, self.hold, self.over}
        for alert in self.steps:
            edges |= {self.breach + self._up(alert.step.after), self.over + self._up(alert.step.clear_for)}
        return sorted(edges | {edge - self.step for edge in edges})

    def _up(self, seconds: float) -> int:
        """The first evaluation at or after `seconds`."""
        return math.ceil(round(seconds / self.step, 9)) * self.step


def rule_test_file(contract: Contract) -> GeneratedFile:
    """The tests of a contract's rules; they name the rule file by its place beside them."""
    content = {
        "rule_files": [f"../rules/{rules_path(contract).name}"],
        "evaluation_interval": format_duration(step_seconds(contract)),
        "tests": [_test(contract, scenario) for scenario in _scenarios(contract)],
    }
    path = PurePosixPath("prometheus", "tests", f"{contract.name}.yaml")
    return GeneratedFile(path, as_yaml(content, f"Tests of the rules of {contract.name}: promtool test rules FILE"))


def _scenarios(contract: Contract) -> Iterator[_Scenario]:
    every, step = alert_steps(contract), step_seconds(contract)
    for clause in contract.clauses:
        for status in Status:
            steps = tuple(alert for alert in every if alert.clause is clause and alert.status is status)
            if steps:
                yield _Scenario(clause, status, steps, step)


def _test(contract: Contract, scenario: _Scenario) -> dict[str, Any]:
    names = sorted({alert.name for alert in alert_steps(contract) if alert.clause is not None})
    expected = scenario.steps[0].name
    return {
        "name": f"{scenario.clause.id}: {scenario.status}",
        "interval": format_duration(scenario.step),
        "input_series": list(_series(contract, scenario)),
        "alert_rule_test": [
            {
                "eval_time": format_duration(at),
                "alertname": name,
                "exp_alerts": [
                    _alert(scenario, alert, at)
                    for alert in scenario.steps
                    if name == expected and scenario.fires(alert, at)
                ],
            }
            for at in scenario.checks()
            for name in names
            if name == expected or at == scenario.hold - scenario.step
        ],
    }


def _series(contract: Contract, scenario: _Scenario) -> Iterator[dict[str, str]]:
    steps = scenario.end // scenario.step
    passing = f"{Status.PASS.code}x{steps}"
    yield {"series": selector("kc.evaluator.last_evaluation", None), "values": f"0+{scenario.step}x{steps}"}
    for clause in contract.clauses:
        cell = {"kc.contract": contract.name, "kc.clause": clause.id, **_CELL}
        moves = clause is scenario.clause
        yield {"series": selector("kc.verdict", cell), "values": _values(scenario) if moves else passing}
        if moves:
            for name in contract.slices:
                yield {"series": selector("kc.verdict", {**cell, "kc.slice": name}), "values": passing}
            for name, value in _bounds(clause).items():
                yield {"series": selector(f"kc.bound.{BOUNDS[name]}", cell), "values": f"{value!r}x{steps}"}


def _values(scenario: _Scenario) -> str:
    parts = (
        (Status.PASS, scenario.breach),
        (scenario.status, scenario.hold - scenario.breach),
        *((held, _CALM * scenario.step) for held in HELD_BY[scenario.status]),
        (Status.PASS, scenario.end - scenario.over),
    )
    # `0x3` is four samples: the value, and three more.
    return " ".join(f"{status.code}x{seconds // scenario.step - 1}" for status, seconds in parts)


def _bounds(clause: Clause) -> dict[str, float]:
    limit = clause.limit_for("all")
    return {name: limit * factor if limit else factor - 1.0 for name, factor in _BEYOND.items()}


def _alert(scenario: _Scenario, alert: AlertStep, at: int) -> dict[str, Any]:
    cell = {name.replace(".", "_"): value for name, value in _CELL.items()}
    bounds = {name: f"{value:.4g}" for name, value in _bounds(scenario.clause).items()}
    pair = f" for {_CELL['kc.kernel.inference']} against {_CELL['kc.kernel.train']}"

    def either(now: str, held: str) -> str:
        return now if at < scenario.hold else held

    return {
        "exp_labels": {
            **static_labels(alert),
            "slice": _CELL["kc.slice"],
            "kernel_train": _CELL["kc.kernel.train"],
            "kernel_inference": _CELL["kc.kernel.inference"],
            **cell,
        },
        "exp_annotations": annotation_texts(alert, CellText("all", "all traffic", pair, either, bounds)),
    }


def step_seconds(contract: Contract) -> int:
    """Seconds between evaluations: a minute where every duration is whole minutes, else as the rules themselves."""
    durations = (seconds for step in contract.escalation for seconds in (step.after, step.clear_for))
    return 60 if all(seconds % 60 == 0 for seconds in durations) else int(INTERVAL_SECONDS)


def evaluator_test_file() -> GeneratedFile:
    """An evaluator that goes away and comes back, one that hangs, and two of which one goes on; and states that end."""
    first, other = (selector("kc.evaluator.last_evaluation", None, f'instance="{name}"') for name in "ab")
    alert, hung = _fired(EVALUATOR_DOWN, {}), FRESH_SECONDS + EVALUATOR_DOWN.after
    cases: dict[str, tuple[dict[str, str], dict[float, int]]] = {
        "it goes away at 2m and is back at 4m": (
            {first: "0+5x23 stale _x23 240+5x12"},
            {120: 0, 145: 0, 150: 1, 235: 1, 240: 0},
        ),
        "it hangs at 2m": ({first: "0+5x24 120x40"}, {120 + hung - 5: 0, 120 + hung: 1}),
        "one of two goes away at 2m": ({first: "0+5x23 stale", other: "0+5x60"}, {200: 0, 300: 0}),
        "there never was one": ({}, {25: 0, 30: 1}),
    }
    content = {
        "rule_files": ["../rules/_evaluator.yaml"],
        "evaluation_interval": "5s",
        "tests": [
            {
                "name": name,
                "interval": "5s",
                "input_series": [{"series": series_, "values": values} for series_, values in series.items()],
                "alert_rule_test": [
                    {"eval_time": f"{at:g}s", "alertname": EVALUATOR_DOWN.name, "exp_alerts": [alert] * firing}
                    for at, firing in expected.items()
                ],
            }
            for name, (series, expected) in cases.items()
        ]
        + [_roll_back(), *map(_state, STATE_ALERTS[2:])],
    }
    path = PurePosixPath("prometheus", "tests", "_evaluator.yaml")
    return GeneratedFile(path, as_yaml(content))


def _fired(alert: StateAlert, where: dict[str, str]) -> dict[str, Any]:
    return {
        "exp_labels": {**where, **alert.labels(where.__getitem__)},
        "exp_annotations": alert.texts(where.__getitem__),
    }


def _state(alert: StateAlert) -> dict[str, Any]:
    """A state that begins at 2m and ends at 4m, beside one of another kind that does not fire."""
    name, quiet, values = {
        "KernelContractUnproven": ("kc.incident", {"kc.incident.on": "no-data"}, "2x23 0x23 1x23"),
        "KernelContractPointsMissing": ("kc.evaluator.missing", {"kc.outcome": "late"}, "0x23 3x23 0x23"),
    }[alert.name]
    fires = {"kc.incident.on": "fail", "kc.outcome": "future"}
    pair = {"kc.contract": "policy-7b", "kc.kernel.train": "t1", "kc.kernel.inference": "v2"}
    other = next(iter(quiet))
    where = {label(attribute): value for attribute, value in {**pair, "kc.outcome": "future"}.items()}
    given = {label(attribute) for attribute in pair} | ({label("kc.outcome")} if "outcome" in alert.given else set())
    fired = _fired(alert, where)
    fired["exp_labels"] = {n: v for n, v in fired["exp_labels"].items() if n in given or not n.startswith("kc_")}
    still = values.split(" ")[0].replace("23", "69")
    return {
        "name": f"{alert.name} begins and ends",
        "interval": "5s",
        "input_series": [
            {"series": selector(name, {**pair, other: fires[other]}), "values": values},
            {"series": selector(name, {**pair, **quiet}), "values": still},
        ],
        "alert_rule_test": [
            {"eval_time": f"{at}s", "alertname": alert.name, "exp_alerts": [fired] * firing}
            for at, firing in {115: 0, 120: 1, 235: 1, 240: 0}.items()
        ],
    }


def _roll_back() -> dict[str, Any]:
    """One version is rolled back at 2m and serves from 4m to 6m; another was rolled back long before."""
    values = {"v2": "2x23 -1x23 -2x23 -1x2000", "v1": "-1x2072"}
    where = {"kc_contract": "policy-7b", "kc_kernel_inference": "v2"}
    warning, critical = (_fired(alert, where) for alert in STATE_ALERTS[:2])
    expected = {115: [], 120: [warning], 235: [warning], 240: [warning, critical], 360: [warning], 3720: []}
    return {
        "name": "a version is rolled back",
        "interval": "5s",
        "input_series": [
            {
                "series": selector("kc.promotion.stage", {"kc.contract": "policy-7b", "kc.kernel.inference": version}),
                "values": given,
            }
            for version, given in values.items()
        ],
        "alert_rule_test": [
            {"eval_time": f"{at}s", "alertname": STATE_ALERTS[0].name, "exp_alerts": alerts}
            for at, alerts in expected.items()
        ],
    }
