"""YAML text to plain data that remembers its lines.

A contract is reviewed by people and read by machines, so only the part of YAML that both read alike is accepted:
mappings, lists, text and numbers as YAML 1.2 has them (`on`, `yes` and dates are text). Anchors, tags, merge keys and
duplicate keys are refused. Nodes are composed with a bound on depth, and no alias stands for one, so neither a deep nor
a self-referring document can exhaust the stack or the memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml
from yaml.events import AliasEvent, CollectionStartEvent

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


class _Composer(yaml.SafeLoader):
    """Composes nodes that remember what a contract may not have: anchors, aliases and tags."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        mark: Any = event.start_mark
        if isinstance(event, AliasEvent):
            self.get_event()  # type: ignore[no-untyped-call]
            node: Any = yaml.ScalarNode("alias", event.anchor, mark, mark)
            node.anchor, node.written_tag = None, None
            return node
        if isinstance(event, CollectionStartEvent) and self.depth >= MAX_DEPTH:
            raise _Refused(mark.line + 1)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        node.anchor, node.written_tag = event.anchor, event.tag
        return node


class _Builder:
    """Plain data of nodes."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.problems: list[ContractProblem] = []
        self.lines: dict[Loc, int] = {(): 1}
        self.incomplete = False

    def problem(self, line: int, loc: Loc, message: str) -> None:
        self.problems.append(ContractProblem(self.source, line, field_path(loc), message))

    def refuse(self, line: int, loc: Loc, message: str) -> None:
        self.problem(line, loc, message)
        raise _Refused(line)

    def value(self, node: Any, loc: Loc, *, discard: bool = False) -> Any:
        line = node.start_mark.line + 1
        if node.tag == "alias":
            self.problem(line, loc, f"aliases such as *{node.value} are not supported; write the value out")
            self.incomplete = True
            return None
        self.check_plain(node, line, loc)
        if isinstance(node, yaml.ScalarNode):
            if not discard:
                self.lines[loc] = line
            return self.scalar(node, line, loc)
        self.lines.setdefault(loc, line)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*loc, index)) for index, item in enumerate(node.value)]
        found: dict[str, Any] = {}
        for key, item in node.value:
            name, at = self.key(key, loc), key.start_mark.line + 1
            inner = (*loc, name)
            twice = name in found
            if twice:
                self.problem(at, inner, f"duplicate key, first on line {self.lines[inner]}; remove one of the two")
            self.lines.setdefault(inner, at)
            content = self.value(item, inner, discard=twice)
            found.setdefault(name, content)
        return found

    def key(self, node: Any, loc: Loc) -> str:
        line = node.start_mark.line + 1
        if not isinstance(node, yaml.ScalarNode) or node.tag == "alias":
            self.refuse(line, loc, "a key is not plain text; write a name")
        self.check_plain(node, line, loc)
        name = self.text(node, line, loc)
        if name == "" and node.style is None:
            self.refuse(line, loc, "the key before the colon is missing; write a name")
        if name == "<<" and node.style is None:
            self.problem(line, loc, "merge keys (<<) are not supported; write the keys out")
            self.incomplete = True
        return name

    def check_plain(self, node: Any, line: int, loc: Loc) -> None:
        if node.anchor is not None:
            said = f"anchors such as &{node.anchor} are not supported; write the value out where it is used"
            self.problem(line, loc, said)
        if node.written_tag is not None:
            shown = node.written_tag.replace("tag:yaml.org,2002:", "!!")
            said = f"tags such as {shown} are not supported; remove it, and quote the value if it is text"
            self.problem(line, loc, said)

    def text(self, node: Any, line: int, loc: Loc) -> str:
        if _SURROGATE.search(node.value):
            self.refuse(line, loc, "half of a surrogate pair is not a character; write the character itself")
        return str(node.value)

    def scalar(self, node: Any, line: int, loc: Loc) -> Any:
        value = self.text(node, line, loc)
        if node.style is not None:
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
    builder, root = _Builder(source), None
    try:
        node = _Composer(text).get_single_node()
        root = None if node is None else builder.value(node, ())
    except _Refused as refused:
        if not builder.problems:
            builder.problem(refused.args[0], (), f"nested more than {MAX_DEPTH} levels deep; a contract needs six")
        return None, builder.problems
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        builder.problem(mark.line + 1 if mark else 0, (), _sentence(error))
        return None, builder.problems
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        builder.problem(line, (), f"not valid YAML: the character U+{error.character:04X} is not allowed; remove it")
        return None, builder.problems
    except (ValueError, OverflowError) as error:  # escapes such as "\UFFFFFFFF", which PyYAML does not check itself
        builder.problem(0, (), f"not valid YAML: {error}")
        return None, builder.problems
    if root is None and not builder.problems:
        builder.problem(0, (), "the file is empty; a contract starts with `apiVersion: kernel-contract/v1`")
    elif not isinstance(root, dict) and root is not None:
        shape = "a list" if isinstance(root, list) else "a single value"
        builder.problem(
            1, (), f"the file is {shape}; a contract is a mapping that starts with `apiVersion: kernel-contract/v1`"
        )
    if not isinstance(root, dict) or builder.incomplete:
        return None, builder.problems
    return Document(root, builder.lines), builder.problems


def _sentence(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "cannot be read"
    if "another document" in problem:
        return "a second document starts here; write one contract per file"
    said = f"{problem}{f' ({error.context})' if error.context else ''}"
    if "\\t" in problem:
        said = "a tab; indent with spaces"
    elif "mapping values are not allowed" in problem:
        said = "a second colon on one line; quote the text, or start a new line"
    return f"not valid YAML: {said}"
