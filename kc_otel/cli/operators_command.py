"""`kc-otel operators`: operators of two kernels on the same inputs, and what a contract says of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kc_otel.cli.terminal import PrintJson, refuse, unusable

if TYPE_CHECKING:
    from kc_otel.integrations.operators import CaseReport
    from kc_otel.judge.verdict import Verdict

__all__ = ["register"]

_WIDTH: Final = 8


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("operators")(operators)


def operators(
    comparisons: Annotated[
        str,
        typer.Argument(metavar="FILE.py:NAME", help="A list of kc_otel.integrations.operators.OperatorPair."),
    ],
    contract: Annotated[str | None, typer.Option(help="Contract whose operator clauses judge them.")] = None,
    as_json: PrintJson = False,
) -> None:
    """Compare operators over shapes and dtypes: max abs, relative, ULP, cosine, dependence on the batch.

    The file is a Python program and is run. Exits with 1 when a clause of the contract fails or one side alone is not
    finite, with 2 when the file, one of its operators or the contract cannot be used.
    """
    # Everything below needs NumPy, and the file most likely torch; --help does not.
    from kc_otel.contract.load import load  # noqa: PLC0415
    from kc_otel.integrations.operators import compare_callables  # noqa: PLC0415
    from kc_otel.offline.operators import as_json as json_of  # noqa: PLC0415
    from kc_otel.offline.operators import comparisons_in, judge  # noqa: PLC0415

    with unusable():
        promise = load(contract) if contract is not None else None
        wanted = comparisons_in(comparisons)
    try:
        reports = [
            report
            for each in wanted
            for report in compare_callables(
                each.train,
                each.inference,
                each.cases,
                operator=each.operator,
                batch_sizes=each.batch_sizes,
                ulp_of=each.ulp_of,
            )
        ]
    except Exception as error:  # noqa: BLE001 - operators are foreign code
        where = "; ".join(getattr(error, "__notes__", ()))
        refuse(f"{comparisons}: {type(error).__name__}: {error} ({where})")
    verdicts, left_out = judge(promise, reports) if promise is not None else ((), ())
    if as_json:
        typer.echo(json.dumps(json_of(reports, verdicts, left_out), indent=2, allow_nan=False))
    else:
        _print_tables(reports, verdicts, left_out)
    if any(verdict.status == "FAIL" for verdict in verdicts) or any(report.not_finite for report in reports):
        raise typer.Exit(1)


def _print_tables(reports: Sequence[CaseReport], verdicts: Sequence[Verdict], left_out: Sequence[str]) -> None:
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415 - only where tables are printed
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from kc_otel.offline.operators import COLUMNS, cells_of  # noqa: PLC0415

    console = Console()
    console.print("Training kernel against inference kernel, by row of the output\n")
    # What a case is takes a line of its own above its numbers, so that both fit into a terminal of 80 columns.
    lines = ("".join(heading.rjust(_WIDTH) for heading in headings) for headings in zip(*COLUMNS, strict=True))
    console.print(Text("\n".join(lines), "bold"), soft_wrap=True)
    for report in reports:
        output = "" if report.dtype in report.case else f" -> {report.dtype}"
        console.print(Text(f"{report.operator}  {report.case}{output}"), soft_wrap=True)
        console.print(Text("".join(cell.rjust(_WIDTH) for cell in cells_of(report)), "cyan"), soft_wrap=True)
    for report in reports:
        if report.not_finite:
            said = f"{report.operator}  {report.case}: {report.not_finite:,} rows are NaN or infinite on one side alone"
            console.print(Text(f"{said}; no verdict is about them", "bold red"), soft_wrap=True)
    if verdicts or left_out:
        judged = Table(box=SIMPLE_HEAD, title="Verdicts")
        for heading in ("verdict", "clause", "slice", "why"):
            judged.add_column(heading)
        for verdict in verdicts:
            judged.add_row(*map(Text, (str(verdict.status), verdict.cell.clause, verdict.cell.slice, verdict.reason)))
        console.print(judged)
    for sentence in left_out:
        console.print(Text(f"not judged: {sentence}"))
