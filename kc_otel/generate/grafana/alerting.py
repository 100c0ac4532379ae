"""Grafana-managed alerts in the form that Grafana provisions from files: one rule per clause and step of the policy.

What happens without data or with an error is chosen, not left to defaults:

| rule waits for | the query finds no series         | the query fails                       |
| -------------- | --------------------------------- | ------------------------------------- |
| no-data        | fires: the evaluator is silent    | fires: nobody watches the contract    |
| anything else  | OK where a no-data step covers it | keeps its state: no page, no all-clear |
|                | else NoData, an alert of its own  |                                       |

An alert goes on while its verdict gives way to one that proves nothing (INCONCLUSIVE, NO_DATA), as in the evaluator;
but in Grafana such a verdict also counts towards `for`, so that a breach that becomes doubtful fires all the same.

Why: a breach must not be cleared by a query that failed, and nobody should be woken for a breach because a server
restarted; silence is the no-data steps' business, and wakes people on its own where a contract has no such step.

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
from kc_otel.generate.alert_steps import CELL_LABELS, HELD_BY, AlertStep, alert_steps, literal, static_labels
from kc_otel.generate.files import GeneratedFile, as_yaml
from kc_otel.generate.links import (
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

__all__ = ["DATASOURCE_UID", "alert_rule", "alerting_file"]

DATASOURCE_UID: Final = "prometheus"
"""UID of the data source that the rules query, unless told otherwise."""

_INTERVAL: Final = "30s"
_LOOKBACK: Final = 600
_SLICE, _TRAIN, _INFERENCE = CELL_LABELS


def alerting_file(contract: Contract, datasource_uid: str = DATASOURCE_UID) -> GeneratedFile:
    """The rule group of a contract, for Grafana's folder `provisioning/alerting`.

    Args:
        contract: The contract.
        datasource_uid: UID of the Prometheus data source that scrapes the evaluator.
    """
    group = {
        "orgId": 1,
        "name": contract.name,
        "folder": FOLDER,
        "interval": _INTERVAL,
        "rules": [alert_rule(alert, datasource_uid) for alert in alert_steps(contract)],
    }
    content: dict[str, Any] = {"apiVersion": 1, "groups": [group] if group["rules"] else []}
    path = PurePosixPath("grafana", "alerting", f"{contract.name}.yaml")
    return GeneratedFile(path, as_yaml(content, f"Grafana-managed alerts of {contract.name}."))


def alert_rule(alert: AlertStep, datasource_uid: str) -> dict[str, Any]:
    """One rule: query A takes the value now, expression B compares it, and B is the condition."""
    name = alert.contract.name
    board, panel = (HEALTH_UID, INVALID_INPUT_ID) if alert.clause is None else (OVERVIEW_UID, NOT_HOLDING_ID)
    no_data, error = _states(alert)
    return {
        "uid": f"kc-{alert.key}",
        "title": f"{name}: {alert.clause_id} {alert.step.on}, step {alert.number}",
        "condition": "B",
        "data": [_query(alert, datasource_uid), _condition(alert)],
        "dashboardUid": board,
        "panelId": panel,
        "noDataState": no_data,
        "execErrState": error,
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


def _query(alert: AlertStep, datasource_uid: str) -> dict[str, Any]:
    return {
        "refId": "A",
        "relativeTimeRange": {"from": _LOOKBACK, "to": 0},
        "datasourceUid": datasource_uid,
        "model": {"refId": "A", "expr": alert.value, "instant": True, "range": False, "editorMode": "code"},
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
    return {
        "refId": "B",
        "relativeTimeRange": {"from": 0, "to": 0},
        "datasourceUid": "__expr__",
        "model": {"refId": "B", "type": "threshold", "expression": "A", "conditions": [condition]},
    }


def _states(alert: AlertStep) -> tuple[str, str]:
    if alert.status is Status.NO_DATA:
        return "Alerting", "Alerting"
    covered = alert.status is None or any(
        other.clause is alert.clause and other.status is Status.NO_DATA for other in alert_steps(alert.contract)
    )
    return ("OK" if covered else "NoData"), "KeepLast"


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
