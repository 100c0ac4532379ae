"""`kc-otel import`, `rescore` and `scrape`: what others have written, served or measured, exported over OTLP."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kc_otel._extras import MissingExtraError, extra
from kc_otel.cli.terminal import (
    Columns,
    SequenceAttributes,
    attributes_of,
    columns_of,
    log_to_terminal,
    refuse,
    seconds,
    show,
    stopped_by_signals,
    unusable,
)
from kc_otel.client.engine_latency import EngineLatency
from kc_otel.contract.plain_text import plain, plain_lines
from kc_otel.contract.words import listed, moment, together
from kc_otel.record.export_loop import ExportLoop
from kc_otel.record.telemetry.environment import export_timeout, instance_of, metric_exporters, process_resource

if TYPE_CHECKING:
    from kc_otel.contract.model import KernelSpec
    from kc_otel.record.kernel import Kernel
    from kc_otel.record.telemetry.recorder_points import RecorderStats
    from kc_otel.recordings.importers.importer import Importer
    from kc_otel.recordings.scoring import Scorer
    from kc_otel.recordings.spool import SpoolReader

_DTYPES = ("float32", "bfloat16", "float16")
_POLL_SECONDS = 1.0
_FOLDER_POLL_SECONDS = 5.0
_PATIENCE_SECONDS = 5.0
"""Longest wait of a command that will end for an endpoint that takes no export."""


class Redacted(StrEnum):
    """Part of a sequence that rescoring does not keep as it was."""

    PROMPTS = "prompts"
    COMPLETIONS = "completions"


def import_files(
    paths: Annotated[list[Path], typer.Argument(metavar="FILE_OR_DIR...", help="Files of a trainer, or folders.")],
    contract: Annotated[Path, typer.Option(help="The contract.", envvar="KC_OTEL_CONTRACT")],
    columns: Columns = None,
    attribute: SequenceAttributes = None,
    follow: Annotated[bool, typer.Option(help="Keep importing files as they appear, until stopped.")] = False,
    again: Annotated[bool, typer.Option(help="Measure again what has counted, whole or in part.")] = False,
) -> None:
    """Measure rollouts that a trainer has written, and export the drift over OTLP.

    Reads the files that verl, slime, SkyRL, prime-rl and NeMo-RL write, and recordings. OpenTelemetry's own
    variables, such as OTEL_EXPORTER_OTLP_ENDPOINT, set the destination. A file counts as finished once its drift is
    exported with all its points; one of which some points are rejected is neither finished nor, without --again,
    imported again. A list in `kc-otel/` of XDG_STATE_HOME, or of ~/.local/state, keeps files from being measured a
    second time for the same contract. Exits with 1 when a file could not be imported or exported, or when no sequence
    could be measured.

    Examples:
      kc-otel import rollouts --contract policy.yaml
      kc-otel import rollouts --contract policy.yaml --follow
      kc-otel import dump.jsonl --contract policy.yaml --columns train=a,inference=b
    """
    from kc_otel.contract.load import load  # noqa: PLC0415 - a quick --help
    from kc_otel.record.recorder import Recorder  # noqa: PLC0415
    from kc_otel.recordings.importers.importer import Importer, Ledger, default_ledger, unseen  # noqa: PLC0415
    from kc_otel.recordings.importers.trainer_files import files_of  # noqa: PLC0415

    log_to_terminal()
    with unusable():
        if not follow and not files_of(paths):
            raise ValueError(f"{', '.join(map(str, paths))}: holds no recording and no file of a trainer")
        loaded = load(contract)
        ledger = Ledger(default_ledger(loaded.name), again=again)
        if missing := [str(path) for path in paths if not path.exists()]:
            logging.getLogger("kc_otel").info("waiting for %s", listed(missing))
        if finished := [path for path in files_of(filter(Path.exists, paths)) if path in ledger]:
            last = moment(max(known.at for path in finished if (known := ledger.measured(path))))
            said = f"already exported for {loaded.name} at {last}: not measured again (--again does)"
            show([f"{listed([*map(str, finished)])}: {said}"])
        with ExitStack() as closing:
            own = instance_of(paths[0]) if follow else None
            stop = closing.enter_context(stopped_by_signals())
            recorder = closing.enter_context(Recorder(loaded, sampling=1.0, resource=own, serves=not follow))
            importer = Importer(
                recorder,
                columns=columns_of(columns) or None,
                attributes=attributes_of(attribute or []),
                stopped=stop.is_set,
                ledger=ledger,
                follow=follow,
                **({} if follow else {"patience": _PATIENCE_SECONDS}),
            )
            for path in unseen(paths, ledger, stop, follow=follow, poll=_FOLDER_POLL_SECONDS):
                _one(importer, path)
                if importer.unexported and not follow:
                    break
            wanted = files_of(paths) if (stop.is_set() or importer.unexported) and not follow else []
            left = [path for path in wanted if path not in importer.totals.failed and path not in ledger]
            importer.finish()
            show(_import_lines(importer, stats := recorder.stats()))
    if left:
        typer.echo(f"stopped: {len(left):,} files were not imported", err=True)
    if importer.totals.failed or left or (importer.totals.sequences and not stats.sequences):
        raise typer.Exit(1)


def _one(importer: Importer, path: Path) -> None:
    before = importer.totals.sequences, importer.totals.tokens
    if importer.file(path) and path in importer.totals.copies:
        show([f"{path}: is a copy of {importer.totals.copies[path]}, and does not count again"])
    elif path not in importer.totals.failed:
        sequences, tokens = importer.totals.sequences - before[0], importer.totals.tokens - before[1]
        show([f"{path}: {sequences:,} sequences, {tokens:,} tokens"])
    else:
        found = _failures(importer)
        if found[importer.totals.failed[path].removeprefix(str(path))] == [str(path)]:  # the others are counted
            typer.echo(plain_lines(importer.totals.failed[path]), err=True)


def _failures(importer: Importer) -> dict[str, list[str]]:
    return together((why.removeprefix(str(path)), str(path)) for path, why in importer.totals.failed.items())


def _import_lines(importer: Importer, stats: RecorderStats) -> Iterator[str]:
    from kc_otel.contract.input_reasons import remedy  # noqa: PLC0415
    from kc_otel.record.measure.checks import swapped_by_sums  # noqa: PLC0415

    totals = importer.totals
    yield (
        f"{totals.files:,} files exported, {len(totals.failed):,} failed; of "
        f"{totals.sequences + totals.refused:,} sequences {stats.sequences:,} measured: {stats.tokens:,} tokens"
    )
    for why, files in _failures(importer).items():
        if len(files) > 1:
            yield f"  failed: {len(files):,} files, {listed(files)}{why}"
    for reason, count in sorted(totals.refusals.counts.items()):
        yield f"  refused: {count:,} {reason}: {totals.refusals.first[reason]}"
    for reason, count in sorted((Counter(stats.invalid) - totals.refusals.counts).items()):
        yield f"  not measured: {count:,} {reason}: {remedy(reason)}"
    if len(totals.steps) > 1:
        yield (
            f"  the sequences of steps {min(totals.steps)} to {max(totals.steps)} are judged together, so that a step "
            "that drifts may be hidden; `kc-otel compare --by step` shows each"
        )
    if totals.age_unknown:
        yield (
            f"  it is unknown which weights sampled {totals.age_unknown:,} sequences: their figures contain drift and "
            "staleness together"
        )
    if totals.identical:
        yield (
            f"  the two sides are the same numbers in {totals.identical:,} sequences: unless the kernels are bit by "
            "bit equal, one side is a copy of the other (verl: algorithm.rollout_correction.bypass_mode)"
        )
    if said := swapped_by_sums(totals.ratios):
        yield f"  {said}"


def rescore(
    spool: Annotated[Path, typer.Argument(metavar="SPOOL", help="File that the engine's plugin writes.")],
    contract: Annotated[Path, typer.Option(help="The contract.", envvar="KC_OTEL_CONTRACT")],
    model: Annotated[str | None, typer.Option(help="The training kernel: a Hugging Face checkpoint.")] = None,
    scorer: Annotated[
        str | None, typer.Option(help="The training kernel: FILE.py:FUNCTION of prompt_ids, token_ids, processing.")
    ] = None,
    train_url: Annotated[
        str | None, typer.Option(help="The training kernel: a vLLM or SGLang server; key in KC_OTEL_TRAIN_API_KEY.")
    ] = None,
    train_model: Annotated[str | None, typer.Option(help="Name of the server's model, if it serves several.")] = None,
    dtype: Annotated[str, typer.Option(help=f"Number format of the model: {', '.join(_DTYPES)}.")] = "float32",
    device: Annotated[str, typer.Option(help="Where the model runs, such as cpu or cuda:1.")] = "cpu",
    weights: Annotated[str | None, typer.Option(help="Its weight version; requests of others are rejected.")] = None,
    adapter: Annotated[str, typer.Option(help="Its LoRA adapter; requests of others, or of none, are rejected.")] = "",
    follow: Annotated[bool, typer.Option(help="Wait for more requests, until stopped.")] = False,
    with_engine: Annotated[
        bool,
        typer.Option(
            help="The engine ends when this process does, as in one pod: its orderly end ends this kernel here."
        ),
    ] = False,
    batch_tokens: Annotated[int, typer.Option(help="Maximum tokens in a batch, padding included.", min=1)] = 16_384,
    worst: Annotated[
        Path | None,
        typer.Option(help="Keep the worst sequences of each cell here, for `serve --worst`.", metavar="FILE"),
    ] = None,
    keep_for: Annotated[str, typer.Option(help="How long to keep a sequence.")] = "1d",
    redact: Annotated[
        list[Redacted] | None, typer.Option(help="Keep prompts as hashes, completions as drift; repeatable.")
    ] = None,
) -> None:
    """Score recorded requests with the training kernel, and export the drift over OTLP.

    Requests leave the spool once their drift has been exported with all its points; otherwise the command exits with 1.
    OpenTelemetry's own variables, such as OTEL_EXPORTER_OTLP_ENDPOINT, set the destination. The command can be stopped
    with Ctrl-C at any time and started again.

    Examples:
      kc-otel rescore spool.sqlite --contract policy.yaml --model checkpoint
      kc-otel rescore spool.sqlite --contract policy.yaml --model checkpoint --device cuda:1 --follow
      kc-otel rescore spool.sqlite --contract policy.yaml --train-url http://bf16:8000 --follow
    """
    from kc_otel.contract.load import load  # noqa: PLC0415 - a quick --help
    from kc_otel.record.recorder import Recorder  # noqa: PLC0415
    from kc_otel.recordings.request import SUPPORTED  # noqa: PLC0415
    from kc_otel.recordings.rescorer import RescoreError, Rescorer  # noqa: PLC0415
    from kc_otel.recordings.spool import SpoolError  # noqa: PLC0415
    from kc_otel.recordings.worst_sequences import WorstSequences  # noqa: PLC0415

    log_to_terminal()
    if not spool.exists() and not follow:
        refuse(f"{spool}: there is no such spool; serve with KC_OTEL_SPOOL={spool} first")
    empty = threading.Event()
    with unusable(SpoolError, RescoreError):
        loaded = load(contract)
        spec = loaded.kernels.train
        score, kernel = _kernel(model, scorer, train_url, dtype, device, train_model=train_model, declared=spec)
        with stopped_by_signals() as stop, _opened(spool, stop, follow=follow) as reader, ExitStack() as files:
            if (sampled := reader.kernel()) is None:  # a recorder would report a kernel that nothing has sampled with
                typer.echo("0 requests scored: the spool is empty")
                return
            recorder = Recorder(
                loaded, train=kernel, inference=sampled, sampling=1.0, resource=instance_of(spool), serves=empty.is_set
            )
            files.enter_context(recorder)
            kept = None
            if worst is not None:
                age, hidden = seconds("--keep-for", keep_for), redact or ()
                kept = WorstSequences(worst, loaded, max_age=age, redacted=hidden, text=_text(model))
                files.callback(kept.close)
            rescorer = Rescorer(
                reader,
                recorder,
                score,
                weights=int(weights) if weights is not None and weights.isdecimal() else weights,
                adapter=adapter,
                supported=SUPPORTED if train_url is None else (),
                batch_tokens=batch_tokens,
                seen=None if kept is None else lambda requests, found: kept.add(requests, found, time.time()),
            )
            started = time.monotonic()
            rescorer.run(stop, follow=follow)
            if with_engine:
                rescorer.run(threading.Event())  # what the engine has written since, or before it ends, too
                if not (len(reader) or rescorer.totals.unexported):
                    empty.set()
            totals, rate = rescorer.totals, rescorer.totals.prefilled / max(time.monotonic() - started, 1e-9)
            scored = f"{totals.requests:,} requests scored: {totals.tokens:,} sampled tokens compared"
            read = f"{totals.prefilled:,} read at {rate:,.0f} tokens/s; {len(reader):,} left in the spool"
            refused = (f"  not comparable: {count:,} {reason}" for reason, count in totals.refused.most_common())
            show((f"{scored}, {read}", *refused))
    if totals.unexported:
        more = "the spool keeps the requests, and another run counts again what was accepted"
        typer.echo(plain(f"  {totals.unexported}; {more}"), err=True)
        raise typer.Exit(1)


def _opened(spool: Path, stop: threading.Event, *, follow: bool) -> SpoolReader:
    """Open a spool, once the engine has made it and, to follow it, a request is in it."""
    from kc_otel.recordings.spool import SpoolReader  # noqa: PLC0415

    log = logging.getLogger("kc_otel")
    if not spool.exists():
        log.info("waiting for %s, which the engine makes with KC_OTEL_SPOOL=%s", spool, spool)
        while not spool.exists():
            if stop.wait(_POLL_SECONDS):
                raise typer.Exit
    reader = SpoolReader(spool)
    if follow and reader.kernel() is None:
        log.info("waiting for the first request in %s", spool)
        while reader.kernel() is None and not stop.wait(_POLL_SECONDS):
            pass
    return reader


def _kernel(
    model: str | None,
    scorer: str | None,
    train_url: str | None,
    dtype: str,
    device: str,
    *,
    train_model: str | None,
    declared: KernelSpec,
) -> tuple[Scorer, Kernel | None]:
    if [model, scorer, train_url].count(None) != 2:
        refuse("say which training kernel: give one of --model, --train-url and --scorer")
    if train_url is not None:
        from kc_otel.recordings.endpoints.endpoint_client import endpoint_scorer  # noqa: PLC0415

        key = os.environ.get("KC_OTEL_TRAIN_API_KEY", "").strip()
        return endpoint_scorer(train_url, key, train_model, declared), None
    if scorer is not None:
        from kc_otel.offline.python_names import python_name  # noqa: PLC0415

        if not callable(found := python_name(scorer, "a function")):
            raise ValueError(f"--scorer {scorer}: is not a function")
        return found, None
    if dtype not in _DTYPES:
        refuse(f"--dtype {dtype}: write one of {', '.join(_DTYPES)}")
    try:
        with extra("transformers", "--model"):
            import torch  # noqa: PLC0415 - only where a model is asked for
            import transformers  # noqa: PLC0415
    except MissingExtraError as error:
        refuse(f"{error}; or give --train-url or --scorer")

    from kc_otel.record.kernel import Kernel  # noqa: PLC0415
    from kc_otel.recordings.scoring import hf_scorer  # noqa: PLC0415

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA fails with the latter
        refuse(f"--device {device}: cannot be used ({str(error).splitlines()[0]}); give another, such as --device cpu")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(device).eval()
    version = f"{torch.__version__}, transformers {transformers.__version__}"
    return hf_scorer(loaded), Kernel("torch", version=version, dtype=dtype, hardware=torch.device(device).type)


def _text(model: str | None) -> Callable[[Sequence[int]], str] | None:
    if model is None:
        return None
    import transformers  # noqa: PLC0415 - the model has been loaded by it

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError, ImportError) as error:
        logging.getLogger("kc_otel").warning("%s has no tokenizer (%s): sequences are kept as token ids", model, error)
        return None
    return lambda ids: str(tokenizer.decode(ids))


def scrape(
    url: Annotated[str, typer.Argument(metavar="URL", help="vLLM's metrics, such as http://127.0.0.1:8000/metrics.")],
    interval: Annotated[float, typer.Option(help="Seconds between scrapes.", min=1.0)] = 10.0,
) -> None:
    """Forward vLLM's own latency histograms as gen_ai.server.*, until Ctrl-C.

    The evaluator judges clauses on latency by these histograms. They are sent to OTEL_EXPORTER_OTLP_ENDPOINT; vLLM's
    other metrics are not.

    Examples:
      kc-otel scrape http://127.0.0.1:8000/metrics
    """
    with unusable(ImportError):
        source, exporters = EngineLatency(url), metric_exporters()
    if not exporters:
        refuse(f"OTEL_METRICS_EXPORTER={os.environ.get('OTEL_METRICS_EXPORTER')} sends nothing; set it to otlp")
    resource = process_resource(own=instance_of(url))  # what it sent before a restart must not count again
    loop = ExportLoop(
        source, exporters=lambda: exporters, resource=resource, interval=interval, timeout=export_timeout()
    )
    with stopped_by_signals() as stop:
        loop.request()
        stop.wait()
    loop.shutdown(export_timeout())
