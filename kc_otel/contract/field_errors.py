"""Pydantic's errors about a contract, as sentences: keys and meanings of fields come from the JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, Final

from pydantic import ValidationError

from kc_otel.contract.errors import ContractProblem, Loc, field_path
from kc_otel.contract.model import Contract
from kc_otel.contract.units import format_duration
from kc_otel.contract.yaml_document import Document

_DURATIONS: Final = frozenset({"window", "long_window", "heartbeat", "false_alarms", "for", "clear_for", "repeat"})
_MAX_QUOTED_CHARACTERS: Final = 60
_WRONG_TYPE: Final = {
    "string_type": "is not text; put it in quotes",
    "int_type": "is not a whole number; write one such as 100",
    "float_type": "is not a number; write one such as 0.5",
    "tuple_type": "is not a list; write [...]",
    "dict_type": "is not a mapping; write keys and values below it",
    "model_type": "is not a mapping; write keys and values below it",
}
_COMPARISON_WORDS: Final = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "of at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "of at most"),
}


def explain(error: ValidationError, document: Document, source: str) -> list[ContractProblem]:
    """One problem for each place that pydantic complains about, at its line."""
    problems: dict[tuple[Loc, str], ContractProblem] = {}
    for detail in error.errors(include_url=False):
        raw: Loc = tuple(detail["loc"])
        if detail["type"] == "too_short" and detail["input"]:
            continue  # said of a list whose every item is wrong, each of which is said too
        loc, message = _sentence(detail["type"], raw, document, detail)
        line = document.line(loc)
        # The members of a union complain one by one about the same value; one sentence is enough.
        key = (loc, "" if detail["type"] in _WRONG_TYPE else message)
        problems.setdefault(key, ContractProblem(source, line, field_path(loc), message))
    return list(problems.values())


def _sentence(kind: str, raw: Loc, document: Document, detail: Mapping[str, Any]) -> tuple[Loc, str]:
    loc = document.known(raw)
    if kind == "missing":
        missing = (*loc, raw[-1])
        return missing, f"is missing; add it{_meaning(missing)}"
    if kind == "extra_forbidden":
        return raw, _unknown(raw)
    if kind == "value_error":
        return _placed(loc, detail["msg"].removeprefix("Value error, "), document)
    return loc, _about_value(kind, loc, detail["input"], detail)


def _about_value(kind: str, loc: Loc, value: Any, detail: Mapping[str, Any]) -> str:
    context, is_limit = detail.get("ctx", {}), loc[-1:] == ("limit",) or (len(loc) == 4 and loc[2] == "slices")
    if value is None:
        message = f"has no value; write one, or remove the key{_meaning(loc)}"
    elif kind == "string_pattern_mismatch":
        message = _not_a_name(str(value))
    elif kind == "literal_error":
        message = _not_one_of(value, context["expected"])
    elif kind in _COMPARISON_WORDS:
        message = _out_of_range(value, loc, *_COMPARISON_WORDS[kind], context)
    elif kind in {"too_short", "string_too_short"}:
        message = f"is empty; write a value{_meaning(loc)}"
    elif kind in {"too_long", "string_too_long"}:
        items = "characters" if kind == "string_too_long" else "items"
        message = f"is too long; write at most {context.get('max_length')} {items}"
    elif is_limit and not isinstance(value, dict | list):
        message = f"{_shown(value)} is not a limit; write a number, or text with a unit such as 800ms or 2%"
    elif kind in _WRONG_TYPE:
        message = f"{_shown(value)} {_WRONG_TYPE[kind]}"
    else:
        message = f"{_shown(value)}: {detail['msg'][:1].lower()}{detail['msg'][1:]}"
    return message


def _placed(loc: Loc, message: str, document: Document) -> tuple[Loc, str]:
    """A validator's message moved to the field that it starts with, such as `limit: ...` or `slices.code: ...`."""
    head, colon, rest = message.partition(": ")
    first, _, second = head.partition(".")
    for inner in ((head,), (first, second)):
        if colon and (*loc, *inner) in document.lines:
            return (*loc, *inner), rest
    return loc, message


def _unknown(loc: Loc) -> str:
    name, allowed = str(loc[-1]), list(_schema(loc[:-1]).get("properties", {}))
    near = get_close_matches(name, allowed, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown key; {hint}keys here are {', '.join(allowed)}" if allowed else "unknown key; remove it"


def _not_a_name(value: str) -> str:
    slug = re.sub(r"[^a-z0-9._-]+", "-", value.lower()).strip("._-")[:63].strip("._-")
    hint = f"; did you mean {slug!r}?" if slug and slug != value else ""
    return f"{_shown(value)} is not a name (lower-case letters, digits, dots, dashes, underscores; at most 63){hint}"


def _not_one_of(value: Any, expected: str) -> str:
    allowed = re.findall(r"'([^']*)'", expected)
    near = get_close_matches(str(value), allowed, n=1)
    hint = f"did you mean {near[0]}?" if near and len(allowed) > 1 else f"write {' or '.join(allowed)}"
    return f"{_shown(value)} is not accepted here; {hint}"


def _out_of_range(value: Any, loc: Loc, bound: str, words: str, context: Mapping[str, Any]) -> str:
    limit = context[bound]
    if loc and loc[-1] in _DURATIONS:
        return f"{_shown(value)} is out of range; write a duration {words} {format_duration(limit)}"
    percent = isinstance(value, int | float) and limit == 1 and 1 < value < 100
    hint = f", such as {value / 100:g}" if percent else ""
    return f"{_shown(value)} is out of range; write a number {words} {limit:g}{hint}"


def _meaning(loc: Loc) -> str:
    text = str(_schema(loc).get("description", ""))
    return f" ({text.rstrip('.')})" if text else ""


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= _MAX_QUOTED_CHARACTERS else f"{text[:_MAX_QUOTED_CHARACTERS]}..."


@cache
def _contract_schema() -> dict[str, Any]:
    return Contract.model_json_schema(by_alias=True)


def _schema(loc: Loc) -> Mapping[str, Any]:
    """JSON Schema of a place in a contract; empty where there is none."""
    node: Mapping[str, Any] = _contract_schema()
    for part in loc:
        node = _resolved(node)
        inner = node.get("items", {}) if isinstance(part, int) else node.get("properties", {}).get(part)
        node = next(iter(node.get("patternProperties", {}).values()), {}) if inner is None else inner
    return _resolved(node)


def _resolved(node: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = node.get("$ref")
    if not reference:
        return node
    return {**_contract_schema()["$defs"][reference.rpartition("/")[2]], **node}
