"""Commands of `kc-otel` in this process."""

from collections.abc import Callable

import typer
from typer.testing import CliRunner

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
