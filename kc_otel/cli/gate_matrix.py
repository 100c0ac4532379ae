"""`kc-otel gate matrix`: one contract, a recording for each pair of a trainer's and a rollout's number format."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kc_otel.cli.gate_run import ContractFile
from kc_otel.cli.terminal import columns_of, pairs, refuse, unusable

if TYPE_CHECKING:
    from kc_otel.offline.gate.precision_matrix import MatrixCell, PrecisionMatrix
    from kc_otel.report.document import Block

__all__ = ["matrix"]

_KINDS: Final = {"PASS": "pass", "INCONCLUSIVE": "open", "NO_DATA": "silent", "FAIL": "fail"}


def matrix(
    contract: ContractFile,
    recordings: Annotated[
        list[str],
        typer.Argument(metavar="TRAINER/ROLLOUT=FILE...", help="A recording of each pair: bfloat16/fp8=run.npz."),
    ],
    columns: Annotated[str | None, typer.Option(help="Names of columns: train=A,inference=B.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the picture and the table.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Judge every pair of a trainer and a rollout by one contract: which formats fit together, and how closely.

    Exits with 0 whatever the verdicts, 2 when something cannot be used.
    """
    from kc_otel.contract.load import load  # noqa: PLC0415 - a quick --help
    from kc_otel.offline.gate.precision_matrix import judge_matrix  # noqa: PLC0415
    from kc_otel.recordings import load_recording  # noqa: PLC0415
    from kc_otel.report.document import to_html, to_markdown  # noqa: PLC0415

    with unusable():
        promise = load(contract)
        files = pairs("TRAINER/ROLLOUT=FILE", recordings, "TRAINER/ROLLOUT=FILE")
        read = {_pair(name): load_recording(path, columns=columns_of(columns) or None) for name, path in files.items()}
        found = judge_matrix(promise, read, time.time())
    title = f"{promise.name} v{promise.metadata.version}: {len(found.cells)} pairs of a trainer and a rollout"
    blocks = _blocks(title, found)
    typer.echo(_plain(promise.name, found) if as_json else to_markdown(blocks).rstrip())
    if html is not None:
        try:
            html.write_text(to_html(title, blocks), encoding="utf-8")
        except OSError as error:
            refuse(f"{html}: cannot be written ({error.strerror})")


def _pair(name: str) -> tuple[str, str]:
    trainer, _, rollout = name.partition("/")
    if not trainer or not rollout or "/" in rollout:
        raise ValueError(f"{name!r} is no pair; write TRAINER/ROLLOUT=FILE, such as bfloat16/fp8=run.npz")
    return trainer, rollout


def _blocks(title: str, found: PrecisionMatrix) -> list[Block]:
    from kc_otel.charts import draw_matrix  # noqa: PLC0415
    from kc_otel.charts.matrix_chart import MatrixSquare  # noqa: PLC0415
    from kc_otel.report.document import Bullets, Figure, Heading, Table, Text  # noqa: PLC0415

    squares = {
        pair: MatrixSquare(_KINDS[cell.status.value], cell.status.value, _spent(cell))
        for pair, cell in found.cells.items()
    }
    chart = draw_matrix("Trainer by rollout", found.trainers, found.rollouts, squares)
    header = ("trainer \\ rollout", *found.rollouts)
    rows = tuple(
        (trainer, *(_said(found.cells.get((trainer, rollout))) for rollout in found.rollouts))
        for trainer in found.trainers
    )
    blocks: list[Block] = [Heading(1, title)]
    if chart is not None:
        blocks.append(Figure(chart, "Rows are trainers, columns rollouts.", repeated=True))
    blocks += [
        Text("Of each pair the verdict that is worst, and how much of its limit the estimate is."),
        Table(header, rows),
    ]
    details = tuple(f"{'/'.join(pair)}: {_detail(cell)}" for pair, cell in found.cells.items())
    blocks += [Heading(2, "What is worst"), Bullets(details)]
    if found.left_out:
        blocks += [Heading(2, "Not judged"), Bullets(tuple(map(str, found.left_out)))]
    return blocks


def _spent(cell: MatrixCell) -> str:
    return "not known" if math.isnan(cell.spent) else f"{100 * cell.spent:,.0f} % of its limit"


def _said(cell: MatrixCell | None) -> str:
    return "" if cell is None else f"{cell.status}: {_spent(cell)}"


def _detail(cell: MatrixCell) -> str:
    from kc_otel.contract.words import interval, number, place  # noqa: PLC0415
    from kc_otel.judge.plain_json import finite_or_none  # noqa: PLC0415

    one = cell.worst
    bounds = interval(finite_or_none(one.lower), finite_or_none(one.upper))
    return (
        f"{cell.status} {one.cell.clause} on {place(one.cell.slice)}: {number(finite_or_none(one.estimate))}, interval "
        f"{bounds}, limit {number(one.limit)}; {cell.sequences:,} sequences"
    )


def _plain(contract: str, found: PrecisionMatrix) -> str:
    from kc_otel.judge.plain_json import finite_or_none  # noqa: PLC0415

    cells = [
        {
            "trainer": trainer,
            "rollout": rollout,
            "status": cell.status.value,
            "clause": cell.worst.cell.clause,
            "slice": cell.worst.cell.slice,
            "estimate": finite_or_none(cell.worst.estimate),
            "lower": finite_or_none(cell.worst.lower),
            "upper": finite_or_none(cell.worst.upper),
            "limit": cell.worst.limit,
            "sequences": cell.sequences,
        }
        for (trainer, rollout), cell in found.cells.items()
    ]
    return json.dumps({"contract": contract, "cells": cells}, indent=2)
