"""`kc-otel gate` and `verify`: may a kernel version leave its stage, and is that evidence what it claims to be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from kc_otel.cli._client import DEFAULT_URL, Url, get
from kc_otel.promotion.stages import Stage

__all__ = ["register"]

_EXIT = {"advance": 0, "rollback": 1, "wait": 3}


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("gate")(gate)
    app.command("verify")(verify)


def gate(
    contract: Annotated[str, typer.Argument(help="Name of the contract.")],
    kernel: Annotated[str, typer.Argument(help="Short fingerprint of the inference kernel version.")],
    stage: Annotated[Stage, typer.Option(help="Stage that the version is in.")] = Stage.CANARY,
    windows: Annotated[int, typer.Option(help="Consecutive windows that must PASS.", min=1)] = 3,
    since: Annotated[float, typer.Option(help="Unix time at which the version entered the stage.")] = 0.0,
    evidence: Annotated[Path | None, typer.Option(help="Write the evidence to this file.")] = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Ask a promotion gate. Exits with 0 to advance, 1 to roll back, 3 to wait; it prints what is missing."""
    parameters = {"kernel": kernel, "stage": stage.value, "windows": windows, "since": str(since)}
    answer = get(url, f"/api/v1/gates/{contract}", **parameters)
    decision = answer["decision"]
    typer.echo(f"{decision['outcome']}: {kernel} in stage {stage}, {decision['windows']} of {windows} windows passed")
    for reason in decision["missing"]:
        typer.echo(f"  {reason}")
    if evidence is not None:
        if answer["evidence"] is None:
            print(f"nothing was written to {evidence}: no verdict speaks of {kernel} yet", file=sys.stderr)
        else:
            evidence.write_text(json.dumps(answer["evidence"], indent=2, sort_keys=True) + "\n", encoding="utf-8")
            typer.echo(f"evidence: {evidence}")
    raise typer.Exit(_EXIT[decision["outcome"]])


def verify(
    record: Annotated[Path, typer.Argument(help="File that `kc-otel gate --evidence` wrote.")],
) -> None:
    """Check evidence: its checksum, and that its verdicts and decision follow from its own numbers."""
    from kc_otel.promotion.evidence import EvidenceError, verify_evidence  # noqa: PLC0415 - a quick --help

    try:
        verify_evidence(json.loads(record.read_text(encoding="utf-8")))
    except OSError as error:
        print(f"{record}: cannot be read ({error.strerror})", file=sys.stderr)
        raise typer.Exit(2) from None
    except (EvidenceError, ValueError) as error:
        print(f"{record}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    typer.echo(f"{record}: sound")
