"""`kc-otel gate run`, and the options that it shares with the other gates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from kc_otel.cli.api_client import DEFAULT_URL, Url
from kc_otel.cli.terminal import Columns, SequenceAttributes

EXIT: Final = {"advance": 0, "rollback": 1, "wait": 3}
"""Exit code of each outcome of a gate."""

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
            help="Recordings of both kernels, each a window of its own: .npz, .jsonl or .parquet, files that `import` "
            "reads, or two servers' saved responses as train=SCORED,inference=SAMPLED.",
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
