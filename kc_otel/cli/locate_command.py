"""`kc-otel locate run`: which operator of a kernel it is, and what part of the drift is its.

With `--follow`, each incident is looked at once, in a process of its own that ends with its budget and takes what
others leave of the CPU. What goes wrong is put on the incident too: an answer that never comes would look like one that
is still to come.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kc_otel.cli.api_client import DEFAULT_URL, IncidentId, Url, attach, failing_cell, get
from kc_otel.cli.terminal import (
    By,
    PrintJson,
    log_to_terminal,
    refuse,
    seconds,
    settings_of,
    show,
    stopped_by_signals,
    unusable,
)
from kc_otel.contract.load import load
from kc_otel.contract.slices import ALL, LAG
from kc_otel.contract.units import format_duration
from kc_otel.contract.words import did_you_mean, number, table_lines

if TYPE_CHECKING:
    from kc_otel.contract.clause import Clause
    from kc_otel.contract.model import Contract, KernelSpec
    from kc_otel.diagnose.located import Located
    from kc_otel.diagnose.token_sequences import TokenSequence
    from kc_otel.integrations.operators import CaseReport
    from kc_otel.judge.verdict import Verdict

_COLUMN_CHARACTERS: Final = 8
_DECODED_TOKENS: Final = 16

Engine = Annotated[
    list[str] | None, typer.Option("--engine", metavar="NAME=VALUE", help="Argument of vllm.LLM; repeatable.")
]

_log: Final = logging.getLogger("kc_otel.locate")
_ANSWERED_EXIT_CODES: Final = frozenset({0, 1, 3})


def run(
    contract: Annotated[str, typer.Argument(metavar="CONTRACT", help="The contract that fails.")],
    train: Annotated[
        str, typer.Option(metavar="KERNEL", help="The training kernel: FILE.py:NAME, a checkpoint, or a capture.")
    ],
    infer: Annotated[str, typer.Option(metavar="KERNEL", help="The inference kernel: the same, or vllm:FOLDER.")],
    sequences: Annotated[
        str, typer.Option(metavar="FILE", help="A recording, a spool, JSON lines of token ids, or FILE.py:NAME.")
    ],
    slice: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this slice (default: that of --incident, or all).")
    ] = None,
    clause: Annotated[
        str | None, typer.Option(metavar="ID", help="The failing clause: its metric is divided among operators.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="SEQUENCES", help="Use only this many sequences.")] = 16,
    precision: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Number format whose rounding is no fault, such as bfloat16.")
    ] = None,
    shares: Annotated[bool, typer.Option(help="Divide the drift among the operators above noise.")] = True,
    engine: Engine = None,
    as_json: PrintJson = False,
    incident: IncidentId = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Examine incidents as they come, if their policy has the action `locate`.")
    ] = False,
    budget: Annotated[str, typer.Option(metavar="DURATION", help="Time for each incident, with --follow.")] = "10m",
    by: By = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Name the operator whose numbers differ by more than noise.

    Prints its layer, module, tensor and share of the drift. Runs the kernels' programs. Exits with 0 if nothing is
    above noise, 1 if an operator is, 2 if the kernels cannot be compared or there are too few sequences to name any, 3
    if too few sequences reach one to decide.

    Examples:
      kc-otel locate run policy.yaml --train checkpoint --infer vllm:checkpoint --sequences spool.sqlite --slice code
      kc-otel locate run policy.yaml --train checkpoint --infer kernels.py:rollout --sequences spool.sqlite
    """
    if follow:
        if any(option is not None for option in (slice, clause, incident)):
            refuse("--follow: incidents say which slice and clause; leave out --slice, --clause and --incident")
        options = {"--train": train, "--infer": infer, "--sequences": sequences, "--limit": limit, "--url": url}
        options |= {"--precision": precision} if precision else {}
        passed = ["--shares" if shares else "--no-shares", *(f"--engine={setting}" for setting in engine or ())]
        passed += [f"{name}={value}" for name, value in options.items()]
        _follow(
            contract, [*passed, *([f"--by={by}"] if by else [])], url, by, seconds("--budget", budget, positive=True)
        )
        return
    from kc_otel.diagnose.located import located_json, located_lines, located_sentence  # noqa: PLC0415

    with unusable(ModuleNotFoundError, TypeError):
        promise = load(contract)
        cell = None if incident is None else failing_cell(url, promise, incident)
        if cell is not None:
            slice, clause = slice or cell.slice, clause or cell.clause
        slice = slice or ALL
        failing = _clause(promise, clause)
        from kc_otel.diagnose.captures import is_capture  # noqa: PLC0415 - torch
        from kc_otel.diagnose.kernel_sources import completed_by, kernel_from, torch_kernel_from, two_kernels  # noqa: PLC0415
        from kc_otel.diagnose.token_sequences import read_sequences  # noqa: PLC0415

        two_kernels(train, infer, kernels := promise.kernels)
        captured = is_capture(Path(infer))
        given = read_sequences(sequences, contract=promise, slice=slice, most=sys.maxsize if captured else limit)
        arguments = settings_of("--engine", engine or ())
        if captured or is_capture(Path(train)):
            located = _of_captures(promise, train, infer, given, slice, precision, arguments)
            if slice != ALL and is_capture(Path(sequences)):
                unsliced = f"captures do not say which slice a sequence is of: all of them are taken for {slice}"
                located = replace(located, notes=(*located.notes, unsliced))
        else:
            from kc_otel.diagnose.above_noise import enough_sequences  # noqa: PLC0415
            from kc_otel.diagnose.torch_locate import locate  # noqa: PLC0415

            reference = torch_kernel_from(train, kernels.train)
            alpha = 1.0 - promise.observability.confidence
            enough_sequences(len(given), len(set(reference.named.values())), alpha)
            with kernel_from(infer, kernels.inference, arguments) as kernel:
                located = locate(
                    promise, reference, kernel, completed_by(kernel, given, _DECODED_TOKENS), slice=slice,
                    clause=failing, shares=shares, precision=precision,
                    progress=lambda said: typer.echo(said, err=True),
                )  # fmt: skip
        if not located.findings:
            located = replace(located, notes=(*located.notes, *_not_reproduced(promise, sequences, slice)))
    answer = located_json(located)
    show(located_lines(located), answer, as_json=as_json)
    if cell is not None:
        asked = {"contract": promise.hash, "train": train, "inference": infer, "sequences": sequences}
        evidence = {**answer, "asked": asked, "version": version("kc-otel")}
        text = located_sentence(located)
        typer.echo(attach(url, cell.incident, "locate", slice, text, evidence, by), err=True)
    if located.findings or located.undecided:
        raise typer.Exit(1 if located.findings else 3)


def capture(
    kernel: Annotated[str, typer.Argument(metavar="KERNEL", help="FILE.py:NAME, a checkpoint, or vllm:FOLDER.")],
    sequences: Annotated[str, typer.Option(metavar="FILE", help="As for `locate run`, or a capture for its tokens.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="File for the capture; an interrupted capture resumes.")],
    limit: Annotated[int, typer.Option(min=1, metavar="SEQUENCES", help="Use only this many sequences.")] = 16,
    dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help="Number format to load a checkpoint in.")] = None,
    precision: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Number format of the other kernel: its rounding is no fault.")
    ] = None,
    engine: Engine = None,
) -> None:
    """Record the outputs of a kernel's operators, to compare them on another machine.

    Capture the inference kernel first, then the training kernel on its tokens, and give both files to `kc-otel locate
    run`.

    Examples:
      kc-otel locate capture vllm:checkpoint --sequences prompts.jsonl --out infer.capture --engine kv_cache_dtype=fp8
      kc-otel locate capture checkpoint --sequences infer.capture --out train.capture
    """
    with unusable(ModuleNotFoundError, TypeError):
        from kc_otel.contract.model import KernelSpec  # noqa: PLC0415 - a quick --help
        from kc_otel.diagnose.captures import CaptureWriter  # noqa: PLC0415
        from kc_otel.diagnose.kernel_sources import captured_by  # noqa: PLC0415
        from kc_otel.diagnose.token_sequences import read_sequences  # noqa: PLC0415

        given = read_sequences(sequences, most=limit)
        options = settings_of("--engine", engine or ())
        named = ", ".join([kernel, *([dtype] if dtype else []), *(f"{key}={value}" for key, value in options.items())])
        writer = CaptureWriter(out, named)
        left = [(index, sequence) for index, sequence in enumerate(given) if not writer.has(index, sequence.token_ids)]
        spec, asked_for = KernelSpec(engine="any", dtype=dtype), [sequence for _, sequence in left]
        captured = captured_by(kernel, spec, asked_for, precision=precision, options=options, decode=_DECODED_TOKENS)
        for (index, asked), sequence in zip(left, captured, strict=True):
            writer.write(index, asked.token_ids, sequence)
        writer.seal()
    typer.echo(f"{out}: {len(given)} sequences, {out.stat().st_size / 1e6:.1f} MB", err=True)


def operators(
    comparisons: Annotated[
        str, typer.Argument(metavar="FILE.py:NAME", help="A list of kc_otel.integrations.operators.OperatorPair.")
    ],
    contract: Annotated[str | None, typer.Option(help="Contract whose operator clauses judge the operators.")] = None,
    as_json: PrintJson = False,
) -> None:
    """Compare single operators of both kernels over shapes and dtypes.

    Prints the largest absolute and relative difference, ULP, cosine, and whether the result depends on the batch. The
    file is a Python program and is run. Exits with 1 when a clause of the contract fails or rows are not finite, with 2
    when the file, one of its operators or the contract cannot be used, with 3 when a verdict is undecided, or there is
    none.

    Examples:
      kc-otel locate operators examples/operators/comparisons.py:comparisons
      kc-otel locate operators comparisons.py:comparisons --contract policy.yaml
    """
    # Everything below needs NumPy, and the file most likely torch; --help does not.
    from kc_otel.integrations.operators import compare_callables  # noqa: PLC0415
    from kc_otel.offline.operator_verdicts import as_json as json_of  # noqa: PLC0415
    from kc_otel.offline.operator_verdicts import comparisons_in, judge  # noqa: PLC0415

    with unusable():
        promise = load(contract) if contract is not None else None
        wanted = comparisons_in(comparisons)
    try:
        reports: list[CaseReport] = []
        for pair in wanted:
            reports += compare_callables(pair)
    except Exception as error:  # noqa: BLE001 - operators are foreign code
        where = "; ".join(getattr(error, "__notes__", ()))
        refuse(f"{comparisons}: {type(error).__name__}: {error} ({where})")
    verdicts, left_out = judge(promise, reports) if promise is not None else ((), ())
    show(_case_lines(reports, verdicts, left_out), json_of(reports, verdicts, left_out), as_json=as_json)
    if any(verdict.status == "FAIL" for verdict in verdicts) or any(report.not_finite for report in reports):
        raise typer.Exit(1)
    if promise is not None and not (verdicts and all(verdict.status == "PASS" for verdict in verdicts)):
        raise typer.Exit(3)


def _follow(contract: str, options: Sequence[str], url: str, by: str | None, budget: float) -> None:
    from kc_otel.client.router import Router  # noqa: PLC0415

    with unusable():
        name = load(contract).name
        router = Router(url)
    log_to_terminal()
    os.nice(19)
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with router, stopped_by_signals() as stop:
        follow_incidents(
            lambda: router.to_locate(name),
            lambda: get(url, "/api/v1/incidents", contract=name)["incidents"],
            lambda incident: run_within(["locate", "run", contract, *options, "--incident", incident], budget, stop),
            lambda incident, why: attach(url, incident, "locate", ALL, why, {}, by),
            stop,
        )


def _of_captures(
    contract: Contract,
    train: str,
    infer: str,
    given: Sequence[TokenSequence],
    slice: str,
    precision: str | None,
    options: Mapping[str, Any],
) -> Located:
    """Compare captures; a side that is not one is captured on the other's tokens."""
    from kc_otel.diagnose.captures import Capture, compare_captures, is_capture, rounding_of  # noqa: PLC0415 - torch
    from kc_otel.diagnose.kernel_sources import capture_of, captured_by  # noqa: PLC0415
    from kc_otel.diagnose.token_sequences import TokenSequence  # noqa: PLC0415

    def side(kernel: str, spec: KernelSpec, tokens: Sequence[TokenSequence], rounding: str | None) -> Capture:
        if is_capture(Path(kernel)):
            return capture_of(Path(kernel), spec)
        return Capture(kernel, tuple(captured_by(kernel, spec, tokens, precision=rounding, options=options)))

    inference = side(infer, contract.kernels.inference, given, None)
    if slice != ALL:
        wanted = {of.token_ids for of in given}
        kept = (of for of in inference.sequences if any(of.token_ids[: len(ids)] == ids for ids in wanted))
        if not (inference := replace(inference, sequences=tuple(kept))).sequences:
            raise ValueError(f"{infer}: has none of the sequences of {slice} in --sequences; capture these")
    tokens = [TokenSequence(of.token_ids, of.prompt_tokens, {}, of.messages) for of in inference.sequences]
    reference = side(train, contract.kernels.train, tokens, precision or "bfloat16")
    rounding = rounding_of(precision or contract.kernels.inference.dtype)
    located = compare_captures(contract, reference, inference, slice=slice, rounding=rounding)
    unsaid = [
        f"{name} {value} of {kernel}"
        for kernel, spec in ((train, contract.kernels.train), (infer, contract.kernels.inference))
        for name in ("dtype", "quantization")
        if is_capture(Path(kernel)) and (value := getattr(spec, name))
    ]
    said = f"not checked, because captures do not say it: {', '.join(unsaid)}"
    return replace(located, notes=(*located.notes, said)) if unsaid else located


def _not_reproduced(contract: Contract, path: str, slice: str) -> list[str]:
    """A note on the clause that a recording exceeds most, where the programs agree; none of other files."""
    from kc_otel.offline.gate.copies import distinct  # noqa: PLC0415
    from kc_otel.offline.gate.recorded_verdicts import by_contract, judge  # noqa: PLC0415
    from kc_otel.recordings.recording_files import load_recording  # noqa: PLC0415

    try:
        recording = distinct(load_recording(path))
    except (ValueError, OSError, ImportError):
        return []
    # Without a lag, a verdict would not tell drift from staleness.
    recording = replace(recording, attributes=tuple({LAG: 0, **row} for row in recording.attributes))
    verdicts = judge(contract, by_contract(recording, contract), time.time()).verdicts
    broken = [verdict for verdict in verdicts if verdict.status == "FAIL" and verdict.cell.slice == slice]
    if not broken:
        return []
    worst = max(broken, key=lambda verdict: verdict.estimate / verdict.limit if verdict.limit else 0.0)
    amount = f"{number(worst.estimate)} (clause {worst.cell.clause}, limit {number(worst.limit)})"
    lead = f"these two programs do not reproduce the recording's drift of {amount}"
    return [f"{lead}: they may not be the kernels that recorded it; compare versions, settings, weights and their age"]


def _clause(contract: Contract, wanted: str | None) -> Clause | None:
    if wanted is None:
        return None
    found = next((candidate for candidate in contract.clauses if candidate.id == wanted), None)
    if found is not None:
        return found
    hint = did_you_mean(wanted, [candidate.id for candidate in contract.clauses], "there are")
    return refuse(f"--clause: {wanted!r} is not in the contract; {hint}")


def _case_lines(reports: Sequence[CaseReport], verdicts: Sequence[Verdict], left_out: Sequence[str]) -> list[str]:
    from kc_otel.offline.operator_verdicts import COLUMNS, cells_of  # noqa: PLC0415

    def row(cells: Iterable[str]) -> str:
        return "".join(cell.rjust(_COLUMN_CHARACTERS) for cell in cells)

    # What a case is takes a line of its own above its numbers, so that both fit into a terminal of 80 columns.
    lines = [
        "Training kernel against inference kernel, by row of the output",
        "",
        *map(row, zip(*COLUMNS, strict=True)),
    ]
    for report in reports:
        output = "" if report.dtype in report.case else f" -> {report.dtype}"
        lines += [f"{report.operator}  {report.case}{output}", row(cells_of(report))]
    for report in reports:
        if report.not_finite:
            said = f"{report.not_finite:,} rows are NaN, or infinite on one side alone; they are not judged"
            lines.append(f"{report.operator}  {report.case}: {said}")
    if verdicts or left_out:
        judged = [(str(found.status), found.cell.clause, found.cell.slice, found.reason) for found in verdicts]
        lines += ["", "Verdicts", *table_lines(("verdict", "clause", "slice", "why"), judged)]
    return [*lines, *(f"not judged: {sentence}" for sentence in left_out)]


def follow_incidents(
    asked: Callable[[], Mapping[str, str]],
    incidents: Callable[[], Sequence[Mapping[str, Any]]],
    look: Callable[[str], str | None],
    fail: Callable[[str, str], object],
    stop: threading.Event,
) -> None:
    """Look at each lasting incident once, the most urgent first, while `asked` has slices to locate, until stopped."""
    done: set[str] = set()
    while not stop.is_set():
        try:
            for entry in incidents() if asked() else ():
                located = any(diagnosis["kind"] == "locate" for diagnosis in entry["diagnoses"])
                found = str(entry["id"])
                if entry["on"] != "fail" or entry["until"] is not None or located or found in done:
                    continue
                done.add(found)
                _log.info("looking at incident %s: %s", found, entry["headline"])
                if (why := look(found)) is not None:
                    _log.warning("incident %s: %s", found, why)
                    fail(found, why)
                break
        except typer.Exit:  # said already
            stop.wait(15.0)
        stop.wait(2.0)


def run_within(command: Sequence[str], budget: float, stop: threading.Event) -> str | None:
    """Run `kc-otel` with these arguments for so many seconds. Returns None where it has answered; else why not."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(  # noqa: S603 - this program
            [sys.executable, "-m", "kc_otel", *command],
            env={"OMP_NUM_THREADS": "1", **os.environ},
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        end = time.monotonic() + budget
        while process.poll() is None and time.monotonic() < end and not stop.wait(0.2):
            pass
        in_time = process.poll() is not None
        if not in_time:
            os.killpg(process.pid, signal.SIGKILL)  # an engine's workers, too
        code = process.wait()
        errors.seek(0)
        lines = [line for line in errors.read().splitlines() if line.strip()]
    if stop.is_set() or (in_time and code in _ANSWERED_EXIT_CODES):  # whoever follows next looks again
        return None
    if not in_time:
        return f"not located within its budget of {format_duration(budget)}; give --budget more, or --limit less"
    return f"not located: {lines[-1].strip() if lines else f'it ended with {code}'}"
