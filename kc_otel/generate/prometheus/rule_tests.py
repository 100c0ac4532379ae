"""Tests of a contract's rules, made from the contract, for `promtool test rules`.

One scenario per clause and verdict that a step waits for: every cell passes, then the clause gets that verdict on all
traffic for as long as its slowest step needs, then (where the policy says so) a verdict that holds, then PASS until
every alert has cleared. Each step is expected to be quiet just before its `for` is over and to fire when it is, to
fire just before its `clear_for` is over and to be quiet when it is; nothing else may fire.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.model import Clause, Contract
from kc_otel.contract.units import format_duration
from kc_otel.evaluator.verdict import Status
from kc_otel.generate.files import GeneratedFile, as_yaml
from kc_otel.generate.ladder import HELD_BY, Rung, rungs, static_labels
from kc_otel.generate.names import selector
from kc_otel.generate.prometheus.rules import BOUNDS, INTERVAL, Shown, annotation_texts, rules_path

__all__ = ["rule_test_file"]

_STEP: Final = int(INTERVAL)
_CALM: Final = 4 * _STEP
_CELL: Final = {"kc.slice": "all", "kc.kernel.train": "0123456789ab", "kc.kernel.inference": "ba9876543210"}
_BEYOND: Final = {"estimate": 1.5, "lower bound": 1.25, "upper bound": 1.75, "limit": 1.0}


@dataclass(frozen=True, slots=True)
class _Scenario:
    """A clause that leaves PASS and comes back. Times in seconds, multiples of the rules' interval."""

    clause: Clause
    status: Status
    climbing: tuple[Rung, ...]

    @property
    def breach(self) -> int:
        return _CALM

    @property
    def hold(self) -> int:
        return self.breach + max(_up(rung.step.after) for rung in self.climbing) + _CALM

    @property
    def over(self) -> int:
        return self.hold + (_CALM if HELD_BY[self.status] else 0)

    @property
    def end(self) -> int:
        return self.over + max(_up(rung.step.clear_for) for rung in self.climbing) + _CALM

    def fires(self, rung: Rung, at: int) -> bool:
        return self.breach + _up(rung.step.after) <= at < self.over + _up(rung.step.clear_for)

    def checks(self) -> list[int]:
        """Times at which a step's state changes, and the evaluation before each."""
        edges = {self.breach, self.hold, self.over}
        for rung in self.climbing:
            edges |= {self.breach + _up(rung.step.after), self.over + _up(rung.step.clear_for)}
        return sorted(edges | {edge - _STEP for edge in edges})


def rule_test_file(contract: Contract) -> GeneratedFile:
    """The tests of a contract's rules; they name the rule file by its place beside them."""
    content = {
        "rule_files": [f"../rules/{rules_path(contract).name}"],
        "evaluation_interval": format_duration(INTERVAL),
        "tests": [_test(contract, scenario) for scenario in _scenarios(contract)],
    }
    path = PurePosixPath("prometheus", "tests", f"{contract.name}.yaml")
    return GeneratedFile(path, as_yaml(content, f"Tests of the rules of {contract.name}: promtool test rules FILE"))


def _scenarios(contract: Contract) -> Iterator[_Scenario]:
    every = rungs(contract)
    for clause in contract.clauses:
        for status in Status:
            climbing = tuple(rung for rung in every if rung.clause is clause and rung.status is status)
            if climbing:
                yield _Scenario(clause, status, climbing)


def _test(contract: Contract, scenario: _Scenario) -> dict[str, Any]:
    names = sorted({rung.alert for rung in rungs(contract) if rung.clause is not None})
    expected = scenario.climbing[0].alert
    return {
        "name": f"{scenario.clause.id}: {scenario.status}",
        "interval": format_duration(INTERVAL),
        "input_series": list(_series(contract, scenario)),
        "alert_rule_test": [
            {
                "eval_time": format_duration(at),
                "alertname": name,
                "exp_alerts": [
                    _alert(scenario, rung)
                    for rung in scenario.climbing
                    if name == expected and scenario.fires(rung, at)
                ],
            }
            for at in scenario.checks()
            for name in names
            if name == expected or at == scenario.hold - _STEP
        ],
    }


def _series(contract: Contract, scenario: _Scenario) -> Iterator[dict[str, str]]:
    steps = scenario.end // _STEP
    passing = f"{Status.PASS.code}x{steps}"
    for clause in contract.clauses:
        cell = {"kc.contract": contract.name, "kc.clause": clause.id, **_CELL}
        moves = clause is scenario.clause
        yield {"series": selector("kc.verdict", cell), "values": _values(scenario) if moves else passing}
        if moves:
            for name in contract.slices:
                yield {"series": selector("kc.verdict", {**cell, "kc.slice": name}), "values": passing}
            for name, value in _bounds(clause).items():
                yield {"series": selector(BOUNDS[name], cell), "values": f"{value!r}x{steps}"}


def _values(scenario: _Scenario) -> str:
    held = HELD_BY[scenario.status]
    parts: Sequence[tuple[Status, int]] = (
        (Status.PASS, scenario.breach),
        (scenario.status, scenario.hold - scenario.breach),
        (held[0] if held else Status.PASS, scenario.over - scenario.hold),
        (Status.PASS, scenario.end - scenario.over),
    )
    # `0x3` is four samples: the value, and three more.
    return " ".join(f"{status.code}x{seconds // _STEP - 1}" for status, seconds in parts if seconds)


def _bounds(clause: Clause) -> dict[str, float]:
    limit = clause.limit_for("all")
    return {name: limit * factor if limit else factor - 1.0 for name, factor in _BEYOND.items()}


def _alert(scenario: _Scenario, rung: Rung) -> dict[str, Any]:
    cell = {name.replace(".", "_"): value for name, value in _CELL.items()}
    bounds = {name: f"{value:.4g}" for name, value in _bounds(scenario.clause).items()}
    return {
        "exp_labels": {
            **static_labels(rung),
            "slice": _CELL["kc.slice"],
            "kernel_train": _CELL["kc.kernel.train"],
            "kernel_inference": _CELL["kc.kernel.inference"],
            **cell,
        },
        "exp_annotations": annotation_texts(rung, Shown(slice="all", where="all traffic", bounds=bounds)),
    }


def _up(seconds: float) -> int:
    """The first evaluation at or after `seconds`."""
    return math.ceil(round(seconds / _STEP, 9)) * _STEP
