"""Grafana-managed alerts in the form that Grafana provisions from files: one rule per clause and step of the policy.

What happens without data or with an error is chosen, not left to defaults. That no evaluator lives, or that Grafana
cannot ask, is one alert, of a rule of its own; every other rule then keeps its state: no page, and no all-clear.
Invalid input is counted only where there was some, so that a query that finds none is well.

An alert goes on while its verdict gives way to one that proves nothing (INCONCLUSIVE, NO_DATA), as in the evaluator;
but in Grafana such a verdict also counts towards `for`, so that a breach that becomes doubtful fires all the same.

Templates read `.Labels` and never `$labels`: Grafana takes what follows a `$` in a provisioned label for an environment
variable and puts nothing in its place.

Source: Grafana documentation, alerting file provisioning.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL
from kc_otel.contract.units import format_duration
from kc_otel.generate import evaluator_alert
from kc_otel.generate.alert_steps import CELL_LABELS, HELD_BY, AlertStep, alert_steps, literal, static_labels
from kc_otel.generate.files import GeneratedFile, as_yaml
from kc_otel.generate.links import (
    EVALUATED_ID,
    FOLDER,
    HEALTH_UID,
    INVALID_INPUT_ID,
    NOT_HOLDING_ID,
    OVERVIEW_UID,
    meaning_link,
    slice_link,
)
from kc_otel.generate.runbook import runbook
from kc_otel.judge.verdict import Status

__all__ = ["DATASOURCE_UID", "alert_rule", "alerting_file", "evaluator_alerting_file"]

DATASOURCE_UID: Final = "prometheus"
"""UID of the data source that the rules query, unless told otherwise."""

_INTERVAL: Final = "30s"
_OFTEN: Final = "10s"
"""The shortest interval that Grafana knows."""
_LOOKBACK: Final = 600
_SLICE, _TRAIN, _INFERENCE = CELL_LABELS


def alerting_file(contract: Contract, datasource_uid: str = DATASOURCE_UID) -> GeneratedFile:
    """The rule group of a contract, for Grafana's folder `provisioning/alerting`.

    Args:
        contract: The contract.
        datasource_uid: UID of the Prometheus data source that scrapes the evaluator.
    """
    rules = [alert_rule(alert, datasource_uid) for alert in alert_steps(contract)]
    return _file(contract.name, _INTERVAL, rules, f"Grafana-managed alerts of {contract.name}.")


def evaluator_alerting_file(datasource_uid: str = DATASOURCE_UID) -> GeneratedFile:
    """The rule that says within a minute that no evaluator lives, or that Grafana cannot ask; the same for all."""
    board, panel = HEALTH_UID, EVALUATED_ID
    rule = {
        "uid": "kc-evaluator-down",
        "title": evaluator_alert.NAME,
        "condition": "B",
        "data": [
            _query(evaluator_alert.AGE, datasource_uid),
            _threshold({"evaluator": {"type": "gt", "params": [evaluator_alert.FRESH]}}),
        ],
        "dashboardUid": board,
        "panelId": panel,
        "noDataState": "Alerting",
        "execErrState": "Alerting",
        "for": format_duration(evaluator_alert.PATIENCE),
        "annotations": {**evaluator_alert.ANNOTATIONS, "__dashboardUid__": board, "__panelId__": str(panel)},
        "labels": evaluator_alert.LABELS,
        "isPaused": False,
    }
    return _file("_evaluator", _OFTEN, [rule], "Whether an evaluator lives; the same for every contract.")


def _file(name: str, interval: str, rules: list[dict[str, Any]], note: str) -> GeneratedFile:
    group = {"orgId": 1, "name": name, "folder": FOLDER, "interval": interval, "rules": rules}
    content: dict[str, Any] = {"apiVersion": 1, "groups": [group] if rules else []}
    return GeneratedFile(PurePosixPath("grafana", "alerting", f"{name}.yaml"), as_yaml(content, note))


def alert_rule(alert: AlertStep, datasource_uid: str) -> dict[str, Any]:
    """One rule: query A takes the value now, expression B compares it, and B is the condition."""
    name = alert.contract.name
    board, panel = (HEALTH_UID, INVALID_INPUT_ID) if alert.clause is None else (OVERVIEW_UID, NOT_HOLDING_ID)
    return {
        "uid": f"kc-{alert.key}",
        "title": f"{name}: {alert.clause_id} {alert.step.on}, step {alert.number}",
        "condition": "B",
        "data": [_query(_value(alert), datasource_uid), _condition(alert)],
        "dashboardUid": board,
        "panelId": panel,
        "noDataState": "OK" if alert.status is None else "KeepLast",
        "execErrState": "KeepLast",
        "for": format_duration(alert.step.after),
        "keepFiringFor": format_duration(alert.step.clear_for),
        "annotations": {
            **_texts(alert),
            "__dashboardUid__": board,
            "__panelId__": str(panel),
        },
        "labels": {**static_labels(alert), **_cell_labels(alert)},
        "isPaused": False,
    }


def _value(alert: AlertStep) -> str:
    """The verdict of every cell, or the count; a clause without any verdict has no data, if an evaluator lives."""
    if alert.status is not Status.NO_DATA:
        return alert.value
    none_at_all = f"{Status.NO_DATA.code} * absent({alert.verdicts}) and on () ({evaluator_alert.LIVING})"
    return f"{alert.value} or {none_at_all}"


def _query(expression: str, datasource_uid: str) -> dict[str, Any]:
    return {
        "refId": "A",
        "relativeTimeRange": {"from": _LOOKBACK, "to": 0},
        "datasourceUid": datasource_uid,
        "model": {"refId": "A", "expr": expression, "instant": True, "range": False, "editorMode": "code"},
    }


def _condition(alert: AlertStep) -> dict[str, Any]:
    """A threshold between the codes of the verdicts: only the one that the step waits for lies inside.

    What is inside stays so while the verdict is one that does not clear an alert: those codes lie between that of the
    step's verdict and that of PASS, or above it, so that a second threshold, of recovery, tells them apart.
    """
    condition: dict[str, Any]
    if alert.status is None:
        condition = {"evaluator": {"type": "gt", "params": [0]}}
    else:
        code = float(alert.status.code)
        condition = {"evaluator": {"type": "within_range", "params": [code - 0.5, code + 0.5]}}
        if HELD_BY[alert.status]:
            codes = [alert.status.code, *(status.code for status in HELD_BY[alert.status])]
            around = [min(codes) - 0.5, max(codes) + 0.5]
            condition["unloadEvaluator"] = {"type": "outside_range", "params": around}
    return _threshold(condition)


def _threshold(condition: dict[str, Any]) -> dict[str, Any]:
    return {
        "refId": "B",
        "relativeTimeRange": {"from": 0, "to": 0},
        "datasourceUid": "__expr__",
        "model": {"refId": "B", "type": "threshold", "expression": "A", "conditions": [condition]},
    }


def _cell_labels(alert: AlertStep) -> dict[str, str]:
    if alert.clause is None:
        return {"slice": "all"}
    names = {"slice": _SLICE, "kernel_train": _TRAIN, "kernel_inference": _INFERENCE}
    return {name: f"{{{{ index .Labels `{label}` }}}}" for name, label in names.items()}


def _texts(alert: AlertStep) -> dict[str, str]:
    slice = f"{{{{ with index .Labels `{_SLICE}` }}}}{{{{ . }}}}{{{{ else }}}}"
    where = slice.replace("{{ . }}", "slice {{ . }}") + "every slice{{ end }}"
    said = {
        "fail": f"{alert.clause_id} is broken on {where}",
        "no-data": f"no data for {alert.clause_id} on {where}",
        "inconclusive": f"{alert.clause_id} cannot be decided on {where}",
        "invalid-input": "sequences fail the input checks",
    }[alert.step.on]
    texts = {
        "summary": f"{alert.contract.name}: {said}",
        "description": f"{literal(alert.promise)} {alert.actions}",
        "owner": literal(alert.contract.metadata.owner),
        "runbook": literal(runbook(alert)),
    }
    if alert.contract.metadata.runbook:
        texts["runbook_url"] = literal(alert.contract.metadata.runbook)
    if alert.clause is not None:
        texts["slice_dashboard"] = slice_link(alert.contract.name, alert.clause_id, f"{slice}{ALL}{{{{ end }}}}")
        texts["meaning"] = meaning_link(alert.contract.name, alert.clause_id)
    return texts
