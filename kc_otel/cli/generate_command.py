"""`kc-otel generate`: dashboards, alerts and rules from contracts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kc_otel.cli.terminal import unusable

if TYPE_CHECKING:
    from kc_otel.contract.model import Contract
    from kc_otel.generate.files import GeneratedFile

_Contracts = Annotated[
    list[Path], typer.Argument(help="Contract files, or folders of them.", metavar="CONTRACT...", show_default=False)
]
_Out = Annotated[Path, typer.Option("--out", help="Folder to write below.", metavar="DIR", show_default=False)]
_Check = Annotated[
    bool, typer.Option("--check", help="Write nothing; exit 1 when a file is missing, stale or left over.")
]
_Evaluator = Annotated[str, typer.Option("--evaluator-url", help="The evaluator: alerts link to it.", metavar="URL")]


def grafana(
    contracts: _Contracts,
    out: _Out,
    check: _Check = False,
    datasource_uid: Annotated[str, typer.Option(help="UID of the Prometheus data source.")] = "prometheus",
    evaluator_url: _Evaluator = "",
) -> None:
    """Generate dashboards and alerts for Grafana's provisioning.

    Examples:
      kc-otel generate grafana contracts --out dashboards --evaluator-url https://drift.example.com
    """
    from kc_otel.generate.files import Sites  # noqa: PLC0415
    from kc_otel.generate.grafana import grafana_files  # noqa: PLC0415 - a quick --help

    _generate(
        contracts,
        out,
        lambda loaded: grafana_files(loaded, datasource_uid, Sites(evaluator=evaluator_url)),
        check=check,
    )


def prometheus(
    contracts: _Contracts,
    out: _Out,
    check: _Check = False,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="Write PrometheusRule resources.")] = False,
    grafana_url: Annotated[str, typer.Option("--grafana-url", help="Grafana: alerts link to it.", metavar="URL")] = "",
    evaluator_url: _Evaluator = "",
) -> None:
    """Generate alerting rules for Prometheus or Mimir, and routes for Alertmanager.

    Writes rules on the evaluator's verdicts, and rules on raw histograms.

    Examples:
      kc-otel generate prometheus contracts --out dashboards --grafana-url https://grafana.example.com
      kc-otel generate prometheus contracts --out manifests --kubernetes
    """
    from kc_otel.generate.files import Sites  # noqa: PLC0415
    from kc_otel.generate.prometheus import kubernetes_files, prometheus_files  # noqa: PLC0415 - a quick --help

    make = kubernetes_files if kubernetes else prometheus_files
    _generate(contracts, out, lambda loaded: make(loaded, Sites(grafana_url, evaluator_url)), check=check)


def _generate(
    paths: Sequence[Path], out: Path, make: Callable[[Sequence[Contract]], Sequence[GeneratedFile]], *, check: bool
) -> None:
    """Exit code 0 when done, 1 when something is stale or left over under --check, 2 when it cannot be done."""
    from kc_otel.contract.load import load_all  # noqa: PLC0415
    from kc_otel.generate.files import left_over, stale, write  # noqa: PLC0415

    with unusable():
        files = make(load_all(paths))
        changed = stale(files, out) if check else write(files, out)
        others = left_over(files, out)
    for file in files:
        state = "unchanged" if file not in changed else "stale" if check else "written"
        typer.echo(f"{state:9} {out / file.path}")
    for path in others:
        typer.echo(f"left over {path}")
    if check and changed:
        typer.echo("run the same command without --check to write what is stale", err=True)
    if others:
        typer.echo("delete what is left over: its contract is not among those given, and its silence alerts", err=True)
    if check and (changed or others):
        raise typer.Exit(1)
