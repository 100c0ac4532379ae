"""Text and JSON that others wrote: made fit for one line of a log, a terminal or a message, and parsed."""

from __future__ import annotations

import json
import unicodedata
from typing import Any, Final

_CATEGORIES: Final = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Control characters, lone surrogates, line and paragraph separators."""
_BIDI_MARKS: Final = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that change the direction of text, so that a line reads differently than it is. Source: UAX 9;
CVE-2021-42574."""


def is_plain(character: str) -> bool:
    """Return True if a character neither ends a line, nor drives a terminal, nor reverses text."""
    return character.isprintable() or not (character in _BIDI_MARKS or unicodedata.category(character) in _CATEGORIES)


def plain(text: object) -> str:
    r"""Escape every character that is not plain, in ASCII.

    >>> print(plain("a\x1b[2J\nb"))
    a\x1b[2J\nb
    """
    said = str(text)
    if said.isprintable():
        return said
    return "".join(char if is_plain(char) else char.encode("unicode_escape").decode() for char in said)


def plain_lines(text: object) -> str:
    """Escape the text line by line; line breaks stay."""
    return "\n".join(map(plain, str(text).split("\n")))


def plain_tree(tree: Any) -> Any:
    """Return a JSON value with every text in it made plain, field names included."""
    if isinstance(tree, str):
        return plain(tree)
    if isinstance(tree, list):
        return [plain_tree(item) for item in tree]
    if isinstance(tree, dict):
        return {plain(name): plain_tree(value) for name, value in tree.items()}
    return tree


def read_json_text(text: str | bytes) -> Any:
    """Parse JSON; ValueError if it is none, or nests too deep, where `json` raises RecursionError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deeply to be read") from None
