"""`kc-otel check`, `diff`, `schema`, `metrics`: a contract before anything runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kc_otel.cli.terminal import PrintJson, unusable
from kc_otel.contract.clause import About
from kc_otel.contract.diff import diff
from kc_otel.contract.load import Checked, check_all, load
from kc_otel.contract.measuring_paths import Coverage, MeasuringPath, coverage
from kc_otel.contract.registry import DERIVED, QUANTITIES, Origin
from kc_otel.contract.schema import json_schema
from kc_otel.contract.sentences import scopes
from kc_otel.offline.gate.gate_lint import shut_gates

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the commands about contracts."""
    app.command("check")(check)
    app.command("diff")(compare)
    app.command("schema")(schema)
    app.command("metrics")(metrics)


def check(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Contracts, folders of contracts, or - .")],
    path: Annotated[
        MeasuringPath | None, typer.Option("--for", help="Also say which clauses this way of measuring can fill.")
    ] = None,
    as_json: PrintJson = False,
) -> None:
    """Say everything that is wrong with contracts, by file and line. Exits 2 when a contract cannot be used."""
    results = [
        result if result.contract is None else result.with_findings(shut_gates(result.contract))
        for result in check_all(paths)
    ]
    problems = [problem for result in results for problem in result.problems]
    covered = {
        result.source: coverage(result.contract, path)
        for result in results
        if path is not None and result.contract is not None
    }
    if as_json:
        files = [
            _result(result) | ({"coverage": asdict(covered[result.source])} if result.source in covered else {})
            for result in results
        ]
        typer.echo(json.dumps({"files": files}, indent=2))
    else:
        for problem in problems:
            typer.echo(str(problem))
        for result in results:
            for scope in scopes(_abouts(result)):
                typer.echo(f"{result.source}: verdicts {scope}")
        errors = sum(problem.level == "error" for problem in problems)
        typer.echo(
            f"{_count(len(results), 'file')}: {_count(errors, 'error')}, {_count(len(problems) - errors, 'warning')}"
        )
        for source, found in covered.items():
            typer.echo("\n".join(_coverage(source, str(path), found)))
    if any(result.contract is None for result in results):
        raise typer.Exit(2)


def _coverage(source: str, path: str, found: Coverage) -> Iterator[str]:
    yield f"{source}: {path} can fill {found.reachable} of {found.cells} cells, {found.automatic} without more ado"
    if found.measured:
        yield f"  measured: {', '.join(found.measured)}"
    for attribute, where in found.attributes.items():
        yield f"  slices need {attribute}: {where}"
    for clause, why in found.unmeasured.items():
        yield f"  never {clause}: {why}"


def compare(
    old: Annotated[str, typer.Argument(metavar="OLD", help="The version in force, or - .")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The version under review, or - .")],
    as_json: PrintJson = False,
) -> None:
    """Say what a new version tightens, loosens, adds, drops. Exits 1 when anything loosens, 2 when unreadable."""
    with unusable():
        changes = diff(load(old), load(new))
    loosening = [change for change in changes if change.loosening]
    if as_json:
        listed = [asdict(change) for change in changes]
        typer.echo(json.dumps({"loosens": bool(loosening), "changes": listed}, indent=2, default=str))
    else:
        for change in changes:
            typer.echo(f"{change.kind:<9} {change.field}: {change.sentence}")
        typer.echo(
            f"{_count(len(changes), 'change')}, {len(loosening) or 'none'} loosening" if changes else "no difference"
        )
    if loosening:
        raise typer.Exit(1)


def schema() -> None:
    """Print the JSON Schema of a contract, for editors."""
    typer.echo(json.dumps(json_schema(), indent=2))


def metrics(as_json: PrintJson = False) -> None:
    """List what a clause's `metric` can be."""
    if as_json:
        listed: dict[str, list[dict[str, Any]]] = {
            "quantities": [
                {
                    "metric": quantity.key,
                    "name": quantity.name,
                    "unit": quantity.unit,
                    "per": str(quantity.per),
                    "from": str(quantity.source),
                    "statistic": quantity.statistic,
                    "meaning": quantity.meaning,
                    "source": quantity.source_text,
                }
                for quantity in QUANTITIES.values()
            ],
            "derived": [
                {
                    "metric": derived.key,
                    "unit": derived.unit,
                    "mean_of": derived.base,
                    "needs": list(derived.needs),
                    "meaning": derived.meaning,
                    "source": derived.source_text,
                }
                for derived in DERIVED.values()
            ],
        }
        typer.echo(json.dumps(listed, indent=2))
        return
    _print_tables()


def _print_tables() -> None:
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415 - only where tables are printed
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    console = Console()
    tables = {source: Table(box=SIMPLE_HEAD, title=f"Measured from {source}", expand=True) for source in Origin}
    derived = Table(box=SIMPLE_HEAD, title="Derived from a mean", expand=True)
    for table, third in (*((table, "default") for table in tables.values()), (derived, "needs")):
        for heading in ("metric", "unit", third, "meaning"):
            table.add_column(heading, no_wrap=heading in {"metric", "unit"})
    for quantity in QUANTITIES.values():
        default = f"{quantity.statistic} per {quantity.per}"
        row = (quantity.key, quantity.unit, default, quantity.meaning)
        tables[quantity.source].add_row(*map(Text, row))
    for bound in DERIVED.values():
        derived.add_row(*map(Text, (bound.key, bound.unit, ", ".join(bound.needs), bound.meaning)))
    for table in (*tables.values(), derived):
        console.print(table)
    console.print("Any gen_ai.* histogram can be limited too, under runtime.")


def _result(result: Checked) -> dict[str, Any]:
    contract = result.contract
    about = contract and {"name": contract.name, "version": contract.metadata.version, "hash": contract.hash}
    return {
        "file": Path(result.source).as_posix(),
        "contract": about,
        "about": _abouts(result),
        "problems": [asdict(problem) for problem in result.problems],
    }


def _abouts(result: Checked) -> dict[str, About]:
    """What verdicts on each clause are about, by the clause's id."""
    return {clause.id: clause.about for clause in result.contract.clauses} if result.contract else {}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
