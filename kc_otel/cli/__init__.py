"""One command, `kc-otel`. Each file of this folder registers the sub-commands of one subject."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["app", "main"]

app = typer.Typer(
    name="kc-otel",
    help="Kernel contracts on OpenTelemetry: how far a training and an inference kernel have drifted apart, "
    "per slice, with confidence, and what to do about it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415 - only where it is asked for

        typer.echo(f"kc-otel {version('kc-otel')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every command."""


def _register() -> None:
    from kc_otel.cli import (  # noqa: PLC0415 - each fills the app made above
        compare,
        contract,
        explain,
        gate,
        generate,
        importing,
        init,
        live,
        operators,
        people,
        promote,
        replay,
        report,
        rescore,
        serve,
    )

    commands = (
        init,
        contract,
        explain,
        compare,
        operators,
        serve,
        live,
        people,
        rescore,
        importing,
        gate,
        promote,
        replay,
        report,
        generate,
    )
    for module in commands:
        module.register(app)


def main() -> None:
    """Entry point of the console script."""
    _register()
    app()
