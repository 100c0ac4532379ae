"""Announcements of a change: its sentence, its severity, and the attributes of its log record.

A verdict that changes is a `gen_ai.evaluation.result` of OpenTelemetry's semantic conventions for generative AI, so
that tools that show evaluations show it; everything else is a `kc.transition`. Source: semantic-conventions-genai,
model/gen-ai/events.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from kc_otel.contract.model import Contract
from kc_otel.judge.escalation.alerts import Transition, What
from kc_otel.judge.escalation.notices import Notice, NoticeReason
from kc_otel.judge.escalation.webhook_body import summary
from kc_otel.judge.incidents.incident import Incident
from kc_otel.judge.recorders import pair_name
from kc_otel.judge.verdict import Cell, Status, Verdict
from kc_otel.serve.history import StatusChange

Names = Mapping[tuple[str, str], str]
"""`kernel_names` of a contract."""


class Announcement(NamedTuple):
    """Something to say to whoever reads the log, and its log record: info, warning or critical."""

    severity: str
    message: str
    attributes: Mapping[str, str | float]
    event: str = "kc.transition"


def of_change(change: StatusChange, contract: Contract, names: Names) -> Announcement:
    """Announce a cell's changed status."""
    verdict = change.verdict
    before = change.before.value if change.before else "new"
    cell = verdict.cell
    of = pair_name(names, cell.kernel_train, cell.kernel_inference)
    message = f"{cell.clause} on {cell.slice}{of}: {before} -> {verdict.status.value}: {verdict.reason}"
    attributes: dict[str, str | float] = {
        **_attributes(contract, verdict),
        "gen_ai.evaluation.name": verdict.cell.clause,
        "gen_ai.evaluation.score.label": verdict.status.value.lower(),
        "gen_ai.evaluation.explanation": verdict.reason,
    }
    if math.isfinite(verdict.estimate):
        attributes["gen_ai.evaluation.score.value"] = verdict.estimate
    severity = "warning" if verdict.status is Status.FAIL else "info"
    return Announcement(severity, message, attributes, "gen_ai.evaluation.result")


def of_transition(
    transition: Transition, contract: Contract, names: Names, incident: Incident | None, *, dry_run: bool
) -> Announcement:
    """An alert of an incident fires, or has resolved."""
    attributes = {**_attributes(contract, transition.verdict), "kc.severity": transition.severity}
    message = summary(transition, names, incident)
    if dry_run:
        message = f"dry run: {message}; it would {', '.join(map(str, transition.actions))}"
        return Announcement("info", message, attributes)
    return Announcement(transition.severity if transition.what is What.FIRING else "info", message, attributes)


def of_notice(notice: Notice, contract: Contract, names: Names) -> Announcement:
    """An alert that fires still is said again."""
    transition = notice.transition
    why = "a reminder" if notice.reason is NoticeReason.REMINDER else "a silence has ended"
    message = f"{summary(transition, names)} still: {why}"
    return Announcement(transition.severity, message, _attributes(contract, transition.verdict))


def cell_fields(cell: Cell) -> dict[str, Any]:
    """A cell in an event, whose contract stands beside it."""
    return {
        "clause": cell.clause,
        "slice": cell.slice,
        "kernel_train": cell.kernel_train,
        "kernel_inference": cell.kernel_inference,
    }


def cell_attributes(cell: Cell) -> dict[str, str]:
    """A cell as attributes of a metric or a log record."""
    return {
        "kc.contract": cell.contract,
        "kc.clause": cell.clause,
        "kc.slice": cell.slice,
        "kc.kernel.train": cell.kernel_train,
        "kc.kernel.inference": cell.kernel_inference,
    }


def _attributes(contract: Contract, verdict: Verdict) -> dict[str, str | float]:
    return {
        **cell_attributes(verdict.cell),
        "kc.contract.version": str(contract.metadata.version),
        "kc.contract.hash": contract.hash,
        "kc.verdict.status": verdict.status.value,
    }
