"""`kc-otel remedy`: which correction of the rollout mismatch keeps a contract at the least variance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kc_otel.cli.api_client import DEFAULT_URL, Url
from kc_otel.cli.incident_findings import By, IncidentId, attach, failing_cell
from kc_otel.cli.terminal import PrintJson, columns_of, refuse, unusable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kc_otel.offline.remedy.trainers import Trainer
    from kc_otel.report.document import Block

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("remedy")(remedy)


def remedy(
    recording: Annotated[
        str, typer.Argument(metavar="RECORDING", help="Rollouts before any correction: .npz, .jsonl or .parquet")
    ],
    contract: Annotated[str, typer.Option(help="Contract whose clauses a correction has to keep, on every slice.")],
    trainer: Annotated[list[str] | None, typer.Option(help="Only verl, trl, slime; repeatable.")] = None,
    columns: Annotated[str | None, typer.Option(help="Names of columns: train=A,inference=B.")] = None,
    out: Annotated[
        list[Path] | None, typer.Option(help="Write a report with pictures too, .html or .md; repeatable.")
    ] = None,
    as_json: PrintJson = False,
    incident: IncidentId = None,
    by: By = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Replay the importance-sampling corrections of RL trainers on recorded rollouts, and print the line to paste.

    Every truncation, mask and rejection rule that a trainer has, over a grid of thresholds: the bias that it leaves,
    with intervals over sequences, the variance and effective sample size that it costs, what it drops, by slice and
    sign of the advantage. Exits with 0 where a trainer has one that keeps the contract, with 1 where none has, and with
    2 when the recording or an option cannot be used.
    """
    # Everything below needs NumPy, rich or more; --help does not.
    from kc_otel.contract.load import load  # noqa: PLC0415
    from kc_otel.offline.remedy.remedy import as_data  # noqa: PLC0415
    from kc_otel.offline.remedy.remedy import remedy as replay  # noqa: PLC0415
    from kc_otel.recordings import load_recording  # noqa: PLC0415
    from kc_otel.report.document import to_html, to_markdown  # noqa: PLC0415
    from kc_otel.report.remedy_report import remedy_blocks, remedy_sentence  # noqa: PLC0415

    for target in out or []:
        if target.suffix not in {".html", ".md"}:
            refuse(f"--out: {target} is neither HTML nor Markdown; give it a name that ends in .html or .md")
    with unusable():
        wanted, promise = _trainers(trainer or []), load(contract)
        cell = None if incident is None else failing_cell(url, promise, incident)
        found = replay(load_recording(recording, columns=columns_of(columns)), promise, wanted)
        blocks = remedy_blocks(found)
        for target in out or []:
            text = to_html(f"Remedies for {found.source}", blocks) if target.suffix == ".html" else to_markdown(blocks)
            target.write_text(text, encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(as_data(found), indent=2, allow_nan=False))
    else:
        from rich.console import Console  # noqa: PLC0415

        console = Console()
        for part in _shown(blocks):
            console.print(part, soft_wrap=isinstance(part, str), markup=False, highlight=False)
    if cell is not None:
        text = remedy_sentence(found)
        typer.echo(attach(url, cell.incident, "remedy", cell.slice, text, as_data(found), by), err=True)
    if not any(found.chosen.values()):
        raise typer.Exit(1)


def _trainers(names: Sequence[str]) -> tuple[Trainer, ...]:
    from kc_otel.offline.remedy.trainers import TRAINERS  # noqa: PLC0415

    unknown = [name for name in names if name not in TRAINERS]
    if unknown:
        msg = f"--trainer: {unknown[0]!r} is not known; write one of {', '.join(TRAINERS)}"
        raise ValueError(msg)
    return tuple(each for each in TRAINERS if not names or each in names)


def _shown(blocks: Sequence[Block]) -> Iterator[Any]:
    """What a terminal shows of blocks; of a picture nothing. Lines to paste are never broken."""
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415
    from rich.table import Table as Grid  # noqa: PLC0415
    from rich.text import Text as Words  # noqa: PLC0415

    from kc_otel.contract.plain_text import plain  # noqa: PLC0415
    from kc_otel.report.document import Bullets, Heading, Table, Text  # noqa: PLC0415

    pictures = "Bias against variance"
    for block in blocks:
        match block:
            case Heading(_, text) if text != pictures:
                yield Words(f"\n{plain(text)}", style="bold")
            case Text(text, _):
                yield plain(text)
            case Bullets(items):
                yield "\n".join(f"- {plain(item)}" for item in items)
            case Table(header, rows):
                grid = Grid(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
                for name in header:
                    grid.add_column(Words(name), overflow="fold")
                for row in rows:
                    grid.add_row(*(Words(plain(cell)) for cell in row))
                yield grid
