"""A contract's file for a program that applies it, such as an engine: parsed and validated; `load.py` lints it, too."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from kc_otel.contract.model import Contract
from kc_otel.contract.yaml_document import parse

MAX_BYTES: Final = 256 * 1024
"""Largest file accepted. A long contract has some kilobytes; the YAML parser takes about two seconds for this much."""
STDIN: Final = "-"
_AT_MOST: Final = f"; a contract has at most {MAX_BYTES // 1024} KiB"
_REASONS: Final[dict[type[OSError], str]] = {
    FileNotFoundError: "no such file; give the path of a contract or of a folder of contracts",
    IsADirectoryError: "a folder; give the path of one contract",
}


class UnreadableError(Exception):
    """A file's content cannot be had; the message says why."""


def read_contract(path: str | os.PathLike[str]) -> Contract:
    """The contract in a file. Raises ContractError with every problem."""
    source = os.fspath(path)
    try:
        document, problems = parse(read_text(source), source)
        if document is not None and not problems:
            return Contract.model_validate(document.data)
    except (UnreadableError, ValidationError):
        pass
    from kc_otel.contract.load import load  # noqa: PLC0415 - only for the words of an error

    return load(source)


def read_text(source: str) -> str:
    """The text of a contract's file; `-` reads standard input. Raises UnreadableError."""
    try:
        if source == STDIN:
            content = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(source).open("rb") as file:
                status = os.fstat(file.fileno())
                if stat.S_ISREG(status.st_mode) and status.st_size > MAX_BYTES:
                    raise UnreadableError(f"too large ({status.st_size:,} bytes){_AT_MOST}")
                content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UnreadableError(_REASONS.get(type(error), f"cannot be read: {error.strerror or error}")) from None
    except ValueError as error:  # a path with a NUL character
        raise UnreadableError(f"cannot be opened: {error}") from None
    if len(content) > MAX_BYTES:
        raise UnreadableError(f"too large{_AT_MOST}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UnreadableError(f"not UTF-8 (byte {error.start}, line {line}); save the file as UTF-8") from None
