"""`kc-otel diagnose`: what the scalars that a trainer has logged say of its kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kc_otel.cli.terminal import PrintJson, pairs, unusable
from kc_otel.contract.plain_text import plain


def diagnose(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE_OR_DIR",
            help="TensorBoard's event files, W&B's run-*.wandb or exported history (.csv, .jsonl), verl's .jsonl or "
            "console output, trainer_state.json.",
        ),
    ],
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE=NAME", help="Your own name of a series, such as drift=my/kl; repeatable."),
    ] = None,
    as_json: PrintJson = False,
) -> None:
    """Read a trainer's logged scalars, and print what they show about its two kernels.

    It also lists what averages cannot show. Exits with 0 whatever it finds, because averages are not a verdict; with 2
    when the log cannot be used.

    Examples:
      kc-otel diagnose runs/policy-7b
      kc-otel diagnose run-20260101.wandb --json
    """
    from kc_otel.offline.run_log.read_run_log import read_run_log  # noqa: PLC0415 - a quick --help
    from kc_otel.offline.run_log.run_rules import cannot_tell, diagnose_run, roles_of  # noqa: PLC0415

    with unusable():
        log = read_run_log(path)
        roles = roles_of(log, pairs("--name", name or [], "ROLE=NAME"))
        findings = diagnose_run(log, roles)
    steps = max(int(logged.size) for logged, _ in log.values())
    if as_json:
        found = [{"rule": finding.rule, "found": finding.found, "said": finding.said} for finding in findings]
        typer.echo(json.dumps({"steps": steps, "roles": roles, "rules": found, "cannot_tell": list(cannot_tell())}))
        return
    typer.echo(plain(f"{path}: {len(log)} numbers, {steps} steps"))
    typer.echo(
        plain("read as: " + (", ".join(f"{role} = {log_name}" for role, log_name in roles.items()) or "nothing"))
    )
    for mark, wanted in (("FOUND", True), ("not found", False), ("cannot tell", None)):
        for finding in findings:
            if finding.found is wanted:
                typer.echo(plain(f"{mark:11}  {finding.rule}: {finding.said}"))
    typer.echo("averages do not say:")
    for sentence in cannot_tell():
        typer.echo(f"  {sentence}")
