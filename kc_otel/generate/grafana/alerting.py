"""Grafana-managed alerts in the form that Grafana provisions from files: one rule per clause and step of the policy.

The behaviour without data or after an error is set explicitly, not left to defaults. That no evaluator lives, or that
Grafana cannot ask, is one alert, of a rule of its own; every other rule then keeps its state: no page, and no
all-clear. Invalid input is counted only where there was some, so that a query that finds none is well.

An alert goes on while its verdict gives way to one that proves nothing (INCONCLUSIVE, NO_DATA, INVALID_INPUT), as in
the evaluator; but in Grafana such a verdict also counts towards `for`, so that a breach that becomes doubtful fires all
the same.

Templates read `.Labels` and never `$labels`: Grafana takes what follows a `$` in a provisioned label for an environment
variable and puts nothing in its place.

Source: Grafana documentation, alerting file provisioning.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL
from kc_otel.contract.units import format_duration
from kc_otel.generate import evaluator_alert
from kc_otel.generate.alert_steps import (
    CELL_LABELS,
    HELD_BY,
    AlertStep,
    alert_steps,
    literal,
    pair_template,
    static_labels,
)
from kc_otel.generate.files import GeneratedFile, as_yaml
from kc_otel.generate.links import (
    EVALUATED_ID,
    FOLDER,
    HEALTH_UID,
    INVALID_INPUT_ID,
    NOT_HOLDING_ID,
    NOWHERE,
    OVERVIEW_UID,
    Sites,
    slice_link,
)
from kc_otel.generate.state_alerts import STATE_ALERTS, StateAlert
from kc_otel.judge.verdict import Status

DATASOURCE_UID: Final = "prometheus"
"""UID of the data source that the rules query, unless told otherwise."""

_INTERVAL: Final = "30s"
_SHORTEST_INTERVAL: Final = "10s"
"""The shortest interval that Grafana knows."""
_LOOKBACK: Final = 600
_GRAFANA: Final = '{{ reReplaceAll "/*$" "" externalURL }}'
"""Template of Grafana's own base URL, which it writes with a slash at its end."""
_SLICE, _TRAIN, _INFERENCE = CELL_LABELS


def alerting_file(contract: Contract, datasource_uid: str = DATASOURCE_UID, sites: Sites = NOWHERE) -> GeneratedFile:
    """The rule group of a contract, for Grafana's folder `provisioning/alerting`.

    Args:
        contract: The contract.
        datasource_uid: UID of the Prometheus data source that scrapes the evaluator.
        sites: Where links to the handbook lead.
    """
    rules = [alert_rule(alert, datasource_uid, sites) for alert in alert_steps(contract)]
    return _file(contract.name, _INTERVAL, rules, f"Grafana-managed alerts of {contract.name}.")


def evaluator_alerting_file(datasource_uid: str = DATASOURCE_UID, sites: Sites = NOWHERE) -> GeneratedFile:
    """Rules shared by all contracts: no evaluator lives, Grafana cannot query, and those of STATE_ALERTS.

    The first is said within a minute.
    """
    board, panel = HEALTH_UID, EVALUATED_ID
    rule = {
        "uid": "kc-evaluator-down",
        "title": evaluator_alert.NAME,
        "condition": "B",
        "data": [
            _query(evaluator_alert.AGE, datasource_uid),
            _threshold(_above(evaluator_alert.FRESH)),
        ],
        "dashboardUid": board,
        "panelId": panel,
        "noDataState": "Alerting",
        "execErrState": "Alerting",
        "for": format_duration(evaluator_alert.PENDING_SECONDS),
        "annotations": {
            **evaluator_alert.ANNOTATIONS,
            "dashboard": f"{_GRAFANA}/d/{board}",
            **sites.runbook(evaluator_alert.NAME),
            "__dashboardUid__": board,
            "__panelId__": str(panel),
        },
        "labels": evaluator_alert.LABELS,
        "isPaused": False,
    }
    states = [_of_state(alert, datasource_uid, sites) for alert in STATE_ALERTS]
    note = "Whether an evaluator lives, and what nobody judges; the same for every contract."
    return _file("_evaluator", _SHORTEST_INTERVAL, [rule, *states], note)


def _of_state(alert: StateAlert, datasource_uid: str, sites: Sites) -> dict[str, Any]:
    board, panel = alert.panel
    return {
        "uid": alert.uid,
        "title": f"{alert.name}, {alert.severity}",
        "condition": "B",
        # Its series are what fires, whatever their value.
        "data": [_query(f"({alert.expression}) * 0 + 1", datasource_uid), _threshold(_above(0.0))],
        "dashboardUid": board,
        "panelId": panel,
        "noDataState": "OK",
        "execErrState": "KeepLast",
        "for": format_duration(0.0),
        "annotations": {
            **alert.texts(_of),
            "dashboard": f"{_GRAFANA}/d/{board}",
            **sites.runbook(alert.name),
            "__dashboardUid__": board,
            "__panelId__": str(panel),
        },
        "labels": alert.labels(_of),
        "isPaused": False,
    }


def _file(name: str, interval: str, rules: list[dict[str, Any]], note: str) -> GeneratedFile:
    group = {"orgId": 1, "name": name, "folder": FOLDER, "interval": interval, "rules": rules}
    content: dict[str, Any] = {"apiVersion": 1, "groups": [group] if rules else []}
    return GeneratedFile(PurePosixPath("grafana", "alerting", f"{name}.yaml"), as_yaml(content, note))


def alert_rule(alert: AlertStep, datasource_uid: str, sites: Sites = NOWHERE) -> dict[str, Any]:
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
            **_texts(alert, sites),
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
        condition = _above(0)
    else:
        code = float(alert.status.code)
        condition = {"evaluator": {"type": "within_range", "params": [code - 0.5, code + 0.5]}}
        if HELD_BY[alert.status]:
            codes = [alert.status.code, *(status.code for status in HELD_BY[alert.status])]
            around = [min(codes) - 0.5, max(codes) + 0.5]
            condition["unloadEvaluator"] = {"type": "outside_range", "params": around}
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


def _cell_labels(alert: AlertStep) -> dict[str, str]:
    names = {"slice": _SLICE, "kernel_train": _TRAIN, "kernel_inference": _INFERENCE}
    found = {name: _of(label) for name, label in names.items()}
    return found if alert.clause is not None else {**found, "slice": ALL}


def _of(label: str) -> str:
    return f"{{{{ index .Labels `{label}` }}}}"


def _texts(alert: AlertStep, sites: Sites) -> dict[str, str]:
    slice = f"{{{{ with index .Labels `{_SLICE}` }}}}{{{{ . }}}}{{{{ else }}}}"
    where = slice.replace("{{ . }}", "slice {{ . }}") + "every slice{{ end }}"
    texts = {
        "summary": f"{alert.contract.name}: {alert.said(where)}{pair_template('index .Labels `{}`')}",
        "description": f"{literal(alert.promise)} {alert.actions}",
        "owner": literal(alert.contract.metadata.owner),
        "runbook": literal(runbook(alert)),
        **sites.runbook(alert.name, literal(alert.contract.metadata.runbook or "")),
    }
    if alert.clause is not None:
        path = slice_link(alert.contract.name, alert.clause_id, f"{slice}{ALL}{{{{ end }}}}")
        texts["slice_dashboard"] = f"{_GRAFANA}{path}"
    return texts


FIRST_STEPS: Final = {
    "fail": (
        "Check invalid input and weight lag first: mismatched sampling or stale weights explain all other drift.",
        "Open the Slice dashboard: is the whole band above the limit on every slice, or on one?",
        "Look at the marks: did a kernel version or a weight sync come just before? If so, roll it back.",
        "Open the worst examples on the Slice dashboard: which tokens, at which position, of which requests?",
    ),
    "no-data": (
        "This is no all-clear: nothing reports. Check whether the traffic itself stopped.",
        "Open the Health dashboard: do points still arrive? Do recorders drop data or fail to export?",
        "Check whether a roll-out replaced the pair and the new version does not report yet.",
    ),
    "inconclusive": (
        "The limit lies inside the confidence interval: the samples show neither a breach nor a pass.",
        "Wait for more samples, or raise observability.sampling. Drift close to its limit stays undecided.",
    ),
    "invalid-input": (
        "The affected sequences are not measured. Open the Health dashboard for the reason.",
        "Token ids differ or are shifted: the sides tokenise or align differently. Not finite: a kernel overflows.",
        "Fix the input before you read any drift.",
    ),
}
"""First steps, by the condition of a policy step."""
_ORDERS: Final = {
    "notify": "write an event and a log record",
    "sample-more": "ask recorders to measure more batches",
    "locate": "ask machines that follow to name the operator, and attach their answer to the incident",
    "hold-promotion": "hold promotions of this kernel version",
    "quarantine-rollouts": "ask trainers to exclude rollouts of the slice",
    "resync-weights": "ask trainers to send their weights to the inference kernel again",
    "halt": "ask trainers to halt until a person resumes them",
    "route": "route the slice to the training kernel until a person resumes it (`kc-otel route resume`)",
    "webhook": "send a webhook",
}


def runbook(alert: AlertStep) -> str:
    """Numbered steps for the person who is told that an alert fires."""
    return "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(_sentences(alert), start=1))


def _sentences(alert: AlertStep) -> Iterator[str]:
    ordered = "; ".join(_ORDERS[kind] for kind in dict.fromkeys(action.kind for action in alert.step.do))
    yield f"Step {alert.number} of the policy orders: {ordered}. `kc-otel status` says what of it was done."
    yield from FIRST_STEPS[alert.step.on]
    if alert.step.clear_for:
        yield f"It resolves by itself once the verdict has been gone for {format_duration(alert.step.clear_for)}."
    if alert.contract.metadata.runbook:
        yield f"The owner's own runbook: {alert.contract.metadata.runbook}"
    yield f"Owner: {alert.contract.metadata.owner}."
