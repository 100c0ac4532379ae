"""What evidence of the offline stage holds beyond verdicts, so that anybody can judge the same files again.

The section `offline` has the contract's text, both kernels spelled out, the gate's terms, and the checksum of every
recording. A verdict names its recording by its place in that list.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from kc_otel.contract.errors import ContractError
from kc_otel.contract.load import load_text
from kc_otel.contract.model import Contract
from kc_otel.contract.slices import Scalar
from kc_otel.judge.plain_json import to_plain
from kc_otel.judge.promotion.stages import Stage
from kc_otel.judge.verdict import Cell, Status, Verdict
from kc_otel.offline.gate.recorded_gate import (
    GatedRecording,
    GateTerms,
    OfflineGate,
    digest_of,
    gate_decision,
    gate_recordings,
    read_input,
)
from kc_otel.offline.gate.recorded_verdicts import RecordingVerdicts, UnjudgedClause
from kc_otel.offline.gate.sampling_terms import not_allowed
from kc_otel.record.kernel import Kernel
from kc_otel.recordings import Recording

__all__ = ["gate_again", "section", "section_problems"]

_NUMBERS: Final = ("limit", "estimate", "lower", "upper")


def section(gate: OfflineGate, text: str) -> dict[str, Any]:
    """The section of a gate, a JSON object.

    Args:
        gate: The gate.
        text: The contract, as it is written.
    """
    terms = gate.terms
    return {
        "contract": text,
        "kernels": {"train": gate.train.to_plain(), "inference": gate.inference.to_plain()},
        "terms": {
            "windows": terms.windows,
            "require": list(terms.require),
            "slices": list(terms.slices),
            "allow_unjudged": terms.allow_unjudged,
            "columns": dict(terms.columns),
            "sequential": terms.sequential,
        },
        "recordings": [
            {
                "name": about.name,
                "sha256": about.sha256,
                "size": about.size,
                "sequences": about.sequences,
                "tokens": about.tokens,
                "identical": about.identical,
                "unreadable": judged.unreadable,
                "mean_ratio": judged.mean_ratio,
                **({"sampling": dict(about.sampling)} if gate.contract.promotion.sampling else {}),
                "left_out": [{"clause": each.clause, "why": each.why} for each in judged.left_out],
            }
            for about, judged in zip(gate.inputs, gate.judged, strict=True)
        ],
    }


def section_problems(record: Mapping[str, Any]) -> list[str]:
    """What does not follow in a record with such a section: its contract, its kernels, its decision.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: If the section has another shape.
    """
    offline = record["offline"]
    try:
        contract = _contract(offline)
    except ContractError as error:
        return [f"the contract's text does not load: {error}"]
    problems = []
    if contract.hash != record["contract"]["hash"]:
        problems.append("the contract's text is not the contract of that hash")
    if (contract.name, contract.metadata.version) != (record["contract"]["name"], record["contract"]["version"]):
        problems.append("the contract's text has another name or version")
    if record["stage"] != Stage.OFFLINE_CI:
        problems.append("recordings are judged in stage offline-ci")
    train, inference = _kernels(offline)
    for about in offline["recordings"]:
        problems += _sampling_problems(about, contract.promotion.sampling)
    if inference.fingerprint != record["kernel"]:
        problems.append("the inference kernel's fields do not make the fingerprint of the record")
    judged: list[list[Verdict]] = [[] for _ in offline["recordings"]]
    at = datetime.fromisoformat(record["time"]).timestamp()
    for row in record["verdicts"]:
        if row["recording"] not in range(len(judged)):
            raise IndexError(f"there is no recording {row['recording']!r}")
        judged[row["recording"]].append(_verdict(row, contract, at))
        problems += _row_problems(row, contract, (train.fingerprint, inference.fingerprint))
    parts = [
        RecordingVerdicts(
            tuple(verdicts),
            tuple(UnjudgedClause(**each) for each in about["left_out"]),
            about["unreadable"],
            mean_ratio=about["mean_ratio"],
        )
        for verdicts, about in zip(judged, offline["recordings"], strict=True)
    ]
    decided = to_plain(gate_decision(contract, parts, record["kernel"], _terms(offline), at))
    # Rows are sorted by cell; the gate gave its reasons in the contract's order of slices.
    if _unordered(decided) != _unordered(record["decision"]):
        problems.append(
            f"the verdicts lead to {decided['outcome']!r}, and the decision is another or says other things"
        )
    return problems


def _unordered(decision: Mapping[str, Any]) -> dict[str, Any]:
    return {**decision, "missing": sorted(decision["missing"])}


def _sampling_problems(about: Mapping[str, Any], allowed: Mapping[str, Sequence[Scalar]]) -> list[str]:
    """Sampling parameters of a recording that the contract does not allow, and those that it has to name and does not.

    A contract that lists none asks for none.
    """
    if not allowed:
        return []
    said = about["sampling"]
    pairs = [(name, value) for name in {*allowed, *said} for value in said.get(name) or [None]]
    return sorted(f"{about['name']}: {why}" for name, value in pairs if (why := not_allowed(name, value, allowed)))


def _row_problems(row: Mapping[str, Any], contract: Contract, pair: tuple[str, str]) -> list[str]:
    """What one verdict's row says that the contract and the kernels do not."""
    where = f"{row['clause']} on {row['slice']}"
    problems = []
    clause = next((each for each in contract.clauses if each.id == row["clause"]), None)
    if clause is None or clause.limit_for(row["slice"]) != row["limit"]:
        problems.append(f"{where}: the contract sets no such limit")
    elif row["about"] != clause.about:
        problems.append(f"{where} is said to be about the {row['about']}, and the contract's clause is about another")
    if (row["kernels"]["train"], row["kernels"]["inference"]) != pair:
        problems.append(f"{where} is about other kernels")
    return problems


def gate_again(record: Mapping[str, Any], files: Sequence[Path]) -> tuple[OfflineGate | None, str, list[str]]:
    """Judge the recordings of a record again.

    Args:
        record: A record that verifies, with a section `offline`.
        files: Files among which its recordings are, found by their checksums.

    Returns:
        The gate, the contract's text, and no problems; or None, and which recordings are not among the files.

    Raises:
        ValueError: If a file cannot be read as a recording any more.
    """
    offline = record["offline"]
    terms = _terms(offline)
    found: list[tuple[GatedRecording, Recording]] = []
    problems = []
    known = {digest_of(path)[0]: path for path in files}
    for wanted in offline["recordings"]:
        path = known.get(wanted["sha256"])
        if path is None:
            problems.append(f"no file has the checksum of {wanted['name']}: it was changed, or is not there")
            continue
        about, recording = read_input(path, terms.columns)
        found.append(
            (
                GatedRecording(
                    wanted["name"],
                    about.sha256,
                    about.size,
                    about.sequences,
                    about.tokens,
                    about.identical,
                    about.coarse,
                ),
                recording,
            )
        )
    if problems:
        return None, offline["contract"], problems
    at = datetime.fromisoformat(record["time"]).timestamp()
    gate = gate_recordings(_contract(offline), found, _kernels(offline), terms, at)
    return gate, offline["contract"], []


def _contract(offline: Mapping[str, Any]) -> Contract:
    return load_text(offline["contract"], "the contract of the record")


def _kernels(offline: Mapping[str, Any]) -> tuple[Kernel, Kernel]:
    return Kernel.from_plain(offline["kernels"]["train"]), Kernel.from_plain(offline["kernels"]["inference"])


def _terms(offline: Mapping[str, Any]) -> GateTerms:
    terms = offline["terms"]
    return GateTerms(
        terms["windows"],
        tuple(terms["require"]),
        tuple(terms["slices"]),
        terms["allow_unjudged"],
        terms["columns"],
        terms["sequential"],
    )


def _verdict(row: Mapping[str, Any], contract: Contract, at: float) -> Verdict:
    numbers = {name: math.nan if row[name] is None else row[name] for name in _NUMBERS}
    if row["upper"] is None and row["samples"]:
        numbers["upper"] = math.inf  # JSON has no infinity; an interval has an upper end or none
    if row["lower"] is None and row["samples"]:
        numbers["lower"] = -math.inf
    kernels = row["kernels"]
    return Verdict(
        cell=Cell(contract.name, row["clause"], row["slice"], kernels["train"], kernels["inference"]),
        status=Status(row["status"]),
        at=at,
        samples=row["samples"],
        window=row["window"],
        method=row["method"],
        reason="",
        contract_version=contract.metadata.version,
        contract_hash=contract.hash,
        about=row["about"],
        observed=row["samples"] > 0,
        **numbers,
    )
