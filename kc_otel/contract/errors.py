"""Problems of a contract, with their places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Loc = tuple[str | int, ...]
"""Place in a contract: keys of mappings and indices of lists, from the top."""
ProblemLevel = Literal["error", "warning"]


@dataclass(frozen=True, slots=True, order=True)
class ContractProblem:
    """One thing to correct in a contract, an error or a warning; `line` is 0 for the file, `field` empty for none."""

    file: str
    line: int
    field: str
    message: str
    level: ProblemLevel = "error"

    def __str__(self) -> str:
        parts = (
            f"{self.file}:{self.line}" if self.line else self.file,
            "warning" if self.level == "warning" else "",
            self.field,
            self.message,
        )
        return ": ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class LintFinding:
    """Something to correct, at a place in the contract."""

    loc: Loc
    message: str
    level: ProblemLevel = "error"


class ContractError(ValueError):
    """A contract cannot be used: `problems` has all that was found, by file and line, an error among them."""

    def __init__(self, problems: Iterable[ContractProblem]) -> None:
        self.problems = tuple(sorted(problems))
        super().__init__("\n".join(problem_lines(self.problems)))


def problem_lines(problems: Iterable[ContractProblem]) -> Iterator[str]:
    """Yield a line for each problem; equal messages are one line, with their places."""
    alike: dict[tuple[str, str, str], list[ContractProblem]] = {}
    for problem in problems:
        alike.setdefault((problem.file, problem.level, problem.message), []).append(problem)
    for first, *others in alike.values():
        lines = [str(problem.line) for problem in others]
        more = f"{', '.join(lines[:3])} and {len(lines) - 3} more" if len(lines) > 3 else ", ".join(lines)
        yield f"{first}; also on line{'s' * (len(lines) > 1)} {more}" if others else str(first)


def field_path(loc: Loc) -> str:
    """`statistical[0].slices.code` from ("statistical", 0, "slices", "code")."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
