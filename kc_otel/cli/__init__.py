"""One command, `kc-otel`. Each file of this folder registers the sub-commands of one subject."""

from __future__ import annotations

from typing import Annotated

from kc_otel._extras import extra

with extra("cli", "the command line"):
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
    with extra("cli", "the command line"):
        from kc_otel.cli import (  # noqa: PLC0415 - each fills the app made above
            compare_log_command,
            contract_commands,
            explain_command,
            gate_command,
            generate_command,
            import_command,
            init_command,
            operators_command,
            people_commands,
            promote_command,
            replay_command,
            report_command,
            rescore_command,
            serve_command,
            status_command,
            token_command,
        )

    subjects = {
        "Write a contract": (init_command, contract_commands, explain_command),
        "Measure": (compare_log_command, import_command, rescore_command, operators_command),
        "Run the evaluator": (serve_command, token_command, status_command, report_command),
        "People and the policy": (people_commands, replay_command),
        "Roll out a kernel": (gate_command, promote_command),
        "Grafana and Prometheus": (generate_command,),
    }
    for subject, modules in subjects.items():
        commands, groups = len(app.registered_commands), len(app.registered_groups)
        for module in modules:
            module.register(app)
        for command in app.registered_commands[commands:]:
            command.rich_help_panel = subject
        for group in app.registered_groups[groups:]:
            group.rich_help_panel = subject


def main() -> None:
    """Run the command that the arguments name."""
    _register()
    app()
