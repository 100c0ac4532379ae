"""The body of a webhook: Alertmanager's version 4, and one `kernelContract` object with what the contract adds.

A receiver that knows Alertmanager reads `alerts` and needs nothing else. A receiver that acts on kernels reads
`kernelContract.cells`, which says of each alert, in the same order, which clause broke on which slice for which pair of
kernels, and by how much. Source: Prometheus documentation, `<webhook_config>`; Alertmanager's `template.Data`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.units import format_duration
from kc_otel.judge.escalation.alerts import Transition, What
from kc_otel.judge.facts import KernelInfo
from kc_otel.judge.incidents.incident import Incident
from kc_otel.judge.plain_json import finite_or_none
from kc_otel.judge.verdict import Verdict

__all__ = ["ALERT_NAMES", "alert_body", "alert_labels", "encode", "kernel_name", "rfc3339", "summary"]

ALERT_NAMES: Final = {
    "fail": "KernelContractBroken",
    "no-data": "KernelContractNoData",
    "inconclusive": "KernelContractInconclusive",
    "invalid-input": "KernelContractInvalidInput",
}
"""`alertname` by what the step waits for."""

_AGAIN: Final = {
    "reminder": "Reminder: it has fired for {lasted} and nobody has acknowledged it.",
    "silence-ended": "A silence has ended and it still fires, for {lasted} now.",
    "unfollowed": "The contract is served no more, or runs dry: nobody follows this, and nothing says it was mended.",
}
_ZERO_TIME: Final = "0001-01-01T00:00:00Z"


def alert_body(
    contract: Contract,
    transitions: Sequence[Transition],
    *,
    receiver: str,
    external_url: str = "",
    max_alerts: int = 0,
    reason: str = "",
    incident: Incident | None = None,
    lasting: int = 0,
    kernels: Iterable[KernelInfo] = (),
) -> dict[str, Any]:
    """One webhook about one contract.

    Args:
        contract: The contract in force.
        transitions: What fired or resolved, all of this contract, at least one.
        receiver: Name of the endpoint.
        external_url: Base URL of the evaluator as people reach it; links are left empty without it.
        max_alerts: Alerts beyond this many are left out and counted in `truncatedAlerts`; 0 for all.
        reason: Why it is sent: `firing`, `update`, `resolved`, `reminder`, `silence-ended` or `unfollowed`; empty for
            the first alert and the last.
        incident: What it is about: receivers that follow incidents get one for all its messages.
        lasting: Alerts of the incident that the receiver knows to fire, after this message.
        kernels: What kernel versions have said of themselves, for their names.

    Returns:
        A JSON object; equal arguments give equal bytes through `encode`.

    Raises:
        ValueError: If there is no transition, or one of another contract.
    """
    if not transitions or {transition.contract for transition in transitions} != {contract.name}:
        raise ValueError(f"a body takes one or more transitions of {contract.name!r} alone; send the others apart")
    shown = transitions[:max_alerts] if max_alerts else transitions
    base = external_url.rstrip("/")
    alerts = [_alert(contract, transition, base, reason) for transition in shown]
    labels = {"contract": contract.name} | ({"incident": incident.id} if incident is not None else {})
    said = reason or shown[0].what.value
    return {
        "version": "4",
        "groupKey": "{}:{" + ", ".join(f'{name}="{value}"' for name, value in labels.items()) + "}",
        "truncatedAlerts": len(transitions) - len(shown),
        "status": "firing" if lasting or any(t.what is What.FIRING for t in transitions) else "resolved",
        "notification_reason": said,
        "receiver": receiver,
        "groupLabels": labels,
        "commonLabels": _common([alert["labels"] for alert in alerts]),
        "commonAnnotations": _common([alert["annotations"] for alert in alerts]),
        "externalURL": base,
        "alerts": alerts,
        "kernelContract": {
            "name": contract.name,
            "version": contract.metadata.version,
            "hash": contract.hash,
            "owner": contract.metadata.owner,
            "description": contract.metadata.description,
            "reason": said,
            "incident": _incident(incident, base, lasting, kernels),
            "evidence": _evidence(contract, transitions),
            "cells": [_cell(transition) for transition in shown],
        },
    }


def _incident(one: Incident | None, base: str, lasting: int, kernels: Iterable[KernelInfo]) -> dict[str, Any] | None:
    if one is None:
        return None
    named = {(info.role, info.version): info.fields for info in kernels}
    return {
        "id": one.id,
        "state": one.state.value,
        "headline": one.headline,
        "extents": [f"{clause}: {text}" for clause, text in one.extents],
        "since": rfc3339(one.since),
        "until": None if one.resolved_at is None else rfc3339(one.resolved_at),
        "slices": len(one.slices),
        "grew": one.growth_text,
        "kernels": {
            "train": kernel_name(named.get(("train", one.kernel_train), {}), one.kernel_train),
            "inference": kernel_name(named.get(("inference", one.kernel_inference), {}), one.kernel_inference),
        },
        "diagnoses": [
            {"kind": each.kind, "slice": each.slice, "text": each.text, "by": each.by, "at": rfc3339(each.at)}
            | {"url": f"{base}/api/v1/incidents/{one.id}/diagnoses/{each.evidence}" if base else ""}
            for each in one.diagnoses
        ],
        "alerts": lasting,
        "url": f"{base}/#/incident/{one.id}" if base else "",
    }


def kernel_name(fields: Mapping[str, str], version: str) -> str:
    """A kernel as people call it, its fingerprint after it.

    >>> kernel_name({"engine": "vllm", "engine.version": "0.32", "dtype": "fp8"}, "6cc3fbbbec48")
    'vllm 0.32 fp8 (6cc3fbbbec48)'
    """
    known = [fields[name] for name in ("engine", "engine.version", "dtype", "quantization") if name in fields]
    return f"{' '.join(known)} ({version})" if known else version


def encode(body: Mapping[str, Any]) -> bytes:
    """The bytes that are stored, signed and sent: compact JSON with sorted keys, UTF-8."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def alert_labels(transition: Transition) -> dict[str, str]:
    """Labels that identify an alert; a kernel that has never reported has no label."""
    cell = transition.cell
    labels = {
        "alertname": ALERT_NAMES[transition.on],
        "contract": cell.contract,
        "clause": cell.clause,
        "slice": cell.slice,
        "kernel_train": cell.kernel_train,
        "kernel_inference": cell.kernel_inference,
        "severity": transition.severity,
    }
    return {name: value for name, value in labels.items() if value}


def summary(transition: Transition) -> str:
    """One line for a person: what fires or has resolved, where."""
    cell = transition.cell
    where = "all traffic" if cell.slice == "all" else f"slice {cell.slice}"
    if transition.what is What.RESOLVED:
        return f"{cell.contract}: {cell.clause} on {where} is resolved"
    said = {
        "fail": f"{cell.clause} is broken on {where}",
        "no-data": f"no data for {cell.clause} on {where}",
        "inconclusive": f"{cell.clause} cannot be decided on {where}",
        "invalid-input": "sequences fail the input checks",
    }[transition.on]
    return f"{cell.contract}: {said}"


def rfc3339(at: float) -> str:
    """A unix time as RFC 3339, UTC, milliseconds."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _alert(contract: Contract, transition: Transition, base: str, reason: str) -> dict[str, Any]:
    cell = transition.cell
    path = "/".join(quote(part, safe="") for part in cell)
    description = _description(contract, transition)
    if reason in _AGAIN:
        lasted = format_duration(max(1.0, round(transition.at - transition.started_at)))
        description = f"{_AGAIN[reason].format(lasted=lasted)} {description}"
    annotations = {"summary": summary(transition), "description": description}
    ours = f"{base}/handbook/on-call.html#{ALERT_NAMES[transition.on].lower()}" if base else ""
    if runbook := contract.metadata.runbook or ours:
        annotations["runbook_url"] = runbook
    return {
        "status": transition.what.value,
        "labels": alert_labels(transition),
        "annotations": annotations,
        "startsAt": rfc3339(transition.started_at),
        "endsAt": rfc3339(transition.at) if transition.what is What.RESOLVED else _ZERO_TIME,
        "generatorURL": f"{base}/#/cell/{path}" if base else "",
        "fingerprint": transition.fingerprint,
    }


def _cell(transition: Transition) -> dict[str, Any]:
    cell, verdict = transition.cell, transition.verdict
    return {
        "fingerprint": transition.fingerprint,
        "clause": cell.clause,
        "slice": cell.slice,
        "kernels": {"train": cell.kernel_train, "inference": cell.kernel_inference},
        "verdict": verdict.status.value,
        "limit": finite_or_none(verdict.limit),
        "estimate": finite_or_none(verdict.estimate),
        "lower": finite_or_none(verdict.lower),
        "upper": finite_or_none(verdict.upper),
        "margin": finite_or_none(verdict.margin),
        "samples": verdict.samples,
        "window": verdict.window,
        "method": verdict.method,
        "about": verdict.about,
        "reason": verdict.reason,
        "at": rfc3339(verdict.at),
        "step": {"on": transition.on, "severity": transition.severity},
        "actions": [action.written for action in transition.actions],
    }


def _description(contract: Contract, transition: Transition) -> str:
    cell, verdict = transition.cell, transition.verdict
    clause = next((clause for clause in contract.clauses if clause.id == cell.clause), None)
    parts: list[str] = []
    if transition.on in {"fail", "inconclusive"} and clause is not None and verdict.window:
        parts.append(_numbers(contract, clause, transition))
        parts += [_evidence(contract, [transition])] if transition.what is What.FIRING else []
    elif verdict.reason:
        end = "" if verdict.reason[-1] in ".?!" else "."
        parts.append(verdict.reason[:1].upper() + verdict.reason[1:] + end)
    if cell.kernel_train or cell.kernel_inference:
        parts.append(f"Training kernel {cell.kernel_train}, inference kernel {cell.kernel_inference}.")
    if transition.what is What.RESOLVED:
        lasted = format_duration(max(1.0, round(transition.at - transition.started_at)))
        parts.append(f"It lasted {lasted}.")
    else:
        parts.append(f"Actions: {', '.join(map(str, transition.actions))}.")
    return " ".join(parts)


def _evidence(contract: Contract, transitions: Sequence[Transition]) -> str:
    """What a FAIL rests on, in a sentence; empty where nothing fails."""
    held = [one.verdict.evidence for one in transitions if one.on == "fail" and one.what is What.FIRING]
    if not held:
        return ""
    if not any(map(math.isfinite, held)):
        return "What was observed is itself above the limit: this is no estimate that chance could deceive."
    apart = format_duration(contract.observability.false_alarms)
    return f"Chance alone says so once in {apart} or less often, in all cells of the contract together."


def _numbers(contract: Contract, clause: Clause, transition: Transition) -> str:
    verdict, unit = transition.verdict, "" if clause.limit_unit == "1" else f" {clause.limit_unit.strip('{}')}"
    statistic = clause.parsed_statistic
    name = {
        "mean": "Mean of",
        "max": "Largest",
        "quantile": f"{statistic.argument * 100:g}th percentile of",
        "fraction": f"Share above {statistic.argument:g} of",
    }[statistic.kind]
    o = contract.observability
    window = format_duration(o.long_window if verdict.window == "long" else o.window)
    return (
        f"{name} {clause.metric_text} is {verdict.estimate:.4g}{unit}, {_interval(verdict)} at "
        f"{o.confidence * 100:g}% confidence, from {verdict.samples:,} observations in the last {window}; "
        f"the limit is {verdict.limit:.4g}{unit}."
    )


def _interval(verdict: Verdict) -> str:
    if math.isfinite(verdict.lower) and math.isfinite(verdict.upper):
        return f"between {verdict.lower:.4g} and {verdict.upper:.4g}"
    return f"at least {verdict.lower:.4g}" if math.isfinite(verdict.lower) else f"at most {verdict.upper:.4g}"


def _common(maps: Sequence[Mapping[str, str]]) -> dict[str, str]:
    first, *others = maps
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}
