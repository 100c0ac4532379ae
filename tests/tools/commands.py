"""Commands of `kc-otel` in this process."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import typer
from typer.testing import CliRunner

from kc_otel import cli
from kc_otel.cli import register


def commands(*names: str) -> Callable[..., tuple[int, str, str]]:
    """Register commands; the function runs them: exit code, standard output and standard error.

    The name of a lone command is left out of its words, as Typer does.
    """
    app = typer.Typer()
    register(app, *names)

    def run(*words: object, stdin: str | None = None, width: int = 80) -> tuple[int, str, str]:
        env = {"COLUMNS": str(width), "LOGNAME": "ada", "NO_COLOR": "1"}
        result = CliRunner().invoke(app, list(map(str, words)), input=stdin, env=env)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout, result.stderr

    return run


@cache
def kc_otel() -> Any:
    """Click's command of `kc-otel`, with all below it."""
    cli._register()
    return typer.main.get_command(cli.app)


def named(words: Sequence[str]) -> tuple[Any, list[str]]:
    """The command that words after `kc-otel` begin with, and the words after it."""
    command, rest = kc_otel(), list(words)
    while rest and rest[0] in (getattr(command, "commands", None) or {}):
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


def accepted(words: Sequence[str]) -> None:
    """Have click parse words after `kc-otel`: a UsageError if there is no such command or option."""
    command, rest = named(words)
    assert not (getattr(command, "commands", None) and rest), f"no such command: {' '.join(words)}"
    command.make_context("kc-otel", rest)
