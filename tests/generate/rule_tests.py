"""Tests of a contract's rules, made from the contract, for `promtool test rules`.

One per clause and verdict that a step waits for: every cell passes, then the clause gets that verdict on all traffic
for as long as its slowest step needs, then the verdicts that keep it firing (if any), then PASS until every alert has
cleared. Each step is quiet just before its `for` is over and fires when it is, fires just before its `clear_for` is
over and is quiet when it is; nothing else fires.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.prometheus_names import label, selector
from kc_otel.generate.alert_texts import (
    EVALUATOR_DOWN,
    FRESH_SECONDS,
    HELD_BY,
    STATE_ALERTS,
    AlertStep,
    StateAlert,
    alert_steps,
    annotation_texts,
    static_labels,
)
from kc_otel.generate.prometheus.alerting_rules import BOUNDS
from kc_otel.judge.verdict import Status

STEP = 10
"""Seconds between evaluations: every duration of the contract is a multiple of it."""
CALM = 4 * STEP
CELL = {"kc.slice": "all", "kc.kernel.train": "0123456789ab", "kc.kernel.inference": "ba9876543210"}
BEYOND = {"estimate": 1.5, "lower bound": 1.25, "upper bound": 1.75, "limit": 1.0}


def rule_tests(contract: Contract) -> Iterator[dict[str, Any]]:
    every = alert_steps(contract)
    for clause in contract.clauses:
        for status in Status:
            if steps := [alert for alert in every if alert.clause is clause and alert.status is status]:
                yield _test(contract, clause, status, steps)


def _test(contract: Contract, clause: Clause, status: Status, steps: list[AlertStep]) -> dict[str, Any]:
    hold = round(CALM + max(alert.step.after for alert in steps) + CALM)
    over = hold + CALM * len(HELD_BY[status])
    end = round(over + max(alert.step.clear_for for alert in steps) + CALM)
    spans = [(alert, CALM + alert.step.after, over + alert.step.clear_for) for alert in steps]
    edges = {float(hold), *(edge for _, *span in spans for edge in span)}

    def fired(at: float) -> list[dict[str, Any]]:
        return [_alert(alert, clause, held=at >= hold) for alert, up, down in spans if up <= at < down]

    names = {alert.name for alert in alert_steps(contract) if alert.clause is not None}
    verdicts = [(Status.PASS, CALM), (status, hold - CALM), *((held, CALM) for held in HELD_BY[status])]
    verdicts.append((Status.PASS, end - over))
    moves = " ".join(f"{of.code}x{seconds // STEP - 1}" for of, seconds in verdicts)  # `0x3` is four samples
    return {
        "name": f"{clause.id}: {status}",
        "interval": f"{STEP}s",
        "input_series": _series(contract, clause, moves, end // STEP),
        "alert_rule_test": [
            *(
                {"eval_time": f"{at:g}s", "alertname": steps[0].name, "exp_alerts": fired(at)}
                for edge in sorted(edges)
                for at in (edge - STEP, edge)
            ),
            *({"eval_time": f"{hold - STEP}s", "alertname": name} for name in names - {steps[0].name}),
        ],
    }


def _series(contract: Contract, moving: Clause, verdicts: str, steps: int) -> list[dict[str, str]]:
    found = {selector("kc.evaluator.last_evaluation", {"kc.contract": contract.name}): f"0+{STEP}x{steps}"}
    for clause in contract.clauses:
        cell = {"kc.contract": contract.name, "kc.clause": clause.id, **CELL}
        found[selector("kc.verdict", cell)] = verdicts if clause is moving else f"{Status.PASS.code}x{steps}"
    cell = {"kc.contract": contract.name, "kc.clause": moving.id, **CELL}
    found |= {selector("kc.verdict", {**cell, "kc.slice": name}): f"0x{steps}" for name in contract.slices}
    found |= {selector(f"kc.bound.{BOUNDS[name]}", cell): f"{v!r}x{steps}" for name, v in _bounds(moving).items()}
    return [{"series": series, "values": values} for series, values in found.items()]


def _bounds(clause: Clause) -> dict[str, float]:
    return {name: clause.limit_for("all") * factor for name, factor in BEYOND.items()}


def _alert(alert: AlertStep, clause: Clause, *, held: bool) -> dict[str, Any]:
    slice, train, inference = CELL.values()
    bounds = {name: f"{value:.4g}" for name, value in _bounds(clause).items()}
    kernels = f" for {inference} against {train}"
    return {
        "exp_labels": {
            **{label(name): value for name, value in CELL.items()},
            **static_labels(alert),
            "slice": slice,
            "kernel_train": train,
            "kernel_inference": inference,
        },
        "exp_annotations": annotation_texts(
            alert, "all traffic", kernels, lambda *texts: texts[held], slice=slice, bounds=bounds
        ),
    }


def state_tests() -> Iterator[dict[str, Any]]:
    """An evaluator that goes away and comes back, one that hangs, and two of which one goes on; and states that end."""
    first, other = (selector("kc.evaluator.last_evaluation", None, f'instance="{name}"') for name in "ab")
    hung = FRESH_SECONDS + EVALUATOR_DOWN.after
    for name, series, expected in (
        ("it goes away at 2m and is back at 4m", {first: "0+5x23 stale _x23 240+5x12"},
         {120: 0, 145: 0, 150: 1, 235: 1, 240: 0}),
        ("it hangs at 2m", {first: "0+5x24 120x40"}, {120 + hung - 5: 0, 120 + hung: 1}),
        ("one of two goes away at 2m", {first: "0+5x23 stale", other: "0+5x60"}, {200: 0, 300: 0}),
        ("there never was one", {}, {25: 0, 30: 1}),
    ):  # fmt: skip
        yield _state_test(
            name, series, EVALUATOR_DOWN.name, {at: [(EVALUATOR_DOWN, {})] * n for at, n in expected.items()}
        )
    # A state begins at 2m and ends at 4m, beside one of another kind that does not fire.
    pair = {"kc.contract": "policy-7b", "kc.kernel.train": "t1", "kc.kernel.inference": "v2"}
    for alert, name, of, fires, quiet, values, still in (
        (STATE_ALERTS[2], "kc.incident", "kc.incident.on", "fail", "no-data", "2x23 0x23 1x23", "2x69"),
        (STATE_ALERTS[3], "kc.evaluator.missing", "kc.outcome", "future", "late", "0x23 3x23 0x23", "0x69"),
    ):
        series = {selector(name, {**pair, of: fires}): values, selector(name, {**pair, of: quiet}): still}
        where = pair | ({of: fires} if "outcome" in alert.given else {})
        times = {at: [(alert, where)] * firing for at, firing in {115: 0, 120: 1, 235: 1, 240: 0}.items()}
        yield _state_test(f"{alert.name} begins and ends", series, alert.name, times)
    # One version is rolled back at 2m and serves from 4m to 6m; another was rolled back long before.
    values = {"v2": "2x23 -1x23 -2x23 -1x2000", "v1": "-1x2072"}
    of = {"kc.contract": "policy-7b"}
    series = {
        selector("kc.promotion.stage", {**of, "kc.kernel.inference": name}): text for name, text in values.items()
    }
    since = {"v2": "0x23 120x23 120x23 120x2000", "v1": "-7200x2072"}
    series |= {selector("kc.promotion.since", {**of, "kc.kernel.inference": name}): t for name, t in since.items()}
    warning, critical = ((alert, {**of, "kc.kernel.inference": "v2"}) for alert in STATE_ALERTS[:2])
    times = {115: [], 120: [warning], 235: [warning], 240: [warning, critical], 360: [warning], 3720: []}
    yield _state_test("a version is rolled back", series, STATE_ALERTS[0].name, times)


def _state_test(
    name: str, series: Mapping[str, str], alert: str, times: Mapping[float, list[tuple[StateAlert, dict[str, str]]]]
) -> dict[str, Any]:
    lives = {selector("kc.evaluator.last_evaluation", {"kc.contract": "policy-7b"}): "0+5x2072"}
    series = {**series, **(lives if alert != EVALUATOR_DOWN.name else {})}
    return {
        "name": name,
        "interval": "5s",
        "input_series": [{"series": written, "values": values} for written, values in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{at:g}s", "alertname": alert, "exp_alerts": [_fired(*fired) for fired in firing]}
            for at, firing in times.items()
        ],
    }


def _fired(alert: StateAlert, where: Mapping[str, str]) -> dict[str, Any]:
    labels = {label(name): value for name, value in where.items()}
    return {
        "exp_labels": {**labels, **alert.labels(labels.__getitem__)},
        "exp_annotations": alert.texts(labels.__getitem__),
    }
