"""`kc-otel compare-log`: log-probabilities of both kernels from a file, in every tool's terms and in ours."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from kc_otel.cli.terminal import PrintJson, columns_of, unusable

if TYPE_CHECKING:
    from kc_otel.offline.compare_log.comparison import Tool
    from kc_otel.offline.gate.observations import RecordingSlice

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("compare-log")(compare_log)


def compare_log(
    recording: Annotated[str, typer.Argument(metavar="RECORDING", help=".npz, .jsonl, .jsonl.gz or .parquet")],
    contract: Annotated[
        str | None, typer.Option(help="Contract whose slices are shown, and which judges them.")
    ] = None,
    by: Annotated[list[str] | None, typer.Option(help="Attribute whose values are slices; repeatable.")] = None,
    slice: Annotated[list[str] | None, typer.Option("--slice", help="Only this slice; repeatable.")] = None,
    tool: Annotated[
        list[str] | None, typer.Option(help="Only verl, nemo-rl, trl, prime-rl, llama.cpp; repeatable.")
    ] = None,
    columns: Annotated[str | None, typer.Option(help="Names of columns: train=A,inference=B.")] = None,
    confidence: Annotated[float, typer.Option(help="Of each interval.", min=0.5, max=1 - 1e-9)] = 0.99,
    clip: Annotated[float | None, typer.Option(help="PPO clip range; the contract's, else 0.2.", min=1e-9)] = None,
    as_json: PrintJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
) -> None:
    """Print what verl, NeMo-RL, TRL, prime-rl and llama.cpp would report of a recording, beside our own, by slice.

    Exits with 2 when the recording or an option cannot be used. Verdicts do not change the exit code.
    """
    # Everything below needs NumPy, rich or more; --help does not.
    from kc_otel.cli.compare_log_text import as_markdown, print_tables  # noqa: PLC0415
    from kc_otel.contract.load import load  # noqa: PLC0415
    from kc_otel.offline.compare_log.comparison import LogComparison, as_data, by_attributes, report  # noqa: PLC0415
    from kc_otel.offline.gate.recorded_verdicts import by_contract, judge  # noqa: PLC0415
    from kc_otel.record.measure.storage_grid import coarse_side  # noqa: PLC0415
    from kc_otel.recordings import load_recording  # noqa: PLC0415

    with unusable():
        tools = _tools(tool or [])
        _one_of(contract=contract is not None, by=bool(by))
        _one_of(json=as_json, markdown=markdown)
        promise = load(contract) if contract is not None else None
        log = load_recording(recording, columns=columns_of(columns))
        parts = by_contract(log, promise) if promise is not None else by_attributes(log, by or [])
        judged = judge(promise, parts, time.time()) if promise is not None else None
        parts = _chosen(slice or [], parts)
    width = clip or (promise.assumptions.clip if promise is not None else None) or 0.2
    slices = [report(part, tools, confidence=confidence, clip=width) for part in parts]
    if judged is not None and slice:
        judged = judged.on(slice)
    comparison = LogComparison(
        log.source,
        log.lengths.size,
        log.train.size,
        len(log.masked),
        confidence,
        width,
        slices,
        judged,
        coarse_side(log.train, log.inference),
    )
    if as_json:
        typer.echo(json.dumps(as_data(comparison), indent=2, allow_nan=False))
    elif markdown:
        typer.echo(as_markdown(comparison))
    else:
        from rich.console import Console  # noqa: PLC0415

        print_tables(comparison, Console())


def _tools(names: list[str]) -> list[Tool]:
    from kc_otel.offline.compare_log.comparison import Tool  # noqa: PLC0415

    unknown = [name for name in names if name not in list(Tool)]
    if unknown:
        msg = f"--tool: {unknown[0]!r} is not known; write one of {', '.join(Tool)}"
        raise ValueError(msg)
    return [each for each in Tool if not names or each in names]


def _one_of(**given: bool) -> None:
    if all(given.values()):
        msg = f"{' and '.join('--' + name for name in given)} exclude each other; give one of them"
        raise ValueError(msg)


def _chosen(names: list[str], parts: list[RecordingSlice]) -> list[RecordingSlice]:
    known = [part.name for part in parts]
    unknown = [name for name in names if name not in known]
    if unknown:
        msg = f"--slice: there is no slice {unknown[0]!r}; there are {', '.join(known)}"
        raise ValueError(msg)
    return [part for part in parts if not names or part.name in names]
