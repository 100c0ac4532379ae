"""Load contracts from files, and report every problem at its line.

A contract is refused as a whole: a team that reads "limit: 4" and gets no alarm is worse off than one whose deploy
fails. What takes two places of a contract to see is reported once each field is sound.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from kc_otel.contract.errors import ContractError, ContractProblem, LintFinding, field_path
from kc_otel.contract.lint import circles, lint
from kc_otel.contract.model import Contract
from kc_otel.contract.read import STDIN, UnreadableError, read_text
from kc_otel.contract.yaml_document import Document, parse

_SUFFIXES: Final = frozenset({".yaml", ".yml"})


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of checking one file: its contract unless there is an error, and its problems by line."""

    source: str
    contract: Contract | None
    problems: tuple[ContractProblem, ...] = ()
    document: Document | None = field(default=None, repr=False, compare=False)

    def with_findings(self, findings: Iterable[LintFinding]) -> Checked:
        """Add findings about the contract, at their lines; an error rejects it."""
        more = _problems(self.source, self.document, findings)
        refused = any(problem.level == "error" for problem in more)
        return replace(
            self, contract=None if refused else self.contract, problems=tuple(sorted((*self.problems, *more)))
        )


def load(path: str | os.PathLike[str]) -> Contract:
    """The contract in a file; `-` reads standard input. Raises ContractError with every problem."""
    return load_source(path)[0]


def load_source(path: str | os.PathLike[str]) -> tuple[Contract, str]:
    """The contract in a file, and its text. Raises ContractError with every problem."""
    source = os.fspath(path)
    try:
        text = read_text(source)
    except UnreadableError as error:
        raise ContractError([ContractProblem(source, 0, "", str(error))]) from None
    return load_text(text, source), text


def load_text(text: str, source: str = "<text>") -> Contract:
    """The contract in YAML text, whose problems name the source. Raises ContractError with every problem."""
    result = check_text(text, source)
    if result.contract is None:
        raise ContractError(result.problems)
    return result.contract


def load_all(paths: Iterable[str | os.PathLike[str]]) -> list[Contract]:
    """The contracts of files and folders, at any depth. Raises ContractError with every problem."""
    results = check_all(paths)
    contracts = [result.contract for result in results if result.contract is not None]
    if len(contracts) < len(results):
        raise ContractError(problem for result in results for problem in result.problems)
    return contracts


def check(path: str | os.PathLike[str]) -> Checked:
    """Read, validate and lint one file."""
    source = os.fspath(path)
    try:
        text = read_text(source)
    except UnreadableError as error:
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
            from kc_otel.contract.messages import explain  # noqa: PLC0415 - sound contracts, as engines have, need none

            problems += explain(error, document, source)
        else:
            # What could not be read has a value that stands in for it, about which there is nothing to say.
            unread = {(problem.line, problem.field) for problem in problems}
            found = _problems(source, document, lint(contract))
            problems += [problem for problem in found if (problem.line, problem.field) not in unread]
    refused = any(problem.level == "error" for problem in problems)
    return Checked(source, None if refused else contract, tuple(sorted(problems)), document)


def _problems(source: str, document: Document | None, findings: Iterable[LintFinding]) -> list[ContractProblem]:
    return [
        ContractProblem(
            source,
            0 if document is None else document.line(found.loc),
            field_path(found.loc),
            found.message,
            found.level,
        )
        for found in findings
    ]


def check_all(paths: Iterable[str | os.PathLike[str]]) -> list[Checked]:
    """Check files and folders; the second contract of a name is an error, and a route that closes a circle."""
    results: list[Checked] = []
    homes: dict[str, str] = {}
    for source, unreadable in _files(paths):
        result = Checked(source, None, (ContractProblem(source, 0, "", unreadable),)) if unreadable else check(source)
        if result.contract is not None:
            name = result.contract.name
            if name in homes:
                message = f"{name!r} is already the name of {homes[name]}, and metrics carry that name; rename one"
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


def _files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[tuple[str, str]]:
    """Every file once, with an empty text or the reason why it cannot be one."""
    seen: set[str] = set()
    for path in paths:
        given = os.fspath(path)
        found = list(_walk(given)) if given != STDIN and os.path.isdir(given) else [given]  # noqa: PTH112
        if not found:
            yield given, "the folder has no contract; contracts are files that end in .yaml or .yml"
        for file in found:
            real = file if file == STDIN else os.path.realpath(file)
            if real not in seen:
                seen.add(real)
                yield file, ""


def _walk(folder: str) -> Iterator[str]:
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if Path(name).suffix in _SUFFIXES and not name.startswith("."):
                yield str(Path(parent) / name)
