"""How commands refuse: one line per reason on standard error, and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

__all__ = ["pairs", "refuse", "unusable"]


def refuse(why: object) -> NoReturn:
    """End the program with 2."""
    print(why, file=sys.stderr)
    raise typer.Exit(2)


@contextmanager
def unusable(*kinds: type[Exception]) -> Iterator[None]:
    """Refuse what turns out to be unusable: a file that cannot be read, a ValueError, and further kinds of errors.

    A contract's problems are a ValueError that has a line for each of them.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.filename:
            refuse(f"{error.filename}: cannot be read ({error.strerror})")
        if isinstance(error, (ValueError, OSError, *kinds)):
            refuse(error)
        raise


def pairs(option: str, texts: Iterable[str]) -> dict[str, str]:
    """The values of an option that is written NAME=VALUE; empty texts are left out.

    Raises:
        ValueError: If a text has another form.
    """
    found = {}
    for text in filter(str.strip, texts):
        name, sign, value = text.partition("=")
        if not (name.strip() and sign and value.strip()):
            raise ValueError(f"{option}: {text!r} is not NAME=VALUE")
        found[name.strip()] = value.strip()
    return found
