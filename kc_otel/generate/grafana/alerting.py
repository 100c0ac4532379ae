"""Grafana-managed alerts in the form that Grafana provisions from files: one rule per clause and step of the policy.

That no evaluator lives, or that Grafana cannot ask, is one alert of its own; every other rule then keeps its state. An
alert goes on while its verdict gives way to one that proves nothing, until its incident is closed, as in the evaluator;
but in Grafana such a verdict also counts towards `for`, so that a breach that becomes doubtful fires all the same.
Templates read `.Labels` and never `$labels`: Grafana takes what follows a `$` in a provisioned label for an environment
variable.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL
from kc_otel.contract.units import format_duration
from kc_otel.generate.alert_texts import (
    AGE,
    CELL_LABELS,
    EVALUATOR_DOWN,
    FRESH_SECONDS,
    LIVING,
    STATE_ALERTS,
    AlertStep,
    StateAlert,
    alert_steps,
    annotation_texts,
    cell_labels,
    evaluator_down,
    literal,
    living,
    pair_template,
)
from kc_otel.generate.files import (
    FOLDER,
    HEALTH_UID,
    INVALID_INPUT_ID,
    NOT_HOLDING_ID,
    NOWHERE,
    OVERVIEW_UID,
    GeneratedFile,
    Sites,
    as_yaml,
    slice_link,
)
from kc_otel.judge.verdict import FAULTS, Status

DATASOURCE_UID: Final = "prometheus"

_INTERVAL: Final = "30s"
_SHORTEST_INTERVAL: Final = "10s"
_LOOKBACK_SECONDS: Final = 600
_GRAFANA_URL: Final = '{{ reReplaceAll "/*$" "" externalURL }}'
"""Template of Grafana's own base URL, which it writes with a slash at its end."""
_SLICE: Final = CELL_LABELS[0]


def alerting_file(contract: Contract, datasource_uid: str = DATASOURCE_UID, sites: Sites = NOWHERE) -> GeneratedFile:
    """The rule group of a contract, for Grafana's folder `provisioning/alerting`."""
    rules = [alert_rule(alert, datasource_uid, sites) for alert in alert_steps(contract)]
    down = _of_state(evaluator_down(contract.name), datasource_uid, sites)
    groups = {contract.name: (_INTERVAL, rules), f"{contract.name}-evaluator": (_SHORTEST_INTERVAL, [down])}
    return _file(contract.name, groups if rules else {}, f"Grafana-managed alerts of {contract.name}.")


def evaluator_alerting_file(datasource_uid: str = DATASOURCE_UID, sites: Sites = NOWHERE) -> GeneratedFile:
    """Rules shared by all contracts: no evaluator lives (told within a minute), and those of STATE_ALERTS."""
    rules = [_of_state(alert, datasource_uid, sites) for alert in (EVALUATOR_DOWN, *STATE_ALERTS)]
    note = "Whether an evaluator lives, and what nobody judges; the same for every contract."
    return _file("_evaluator", {"_evaluator": (_SHORTEST_INTERVAL, rules)}, note)


def _of_state(alert: StateAlert, datasource_uid: str, sites: Sites) -> dict[str, Any]:
    down = alert is EVALUATOR_DOWN
    # The series of a state are what fires, whatever their value; without an evaluator there are none.
    lives = f"(vector(0) and on () ({LIVING}))"
    query, above = (AGE, FRESH_SECONDS) if down else (f"({alert.expression}) * 0 + 1 or {lives}", 0.0)
    return _rule(
        alert.uid,
        alert.name if down else f"{alert.name}, {alert.contract or alert.severity}",
        [_query(query, datasource_uid), _threshold(_above(above))],
        alert.panel,
        alert.labels(_of),
        {**alert.texts(_of), "dashboard": f"{_GRAFANA_URL}/d/{alert.panel[0]}", **sites.runbook(alert.name)},
        after=alert.after,
        no_data="Alerting" if down else "KeepLast",
        on_error="Alerting" if down else "KeepLast",
    )


def _file(name: str, groups: dict[str, tuple[str, list[dict[str, Any]]]], note: str) -> GeneratedFile:
    content: dict[str, Any] = {
        "apiVersion": 1,
        "groups": [
            {"orgId": 1, "name": group, "folder": FOLDER, "interval": interval, "rules": rules}
            for group, (interval, rules) in groups.items()
        ],
    }
    return GeneratedFile(PurePosixPath("grafana", "alerting", f"{name}.yaml"), as_yaml(content, note))


def alert_rule(alert: AlertStep, datasource_uid: str, sites: Sites = NOWHERE) -> dict[str, Any]:
    """The rule of an alert: its own verdict, or a count, against what the step waits for."""
    return _rule(
        f"kc-{alert.key}",
        f"{alert.contract.name}: {alert.clause_id} {alert.step.on}, step {alert.number}",
        [_query(_value(alert), datasource_uid), _condition(alert)],
        (HEALTH_UID, INVALID_INPUT_ID) if alert.clause is None else (OVERVIEW_UID, NOT_HOLDING_ID),
        cell_labels(alert, _of),
        _texts(alert, sites),
        after=alert.step.after,
        clear_for=alert.step.clear_for,
        no_data="OK" if alert.status is None else "KeepLast",
    )


def _rule(
    uid: str,
    title: str,
    data: list[dict[str, Any]],
    panel: tuple[str, int],
    labels: dict[str, str],
    annotations: dict[str, str],
    *,
    after: float = 0.0,
    clear_for: float | None = None,
    no_data: str,
    on_error: str = "KeepLast",
) -> dict[str, Any]:
    """One rule: query A takes the value now, expression B compares it, and B is the condition."""
    return {
        "uid": uid,
        "title": title,
        "condition": "B",
        "data": data,
        "dashboardUid": panel[0],
        "panelId": panel[1],
        "noDataState": no_data,
        "execErrState": on_error,
        "for": format_duration(after),
        **({} if clear_for is None else {"keepFiringFor": format_duration(clear_for)}),
        "annotations": {**annotations, "__dashboardUid__": panel[0], "__panelId__": str(panel[1])},
        "labels": labels,
        "isPaused": False,
    }


def _value(alert: AlertStep) -> str:
    """The verdict of every cell, or the count; a clause without any verdict has no data, if an evaluator lives."""
    if alert.status is None:
        return alert.value
    if alert.status is not Status.NO_DATA:
        # 0 clears an alert whose incident the evaluator has closed, as of a run that has ended.
        return f"({alert.value} == {alert.status.code}) or ({alert.value} and {alert.incident}) or 0 * {alert.value}"
    none_at_all = f"{Status.NO_DATA.code} * absent({alert.verdicts}) and on () ({living(alert.contract.name)})"
    excused = f"on ({', '.join(CELL_LABELS)}) {alert.excused}"
    # The silence of a slice whose requests are kept away, as ordered, is none.
    return f"({alert.value} unless {excused}) or {none_at_all}"


def _query(expression: str, datasource_uid: str) -> dict[str, Any]:
    return {
        "refId": "A",
        "relativeTimeRange": {"from": _LOOKBACK_SECONDS, "to": 0},
        "datasourceUid": datasource_uid,
        "model": {"refId": "A", "expr": expression, "instant": True, "range": False, "editorMode": "code"},
    }


def _condition(alert: AlertStep) -> dict[str, Any]:
    """A threshold that only the step's verdict meets; a second one, of recovery, keeps in those that clear no alert."""
    if alert.status is None:
        return _threshold(_above(0))
    code = float(alert.status.code)
    condition: dict[str, Any] = {"evaluator": {"type": "within_range", "params": [code - 0.5, code + 0.5]}}
    if held_by := FAULTS[alert.step.on].held_by:
        codes = [status.code for status in (alert.status, *held_by)]
        condition["unloadEvaluator"] = {"type": "outside_range", "params": [min(codes) - 0.5, max(codes) + 0.5]}
    return _threshold(condition)


def _above(value: float) -> dict[str, Any]:
    return {"evaluator": {"type": "gt", "params": [value]}}


def _threshold(condition: dict[str, Any]) -> dict[str, Any]:
    return {
        "refId": "B",
        "relativeTimeRange": {"from": 0, "to": 0},
        "datasourceUid": "__expr__",
        "model": {"refId": "B", "type": "threshold", "expression": "A", "conditions": [condition]},
    }


def _of(label: str) -> str:
    return f"{{{{ index .Labels `{label}` }}}}"


def _unless_contained(now: str, _held: str, _contained: str) -> str:
    return f"Unless the incident is contained: {now}"


def _texts(alert: AlertStep, sites: Sites) -> dict[str, str]:
    slice = f"{{{{ with index .Labels `{_SLICE}` }}}}"
    where = f"{slice}slice {{{{ . }}}}{{{{ else }}}}every slice{{{{ end }}}}"
    # Grafana's templates read no `$value`, which would tell a breach from an alert that is held, and ask no query.
    kernels, handbook = pair_template("index .Labels `{}`"), Sites(evaluator=sites.evaluator)
    texts = annotation_texts(alert, where, kernels, _unless_contained, sites=handbook, text=literal)
    if alert.clause is None:
        return texts
    path = slice_link(alert.contract.name, alert.clause_id, f"{slice}{{{{ . }}}}{{{{ else }}}}{ALL}{{{{ end }}}}")
    return {**texts, "slice_dashboard": f"{_GRAFANA_URL}{path}"}
