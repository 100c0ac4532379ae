"""`kc-otel gate`: whether a kernel version may leave its stage, and whether evidence of that holds."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from kc_otel.cli.api_client import DEFAULT_URL, Url, get
from kc_otel.cli.terminal import Columns, SequenceAttributes, attributes_of, columns_of, pairs, refuse, show, unusable
from kc_otel.contract.load import check
from kc_otel.contract.model import OTHERWISE_REMEDY, Contract, declared_apart, declared_otherwise
from kc_otel.judge.recorders import ONE_KERNEL
from kc_otel.offline.gate import gate_report
from kc_otel.offline.gate.evidence import (
    evidence_file,
    offline_evidence,
    read_evidence,
    recording_beside,
    remove_evidence,
    verify_evidence,
    verify_recordings,
    write_text,
)
from kc_otel.offline.gate.recorded_gate import (
    GateTerms,
    OfflineGate,
    check_terms,
    decides,
    gate_recordings,
    looks,
    read_input,
)
from kc_otel.record.kernel import Kernel
from kc_otel.recordings.endpoints.endpoint_client import CompletionEndpoint
from kc_otel.recordings.endpoints.endpoint_recording import EndpointPair, IncompleteError, record_endpoints
from kc_otel.recordings.importers.trainer_files import files_of
from kc_otel.recordings.recording import Recording

_EXIT: Final = {"advance": 0, "rollback": 1, "wait": 3}
_SUMMARY_VARIABLE: Final = "GITHUB_STEP_SUMMARY"

ContractFile = Annotated[str, typer.Argument(metavar="CONTRACT", help="The contract's file, or - for standard input.")]
KernelFields = Annotated[
    list[str] | None,
    typer.Option(
        "--kernel",
        metavar="SIDE[.FIELD]=VALUE",
        help="Field of a kernel, such as inference.version=0.32.0; the contract supplies the others. Or the kernel's "
        "fingerprint, inference=9f1c2ab04d77, if it has reported to the evaluator. Repeatable.",
    ),
]
Required = Annotated[
    list[str] | None, typer.Option("--require", metavar="CLAUSE", help="Only this clause must PASS; repeatable.")
]
RequiredSlices = Annotated[
    list[str] | None, typer.Option("--slice", metavar="NAME", help="Only this slice, or `all`, must PASS; repeatable.")
]
JunitFile = Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML.")]
MarkdownFile = Annotated[
    Path | None, typer.Option("--markdown", metavar="FILE", help="Write Markdown, as to $GITHUB_STEP_SUMMARY.")
]
EvidenceFile = Annotated[
    Path | None, typer.Option("--evidence", metavar="FILE_OR_DIR", help="Write the evidence, for `gate verify`.")
]


def run(
    contract: ContractFile,
    recordings: Annotated[
        list[str],
        typer.Argument(
            metavar="RECORDING...", help="Recordings of both kernels, or files of a trainer; each a window."
        ),
    ],
    kernel: KernelFields = None,
    require: Required = None,
    slice: RequiredSlices = None,
    columns: Columns = None,
    attribute: SequenceAttributes = None,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Use bounds that hold however often you record more and judge again.")
    ] = False,
    junit: JunitFile = None,
    markdown: MarkdownFile = None,
    evidence: EvidenceFile = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Judge recordings of both kernels for the stage offline-ci, as a CI job does.

    Exits with 0 to advance, 1 if the version fails, 3 to wait (undecided), 2 if an argument cannot be used.

    Examples:
      kc-otel gate run policy.yaml rollouts.npz
      kc-otel gate run policy.yaml rollouts.npz --junit gate.xml --evidence evidence
      kc-otel gate run policy.yaml rollouts.npz --kernel inference.version=0.32.0 --require token-tv
    """
    _judge(
        contract, lambda _kernels, _decided: recordings, kernel, require, slice, junit, markdown, evidence, url,
        inputs=recordings, columns=columns, sequential=sequential, attribute=attribute,
    )  # fmt: skip


def live(
    contract: ContractFile,
    inference_url: Annotated[
        str, typer.Option(help="OpenAI-compatible endpoint to sample from; its key is in KC_OTEL_INFERENCE_API_KEY.")
    ],
    train_url: Annotated[
        str, typer.Option(help="Endpoint that scores the tokens (prompt_logprobs); key in KC_OTEL_TRAIN_API_KEY.")
    ],
    prompts: Annotated[
        Path,
        typer.Option(metavar="FILE.jsonl", help="Lines with prompt, prompt_token_ids or messages, and attributes."),
    ],
    inference_model: Annotated[
        str | None, typer.Option(help="Name of the model, if the endpoint serves several.")
    ] = None,
    train_model: Annotated[str | None, typer.Option(help="Name of the model, if the endpoint serves several.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Completions per prompt; more prompts tell more.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a completion.")] = 256,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="The recording (default: beside the evidence or temporary).")
    ] = None,
    stop: Annotated[
        bool, typer.Option("--stop/--all", help="Stop as soon as the gate is decided, or send every prompt.")
    ] = True,
    kernel: KernelFields = None,
    require: Required = None,
    slice: RequiredSlices = None,
    junit: JunitFile = None,
    markdown: MarkdownFile = None,
    evidence: EvidenceFile = None,
    url: Url = DEFAULT_URL,
) -> None:
    """Sample from one endpoint, score the same tokens with the other, and judge the resulting recording.

    Sends prompts in random order, and stops once the gate is decided. Exits with 0 to advance, 1 if the version fails,
    3 to wait (undecided), 2 if an argument cannot be used or a completion is missing.

    Examples:
      kc-otel gate live policy.yaml --inference-url http://fp8:8000 --train-url http://bf16:8000 --prompts prompts.jsonl
    """

    def recording(kernels: tuple[Kernel, Kernel], decided: Callable[[Recording], bool]) -> list[Path]:
        pair = EndpointPair(
            CompletionEndpoint("inference", inference_url, _key("INFERENCE")),
            CompletionEndpoint("train", train_url, _key("TRAIN")),
            kernels,
            inference_model,
            train_model,
            samples=samples,
            max_tokens=max_tokens,
        )
        beside = None if evidence is None else recording_beside(evidence)
        say = partial(print, file=sys.stderr, flush=True)
        try:
            return [record_endpoints(pair, prompts, record or beside, say, decided if stop else None, looks())]
        except IncompleteError as error:
            if error.recording is None:
                raise
            hint = f"to judge the rest anyway: kc-otel gate run {contract} {error.recording}"
            raise ValueError(f"{error}\n{hint}") from None

    _judge(
        contract, recording, kernel, require, slice, junit, markdown, evidence, url, inputs=[prompts], sequential=stop
    )


def verify(
    record: Annotated[Path, typer.Argument(metavar="EVIDENCE", help="File that a gate wrote, or its folder.")],
    recordings: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE_OR_DIR", help="Recordings to judge again, found by checksum; repeatable."),
    ] = None,
) -> None:
    """Verify evidence: its checksum, and that its verdicts follow from its numbers.

    With --recordings, or with the recording that `gate live` left beside the evidence, every number is recomputed from
    the files. Exits with 1 if a check fails.

    Examples:
      kc-otel gate verify evidence
      kc-otel gate verify evidence --recordings rollouts.npz
    """
    file = evidence_file(record)
    try:
        content = read_evidence(file)
        beside = recording_beside(file.parent if file.name == evidence_file(file.parent).name else file)
        if recordings := recordings or ([beside] if beside.exists() else []):
            files = (sorted(path.rglob("*")) if path.is_dir() else [path] for path in recordings)
            verify_recordings(content, [path for found in files for path in found if not path.is_dir()])
        else:
            verify_evidence(content)
    except OSError as error:
        refuse(f"{error.filename or file}: cannot be read ({error.strerror})")
    except ValueError as error:
        typer.echo(f"{file}: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{file}: sound" + (", and its recordings give the same verdicts" if recordings else ""))


def _key(side: str) -> str:
    return os.environ.get(f"KC_OTEL_{side}_API_KEY", "").strip()


def _judge(
    contract: str,
    recordings: Callable[[tuple[Kernel, Kernel], Callable[[Recording], bool]], Iterable[str | Path]],
    kernel: Sequence[str] | None,
    require: Sequence[str] | None,
    slices: Sequence[str] | None,
    junit: Path | None,
    markdown: Path | None,
    evidence: Path | None,
    url: str,
    *,
    inputs: Sequence[str | Path],
    columns: str | None = None,
    sequential: bool = False,
    attribute: Sequence[str] | None = None,
) -> None:
    """Judge, print, write what was asked for, and end the program with the decision's exit code.

    `recordings` returns files once the options are known to be good, given the kernels and whether a growing recording
    decides. Evidence and reports of an earlier gate are removed first: this one may end without a decision. Inputs
    stay, and so do reports that no gate wrote until there is a decision.
    """
    with unusable():
        read = files_of(filter(Path.exists, map(Path, [contract, *inputs])))
        for option, report in (("--junit", junit), ("--markdown", markdown)):
            if report is not None and report.exists() and any(map(report.samefile, read)):
                raise ValueError(f"{option}: {report} is an input of this command; name another file")
        if evidence is not None:
            remove_evidence(evidence)
        for report in (junit, markdown):
            if report is not None and report.is_file() and gate_report.is_report(report.read_text(errors="replace")):
                report.unlink()
    with unusable():
        checked = check(contract)
        promise, text = checked.sound(), checked.text
        named, attributes = columns_of(columns), attributes_of(attribute or ())
        terms = GateTerms(tuple(require or ()), tuple(slices or ()), named, sequential, attributes)
        kernels = _kernels(promise, kernel or (), url)
        check_terms(promise, terms)
        given = recordings(kernels, lambda so_far: decides(promise, so_far, kernels, terms))
        paths = [file for path in given for file in files_of([Path(path)])]
        if not paths:
            raise ValueError(f"{', '.join(map(str, given))}: holds no recording and no file of a trainer")
        loaded = [read_input(path, terms) for path in paths]
        # Evidence keeps milliseconds, and is judged again at the time that it keeps.
        gate = gate_recordings(promise, loaded, kernels, terms, round(time.time(), 3))
    with unusable(files="written"):
        written = _write(gate, text, junit, markdown, evidence)
    said = (f"  {line}" for line in gate_report.lines(gate))
    show((f"{gate.decision.outcome}: {gate_report.headline(gate)}", *said, *written))
    raise typer.Exit(_EXIT[gate.decision.outcome])


def _kernels(contract: Contract, texts: Sequence[str], url: str) -> tuple[Kernel, Kernel]:
    """Both kernels: what the contract declares, and what is said on top of it; ValueError if they contradict."""
    names = [field.name for field in fields(Kernel) if field.init and field.name not in {"extra", "_"}]
    given, specs = pairs("--kernel", texts), {"train": contract.kernels.train, "inference": contract.kernels.inference}
    sides = {
        side: (_reported(contract, side, given[side], url) if side in given else Kernel.declared(spec)).to_plain()
        for side, spec in specs.items()
    }
    for name, value in given.items():
        side, _, field = name.partition(".")
        if side not in sides:
            raise ValueError(
                f"--kernel: {name!r} does not name a side; write train.FIELD=VALUE or inference.FIELD=VALUE"
            )
        plain = sides[side]
        if name == side:
            continue
        if field in names:
            plain[field] = value
        elif field.startswith("extra.") and field != "extra.":
            plain.setdefault("extra", {})[field.removeprefix("extra.")] = value
        else:
            raise ValueError(
                f"--kernel: {field!r} is none of {', '.join(names)}; write extra.{field or 'NAME'} for another"
            )
    train, inference = (Kernel(**plain) for plain in sides.values())
    for side, kernel in (("train", train), ("inference", inference)):
        if said := declared_otherwise(specs[side], kernel.fields()):
            raise ValueError(f"--kernel: {side}: {'; '.join(said)}; {OTHERWISE_REMEDY}")
    if train == inference and declared_apart(contract.kernels):
        raise ValueError(f"--kernel: {ONE_KERNEL} ({train.fingerprint}); {OTHERWISE_REMEDY}")
    return train, inference


def _reported(contract: Contract, side: str, version: str, url: str) -> Kernel:
    """The kernel of a fingerprint, by what it has reported to the evaluator."""
    served = [entry for entry in get(url, "/api/v1/contracts")["contracts"] if entry["name"] == contract.name]
    known = [kernel for entry in served for kernel in entry["kernels"] if kernel["role"] == side]
    found = [kernel["fields"] for kernel in known if kernel["version"] == version]
    if not found:
        listed = ", ".join(kernel["version"] for kernel in known) or "none"
        raise ValueError(f"--kernel: no {side} kernel {version} of {contract.name} has reported to {url}; {listed} has")
    kernel = Kernel.reported(found[0])
    if kernel.fingerprint != version:  # a field that was no text, or longer than an evaluator keeps
        raise ValueError(f"--kernel: what {version} reported does not match its fingerprint; write {side}.FIELD=VALUE")
    return kernel


def _write(
    gate: OfflineGate, contract: str, junit: Path | None, markdown: Path | None, evidence: Path | None
) -> list[str]:
    if junit is not None:
        write_text(junit, gate_report.junit(gate))
    summary = gate_report.markdown(gate)
    if markdown is not None:
        write_text(markdown, summary)
    if os.environ.get(_SUMMARY_VARIABLE):
        with Path(os.environ[_SUMMARY_VARIABLE]).open("a", encoding="utf-8") as file:
            file.write(summary + "\n")
    if evidence is None:
        return []
    record = json.dumps(offline_evidence(gate, contract), indent=2, sort_keys=True, allow_nan=False)
    write_text(evidence_file(evidence), record + "\n")
    return [f"evidence: {evidence_file(evidence)}"]
