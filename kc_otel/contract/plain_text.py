"""Text that others wrote, made fit for one line of a log, a terminal or a message."""

from __future__ import annotations

import unicodedata
from typing import Any, Final

__all__ = ["is_plain", "plain", "plain_lines", "plain_tree"]

_CATEGORIES: Final = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Control characters, lone surrogates, line and paragraph separators."""
_DIRECTIONS: Final = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""What changes the direction of text: it makes a line read as another one than it is. Source: UAX 9; CVE-2021-42574."""


def is_plain(character: str) -> bool:
    """Whether a character neither ends a line, nor drives a terminal, nor turns text around."""
    return character.isprintable() or not (character in _DIRECTIONS or unicodedata.category(character) in _CATEGORIES)


def plain(text: object) -> str:
    r"""The text with everything that is not plain written as an escape of ASCII.

    >>> print(plain("a\x1b[2J\nb"))
    a\x1b[2J\nb
    """
    said = str(text)
    if said.isprintable():
        return said
    return "".join(one if is_plain(one) else one.encode("unicode_escape").decode() for one in said)


def plain_lines(text: object) -> str:
    """The same for a text of several lines, which stay what they are."""
    return "\n".join(map(plain, str(text).split("\n")))


def plain_tree(tree: Any) -> Any:
    """What JSON holds with every text in it plain, names of fields too."""
    if isinstance(tree, str):
        return plain(tree)
    if isinstance(tree, list):
        return [plain_tree(one) for one in tree]
    if isinstance(tree, dict):
        return {plain(name): plain_tree(one) for name, one in tree.items()}
    return tree
