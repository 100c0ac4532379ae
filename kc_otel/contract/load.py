"""Load contracts from files, and report every problem at its line.

A contract is refused as a whole: a team that reads "limit: 4" and gets no alarm is worse off than one whose deploy
fails. What takes two places of a contract to see is reported once each field is sound.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from kc_otel.contract.errors import ContractError, ContractProblem, LintFinding, field_path
from kc_otel.contract.model import Contract
from kc_otel.contract.yaml_document import Document, parse

MAX_BYTES: Final = 256 * 1024
"""Largest file accepted. A long contract has some kilobytes; the YAML parser takes about two seconds for this much."""
_STDIN: Final = "-"
_SUFFIXES: Final = frozenset({".yaml", ".yml"})
_SIZE_REMEDY: Final = f"; a contract has at most {MAX_BYTES // 1024} KiB"
_REASONS: Final[dict[type[OSError], str]] = {
    FileNotFoundError: "no such file; give the path of a contract or of a folder of contracts",
    IsADirectoryError: "a folder; give the path of one contract",
}


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of checking one file: its text, its contract unless there is an error, and its problems by line."""

    source: str
    contract: Contract | None
    problems: tuple[ContractProblem, ...] = ()
    text: str = field(default="", repr=False)
    document: Document | None = field(default=None, repr=False, compare=False)

    def with_findings(self, findings: Iterable[LintFinding]) -> Checked:
        """Add findings about the contract, at their lines; an error rejects it."""
        line = self.document.line if self.document else lambda _: 0
        more = [
            ContractProblem(self.source, line(found.loc), field_path(found.loc), found.message, found.level)
            for found in findings
        ]
        refused = any(problem.level == "error" for problem in more)
        problems = tuple(sorted((*self.problems, *more)))
        return replace(self, contract=None if refused else self.contract, problems=problems)

    def sound(self) -> Contract:
        """The contract. Raises ContractError with every problem, if one is an error."""
        if self.contract is None:
            raise ContractError(self.problems)
        return self.contract


def load(path: str | os.PathLike[str]) -> Contract:
    """The contract in a file; `-` reads standard input. Raises ContractError with every problem."""
    return check(path).sound()


def load_text(text: str, source: str = "<text>") -> Contract:
    """The contract in YAML text, whose problems name the source. Raises ContractError with every problem."""
    return check_text(text, source).sound()


def load_all(paths: Iterable[str | os.PathLike[str]]) -> list[Contract]:
    """The contracts of files and folders, at any depth. Raises ContractError with every problem."""
    results = check_all(paths)
    contracts = [result.contract for result in results if result.contract is not None]
    if len(contracts) < len(results):
        raise ContractError(problem for result in results for problem in result.problems)
    return contracts


def read_contract(path: str | os.PathLike[str]) -> Contract:
    """Read a contract for an engine, checking its fields only; if one is wrong, `load` reports every problem."""
    try:
        document, _ = parse(_read(os.fspath(path)), "")
        if document is not None:
            return Contract.model_validate(document.data)
    except (_UnreadableError, ValidationError):
        pass
    return load(path)


def check(path: str | os.PathLike[str]) -> Checked:
    """Read, validate and lint one file."""
    source = os.fspath(path)
    try:
        return check_text(_read(source), source)
    except _UnreadableError as error:
        return Checked(source, None, (ContractProblem(source, 0, "", str(error)),))


def check_text(text: str, source: str = "<text>") -> Checked:
    """Validate and lint YAML text."""
    document, problems = parse(text, source)
    if document is None:
        return Checked(source, None, tuple(problems), text)
    try:
        contract = Contract.model_validate(document.data)
    except ValidationError as error:
        from kc_otel.contract.field_errors import explain  # noqa: PLC0415 - sound contracts, as engines have, need none

        return Checked(source, None, tuple(sorted(explain(error, document, source))), text, document)
    from kc_otel.contract.lint import lint  # noqa: PLC0415 - engines do not lint

    return Checked(source, contract, (), text, document).with_findings(lint(contract))


def check_all(paths: Iterable[str | os.PathLike[str]]) -> list[Checked]:
    """Check files and folders; the second contract of a name is an error."""
    results: list[Checked] = []
    homes: dict[str, str] = {}
    for source, unreadable in _files(paths):
        result = Checked(source, None, (ContractProblem(source, 0, "", unreadable),)) if unreadable else check(source)
        if result.contract is not None:
            name = result.contract.name
            home = homes.setdefault(name, source)
            if home != source:
                message = f"{name!r} is already the name of {home}, and metrics carry that name; rename one"
                result = result.with_findings([LintFinding(("metadata", "name"), message)])
        results.append(result)
    return results


class _UnreadableError(Exception):
    """A file's content cannot be had; the message says why."""


def _read(source: str) -> str:
    try:
        if source == _STDIN:
            content = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(source).open("rb") as file:
                status = os.fstat(file.fileno())
                if stat.S_ISREG(status.st_mode) and status.st_size > MAX_BYTES:
                    raise _UnreadableError(f"too large ({status.st_size:,} bytes){_SIZE_REMEDY}")
                content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _UnreadableError(_REASONS.get(type(error), f"cannot be read: {error.strerror or error}")) from None
    except ValueError as error:  # a path with a NUL character
        raise _UnreadableError(f"cannot be opened: {error}") from None
    if len(content) > MAX_BYTES:
        raise _UnreadableError(f"too large{_SIZE_REMEDY}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _UnreadableError(f"not UTF-8 (byte {error.start}, line {line}); save the file as UTF-8") from None


def _files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[tuple[str, str]]:
    """Every file once, with an empty text or the reason why it cannot be one."""
    seen: set[str] = set()
    for path in paths:
        given = os.fspath(path)
        found = list(_walk(given)) if given != _STDIN and os.path.isdir(given) else [given]  # noqa: PTH112
        if not found:
            yield given, "the folder has no contract; contracts are files that end in .yaml or .yml"
        for file in found:
            real = file if file == _STDIN else os.path.realpath(file)
            if real not in seen:
                seen.add(real)
                yield file, ""


def _walk(folder: str) -> Iterator[str]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if Path(name).suffix in _SUFFIXES and not name.startswith("."):
                yield str(Path(parent) / name)
