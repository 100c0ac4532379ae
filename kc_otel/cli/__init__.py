"""One command, `kc-otel`. Each file of this folder registers the sub-commands of one subject."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Annotated

from kc_otel._extras import require
from kc_otel.cli.unbroken_output import outlive_readers

require("cli", "the command line", "typer", "httpx", "rich")

import typer  # noqa: E402 - what is missing is said first

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

_SUBJECTS: dict[str, dict[str, tuple[str, ...]]] = {
    "Write a contract": {
        "init_command": ("init",),
        "contract_commands": ("check", "diff", "schema", "metrics"),
        "explain_command": ("explain",),
    },
    "Measure": {
        "compare_log_command": ("compare-log",),
        "diagnose_log_command": ("diagnose-log",),
        "import_command": ("import", "checks"),
        "rescore_command": ("rescore",),
        "scrape_command": ("scrape",),
        "operators_command": ("operators",),
    },
    "Find the cause, and the remedy": {
        "locate_command": ("locate", "capture"),
        "remedy_command": ("remedy",),
        "precision_command": ("precision",),
    },
    "Run the evaluator": {
        "serve_command": ("serve",),
        "aggregate_command": ("aggregate",),
        "token_command": ("token",),
        "doctor_command": ("doctor",),
        "status_command": ("status", "watch", "resume"),
        "shards_command": ("shards",),
        "report_command": ("report",),
    },
    "People and the policy": {
        "people_commands": (
            *("alerts", "ack", "silence", "unsilence", "pin", "unpin"),
            *("enable-webhook", "events"),
        ),
        "replay_command": ("replay",),
    },
    "Roll out a kernel": {"gate_command": ("gate",), "promote_command": ("promote",)},
    "Grafana and Prometheus": {"generate_command": ("generate",)},
}
"""Subjects in the order of the help, their files, and each file's commands: who runs one imports no other's file."""


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


def _register(wanted: str | None = None) -> None:
    """The app gets every command or, where the first word of a command line names one, those of its file alone."""
    app.registered_commands.clear()
    app.registered_groups.clear()
    named = any(wanted in names for files in _SUBJECTS.values() for names in files.values())
    for subject, files in _SUBJECTS.items():
        commands, groups = len(app.registered_commands), len(app.registered_groups)
        for file, names in files.items():
            if not named or wanted in names:
                import_module(f"kc_otel.cli.{file}").register(app)
        for command in app.registered_commands[commands:]:
            command.rich_help_panel = subject
        for group in app.registered_groups[groups:]:
            group.rich_help_panel = subject


def main() -> None:
    """Run the command that the arguments name."""
    # Matrices of some hundred rows: threads of OpenBLAS for each core would wait for each other more than they compute.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    outlive_readers()
    _register(sys.argv[1] if len(sys.argv) > 1 else None)
    app()
