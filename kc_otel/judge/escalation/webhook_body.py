"""The body of a webhook: Alertmanager's version 4, and one `kernelContract` object with what the contract adds.

A receiver that knows Alertmanager reads `alerts` and needs nothing else. A receiver that acts on kernels reads
`kernelContract.cells`, which says of each alert, in the same order, which clause broke on which slice for which pair of
kernels, and by how much. Source: Prometheus documentation, `<webhook_config>`; Alertmanager's `template.Data`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import quote, urlsplit

from kc_otel.contract.clause import Clause
from kc_otel.contract.model import Contract
from kc_otel.contract.sentences import consequence, kept_away, reading, remedy_of, statistic_words
from kc_otel.contract.slices import ALL
from kc_otel.contract.units import format_duration
from kc_otel.contract.words import MEASURED_LATER, RUN_ENDED, dilution, listed, moment, named_place, number, place
from kc_otel.judge.escalation.alerts import ROLLED_BACK, UNFOLLOWED, WENT_AWAY, Alert
from kc_otel.judge.escalation.escalate import IncidentMessage
from kc_otel.judge.incidents.incident import CLAUSE_GONE, NOT_PROVEN, BrokenCell, Incident, IncidentState
from kc_otel.judge.plain_json import finite_or_none
from kc_otel.judge.recorders import KernelInfo, kernel_names, pair_name
from kc_otel.judge.verdict import FAULTS, Status, Verdict

ROLLED_BACK_ALERT: Final = "KernelContractRolledBack"
"""`alertname` of a roll-back."""
_REPEATED_SENTENCES: Final = {
    "reminder": "Reminder: the alert has fired for {lasted} and nobody has acknowledged it.",
    "silence-ended": "A silence has ended, and the alert still fires after {lasted}.",
    "unfollowed": "The contract was removed or set to dry run: the alert is no longer tracked, and the fault may not "
    "be fixed.",
}
_ZERO_TIME: Final = "0001-01-01T00:00:00Z"


@dataclass(frozen=True, slots=True)
class _Facts:
    """One message, and what its texts are made of."""

    contract: Contract
    message: IncidentMessage
    base: str
    names: Mapping[tuple[str, str], str]
    done: Sequence[str]
    lifting: Sequence[str]

    @property
    def incident(self) -> Incident | None:
        return self.message.incident

    @property
    def contained(self) -> bool:
        return self.incident is not None and self.incident.state is IncidentState.CONTAINED

    @property
    def rolled_back(self) -> bool:
        """True if the version of the inference kernel is rolled back: an order to do so would be refused."""
        if any(edge.step == ROLLED_BACK and edge.fires for edge in self.message.alerts):
            return True
        if self.incident is None or self.incident.ordered_at is None:
            return False
        return any(action.kind == "roll-back" for action in self.incident.actions)

    @property
    def changed(self) -> bool:
        """True if each cell of the incident is refuted, or measured by no clause of the contract in force."""
        return self.incident is not None and all(cell.changed or cell.refuted for cell in self.incident.cells)


def alert_body(
    contract: Contract,
    message: IncidentMessage,
    *,
    at: float,
    external_url: str = "",
    done: Sequence[str] = (),
    lifting: Sequence[str] = (),
    kernels: Iterable[KernelInfo] = (),
) -> dict[str, Any]:
    """One webhook about one contract, a JSON object; equal arguments give equal bytes through `encode`.

    `at` is the Unix time of what it says, in seconds: it may be delivered much later. `external_url` is the evaluator's
    base URL as people reach it; links are empty without it. `done` are the actions taken on the incident in words,
    oldest first, which every format has before all numbers, and `lifting` the commands that end the routes and pins
    left of it: the last message names them.
    """
    facts = _Facts(contract, message, external_url.rstrip("/"), kernel_names(kernels), done, lifting)
    edges, incident, note = message.alerts, message.incident, links_note(facts.base)
    as_of = f"As of {moment(at)[:16]} UTC."
    firing = bool(message.lasting) or any(edge.fires for edge in edges)
    lifted = () if incident is not None and incident.broken else lifting  # a slice that is silenced, say
    following = _first_action(facts, edges)
    lift = "" if following else _lifting_sentence(lifted)
    alerts = [_alert(facts, edge, lift) for edge in edges]
    for alert in alerts:
        alert["annotations"]["description"] += f" {as_of}" + f" {note}" * bool(note)
    labels = {"contract": contract.name} | ({"incident": incident.id} if incident is not None else {})
    return {
        "version": "4",
        "groupKey": "{}:{" + ", ".join(f'{name}="{value}"' for name, value in labels.items()) + "}",
        "truncatedAlerts": 0,
        "status": "firing" if firing else "resolved",
        "notification_reason": message.reason.value,
        "receiver": message.endpoint,
        "groupLabels": labels,
        "commonLabels": _common([alert["labels"] for alert in alerts]),
        "commonAnnotations": _common([alert["annotations"] for alert in alerts]),
        "externalURL": facts.base,
        "alerts": alerts,
        "kernelContract": {
            "name": contract.name,
            "version": contract.metadata.version,
            "hash": contract.hash,
            "owner": contract.metadata.owner,
            "description": contract.metadata.description,
            "reason": message.reason.value,
            "as_of": as_of,
            "incident": None if incident is None else _incident(facts, incident),
            "impact": _impact(facts, edges),
            "next": following or lift,
            "evidence": _evidence(contract, edges),
            "links": note,
            "cells": [_cell(edge) for edge in edges],
        },
    }


def _incident(facts: _Facts, incident: Incident) -> dict[str, Any]:
    train, inference = incident.kernel_train, incident.kernel_inference
    until = incident.last_until if incident.recovered else incident.resolved_at
    url = f"{facts.base}/#/incident/{incident.id}" if facts.base else ""
    evidence = f"{facts.base}/api/v1/incidents/{incident.id}/diagnoses/"
    return {
        "id": incident.id,
        "state": "recovered" if incident.recovered else incident.state.value,
        "state_text": incident.state_text,
        "done": list(facts.done),
        "headline": incident.headline + pair_name(facts.names, train, inference),
        "extents": [f"{clause}: {text}" for clause, text in incident.extents],
        "since": rfc3339(incident.lasting_since(facts.contract.observability.window)),
        "until": None if until is None else rfc3339(until),
        "slices": len(incident.slices),
        "grew": incident.growth_text,
        "kernels": {
            "train": facts.names.get(("train", train), train),
            "inference": facts.names.get(("inference", inference), inference),
        },
        "diagnoses": [
            {name: getattr(found, name) for name in ("kind", "slice", "text", "by")}
            | {"at": rfc3339(found.at), "url": f"{evidence}{found.evidence}" if facts.base else ""}
            for found in incident.diagnoses
        ],
        "alerts": facts.message.lasting,
        "url": url,
    }


def encode(body: Mapping[str, Any]) -> bytes:
    """The bytes that are stored, signed and sent: compact JSON with sorted keys, UTF-8."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def alert_labels(edge: Alert) -> dict[str, str]:
    """Labels that identify an alert; a kernel that has never reported has no label."""
    cell = edge.cell
    labels = {
        "alertname": _alert_name(edge),
        "contract": cell.contract,
        "clause": cell.clause,
        "slice": cell.slice,
        "kernel_train": cell.kernel_train,
        "kernel_inference": cell.kernel_inference,
        "severity": edge.severity,
    }
    return {name: value for name, value in labels.items() if value}


def _alert_name(edge: Alert) -> str:
    return ROLLED_BACK_ALERT if edge.step == ROLLED_BACK else FAULTS[edge.on].alert


def _alert_kind(edge: Alert) -> str:
    """Subject of an alert: the kind that its step waits for, "unproven", a roll-back, or "serves" after one."""
    if edge.step == ROLLED_BACK:
        return "serves" if edge.severity == "critical" else ROLLED_BACK
    return "unproven" if edge.end == WENT_AWAY else edge.on


def _ending(edge: Alert, where: str, of: str, incident: Incident | None) -> str:
    """Say what ended, for which kernels, and, if nothing refuted it, why or by whom."""
    row = None if incident is None else incident.cell(*edge.cell.place)
    cell, last = edge.cell, edge.verdict
    if _alert_kind(edge) == "serves":
        over = "the incident is over" if incident is not None else "a person has acted on the rollback"
        return f"{over}{of}; whether the version that was rolled back still serves is not known"
    if row is not None and row.changed and not row.refuted and edge.on != "fail":
        return f"{cell.clause} on {where} is no longer asked for{of}: {CLAUSE_GONE}"
    match edge.on:
        case "fail":
            return f"{cell.clause} on {where} is {_breach_over(edge, incident, row, of)}"
        case "no-data":
            said = {Status.NO_DATA: "are no longer watched", Status.INVALID_INPUT: "are arriving, but invalid"}
            return f"data for {cell.clause} on {where}{of} {edge.end or said.get(last.status, 'are arriving')}"
        case "inconclusive":
            return f"{cell.clause} on {where} is no longer undecided{of}"
    closing = "" if incident is None or row is None or row.refuted else incident.closing
    return f"no sequences fail the input checks any more{of}" + f", without proof: {closing}" * bool(closing)


def _breach_over(edge: Alert, incident: Incident | None, row: BrokenCell | None, of: str) -> str:
    """Say how a breach ended for its kernels, and why it is called so."""
    last, measured = edge.verdict, f"no longer measured as broken{of}"
    passes = last.status is Status.PASS or last.ended
    lasts = incident is not None and incident.state is not IncidentState.RESOLVED
    open_slices = incident.open_slices(row.clause) if lasts and incident and row and row.slice == ALL else []
    if row is not None and row.loosened_to is not None:
        limits = f"its limit was changed from {number(row.strictest)} to {number(row.loosened_to)}"
        return f"closed{of}: {limits}; the drift may be as it was"
    if row.refuted if row is not None else passes:
        return f"resolved{of}"
    if passes and open_slices:
        return f"{measured}; the breach on {listed(open_slices)} is not over"
    if passes and row is not None and row.until is None and not row.changed:
        return f"{measured}; another alert of it still fires"  # what refutes it is known once that ends, too
    if incident is not None and incident.state is IncidentState.CONTAINED:
        return f"contained{of}: routers avoid the kernel, which is not repaired"
    ended = f"closed{of} without proof of recovery:"
    why = "the pair, or a recorder of it, fell silent while others reported, or the contract has changed"
    if lasts and row is not None and row.until is not None:
        ended, why = f"{measured};", NOT_PROVEN
    why = CLAUSE_GONE if row is not None and row.changed else why
    why = last.reason if last.reason.startswith(RUN_ENDED) else why
    why = f"{RUN_ENDED}: its last recorder shut down" if incident and incident.run_ended else why
    why = incident.closing if incident and not lasts and incident.closing else why
    return f"{ended} {why}"


def summary(edge: Alert, names: Mapping[tuple[str, str], str], incident: Incident | None = None) -> str:
    """One line for a person: the firing or resolved clause, its slice, and the kernels by their `kernel_names`."""
    cell, kind = edge.cell, _alert_kind(edge)
    of = pair_name(names, cell.kernel_train, cell.kernel_inference)
    where = named_place(cell.slice)
    if not edge.fires:
        left = f"{cell.clause} on {where}{of} {UNFOLLOWED}" if edge.end == UNFOLLOWED else ""
        return f"{cell.contract}: {left or _ending(edge, where, of, incident)}"
    later = f"was measured after its rollback: {MEASURED_LATER}" if kind == "serves" else "was rolled back"
    if edge.step == ROLLED_BACK and not _shows(edge):
        return f"{cell.contract}: {names.get(('inference', cell.kernel_inference), cell.kernel_inference)} {later}"
    breach = "invalid input" if edge.on == "invalid-input" else f"a breach of {cell.clause} on {where}"
    broken = f"{'is' if _shows(edge) else 'was'} broken{' again' * edge.again}"
    said = {
        "serves": f"{cell.clause} is broken on {where}{of}, which {later}",
        ROLLED_BACK: f"{cell.clause} is broken on {where}{of}, which {later}",
        "unproven": f"{breach} {WENT_AWAY}{of}{f': {RUN_ENDED}' * _run_ended(incident)}",
        "fail": f"{cell.clause} {broken} on {where}{of}",
        "no-data": f"no data for {cell.clause} on {where}{', because the run ended,' * edge.run_ended}{of}",
        "inconclusive": f"{cell.clause} cannot be decided on {where}{of}",
        "invalid-input": f"sequences fail the input checks{of}",
    }
    return f"{cell.contract}: {said[kind]}"


def rfc3339(at: float) -> str:
    """A unix time as RFC 3339, UTC, milliseconds."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _alert(facts: _Facts, edge: Alert, lift: str) -> dict[str, Any]:
    cell, reason = edge.cell, facts.message.reason.value
    path = "/".join(quote(part, safe="") for part in cell)
    did = [f"Done: {'; '.join(facts.done)}."] if facts.done else []
    if edge.fires:
        impact, following = _impact(facts, [edge], (cell.slice,)), _first_action(facts, [edge])
        did = [impact, _since(edge, facts.incident), *did, following]
    elif lift:
        did.append(lift)
    description = " ".join((*did, _description(facts, edge)))
    if reason in _REPEATED_SENTENCES:
        description = f"{_REPEATED_SENTENCES[reason].format(lasted=_lasted(edge))} {description}"
    annotations = {"summary": summary(edge, facts.names, facts.incident), "description": description}
    if runbook := facts.contract.metadata.runbook or runbook_page(facts.base, _alert_name(edge)):
        annotations["runbook_url"] = runbook
    return {
        "status": edge.phase.value,
        "labels": alert_labels(edge),
        "annotations": annotations,
        "startsAt": rfc3339(edge.started_at),
        "endsAt": rfc3339(edge.at) if not edge.fires else _ZERO_TIME,
        "generatorURL": f"{facts.base}/#/cell/{path}" if facts.base else "",
        "fingerprint": edge.fingerprint,
    }


def _lasted(edge: Alert) -> str:
    return format_duration(max(1.0, round(edge.at - edge.started_at)))


def _since(edge: Alert, incident: Incident | None) -> str:
    """Say since when it has been so; of a version that was rolled back, when, and when it was measured later."""
    if edge.step != ROLLED_BACK:
        row = None if incident is None else incident.cell(*edge.cell.place)
        first = edge.started_at if row is None else min(edge.started_at, row.since)
        again = edge.started_at if edge.again else row and row.again
        if edge.on == "no-data":  # silence began before: it is news once a report is overdue
            return f"Missed since {moment(again or first)}."
        return (
            f"Again since {moment(again)}, for the first time {moment(first)}." if again else f"Since {moment(first)}."
        )
    if _alert_kind(edge) == ROLLED_BACK:
        return f"Since {moment(edge.started_at)}."
    done = () if incident is None else incident.actions
    rolled = [action.at for action in done if action.kind == "roll-back" and action.at <= edge.started_at]
    if not rolled:
        return f"Measured after that at {moment(edge.started_at)}."
    return f"Rolled back at {moment(max(rolled))}, measured after that at {moment(edge.started_at)}."


def _impact(facts: _Facts, edges: Sequence[Alert], slices: tuple[str, ...] = ()) -> str:
    """Return the effect of firing alerts on users, in a sentence, rewards first; empty if nothing fires any more."""
    firing = [edge for edge in edges if edge.fires]
    if not firing:
        return ""
    clauses = {clause.id: clause for clause in facts.contract.clauses}
    firing = [edge for edge in firing if _shows(edge)] or firing
    first = min(firing, key=lambda edge: not getattr(clauses.get(edge.cell.clause), "metric", "").startswith("reward_"))
    if first.step == ROLLED_BACK:
        later, serves = f"measured after its rollback: {MEASURED_LATER}", _alert_kind(first) == "serves"
        return f"A version was {later if serves else 'rolled back and should no longer serve requests'}."
    if facts.incident is not None and not slices:
        fires, slices = {edge.cell.slice for edge in firing}, facts.incident.slices
        if not facts.contained:
            shown = facts.incident.shown_slices if _shows(first) else fires
            slices = tuple(name for name in slices if name in shown)
    slices = slices or (first.cell.slice,)
    where = (
        place(slices[0]) if slices == (ALL,) else f"slice{'s' * (len(slices) > 1)} {listed(list(map(place, slices)))}"
    )
    if first.end == WENT_AWAY:
        keeps = f"{first.cell.clause} keeps its limit again on {where}"
        what = "valid sequences come again" if first.on == "invalid-input" else keeps
        silent = "its kernel, or a recorder of it, measures nothing more, or its points arrive and are not judged"
        why = f"{CLAUSE_GONE if facts.changed else silent}. The kernel may still serve"
        return f"Nothing proves that {what}: {RUN_ENDED if _run_ended(facts.incident) else why}."
    if first.run_ended or facts.contained:
        over = f"{RUN_ENDED.capitalize()}: nothing of this kernel is measured on {where} any more."
        return over if first.run_ended else kept_away(where)
    if not _shows(first):
        if first.verdict.status is Status.PASS or first.verdict.ended:
            said = "no longer shows a breach; its alert fires until this has lasted"
        else:
            said = "neither shows nor refutes the breach; its alert fires until it is refuted"
        return f"The last verdict on {where} {said}."
    estimate = first.verdict.estimate if len(slices) == 1 and not dilution(first.verdict.reason) else math.nan
    return consequence(clauses.get(first.cell.clause), first.on, where, estimate)


def _first_action(facts: _Facts, edges: Sequence[Alert]) -> str:
    """Return the first action on firing alerts, in a sentence; empty if nothing fires any more."""
    first = next((edge for edge in edges if edge.fires), None)
    if first is None:
        return ""
    about = "clause-gone" if _alert_kind(first) == "unproven" and facts.changed else _alert_kind(first)
    about = "run-ended" if about == "unproven" and _run_ended(facts.incident) else about
    about = "run-over" if first.run_ended else about
    row = None if facts.incident is None else facts.incident.cell(*first.cell.place)
    about = "train-kernel" if about == "fail" and row is not None and row.against else about
    about = ROLLED_BACK if first.on == "fail" and about != "run-ended" and facts.rolled_back else about
    remedy = remedy_of(facts.contract, ROLLED_BACK if about == "serves" else about)
    return f"Now: {remedy.format(contract=facts.contract.name)}."


def _lifting_sentence(commands: Sequence[str]) -> str:
    """Return how to end what is left of a breach that is over, in a sentence; empty where nothing is."""
    run = listed([f"`{line}`" for line in commands])
    return f"Now: once the kernel is trusted again or serves nobody, run {run}." * bool(commands)


def _shows(edge: Alert) -> bool:
    """Return whether the last verdict still shows what the alert fires on."""
    return edge.end != WENT_AWAY and (edge.on != "fail" or edge.verdict.status is Status.FAIL)


def _run_ended(incident: Incident | None) -> bool:
    """Return whether an incident is closed because its run ended, though nothing refuted it."""
    return incident is not None and incident.ended_unrefuted


def links_note(base: str) -> str:
    """Return a warning where links lead to an address of the evaluator's own machine; empty where they open."""
    host = urlsplit(base).hostname or ""
    try:
        local = ip_address(host).is_loopback or ip_address(host).is_unspecified
    except ValueError:
        local = host == "localhost"
    if not local:
        return ""
    return "Links open only on the evaluator's machine: start `kc-otel serve` with --external-url and its address."


def runbook_page(evaluator: str, alert: str) -> str:
    """The place in the handbook that says what to do about an alert; empty without an evaluator's base URL."""
    return f"{evaluator}/handbook/on-call.html#{alert.lower()}" if evaluator else ""


def _cell(edge: Alert) -> dict[str, Any]:
    cell, verdict = edge.cell, edge.verdict
    numbers = ("limit", "estimate", "lower", "upper", "margin")
    return {
        "fingerprint": edge.fingerprint,
        "clause": cell.clause,
        "slice": cell.slice,
        "kernels": {"train": cell.kernel_train, "inference": cell.kernel_inference},
        "verdict": verdict.status.value,
        **{name: finite_or_none(getattr(verdict, name)) for name in numbers},
        **{name: getattr(verdict, name) for name in ("samples", "window", "method", "about", "reason")},
        "at": rfc3339(verdict.at),
        "step": {"on": edge.on, "severity": edge.severity},
        "actions": [action.written for action in edge.actions],
    }


def _description(facts: _Facts, edge: Alert) -> str:
    contract, verdict = facts.contract, edge.verdict
    clause = next((clause for clause in contract.clauses if clause.id == edge.cell.clause), None)
    parts: list[str] = []
    if edge.fires and edge.end == WENT_AWAY:
        ended = "the incident is closed, and no message about its end follows"
        lasts = "the incident stays open until it is known how the breach ended"
        parts.append(f"Its alert is over; {ended if _run_ended(facts.incident) else lasts}.")
    elif edge.on in {"fail", "inconclusive"} and clause is not None and verdict.window:
        parts.append(_numbers(contract, clause, edge))
        if edge.fires:
            parts += [_evidence(contract, [edge]), *filter(None, [reading(clause)])]
    elif verdict.reason:
        end = "" if verdict.reason[-1] in ".?!" else "."
        parts.append(verdict.reason[:1].upper() + verdict.reason[1:] + end)
    if not edge.fires:
        parts.append(f"The alert lasted {_lasted(edge)}.")
    return " ".join(parts)


def _evidence(contract: Contract, edges: Sequence[Alert]) -> str:
    """Return the evidence behind a FAIL, in a sentence; empty where nothing fails."""
    held = [
        edge.verdict.evidence
        for edge in edges
        if edge.on == "fail" and edge.fires and edge.end != WENT_AWAY
        if edge.step != ROLLED_BACK or _shows(edge)
    ]
    if not held:
        return ""
    if not any(map(math.isfinite, held)):
        return "The observed value itself exceeds the limit: this is not an estimate, and not due to chance."
    apart = format_duration(contract.observability.false_alarms)
    return f"On average, chance alone raises such an alert at most once in {apart} in the whole contract."


def _numbers(contract: Contract, clause: Clause, edge: Alert) -> str:
    verdict, unit = edge.verdict, "" if clause.limit_unit == "1" else f" {clause.limit_unit.strip('{}')}"
    seen = contract.observability
    window = format_duration(seen.long_window if verdict.window == "long" else seen.window)
    diluted = dilution(verdict.reason)
    return (
        f"{statistic_words(clause)} {clause.metric_text} is {verdict.estimate:.4g}{unit}, {_interval(verdict)} at "
        f"{seen.confidence * 100:g}% confidence, from {verdict.samples:,} observations in the last {window}; "
        f"the limit is {verdict.limit:.4g}{unit}{f': {diluted}' * bool(diluted)}."
    )


def _interval(verdict: Verdict) -> str:
    if math.isfinite(verdict.lower) and math.isfinite(verdict.upper):
        return f"between {verdict.lower:.4g} and {verdict.upper:.4g}"
    return f"at least {verdict.lower:.4g}" if math.isfinite(verdict.lower) else f"at most {verdict.upper:.4g}"


def _common(maps: Sequence[Mapping[str, str]]) -> dict[str, str]:
    first, *others = maps
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}
