"""Finds what a reader could copy out of the README and the handbook: fenced blocks, commands, names in backticks.

A comment in front of a block says what is not in it: `<!-- run by tests/x.py::test_y -->` names the test that runs it
where this one cannot (an engine, a terminal), `<!-- exit 1 -->` the exit code of a console block, `<!-- refused -->`
that a contract has an error on purpose. A block with a title is a file of that name.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
HANDBOOK = ROOT / "kc_otel" / "handbook" / "pages"
PAGES = (ROOT / "README.md", *sorted(HANDBOOK.rglob("*.md")))
EXAMPLES = tuple(sorted((ROOT / "examples").glob("*/README.md")))
_BLOCK = re.compile(
    r"(?:^ *<!-- (?P<note>[^\n]*?) -->\n+)?"
    r'^(?P<indent> *)```(?P<language>\w*)(?: title="(?P<title>[^"\n]*)")?\n(?P<text>.*?)^(?P=indent)```',
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Snippet:
    page: Path
    line: int
    language: str
    text: str
    note: str
    title: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def run_by(self) -> str:
        """The test that runs it, where it is not run here."""
        return self.note.removeprefix("run by ") if self.note.startswith("run by ") else ""

    @property
    def exit_code(self) -> int:
        """What its last command ends with."""
        return int(self.note.removeprefix("exit ")) if self.note.startswith("exit ") else 0


def snippets(*pages: Path, language: str | None = None) -> list[Snippet]:
    """The blocks of pages, of one language or of all."""
    found = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for block in _BLOCK.finditer(text):
            if language in {None, block["language"]}:
                line = text.count("\n", 0, block.start("text"))
                content = textwrap.dedent(block["text"])
                found.append(Snippet(page, line, block["language"], content, block["note"] or "", block["title"] or ""))
    return found


def prose(page: Path) -> str:
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def commands(text: str) -> list[list[str]]:
    """The words of every simple command of a shell text, without variables in front of it and without comments."""
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        words: list[str] = []
        file_follows = False
        for token in [*lexer, ";"]:
            if set(token) <= set("();|&"):
                while words and re.fullmatch(r"\w+=.*|env|export", words[0]):
                    words = words[1:]
                found += [words] if words else []
                words = []
            elif set(token) <= set("<>"):
                file_follows = True
            elif file_follows:
                file_follows = False
            else:
                words.append(token)
    return found
