"""`kc-otel doctor`: what is misconfigured between a service and its verdicts, and how to mend it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from kc_otel.cli.api_client import DEFAULT_URL, Url, get
from kc_otel.cli.terminal import refuse
from kc_otel.client.doctor import Finding, of_evaluator, of_path, of_sender
from kc_otel.contract import ContractError, load_all
from kc_otel.contract.measuring_paths import MeasuringPath
from kc_otel.contract.model import Contract
from kc_otel.contract.plain_text import plain

__all__ = ["register"]

_STYLE = {"error": "bold red", "warning": "yellow", "ok": "green"}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(doctor)


def doctor(
    contracts: Annotated[list[str] | None, typer.Argument(help="Contract files that should be judged.")] = None,
    url: Url = DEFAULT_URL,
    path: Annotated[
        MeasuringPath | None, typer.Option(help="How this service measures; says what it never can.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON.")] = False,
) -> None:
    """Say what keeps verdicts from coming, run where the service runs: its environment, then the evaluator.

    Exits with 1 when something is an error, else 0.
    """
    try:
        loaded = load_all(contracts or [])
    except ContractError as error:
        refuse(error)
    if path is MeasuringPath.GATE:  # recordings are judged where they are
        sections = {"The gate": list(of_path(loaded, path))}
    else:
        sections = {
            "This process's environment": list(of_sender(os.environ, loaded, path)),
            f"The evaluator at {url}": _evaluator(url, loaded),
        }
    if as_json:
        typer.echo(json.dumps({name: [asdict(one) for one in found] for name, found in sections.items()}, indent=2))
    else:
        console = Console(soft_wrap=True)
        for name, found in sections.items():
            console.print(Text(name, style="bold"))
            for one in found or [Finding("ok", "nothing to mend")]:
                console.print(Text(f"  {one.level}: ", style=_STYLE[one.level]).append(plain(one.what), style=""))
                if one.remedy:
                    console.print(Text(f"      {plain(one.remedy)}"))
    raise typer.Exit(any(one.level == "error" for found in sections.values() for one in found))


def _evaluator(url: str, contracts: Sequence[Contract]) -> list[Finding]:
    try:
        clock, now = get(url, "/api/v1/overview")["now"], time.time()
        served, verdicts = get(url, "/api/v1/contracts")["contracts"], get(url, "/api/v1/verdicts")["verdicts"]
        return list(of_evaluator(get(url, "/api/v1/health"), served, verdicts, clock, now, contracts))
    except typer.Exit:  # the reason is on the terminal already
        return [
            Finding("error", "its API gives no answer", "start `kc-otel serve CONTRACT...`, or say --url and a token")
        ]
