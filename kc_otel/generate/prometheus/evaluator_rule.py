"""The rule that says within a minute that no evaluator lives, its test, and its resource for Kubernetes."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.prometheus_names import selector
from kc_otel.contract.units import format_duration
from kc_otel.generate import evaluator_alert
from kc_otel.generate.files import GeneratedFile, as_yaml
from kc_otel.generate.prometheus.prometheus_rule_resources import resource

__all__ = ["evaluator_files"]

_INTERVAL: Final = 5.0
"""Seconds between evaluations: three of other rules would be most of the minute."""
_FILE: Final = "_evaluator.yaml"
"""No contract's name begins so."""


def evaluator_files() -> tuple[GeneratedFile, ...]:
    """The rule, its test and its resource; they are the same for all contracts."""
    group = {"name": "kernel-contracts-evaluator", "interval": format_duration(_INTERVAL), "rules": [_rule()]}
    note = "Whether an evaluator lives; the same for every contract."
    contents = {
        "rules": ({"groups": [group]}, note),
        "tests": (_tests(), "Test of the rule that says whether an evaluator lives: promtool test rules FILE"),
        "kubernetes": (resource("kernel-contracts-evaluator", "kc-otel", [group]), f"{note} kubectl apply -f FILE"),
    }
    return tuple(
        GeneratedFile(PurePosixPath("prometheus", kind, _FILE), as_yaml(content, said))
        for kind, (content, said) in contents.items()
    )


def _rule() -> dict[str, Any]:
    return {
        "alert": evaluator_alert.NAME,
        "expr": f"absent({evaluator_alert.LIVING})",
        "for": format_duration(evaluator_alert.PATIENCE),
        "labels": evaluator_alert.LABELS,
        "annotations": evaluator_alert.ANNOTATIONS,
    }


def _tests() -> dict[str, Any]:
    """An evaluator that goes away and comes back, one that hangs, and two of which one goes on."""
    one, other = (selector("kc.evaluator.last_evaluation", None, f'instance="{name}"') for name in "ab")
    alert = {"exp_labels": evaluator_alert.LABELS, "exp_annotations": evaluator_alert.ANNOTATIONS}
    hung = evaluator_alert.FRESH + evaluator_alert.PATIENCE
    cases: dict[str, tuple[dict[str, str], dict[float, int]]] = {
        "it goes away at 2m and is back at 4m": (
            {one: "0+5x23 stale _x23 240+5x12"},
            {120: 0, 145: 0, 150: 1, 235: 1, 240: 0},
        ),
        "it hangs at 2m": ({one: "0+5x24 120x40"}, {120 + hung - 5: 0, 120 + hung: 1}),
        "one of two goes away at 2m": ({one: "0+5x23 stale", other: "0+5x60"}, {200: 0, 300: 0}),
        "there never was one": ({}, {25: 0, 30: 1}),
    }
    return {
        "rule_files": [f"../rules/{_FILE}"],
        "evaluation_interval": format_duration(_INTERVAL),
        "tests": [
            {
                "name": name,
                "interval": format_duration(_INTERVAL),
                "input_series": [{"series": series_, "values": values} for series_, values in series.items()],
                "alert_rule_test": [
                    {"eval_time": f"{at:g}s", "alertname": evaluator_alert.NAME, "exp_alerts": [alert] * firing}
                    for at, firing in expected.items()
                ],
            }
            for name, (series, expected) in cases.items()
        ],
    }
