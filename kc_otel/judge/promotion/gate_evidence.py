"""Evidence of a promotion step: promises, measurements, kernels, and a checksum over all of it.

The checksum shows that a record has not been damaged or edited by accident. It is not a signature: anyone who can
rewrite the record can rewrite the checksum, so keep records where the people they bind cannot write.

A step's record says beyond its verdicts from where to where it goes, on which terms, and who decided. The record of the
offline stage has a section of its own, which the offline gate writes and checks.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version as installed_version
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.words import listed, place
from kc_otel.judge.escalation.webhook_body import rfc3339
from kc_otel.judge.plain_json import finite_or_none, to_plain
from kc_otel.judge.promotion.stages import Decision, GateOutcome, Promotion, PromotionMove, Stage
from kc_otel.judge.verdict import Status, Verdict

SectionProblems = Callable[[Mapping[str, Any]], list[str]]
"""Says what does not follow in a record's section `offline`: `section_problems` of the offline gate."""

FORMAT: Final = "kernel-contract-evidence/v1"
_FIELDS: Final = frozenset(
    {"format", "time", "tool", "contract", "kernel", "stage", "decision", "verdicts", "checksum"}
)
OFFLINE_SECTION: Final = "offline"
"""Section with the inputs needed to judge the same files again; only in records of the offline stage."""
_STEP: Final = "step"
"""Section that only the records of a promotion's steps have: from where to where, and who decided it."""
_NUMBERS: Final = ("limit", "estimate", "lower", "upper", "evidence")
_HASH: Final = re.compile(r"[0-9a-f]{64}")


def unchecked_offline(_record: Mapping[str, Any]) -> list[str]:
    """Refuse every section of the offline stage: for programs that have no offline gate."""
    return ["this program has no offline gate and cannot check the section of the offline stage"]


class EvidenceError(ValueError):
    """A record is not what a gate wrote; the message lists everything that is wrong with it."""


def step_evidence(
    contract: Contract, promotion: Promotion, move: PromotionMove, verdicts: Sequence[Verdict], now: float
) -> dict[str, Any]:
    """The record of a step that `verify_record` accepts; `promotion` is as before the step.

    `verdicts` are of any versions, and none where a person forces a version on that has none yet.
    """
    own = [verdict for verdict in verdicts if verdict.cell.kernel_inference == promotion.version]
    if move.decision.outcome is GateOutcome.ADVANCE:
        asked = {(clause.id, slice) for clause in contract.clauses for slice in contract.slices_for(clause)}
        own = [verdict for verdict in own if (verdict.cell.clause, verdict.cell.slice) in asked]
    rows = [verdict_row(contract, verdict) for verdict in sorted(own, key=lambda verdict: (verdict.cell, verdict.at))]
    terms = contract.promotion
    step = {
        "kind": move.kind.value,
        "attempt": promotion.attempt,
        "from": to_plain(move.before),
        "to": to_plain(move.after),
        "terms": {"windows": terms.windows, "failure_limit": terms.failure_limit},
        "failed_windows": move.failed,
        "by": move.by or None,
        "why": move.why or None,
    }
    return sealed(contract, move.before.stage, promotion.version, move.decision, rows, now, {_STEP: step})


def verify_record(record: Mapping[str, Any], offline_problems: SectionProblems) -> None:
    """Accept a record, as JSON was read, or raise EvidenceError with what is wrong with it.

    Checked: the checksum; that every field is there and no other; that each verdict follows from its own bound and
    limit, a FAIL that was followed over time excepted; that the decision does not contradict the verdicts. Of the
    offline stage, too: that the contract's text has the contract's hash and sets the limits; that the kernels' fields
    make the fingerprints; that the decision is the one that its terms and the verdicts lead to.
    """
    if not isinstance(record, Mapping) or record.get("format") != FORMAT:
        raise EvidenceError(f"this is not a record of the format {FORMAT}")
    problems = [f"{name} is missing" for name in sorted(_FIELDS - set(record))]
    problems += [
        f"{name} is not a field of this format" for name in sorted(set(record) - _FIELDS - {OFFLINE_SECTION, _STEP})
    ]
    if not problems:
        try:
            problems = _problems(record, offline_problems)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            problems = [f"a field has another shape than kc-otel writes ({error!r})"]
    if problems:
        raise EvidenceError("; ".join(problems))


def _problems(record: Mapping[str, Any], offline_problems: SectionProblems) -> list[str]:
    problems = []
    if record["checksum"] != checksum_of({name: value for name, value in record.items() if name != "checksum"}):
        problems.append("the checksum does not match: the record was changed after it was written")
    if not _HASH.fullmatch(record["contract"]["hash"]):
        problems.append("contract.hash is not 64 hex digits")
    statuses = set()
    for verdict in record["verdicts"]:
        status, limit = Status(verdict["status"]), verdict["limit"]
        statuses.add(status)
        where = f"{verdict['clause']} on {verdict['slice']}"
        if status is Status.PASS and not _within(verdict, limit):
            problems.append(f"{where} is PASS, but its upper bound is not at or below the limit")
        # What the evaluator follows over time fails by what it holds against the limit, not by one window's bound.
        followed = verdict["evidence"] is not None
        if status is Status.FAIL and not (followed or (verdict["lower"] is not None and verdict["lower"] > limit)):
            problems.append(f"{where} is FAIL, but its lower bound is not above the limit")
    if OFFLINE_SECTION in record:
        return problems + offline_problems(record)
    outcome = GateOutcome(record["decision"]["outcome"])
    if outcome is GateOutcome.ADVANCE and statuses != {Status.PASS}:
        problems.append("the decision is to advance, but not every verdict is PASS")
    if outcome is GateOutcome.ROLLBACK and Status.FAIL not in statuses:
        problems.append("the decision is to roll back, but no verdict is FAIL")
    return problems


def sealed(
    contract: Contract,
    stage: Stage,
    version: str,
    decision: Decision,
    rows: Sequence[Mapping[str, Any]],
    now: float,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a record of these verdicts' rows and sections, with its checksum."""
    record = {
        "format": FORMAT,
        "time": rfc3339(now),
        "tool": {"name": "kc-otel", "version": installed_version("kc-otel")},
        "contract": {"name": contract.name, "version": contract.metadata.version, "hash": contract.hash},
        "kernel": version,
        "stage": stage.value,
        "decision": to_plain(decision),
        "verdicts": list(rows),
        **(more or {}),
    }
    return record | {"checksum": checksum_of(record)}


def of_other_contracts(contract: Contract, records: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    """Say which of a version's passed gates were made under another contract, and which cells they do not prove.

    Each sentence is empty where there is nothing to say.
    """
    passed = [record for record in records if record["decision"]["outcome"] == GateOutcome.ADVANCE]
    others = [record for record in passed if record["contract"]["hash"] != contract.hash]
    if not others:
        return "", ""
    gates = listed(list(dict.fromkeys(record["stage"] for record in others)))
    made = {(record["contract"]["version"], record["contract"]["hash"][:12]) for record in others}
    versions = listed([f"version {version} ({digest})" for version, digest in sorted(made)])
    in_force = f"{contract.metadata.version} ({contract.hash[:12]})"
    said = f"its evidence of {gates} was made under {versions} of the contract; version {in_force} is in force"
    short: dict[str, None] = {}
    for clause in contract.clauses:
        for slice in contract.slices_for(clause):
            limit, measured = clause.limit_for(slice), (clause.id, slice, contract.quantity_digests[clause.id, slice])
            for record in others:
                rows = [
                    row for row in record["verdicts"] if (row["clause"], row["slice"], row.get("quantity")) == measured
                ]
                if not rows or not all(_within(row, limit) for row in rows):
                    short[f"{clause.id} on {place(slice)}"] = None
    if not short:
        return said, ""
    lacks = f"it does not show that this one's limit holds for {listed(list(short))}"
    return said, f"{said}, and {lacks}; roll it back and start it again, or force it and say why"


def _within(row: Mapping[str, Any], limit: float) -> bool:
    """Return whether a verdict's row shows that a limit holds; of what none may be, none seen is enough."""
    return limit == row["estimate"] == 0 or (row["upper"] is not None and row["upper"] <= limit)


def verdict_row(contract: Contract, verdict: Verdict) -> dict[str, Any]:
    """Return the row of a verdict in a record."""
    cell = verdict.cell
    return {
        "clause": cell.clause,
        "slice": cell.slice,
        "kernels": {"train": cell.kernel_train, "inference": cell.kernel_inference},
        "status": verdict.status.value,
        "time": rfc3339(verdict.at),
        **{name: finite_or_none(getattr(verdict, name)) for name in _NUMBERS},
        **{name: getattr(verdict, name) for name in ("samples", "window", "method", "about")},
        "quantity": contract.quantity_digests.get((cell.clause, cell.slice)),
    }


def checksum_of(record: Mapping[str, Any]) -> str:
    """Return the checksum of a record without its field `checksum`."""
    canonical = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()
