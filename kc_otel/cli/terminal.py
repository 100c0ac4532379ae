"""Parts that commands share: errors, stopping, and common options."""

from __future__ import annotations

import json
import logging
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Final, NoReturn, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from kc_otel.contract.plain_text import plain, plain_lines

STATUS_STYLE: Final = {
    "PASS": "green",
    "INCONCLUSIVE": "yellow",
    "NO_DATA": "magenta",
    "INVALID_INPUT": "magenta",
    "FAIL": "bold red",
}
_Function = TypeVar("_Function", bound=Callable[..., None])
_EXAMPLES: Final = "\n\nExamples:\n"
OnlyContract = Annotated[str | None, typer.Option(help="Only this contract.")]
By = Annotated[str | None, typer.Option(help="Your name, for the record (default: the login name).")]
Columns = Annotated[str | None, typer.Option(help="Names of columns: train=A,inference=B.")]
ApiJson = Annotated[bool, typer.Option("--json", help="Print the API's answer as JSON.")]
PrintJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


class _PlainHelp:
    """Help without boxes and markup: sections as the options name them, and the docstring's examples at the end."""

    def format_help_text(self, _ctx: Any, formatter: Any) -> None:
        """Write the docstring up to its examples."""
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(self.help.partition(_EXAMPLES)[0].strip())  # type: ignore[attr-defined]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, options and commands, each section under its name."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):  # type: ignore[attr-defined]
            if (record := param.get_help_record(ctx)) is not None:
                named = re.sub(r"<list\[(.*)\]>", r"<\1>", record[0]).replace(" range>", ">")
                usual = "Options"
                if param.param_type_name == "argument":
                    named, usual = named.partition(" <")[0], "Arguments"
                titles = getattr(self.callback, "sections", {})  # type: ignore[attr-defined]
                title = next((title for title, names in titles.items() if param.name in names.split()), usual)
                sections.setdefault(title, []).append((named, record[1]))
        for name, command in getattr(self, "commands", {}).items():
            row = (name, " ".join(command.help.partition("\n\n")[0].split()))
            sections.setdefault(command.rich_help_panel or "Commands", []).append(row)
        options = sections.pop("Options")
        for heading, rows in (*sections.items(), ("Options", options)):
            with formatter.section(heading):
                formatter.write_dl(rows)

    def format_epilog(self, _ctx: Any, formatter: Any) -> None:
        """Write the examples; those of a group without any are the first of each of its commands."""
        below = getattr(self, "commands", {}).values()
        examples = examples_of(self) or [line for command in below for line in examples_of(command)[:1]]
        with formatter.section("Examples"):
            for line in examples:
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")


class Command(_PlainHelp, TyperCommand):  # type: ignore[misc, unused-ignore]
    """A command."""


class Group(_PlainHelp, TyperGroup):  # type: ignore[misc, unused-ignore]
    """Commands below one word."""


def in_sections(sections: Mapping[str, str]) -> Callable[[_Function], _Function]:
    """Put options of a command into sections of its help: titles, and the parameters of each."""

    def put(command: _Function) -> _Function:
        command.__dict__["sections"] = sections
        return command

    return put


def examples_of(command: Any) -> list[str]:
    """The lines below `Examples:` at the end of a command's docstring."""
    return [line.strip() for line in command.help.partition(_EXAMPLES)[2].splitlines() if line.strip()]


def add_group(app: typer.Typer, name: str, help: str, subject: str, *commands: Callable[..., None]) -> None:
    """Add commands below one word, the usual one first; each is named as its function is."""
    group = typer.Typer(cls=Group, help=help, no_args_is_help=True)
    for command in commands:
        group.command(command.__name__.removesuffix("_command").replace("_", "-"), cls=Command)(command)
    app.add_typer(group, name=name, rich_help_panel=subject)


def show(lines: Iterable[object], data: Any = None, *, as_json: bool = False) -> None:
    """Print JSON where that is asked for, else lines without anything that drives a terminal."""
    if as_json:
        typer.echo(json.dumps(data, indent=2, allow_nan=False, default=str))
    else:
        for line in lines:
            typer.echo(plain(line))


def refuse(why: object) -> NoReturn:
    """End the program with 2."""
    print(plain_lines(why), file=sys.stderr)
    raise typer.Exit(2)


@contextmanager
def unusable(*kinds: type[Exception], files: str = "read or written") -> Iterator[None]:
    """Refuse what turns out to be unusable: a file that cannot be read, a ValueError, and further kinds of errors."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.filename:
            refuse(f"{error.filename}: cannot be {files} ({error.strerror})")
        if isinstance(error, (ValueError, OSError, *kinds)):
            refuse(error)
        raise


def pairs(option: str, texts: Iterable[str], form: str = "NAME=VALUE") -> dict[str, str]:
    """The values of an option that is written as NAME=VALUE; ValueError otherwise, or if a name comes twice."""
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


SequenceAttributes = Annotated[
    list[str] | None,
    typer.Option("--attribute", metavar="NAME=VALUE", help="Attribute of every sequence, for slices; repeatable."),
]


def attributes_of(texts: Iterable[str]) -> dict[str, str | int | float | bool]:
    """Attributes written as NAME=VALUE, of which a number or truth value in JSON is one; ValueError as of `pairs`."""
    given, texts_of = settings_of("--attribute", texts), pairs("--attribute", texts)
    return {name: value if isinstance(value, bool | int | float) else texts_of[name] for name, value in given.items()}


def settings_of(option: str, texts: Iterable[str]) -> dict[str, Any]:
    """The values of an option that is written as NAME=VALUE, each as JSON has it, or else the text."""
    found: dict[str, Any] = dict(pairs(option, texts))
    for name, text in found.items():
        with suppress(ValueError):
            found[name] = json.loads(text)
    return found


def columns_of(text: str | None) -> dict[str, str]:
    """The names of a recording's columns by role, from `train=A,inference=B`; ValueError for another form."""
    return pairs("--columns", (text or "").split(","), "ROLE=COLUMN")


def seconds(option: str, text: str, *, positive: bool = False) -> float:
    """The seconds of an option that is a duration, such as 90s; refuses anything else."""
    from kc_otel.contract.units import parse_duration  # noqa: PLC0415 - a quick --help

    try:
        found = parse_duration(text)
    except ValueError as error:
        refuse(f"{option}: {error}")
    if positive and found <= 0:
        refuse(f"{option} {text}: give more than 0 s, such as 30s")
    return found


def local_time(at: float | None, form: str = "%Y-%m-%d %H:%M:%S %Z") -> str:
    """A Unix time, or the present where it is None, by this machine's clock, with its zone."""
    moment = datetime.now(tz=UTC) if at is None else datetime.fromtimestamp(at, tz=UTC)
    return moment.astimezone().strftime(form)


def log_to_terminal() -> None:
    """Send the log of a long-running command to standard error, with the time of day."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # otherwise a line for each request


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
