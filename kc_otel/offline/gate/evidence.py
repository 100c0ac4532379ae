"""Evidence of a promotion step: what was promised, what was measured, on which kernels, and a checksum over it all.

The checksum shows that a record has not been damaged or edited by accident. It is not a signature: whoever can rewrite
the record can rewrite the checksum, so keep records where the people they bind cannot write.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any, Final

from kc_otel.contract.model import Contract
from kc_otel.contract.slices import ALL
from kc_otel.judge.escalation.webhook_body import rfc3339
from kc_otel.judge.plain_json import finite_or_none, to_plain
from kc_otel.judge.promotion.promotion_state import Promotion, PromotionMove
from kc_otel.judge.promotion.stages import Decision, GateOutcome, Stage
from kc_otel.judge.verdict import Status, Verdict
from kc_otel.offline.gate.gate_section import gate_again, section, section_problems
from kc_otel.offline.gate.recorded_gate import OfflineGate
from kc_otel.offline.gate.step_section import step_problems, step_section

__all__ = [
    "EvidenceError",
    "make_evidence",
    "offline_evidence",
    "step_evidence",
    "verify_evidence",
    "verify_recordings",
]

_FORMAT: Final = "kernel-contract-evidence/v1"
_FIELDS: Final = frozenset(
    {"format", "time", "tool", "contract", "kernel", "stage", "decision", "verdicts", "checksum"}
)
_OFFLINE: Final = "offline"
"""Section that only the offline stage's records have: what it takes to judge the same files again."""
_STEP: Final = "step"
"""Section that only the records of a promotion's steps have: from where to where, and who decided it."""
_CLOSE: Final = 1e-9
"""Relative difference that two machines' summation may make to a bound."""
_HASH: Final = re.compile(r"[0-9a-f]{64}")


class EvidenceError(ValueError):
    """A record is not what a gate wrote; the message lists everything that is wrong with it."""


def make_evidence(
    contract: Contract, stage: Stage, version: str, decision: Decision, verdicts: Sequence[Verdict], now: float
) -> dict[str, Any]:
    """The record of one step.

    Args:
        contract: The contract in force.
        stage: Stage that the kernel version was in.
        version: Short fingerprint of the inference kernel version.
        decision: What the gate said.
        verdicts: The verdicts it rests on.
        now: Unix time, seconds.

    Returns:
        A JSON object that `verify_evidence` accepts; numbers that are not finite are null.

    Raises:
        ValueError: If there is no verdict, or one was made under another contract.
    """
    if not verdicts:
        raise ValueError("evidence without verdicts proves nothing; pass those that the decision rests on")
    if {verdict.contract_hash for verdict in verdicts} != {contract.hash}:
        raise ValueError(f"a verdict was made under another contract than {contract.name!r} {contract.hash[:12]}")
    ordered = sorted(verdicts, key=lambda verdict: (verdict.cell, verdict.at))
    return _sealed(contract, stage, version, decision, [_verdict(verdict) for verdict in ordered], now)


def offline_evidence(gate: OfflineGate, text: str) -> dict[str, Any]:
    """The record of the offline stage: it also has the contract's text, the kernels' fields, and every file's checksum.

    Args:
        gate: What was asked, found and decided.
        text: The contract, as it is written.

    Returns:
        A JSON object that `verify_evidence` accepts, and `verify_recordings` together with the files.
    """
    rows = [
        _verdict(verdict) | {"recording": place}
        for place, judged in enumerate(gate.judged)
        for verdict in sorted(judged.verdicts, key=lambda verdict: verdict.cell)
    ]
    version = gate.inference.fingerprint
    more = {_OFFLINE: section(gate, text)}
    return _sealed(gate.contract, Stage.OFFLINE_CI, version, gate.decision, rows, gate.at, more)


def step_evidence(
    contract: Contract, promotion: Promotion, move: PromotionMove, verdicts: Sequence[Verdict], now: float
) -> dict[str, Any]:
    """The record of a step that the evaluator or a person took.

    Args:
        contract: The contract in force.
        promotion: The promotion, before the step.
        move: The step.
        verdicts: The evaluation that the gate's decision rests on, of any kernel versions; a person may force a version
            on that has no verdict yet.
        now: Unix time, seconds.

    Returns:
        A JSON object that `verify_evidence` accepts.
    """
    own = [one for one in verdicts if one.cell.kernel_inference == promotion.version]
    if move.decision.outcome is GateOutcome.ADVANCE:
        asked = {(clause.id, slice) for clause in contract.clauses for slice in (ALL, *contract.slices)}
        own = [one for one in own if (one.cell.clause, one.cell.slice) in asked]
    rows = [_verdict(one) for one in sorted(own, key=lambda one: (one.cell, one.at))]
    more = {_STEP: step_section(contract.promotion, promotion, move)}
    return _sealed(contract, move.before.stage, promotion.version, move.decision, rows, now, more)


def verify_recordings(record: Mapping[str, Any], files: Sequence[Path]) -> None:
    """Judge a record's recordings again, and accept it if everything comes out as it says.

    Args:
        record: What `offline_evidence` made.
        files: Files among which its recordings are; they are found by their checksums.

    Raises:
        EvidenceError: If the record does not verify by itself, a recording is not there, or a number differs by more
            than rounding.
    """
    verify_evidence(record)
    if _OFFLINE not in record:
        raise EvidenceError(f"the record is of stage {record['stage']}: it rests on no recordings")
    gate, text, problems = gate_again(record, files)
    if gate is not None:
        again = offline_evidence(gate, text)
        problems = [
            f"{place} is {_shown(said)} in the record, and {_shown(found)} from the recordings"
            for place, said, found in _differences(dict(record), again)
            if place != "checksum" and not place.startswith(("tool", "time")) and not place.endswith(".time")
        ]
    if problems:
        raise EvidenceError("; ".join(problems))


def verify_evidence(record: Mapping[str, Any]) -> None:
    """Accept a record, or say what is wrong with it.

    Checked: the checksum; that every field is there and no other; that each verdict follows from its own bound and
    limit, a FAIL that was followed over time excepted; that the decision does not contradict the verdicts. Of the
    offline stage, too: that the contract's text has the contract's hash and sets the limits; that the kernels' fields
    make the fingerprints; that the decision is the one that its terms and the verdicts lead to. Of a step: that it
    follows from the decision, or names a person and their reason.

    Raises:
        EvidenceError: If anything does not hold.
    """
    if not isinstance(record, Mapping) or record.get("format") != _FORMAT:
        raise EvidenceError(f"this is not a record of the format {_FORMAT}")
    problems = [f"{name} is missing" for name in sorted(_FIELDS - set(record))]
    problems += [f"{name} is not a field of this format" for name in sorted(set(record) - _FIELDS - {_OFFLINE, _STEP})]
    if not problems:
        try:
            problems = _problems(record)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            problems = [f"a field has another shape than kc-otel writes ({error!r})"]
    if problems:
        raise EvidenceError("; ".join(problems))


def _problems(record: Mapping[str, Any]) -> list[str]:
    problems = []
    if record["checksum"] != _checksum({name: value for name, value in record.items() if name != "checksum"}):
        problems.append("the checksum does not match: the record was changed after it was written")
    if not _HASH.fullmatch(record["contract"]["hash"]):
        problems.append("contract.hash is not 64 hex digits")
    statuses = set()
    for verdict in record["verdicts"]:
        status, limit = Status(verdict["status"]), verdict["limit"]
        statuses.add(status)
        where = f"{verdict['clause']} on {verdict['slice']}"
        none_seen = limit == verdict["estimate"] == 0  # of what none may be: how many there can be is no limit's matter
        within = verdict["upper"] is not None and verdict["upper"] <= limit
        if status is Status.PASS and not (within or none_seen):
            problems.append(f"{where} is PASS, but its upper bound is not at or below the limit")
        # What the evaluator follows over time fails by what it holds against the limit, not by one window's bound.
        followed = verdict["evidence"] is not None
        if status is Status.FAIL and not (followed or (verdict["lower"] is not None and verdict["lower"] > limit)):
            problems.append(f"{where} is FAIL, but its lower bound is not above the limit")
    if _OFFLINE in record:
        return problems + section_problems(record)
    outcome = GateOutcome(record["decision"]["outcome"])
    if outcome is GateOutcome.ADVANCE and statuses != {Status.PASS}:
        problems.append("the decision is to advance, but not every verdict is PASS")
    if outcome is GateOutcome.ROLLBACK and Status.FAIL not in statuses:
        problems.append("the decision is to roll back, but no verdict is FAIL")
    return problems + (step_problems(record) if _STEP in record else [])


def _sealed(
    contract: Contract,
    stage: Stage,
    version: str,
    decision: Decision,
    rows: Sequence[Mapping[str, Any]],
    now: float,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    record = {
        "format": _FORMAT,
        "time": rfc3339(now),
        "tool": {"name": "kc-otel", "version": installed_version("kc-otel")},
        "contract": {"name": contract.name, "version": contract.metadata.version, "hash": contract.hash},
        "kernel": version,
        "stage": stage.value,
        "decision": to_plain(decision),
        "verdicts": list(rows),
        **(more or {}),
    }
    return record | {"checksum": _checksum(record)}


def _differences(said: Any, found: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Places at which two JSON values differ by more than rounding."""
    if isinstance(said, dict) and isinstance(found, dict) and said.keys() == found.keys():
        for name in said:
            yield from _differences(said[name], found[name], f"{place}.{name}" if place else name)
    elif isinstance(said, list) and isinstance(found, list) and len(said) == len(found):
        for at, pair in enumerate(zip(said, found, strict=True)):
            yield from _differences(*pair, f"{place}[{at}]")
    elif isinstance(said, float) and isinstance(found, float):
        if not math.isclose(said, found, rel_tol=_CLOSE, abs_tol=_CLOSE * _CLOSE):
            yield place, said, found
    elif said != found:
        yield place, said, found


def _shown(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _verdict(verdict: Verdict) -> dict[str, Any]:
    cell = verdict.cell
    return {
        "clause": cell.clause,
        "slice": cell.slice,
        "kernels": {"train": cell.kernel_train, "inference": cell.kernel_inference},
        "status": verdict.status.value,
        "time": rfc3339(verdict.at),
        "limit": finite_or_none(verdict.limit),
        "estimate": finite_or_none(verdict.estimate),
        "lower": finite_or_none(verdict.lower),
        "upper": finite_or_none(verdict.upper),
        "evidence": finite_or_none(verdict.evidence),
        "samples": verdict.samples,
        "window": verdict.window,
        "method": verdict.method,
        "about": verdict.about,
    }


def _checksum(record: Mapping[str, Any]) -> str:
    canonical = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()
