"""YAML text to plain data that remembers its lines.

A contract is reviewed by people and read by machines, so only the part of YAML that both read alike is accepted:
mappings, lists, text and numbers as YAML 1.2 has them (`on`, `yes` and dates are text). Anchors, tags, merge keys and
duplicate keys are refused, one at a time. Nodes are composed with a bound on depth, so neither a deep nor
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
_START: Final = "apiVersion: kernel-contract/v1"

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
        """Return the line of `loc`, or of the nearest parent that is written."""
        return self.lines.get(self.known(loc), 1)


class _RefusedError(Exception):
    """A fault of a contract: its line, its place, and what to write instead."""


class _Composer(yaml.SafeLoader):
    """Composes nodes that remember their anchors and tags; aliases are refused."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1
        if isinstance(event, AliasEvent):
            raise _RefusedError(line, (), f"aliases such as *{event.anchor} are not supported; write the value out")
        if isinstance(event, CollectionStartEvent) and self.depth >= MAX_DEPTH:
            raise _RefusedError(line, (), f"nested more than {MAX_DEPTH} levels deep; a contract needs six")
        self.depth += 1
        node: Any = super().compose_node(parent, index)
        self.depth -= 1
        node.anchor, node.written_tag = event.anchor, event.tag
        return node


def _value(node: Any, loc: Loc, lines: dict[Loc, int]) -> Any:
    """Plain data of a node; `lines` gets the line of everything in it."""
    line = node.start_mark.line + 1
    _check_plain(node, loc)
    if isinstance(node, yaml.ScalarNode):
        lines[loc] = line
        return _scalar(node, loc)
    lines.setdefault(loc, line)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, (*loc, index), lines) for index, item in enumerate(node.value)]
    found: dict[str, Any] = {}
    for key, item in node.value:
        name, at = _key(key, loc), key.start_mark.line + 1
        inner = (*loc, name)
        if name in found:
            raise _RefusedError(at, inner, f"duplicate key, first on line {lines[inner]}; remove one of the two")
        lines.setdefault(inner, at)
        found[name] = _value(item, inner, lines)
    return found


def _key(node: Any, loc: Loc) -> str:
    line = node.start_mark.line + 1
    if not isinstance(node, yaml.ScalarNode):
        raise _RefusedError(line, loc, "a key is not plain text; write a name")
    _check_plain(node, loc)
    name = str(node.value)
    if name == "" and node.style is None:
        raise _RefusedError(line, loc, "the key before the colon is missing; write a name")
    if name == "<<" and node.style is None:
        raise _RefusedError(line, loc, "merge keys (<<) are not supported; write the keys out")
    return name


def _check_plain(node: Any, loc: Loc) -> None:
    line = node.start_mark.line + 1
    if node.anchor is not None:
        said = f"anchors such as &{node.anchor} are not supported; write the value out where it is used"
        raise _RefusedError(line, loc, said)
    if node.written_tag is not None:
        shown = node.written_tag.replace("tag:yaml.org,2002:", "!!")
        said = f"tags such as {shown} are not supported; remove it, and quote the value if it is text"
        raise _RefusedError(line, loc, said)
    if isinstance(node, yaml.ScalarNode) and _SURROGATE.search(node.value):
        raise _RefusedError(line, loc, "half of a surrogate pair is not a character; write the character itself")


def _scalar(node: Any, loc: Loc) -> Any:
    value, line = str(node.value), node.start_mark.line + 1
    if node.style is not None:
        return value
    if value in _CONSTANT:
        return _CONSTANT[value]
    integer = _INTEGER.fullmatch(value)
    if not (integer or _FLOAT.fullmatch(value) or _NOT_FINITE.fullmatch(value)):
        return value
    if len(value) > _MAX_NUMBER:
        raise _RefusedError(line, loc, f"the number has {len(value)} characters; write at most {_MAX_NUMBER}")
    if integer:
        return int(value, 0 if value[:2] in {"0o", "0x"} else 10)
    number = math.nan if _NOT_FINITE.fullmatch(value) else float(value)
    if not math.isfinite(number):
        raise _RefusedError(line, loc, f"{value} is not finite; write a finite number")
    return number


def parse(text: str, source: str) -> tuple[Document | None, list[ContractProblem]]:
    """Plain data from YAML text, or the first thing that keeps it from being read."""
    lines: dict[Loc, int] = {(): 1}
    place: Loc = ()
    try:
        node = _Composer(text).get_single_node()
        root = None if node is None else _value(node, (), lines)
        if isinstance(root, dict):
            return Document(root, lines), []
        shape = {list: "a list", type(None): "empty"}.get(type(root), "a single value")
        line, said = int(root is not None), f"the file is {shape}; a contract is a mapping that starts with `{_START}`"
    except _RefusedError as refused:
        line, place, said = refused.args
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, said = mark.line + 1 if mark else 0, _sentence(error)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        said = f"not valid YAML: the character U+{error.character:04X} is not allowed; remove it"
    except (ValueError, OverflowError) as error:  # escapes such as "\UFFFFFFFF", which PyYAML does not check itself
        line, said = 0, f"not valid YAML: {error}"
    return None, [ContractProblem(source, line, field_path(place), said)]


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
