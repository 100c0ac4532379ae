"""`kc-otel check`, `diff`, `gate plan` and `reference`: a contract before anything runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kc_otel.cli.terminal import PrintJson, refuse, show, table_lines, unusable
from kc_otel.contract.clause import About
from kc_otel.contract.diff import diff
from kc_otel.contract.errors import LintFinding, problem_lines
from kc_otel.contract.input_reasons import REASONS
from kc_otel.contract.load import Checked, check_all, load
from kc_otel.contract.measuring_paths import MeasuringPath, left_open
from kc_otel.contract.model import Contract
from kc_otel.contract.registry.clause_metrics import DERIVED, QUANTITIES, Origin
from kc_otel.contract.schema import json_schema
from kc_otel.contract.sentences import scopes
from kc_otel.contract.slices import ALL
from kc_otel.contract.words import listed, plural, together

if TYPE_CHECKING:
    from kc_otel.judge.sample_sizes import Needed


def check(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Contracts, folders of contracts, or - for standard input.")
    ],
    path: Annotated[
        MeasuringPath | None, typer.Option("--for", help="Also say what this way of measuring leaves open.")
    ] = None,
    as_json: PrintJson = False,
) -> None:
    """Report every error in contracts, with file and line.

    Exits with 2 when a contract cannot be used.

    Examples:
      kc-otel check contracts
      kc-otel check policy.yaml --for trl
    """
    with unusable():
        results = [
            result if result.contract is None else result.with_findings(shut_gates(result.contract))
            for result in check_all(paths)
        ]
    problems = [problem for result in results for problem in result.problems]
    lines = list(problem_lines(problems))
    for result in results:
        lines += [f"{result.source}: verdicts {scope}" for scope in scopes(_abouts(result.contract))]
        clauses = result.contract.clauses if result.contract else ()
        if assumed := ", ".join(clause.id for clause in clauses if clause.unit == "sequence"):
            lines.append(f"{result.source}: assumes that sequences are independent: {assumed}")
    errors = sum(problem.level == "error" for problem in problems)
    counts = f"{_count(errors, 'error')}, {_count(len(problems) - errors, 'warning')}"
    lines.append(f"{_count(len(results), 'file')}: {counts}")
    contracts = [result.contract for result in results if result.contract is not None]
    open_parts = [found for contract in contracts for found in (left_open(contract, path) if path else ())]
    lines += [f"{found.what}: {found.remedy}" if found.remedy else found.what for found in open_parts]
    said = {} if path is None else {str(path): [asdict(found) for found in open_parts]}
    show(lines, {"files": list(map(_result, results)), **said}, as_json=as_json)
    if any(result.contract is None for result in results):
        raise typer.Exit(2)


def shut_gates(contract: Contract) -> Iterator[LintFinding]:
    """A finding for every limit that nothing can PASS where promotions depend on it; elsewhere it is a choice."""
    holds = any(action.kind == "hold-promotion" for step in contract.escalation for action in step.do)
    if "promotion" not in contract.model_fields_set and not holds:
        return
    from kc_otel.judge.sample_sizes import observations_to_pass  # noqa: PLC0415 - SciPy

    known: dict[tuple[str, float], bool] = {}
    for section in ("numerical", "statistical", "runtime"):
        for index, clause in enumerate(getattr(contract, section)):
            for slice in (ALL, *clause.slices):
                limit = clause.limit_for(slice)
                key = (clause.id, limit)
                if key in known:
                    continue
                known[key] = observations_to_pass(contract, clause, slice).observations is not None
                if not known[key]:
                    where = (section, index, "limit") if slice == ALL else (section, index, "slices", slice)
                    yield LintFinding(
                        where,
                        f"{limit:g} keeps every promotion gate shut: even for identical kernels, no number of "
                        f"observations shows that {clause.id} is kept at confidence "
                        f"{contract.observability.confidence:g}; write a larger limit",
                    )


def plan(
    contract: Annotated[str, typer.Argument(metavar="CONTRACT", help="The contract's file, or - for standard input.")],
) -> None:
    """Print how many observations each clause needs.

    Prints the best case (a window with identical kernels) and the typical case (a gate that stops once it is decided).
    Exits with 2 if the gate can never open or the contract cannot be used.

    Examples:
      kc-otel gate plan policy.yaml
    """
    from kc_otel.judge.sample_sizes import observations_to_pass, typical_sizes  # noqa: PLC0415 - SciPy

    with unusable():
        loaded = load(contract)
    needed = [observations_to_pass(loaded, of, slice) for of in loaded.clauses for slice in loaded.slices_for(of)]
    typer.echo("at best, with identical kernels, in each window:")
    _print_rows(
        ("clause", "slice", "observations"), ((cell.clause, cell.slice, _observations(cell)) for cell in needed)
    )
    typer.echo("typically, until a gate that stops when it can (`gate live`) is decided:")
    _print_rows(
        ("clause", "slice", "PASS at half the limit", "at 80 %", "FAIL at twice", ""),
        (
            (row.clause, row.slice, *("-" if size is None else f"{size:,}" for size in row.sizes), plural(row.unit))
            for row in typical_sizes(loaded)
        ),
    )
    if never := together((cell.clause, cell.slice) for cell in needed if cell.observations is None):
        why = "can never pass: not even identical kernels can show that this limit is kept; loosen it"
        refuse("\n".join(f"{clause} on {listed(slices)} {why}" for clause, slices in never.items()))


def diff_command(
    old: Annotated[str, typer.Argument(metavar="OLD", help="The version in force, or - for standard input.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The version under review, or - for standard input.")],
    as_json: PrintJson = False,
) -> None:
    """Print what a new version of a contract tightens, loosens, adds and drops.

    Exits with 1 when anything loosens, with 2 when a version cannot be read.

    Examples:
      kc-otel diff in-force.yaml policy.yaml
      kc-otel diff - policy.yaml < in-force.yaml
    """
    with unusable():
        changes = diff(load(old), load(new))
    loosening = [change for change in changes if change.loosening]
    lines = [f"{change.kind:<9} {change.field}: {change.sentence}" for change in changes]
    total = f"{_count(len(changes), 'change')}, {len(loosening) or 'none'} loosening" if changes else "no difference"
    data = {"loosens": bool(loosening), "changes": list(map(asdict, changes))}
    show([*lines, total], data, as_json=as_json)
    if loosening:
        raise typer.Exit(1)


def schema() -> None:
    """Print the JSON Schema of a contract, for editors.

    Examples:
      kc-otel reference schema > kernel-contract.schema.json
    """
    typer.echo(json.dumps(json_schema(), indent=2))


def metrics() -> None:
    """List every metric that a clause can limit.

    Examples:
      kc-otel reference metrics
    """
    for source in Origin:
        typer.echo(f"Measured from {source}:")
        for quantity in QUANTITIES.values():
            if quantity.source is source:
                about = f"{quantity.unit}, by default {quantity.statistic} per {quantity.per}"
                typer.echo(f"  {quantity.key} ({about})\n      {quantity.meaning}")
    typer.echo("Derived from a mean:")
    for derived in DERIVED.values():
        typer.echo(f"  {derived.key} ({', '.join((derived.unit, *derived.needs))})\n      {derived.meaning}")
    typer.echo("Any gen_ai.* histogram can be limited too, under runtime.")


def invalid_input() -> None:
    """List the reasons for not measuring a sequence, each with its meaning and remedy.

    Examples:
      kc-otel reference invalid-input
    """
    for name, reason in REASONS.items():
        typer.echo(f"{name}\n    {reason.meaning}\n    {reason.remedy}")


def _result(result: Checked) -> dict[str, Any]:
    contract = result.contract
    about = contract and {"name": contract.name, "version": contract.metadata.version, "hash": contract.hash}
    return {
        "file": Path(result.source).as_posix(),
        "contract": about,
        "about": _abouts(contract),
        "problems": [asdict(problem) for problem in result.problems],
    }


def _abouts(contract: Contract | None) -> dict[str, About]:
    return {clause.id: clause.about for clause in contract.clauses} if contract else {}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _print_rows(header: Sequence[str], rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table; slices of a clause whose rows are alike have one row."""
    alike = together(((clause, *rest), slice) for clause, slice, *rest in rows)
    for line in table_lines(header, [(clause, listed(slices), *rest) for (clause, *rest), slices in alike.items()]):
        typer.echo(f"  {line}")


def _observations(cell: Needed) -> str:
    if cell.observations is None:
        return "never"
    count = max(cell.observations, cell.minimum)
    return f"{count:,} {cell.unit if count == 1 else plural(cell.unit)}"
