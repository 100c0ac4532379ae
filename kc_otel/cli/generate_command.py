"""`kc-otel generate`: dashboards, alerts and rules from contracts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kc_otel.cli.terminal import unusable

if TYPE_CHECKING:
    from kc_otel.contract import Contract
    from kc_otel.generate.files import GeneratedFile

__all__ = ["register"]

_Contracts = Annotated[
    list[Path], typer.Argument(help="Contract files, or folders of them.", metavar="CONTRACT...", show_default=False)
]
_Out = Annotated[Path, typer.Option("--out", help="Folder to write below.", metavar="DIR", show_default=False)]
_Check = Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 when a file is missing or would change.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    commands = typer.Typer(
        help="Dashboards, alerts and rules from contracts. The same contracts give the same bytes.",
        no_args_is_help=True,
    )
    commands.command("grafana")(grafana)
    commands.command("prometheus")(prometheus)
    commands.command("kubernetes")(kubernetes)
    commands.command("collector")(collector)
    commands.command("semconv")(semconv)
    app.add_typer(commands, name="generate")


def grafana(
    contracts: _Contracts,
    out: _Out,
    check: _Check = False,
    datasource_uid: Annotated[
        str, typer.Option(help="UID of the Prometheus data source that the alerts query.")
    ] = "prometheus",
) -> None:
    """Dashboards, alerts for Grafana's folder provisioning/alerting, and how people are told of them."""
    from kc_otel.generate.grafana import grafana_files  # noqa: PLC0415 - a quick --help

    _generate(contracts, out, lambda loaded: grafana_files(loaded, datasource_uid), check=check)


def prometheus(contracts: _Contracts, out: _Out, check: _Check = False) -> None:
    """Alerting rules on the evaluator's verdicts, or from raw histograms in Prometheus, Mimir or VictoriaMetrics.

    With them come tests for promtool, resources for Kubernetes, and Alertmanager's routes.
    """
    from kc_otel.generate.prometheus import prometheus_files  # noqa: PLC0415 - a quick --help

    _generate(contracts, out, prometheus_files, check=check)


def kubernetes(
    contracts: _Contracts,
    out: _Out,
    check: _Check = False,
    image: Annotated[str, typer.Option(help="The evaluator's image, without its tag.")] = "kc-otel",
) -> None:
    """An evaluator on Kubernetes: a Kustomize base, components of rules and boards, and an overlay of everything."""
    from kc_otel.generate.grafana import grafana_files  # noqa: PLC0415
    from kc_otel.generate.kubernetes import kubernetes_files  # noqa: PLC0415 - a quick --help

    def made(loaded: Sequence[Contract]) -> Sequence[GeneratedFile]:
        boards = [each for each in grafana_files(loaded) if "dashboards" in each.path.parts]
        return kubernetes_files(loaded, _texts(contracts), boards, image)

    _generate(contracts, out, made, check=check)


def collector(
    contracts: _Contracts,
    out: _Out,
    evaluator: Annotated[
        list[str],
        typer.Option(help="Where an evaluator listens for OTLP over gRPC; once for each.", metavar="HOST:PORT"),
    ],
    check: _Check = False,
) -> None:
    """An OpenTelemetry Collector in front of several evaluators, and the contracts that each of them judges."""
    from kc_otel.generate.collector import collector_files  # noqa: PLC0415 - a quick --help

    def made(loaded: Sequence[Contract]) -> Sequence[GeneratedFile]:
        files = collector_files(loaded, _texts(contracts), evaluator)
        left = sorted({*(out / "collector" / "evaluators").glob("*/*.yaml")} - {out / each.path for each in files})
        if left:
            msg = "\n".join(f"{path}: is judged elsewhere now, or nowhere; remove the file" for path in left)
            raise ValueError(msg)
        return files

    _generate(contracts, out, made, check=check)


def semconv(out: _Out, check: _Check = False) -> None:
    """Every name that kc-otel sends, as a semantic-convention registry for OpenTelemetry Weaver."""
    from kc_otel.generate.semantic_conventions import semantic_convention_files  # noqa: PLC0415 - a quick --help

    _write(semantic_convention_files(), out, check=check)


def _texts(paths: Sequence[Path]) -> dict[str, str]:
    """The contracts' YAML, by name."""
    from kc_otel.contract.load import check_all  # noqa: PLC0415

    known = ((each.contract, each.source) for each in check_all(paths))
    return {contract.name: Path(source).read_text("utf-8") for contract, source in known if contract is not None}


def _generate(
    paths: Sequence[Path],
    out: Path,
    make: Callable[[Sequence[Contract]], Sequence[GeneratedFile]],
    *,
    check: bool,
) -> None:
    """Exit code 0 when done, 1 when something is stale under --check, 2 when it cannot be done."""
    from kc_otel.contract import load_all  # noqa: PLC0415

    with unusable(ModuleNotFoundError):
        files = make(load_all(paths))
    _write(files, out, check=check)


def _write(files: Sequence[GeneratedFile], out: Path, *, check: bool) -> None:
    from kc_otel.generate.files import stale, write  # noqa: PLC0415

    with unusable():
        changed = stale(files, out) if check else write(files, out)
    for file in files:
        state = "unchanged" if file not in changed else "stale" if check else "written"
        typer.echo(f"{state:9} {out / file.path}")
    if check and changed:
        typer.echo("run the same command without --check to write what is stale", err=True)
        raise typer.Exit(1)
