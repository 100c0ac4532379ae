"""YAML text to plain data that remembers its lines.

A contract is reviewed by people and read by machines, so only the part of YAML that both read alike is accepted:
mappings, lists, text and numbers as YAML 1.2 has them (`on`, `yes` and dates are text). Anchors, tags, merge keys and
duplicate keys are refused. The parser's events are consumed one by one with a bound on depth, so neither a deep nor a
self-referring document can exhaust the stack or the memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml
from yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    DocumentStartEvent,
    Event,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
)

from kc_otel.contract.errors import ContractProblem, Loc, field_path

MAX_DEPTH: Final = 20
"""Deepest nesting accepted; a contract needs six levels."""
_MAX_NUMBER: Final = 40

_CONSTANT: Final[dict[str, bool | None]] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER: Final = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE: Final = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML mapping as plain data, and the line, from 1, of every key and value."""

    data: dict[str, Any]
    lines: Mapping[Loc, int]

    def known(self, loc: Loc) -> Loc:
        """The longest part of `loc`, from the top, that is written in the file."""
        while loc and loc not in self.lines:
            loc = loc[:-1]
        return loc

    def line(self, loc: Loc) -> int:
        """Line of `loc`, or of what it would be in if it were written."""
        return self.lines.get(self.known(loc), 1)


class _Refused(Exception):  # noqa: N818 - control flow within this file
    """Reading cannot go on after this problem."""


@dataclass(slots=True)
class _Frame:
    value: dict[str, Any] | list[Any]
    loc: Loc
    key: str | None = None
    discard: bool = False

    @property
    def child(self) -> Loc:
        return (*self.loc, self.key if self.key is not None else len(self.value))

    def put(self, value: Any) -> None:
        if isinstance(self.value, list):
            self.value.append(value)
        elif self.key is not None:
            if not self.discard:
                self.value[self.key] = value
            self.key, self.discard = None, False


@dataclass(slots=True)
class _Builder:
    source: str
    problems: list[ContractProblem] = field(default_factory=list)
    lines: dict[Loc, int] = field(default_factory=lambda: {(): 1})
    stack: list[_Frame] = field(default_factory=list)
    root: Any = None
    documents: int = 0
    incomplete: bool = False

    def problem(self, line: int, loc: Loc, message: str) -> None:
        self.problems.append(ContractProblem(self.source, line, field_path(loc), message))

    def refuse(self, line: int, loc: Loc, message: str) -> None:
        self.problem(line, loc, message)
        raise _Refused

    def feed(self, event: Event) -> None:
        assert event.start_mark is not None
        line = event.start_mark.line + 1
        if isinstance(event, DocumentStartEvent):
            self.documents += 1
            if self.documents > 1:
                self.refuse(line, (), "a second document starts here; write one contract per file")
        elif isinstance(event, CollectionEndEvent):
            done = self.stack.pop()
            self.place(done.value)
        elif isinstance(event, NodeEvent):
            self.node(event, line)

    def node(self, event: NodeEvent, line: int) -> None:
        frame = self.stack[-1] if self.stack else None
        if frame is not None and isinstance(frame.value, dict) and frame.key is None:
            self.key(frame, frame.value, event, line)
            return
        loc = frame.child if frame else ()
        if isinstance(event, AliasEvent):
            self.problem(line, loc, f"aliases such as *{event.anchor} are not supported; write the value out")
            self.incomplete = True
            self.place(None)
            return
        self.plain(event, line, loc)
        if isinstance(event, ScalarEvent):
            if not (frame and frame.discard):
                self.lines[loc] = line
            self.place(self.scalar(event, line, loc))
            return
        self.lines.setdefault(loc, line)
        if len(self.stack) >= MAX_DEPTH:
            self.refuse(line, (), f"nested more than {MAX_DEPTH} levels deep; a contract needs six")
        empty: dict[str, Any] | list[Any] = {} if isinstance(event, MappingStartEvent) else []
        self.stack.append(_Frame(empty, loc))

    def key(self, frame: _Frame, mapping: dict[str, Any], event: NodeEvent, line: int) -> None:
        if not isinstance(event, ScalarEvent):
            self.refuse(line, frame.loc, "a key is not plain text; write a name")
            return
        self.plain(event, line, frame.loc)
        name = self.text(event, line, frame.loc)
        if name == "" and event.style is None:
            self.refuse(line, frame.loc, "the key before the colon is missing; write a name")
        if name == "<<" and event.style is None:
            self.problem(line, frame.loc, "merge keys (<<) are not supported; write the keys out")
            self.incomplete = True
        loc = (*frame.loc, name)
        if name in mapping:
            self.problem(line, loc, f"duplicate key, first on line {self.lines[loc]}; remove one of the two")
            frame.discard = True
        frame.key = name
        self.lines.setdefault(loc, line)

    def plain(self, event: NodeEvent, line: int, loc: Loc) -> None:
        anchor, tag = event.anchor, getattr(event, "tag", None)
        if anchor is not None:
            self.problem(
                line, loc, f"anchors such as &{anchor} are not supported; write the value out where it is used"
            )
        if tag is not None:
            shown = tag.replace("tag:yaml.org,2002:", "!!")
            self.problem(
                line, loc, f"tags such as {shown} are not supported; remove it, and quote the value if it is text"
            )

    def place(self, value: Any) -> None:
        if self.stack:
            self.stack[-1].put(value)
        else:
            self.root = value

    def text(self, event: ScalarEvent, line: int, loc: Loc) -> str:
        value: str = event.value
        if _SURROGATE.search(value):
            self.refuse(line, loc, "half of a surrogate pair is not a character; write the character itself")
        return value

    def scalar(self, event: ScalarEvent, line: int, loc: Loc) -> Any:
        value = self.text(event, line, loc)
        if event.style is not None:
            return value
        if value in _CONSTANT:
            return _CONSTANT[value]
        if not (_INTEGER.fullmatch(value) or _FLOAT.fullmatch(value) or _NOT_FINITE.fullmatch(value)):
            return value
        if len(value) > _MAX_NUMBER:
            self.problem(line, loc, f"the number has {len(value)} characters; write at most {_MAX_NUMBER}")
            return 0
        number = _number(value)
        if not math.isfinite(number):
            self.problem(line, loc, f"{value} is not finite; write a finite number")
            return 0
        return number


def _number(text: str) -> int | float:
    if text[:2] in {"0o", "0x"}:
        return int(text, 0)
    if _INTEGER.fullmatch(text):
        return int(text)
    return math.nan if _NOT_FINITE.fullmatch(text) else float(text)


def parse(text: str, source: str) -> tuple[Document | None, list[ContractProblem]]:
    """Plain data from YAML text, unless it cannot be read to the end or is no mapping, and all problems."""
    builder = _Builder(source)
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            builder.feed(event)
    except _Refused:
        return None, builder.problems
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        builder.problem(mark.line + 1 if mark else 0, (), f"not valid YAML: {_sentence(error)}")
        return None, builder.problems
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        builder.problem(line, (), f"not valid YAML: the character U+{error.character:04X} is not allowed; remove it")
        return None, builder.problems
    except (ValueError, OverflowError) as error:  # escapes such as "\UFFFFFFFF", which PyYAML does not check itself
        builder.problem(0, (), f"not valid YAML: {error}")
        return None, builder.problems
    if builder.root is None and not builder.problems:
        builder.problem(0, (), "the file is empty; a contract starts with `apiVersion: kernel-contract/v1`")
    elif not isinstance(builder.root, dict) and builder.root is not None:
        shape = "a list" if isinstance(builder.root, list) else "a single value"
        builder.problem(
            1, (), f"the file is {shape}; a contract is a mapping that starts with `apiVersion: kernel-contract/v1`"
        )
    if not isinstance(builder.root, dict) or builder.incomplete:
        return None, builder.problems
    return Document(builder.root, builder.lines), builder.problems


def _sentence(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "cannot be read"
    if "\\t" in problem:
        return "a tab; indent with spaces"
    if "mapping values are not allowed" in problem:
        return "a second colon on one line; quote the text, or start a new line"
    return f"{problem}{f' ({error.context})' if error.context else ''}"
