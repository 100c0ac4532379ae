"""Evidence on disk: a .json file, or `evidence.json` in a folder, beside what it was made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kc_otel.contract.errors import ContractError
from kc_otel.contract.json_text import read_json_text
from kc_otel.contract.load import load_text
from kc_otel.offline.gate.recorded_gate import digest_of

_NAME: Final = "evidence.json"
_CONTRACT: Final = "contract.yaml"


def evidence_file(where: Path) -> Path:
    """The record's file, given that file or the folder that it is in."""
    return where / _NAME if where.is_dir() else where


def write_evidence(record: Mapping[str, Any], where: Path, contract: str | None = None) -> Path:
    """Write a record into a .json file, or into a folder with the contract's text; returns the record's file."""
    file = where if where.suffix == ".json" else where / _NAME
    if contract is not None and file != where:
        write_text(file.with_name(_CONTRACT), contract)
    write_text(file, json.dumps(record, indent=2, sort_keys=True, allow_nan=False) + "\n")
    return file


def read_evidence(file: Path) -> Any:
    """Read a record's file, any JSON; a ValueError if it is none."""
    try:
        return read_json_text(file.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"is not a gate's evidence, which is JSON ({error}); `kc-otel gate run ... --evidence FILE` writes it"
        ) from None


def beside_problems(record: Mapping[str, Any], file: Path) -> list[str]:
    """Return the files beside a record that do not match it: the contract, the recording."""
    problems = []
    contract = file.with_name(_CONTRACT)
    if file.name == _NAME and contract.exists():
        text = contract.read_text(encoding="utf-8", errors="replace")
        try:
            same = load_text(text, _CONTRACT).hash == record["contract"]["hash"]
        except ContractError:
            same = False
        if not same or text != record.get("offline", {}).get("contract", text):
            problems.append(
                f"{contract.name} is not the contract of the record: it was changed, or belongs to another gate"
            )
    recording = recording_beside(file.parent if file.name == _NAME else file)
    if recording.exists() and "offline" in record:
        known = {entry["sha256"] for entry in record["offline"]["recordings"]}
        if digest_of(recording)[0] not in known:
            problems.append(
                f"{recording.name} is not one of the record's recordings: it was changed, or belongs to another gate"
            )
    return problems


def recording_beside(where: Path) -> Path:
    """Return the path of the recording made for this evidence, which names its checksum."""
    return where.with_suffix(".npz") if where.suffix == ".json" else where / "recording.npz"


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8, and the folders that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
