"""Load contracts from files, and report every problem at its line.

A contract is refused as a whole: a team that reads "limit: 4" and gets no alarm is worse off than one whose deploy
fails. All problems are reported together, so that a file is corrected in one go.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from kc_otel.contract.errors import ContractError, ContractProblem, LintFinding, Loc, field_path
from kc_otel.contract.fields import NAME_PATTERN
from kc_otel.contract.lint import circles, lint
from kc_otel.contract.model import Contract
from kc_otel.contract.read import STDIN, UnreadableError, read_text
from kc_otel.contract.yaml_document import Document, parse

_SUFFIXES: Final = frozenset({".yaml", ".yml"})
_MINIMAL_CONTRACT: Final[dict[str, Any]] = {
    "apiVersion": "kernel-contract/v1",
    "kind": "KernelContract",
    "metadata": {"name": "broken", "version": 1, "owner": "broken"},
    "kernels": {"train": {"engine": "broken-train"}, "inference": {"engine": "broken-inference"}},
    "observability": {},
    "promotion": {},
}
_EXAMPLE_METRIC: Final = {"numerical": "tv_exact", "statistical": "tv_token", "runtime": "weights_lag"}
# So wide that no limit is out of range because of them.
_ASSUMPTIONS: Final[dict[str, Any]] = {
    "reward_range": [-1e9, 1e9],
    "horizon": 10**9,
    "advantage_max": 1e9,
    "score_norm_max": 1e9,
    "clip": 1e-9,
}


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of checking one file.

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
        """Add findings about the contract, at their lines; an error rejects it."""
        more = _problems(self.source, self.document, findings)
        refused = any(problem.level == "error" for problem in more)
        return replace(
            self, contract=None if refused else self.contract, problems=tuple(sorted((*self.problems, *more)))
        )


def load(path: str | os.PathLike[str]) -> Contract:
    """The contract in a file; `-` reads standard input.

    Raises:
        ContractError: With every problem of the file, when there is an error among them.
    """
    return load_source(path)[0]


def load_source(path: str | os.PathLike[str]) -> tuple[Contract, str]:
    """The contract in a file, and its text; `-` reads standard input.

    Raises:
        ContractError: With every problem of the file, when there is an error among them.
    """
    source = os.fspath(path)
    try:
        text = read_text(source)
    except UnreadableError as error:
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
            findings = _lint_the_rest(document, error)
        else:
            findings = lint(contract)
        # What could not be read has a value that stands in for it, about which there is nothing to say.
        unread = {(problem.line, problem.field) for problem in problems}
        found = _problems(source, document, findings)
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


def _wanted(result: Checked) -> Contract:
    if result.contract is None:
        raise ContractError(result.problems)
    return result.contract


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


def repair(data: dict[str, Any], broken: Iterable[Loc]) -> tuple[dict[str, Any], set[Loc]] | None:
    """Data without its broken places, and which these are.

    Returns:
        The data, and every place in it whose content is made up; None when a whole list or mapping is unusable.
    """
    result = {key: value for key, value in data.items() if key in Contract.model_fields}
    made_up: set[Loc] = set()
    for loc in broken:
        place = _repair_one(result, loc)
        if place is None:
            return None
        made_up.add(place)
    return result, made_up


def _repair_one(data: dict[str, Any], loc: Loc) -> Loc | None:
    section = str(loc[0]) if loc else ""
    if section in _MINIMAL_CONTRACT:
        data[section] = _MINIMAL_CONTRACT[section]
        return (section,)
    if section not in Contract.model_fields:
        return loc or None
    if len(loc) < 2:
        return None
    name, container = loc[1], data[section]
    if section == "slices" and "[key]" in loc:
        data[section] = {key: value for key, value in container.items() if key != name}
    elif section == "assumptions":
        known = {key: value for key, value in container.items() if key in _ASSUMPTIONS}
        data[section] = {**known, **({name: _ASSUMPTIONS[name]} if name in _ASSUMPTIONS else {})}
    elif isinstance(container, list) and isinstance(name, int):
        data[section] = [*container[:name], _item(section, name, container[name]), *container[name + 1 :]]
    else:
        data[section] = {**container, name: {"where": {"broken": str(name)}}}
    return (section, name)


def _item(section: str, index: int, written: Any) -> dict[str, Any]:
    if section == "escalation":
        return {"on": "fail", "do": [{"webhook": f"broken-{index}"}]}
    wanted = written.get("id") if isinstance(written, dict) else None
    usable = isinstance(wanted, str) and re.fullmatch(NAME_PATTERN, wanted)
    return {"id": wanted if usable else f"broken-{section}-{index}", "metric": _EXAMPLE_METRIC[section], "limit": 0.5}
