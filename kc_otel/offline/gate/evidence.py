"""Evidence of the offline stage: its section `offline` holds what it takes to judge the same files again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from kc_otel.contract.errors import ContractError
from kc_otel.contract.load import load_text
from kc_otel.contract.model import Contract
from kc_otel.contract.plain_text import read_json_text
from kc_otel.contract.slices import ALL, Scalar
from kc_otel.judge.plain_json import to_plain
from kc_otel.judge.promotion.gate_evidence import (
    FORMAT,
    OFFLINE_SECTION,
    EvidenceError,
    sealed,
    verdict_row,
    verify_record,
)
from kc_otel.judge.promotion.stages import Stage
from kc_otel.judge.sample_sizes import observations_to_pass
from kc_otel.judge.verdict import Cell, Status, Verdict
from kc_otel.offline.gate.recorded_gate import (
    GateTerms,
    OfflineGate,
    gate_decision,
    gate_recordings,
    not_allowed,
    read_input,
)
from kc_otel.offline.gate.recorded_verdicts import RecordingVerdicts, UnjudgedClause
from kc_otel.record.kernel import Kernel
from kc_otel.recordings.recording_files import digest_of

_NUMBER_FIELDS: Final = ("limit", "estimate", "lower", "upper")
_RELATIVE_TOLERANCE: Final = 1e-9
"""Relative difference that two machines' summation may make to a bound."""


def offline_evidence(gate: OfflineGate, text: str) -> dict[str, Any]:
    """The record of the offline stage, which `verify_evidence` accepts, and `verify_recordings` with the files."""
    rows = [
        verdict_row(gate.contract, verdict) | {"recording": place}
        for place, of in enumerate(gate.inputs)
        for verdict in sorted(of.judged.verdicts, key=lambda verdict: verdict.cell)
    ]
    version = gate.inference.fingerprint
    more = {OFFLINE_SECTION: _section(gate, text)}
    return sealed(gate.contract, Stage.OFFLINE_CI, version, gate.decision, rows, gate.at, more)


def verify_evidence(record: Mapping[str, Any]) -> None:
    """Accept a record of any stage, or raise an EvidenceError that says what is wrong with it; see `verify_record`."""
    verify_record(record, section_problems)


def verify_recordings(record: Mapping[str, Any], files: Sequence[Path]) -> None:
    """Judge a record's recordings again, found by their checksums, or raise an EvidenceError that says what differs."""
    verify_evidence(record)
    if OFFLINE_SECTION not in record:
        raise EvidenceError(f"the record is of stage {record['stage']}, which has no recordings")
    offline, known = record["offline"], {digest_of(path): path for path in files}
    if lost := [about["name"] for about in offline["recordings"] if about["sha256"] not in known]:
        said = "it was changed, or is missing"
        raise EvidenceError("; ".join(f"no file has the checksum of {name}: {said}" for name in lost))
    terms = _terms(offline["terms"])
    found = [replace(read_input(known[of["sha256"]], terms), name=of["name"]) for of in offline["recordings"]]
    at = datetime.fromisoformat(record["time"]).timestamp()
    gate = gate_recordings(_contract(offline), found, _kernels(offline), terms, at)
    problems = [
        f"{place} is {_shown(said)} in the record, and {_shown(found)} from the recordings"
        for place, said, found in _differences(dict(record), offline_evidence(gate, offline["contract"]))
        if place != "checksum" and not place.startswith(("tool", "time")) and not place.endswith(".time")
    ]
    if problems:
        raise EvidenceError("; ".join(problems))


def _section(gate: OfflineGate, text: str) -> dict[str, Any]:
    return {
        "contract": text,
        "kernels": {"train": gate.train.to_plain(), "inference": gate.inference.to_plain()},
        "terms": to_plain(gate.terms),
        "recordings": [
            {
                **{name: getattr(of, name) for name in ("name", "sha256", "size")},
                "sequences": of.recording.lengths.size,
                "tokens": of.recording.train.size,
                "identical": of.recording.identical,
                "unreadable": of.judged.unreadable,
                "prompts": of.judged.prompts,
                **({"sampling": dict(of.sampling)} if gate.contract.promotion.sampling else {}),
                "left_out": to_plain(of.judged.left_out),
            }
            for of in gate.inputs
        ],
    }


def section_problems(record: Mapping[str, Any]) -> list[str]:
    """Hold a record's contract, kernels and decision against each other; another shape raises whatever it may."""
    offline = record["offline"]
    try:
        contract = _contract(offline)
    except ContractError as error:
        return [f"the contract's text does not load: {error}"]
    problems = []
    if contract.hash != record["contract"]["hash"]:
        problems.append("the contract's text does not match the hash")
    if (contract.name, contract.metadata.version) != (record["contract"]["name"], record["contract"]["version"]):
        problems.append("the contract's text has another name or version")
    if record["stage"] != Stage.OFFLINE_CI:
        problems.append("recordings are judged in stage offline-ci")
    train, inference = _kernels(offline)
    for about in offline["recordings"]:
        problems += _sampling_problems(about, contract.promotion.sampling)
    if inference.fingerprint != record["kernel"]:
        problems.append("the inference kernel's fields do not match the fingerprint of the record")
    judged: list[list[Verdict]] = [[] for _ in offline["recordings"]]
    at = datetime.fromisoformat(record["time"]).timestamp()
    for row in record["verdicts"]:
        if row["recording"] not in range(len(judged)):
            raise IndexError(f"there is no recording {row['recording']!r}")
        judged[row["recording"]].append(_verdict(row, contract, at))
        problems += _row_problems(row, contract, (train.fingerprint, inference.fingerprint))
    problems += _missing(record["verdicts"], contract)
    parts = [
        RecordingVerdicts(
            tuple(verdicts), tuple(UnjudgedClause(**row) for row in about["left_out"]), about["unreadable"]
        )
        for verdicts, about in zip(judged, offline["recordings"], strict=True)
    ]
    decided = to_plain(gate_decision(contract, parts, record["kernel"], _terms(offline["terms"]), at))
    # Rows are sorted by cell; the gate gave its reasons in the contract's order of slices.
    told, told_again = ({**of, "missing": sorted(of["missing"])} for of in (record["decision"], decided))
    if told != told_again:
        problems.append(f"the verdicts lead to {decided['outcome']!r}, but the recorded decision differs")
    return problems


def _sampling_problems(about: Mapping[str, Any], allowed: Mapping[str, Sequence[Scalar]]) -> list[str]:
    """Sampling parameters of a recording that the contract does not allow, and those that it lists and are not said."""
    if not allowed:
        return []
    said = about["sampling"]
    pairs = [(name, value) for name in {*allowed, *said} for value in said.get(name) or [None]]
    return sorted(f"{about['name']}: {why}" for name, value in pairs if (why := not_allowed(name, value, allowed)))


def _row_problems(row: Mapping[str, Any], contract: Contract, pair: tuple[str, str]) -> list[str]:
    where = f"{row['clause']} on {row['slice']}"
    problems = []
    clause = next((candidate for candidate in contract.clauses if candidate.id == row["clause"]), None)
    if clause is None or clause.limit_for(row["slice"]) != row["limit"]:
        problems.append(f"{where}: the contract sets no such limit")
    elif row["about"] != clause.about:
        problems.append(f"{where}: `about` is {row['about']}, and the contract's clause is about the {clause.about}")
    elif row.get("quantity") != contract.quantity_digests.get((clause.id, row["slice"])):
        problems.append(f"{where}: `quantity` is not the digest of what the contract's clause measures")
    elif row["status"] == Status.PASS and row["samples"] < (
        least := observations_to_pass(contract, clause, row["slice"]).minimum
    ):
        problems.append(f"{where} is a PASS with {row['samples']:,} observations, and the contract asks for {least:,}")
    if (row["kernels"]["train"], row["kernels"]["inference"]) != pair:
        problems.append(f"{where} is about other kernels")
    return problems


def _missing(rows: Sequence[Mapping[str, Any]], contract: Contract) -> list[str]:
    """Slices of which a clause that was judged on a recording has no verdict."""
    judged: dict[tuple[int, str], set[str]] = {}
    for row in rows:
        judged.setdefault((row["recording"], row["clause"]), set()).add(row["slice"])
    return [
        f"{clause} on {slice} has no verdict, and was judged on other slices"
        for (_, clause), slices in sorted(judged.items())
        for slice in (ALL, *contract.slices)
        if slice not in slices
    ]


def _contract(offline: Mapping[str, Any]) -> Contract:
    return load_text(offline["contract"], "the contract of the record")


def _kernels(offline: Mapping[str, Any]) -> tuple[Kernel, Kernel]:
    return Kernel(**offline["kernels"]["train"]), Kernel(**offline["kernels"]["inference"])


def _terms(of: Mapping[str, Any]) -> GateTerms:
    return GateTerms(tuple(of["require"]), tuple(of["slices"]), of["columns"], of["sequential"], of["attributes"])


def _verdict(row: Mapping[str, Any], contract: Contract, at: float) -> Verdict:
    numbers: dict[str, Any] = {name: math.nan if row[name] is None else row[name] for name in _NUMBER_FIELDS}
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


def _differences(said: Any, found: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Places at which two JSON values differ by more than rounding."""
    if isinstance(said, dict) and isinstance(found, dict) and said.keys() == found.keys():
        for name in said:
            yield from _differences(said[name], found[name], f"{place}.{name}" if place else name)
    elif isinstance(said, list) and isinstance(found, list) and len(said) == len(found):
        for at, pair in enumerate(zip(said, found, strict=True)):
            yield from _differences(*pair, f"{place}[{at}]")
    elif isinstance(said, float) and isinstance(found, float):
        if not math.isclose(said, found, rel_tol=_RELATIVE_TOLERANCE, abs_tol=_RELATIVE_TOLERANCE**2):
            yield place, said, found
    elif said != found:
        yield place, said, found


def _shown(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 80 else f"{text[:77]}..."


def evidence_file(where: Path) -> Path:
    """The record's file: a .json file itself, or the one in a folder."""
    return where if where.suffix == ".json" or where.is_file() else where / "evidence.json"


def recording_beside(where: Path) -> Path:
    """Return the path of the recording made for evidence that is written here."""
    return where.with_suffix(".npz") if where.suffix == ".json" else where / "recording.npz"


def read_evidence(file: Path) -> Any:
    """Read a record's file, any JSON; a ValueError if it is none."""
    try:
        return read_json_text(file.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"is not a gate's evidence, which is JSON ({error}); `kc-otel gate run ... --evidence FILE` writes it"
        ) from None


def remove_evidence(where: Path) -> None:
    """Remove a record that a gate wrote; a ValueError for a file of anything else."""
    file = evidence_file(where)
    if not file.exists():
        return
    try:
        format = read_evidence(file)["format"]
    except (ValueError, LookupError, TypeError):
        format = ""
    if format != FORMAT:
        raise ValueError(f"--evidence: {file} exists and is no gate's evidence; name another file, or remove it")
    file.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8, and the folders that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
