"""From files to contracts, with every problem of every file at its line.

A contract is refused as a whole: a team that reads "limit: 4" and gets no alarm is worse off than one whose deploy
fails. What can be said at once is said at once, so that a file is corrected in one go.
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
from kc_otel.contract.lint import circles, lint
from kc_otel.contract.messages import explain
from kc_otel.contract.model import Contract
from kc_otel.contract.repair import repair
from kc_otel.contract.yaml_document import Document, parse

__all__ = ["MAX_BYTES", "Checked", "check", "check_all", "check_text", "load", "load_all", "load_source", "load_text"]

MAX_BYTES: Final = 256 * 1024
"""Largest file accepted. A long contract has some kilobytes; the YAML parser takes about two seconds for this much."""
_SUFFIXES: Final = frozenset({".yaml", ".yml"})
_STDIN: Final = "-"


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of one file.

    Attributes:
        source: Path as it was given, or another name.
        contract: The contract, unless there is an error.
        problems: Errors and warnings, by line.
        document: The file with its lines, where it could be read.
    """

    source: str
    contract: Contract | None
    problems: tuple[ContractProblem, ...] = ()
    document: Document | None = field(default=None, repr=False, compare=False)

    def with_findings(self, findings: Iterable[LintFinding]) -> Checked:
        """With more findings about the contract, at their lines; an error refuses it."""
        more = [
            ContractProblem(
                self.source,
                0 if self.document is None else self.document.line(found.loc),
                field_path(found.loc),
                found.message,
                found.level,
            )
            for found in findings
        ]
        refused = any(problem.level == "error" for problem in more)
        return replace(
            self, contract=None if refused else self.contract, problems=tuple(sorted((*self.problems, *more)))
        )


def load(path: str | os.PathLike[str]) -> Contract:
    """The contract in a file; `-` reads standard input.

    Raises:
        ContractError: With every problem of the file, when there is an error among them.
    """
    return _wanted(check(path))


def load_source(path: str | os.PathLike[str]) -> tuple[Contract, str]:
    """The contract in a file, and its text; `-` reads standard input.

    Raises:
        ContractError: With every problem of the file, when there is an error among them.
    """
    source = os.fspath(path)
    try:
        text = _read(source)
    except _Unreadable as error:
        raise ContractError([ContractProblem(source, 0, "", str(error))]) from None
    return load_text(text, source), text


def load_text(text: str, source: str = "<text>") -> Contract:
    """The contract in YAML text.

    Args:
        text: YAML.
        source: Name that problems carry instead of a path.

    Raises:
        ContractError: With every problem of the text, when there is an error among them.
    """
    return _wanted(check_text(text, source))


def load_all(paths: Iterable[str | os.PathLike[str]]) -> list[Contract]:
    """The contracts of files and folders, in the order given; a folder's files (.yaml, .yml, at any depth) by name.

    Raises:
        ContractError: With every problem of every file, when there is an error among them.
    """
    results = check_all(paths)
    contracts = [result.contract for result in results if result.contract is not None]
    if len(contracts) < len(results):
        raise ContractError(problem for result in results for problem in result.problems)
    return contracts


def check(path: str | os.PathLike[str]) -> Checked:
    """Read, validate and lint one file."""
    source = os.fspath(path)
    try:
        text = _read(source)
    except _Unreadable as error:
        return Checked(source, None, (ContractProblem(source, 0, "", str(error)),))
    return check_text(text, source)


def check_text(text: str, source: str = "<text>") -> Checked:
    """Validate and lint YAML text."""
    document, problems = parse(text, source)
    contract = None
    if document is not None:
        try:
            contract = Contract.model_validate(document.data)
        except ValidationError as error:
            problems += explain(error, document, source)
            findings = _lint_the_rest(document, error)
        else:
            findings = lint(contract)
        # What could not be read has a value that stands in for it, about which there is nothing to say.
        unread = {(problem.line, problem.field) for problem in problems}
        problems += [
            ContractProblem(source, document.line(found.loc), field_path(found.loc), found.message, found.level)
            for found in findings
            if (document.line(found.loc), field_path(found.loc)) not in unread
        ]
    refused = any(problem.level == "error" for problem in problems)
    return Checked(source, None if refused else contract, tuple(sorted(problems)), document)


def _lint_the_rest(document: Document, error: ValidationError) -> list[LintFinding]:
    """Errors that lint finds in the parts of a contract that are sound."""
    repaired = repair(document.data, [tuple(detail["loc"]) for detail in error.errors(include_url=False)])
    if repaired is None:
        return []
    data, made_up = repaired
    try:
        contract = Contract.model_validate(data)
    except ValidationError:
        return []
    return [
        found
        for found in lint(contract)
        if found.level == "error"
        and (found.loc[-1:] == ("id",) or not any(found.loc[: len(loc)] == loc for loc in made_up))
    ]


def check_all(paths: Iterable[str | os.PathLike[str]]) -> list[Checked]:
    """Read, validate and lint files and folders.

    Two contracts of one name are an error of the second, and so is a route that closes a circle with those before it.
    """
    results: list[Checked] = []
    homes: dict[str, str] = {}
    for source, unreadable in _files(paths):
        result = Checked(source, None, (ContractProblem(source, 0, "", unreadable),)) if unreadable else check(source)
        if result.contract is not None:
            name = result.contract.name
            if name in homes:
                message = f"{name!r} is already the name of {homes[name]}; metrics could not tell them apart"
                problem = ContractProblem(source, 0, "metadata.name", message)
                result = Checked(source, None, (problem, *result.problems))
            homes.setdefault(name, source)
        results.append(result)
    sound = [place for place, result in enumerate(results) if result.contract is not None]
    contracts = [result.contract for result in results if result.contract is not None]
    for index, finding in circles(contracts):
        place = sound[index]
        results[place] = results[place].with_findings([finding])
    return results


def _wanted(result: Checked) -> Contract:
    if result.contract is None:
        raise ContractError(result.problems)
    return result.contract


class _Unreadable(Exception):  # noqa: N818 - becomes a Problem within this file
    """A file's content cannot be had; the message says why."""


def _files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[tuple[str, str]]:
    """Every file once, with an empty text or the reason why it cannot be one."""
    seen: set[str] = set()
    for path in paths:
        given = os.fspath(path)
        found = list(_walk(given)) if given != _STDIN and os.path.isdir(given) else [given]  # noqa: PTH112
        if not found:
            yield given, "no contract in this folder; contracts end in .yaml or .yml"
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


def _read(source: str) -> str:
    try:
        if source == _STDIN:
            content = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(source).open("rb") as file:
                status = os.fstat(file.fileno())
                if stat.S_ISREG(status.st_mode) and status.st_size > MAX_BYTES:
                    raise _Unreadable(_too_large(f"{status.st_size:,} bytes"))
                content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _Unreadable(_reason(error)) from None
    except ValueError as error:  # a path with a NUL character
        msg = f"cannot be opened: {error}"
        raise _Unreadable(msg) from None
    if len(content) > MAX_BYTES:
        raise _Unreadable(_too_large("too large"))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        msg = f"not UTF-8 (byte {error.start}, line {line}); save the file as UTF-8"
        raise _Unreadable(msg) from None


def _reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file; give the path of a contract or of a folder of contracts"
    if isinstance(error, IsADirectoryError):
        return "a folder; give the path of one contract"
    return f"cannot be read: {error.strerror or error}"


def _too_large(size: str) -> str:
    return f"{size}; a contract has at most {MAX_BYTES // 1024} KiB"
