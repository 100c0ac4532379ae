"""`kc-otel gate`: whether a kernel version may leave its stage, and whether evidence of that holds."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kc_otel.cli.api_client import DEFAULT_URL, Url
from kc_otel.cli.terminal import Columns, SequenceAttributes, refuse, table_lines, together, unusable
from kc_otel.contract.words import listed, spoken

if TYPE_CHECKING:
    from kc_otel.judge.promotion.plan import Planned
    from kc_otel.record.kernel import Kernel
    from kc_otel.recordings.recording import Recording


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
    list[str] | None,
    typer.Option("--slice", metavar="NAME", help="Only this slice must PASS, or `all` for all traffic; repeatable."),
]
JunitFile = Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML.")]
MarkdownFile = Annotated[
    Path | None,
    typer.Option("--markdown", metavar="FILE", help="Write Markdown; it also goes to $GITHUB_STEP_SUMMARY."),
]
EvidenceFile = Annotated[
    Path | None,
    typer.Option("--evidence", metavar="FILE_OR_DIR", help="Write the evidence here, for `kc-otel gate verify`."),
]


def run(
    contract: ContractFile,
    recordings: Annotated[
        list[str],
        typer.Argument(
            metavar="RECORDING...",
            help="Recordings of both kernels, each a window of its own: .npz, .jsonl or .parquet, or files that "
            "`import` reads.",
        ),
    ],
    kernel: KernelFields = None,
    require: Required = None,
    slice: RequiredSlices = None,
    windows: Annotated[int, typer.Option(min=1, help="Minimum number of recordings; each one given must PASS.")] = 1,
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
    from kc_otel.cli.gate_offline import gate_offline  # noqa: PLC0415 - a quick --help

    gate_offline(
        contract, lambda _kernels, _decided: recordings, kernel, require, slice, junit, markdown, evidence, url,
        windows=windows, columns=columns, sequential=sequential, attribute=attribute,
    )  # fmt: skip


def plan(
    contract: ContractFile,
    windows: Annotated[int, typer.Option(min=1, help="Consecutive windows that must PASS.")] = 3,
    tokens_per_second: Annotated[float | None, typer.Option(min=1e-9, help="Tokens generated per second.")] = None,
    sampling: Annotated[
        float | None,
        typer.Option(min=1e-9, max=1.0, help="Share of the traffic that is measured (default: the contract's)."),
    ] = None,
    tokens_per_sequence: Annotated[
        float | None, typer.Option(min=1.0, help="Tokens of a sequence (default: assumptions.horizon, the worst case).")
    ] = None,
    share: Annotated[
        list[str] | None,
        typer.Option(metavar="SLICE=SHARE", help="Share of the traffic on a slice, such as code=0.3; repeatable."),
    ] = None,
) -> None:
    """Print how many observations each clause needs, and how long that takes.

    Prints the best case (windows with identical kernels) and the typical case (a gate that stops once it is decided).
    Exits with 2 if the gate can never open or an argument cannot be used.

    Examples:
      kc-otel gate plan policy.yaml
      kc-otel gate plan policy.yaml --tokens-per-second 20000 --share code=0.3
    """
    from kc_otel.contract.load import load  # noqa: PLC0415 - a quick --help
    from kc_otel.contract.slices import ALL  # noqa: PLC0415
    from kc_otel.judge.promotion.plan import Traffic, plan_gate, shares_of  # noqa: PLC0415
    from kc_otel.judge.sample_sizes import typical_sizes  # noqa: PLC0415

    with unusable():
        loaded = load(contract)
        traffic = Traffic(
            tokens_per_second,
            sampling or loaded.observability.sampling,
            tokens_per_sequence or loaded.assumptions.horizon,
            {ALL: 1.0} | shares_of(loaded, share or []),
        )
    planned = plan_gate(loaded, traffic, windows)
    typer.echo(f"at best, with identical kernels and {windows} window{'s' * (windows != 1)}:")
    _print_rows(
        ("clause", "slice", "observations", "time"),
        ((cell.clause, cell.slice, _count(cell), _time(cell)) for cell in planned),
    )
    typer.echo("typically, until a gate that stops when it can (`gate live`) is decided:")
    _print_rows(
        ("clause", "slice", "PASS at half the limit", "at 80 %", "FAIL at twice", ""),
        (
            (row.clause, row.slice, *("-" if size is None else f"{size:,}" for size in row.sizes), f"{row.unit}s")
            for row in typical_sizes(loaded)
        ),
    )
    if never := together(((cell.clause, cell.why), cell.slice) for cell in planned if cell.never):
        refuse("\n".join(f"{clause} on {listed(on)} can never pass: {why}" for (clause, why), on in never.items()))
    for why in dict.fromkeys(cell.why for cell in planned if cell.why):
        typer.echo(f"no time: {why}")
    if timed := [(cell.seconds, cell) for cell in planned if cell.seconds is not None]:
        seconds, last = max(timed, key=lambda pair: pair[0])
        typer.echo(
            f"at {100 * traffic.sampling:g}% sampling this gate needs about {spoken(seconds)}; "
            f"{last.clause} on {last.slice} takes longest"
        )


def verify(
    record: Annotated[Path, typer.Argument(metavar="EVIDENCE", help="File that a gate wrote, or its folder.")],
    recordings: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE_OR_DIR", help="Recordings to judge again, found by checksum; repeatable."),
    ] = None,
) -> None:
    """Verify evidence: its checksum, and that its verdicts follow from its numbers.

    The contract and the recording beside the evidence must be those that it names. With --recordings, every number is
    recomputed from the files. Exits with 1 if a check fails.

    Examples:
      kc-otel gate verify evidence
      kc-otel gate verify evidence --recordings rollouts.npz
    """
    from kc_otel.judge.promotion.gate_evidence import EvidenceError  # noqa: PLC0415
    from kc_otel.offline.gate.evidence import (  # noqa: PLC0415
        beside_problems,
        evidence_file,
        read_evidence,
        verify_evidence,
        verify_recordings,
    )

    file = evidence_file(record)
    try:
        content = read_evidence(file)
        if recordings:
            files = (sorted(path.rglob("*")) if path.is_dir() else [path] for path in recordings)
            verify_recordings(content, [path for found in files for path in found if not path.is_dir()])
        else:
            verify_evidence(content)
        if problems := beside_problems(content, file):
            raise EvidenceError("; ".join(problems))
    except OSError as error:
        refuse(f"{error.filename or file}: cannot be read ({error.strerror})")
    except ValueError as error:
        typer.echo(f"{file}: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{file}: sound" + (", and its recordings give the same verdicts" if recordings else ""))


def _print_rows(header: Sequence[str], rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table; slices of a clause whose rows are alike have one row."""
    alike = together(((clause, *rest), slice) for clause, slice, *rest in rows)
    for line in table_lines(header, [(clause, listed(slices), *rest) for (clause, *rest), slices in alike.items()]):
        typer.echo(f"  {line}")


def _count(cell: Planned) -> str:
    if cell.observations is None:
        return "never"
    return f"{cell.observations:,} {cell.unit}{'s' * (cell.observations != 1)}"


def _time(cell: Planned) -> str:
    if cell.seconds is None:
        return "-"
    return "never" if cell.seconds == math.inf else f"about {spoken(cell.seconds)}"


def live(
    contract: ContractFile,
    inference_url: Annotated[
        str, typer.Option(help="OpenAI-compatible endpoint to sample from; its key is in KC_OTEL_INFERENCE_API_KEY.")
    ],
    train_url: Annotated[
        str,
        typer.Option(
            help="Endpoint that scores the same tokens, with vLLM's prompt_logprobs; its key is in "
            "KC_OTEL_TRAIN_API_KEY."
        ),
    ],
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE.jsonl",
            help="A JSON object per line: prompt, prompt_token_ids or messages; its other values are "
            "attributes for slices.",
        ),
    ],
    inference_model: Annotated[
        str | None, typer.Option(help="Name of the model, if the endpoint serves several.")
    ] = None,
    train_model: Annotated[str | None, typer.Option(help="Name of the model, if the endpoint serves several.")] = None,
    samples: Annotated[
        int,
        typer.Option(min=1, help="Completions per prompt; more prompts are more informative than more completions."),
    ] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of a completion.")] = 256,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer.")] = 120.0,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File for the recording (default: beside the evidence, or in a temporary folder that is kept).",
        ),
    ] = None,
    stop: Annotated[
        bool,
        typer.Option(
            "--stop/--all", help="Stop as soon as the gate is decided, in either direction, or send every prompt."
        ),
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
    from kc_otel.cli.gate_offline import gate_offline  # noqa: PLC0415
    from kc_otel.offline.gate.endpoint_recording import EndpointPair, IncompleteError, record_endpoints  # noqa: PLC0415
    from kc_otel.offline.gate.evidence import recording_beside  # noqa: PLC0415
    from kc_otel.recordings.endpoints.endpoint_client import CompletionEndpoint  # noqa: PLC0415

    def recording(kernels: tuple[Kernel, Kernel], decided: Callable[[Recording], bool]) -> list[Path]:
        pair = EndpointPair(
            CompletionEndpoint("inference", inference_url, _key("INFERENCE")),
            CompletionEndpoint("train", train_url, _key("TRAIN")),
            inference_model,
            train_model,
            samples=samples,
            max_tokens=max_tokens,
            concurrency=concurrency,
            timeout=timeout,
            versions=(kernels[0].version, kernels[1].version),
        )
        beside = None if evidence is None else recording_beside(evidence)
        try:
            return [record_endpoints(pair, prompts, record or beside, _say, decided if stop else None)]
        except IncompleteError as error:
            if error.recording is None:
                raise
            hint = f"to judge the rest anyway: kc-otel gate run {contract} {error.recording}"
            raise ValueError(f"{error}\n{hint}") from None

    gate_offline(contract, recording, kernel, require, slice, junit, markdown, evidence, url, sequential=stop)


def _key(side: str) -> str:
    return os.environ.get(f"KC_OTEL_{side}_API_KEY", "").strip()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
