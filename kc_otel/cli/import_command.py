"""`kc-otel import`: log-probabilities that a trainer has already written."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kc_otel.cli.terminal import (
    SequenceAttributes,
    attributes_of,
    columns_of,
    log_to_terminal,
    refuse,
    stopped_by_signals,
    together,
    unusable,
)
from kc_otel.contract.plain_text import plain, plain_lines
from kc_otel.contract.words import listed

if TYPE_CHECKING:
    from kc_otel.offline.step_scalars import StepScalars
    from kc_otel.record.telemetry.counters import RecorderStats
    from kc_otel.recordings.importers.importer import Importer


def import_files(
    paths: Annotated[
        list[Path], typer.Argument(metavar="FILE_OR_DIR...", help="Files that the trainer wrote, or folders of them.")
    ],
    contract: Annotated[Path, typer.Option(help="The contract.", envvar="KC_OTEL_CONTRACT")],
    format: Annotated[str, typer.Option(help="auto, verl, slime, skyrl, roll, prime-rl, nemo-rl or generic.")] = "auto",
    columns: Annotated[str | None, typer.Option(help="Columns of generic files: train=A,inference=B.")] = None,
    attribute: SequenceAttributes = None,
    follow: Annotated[bool, typer.Option(help="Keep importing files as they appear, until stopped.")] = False,
    poll: Annotated[float, typer.Option(help="Seconds between scans of the folders.", min=0.05)] = 5.0,
    done: Annotated[
        Path | None, typer.Option(help="File that lists finished files, so that a restart skips them.")
    ] = None,
    patience: Annotated[float, typer.Option(help="Seconds to wait for the endpoint before giving up.", min=0.0)] = 60.0,
    log: Annotated[
        Path | None,
        typer.Option(help="File to append kc/... scalars to, a line of JSON for each step.", metavar="FILE.jsonl"),
    ] = None,
) -> None:
    """Measure rollouts that a trainer has written, and export the drift over OTLP.

    Reads the files that verl, slime, SkyRL, ROLL, prime-rl and NeMo-RL write, and recordings. OpenTelemetry's own
    variables, such as OTEL_EXPORTER_OTLP_ENDPOINT, set the destination. A file counts as finished once its drift is
    exported. Exits with 1 when a file could not be imported.

    Examples:
      kc-otel import rollouts --contract policy.yaml
      kc-otel import rollouts --contract policy.yaml --follow --done imported.txt
      kc-otel import dump.jsonl --contract policy.yaml --columns train=a,inference=b
    """
    from kc_otel.contract.load import load  # noqa: PLC0415 - a quick --help
    from kc_otel.offline.step_scalars import StepScalars  # noqa: PLC0415
    from kc_otel.record.recorder import Recorder  # noqa: PLC0415
    from kc_otel.record.telemetry.environment import instance_of  # noqa: PLC0415
    from kc_otel.recordings.importers.formats import FORMATS, files_of  # noqa: PLC0415
    from kc_otel.recordings.importers.importer import Importer, Ledger, unseen  # noqa: PLC0415

    log_to_terminal()
    if format != "auto" and format not in FORMATS:
        refuse(f"--format {format}: write one of auto, {', '.join(FORMATS)}")
    with unusable():
        ledger = Ledger(done)
        files_of(paths)
        loaded = load(contract)
        with ExitStack() as closing:
            steps = None if log is None else StepScalars(loaded, closing.enter_context(log.open("a", encoding="utf-8")))
            own = instance_of(paths[0]) if follow else None
            stop = closing.enter_context(stopped_by_signals())
            recorder = closing.enter_context(Recorder(loaded, sampling=1.0, resource=own, serves=not follow))
            importer = Importer(
                recorder,
                format=next((known for known in FORMATS if known == format), None),
                columns=columns_of(columns) or None,
                attributes=attributes_of(attribute or []),
                patience=patience,
                stopped=stop.is_set,
                steps=steps,
            )
            for path in unseen(paths, ledger, stop, follow=follow, poll=poll):
                _one(importer, path)
                if path not in importer.totals.failed:
                    ledger.add(path)
            _summarise(importer, recorder.stats())
            if steps is not None:
                steps.close()
                _summarise_steps(steps, log)
    if importer.totals.failed:
        raise typer.Exit(1)


def _one(importer: Importer, path: Path) -> None:
    before = importer.totals.sequences, importer.totals.tokens
    if importer.file(path):
        sequences, tokens = importer.totals.sequences - before[0], importer.totals.tokens - before[1]
        typer.echo(plain(f"{path}: {sequences:,} sequences, {tokens:,} tokens"))
    else:
        found = _failures(importer)
        if found[importer.totals.failed[path].removeprefix(str(path))] == [str(path)]:  # the others are counted
            typer.echo(plain_lines(importer.totals.failed[path]), err=True)


def _failures(importer: Importer) -> dict[str, list[str]]:
    return together((why.removeprefix(str(path)), str(path)) for path, why in importer.totals.failed.items())


def _summarise(importer: Importer, stats: RecorderStats) -> None:
    from kc_otel.contract.input_reasons import remedy  # noqa: PLC0415

    totals = importer.totals
    typer.echo(
        f"{totals.files:,} files exported, {len(totals.failed):,} failed; of {totals.sequences:,} sequences "
        f"{stats.sequences:,} measured: {stats.tokens:,} tokens"
    )
    for why, files in _failures(importer).items():
        if len(files) > 1:
            typer.echo(plain(f"  failed: {len(files):,} files, {listed(files)}{why}"))
    for reason, count in sorted(totals.refusals.counts.items()):
        typer.echo(plain(f"  refused: {count:,} {reason}: {totals.refusals.first[reason]}"))
    for reason, count in sorted(stats.invalid.items()):
        typer.echo(f"  not measured: {count:,} {reason}: {remedy(reason)}")
    if totals.age_unknown:
        typer.echo(
            f"  it is unknown which weights sampled {totals.age_unknown:,} sequences: their figures contain drift and "
            "staleness together"
        )
    if totals.identical:
        typer.echo(
            f"  the two sides are the same numbers in {totals.identical:,} sequences: unless the kernels are bit by "
            f"bit equal, one side is a copy of the other (verl: algorithm.rollout_correction.bypass_mode)"
        )


def _summarise_steps(steps: StepScalars, log: Path | None) -> None:
    if steps.written:
        typer.echo(plain(f"  {log}: {len(steps.written):,} steps, {min(steps.written)} to {max(steps.written)}"))
    elif not steps.unjudged:
        typer.echo(plain(f"  {log}: nothing: no sequence has a step; give --attribute step=NUMBER with each file"))
    if steps.unjudged:
        typer.echo(plain(f"  {log}: {len(steps.unjudged):,} steps have too little data for any verdict"))
    if steps.late:
        typer.echo(f"  {log}: {steps.late:,} batches arrived after their step was written, and are not in it")
