"""`kc-otel compare` and `diagnose`: what a recording, or a trainer's logged scalars, say of both kernels."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kc_otel.cli.terminal import (
    Columns,
    PrintJson,
    SequenceAttributes,
    attributes_of,
    columns_of,
    pairs,
    show,
    unusable,
)
from kc_otel.contract.plain_text import plain
from kc_otel.contract.words import interval, listed, number, table_lines

if TYPE_CHECKING:
    from kc_otel.offline.gate.recorded_verdicts import RecordingVerdicts

_COLUMN_GAP: Final = 2


def compare(
    recording: Annotated[
        str,
        typer.Argument(metavar="RECORDING", help="Recording of both kernels, files of a trainer, or a folder of them."),
    ],
    contract: Annotated[str | None, typer.Option(help="Contract that defines and judges the slices.")] = None,
    by: Annotated[list[str] | None, typer.Option(help="Attribute whose values are slices; repeatable.")] = None,
    columns: Columns = None,
    attribute: SequenceAttributes = None,
    confidence: Annotated[float, typer.Option(help="Confidence of each interval.", min=0.5, max=1 - 1e-9)] = 0.99,
    clip: Annotated[float | None, typer.Option(help="PPO clip range; the contract's, else 0.2.", min=1e-9)] = None,
    as_json: PrintJson = False,
) -> None:
    """Print how far the two kernels of a recording are apart, by slice.

    With a contract it prints the verdicts too; they do not change the exit code. Exits with 2 when the recording or an
    option cannot be used.

    Examples:
      kc-otel compare rollouts.npz --by task
      kc-otel compare rollouts.npz --contract policy.yaml
    """
    # Everything below needs NumPy; --help does not.
    from kc_otel.contract.load import load  # noqa: PLC0415
    from kc_otel.offline.compare import by_attributes, comparison_data, verdict_line  # noqa: PLC0415
    from kc_otel.offline.gate.copies import distinct, repeats_notes  # noqa: PLC0415
    from kc_otel.offline.gate.recorded_verdicts import by_contract, judge  # noqa: PLC0415
    from kc_otel.recordings.recording_files import load_recording  # noqa: PLC0415

    with unusable():
        if contract and by:
            raise ValueError("--contract and --by exclude each other; give one of them")
        promise = load(contract) if contract is not None else None
        log = load_recording(recording, columns=columns_of(columns)).with_attributes(attributes_of(attribute or []))
        log = log if promise is None else distinct(log)
        parts = by_contract(log, promise) if promise is not None else by_attributes(log, by or [])
        judged = judge(promise, parts, time.time()) if promise is not None else None
        if judged is not None and judged.no_decision:
            raise ValueError(f"{log.source}: {judged.no_decision}")
    width = clip or (promise.assumptions.clip if promise is not None else None) or 0.2
    data = comparison_data(log, parts, judged, confidence=confidence, clip=width)
    data["notes"] += repeats_notes(log) if promise is None else ()
    lines = [*_table_lines(data, shutil.get_terminal_size().columns), ""]
    if judged is not None:
        lines += ["Verdicts", *map(verdict_line, judged.verdicts), ""]
    assumed = judged.prompts_note(promise) if judged is not None and promise is not None else ""
    lines += [assumed] if assumed else []
    lines += _notes(data, judged)
    show(lines, data, as_json=as_json)


def _table_lines(data: Mapping[str, Any], width: int) -> Iterator[str]:
    """Yield a line for each quantity, where slices do not fit beside each other in several tables."""
    shown = [part for part in data["slices"] if part["tokens"]]
    masked = f"; {data['masked_sequences']:,} more have no token that counts" if data["masked_sequences"] else ""
    yield f"{data['source']}: {data['sequences']:,} sequences, {data['tokens']:,} tokens{masked}"
    names = dict.fromkeys(name for part in shown for name in part["kc"])
    first = ("metric", "sequences", "tokens", *names)
    columns = [
        (
            part["slice"],
            f"{part['sequences']:,}",
            f"{part['tokens']:,}",
            *(_interval(part["kc"].get(name)) for name in names),
        )
        for part in shown
    ]
    while columns:
        fits = list(accumulate(max(map(len, column)) + _COLUMN_GAP for column in (first, *columns)))
        many = max(sum(end - _COLUMN_GAP <= width for end in fits) - 1, 1)
        yield ""
        yield from table_lines((), zip(first, *columns[:many], strict=True))
        del columns[:many]


def _notes(data: Mapping[str, Any], judged: RecordingVerdicts | None) -> Iterator[str]:
    if empty := [part["slice"] for part in data["slices"] if not part["tokens"]]:
        yield f"no sequence of this recording is in slice{'s' * (len(empty) > 1)} {listed(empty)}"
    if judged is not None:
        yield from (f"not judged: {sentence}" for sentence in judged.left_out)
        if note := judged.age_note:
            yield note
    yield from data["notes"]
    yield (
        f"Each interval holds with {100 * data['confidence']:g}% confidence and treats tokens as independent; that of "
        "tv_seq treats sequences as independent. A missing bound needs more observations, or one "
        f"exceeded the cap. clip_budget_share is for a clip range of {data['clip']:g}."
    )


def _interval(of: Mapping[str, Any] | None) -> str:
    if of is None:
        return "-"
    if of["lower"] == of["upper"] == of["estimate"]:
        return number(of["estimate"])
    return f"{number(of['estimate'])} {interval(of['lower'], of['upper'])}"


def diagnose(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FILE_OR_DIR", help="TensorBoard, W&B, .csv, .jsonl, verl's output, trainer_state.json."
        ),
    ],
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE=NAME", help="Your own name of a series, such as drift=my/kl; repeatable."),
    ] = None,
    as_json: PrintJson = False,
) -> None:
    """Read a trainer's logged scalars, and print what they show about its two kernels.

    It also lists what averages cannot show. Exits with 0 whatever it finds, because averages are not a verdict; with 2
    when the log cannot be used.

    Examples:
      kc-otel diagnose runs/policy-7b
      kc-otel diagnose run-20260101.wandb --json
    """
    from kc_otel.offline.run_log.read_run_log import read_run_log  # noqa: PLC0415 - a quick --help
    from kc_otel.offline.run_log.run_rules import cannot_tell, diagnose_run, roles_of  # noqa: PLC0415

    with unusable():
        log = read_run_log(path, lambda said: typer.echo(plain(said), err=True))
        roles = roles_of(log, pairs("--name", name or [], "ROLE=NAME"))
        findings = diagnose_run(log, roles)
    steps = max(int(logged.size) for logged, _ in log.values())
    read = ", ".join(f"{role} = {log_name}" for role, log_name in roles.items()) or "nothing"
    lines = [f"{path}: {len(log)} numbers, {steps} steps", f"read as: {read}"]
    for mark, wanted in (("FOUND", True), ("not found", False), ("cannot tell", None)):
        said = [finding for finding in findings if finding.found is wanted]
        if wanted is False and said:
            lines.append(f"{mark:11}  {', '.join(finding.rule for finding in said)}")
        else:
            lines += [f"{mark:11}  {finding.rule}: {finding.said}" for finding in said]
    lines += ["averages do not say:", *(f"  {sentence}" for sentence in cannot_tell())]
    rules = list(map(asdict, findings))
    data = {"steps": steps, "roles": roles, "rules": rules, "cannot_tell": list(cannot_tell())}
    show(lines, data, as_json=as_json)
