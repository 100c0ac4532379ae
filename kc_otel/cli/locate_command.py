"""`kc-otel locate`: which operator of a kernel it is, and what part of the drift is its."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kc_otel.cli.terminal import PrintJson, refuse, unusable
from kc_otel.contract.load import load
from kc_otel.contract.slices import ALL

if TYPE_CHECKING:
    from kc_otel.contract.clause import Clause
    from kc_otel.contract.model import Contract
    from kc_otel.diagnose.located import Located

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("locate")(locate_command)


def locate_command(
    contract: Annotated[str, typer.Argument(metavar="CONTRACT", help="The contract that fails.")],
    train: Annotated[str, typer.Option(metavar="KERNEL", help="FILE.py:NAME, or a folder with a checkpoint.")],
    infer: Annotated[str, typer.Option(metavar="KERNEL", help="Likewise.")],
    sequences: Annotated[
        Path, typer.Option(metavar="FILE", help="A recording, a spool, or JSON lines with prompt_ids and token_ids.")
    ],
    slice: Annotated[str, typer.Option(metavar="NAME", help="Only sequences of this slice.")] = ALL,
    clause: Annotated[
        str | None, typer.Option(metavar="ID", help="The clause that fails; its metric is divided.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="SEQUENCES", help="The first so many.")] = 16,
    precision: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Number format whose rounding is no fault, such as bfloat16.")
    ] = None,
    shares: Annotated[bool, typer.Option(help="Divide the drift among what is above noise.")] = True,
    as_json: PrintJson = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the answer with its picture.")] = None,
) -> None:
    """Name the operator whose numbers differ by more than noise, with its layer, module, tensor and share of the drift.

    Runs the kernels' programs. Exits with 0 where nothing is above noise, with 1 where something is, with 2 where the
    two cannot be compared.
    """
    with unusable(ModuleNotFoundError, TypeError):
        promise = load(contract)
        failing = _clause(promise, clause)
        from kc_otel.diagnose.kernel_sources import torch_kernel_from  # noqa: PLC0415 - torch
        from kc_otel.diagnose.token_sequences import read_sequences  # noqa: PLC0415
        from kc_otel.diagnose.torch_locate import locate  # noqa: PLC0415

        given = read_sequences(sequences, contract=promise, slice=slice, most=limit)
        kernels = torch_kernel_from(train, promise.kernels.train), torch_kernel_from(infer, promise.kernels.inference)
        located = locate(promise, *kernels, given, slice=slice, clause=failing, shares=shares, precision=precision)
    _show(located, as_json=as_json, html=html)
    if located.findings:
        raise typer.Exit(1)


def _clause(contract: Contract, wanted: str | None) -> Clause | None:
    if wanted is None:
        return None
    found = next((each for each in contract.clauses if each.id == wanted), None)
    if found is not None:
        return found
    known = ", ".join(each.id for each in contract.clauses)
    return refuse(f"--clause: {wanted!r} is not in the contract; there are {known}")


def _show(located: Located, *, as_json: bool, html: Path | None) -> None:
    from kc_otel.diagnose.located import located_json  # noqa: PLC0415
    from kc_otel.diagnose.located_text import HEADER, depth_chart, located_lines, rows_of  # noqa: PLC0415

    lines = list(located_lines(located))
    if as_json:
        typer.echo(json.dumps(located_json(located), indent=2, allow_nan=False))
    else:
        typer.echo("\n".join(lines))
    if html is not None:
        from kc_otel.report.document import Block, Figure, Heading, Table, Text, to_html  # noqa: PLC0415

        chart = depth_chart(located)
        blocks: list[Block] = [Heading(1, "Which operator it is")]
        blocks += [Text(each) for each in lines[: lines.index("")]]
        blocks += [Figure(chart, chart.text), Heading(2, "Every boundary"), Table(HEADER, tuple(rows_of(located)))]
        blocks += [Text(f"Note: {each}.") for each in located.notes]
        with unusable():
            html.write_text(to_html(f"{located.contract}: located", blocks), encoding="utf-8")
        typer.echo(f"written to {html}", err=True)
