"""What commands share: how they refuse, how they stop, and options of one form."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, NoReturn

import typer

from kc_otel.contract.plain_text import plain_lines

__all__ = ["PrintJson", "columns_of", "log_to_terminal", "pairs", "refuse", "seconds", "stopped_by_signals", "unusable"]

PrintJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


def refuse(why: object) -> NoReturn:
    """End the program with 2."""
    print(plain_lines(why), file=sys.stderr)
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
            refuse(f"{error.filename}: cannot be read or written ({error.strerror})")
        if isinstance(error, (ValueError, OSError, *kinds)):
            refuse(error)
        raise


def pairs(option: str, texts: Iterable[str], form: str = "NAME=VALUE") -> dict[str, str]:
    """The values of an option that is written as NAME=VALUE; empty texts are left out.

    Raises:
        ValueError: If a text has another form, or a name comes twice.
    """
    found: dict[str, str] = {}
    for text in filter(str.strip, texts):
        name, sign, value = text.partition("=")
        if not (name.strip() and sign and value.strip()):
            raise ValueError(f"{option}: {text!r} is not {form}")
        if name.strip() in found:
            raise ValueError(
                f"{option}: {name.strip()} is given twice, as {found[name.strip()]} and as {value.strip()}"
            )
        found[name.strip()] = value.strip()
    return found


def columns_of(text: str | None) -> dict[str, str]:
    """The names of a recording's columns by role, from `train=A,inference=B`.

    Raises:
        ValueError: If the text has another form.
    """
    return pairs("--columns", (text or "").split(","), "ROLE=COLUMN")


def seconds(option: str, text: str) -> float:
    """The seconds of an option that is a duration, such as 90s; refuses anything else."""
    from kc_otel.contract.units import parse_duration  # noqa: PLC0415 - a quick --help

    try:
        return parse_duration(text)
    except ValueError as error:
        refuse(f"{option}: {error}")


def log_to_terminal() -> None:
    """What a command that runs for long logs goes to standard error, with the time of day."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S")


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set, so that what was measured is exported before the end."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
