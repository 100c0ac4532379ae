"""`kc-otel doctor`: misconfigurations between a service and its verdicts, and how to fix them."""

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
from kc_otel.cli.terminal import PrintJson, unusable
from kc_otel.client.doctor import Finding, of_evaluator, of_path, of_sender
from kc_otel.contract.load import load_all
from kc_otel.contract.measuring_paths import MeasuringPath
from kc_otel.contract.model import Contract
from kc_otel.contract.plain_text import plain

_STYLE = {"error": "bold red", "warning": "yellow", "ok": "green"}


def doctor(
    contracts: Annotated[
        list[str] | None, typer.Argument(metavar="CONTRACT...", help="Contracts that should be judged.")
    ] = None,
    url: Url = DEFAULT_URL,
    path: Annotated[
        MeasuringPath | None,
        typer.Option(help="How this service measures; also lists the clauses that it can never judge."),
    ] = None,
    as_json: PrintJson = False,
) -> None:
    """Find out why verdicts are missing, and print how to fix it.

    Run it where the service runs: it checks this environment, then the evaluator. Exits with 1 if it finds an error,
    else 0.

    Examples:
      kc-otel doctor policy.yaml --path vllm
      kc-otel doctor --url https://drift.example.com
    """
    with unusable():
        loaded = load_all(contracts or [])
    if path is MeasuringPath.GATE:  # recordings are judged where they are
        sections = {"The gate": list(of_path(loaded, path))}
    else:
        sections = {
            "This process's environment": list(of_sender(os.environ, loaded, path)),
            f"The evaluator at {url}": _evaluator(url, loaded),
        }
    if as_json:
        typer.echo(json.dumps({name: [asdict(check) for check in found] for name, found in sections.items()}, indent=2))
    else:
        console = Console(soft_wrap=True)
        for name, found in sections.items():
            console.print(Text(name, style="bold"))
            for check in found or [Finding("ok", "no problem found")]:
                console.print(Text(f"  {check.level}: ", style=_STYLE[check.level]).append(plain(check.what), style=""))
                if check.remedy:
                    console.print(Text(f"      {plain(check.remedy)}"))
    raise typer.Exit(any(check.level == "error" for found in sections.values() for check in found))


def _evaluator(url: str, contracts: Sequence[Contract]) -> list[Finding]:
    try:
        clock, now = get(url, "/api/v1/overview")["now"], time.time()
        served, verdicts = get(url, "/api/v1/contracts")["contracts"], get(url, "/api/v1/verdicts")["verdicts"]
        return list(of_evaluator(get(url, "/api/v1/health"), served, verdicts, clock, now, contracts))
    except typer.Exit:  # the reason is on the terminal already
        return [
            Finding("error", "its API does not answer", "start `kc-otel serve CONTRACT...`, or pass --url and a token")
        ]
