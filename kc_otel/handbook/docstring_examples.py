"""Examples in docstrings as code: `>>>` lines stand in paragraphs of their own there, and Markdown would quote them."""

from __future__ import annotations

import re
from typing import Any, Final

import griffe

_EXAMPLE: Final = re.compile(r"^>{3} .*(?:\n(?!\s*$).*)*", re.MULTILINE)
_DIRECTIVE: Final = re.compile(r"\s*# doctest: .*$", re.MULTILINE)


class DocstringExamples(griffe.Extension):
    """Puts fences around them, and leaves out what only doctest reads."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Griffe's call for each object."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(example: re.Match[str]) -> str:
    return f"```pycon\n{_DIRECTIVE.sub('', example[0])}\n```"
