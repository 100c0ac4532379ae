"""One command, `kc-otel`. Each file of this folder has the sub-commands of one subject."""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module
from typing import Annotated, Any

from kc_otel._extras import require

require("cli", "the command line", "typer", "httpx", "rich")

import typer  # noqa: E402 - what is missing is said first

from kc_otel.cli.terminal import Command, Group, add_group  # noqa: E402

_SUBJECTS: dict[str, dict[str, str]] = {
    "Write a contract": {
        "init": "contract_commands:init",
        "check": "contract_commands:check",
        "diff": "contract_commands:diff_command",
        "reference": "contract_commands:metrics schema invalid_input",
    },
    "Measure": {
        "compare": "compare_command:compare",
        "diagnose": "compare_command:diagnose",
        "import": "measure_commands:import_files",
        "rescore": "measure_commands:rescore",
        "scrape": "measure_commands:scrape",
    },
    "Find the cause, and the remedy": {
        "locate": "locate_command:run capture operators",
        "remedy": "remedy_command:remedy",
    },
    "Run the evaluator": {
        "serve": "serve_command:serve",
        "token": "serve_command:token",
        "doctor": "doctor_command:doctor",
        "status": "status_command:status",
    },
    "People and the policy": {
        "events": "people_commands:events",
        "alerts": "people_commands:list_command ack silence unsilence",
        "route": "people_commands:pin unpin resume",
        "replay": "replay_command:replay",
    },
    "Roll out a kernel": {
        "gate": "gate_command:run live contract_commands:plan gate_command:verify",
        "promote": "promote_command:promote",
    },
    "Grafana and Prometheus": {"generate": "generate_command:grafana prometheus"},
}
"""Subjects and commands in the order of the help, each with its file and functions: a command imports no other's."""

_GROUPS: dict[str, str] = {
    "reference": "Look up what contracts and verdicts can say.",
    "locate": "Name the operator whose numbers differ.",
    "alerts": "List alerts, and acknowledge or silence them.",
    "route": "Decide which kernel serves a slice.",
    "gate": "Decide whether a kernel version may leave its stage, and keep the evidence.",
    "generate": "Generate dashboards, alerts and rules from contracts. The same contracts give the same bytes.",
}
_NAMES = [name for commands in _SUBJECTS.values() for name in commands]


class _AllCommands(Group):  # type: ignore[misc, unused-ignore]
    """The commands in the order of the table."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the subjects in the order of the table."""
        self.commands = {name: self.commands[name] for name in _NAMES if name in self.commands}
        super().format_options(ctx, formatter)


_HELP = """\
Measure how far a training and an inference kernel have drifted apart, judge it against a contract, and act on it.

Examples:
  kc-otel check contracts
  kc-otel compare rollouts.npz --by task
  kc-otel gate run policy.yaml rollouts.npz
  kc-otel serve policy.yaml
  kc-otel status
"""
app = typer.Typer(
    cls=_AllCommands,
    name="kc-otel",
    help=_HELP,
    rich_markup_mode=None,
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


def register(app: typer.Typer, *names: str) -> None:
    """Add commands of the table to an app."""
    for subject, commands in _SUBJECTS.items():
        for name in (name for name in commands if name in names):
            file, found = "", []
            for word in commands[name].split():
                there, _, function = word.rpartition(":")
                file = there or file
                found.append(getattr(import_module(f"kc_otel.cli.{file}"), function))
            if name in _GROUPS:
                add_group(app, name, _GROUPS[name], subject, *found)
            else:
                app.command(name, cls=Command, rich_help_panel=subject)(*found)


def _register(wanted: str | None = None) -> None:
    """Add every command to the app or, if the first word of a command line names one, that command alone."""
    app.registered_commands.clear()
    app.registered_groups.clear()
    register(app, *([wanted] if wanted in _NAMES else _NAMES))


def main() -> None:
    """Run the command that the arguments name."""
    # Matrices of some hundred rows: threads of OpenBLAS for each core would wait for each other more than they compute.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    outlive_readers()
    _register(sys.argv[1] if len(sys.argv) > 1 else None)
    app(prog_name="kc-otel")


class _Unbroken(io.FileIO):
    """A file whose reader may go; what is written then goes nowhere."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def outlive_readers() -> None:
    """Ignore a closed standard output: neither the work nor the exit code depends on the reader."""
    out = sys.stdout
    if not isinstance(out, io.TextIOWrapper):
        return
    try:
        descriptor = out.fileno()
    except io.UnsupportedOperation:  # it is kept in memory by who called, and nobody reads it meanwhile
        return
    out.flush()
    raw = _Unbroken(descriptor, "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=out.encoding, errors=out.errors, line_buffering=out.line_buffering
    )
