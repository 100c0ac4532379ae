"""Evidence on disk: a .json file, or `evidence.json` in a folder, beside what it was made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["evidence_file", "recording_beside", "write_evidence", "write_text"]

_NAME = "evidence.json"


def evidence_file(where: Path) -> Path:
    """The record's file, given that file or the folder that it is in."""
    return where / _NAME if where.is_dir() else where


def write_evidence(record: Mapping[str, Any], where: Path, contract: str | None = None) -> Path:
    """Write a record, and into a folder the contract's text too.

    Args:
        record: A record of `kc_otel.offline.gate.evidence`.
        where: A .json file, or a folder.
        contract: The contract, as it is written.

    Returns:
        The record's file.

    Raises:
        OSError: If it cannot be written.
    """
    file = where if where.suffix == ".json" else where / _NAME
    if contract is not None and file != where:
        write_text(file.with_name("contract.yaml"), contract)
    write_text(file, json.dumps(record, indent=2, sort_keys=True, allow_nan=False) + "\n")
    return file


def recording_beside(where: Path) -> Path:
    """Where a recording is kept that is made for this evidence, which names its checksum."""
    return where.with_suffix(".npz") if where.suffix == ".json" else where / "recording.npz"


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8, and the folders that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
